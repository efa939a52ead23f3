"""Counters of the steps of a running server: executions of each bucket, and padding.

A worker counts into a mapped file of 64-bit floats, which costs a step no system call; the process
that answers `/metrics` reads the file whenever it is asked. A value is written at once (8 aligned
bytes); two values of a row may be of one step apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

__all__ = ["Histogram", "StepCounters", "padding_metric", "read_steps"]

logger = logging.getLogger(__name__)

#: Upper bounds of the two histograms, by name of the metric.
BOUNDS = {
    "num_seqs_padding": tuple(2**power for power in range(8)),
    "num_batched_tokens_padding": tuple(2**power for power in range(5, 15)),
}
#: Columns of a row: executions, sum of padding, then a count per bound and one above them all.
_EXECUTIONS, _SUM, _COUNTS = 0, 1, 2
_COLUMNS = _COUNTS + max(map(len, BOUNDS.values())) + 1


def padding_metric(bucket: str) -> str:
    """Name the histogram of a bucket: of sequences if it decodes or verifies, else of tokens."""
    by_sequence = bucket.startswith(("decode", "verify"))
    return "num_seqs_padding" if by_sequence else "num_batched_tokens_padding"


class StepCounters:
    """Counts the steps of one rank.

    Args:
        path: the file to count into; replaced if it is there.
        buckets: names of the buckets, which are the rows in this order.

    Raises:
        OSError: the file cannot be written in full.
    """

    def __init__(self, path: Path, buckets: Sequence[str]) -> None:
        self._bounds = [np.array(BOUNDS[padding_metric(bucket)]) for bucket in buckets]
        self._rows = {bucket: row for row, bucket in enumerate(buckets)}
        empty = np.zeros((len(buckets), _COLUMNS))
        # Written before it is mapped: a store into a page that the disk has no room for is fatal.
        path.write_bytes(empty.tobytes())
        self._values = np.memmap(path, np.float64, "r+", shape=empty.shape)

    def count(self, bucket: str, padding: int) -> None:
        """Count a step of a bucket and the sequences or tokens that it was padded with."""
        row = self._rows[bucket]
        values = self._values[row]
        values[_COUNTS + self._bounds[row].searchsorted(padding)] += 1
        values[_SUM] += padding
        values[_EXECUTIONS] += 1


@dataclass(frozen=True, slots=True)
class Histogram:
    """Padding of one bucket.

    Attributes:
        metric: its name without the prefix.
        bucket: name of the bucket.
        executions: how often the bucket ran.
        total: sum of the padding.
        counts: how many steps had at most each bound, and how many there were.
    """

    metric: str
    bucket: str
    executions: float
    total: float
    counts: tuple[float, ...]

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            self.metric,
            self.bucket,
            self.executions + other.executions,
            self.total + other.total,
            tuple(map(sum, zip(self.counts, other.counts, strict=True))),
        )

    def labelled_counts(self) -> list[tuple[str, float]]:
        """The counts with their bounds, as Prometheus wants them."""
        bounds = [*map(str, map(float, BOUNDS[self.metric])), "+Inf"]
        return list(zip(bounds, self.counts, strict=True))


def read_steps(path: Path, buckets: Sequence[str]) -> Iterator[Histogram]:
    """Read what `StepCounters` counts; a file that is gone or of other buckets has nothing."""
    try:
        values = np.fromfile(path, np.float64)
    except OSError:
        return
    if values.size != len(buckets) * _COLUMNS:
        return
    for bucket, row in zip(buckets, values.reshape(-1, _COLUMNS), strict=True):
        metric = padding_metric(bucket)
        counts = row[_COUNTS : _COUNTS + len(BOUNDS[metric]) + 1].tolist()
        yield Histogram(metric, bucket, row[_EXECUTIONS], row[_SUM], tuple(accumulate(counts)))
