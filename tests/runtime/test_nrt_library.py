"""The runtime library in processes of their own: loading, initialising, closing, forking."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.stand_ins.runtimes import ROOT, runtime_environment


def child(code, **environ):
    """Run code in a process that has not loaded the library; returns its JSON answer."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **runtime_environment(), "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CALLS = """
import json, os
from vllm_neuron._core import NrtLibrary
from vllm_neuron.errors import ExecutionError
def told(call, *args, **options):
    try:
        return [None, call(*args, **options)]
    except ExecutionError as error:
        return [error.status, str(error)]
"""


def test_nothing_is_called_before_init_and_after_close():
    before, after, again = child(
        CALLS + "l = NrtLibrary.open(os.environ['VLLM_NEURON_LIBNRT'])\n"
        "a = told(l.allocate, 4)\nl.init()\nl.allocate(4)\nl.close()\nb = told(l.allocate, 4)\n"
        "print(json.dumps([a, b[0], told(l.version)[0]]))"
    )
    assert before == [None, "nrt_tensor_allocate: nrt_init has not succeeded in this process"]
    assert (after, again) == (14, None)


def test_a_forked_process_does_not_use_the_runtime():
    told = child(
        CALLS + "l = NrtLibrary.open(os.environ['VLLM_NEURON_LIBNRT'])\nl.init()\n"
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n    os.write(w, json.dumps(told(l.init)).encode())\n    os._exit(0)\n"
        "os.wait()\nprint(os.read(r, 9999).decode())"
    )
    assert told[0] is None
    assert "initialised the runtime and then forked; start workers by spawn" in told[1]


@pytest.mark.parametrize(
    ("cores", "visible"),
    [("0", 1), ("1-3", 3), ("0,1,2", 3), ("2,3", 2), ("4", None), ("0,2", None)],
)
def test_visible_cores(cores, visible):
    found = child(
        CALLS + "l = NrtLibrary.open(os.environ['VLLM_NEURON_LIBNRT'])\n"
        "print(json.dumps([told(l.visible_cores), told(l.init)]))",
        NEURON_RT_VISIBLE_CORES=cores,
    )
    if visible is None:
        assert found[0][0] == 2 and f"NEURON_RT_VISIBLE_CORES={cores}" in found[0][1]
        assert found[1][0] == 2 and "nrt_init: NRT_INVALID" in found[1][1]
    else:
        assert found == [[None, visible], [None, None]]


def test_no_library_and_one_that_is_none(tmp_path):
    told = child(CALLS + "print(json.dumps(told(NrtLibrary.open)))", LD_LIBRARY_PATH="/nowhere")
    assert told[0] is None
    assert told[1].startswith("cannot load the Neuron runtime: libnrt.so.1: ")
    assert "/opt/aws/neuron/lib/libnrt.so.1" in told[1]
    other = child(CALLS + "print(json.dumps(told(NrtLibrary.open, 'libc.so.6')))")
    assert "libc.so.6: the library has no symbol nrt_load" in other[1]


def test_releases_that_overflow_are_not_asked_for_4_gib():
    code = (
        CALLS + "l = NrtLibrary.open(os.environ['VLLM_NEURON_LIBNRT'])\nl.init()\n"
        "print(json.dumps(told(l.allocate, 1 << 32)[1] if '{}' == '2.27.1.0' else "
        "[l.allocate(1 << 32).size]))"
    )
    old = child(code.format("2.27.1.0"), STAND_IN_NRT_VERSION="2.27.1.0")
    assert "runtime 2.27 takes less than 4 GiB per tensor" in old
    assert child(code.format("2.35"), STAND_IN_NRT_VERSION="2.35.30.0") == [1 << 32]


@pytest.mark.parametrize("end", ["l.close()", ""])
def test_the_emulators_memory_goes_with_the_process(end):
    pid = child(
        CALLS + f"l = NrtLibrary.open(os.environ['VLLM_NEURON_LIBNRT'])\nl.init()\n{end}\n"
        "print(os.getpid())"
    )
    # The device is a process of its own, which may still be starting.
    folder, patience_s = Path(f"/dev/shm/stand-in-nrt-{pid}"), 60
    while folder.exists() and patience_s > 0:
        time.sleep(0.1)
        patience_s -= 0.1
    assert not folder.exists()
