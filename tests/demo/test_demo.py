"""`make demo`: what it prints, what it exits with, and that it leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serving import SETTINGS

ROOT = Path(__file__).resolve().parents[2]


def start(model: Path, folder: Path) -> subprocess.Popen[str]:
    """Start the demonstration in a process group of its own, as a shell does."""
    return subprocess.Popen(
        [sys.executable, "-m", "demo.serve", "--model", str(model), "--folder", str(folder)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not SETTINGS.match(k)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def servers(folder: Path) -> list[int]:
    """Return the processes whose caches are in a folder."""
    setting = f"VLLM_CACHE_ROOT={folder}/cache".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if setting in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # Gone meanwhile.
    return found


@pytest.mark.serve
def test_cold_and_warm_side_by_side(checkpoint, tmp_path):
    done = start(checkpoint("llama"), tmp_path)
    output, _ = done.communicate(timeout=600)
    assert done.returncode == 0, output
    rows = dict(re.findall(r"^  (\S+(?: \S+)?) +(\S+(?: s)? +\S+(?: s)?)$", output, re.M))
    graphs, again = rows["graphs"].split()
    assert graphs == again != "0"
    for work in ("traced", "lowered", "compiled"):
        assert rows[work].split() == [graphs, "0"], work
    assert output.count("  completion: ") == output.count("  chat:       ") == 2
    assert "Both starts gave the same answers" in output
    assert "they say nothing about the speed of a Trainium" in output
    assert servers(tmp_path) == []


@pytest.mark.serve
def test_interrupt_leaves_no_process(checkpoint, tmp_path):
    demo = start(checkpoint("llama"), tmp_path)
    deadline = time.monotonic() + 300
    # API server and engine: the second one is what is easily left behind.
    while len(servers(tmp_path)) < 2:
        assert demo.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(demo.pid, signal.SIGINT)
    output, _ = demo.communicate(timeout=300)
    assert demo.returncode == 1
    assert "demo: interrupted, the server is stopped" in output
    assert servers(tmp_path) == []


@pytest.mark.serve
def test_a_server_that_does_not_start(checkpoint, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "llama"}')
    done = start(model, tmp_path)
    output, _ = done.communicate(timeout=300)
    assert done.returncode == 1
    assert "demo failed: the server ended with exit code 1 before it was ready" in output
    (log,) = tmp_path.glob("server-*.log")
    assert f"The log is {log}; its end:" in output
    assert "NoSuchModel" in output
    assert servers(tmp_path) == []


def test_a_folder_without_a_checkpoint(tmp_path):
    done = start(tmp_path / "absent", tmp_path)
    output, _ = done.communicate(timeout=300)
    assert done.returncode == 1
    assert f"{tmp_path / 'absent'}: no checkpoint, it has no config.json" in output
