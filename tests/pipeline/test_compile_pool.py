"""The pool that compiles: order, width, progress, and its end by Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.pipeline.flight_process import REPOSITORY
from tests.pipeline.step_modules import CachedProjection, build, make_pipeline
from vllm_neuron import compile_pool
from vllm_neuron.compile_pool import Progress, Work, default_workers, run_largest_first
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.errors import CompileError

logger = logging.getLogger("vllm_neuron.tests.pool")


def progress(total: int, waiting: frozenset[str] = frozenset()) -> Progress:
    return Progress(total, waiting=waiting, logger=logger)


def test_the_largest_begins_first():
    begun: list[str] = []
    items = [
        Work(f"size {size}", size, lambda size=size: begun.append(f"size {size}"))
        for size in (3, 9, 1, 7)
    ]
    run_largest_first(items, workers=1, progress=progress(4), stop=lambda: None)
    assert begun == ["size 9", "size 7", "size 3", "size 1"]


def test_all_buckets_are_traced_before_the_first_is_compiled(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    build(make_pipeline(tmp_path, workers=1), CachedProjection(), batches=(2, 8, 4))
    lines = [record.getMessage() for record in caplog.records]
    steps = [line.split(" in ")[0] for line in lines if line.startswith(("Traced", "Lowered"))]
    assert steps == [
        *("Traced batch2", "Traced batch8", "Traced batch4"),
        *("Lowered batch8", "Lowered batch4", "Lowered batch2"),
    ]


def test_the_first_failure_ends_the_rest():
    stopped = threading.Event()
    begun: list[int] = []

    def fail() -> None:
        raise ValueError("first")

    def wait() -> None:
        begun.append(1)
        assert stopped.wait(10)

    items = [Work("bad", 9, fail), Work("long", 8, wait), *(Work("n", 1, wait) for _ in range(9))]
    with pytest.raises(ValueError, match="first"):
        run_largest_first(items, workers=2, progress=progress(11), stop=stopped.set)
    assert len(begun) <= 2


def test_a_line_says_how_far_it_is(caplog, monkeypatch):
    monkeypatch.setattr(compile_pool, "PROGRESS_INTERVAL_S", 0.2)
    caplog.set_level(logging.INFO)
    items = [Work(f"b{n}", 2 - n, lambda n=n: time.sleep(0.5 * n + 0.1)) for n in range(2)]
    shown = progress(3, frozenset({"b1"}))
    run_largest_first(items, workers=2, progress=shown, stop=lambda: None)
    lines = [record.getMessage() for record in caplog.records]
    assert "Compiling: 1 of 3 graphs done after 0 s, in work: b1 (0 s, waiting)" in lines


def test_a_terminal_has_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(compile_pool, "BAR_INTERVAL_S", 0.05)
    items = [Work("b0", 1, lambda: None), Work("b1", 0, lambda: time.sleep(0.3))]
    run_largest_first(items, workers=1, progress=progress(2), stop=lambda: None)
    written = capsys.readouterr().err
    bar = "#" * 12 + "-" * 12
    assert f"\r\x1b[KCompiling [{bar}] 1 of 2 graphs done after 0 s, in work: b1 (0 s)" in written
    assert written.endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("available_gib", "cpu", "memory", "workers"),
    [
        (128, None, None, 8),
        (33, None, None, 4),
        (1, None, None, 1),
        (128, "max 100000", "max", 8),
        (128, "50000 100000", None, 1),
        (128, "300000 100000", None, 3),
        (128, None, 9, 1),
        (128, None, 17, 2),
    ],
)
def test_the_limits_of_a_control_group_count_t17(
    tmp_path, monkeypatch, available_gib, cpu, memory, workers
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        f"MemTotal: {256 << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib << 20} kB\n"
    )
    if cpu is not None:
        (tmp_path / "cpu.max").write_text(cpu)
    if memory is not None:
        # 5 GiB are in use, all but a thousand bytes of them for files that can be read again.
        limit = memory if memory == "max" else str((memory << 30) + 1000)
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(str((5 << 30) + 1000))
        (tmp_path / "memory.stat").write_text(f"anon 1000\ninactive_file {5 << 30}\n")
    assert default_workers(tmp_path, meminfo) == workers


class StrangeCompiler(HostCompiler):
    def compile(self, module, *, bucket, **options):
        raise ZeroDivisionError("of its own")


def test_an_unexpected_exception_of_a_compiler_names_the_bucket(tmp_path):
    pipeline = make_pipeline(tmp_path, compiler=StrangeCompiler())
    with pytest.raises(CompileError) as caught:
        build(pipeline, CachedProjection(), batches=(2,))
    assert str(caught.value) == (
        "bucket batch2: the compiler xla-cpu failed: ZeroDivisionError: of its own"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def children(pid: int) -> dict[int, str]:
    """Command lines of the children of a process; those that end meanwhile are left out."""
    found = {}
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[child.pid] = " ".join(child.cmdline())
    return found


@pytest.mark.parametrize("work", ["native_worker", "sleep 300"])
def test_ctrl_c_stops_every_child(tmp_path, work):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.pipeline.interrupted_process", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 90
        found: dict[int, str] = {}
        while not any(work in line for line in found.values()):
            found = children(process.pid)
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        # To the process alone: a terminal would send it to the children too.
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "KeyboardInterrupt" in log
        for pid, line in found.items():
            assert not Path(f"/proc/{pid}").exists(), line
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
