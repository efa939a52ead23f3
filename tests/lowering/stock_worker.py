"""The lowering process with its own right shift taken out: torch-mlir's aborts on a broadcast."""

from __future__ import annotations

import sys

from vllm_neuron.lowering import native_worker
from vllm_neuron.lowering.ops import registry

if __name__ == "__main__":
    for overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor"):
        del registry._LOWERINGS[f"aten.bitwise_right_shift.{overload}"]
    native_worker.main(int(sys.argv[1]))
