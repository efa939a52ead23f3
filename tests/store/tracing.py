"""Runs a function in a forked child and stops it at each of its file system calls.

What is traced is the shipped extension module against the real kernel, so nothing has to be
replaced inside of it: at a call the child can be killed, or the call can be made to fail or to
write less. Linux on x86-64 only (`ptrace`, system call numbers).
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_LIBC.ptrace.restype = ctypes.c_long
# Source: linux/ptrace.h.
_TRACEME, _CONT, _GETREGS, _SETREGS, _SYSCALL, _SETOPTIONS = 0, 7, 12, 13, 24, 0x4200
_OPTIONS = 0x1 | 0x100000  # TRACESYSGOOD, EXITKILL
_SYSCALL_STOP = signal.SIGTRAP | 0x80
# Words of `user_regs_struct`, by its order.
_R10, _R8, _RAX, _RDX, _RSI, _RDI, _ORIG_RAX, _WORDS = 7, 9, 10, 12, 13, 14, 15, 27
_GETPPID = 110
#: File system calls by number. Source: asm/unistd_64.h.
CALLS = {
    5: "fstat", 17: "pread64", 18: "pwrite64", 73: "flock", 74: "fsync", 75: "fdatasync",
    77: "ftruncate", 91: "fchmod", 138: "fstatfs", 217: "getdents64", 257: "openat",
    258: "mkdirat", 262: "newfstatat", 263: "unlinkat", 265: "linkat", 267: "readlinkat",
    280: "utimensat", 285: "fallocate", 316: "renameat2", 332: "statx",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the child made.

    Attributes:
        name: of the system call.
        arguments: the first five.
        paths: text at those arguments that are paths.
        result: what it returned; None if the child was killed before it.
    """

    name: str
    arguments: tuple[int, ...]
    paths: tuple[str, ...]
    result: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The calls of a child and how it ended: an exit code, or minus a signal."""

    calls: list[Call]
    status: int


def trace(
    function: Callable[[], object],
    *,
    kill_at: int | None = None,
    fail_at: tuple[int, int] | None = None,
    short_writes: bool = False,
) -> Outcome:
    """Run `function` in a child; exit code 0 if it returns, 3 if it raises.

    Args:
        function: what the child does.
        kill_at: number of the call at whose entry the child is killed.
        fail_at: number of the call that is not made, and the errno that it gives.
        short_writes: whether each write is cut to a half.
    """
    pid = os.fork()
    if pid == 0:
        _run_traced(function)
    try:
        return _follow(pid, kill_at, fail_at, short_writes=short_writes)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _run_traced(function: Callable[[], object]) -> None:
    status = 3
    try:
        _ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.getppid()
        try:
            function()
            status = 0
        finally:
            os.getppid()
    except BaseException:  # noqa: BLE001 - a child must never return into the test
        if os.environ.get("TRACE_ERRORS"):
            traceback.print_exc()
    finally:
        os._exit(status)


def _ptrace(request: int, pid: int, data: Any = None) -> None:
    if _LIBC.ptrace(request, pid, None, data) == -1:
        raise OSError(ctypes.get_errno(), "ptrace")


def _follow(
    pid: int,
    kill_at: int | None,
    fail_at: tuple[int, int] | None,
    *,
    short_writes: bool,
) -> Outcome:
    _, status = os.waitpid(pid, 0)
    assert os.WIFSTOPPED(status), status
    _ptrace(_SETOPTIONS, pid, _OPTIONS)
    registers = (ctypes.c_uint64 * _WORDS)()
    calls: list[Call] = []
    is_inside, is_entry, pending = False, True, None
    passed_on = 0
    while True:
        _ptrace(_SYSCALL, pid, passed_on)
        _, status = os.waitpid(pid, 0)
        passed_on = 0
        if not os.WIFSTOPPED(status):
            return Outcome(calls, os.waitstatus_to_exitcode(status))
        if os.WSTOPSIG(status) != _SYSCALL_STOP:
            passed_on = os.WSTOPSIG(status)
            continue
        _ptrace(_GETREGS, pid, registers)
        if is_entry:
            number = registers[_ORIG_RAX]
            if number == _GETPPID:
                is_inside = not is_inside
            elif is_inside and number in CALLS:
                pending = _read_call(pid, number, registers)
                if kill_at == len(calls):
                    calls.append(pending)
                    os.kill(pid, signal.SIGKILL)
                    _, status = os.waitpid(pid, 0)
                    return Outcome(calls, os.waitstatus_to_exitcode(status))
                elif fail_at is not None and fail_at[0] == len(calls):
                    registers[_ORIG_RAX] = 2**64 - 1
                    _ptrace(_SETREGS, pid, registers)
                elif short_writes and pending.name == "pwrite64" and registers[_RDX] > 1:
                    registers[_RDX] //= 2
                    _ptrace(_SETREGS, pid, registers)
        elif pending is not None:
            if fail_at is not None and fail_at[0] == len(calls):
                registers[_RAX] = 2**64 - fail_at[1]
                _ptrace(_SETREGS, pid, registers)
            if registers[_RDX] != pending.arguments[2]:
                # A system call changes no argument register, and inlined code relies on it.
                registers[_RDX] = pending.arguments[2]
                _ptrace(_SETREGS, pid, registers)
            result = struct.unpack("<q", struct.pack("<Q", registers[_RAX]))[0]
            calls.append(Call(pending.name, pending.arguments, pending.paths, result))
            pending = None
        is_entry = not is_entry


def _read_call(pid: int, number: int, registers: Any) -> Call:
    name = CALLS[number]
    arguments = tuple(registers[word] for word in (_RDI, _RSI, _RDX, _R10, _R8))
    places = {
        "openat": (1,), "mkdirat": (1,), "newfstatat": (1,), "unlinkat": (1,), "utimensat": (1,),
        "readlinkat": (1,), "statx": (1,), "linkat": (1, 3), "renameat2": (1, 3),
    }.get(name, ())  # fmt: skip
    paths = tuple(_read_text(pid, arguments[place]) for place in places)
    return Call(name, arguments, paths)


def _read_text(pid: int, address: int) -> str:
    if address == 0:
        return ""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123 - unbuffered
        memory.seek(address)
        return memory.read(4096 - address % 4096).split(b"\0")[0].decode()
