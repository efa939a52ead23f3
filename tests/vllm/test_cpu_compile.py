"""Compile on machine A, serve on machine B: every key that B asks for is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving import SMALL, Server
from tests.vllm.test_restarts import COLD, WARM, summary
from vllm_neuron import _core

pytestmark = pytest.mark.serve


def machine(name: str, user: int) -> list[str]:
    """A command in front of another one that gives it a host name and a user id of its own."""
    inside = f'hostname {name} && exec "$@"'
    return [
        *("unshare", "--user", f"--map-user={user}", f"--map-group={user}", "--keep-caps"),
        *("--uts", "sh", "-c", inside, "sh"),
    ]


def test_compile_on_one_machine_and_serve_on_another(
    checkpoint: Callable[[str], Path], tmp_path: Path
):
    """bugs B04, B07, B17, E08, G14, M11, spec T-10.

    B has a user, a home, a host name, a cache root and a way to the model of its own; strict.
    """
    model, shared = checkpoint("llama"), tmp_path / "shared"
    options = {"folder": tmp_path, "fork": True, "arguments": SMALL}
    compiling = Server(
        model,
        cache_root=tmp_path / "a" / "cache",
        environment={
            "VLLM_NEURON_CPU_COMPILE": "1",
            "NEURON_LIBTORCH_REMOTE_CACHE": str(shared),
            "VLLM_NEURON_CACHE_PROMOTE": "1",
        },
        **options,
    )
    link = tmp_path / "link"
    link.symlink_to(model)
    serving = Server(
        link,
        cache_root=tmp_path / "b" / "elsewhere",
        environment={
            "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1",
            "NEURON_LIBTORCH_REMOTE_CACHE": str(tmp_path / "mounted"),
        },
        **options,
    )
    for server, name, user in ((compiling, "machine-a", 12345), (serving, "machine-b", 54321)):
        home = tmp_path / name
        home.mkdir()
        server.environment["HOME"] = str(home)
        server.command = [*machine(name, user), *server.command]
    try:
        compiling.start()
        assert compiling.wait_exit() == 0, compiling.log_path.read_text()
        assert {**summary(compiling)} == COLD
        log = compiling.log_lines()
        assert any("Skipping full weight loading." in line for line in log)
        assert any("compiled for target host, nothing is run" in line for line in log)
        start = next(at for at, line in enumerate(log) if line.startswith("BUCKET"))
        rows = log[start + 1 : start + 6]
        assert all(re.fullmatch(r"\S+ +[0-9a-f]{32} +[0-9.]+ +\d+ +compiled", row) for row in rows)
        assert log[start + 6] == "5 of 5 graphs are in the caches"
        assert not re.search("Warm-up: ", "\n".join(log))

        shared.rename(tmp_path / "mounted")
        with serving:
            assert summary(serving) == WARM
            assert serving.complete("The quick", max_tokens=4)["usage"]["completion_tokens"] == 4
            messages = "\n".join(serving.messages())
            assert f"Remote cache {tmp_path}/mounted: remote hit 5/5 (NEFFs)" in messages
            assert f"Remote cache {tmp_path}/mounted: remote hit 5/5 (traces)" in messages
        assert list((tmp_path / "machine-b").rglob("neuron")) == []
    finally:
        compiling.close()
    # No entry knows where it was made.
    for info in _core.Store(str(tmp_path / "mounted")).entries():
        content = Path(info.path).read_bytes()
        for word in (b"machine-a", str(tmp_path).encode()):
            assert word not in content
