"""The memory budget of the KV cache (spec VI-8), and what a worker says of its errors."""

from __future__ import annotations

import logging

import pytest

from vllm_neuron.errors import CompileError
from vllm_neuron.vllm.worker import GIB, _errors_logged, kv_cache_budget


def budget(**changes):
    return kv_cache_budget(
        **{
            "device_memory": 16 * GIB,
            "gpu_memory_utilization": 0.5,
            "model_bytes": 1 * GIB,
            "cap_fraction": 0.3,
            "minimum_gib": 1.0,
            **changes,
        }
    )


def test_at_most_the_cap_of_the_total():
    assert budget() == int(8 * GIB * 0.3)
    assert budget(cap_fraction=0.5) == 4 * GIB


def test_what_the_model_leaves():
    assert budget(model_bytes=6 * GIB) == 2 * GIB
    assert budget(cap_fraction=1.0) == 7 * GIB


def test_below_the_minimum():
    with pytest.raises(RuntimeError) as caught:
        budget(model_bytes=int(7.5 * GIB))
    assert str(caught.value) == (
        "Computed KV cache budget is below minimum threshold: 0.50 GiB < 1 GiB (device memory "
        "16.00 GiB * gpu_memory_utilization 0.5 - model 7.50 GiB, at most 0.3 of the total). Raise "
        "--gpu-memory-utilization or VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION, lower "
        "VLLM_NEURON_MIN_KV_BUDGET_GIB, set --kv-cache-memory-bytes, or serve a smaller model."
    )
    assert budget(model_bytes=int(7.5 * GIB), minimum_gib=0.5) == GIB // 2
    with pytest.raises(RuntimeError, match=r"-1\.00 GiB < 1 GiB"):
        budget(model_bytes=9 * GIB)


def test_an_error_is_logged_where_it_happens(caplog):
    error = CompileError(
        "bucket decode_b4: neuronx-cc failed: out of memory",
        bucket="decode_b4",
        command=None,
        exit_code=70,
        log_path=None,
        reason="out of memory",
    )
    with pytest.raises(CompileError) as caught, _errors_logged():
        raise error
    assert caught.value is error
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.ERROR, "CompileError: bucket decode_b4: neuronx-cc failed: out of memory")
    ]
