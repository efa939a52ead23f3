"""Where NEFF files for tests lie."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Real files lie outside the repository, because they hold a vendor's code.
SHARED = Path(os.environ.get("VLLM_NEURON_SHARED", REPOSITORY.parent / "shared"))
REAL = sorted((SHARED / "neff-samples").glob("*.neff"))
# Written by our own writer: test_writer.py.
GOLDEN = sorted((REPOSITORY / "tests" / "golden" / "neff").glob("*.neff"))
