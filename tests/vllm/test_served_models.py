"""Models with attention sinks, windows, biased and grouped experts and latent attention.

`tests/run_models.py` runs all architectures; these two have between them what the other tests'
models have not.
"""

from __future__ import annotations

import pytest

from tests import rounding
from tests.run_models import run_model
from tests.vllm.engine import HOST


@pytest.mark.serve
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_greedy_text_equals_transformers(name, tmp_path):
    row = run_model(name, tmp_path, route="native")
    assert (row["status"], row["detail"]) == ("equal", "")


@pytest.mark.serve
def test_bfloat16_rounds_as_transformers_does(tmp_path):
    names = ["gemma3", "deepseek_v3"]
    figures = dict(rounding.measure_models(names, folder=tmp_path, settings=HOST))
    assert list(figures) == names
    for name, found in figures.items():
        assert isinstance(found, rounding.Rounding), f"{name}: {found}"
        assert found.is_within_bounds, f"{name}: {found}"
