"""Restarts of real servers: what the second start does again, and what it says about it."""

from __future__ import annotations

import re
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
        assert server.stop() == 0
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
    ],
    ids=["level", "dtype"],
)
def test_another_setting_is_cold_and_says_why(started, first, second, redone, reason):
    assert started(**first)[0] == COLD
    counts, _, log = started(**second)
    assert counts == expected("cold", **redone)
    misses = [line for line in log.splitlines() if line.startswith("Precompile Cache: miss for ")]
    assert len(misses) == redone["traces"]
    for part in reason.split('","'):
        assert all(part in line for line in misses), misses
    assert started(**first)[0] == WARM, "the entries of the first setting are still there"
