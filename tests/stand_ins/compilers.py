"""How tests and the demonstration get at the stand-in for neuronx-cc."""

import sys
from pathlib import Path

STAND_IN_CC = Path(__file__).parent / "neuronx-cc"


def compiler_environment(**changes: str) -> dict[str, str]:
    """The variables that make the product use the stand-in; `changes` tell it what to do."""
    return {"VLLM_NEURON_CC": str(STAND_IN_CC), "STAND_IN_PYTHON": sys.executable, **changes}
