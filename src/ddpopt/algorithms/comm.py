"""What algorithms communicate with: process groups of their own, which count what they send.

Bytes are those of the values and codes that this rank sends, without headers; an allreduce is
assumed to be a ring.

[Note: hierarchical] With `hierarchical=True` the ranks of a node first average among themselves,
then the node's first rank, its leader, communicates for it, and sends the others the result.
Nodes have equal numbers of ranks, and a node's ranks are consecutive, as with torchrun.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddpopt import _torch
from ddpopt.algorithms.background import THREAD_IS_OVER, start_thread
from ddpopt.errors import AttachError

Work = Any  # torch.distributed.Work
# torch < 2.13: only the old name exists
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def ring_bytes(num_bytes: float, num_ranks: int) -> float:
    """Return how many bytes each rank sends in an allreduce of `num_bytes`."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


class Communicator:
    """A process group and what this rank sends on it; all its ranks call its methods, in one order.

    Methods that return works or a future start something, and until that has ended no given tensor
    may change. Others return when all is done (on an accelerator, queued). `rank` is this rank's
    index among the group's `num_ranks`, `sent_bytes` what it has sent so far.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.num_ranks = group.rank(), group.size()
        self.sent_bytes = 0.0
        # A mean is divided by the first before its terms are added, and by the second after that:
        # the sum of two float16 weights of 40,000 has no number in float16, though their mean has.
        # The first is a power of 2, by which a division is exact unless it underflows: means are,
        # bitwise, the divided sums.
        before_sum = 2 ** (self.num_ranks - 1).bit_length()
        self.divisors = (before_sum, self.num_ranks / before_sum)
        self.is_gloo = _torch.group_backend(group, device) == "gloo"

    def all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        """Start replacing `values` by their sum over all ranks."""
        self.sent_bytes += ring_bytes(values.nbytes, self.num_ranks)
        return dist.all_reduce(values, op, group=self.group, async_op=True)

    def collect(self, own: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Start collecting the few values of each rank, each in a row of their own."""
        rows = own.new_zeros(self.num_ranks, len(own))
        rows[self.rank] = own
        return rows, self.all_reduce(rows)

    def mean(self, values: torch.Tensor) -> None:
        """Replace `values` by their mean over all ranks."""
        before_sum, after_sum = self.divisors  # divided at the end alone, a sum might overflow
        values.div_(before_sum)
        self.all_reduce(values).wait()
        if after_sum != 1:
            values.div_(after_sum)

    def mean_bucket(self, bucket: Any) -> Any:
        """The future mean of a bucket of DDP's gradients, made as DDP makes it."""
        self.sent_bytes += ring_bytes(bucket.buffer().nbytes, self.num_ranks)
        return allreduce_hook(self.group, bucket)

    def all_gather(self, values: torch.Tensor, own: torch.Tensor) -> Work:
        """Start collecting each rank's `own` in `values`."""
        self.sent_bytes += values.nbytes - own.nbytes
        return _all_gather(values, own, group=self.group, async_op=True)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        """Start sending the r-th row of `sent` to rank r, and receiving the r-th row from it."""
        self.sent_bytes += sent.nbytes * (self.num_ranks - 1) / self.num_ranks
        return dist.all_to_all_single(received, sent, group=self.group, async_op=True)

    def broadcast(self, values: torch.Tensor) -> None:
        """Overwrite `values` with those of rank 0."""
        self.sent_bytes += values.nbytes * (self.num_ranks - 1) / self.num_ranks
        dist.broadcast(values, group=self.group, group_src=0)

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        """Send `values` to each of the peers, and return what each has, this rank's own unsent.

        gloo sends and receives in CPU memory only, and ends the process if given GPU memory.
        """
        sent = values.cpu() if self.is_gloo else values
        received = {peer: torch.empty_like(sent) for peer in peers if peer != self.rank}
        # Receives come first: with gloo, ranks that begin to send before they can receive take
        # turns on a link that carries both. Measured: steps of 2.9 s instead of 1.6 s at 10 Mbit/s.
        operations = [
            dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer)
            for peer, buffer in received.items()
        ]
        operations += [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=peer) for peer in received
        ]
        self.sent_bytes += sent.nbytes * len(received)
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return [received.get(peer, sent).to(values.device) for peer in peers]

    def barrier(self) -> None:
        """Return when all ranks are here."""
        devices = None if self.device.type == "cpu" else [self.device.index]
        dist.barrier(self.group, device_ids=devices)  # else the current one, which may be another

    def end(self) -> None:
        """Destroy the group. All ranks have to be done with it, or some lose connections."""
        dist.destroy_process_group(self.group)


