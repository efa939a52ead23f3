"""One compilation per key and node: processes that race, die, stop, fail and wait."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.pipeline.flight_process import answer, calls, run
from tests.scale import scaled
from vllm_neuron import _core


def wait_for_calls(root: Path, count: int, *, timeout_s: float = 120) -> list[dict]:
    deadline = time.monotonic() + timeout_s
    while len(found := calls(root)) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def wait_for_waiter(process: subprocess.Popen[str]) -> str:
    """The log line by which a process says that it waits."""
    for line in process.stderr:
        if "Waiting for shared compilation" in line:
            return line
    raise AssertionError("the process ended without waiting")


def test_eight_processes_compile_a_key_once_d02_c08_d04(tmp_path):
    """bugs C08, D02, D04: with a slow compiler all load what one of them compiled."""
    task = {"root": str(tmp_path), "keys": ["b1", "b2"], "seconds": 1, "threads": 2}
    answers = [answer(process)[0] for process in [run(task) for _ in range(8)]]
    assert sorted(call["key"] for call in calls(tmp_path)) == ["b1", "b2"]
    for key in ("b1", "b2"):
        found = [one["found"][key] for one in answers]
        assert len({one["digest"] for one in found}) == 1
        assert sum(not one["hit"] for one in found) == 1
    assert sum(one["waits"] for one in answers) > 0


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_killed_holder_is_replaced_at_once_c01(tmp_path, seconds):
    """bugs C01, C11: and nothing of it is in the way."""
    task = {"root": str(tmp_path), "keys": ["b"], "seconds": 60}
    holder = run(task)
    wait_for_calls(tmp_path, 1)
    waiters = [run({**task, "seconds": 0}) for _ in range(3)]
    line = wait_for_waiter(waiters[0])
    assert f"by process {holder.pid} (b)" in line
    time.sleep(seconds)
    holder.kill()
    killed = time.monotonic()
    answers = [answer(waiter)[0] for waiter in waiters]
    assert time.monotonic() - killed < 5
    assert len(calls(tmp_path)) == 2
    assert len({one["found"]["b"]["digest"] for one in answers}) == 1
    holder.communicate()


def test_a_live_holder_is_waited_for_beyond_the_limit_t12(tmp_path):
    task = {"root": str(tmp_path), "keys": ["b"], "seconds": 4, "timeout_s": 1}
    holder = run(task)
    wait_for_calls(tmp_path, 1)
    waiter, _ = answer(run(task))
    assert waiter["found"]["b"]["hit"]
    assert waiter["waited_s"] > 2
    assert len(calls(tmp_path)) == 1
    answer(holder)


def test_a_suspended_holder_is_waited_for_to_the_limit_d08_t12(tmp_path):
    """bugs D08: then the waiter compiles privately and says why."""
    task = {"root": str(tmp_path), "keys": ["b"], "seconds": 2, "timeout_s": 2}
    holder = run(task)
    wait_for_calls(tmp_path, 1)
    holder.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        found, log = answer(run({**task, "seconds": 0}))
        assert 2 <= time.monotonic() - started < 10
        assert not found["found"]["b"]["hit"]
        assert "WARNING" in log
        assert f"s in {tmp_path}/cache: process {holder.pid} (b) on " in log
        assert "Shared compilation timeout after 2 s" in log
        assert "gave no sign of life since 20" in log
    finally:
        holder.send_signal(signal.SIGCONT)
    # The holder wakes up, finds its key taken, and is as right as before.
    first, _ = answer(holder)
    third, _ = answer(run(task))
    assert third["found"]["b"] == {"hit": True, "digest": found["found"]["b"]["digest"]}
    assert "digest" in first["found"]["b"]
    assert len(calls(tmp_path)) == 2


def test_a_failure_reaches_every_waiter_and_no_later_start_d04(tmp_path):
    """bugs D04, spec CC-60, CC-64: with the compiler's own words; failures are never kept."""
    words = "[NCC_EOOM001] 30 GB needed, 24 GB there; killed"
    task = {"root": str(tmp_path), "keys": ["b"], "seconds": 4, "failure": words}
    holder = run(task)
    wait_for_calls(tmp_path, 1)
    waiters = [run(task) for _ in range(5)]
    for waiter in waiters:
        wait_for_waiter(waiter)
    failed = [answer(process)[0]["found"]["b"] for process in [holder, *waiters]]
    assert len(calls(tmp_path)) == 1
    for one in failed:
        assert (one["class"], one["exit_code"], one["reason"]) == ("CompileError", 70, words)
        assert one["error"].startswith(f"bucket b: neuronx-cc exited with status 70: {words}")
    for one in failed[1:]:
        assert one["error"].endswith(f"(compiled by process {holder.pid} for all that waited)")
    store = _core.Store(str(tmp_path / "cache"))
    assert store.entries() == []
    again, _ = answer(run({"root": str(tmp_path), "keys": ["b"]}))
    assert again["found"]["b"]["hit"] is False
    assert len(calls(tmp_path)) == 2


