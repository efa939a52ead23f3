"""Restarts of real servers: what the second start does again, and what it says about it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving import SMALL, Server
from vllm_neuron import _core

pytestmark = pytest.mark.serve

PROMPT = "The quick brown fox"
GRAPHS = 5  # SMALL: prefill 128 and 256, decode 1, 2 and 4
PRECOMPILE = re.compile(
    r"Precompile Cache: (cold|partly warm|warm), loaded (\d+) of (\d+) graphs, "
    r"traced (\d+) in \d+\.\d s"
)
COMPILATION = re.compile(
    r"Compilation cache: (\d+) of (\d+) graphs from the cache, lowered (\d+) in \d+\.\d s, "
    r"compiled (\d+) in \d+\.\d s"
)


def summary(server: Server) -> dict[str, object]:
    """Return what the server's two summary lines count; each must be there once."""
    messages = server.messages("INFO")
    precompile = [match for line in messages if (match := PRECOMPILE.fullmatch(line))]
    compilation = [match for line in messages if (match := COMPILATION.fullmatch(line))]
    assert (len(precompile), len(compilation)) == (1, 1), messages
    state, loaded, graphs, traces = precompile[0].groups()
    _, _, lowerings, compilations = compilation[0].groups()
    return {
        "state": state,
        "loaded": int(loaded),
        "graphs": int(graphs),
        "traces": int(traces),
        "lowerings": int(lowerings),
        "compilations": int(compilations),
    }


def expected(
    state: str, *, traces: int = 0, lowerings: int = 0, compilations: int = 0, loaded=None
):
    return {
        "state": state,
        "loaded": GRAPHS - traces,
        "graphs": GRAPHS,
        "traces": traces,
        "lowerings": lowerings,
        "compilations": compilations,
    }


COLD = expected("cold", traces=GRAPHS, lowerings=GRAPHS, compilations=GRAPHS)
WARM = expected("warm")


def answer(server: Server) -> list[int]:
    body = server.complete(PROMPT, max_tokens=12, ignore_eos=True, return_token_ids=True)
    return body["choices"][0]["token_ids"]


def entries(root: Path, kind: str) -> list[Path]:
    folder = root / "neuron" / ("precompile" if kind == "trace" else "compile_cache")
    return sorted(
        Path(info.path) for info in _core.Store(str(folder)).entries() if info.kind == kind
    )


@pytest.fixture
def started(serve: Callable[..., Server], checkpoint: Callable[[str], Path]):
    """Start a server on the test's cache root, ask it, stop it: counts, answer, messages."""

    def run(**options: object) -> tuple[dict[str, object], list[int], str]:
        model = options.pop("model", None) or checkpoint("llama")
        server = serve(model, fork=True, **options)
        counts, tokens = summary(server), answer(server)
        # Requests compile nothing.
        assert summary(server) == counts
        # Its exit code is for tests/test_serving.py: vLLM 0.32 can trip over its forked engine that
        # is just ending (psutil.ZombieProcess in find_process_using_port).
        server.stop()
        return counts, tokens, "\n".join(server.messages())

    return run