class Groups:
    """Process groups that nobody else communicates on; see [Note: hierarchical].

    They have the backend and the timeout of `parent`. `everyone` has all of its ranks, `leaders`
    those that communicate for all, every rank if not hierarchical; it is None on the others.
    `node` has those of this rank's node, and is None if a node is one rank. `ring_index` is the
    index of this rank or node in the ring, and `ring_size` their number. `agreement` is None unless
    `make_agreement` was called. `ddp` is DDP's own group, for what DDP would send on it. Making
    them is collective.
    """

    def __init__(self, parent: dist.ProcessGroup, device: torch.device, ranks_per_node: int):
        self.ddp = ddp = Communicator(parent, device)
        name = [f"ddpopt-{uuid.uuid4().hex}"]  # that was never used before
        dist.broadcast_object_list(name, group=parent, group_src=0, device=device)
        self._name = name[0]
        # torch holds these groups until `end`, or until DDP's is destroyed: they outlive a handle
        # that was dropped without `detach`.
        self._made: list[Communicator] = []
        self._ranks = ranks = dist.get_process_group_ranks(parent)
        first = ddp.rank - ddp.rank % ranks_per_node
        self.ring_index = ddp.rank // ranks_per_node
        self.ring_size = len(ranks) // ranks_per_node
        self.everyone = self._make("everyone", ranks)
        self.leaders: Communicator | None = self.everyone
        self.node: Communicator | None = None
        self.agreement: Communicator | None = None
        if ranks_per_node > 1:
            node = ranks[first : first + ranks_per_node]
            self.node = self._make(f"node-{first}", node)
            self.leaders = None
            if ddp.rank == first:
                self.leaders = self._make("leaders", ranks[::ranks_per_node])

    def make_agreement(self) -> None:
        """Make `agreement`, a gloo group of all ranks, for flags on the CPU. Collective."""
        self.agreement = self._make("agreement", self._ranks, "gloo")

    def _make(self, name: str, ranks: Sequence[int], backend: str = "") -> Communicator:
        made = _make_group(self.ddp, f"{self._name}-{name}", ranks, backend)
        self._made.append(made)
        return made

    def average_node(self, values: torch.Tensor) -> None:
        """Replace `values` by its mean over the ranks of this node, in place. Collective."""
        if self.node is not None:
            self.node.mean(values)

    def broadcast_to_node(self, values: torch.Tensor) -> None:
        """Overwrite `values` with those of this node's leader, in place. Collective."""
        if self.node is not None:
            self.node.broadcast(values)

    def reduce(
        self, values: torch.Tensor, average_leaders: Callable[[Communicator, torch.Tensor], None]
    ) -> None:
        """Average within each node, then among leaders, in place. Collective.

        `average_leaders` is called on leaders alone, and averages in place in their group.
        """
        self.average_node(values)
        if self.leaders is not None:
            average_leaders(self.leaders, values)
        self.broadcast_to_node(values)

    @property
    def sent_bytes(self) -> float:
        """What this rank has sent so far, except what stays within its node, and on `agreement`."""
        total = self.ddp.sent_bytes + self.everyone.sent_bytes
        if self.leaders is not None and self.leaders is not self.everyone:
            total += self.leaders.sent_bytes
        return total

    def end(self) -> None:
        """Destroy the groups, except DDP's, as `Communicator.end` does."""
        for communicator in self._made:
            communicator.end()


def _make_group(
    parent: Communicator, name: str, ranks: Sequence[int], backend: str = ""
) -> Communicator:
    """Make a group; only its ranks have to call this."""
    # With a name of its own: torch would count groups for it, differently on ranks.
    with _torch.making_groups_apart(name):
        group: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=_torch.group_timeout(parent.group, parent.device),
            backend=backend or dist.get_backend(parent.group),
            use_local_synchronization=True,
        )
    return Communicator(group, torch.device("cpu") if backend == "gloo" else parent.device)


