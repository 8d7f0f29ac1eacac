"""Runs actions in forked processes: killed at each system call, or on a full disk."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

_PTRACE_TRACEME: Final = 0
_PTRACE_SYSCALL: Final = 24
_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_ptrace.restype = ctypes.c_long


def kill_at_each_call(action: Callable[[], object]) -> Iterator[int]:
    """Run an action again and again, each time until its next system call.

    After each run, the number of calls is yielded, so that the caller can inspect what
    the killed process left behind, and restore the files. The last run was not killed.

    :raises AssertionError: if the action raises an exception.
    """
    ended = False
    for number in itertools.count():
        if ended:
            return
        ended = _run_until_call(action, number)
        yield number


def _run_until_call(action: Callable[[], object], number: int) -> bool:
    """Return whether the action ended before its ``number``-th system call."""
    child = os.fork()
    if child == 0:
        _ptrace(_PTRACE_TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        _run_and_exit(action)
    _, status = os.waitpid(child, 0)
    stops = 0
    while os.WIFSTOPPED(status):
        # Each call stops at its entry and at its exit.
        if stops == 2 * number + 1:
            os.kill(child, signal.SIGKILL)
        elif _ptrace(_PTRACE_SYSCALL, child, None, None):
            raise OSError(ctypes.get_errno(), "ptrace")
        stops += 1
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    assert status == 0, status
    return True


def with_file_size(limit: int, action: Callable[[], object]) -> None:
    """Run an action in a process whose files can grow only to ``limit`` bytes.

    A write beyond it writes what fits, and then fails, as on a full disk.

    :raises AssertionError: if the action raises an exception.
    """
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        _run_and_exit(action)
    _, status = os.waitpid(child, 0)
    assert status == 0, status


def _run_and_exit(action: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        gc.disable()
        action()
        code = 0
    except BaseException:  # noqa: BLE001 -- the process ends here
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
