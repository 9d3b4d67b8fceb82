"""Threads that communicate in the background, and how they end with the process.

[Note: the end of a process] A script may end, or raise, while a collective of ours is in flight:

    loss = ddp(x).mean()   # Decentralized averages weights meanwhile
    raise ValueError       # the exit code is to be 1

A daemon thread that comes back from a wait inside torch when the interpreter has begun to end is
killed within a C++ function that may not be left this way, and the process aborts: with SIGABRT in
place of its exit code. It aborts as well if a thread of gloo frees a tensor at that moment. So
threads are started here, a collective that nobody waits for any more is left here
(`leave_in_flight`), and before the interpreter ends each thread is told to end, and all are waited
for, `EXIT_S` at most.

An `atexit` function does that. Such functions run when the main thread has returned or raised, and
users' threads that are no daemons are over, but daemon threads still run. Functions that users
registered after they had imported ddpopt.algorithms run before ours, and may still call `detach`.
(If our threads were no daemons, they would be joined before all of these functions, without a
limit.)
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddpopt import _logs

# At exit, for all that is in flight. Mostly the other ranks end too, and a collective fails at once
# when another rank ends without taking part; the limit is for a rank that hangs.
EXIT_S = 10.0
# By how much longer rank 1 waits than rank 0, and so on: a rank that gives up closes its
# connections, and where another one has given up at the same moment, its thread would come back
# just while its interpreter ends.
_STAGGER_S, _MOST_STAGGERED = 0.5, 8
THREAD_IS_OVER = (
    "the thread that communicates in the background is over: the process ends, or the algorithm "
    "was detached; train, average and detach before the main thread ends, or in a function that "
    "atexit was given after ddpopt.algorithms was imported"
)
# Between two looks at a collective, and for gloo's threads: they let go of a collective's tensors
# some microseconds after it is over, and need the interpreter for that.
_POLL_S = 0.01


class _Left(NamedTuple):
    """A collective in flight that nobody waits for."""

    work: Any  # torch.distributed.Work
    values: torch.Tensor
    group: dist.ProcessGroup


# Threads that have not ended, each with the function that tells it to end. A thread's entry is
# removed when the thread ends.
_threads: dict[threading.Thread, Callable[[], object]] = {}
# Collectives that were left. They outlive the handle that started them. Those that are over are
# dropped when the next collective is left or the next thread is started: rarely, but a collective
# is mostly left because a rank has failed.
_left: list[_Left] = []
# The id of the process that has these threads and collectives: a fork of it has none of them.
_process = [os.getpid()]


def start_thread(name: str, run: Callable[[], None], end: Callable[[], object]) -> threading.Thread:
    """Start a thread that communicates.

    `end` makes `run` return when its present task is done. It is called at exit, and whoever gave
    it must start no other thread after that, since nobody would wait for that one.
    """

    def run_listed() -> None:
        try:
            run()
        finally:
            _threads.pop(thread, None)

    _forget_what_is_over()  # and, in a fork, what only its parent has
    thread = threading.Thread(target=run_listed, name=name, daemon=True)
    _threads[thread] = end
    try:
        thread.start()
    except BaseException:
        _threads.pop(thread, None)
        raise
    return thread


def leave_in_flight(work: Any, values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Stop waiting for a collective on `values`, which may not be over for long."""
    _forget_what_is_over()
    _left.append(_Left(work, values, group))


def _is_forked() -> bool:
    """Whether another process has these threads and collectives, of which this one is a fork."""
    return _process != [os.getpid()]


def _forget_what_is_over() -> None:
    if _is_forked():
        _process[:] = [os.getpid()]
        _threads.clear()
        _left.clear()
    _left[:] = _in_flight()


@atexit.register
def _end_all() -> None:
    """End all threads and wait for what they left; see [Note: the end of a process]."""
    if _is_forked() or not (_threads or _left):
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    # Ranks give up one after the other, see `_STAGGER_S`.
    limit_s = EXIT_S + _STAGGER_S * (rank % _MOST_STAGGERED)
    stop_s = time.monotonic() + limit_s
    for end in list(_threads.values()):
        end()
    for thread in list(_threads):
        thread.join(max(0.0, stop_s - time.monotonic()))
    while _in_flight() and time.monotonic() < stop_s:
        time.sleep(_POLL_S)
    if _threads or _in_flight():
        _logs.warning(
            "this process ends while communication in the background is in flight, of which "
            "another rank has not done its part within %g s: it hangs; look at the other ranks' "
            "logs",
            limit_s,
        )
    for left in _in_flight():
        # Else the interpreter, as it ends, destroys the group, which waits for the collective.
        # (A collective that a thread still waits for is kept alive by that thread.)
        for kept in (left.values, left.group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    time.sleep(_POLL_S)  # while threads of gloo let go of tensors of collectives that are over


def _in_flight() -> list[_Left]:
    return [left for left in _left if not left.work.is_completed()]