def test_failures_are_never_kept_and_nobody_hangs_on_them(tmp_path):
    """Four processes race for keys whose compilation fails at once."""
    names = [f"b{number}" for number in range(scaled(50))]
    task = {"root": str(tmp_path), "keys": names, "seconds": 0.01, "failure": "no", "threads": 2}
    for process in [run(task) for _ in range(4)]:
        found = answer(process)[0]["found"]
        assert {found[name]["class"] for name in names} == {"CompileError"}
    # Each key was tried, by one process for those that waited or by each that came too late.
    tried = [call["key"] for call in calls(tmp_path)]
    assert set(tried) == set(names)
    assert len(tried) <= 4 * len(names)
    assert _core.Store(str(tmp_path / "cache")).entries() == []


def test_the_node_runs_as_many_compilers_as_it_may_t17(tmp_path):
    """bugs M10, IS-26: the limit holds over processes, and so does what it allows."""
    tasks = [
        {
            "root": str(tmp_path),
            "keys": [f"{process}-{number}" for number in range(3)],
            "seconds": 0.4,
            "threads": 3,
            "workers": 2,
        }
        for process in range(3)
    ]
    for process in [run(task) for task in tasks]:
        answer(process)
    spans = [json.loads(line) for line in (tmp_path / "ends").read_text().splitlines()]
    assert len(spans) == 9
    most = max(
        sum(other["begin"] <= span["begin"] < other["end"] for other in spans) for span in spans
    )
    assert most == 2


def test_processes_of_two_pid_namespaces_d14_t11(tmp_path):
    """bugs D14: containers share a directory, and their process ids are equal."""
    container = ("unshare", "--user", "--map-root-user", "--uts", "--pid", "--fork")
    task = {"root": str(tmp_path), "keys": ["b"], "seconds": 1.5}
    processes = [run(task, prefix=container) for _ in range(3)]
    found = [answer(process)[0]["found"]["b"] for process in processes]
    assert len(calls(tmp_path)) == 1
    assert len({one["digest"] for one in found}) == 1


def test_every_start_ends_well_while_somebody_wipes_the_cache_d11(tmp_path):
    """bugs D11: `rm -rf` in a loop costs compilations, never an answer."""
    task = {"root": str(tmp_path), "keys": [f"b{n}" for n in range(6)], "seconds": 0.05}
    processes = [run(task) for _ in range(4)]
    while any(process.poll() is None for process in processes):
        subprocess.run(f"rm -rf {tmp_path}/cache/*", shell=True, check=False, capture_output=True)
    for process in processes:
        found, _ = answer(process)
        assert all("digest" in one for one in found["found"].values())


def test_an_entry_is_of_one_writer_d01(tmp_path):
    """bugs D01: two writers with different, valid results; record and NEFF are of one of them."""
    task = {"root": str(tmp_path), "keys": ["b"], "seconds": 1, "timeout_s": 1}
    holder = run(task)
    wait_for_calls(tmp_path, 1)
    holder.send_signal(signal.SIGSTOP)
    other = run({**task, "seconds": 0})
    wait_for_calls(tmp_path, 2)
    holder.send_signal(signal.SIGCONT)
    for process in (holder, other):
        answer(process)
    store = _core.Store(str(tmp_path / "cache"))
    (info,) = store.entries()
    entry = store.get("neff", info.key)
    writer = json.loads(bytes(entry.section("record")))["writer"]
    neff = _core.Neff.parse(entry.section("neff"))
    assert int(neff.member("writer")) == writer
    assert writer in (holder.pid, other.pid)
