"""A network of any rate and any number of ranks, for one rank: a comm hook that waits.

[Note: the emulated network]
The hook stands for DDP's ring allreduce: a bucket of n bytes takes `startup_s`, and as long as
2 (ranks - 1) / ranks n bytes take at the rate. Buckets pass one after the other, beside whatever is
computed. On a GPU a kernel of one thread spins on a stream of its own, as NCCL's kernels would run
there; it takes one multiprocessor of many and no memory bandwidth, of which NCCL takes more. It
counts cycles, so buckets take longer where the clock falls under load: a profile has their times.
On the CPU a thread sleeps. Gradients stay as they are: there is no other rank. So every peer is
measured with the same network, whatever the machine has.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms.comm import Exchange
from ddpopt.planning import AllreduceCost

_PROBE_CYCLES = 20_000_000
_NUM_PROBES = 5


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


class Interval(NamedTuple):
    """When a bucket was on the network, by the system's clock (CPU only)."""

    start_ns: int
    stop_ns: int


class Network:
    """Where buckets go, one after the other. `rate` None lets them pass at once."""

    def __init__(self) -> None:
        self.rate: Rate | None = None
        self.intervals: list[Interval] = []  # on a GPU a profile has the kernels

    def send(self, buffer: torch.Tensor, share: float = 1.0) -> torch.futures.Future[torch.Tensor]:
        """Return what has the buffer when it has passed, with a share of an allreduce's cost."""
        raise NotImplementedError


def open_network(device: str) -> Network:
    return _Spinning() if device == "cuda" else _Sleeping()


def connect(ddp: DistributedDataParallel, network: Network) -> None:
    """Have all buckets of a DDP module go through the network, and nowhere else."""

    def send(_state, bucket: dist.GradBucket):  # type: ignore[no-untyped-def]
        return network.send(bucket.buffer())

    send.__annotations__.clear()  # DDP compares types with its own, and they are strings here
    ddp.register_comm_hook(None, send)


def connect_exchange(exchange: Exchange, network: Network) -> None:
    """Have the two halves of an allreduce that `ShardedUpdate` begins go through the network."""
    scatter = exchange.mean_scatter

    def mean_scatter(values: torch.Tensor, part: torch.Tensor) -> Any:
        works, complete = scatter(values, part)
        return [*works, network.send(values, 0.5)], complete

    vars(exchange).update(
        mean_scatter=mean_scatter, all_gather=lambda values: [network.send(values, 0.5)]
    )


class _Sleeping(Network):
    """A thread that sleeps as long as buckets take."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._pass_on, name="network", daemon=True).start()

    def send(self, buffer: torch.Tensor, share: float = 1.0) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if self.rate is None:
            done.set_result(buffer)
        else:
            self._sent.put((share * self.rate.cost.seconds(buffer.nbytes), buffer, done))
        return done

    def _pass_on(self) -> None:
        while True:
            seconds, buffer, done = self._sent.get()
            start_ns = time.time_ns()
            time.sleep(seconds)
            self.intervals.append(Interval(start_ns, time.time_ns()))
            done.set_result(buffer)


class _Spinning(Network):
    """A stream on which a kernel spins as long as buckets take."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream()
        self._cycles_per_s = cycles_per_second()

    def send(self, buffer: torch.Tensor, share: float = 1.0) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self.rate is not None:
                seconds = share * self.rate.cost.seconds(buffer.nbytes)
                torch.cuda._sleep(int(seconds * self._cycles_per_s))
            # Whoever waits for it, has its stream wait for what is queued here.
            done.set_result(buffer)
        return done


def cycles_per_second() -> float:
    """Return how many cycles `torch.cuda._sleep` takes in a second, at the clock of a busy GPU."""
    rates = []
    torch.cuda._sleep(_PROBE_CYCLES)  # the clock rises with work
    for _ in range(_NUM_PROBES):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(_PROBE_CYCLES)
        stop.record()
        stop.synchronize()
        rates.append(_PROBE_CYCLES / (start.elapsed_time(stop) / 1e3))
    return statistics.median(rates)