def test_second_and_third_start_do_nothing_again(started, tmp_path):
    cold, right, _ = started()
    assert cold == COLD
    for _ in range(2):
        warm, tokens, _ = started()
        assert warm == WARM
        assert tokens == right

    # One lost entry is the only thing that is done again.
    entries(tmp_path / "cache", "trace")[0].unlink()
    counts, tokens, _ = started()
    assert counts == expected("partly warm", traces=1)
    assert tokens == right

    neff = entries(tmp_path / "cache", "neff")[0]
    neff.unlink()
    counts, tokens, _ = started()
    assert counts == expected("warm", compilations=1)
    assert tokens == right

    # A truncated entry is a miss that says so, and is replaced.
    content = neff.read_bytes()
    neff.chmod(0o600)
    neff.write_bytes(content[: len(content) // 2])
    neff.chmod(0o400)
    counts, tokens, log = started()
    assert counts == expected("warm", compilations=1)
    assert tokens == right
    assert neff.name in log
    assert started()[0] == WARM


@pytest.mark.parametrize(
    ("first", "second", "redone", "reason"),
    [
        (
            {},
            {"arguments": (*SMALL, "-O1")},
            {"traces": GRAPHS, "compilations": GRAPHS},
            "level was 2, is 1",
        ),
        (
            {},
            {"arguments": tuple("bfloat16" if item == "float32" else item for item in SMALL)},
            {"traces": GRAPHS, "lowerings": GRAPHS, "compilations": GRAPHS},
            'float32","bfloat16',
        ),
        (
            {},
            {
                "arguments": (
                    *SMALL,
                    "--additional-config",
                    '{"neuron_config": {"num_seqs_buckets": [1, 3, 4], '
                    '"num_batched_tokens_buckets": [128, 256]}}',
                )
            },
            {"traces": 1, "lowerings": 1, "compilations": 1},
            "decode_b3",
        ),
    ],
    ids=["level", "dtype", "bucket list"],
)
def test_another_setting_is_cold_and_says_why(started, first, second, redone, reason):
    assert started(**first)[0] == COLD
    counts, _, log = started(**second)
    state = "cold" if redone["traces"] == GRAPHS else "partly warm"
    assert counts == expected(state, **redone)
    misses = [line for line in log.splitlines() if line.startswith("Precompile Cache: miss for ")]
    assert len(misses) == redone["traces"]
    for part in reason.split('","'):
        assert all(part in line for line in misses), misses
    assert started(**first)[0] == WARM, "the entries of the first setting are still there"


def test_without_the_route_variable_the_trace_is_not_kept(started, tmp_path):
    unset = {"VLLM_NEURON_BACKEND": None}
    cold, right, _ = started(environment=unset)
    assert cold == COLD
    again, tokens, log = started(environment=unset)
    assert again == expected("cold", traces=GRAPHS)
    assert tokens == right
    assert "Precompile Cache: off (VLLM_NEURON_BACKEND is not set)" in log.splitlines()
    assert entries(tmp_path / "cache", "trace") == []


def write_model_package(folder: Path, factor: int) -> None:
    """Write an installed-looking package whose model scales Llama's logits."""
    folder.mkdir(exist_ok=True)
    (folder / "scaled_llama.py").write_text(
        "from vllm.model_executor.models.llama import LlamaForCausalLM\n\n\n"
        "class ScaledLlama(LlamaForCausalLM):\n"
        "    def compute_logits(self, hidden_states):\n"
        f"        return super().compute_logits(hidden_states) * {factor}\n\n\n"
        "def register():\n"
        "    from vllm import ModelRegistry\n\n"
        "    ModelRegistry.register_model('ScaledLlama', 'scaled_llama:ScaledLlama')\n"
    )
    metadata = folder / "scaled_llama-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: scaled-llama\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nscaled_llama = scaled_llama:register\n"
    )


def test_an_edited_model_source_is_cold_and_says_why(started, checkpoint, tmp_path):
    model = tmp_path / "scaled"
    shutil.copytree(checkpoint("llama"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["ScaledLlama"]}))
    packages = tmp_path / "packages"
    options = {"model": model, "environment": {"PYTHONPATH": str(packages)}}

    write_model_package(packages, factor=2)
    cold, right, _ = started(**options)
    assert cold == COLD
    assert started(**options)[0] == WARM

    # Greedy answers of a negated model differ; the size of the file does not.
    write_model_package(packages, factor=-2)
    edited, tokens, log = started(**options)
    assert edited == COLD
    assert tokens != right
    assert "the source of scaled_llama changed" in log
    assert started(**options)[0] == WARM


def test_killed_while_compiling_the_next_start_works(started, checkpoint, tmp_path):
    for pattern in (r"Lowered prefill_s128", r"Stored compilation artifacts"):
        server = Server(
            checkpoint("llama"), cache_root=tmp_path / "cache", folder=tmp_path, fork=True
        )
        try:
            server.start()
            server.wait_for_log(pattern)
            server.kill()
        finally:
            server.close()
    counts, right, _ = started()
    assert counts["graphs"] == GRAPHS
    assert counts["compilations"] < GRAPHS, "what was published before the kill is used"
    warm, tokens, log = started()
    assert warm == WARM
    assert tokens == right
    assert "set aside" not in log
