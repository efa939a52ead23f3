"""The server fixture against a real server: readiness, requests, log, stop, kill, failed starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.serving import SMALL, Server, ServerFailedError, server_environment

pytestmark = pytest.mark.serve


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; what ended may wait for its parent's notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_server_answers_stops_and_leaves_nothing(checkpoint, tmp_path):
    folder = checkpoint("llama")
    # Not forked: a forked engine holds the port, over which vLLM 0.32 can trip while it ends.
    server = Server(folder, cache_root=tmp_path / "cache", folder=tmp_path)
    with server:
        prompt = [77, 74, 81, 81, 84]
        answer = server.complete(prompt, max_tokens=8, ignore_eos=True, return_token_ids=True)
        (expected,) = models.greedy(folder, [prompt], tokens=8)
        assert answer["choices"][0]["token_ids"] == expected
        bodies = [{"prompt": [9, i], "max_tokens": 3, "ignore_eos": True} for i in range(6)]
        together = [a["choices"][0]["text"] for a in server.complete_all(bodies)]
        assert together == [server.complete(**b)["choices"][0]["text"] for b in bodies]
        streamed = "".join(server.chat_stream("hi", max_tokens=5))
        assert server.chat("hi", max_tokens=5)["choices"][0]["message"]["content"] == streamed
        assert "vllm:num_requests_running" in server.metrics()
        assert server.post("/v1/completions", {"model": "absent"}).status_code in (400, 404)
        pids = server.pids()
        assert len(pids) >= 2, "API server and engine"
        assert any("non-default args" in message for message in server.messages("INFO"))
        assert server.stop() == 0
    assert server.pids() == []
    assert not any(runs(pid) for pid in pids)


def test_failed_start_shows_the_log(checkpoint, tmp_path):
    server = Server(
        checkpoint("llama"),
        cache_root=tmp_path / "cache",
        folder=tmp_path,
        arguments=(*SMALL, "--max-num-seqs", "0"),
    )
    with pytest.raises(ServerFailedError, match="max_num_seqs") as caught, server:
        pytest.fail("the server became ready")
    assert caught.value.exit_code == 1
    assert str(server.log_path) in str(caught.value)
    assert server.pids() == []


def test_settings_of_the_caller_do_not_leak(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_NEURON_BACKEND", "vllm_neuron")
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O3")
    monkeypatch.setenv("TORCH_CACHING_PRECOMPILE", "0")
    environment = server_environment({"VLLM_NEURON_DEVICE": None}, cache_root=tmp_path)
    product = {
        k: v for k, v in environment.items() if k.startswith(("VLLM_NEURON", "NEURON", "TORCH"))
    }
    assert product == {"VLLM_NEURON_BACKEND": "neuron_native"}
