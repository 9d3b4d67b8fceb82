"""`GradientAllReduce`: what DDP does by itself, to compare the other algorithms with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddpopt.algorithms._runtime.comm_hook import Bucket, GradientFuture
from ddpopt.algorithms._runtime.handle import Training
from ddpopt.algorithms._runtime.worker import BackgroundHandle
from ddpopt.algorithms.api import HierarchicalAlgorithm
from ddpopt.config import check_boolean


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAllReduce(HierarchicalAlgorithm["GradientAllReduceHandle"]):
    """Gradients are summed over all ranks, bucket by bucket behind backward, as DDP does.

    Attributes:
        average: Divide by the number of ranks, as DDP does.
        hierarchical: Sum within each node first; see [Note: hierarchical] in
            `algorithms/_runtime/groups.py`.
        local_world_size: Ranks on each node; None is LOCAL_WORLD_SIZE, which torchrun sets.

    Raises:
        OptionError: a value is out of its range.
        TypeError: a value has another type.
    """

    average: bool = True
    hierarchical: bool = False

    def __post_init__(self) -> None:
        HierarchicalAlgorithm.__post_init__(self)
        check_boolean("average", self.average, TypeError)

    def make_handle(self, training: Training) -> GradientAllReduceHandle:
        """Put this to work on a model."""
        return GradientAllReduceHandle(training, self)


class GradientAllReduceHandle(BackgroundHandle):
    """As `BackgroundHandle`; its thread has work only if hierarchical."""

    def __init__(self, training: Training, algorithm: GradientAllReduce) -> None:
        super().__init__(training, algorithm)
        self._average = algorithm.average

    def reduce(self, bucket: Bucket) -> GradientFuture:
        """Sum a bucket over all ranks."""
        values = bucket.buffer()
        if self.groups.node is not None:
            return self.run_behind_backward(bucket, lambda: self._reduce_by_nodes(values))
        self.num_communications += 1
        if self._average:
            return allreduce_hook(self.training.group, bucket)
        work = dist.all_reduce(values, group=self.training.group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def _reduce_by_nodes(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, group=self.groups.node)
        if self.groups.leaders is not None:
            dist.all_reduce(values, group=self.groups.leaders)
        self.groups.tell_node(values)
        if self._average:
            values.div_(self.training.group.size())
