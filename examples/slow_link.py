"""A slow network on one machine, for everybody, without root: it is emulated.

Used by train_gpt.py and, with other ranks than there are, by benchmarks/.

[Note: the emulated link]
A value of n bytes takes as long as a ring allreduce of it would on a real link: `startup_s`, and
what 2 (ranks - 1) / ranks n bytes take at the rate. Values pass one after the other, beside
whatever is computed, and meanwhile a thread sleeps. Then it makes the real allreduce, on loopback,
while the next value is already on the link. What adds, copies and packs values takes no part of
the time here, as it would with a real network.
"""

import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpopt.planning import AllreduceCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A link's rate in each direction, in Gbit/s; `startup_s` is what each allreduce has on top."""

    gbit: float
    num_ranks: int
    startup_s: float = 50e-6

    @property
    def cost(self) -> AllreduceCost:
        sent = 2 * (self.num_ranks - 1) / self.num_ranks  # of each byte, by a rank of a ring
        return AllreduceCost(startup_s=self.startup_s, s_per_byte=8 * sent / (self.gbit * 1e9))


def parse_gbit(text: str) -> float:
    """Return a rate as Linux's tc writes it, such as 1gbit or 500mbit, in Gbit/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", text)
    if not match or not float(match[1]):
        raise ValueError(f"the rate {text!r} is none of tc's, such as 100mbit or 1gbit")
    return float(match[1]) * {"k": 1e-6, "m": 1e-3, "g": 1.0}[match[2]]


class Interval(NamedTuple):
    """When a value was on the link, by the system's clock."""

    start_ns: int
    stop_ns: int


class Link:
    """A thread that sleeps as long as values take to pass, one after the other."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._pass_on, name="emulated link", daemon=True).start()

    def send(
        self, value: Tensor, seconds: float, arrive: Callable[[], object] = lambda: None
    ) -> Future:
        """Return what has the value when it has passed, and `arrive` was called."""
        done: Future = Future()
        self._sent.put((time.time_ns(), int(seconds * 1e9), value, arrive, done))
        return done

    def _pass_on(self) -> None:
        stop_ns = 0
        while True:
            sent_ns, duration_ns, value, arrive, done = self._sent.get()
            start_ns = max(sent_ns, stop_ns)  # of what came before; not when this thread woke up
            stop_ns = start_ns + duration_ns
            time.sleep(max(0, stop_ns - time.time_ns()) / 1e9)
            self.intervals.append(Interval(start_ns, stop_ns))
            try:
                arrive()
            except Exception as error:  # another rank is gone: whoever waits is told
                done.set_exception(error)
            else:
                done.set_result(value)


def emulate(gbit: float) -> None:
    """Have each `dist.all_reduce` of this process pass a link, and what `connect` connects.

    So whatever measures the network, as `buckets="auto"` does, measures the emulated one.
    """
    link, rate = Link(), Rate(gbit=gbit, num_ranks=dist.get_world_size())
    all_reduce = dist.all_reduce

    @torch.compiler.disable  # it is no longer one of torch's functions, which Dynamo leaves alone
    def pass_link(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        # A profile has this range in place of gloo's own, which is in the link's thread.
        with torch.profiler.record_function("gloo:all_reduce") as span:
            done = link.send(
                tensor, rate.cost.seconds(tensor.nbytes), lambda: all_reduce(tensor, op, group)
            )
            span._call_end_callbacks_on_future(done)
        return _Work(done) if async_op else done.wait()

    dist.all_reduce = pass_link


def connect(ddp: DDP) -> None:
    """Have DDP reduce its buckets with `dist.all_reduce`."""

    def mean(_state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(gradients, async_op=True).get_future()

    ddp.register_comm_hook(None, mean)


class _Work(NamedTuple):
    """What `dist.all_reduce` returns."""

    done: Future

    def wait(self) -> None:
        self.done.wait()

    def is_completed(self) -> bool:
        return self.done.done()

    def get_future(self) -> Future:
        return self.done
