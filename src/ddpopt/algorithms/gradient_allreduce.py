"""`GradientAllReduce`: what DDP does by itself, as a baseline for the other algorithms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddpopt.algorithms._runtime.groups import mean
from ddpopt.algorithms._runtime.handle import Bucket, GradientFuture
from ddpopt.algorithms._runtime.worker import BackgroundHandle
from ddpopt.algorithms.api import HierarchicalAlgorithm


class GradientAllReduceHandle(BackgroundHandle):
    """As `BackgroundHandle`; its thread is idle if DDP's own allreduce does all the work."""

    algorithm: GradientAllReduce

    def reduce(self, bucket: Bucket) -> GradientFuture:
        """Reduce a bucket over all ranks."""
        if self.algorithm.average and self.groups.node is None:
            self.num_communications += 1
            return self.allreduce(bucket)
        return self.run_behind_backward(bucket, self._reduce)

    def _reduce(self, values: torch.Tensor) -> None:
        self.groups.reduce(values, mean)
        if not self.algorithm.average:
            values.mul_(self.training.group.size())


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAllReduce(HierarchicalAlgorithm[GradientAllReduceHandle]):
    """Sums gradients over all ranks, bucket by bucket behind backward, as DDP does.

    Attributes:
        average: Divide by the number of ranks, as DDP does.
        hierarchical: Average within each node first.
    """

    handle_type = GradientAllReduceHandle
    average: bool = True
    hierarchical: bool = False
