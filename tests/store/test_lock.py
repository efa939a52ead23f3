"""Single flight: one process works, the others wait, and nobody waits for the dead."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import stat
import threading
import time

import pytest

from tests.scale import scaled
from tests.store.places import files_below, key_of, lock_of
from tests.store.processes import begun, ended, finish, forked, start
from vllm_neuron import _core

#: How often what depends on who comes first is done.
ROUNDS = scaled(50)

#: Takes the lock of argv[2] in the store argv[1], says so, and keeps it.
HOLD = """
lock = _core.Store(sys.argv[1]).lock(sys.argv[2], note="compile decode 8")
assert lock.acquire(10)
print("held", flush=True)
time.sleep(60)
"""


def holding(root, number=1):
    """Start a process that holds a lock."""
    child = start(HOLD, root, key_of(number))
    assert child.stdout.readline() == "held\n"
    return child


def test_lock_is_exclusive_and_says_who_holds_it(store, root):
    first, second = store.lock(key_of(1), note="compile decode 8"), store.lock(key_of(1))
    assert first.holder() is None
    assert first.acquire(0) is True
    assert first.acquire(0) is True
    assert (first.held, second.held) == (True, False)
    holder = second.holder()
    assert (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname())
    assert holder["note"] == "compile decode 8"
    assert abs(holder["time_s"] - time.time()) < 60
    assert len(holder["boot_id"]) == 36
    start_s = time.monotonic()
    assert second.acquire(0.1) is False
    assert 0.1 <= time.monotonic() - start_s < 5
    assert store.lock(key_of(2)).acquire(0) is True
    first.release()
    first.release()
    assert second.acquire(0) is True
    second.release()
    assert files_below(root) == []


def test_context_manager_and_drop_free_the_lock(store):
    with store.lock(key_of(1)) as lock:
        assert lock.held
        assert store.lock(key_of(1)).acquire(0) is False
    assert not lock.held
    forgotten = store.lock(key_of(1))
    assert forgotten.acquire(0)
    del forgotten
    assert store.lock(key_of(1)).acquire(0) is True


@pytest.mark.parametrize("timeout", [float("nan"), float("inf")])
def test_timeout_must_be_a_number_of_seconds(store, timeout):
    with pytest.raises(ValueError, match="timeout_s: expected seconds"):
        store.lock(key_of(1)).acquire(timeout)


#: Compiles each of argv[3] keys of the store argv[1] that is not there, under the key's lock.
COMPILE = """
store, log = _core.Store(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    key = "%064x" % number
    if store.get("neff", key) is None:
        with store.lock(key, note="compile"):
            if store.get("neff", key) is None:
                time.sleep(0.005)
                store.put("neff", key, {"neff": b"x" * 100000})
                os.write(log, b"%d\\n" % number)
    assert len(store.get("neff", key).section("neff")) == 100000
"""


@pytest.mark.parametrize("processes", [2, 8, 32])
def test_cold_processes_compile_each_key_once(root, tmp_path, processes):
    log = tmp_path / "log"
    log.touch()
    children = [start(COMPILE, root, log, ROUNDS, stdin=-1) for _ in range(processes)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        finish(child)
    assert sorted(map(int, log.read_text().split())) == list(range(ROUNDS))
    assert len(files_below(root)) == ROUNDS


def test_holders_killed_at_work_are_replaced_by_one_of_those_who_wait(store, root, tmp_path):
    done = os.open(tmp_path / "done", os.O_RDWR | os.O_APPEND | os.O_CREAT)

    def hold(number):
        assert store.lock(key_of(number)).acquire(10)
        os.write(done, b"held\n")
        time.sleep(60)

    def wait(number):
        with store.lock(key_of(number)):
            if store.get("neff", key_of(number)) is None:
                store.put("neff", key_of(number), {"neff": b"replacement"})
                os.write(done, b"compiled\n")

    generator = random.Random(10)
    for number in range(ROUNDS):
        os.ftruncate(done, 0)
        holder = begun(lambda number=number: hold(number))
        while (tmp_path / "done").read_text() == "":
            time.sleep(0.001)
        waiters = [begun(lambda number=number: wait(number)) for _ in range(2)]
        time.sleep(generator.random() * 0.02)
        os.kill(holder, signal.SIGKILL)
        for waiter in waiters:
            ended(waiter)
        os.waitpid(holder, 0)
        assert (tmp_path / "done").read_text() == "held\ncompiled\n"
    os.close(done)


def test_killed_holder_frees_the_lock(store, root):
    child = holding(root)
    lock = store.lock(key_of(1))
    assert lock.acquire(0) is False
    assert lock.holder()["pid"] == child.pid
    child.kill()
    child.wait()
    start_s = time.monotonic()
    assert lock.acquire(10) is True
    assert time.monotonic() - start_s < 5


def test_suspended_holder_is_not_waited_for_longer_than_asked(store, root):
    child = holding(root)
    try:
        child.send_signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        assert [store.lock(key_of(1)).acquire(0.01) for _ in range(ROUNDS)] == [False] * ROUNDS
        assert 0.01 * ROUNDS <= time.monotonic() - begin_s < ROUNDS
    finally:
        child.kill()
        child.wait()


def test_waiting_can_be_interrupted_and_lets_threads_run(store, root):
    child = holding(root)
    ticks, done = 0, threading.Event()

    def tick():
        nonlocal ticks
        while not done.wait(0.005):
            ticks += 1
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=tick)
    threading.Timer(0.3, done.set).start()
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.lock(key_of(1)).acquire()
    finally:
        thread.join()
        child.kill()
        child.wait()
    assert ticks > 5


def test_wiped_or_replaced_lock_file_does_not_stop_anyone(store, root):
    first, second = store.lock(key_of(1)), store.lock(key_of(1))
    assert first.acquire(0)
    shutil.rmtree(root / "v1")
    # The work is done twice, which is allowed; nobody waits for a lock without a name.
    assert second.acquire(1) is True
    first.release()
    assert lock_of(root, 1).exists()
    third = store.lock(key_of(1))
    assert third.acquire(0) is False
    second.release()
    assert third.acquire(0) is True


@pytest.mark.parametrize("kind", ["directory", "fifo", "symlink", "dangling", "socket"])
def test_something_else_in_the_place_of_a_lock_is_set_aside(store, root, tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = lock_of(root, 1)
    with store.lock(key_of(1)):
        pass
    {
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "symlink": lambda: path.symlink_to(victim),
        "dangling": lambda: path.symlink_to(tmp_path / "new"),
        "socket": lambda: os.mknod(path, stat.S_IFSOCK | 0o600),
    }[kind]()
    with store.lock(key_of(1)) as lock:
        assert lock.held
        assert path.is_file()
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()
    (aside,) = (root / "v1" / "aside").iterdir()
    assert aside.name.startswith(key_of(1) + "-")


def test_forked_child_does_not_hold_its_parents_lock(store):
    lock = store.lock(key_of(1))
    assert lock.acquire(0)

    def child():
        assert not lock.held
        assert store.lock(key_of(1)).acquire(0) is False
        assert lock.acquire(0) is False
        lock.release()
        with store.lock(key_of(2)) as own:
            assert own.held

    forked(child)
    assert lock.held
    assert store.lock(key_of(1)).acquire(0) is False


def test_lock_of_a_dead_parent_does_not_live_in_its_child(store, root):
    fork = """
lock = _core.Store(sys.argv[1]).lock(sys.argv[2])
assert lock.acquire(10)
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""
    parent = start(fork, root, key_of(1))
    child_pid = int(parent.stdout.readline())
    try:
        assert store.lock(key_of(1)).acquire(0) is False
        parent.kill()
        parent.wait()
        os.kill(child_pid, 0)
        assert store.lock(key_of(1)).acquire(5) is True
    finally:
        os.kill(child_pid, signal.SIGKILL)


def test_program_started_by_the_holder_does_not_keep_the_lock(store):
    lock = store.lock(key_of(1))
    assert lock.acquire(0)
    child = start("time.sleep(60)", close_fds=False)
    try:
        lock.release()
        assert store.lock(key_of(1)).acquire(1) is True
    finally:
        child.kill()
        child.wait()


def test_lock_object_is_for_one_thread_at_a_time(store, root):
    child = holding(root)
    lock = store.lock(key_of(1))
    thread = threading.Thread(target=lock.acquire, args=(0.5,))
    thread.start()
    time.sleep(0.1)
    try:
        with pytest.raises(RuntimeError, match="borrowed"):
            lock.acquire(0)
    finally:
        thread.join()
        child.kill()
        child.wait()


def test_module_registers_its_hook_once():
    assert "_after_fork_in_child" not in dir(_core)
