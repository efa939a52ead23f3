"""Where real NEFF files lie: outside the repository, because they hold a vendor's code."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("VLLM_NEURON_SHARED", REPOSITORY.parent / "shared"))
SAMPLES = sorted((SHARED / "neff-samples").glob("*.neff"))
