"""The bytes that ranks send each other where they compare something, or tell rank 0."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.meetings.measuring import FakeGroup
from ddpopt.errors import DisagreementError
from ddpopt.ranks import agree

# As many and as long as those that `warmup` compares of a model of 300 parameters.
_FACTS = tuple(
    agree.Fact(f"layers.{index}.weight", f"float32 (1024, 1024) in bucket {index // 10}")
    for index in range(300)
)
_OTHERS = (*_FACTS[:-1], _FACTS[-1]._replace(value="float64"))


@dataclass(slots=True)
class Traffic:
    """The bytes of pickled objects that a rank has sent and received.

    What several ranks get is counted once where it is sent, as rings and trees pass it on.
    """

    sent: int = 0
    received: int = 0


class Exchange:
    """`torch.distributed`'s collectives of objects, among ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.traffic = [Traffic() for _ in range(size)]
        self.barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    @staticmethod
    def get_global_rank(_group: FakeGroup, rank: int) -> int:
        return rank

    def all_gather_object(self, values: list[Any], value: Any, group: FakeGroup) -> None:
        values[:] = self._meet(value, group)
        self._count(group, sent=[value], received=_without(values, group.rank()))

    def gather_object(
        self, value: Any, values: list[Any] | None, dst: int, group: FakeGroup
    ) -> None:
        gathered = self._meet(value, group)
        if values is None:
            self._count(group, sent=[value])
        else:
            values[:] = gathered
            self._count(group, received=_without(values, dst))

    def broadcast_object_list(self, values: list[Any], src: int, group: FakeGroup) -> None:
        values[:] = [self._meet(values[0], group)[src]]
        is_source = group.rank() == src
        self._count(group, **{"sent" if is_source else "received": values})

    def _meet(self, value: Any, group: FakeGroup) -> list[Any]:
        """The values of all ranks."""
        self._values[group.rank()] = value
        self.barrier.wait()
        values = list(self._values)
        self.barrier.wait()
        return values

    def _count(
        self, group: FakeGroup, sent: Sequence[Any] = (), received: Sequence[Any] = ()
    ) -> None:
        own = self.traffic[group.rank()]
        own.sent += sum(map(_size_of, sent))
        own.received += sum(map(_size_of, received))


def _without(values: Sequence[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]


@functools.cache
def _size_of(value: Any) -> int:
    return len(pickle.dumps(value))


class _FakeDDP:
    """What `agree` asks of a DDP module: its group, and where its parameters are."""

    def __init__(self, group: FakeGroup) -> None:
        self.process_group = group
        self._parameter = nn.Parameter(torch.zeros(1))

    def parameters(self) -> Iterator[nn.Parameter]:
        yield self._parameter


def _compare(ddp: Any) -> None:
    agree.require_equal(ddp, lambda: _FACTS, DisagreementError, "give all the same")


def _compare_others(ddp: Any) -> None:
    """Find that the last rank differs."""
    is_last = ddp.process_group.rank() == ddp.process_group.size() - 1
    facts = _OTHERS if is_last else _FACTS
    try:
        agree.require_equal(ddp, lambda: facts, DisagreementError, "give all the same")
    except DisagreementError:
        return
    raise AssertionError("ranks differ, and were not told")


def _tell_rank_0(ddp: Any) -> None:
    agree.gather_on_rank_0(ddp, _FACTS, "facts")


KINDS: dict[str, Callable[[Any], None]] = {
    "compare 300 facts": _compare,
    "compare, one differs": _compare_others,
    "tell rank 0 as much": _tell_rank_0,
}


def count_traffic(size: int, kind: str) -> list[Traffic]:
    """What each of `size` ranks sends and receives."""
    exchange = Exchange(size)
    errors = []

    def take_part(rank: int) -> None:
        try:
            KINDS[kind](_FakeDDP(FakeGroup(rank, size)))
        except Exception as error:  # for the caller; the other threads wait for this one
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(size)]
    with mock.patch.object(agree, "dist", exchange):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return exchange.traffic
