"""What the last start on a cache root found and missed, kept for `vllm-neuron cache why`.

`<root>/neuron/last_start.json`: written by rename at the end of a start, also of one that failed;
of several starts on one root the last one stays. Imports neither torch nor vllm.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_neuron.cache.explain import Miss

__all__ = ["read_report", "report_path", "write_report"]


def report_path(cache_root: Path) -> Path:
    """Where the report of a cache root is."""
    return cache_root / "neuron" / "last_start.json"


def write_report(
    path: Path,
    *,
    description: Mapping[str, Any],
    counters: Mapping[str, Any],
    misses: Mapping[str, Mapping[str, Miss]],
    error: str | None,
) -> None:
    """Write a report. One that cannot be written is only missing.

    Args:
        path: of `report_path`.
        description: what was started, such as its model.
        counters: what it did.
        misses: by cache ("trace", "neff") and bucket.
        error: why it failed, if it did.
    """
    report = {
        "time_s": time.time(),
        "pid": os.getpid(),
        **description,
        "counters": dict(counters),
        "error": error,
        "misses": [
            {"kind": kind, "bucket": bucket, "key": miss.key.hex, "reasons": list(miss.reasons)}
            for kind, found in misses.items()
            for bucket, miss in found.items()
        ],
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps(report, indent=1))
        temporary.replace(path)


def read_report(path: Path) -> dict[str, Any] | None:
    """Return the report of the last start, or None if there is none.

    Raises:
        ValueError: what is there is not a report.
    """
    try:
        report = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(report, dict) or not isinstance(report.get("misses"), list):
        raise ValueError(f"{path} is not the report of a start")
    return report
