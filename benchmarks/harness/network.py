"""A network of any rate and any number of ranks, for one rank: a comm hook that waits.

[Note: the emulated network]
The hook stands for DDP's ring allreduce, with the times of [Note: the emulated link]. On a GPU a
kernel of one thread spins on a stream of its own, as NCCL's kernels would run there; it takes one
multiprocessor of many and no memory bandwidth, of which NCCL takes more. It counts cycles, so
buckets take longer where the clock falls under load: a profile has their times. On the CPU a thread
sleeps. Gradients stay as they are: there is no other rank. So every peer with DDP's Reducer, which
is what calls the hook, is measured with the same network, whatever the machine has.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from slow_link import Interval, Link, Rate
from torch.nn.parallel import DistributedDataParallel

_PROBE_CYCLES = 20_000_000
_NUM_PROBES = 5


class Network:
    """Where buckets go, one after the other. `rate` None lets them pass at once."""

    def __init__(self) -> None:
        self.rate: Rate | None = None
        self.intervals: list[Interval] = []  # on a GPU a profile has the kernels

    def send(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Return a future of the buffer, which is done after an allreduce's time at this rate."""
        raise NotImplementedError


def open_network(device: str) -> Network:
    return _Spinning() if device == "cuda" else _Sleeping()


def connect(ddp: DistributedDataParallel, network: Network) -> None:
    """Have all buckets of a DDP module go through the network, and nowhere else."""

    def send(_state, bucket: dist.GradBucket):  # type: ignore[no-untyped-def]
        return network.send(bucket.buffer())

    send.__annotations__.clear()  # DDP compares types with its own, and they are strings here
    ddp.register_comm_hook(None, send)


class _Sleeping(Network):
    """A thread that sleeps as long as buckets take."""

    def __init__(self) -> None:
        super().__init__()
        self._link = Link()
        self.intervals = self._link.intervals

    def send(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        if self.rate is not None:
            return self._link.send(buffer, self.rate.cost.seconds(buffer.nbytes))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done


class _Spinning(Network):
    """A stream on which a kernel spins as long as buckets take."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream()
        self._cycles_per_s = cycles_per_second()

    def send(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self.rate is not None:
                seconds = self.rate.cost.seconds(buffer.nbytes)
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
