"""docs/operators.md is what the code says, as far as one model shows it."""

from __future__ import annotations

import pytest

from tests.model_operators import operators_of
from tests.model_worker import NAMES
from tests.operator_table import PAGE, operators_on, page


@pytest.mark.serve
def test_the_page_is_up_to_date(tmp_path):
    text = PAGE.read_text()
    assert f"{len(NAMES)} models ({', '.join(NAMES)})" in text
    for name, operators in operators_of(["gpt_oss"], tmp_path).items():
        assert operators_on(text, name) == operators, "run `python tests/operator_table.py`"


def test_a_page_tells_the_models_of_each_operator():
    operators = {
        "one": {"aten.add.Tensor": "arithmetic", "aten.mm.default": "torch-mlir"},
        "two": {"aten.add.Tensor": "arithmetic"},
        "three": {"aten.add.Tensor": "arithmetic", "aten.mm.default": "torch-mlir"},
        "four": {"aten.gelu.default": "torch-mlir"},
    }
    text = page(operators, {"aten.mm.default": {"test_c", "test_b", "test_a"}})
    assert "| `aten.add.Tensor` | arithmetic | all but four | models only |" in text
    assert "| `aten.mm.default` | torch-mlir | one, three | `test_a`, `test_b` and 1 more |" in text
    assert text == page(operators, {"aten.mm.default": {"test_a", "test_b", "test_c"}})
    for name, found in operators.items():
        assert operators_on(text, name) == found
