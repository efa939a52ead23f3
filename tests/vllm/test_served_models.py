"""Models with attention sinks, windows, biased and grouped experts and latent attention.

`tests/run_models.py` runs all architectures; these two have between them what the other tests'
models have not.
"""

from __future__ import annotations

import pytest

from tests.run_models import run_model


@pytest.mark.serve
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_greedy_text_equals_transformers(name, tmp_path):
    row = run_model(name, tmp_path, route="native")
    assert (row["status"], row["detail"]) == ("equal", "")
