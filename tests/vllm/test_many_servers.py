"""Several real servers that start together on one empty cache."""

from __future__ import annotations

import pytest

from benches.many_servers import check, start_together

pytestmark = pytest.mark.serve


def test_three_servers_on_one_cold_cache_compile_each_key_once_and_all_serve(checkpoint, tmp_path):
    """bugs C08, D02, D04; `python -m benches.many_servers` does it with eight."""
    starts = start_together(checkpoint("llama"), tmp_path, 3)
    check(starts, tmp_path / "cache")
