"""The thread that communicates: in order, with exceptions handed on, ended with its owner."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import attach
from ddpopt.algorithms.handle import Algorithm, BackgroundHandle, Worker
from tests.support.models import MLP, WIDTH

CPU = torch.device("cpu")


class _Owner:
    pass


def _ends(worker: Worker) -> bool:
    for _ in range(10_000):
        if not worker._thread.is_alive():
            return True
        time.sleep(0.01)
    return False


def test_tasks_run_in_order_on_one_other_thread_without_gradients() -> None:
    owner = _Owner()
    worker = Worker(owner, CPU)
    seen: list[tuple[int, int, bool]] = []

    def note(k: int) -> int:
        seen.append((k, threading.get_ident(), torch.is_grad_enabled()))
        return k

    futures = [worker.submit(lambda k=k: note(k)) for k in range(20)]
    assert [future.wait() for future in futures] == list(range(20))
    assert [k for k, _, _ in seen] == list(range(20))
    assert {thread for _, thread, _ in seen}.isdisjoint({threading.get_ident()})
    assert not any(grad for _, _, grad in seen)
    worker.close()
    assert _ends(worker)


def test_an_exception_is_raised_to_the_one_who_waits_and_work_goes_on() -> None:
    owner = _Owner()
    worker = Worker(owner, CPU)

    def fail() -> None:
        raise ValueError("weights are 3")

    failed, done = worker.submit(fail), worker.submit(lambda: 7)
    with pytest.raises(Exception, match="weights are 3"):
        failed.wait()
    assert done.wait() == 7
    worker.close()


def test_the_thread_ends_when_its_owner_is_collected() -> None:
    owner = _Owner()
    worker = owner.worker = Worker(owner, CPU)  # type: ignore[attr-defined]
    worker.submit(lambda kept=owner: kept).wait()  # a task that refers to it
    del owner
    gc.collect()
    assert _ends(worker)


class _FailingHandle(BackgroundHandle):
    def reduce(self, bucket):  # type: ignore[no-untyped-def]
        def fail(_values: torch.Tensor) -> None:
            raise ArithmeticError(f"bucket {bucket.index()}")

        return self.run_behind_backward(bucket, fail)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failing(Algorithm[_FailingHandle]):
    handle_type = _FailingHandle


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_failure_in_the_background_is_raised_by_that_backward(
    one_rank: None, static_graph: bool
) -> None:
    """By each one; of a static graph's first no bucket says that it is the last."""
    ddp = DistributedDataParallel(MLP(2), static_graph=static_graph)
    optimizer = torch.optim.SGD(ddp.parameters())
    handle = attach(ddp, optimizer, _Failing())
    for _ in range(3):
        loss = ddp(torch.ones(2, WIDTH)).sum()
        with pytest.raises(ArithmeticError, match="bucket 0"):
            loss.backward()
    handle.detach()
