"""Threads that communicate in the background, and how they end with the process.

[Note: the end of a process] A script may end, or raise, while a collective of ours is in flight:

    loss = ddp(x).mean()   # Decentralized averages weights meanwhile
    raise ValueError       # the exit code is to be 1

A daemon thread that comes back from a wait inside torch when the interpreter has begun to end is
killed within a C++ function that may not be left this way, and the process aborts: with SIGABRT in
place of its exit code. So does a thread of gloo that lets go of a tensor then. So threads are
started here, a collective that nobody waits for any more is left here (`leave_in_flight`), and
before the interpreter ends each thread is told to end, and all are waited for, `EXIT_S` at most.

That is done by `atexit`: its functions run when the main thread is over, with whatever it raised,
and other threads of users are too, but daemon threads still run. What users registered after they
had imported ddpopt.algorithms runs before, and may still call `detach`. (A thread that is no daemon
would be joined before all of these, without a limit.)
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

# At exit, for all that is in flight. The other ranks end too in most cases, and then what they do
# not take part in fails at once; the limit is for one that hangs.
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


# Threads that have not ended, with what tells each to end. An entry belongs to its thread: neither
# outlives it, nor is held by it longer than it runs.
_threads: dict[threading.Thread, Callable[[], object]] = {}
# Collectives that were left. They outlive the handle that they are of, until they are over, and
# the next one is left or the next thread is started: most are left when a rank has failed, once.
_left: list[_Left] = []
# The process whose these are, by its id: a process that is forked from it has none of them.
_process = [os.getpid()]


def start_thread(name: str, run: Callable[[], None], end: Callable[[], object]) -> threading.Thread:
    """Start a thread that communicates.

    `end` makes `run` return after what it is at, and is called at exit, when no more can be begun.
    """

    def run_listed() -> None:
        try:
            run()
        finally:
            _threads.pop(thread, None)

    _forget_what_is_over()
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


def _forget_what_is_over() -> None:
    if _process != [os.getpid()]:
        _process[:] = [os.getpid()]
        _threads.clear()
        _left.clear()
    _left[:] = _in_flight()


@atexit.register
def _end_all() -> None:
    """End all threads and wait for what they left; see [Note: the end of a process]."""
    if _process != [os.getpid()] or not (_threads or _left):
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
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
        # What threads are still at they keep themselves.
        for kept in (left.values, left.group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    time.sleep(_POLL_S)


def _in_flight() -> list[_Left]:
    return [left for left in _left if not left.work.is_completed()]
