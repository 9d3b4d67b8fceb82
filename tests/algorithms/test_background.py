"""How a process ends while an algorithm communicates: with its own exit code, and soon."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddpopt.algorithms import background
from ddpopt.algorithms.background import leave_in_flight, start_thread
from ddpopt.algorithms.comm import Worker
from ddpopt.errors import AttachError
from tests.support.algorithms import ALGORITHMS
from tests.support.documents import ROOT
from tests.support.ends import ENDINGS
from tests.support.fresh import run_fresh
from tests.support.on_ranks import on_ranks


@functools.cache
def _exit_codes(num_runs: int, names: str, endings: str) -> dict[tuple[str, str], dict[str, int]]:
    arguments = ["", str(num_runs), names, endings]
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = {arguments}\n"
        "from tests.support import ends; ends.main()"
    )
    lines = run_fresh(script).splitlines()
    return {(name, ending): codes for name, ending, codes in map(json.loads, lines)}


@pytest.mark.quick("Decentralized-exception", "Decentralized-destroyed", "Decentralized-alone")
@pytest.mark.parametrize(
    ("name", "ending"),
    [
        *[(name, "exception") for name in ALGORITHMS],
        ("Decentralized", "destroyed"),
        ("Decentralized", "alone"),
    ],
)
def test_a_script_that_ends_in_a_step_has_its_exit_code(name: str, ending: str) -> None:
    """Rank 0 ends first, and rank 1's average does not fail: rank 0 has done its part.

    It does not wait for a rank that hangs, nor does its interpreter for the collective in flight.
    """
    is_first = name == "Decentralized"
    others = ",".join(other for other in ALGORITHMS if other != "Decentralized")
    endings = "exception,destroyed,alone" if is_first else "exception"
    codes = _exit_codes(1, "Decentralized" if is_first else others, endings)
    assert codes[name, ending] == {str(ENDINGS[ending]): 2}


# With AsyncModelAverage a rank whose peer has gone raises in its next forward.
MANY = [
    *[("Decentralized", e) for e in ("step", "forward", "exception", "backward", "destroyed")],
    *[("AsyncModelAverage", ending) for ending in ("step", "exception")],
    *[("ByteGrad", ending) for ending in ("exception", "backward")],
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ending"), MANY)
def test_no_script_of_many_aborts(name: str, ending: str) -> None:
    """Without `background` up to 3 of 4 do."""
    assert _exit_codes(25, name, ending)[name, ending] == {str(ENDINGS[ending]): 50}


@on_ranks(2)
def test_what_was_left_in_flight_is_waited_for_and_then_forgotten(rank: int) -> None:
    """Rank 1 joins when rank 0 waits at its end."""
    values, store = torch.ones(3), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 ends"])
        time.sleep(0.2)  # only to see that rank 0 waits
        dist.all_reduce(values)
        return
    work = dist.all_reduce(values, async_op=True)
    leave_in_flight(work, values, dist.group.WORLD)
    assert not work.is_completed()
    store.set("rank 0 ends", "")
    background._end_all()
    assert work.is_completed()
    background._forget_what_is_over()
    assert not background._left


def test_a_thread_is_told_to_end_and_waited_for() -> None:
    is_told, order = threading.Event(), []

    def run() -> None:
        is_told.wait()
        order.append("thread")

    thread = start_thread("ddpopt-test", run, is_told.set)
    background._end_all()
    order.append("end")
    assert order == ["thread", "end"]
    assert not thread.is_alive()
    assert thread not in background._threads


def test_a_thread_that_cannot_be_started_is_not_waited_for() -> None:
    failing = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError)
    with failing, pytest.raises(RuntimeError):
        start_thread("ddpopt-test", lambda: None, lambda: None)
    assert not any(thread.name == "ddpopt-test" for thread in background._threads)


def test_after_the_end_nobody_waits_for_a_task_that_nobody_runs() -> None:
    """For example in an `atexit` function that runs later."""
    owner: Any = type("Owner", (), {})()
    worker = Worker(owner, torch.device("cpu"))
    first = worker.submit(lambda: 1)
    with contextlib.suppress(AttachError):
        background._end_all()
    assert first.wait() == 1
    with pytest.raises(AttachError, match="the process ends"):
        worker.submit(lambda: 2)
