"""What a whole search for buckets asks of a store and sends as objects: real ranks, and DDP."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.meetings.measuring import CountingStore
from ddpopt import _torch
from ddpopt.planning import AllreduceCost, tuner
from ddpopt.steps import clock as clocks

_NUM_STEPS = 24  # in which a search ends, and the comparison after it
_WIDTH, _DEPTH = 64, 6
# So slow a network that other buckets gain, by a clock of which any two readings are a tick apart:
# the times of many ranks on one machine would decide anything.
_COST = AllreduceCost(startup_s=1e-5, s_per_byte=8e-8)
_TICK_S = 1e-3


class _Model(nn.Module):
    """Layers of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Asked(NamedTuple):
    """What a rank's search asked of the store, without looks for an answer, and sent as objects.

    `outcome` is what `explain` says of the search.
    """

    outcome: str
    requests: int
    looks: int
    sent_bytes: int


def count_search(size: int) -> list[Asked]:
    """Train on `size` ranks of this machine with `buckets="auto"`, and count on each.

    It is a whole search: buckets change, and are compared with those of before.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=_train, args=(rank, size, store.port, answers))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Asked] = dict(answers.get() for _ in ranks)
    for process in ranks:
        process.join()
    if not all(asked.outcome.startswith("buckets change") for asked in found.values()):
        raise RuntimeError(f"the search ended early: {found[0].outcome}")
    return [found[rank] for rank in range(size)]


def _train(rank: int, size: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    connect = functools.partial(dist.TCPStore, "127.0.0.1", port, is_master=False)
    counted = CountingStore(connect)
    sent_bytes = 0

    def counting(collective: Callable[..., Any], value_of: Callable[..., Any]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal sent_bytes
            if (value := value_of(*args, **options)) is not None:
                sent_bytes += len(pickle.dumps(value))
            return collective(*args, **options)

        return call

    def broadcast_by(values: list[Any], src: int, **_: Any) -> Any:
        return values[0] if src == rank else None

    collectives = {
        "all_gather_object": lambda _values, value, **_: value,
        "gather_object": lambda value, _values, dst, **_: None if dst == rank else value,
        "broadcast_object_list": broadcast_by,
    }
    torch.manual_seed(0)
    ddp = DistributedDataParallel(_Model())
    options = {"inner": "aot_eager", "buckets": "auto"}
    compiled = torch.compile(ddp, backend="ddpopt", options=options)
    ticks = itertools.count()
    clock = mock.Mock(perf_counter=lambda: next(ticks) * _TICK_S)
    patches = [
        mock.patch.object(dist, name, counting(getattr(dist, name), value_of))
        for name, value_of in collectives.items()
    ]
    patches.append(mock.patch.object(_torch, "store_of", return_value=counted))
    patches.append(mock.patch.object(tuner, "calibrate", return_value=_COST))
    patches.append(mock.patch.object(clocks, "time", clock))
    for patch in patches:
        patch.start()
    for _ in range(_NUM_STEPS):
        compiled(torch.randn(256, _WIDTH)).sum().backward()
    looks = counted.num.pop("look", 0)
    outcome = ddpopt.explain(ddp).tuning
    answers.put((rank, Asked(outcome, sum(counted.num.values()), looks, sent_bytes)))
    dist.destroy_process_group()