class FlatWeights:
    """Parameters as a few flat tensors, each of one dtype and device.

    No tensor is larger than `bucket_bytes`, if given, except of one parameter that is larger by
    itself.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], bucket_bytes: int | None = None) -> None:
        # The last bucket of each kind, to which parameters are added until it is full.
        open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._buckets: list[list[torch.Tensor]] = []
        for parameter in parameters:
            if not parameter.numel():
                continue  # a flat tensor without elements would have no range of codes
            kind = (parameter.dtype, parameter.device)
            bucket = open_buckets.get(kind, [])
            is_full = bucket_bytes and sum(p.nbytes for p in (*bucket, parameter)) > bucket_bytes
            if not bucket or is_full:
                bucket = open_buckets[kind] = []
                self._buckets.append(bucket)
            bucket.append(parameter)

    @torch.no_grad()
    def copy(self) -> list[torch.Tensor]:
        """The current weights, one tensor of shape [num_elements] per bucket."""
        return [torch.cat([p.detach().reshape(-1) for p in bucket]) for bucket in self._buckets]

    @torch.no_grad()
    def assign(self, flat: Sequence[torch.Tensor]) -> None:
        """Overwrite the parameters in place with tensors like those that `copy` returns."""
        for parameter, value in self._pairs(flat):
            parameter.copy_(value)

    @torch.no_grad()
    def move(self, sent: Sequence[torch.Tensor], mean: Sequence[torch.Tensor]) -> None:
        """Add to the parameters `mean - sent`, the change that averaging the sent weights made.

        So what was written to the parameters after they were sent is kept. An element that was not
        written to becomes the mean itself, bitwise. An element whose change is not finite keeps
        what was written: it may be of the checkpoint that replaces a NaN.
        """
        pairs = zip(self._pairs(sent), self._pairs(mean), strict=True)
        for (parameter, before), (_, average) in pairs:
            # Mostly nothing was written. On an accelerator, to ask would be to wait for the device.
            if parameter.device.type == "cpu" and torch.equal(parameter, before):
                parameter.copy_(average)
                continue
            # At least in float32: a difference of two float16 numbers may not fit in float16.
            kind = torch.promote_types(parameter.dtype, torch.float32)
            change = average.to(kind) - before.to(kind)
            moved = torch.where(change.isfinite(), parameter + change, parameter)
            parameter.copy_(torch.where(parameter == before, average.to(kind), moved))

    @torch.no_grad()
    def add(self, flat: Sequence[torch.Tensor]) -> None:
        """Add tensors like those that `copy` returns to the parameters, in place."""
        for parameter, value in self._pairs(flat):
            parameter.add_(value)

    def _pairs(self, flat: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter, with its part of tensors like those that `copy` returns."""
        for bucket, values in zip(self._buckets, flat, strict=True):
            parts = torch.split(values, [p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                yield parameter, part.view(parameter.shape)


class Worker:
    """Runs tasks in the order of submission, which has to be the same on all ranks.

    On an accelerator they run on a stream of their own, after what had been queued when they were
    submitted; who waits for a result has its own stream wait too. The thread begins with `start` or
    the first task. It ends after the queued tasks once `close` is called, `owner` is collected
    (tasks may refer to it), or the process ends, which waits for the tasks, see [Note: the end of a
    process]. After that `submit` raises AttachError.
    """

    def __init__(self, owner: object, device: torch.device) -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Called by whoever closes the worker, or when the owner is collected; once.
        self.close = weakref.finalize(owner, self._tasks.put, None)

    def start(self) -> None:
        """Start the thread, unless it was started or `close` called."""
        if self._thread is not None or not self.close.alive:  # a finalizer that was called is dead
            return
        # The thread outlives the worker by the tasks that were queued, and holds these only.
        tasks, device = self._tasks, self._device

        def run() -> None:
            with own_stream(device) as stream, torch.no_grad():
                while (task := tasks.get()) is not None:
                    task(stream)
                    del task  # it may refer to the owner

        self._thread = start_thread("ddpopt-worker", run, functools.partial(tasks.put, None))

    def submit(self, task: Callable[[], Any]) -> torch.futures.Future[Any]:
        """The future result of a task; its exception is raised by `wait`."""
        self.start()
        if self._thread is None or not self._thread.is_alive():
            # Nobody would run it, and who waits for it would wait forever.
            raise AttachError(THREAD_IS_OVER)
        queued: torch.Event | None = None
        devices: list[int | str | torch.device] = []
        if self._device.type != "cpu":
            devices, queued = [self._device], torch.Event(self._device)
            queued.record()
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

        def run(stream: Any) -> None:
            try:
                if queued is not None:
                    stream.wait_event(queued)
                future.set_result(task())
            except Exception as error:
                # Whatever the task raises, `wait` raises it in the thread that asked for it.
                future.set_exception(error)

        self._tasks.put(run)
        return future


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[Any]:
    """Make this thread queue on a stream of its own in this block; None on the CPU."""
    if device.type == "cpu":
        yield None
    else:
        torch.accelerator.set_device_index(device)
        with (stream := torch.Stream(device)):
            yield stream
