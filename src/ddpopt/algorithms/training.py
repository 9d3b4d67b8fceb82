"""`Training`: what an algorithm is attached to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms.comm import Groups
from ddpopt.reducer import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What an algorithm is attached to.

    `parameters` are, in the module's order, those that DDP reduces, even if they are frozen now,
    and those that are trainable now, except what DDP ignores. `groups` are the algorithm's own
    process groups; None in `Algorithm.check`, which may refuse before there are any.
    """

    ddp: DistributedDataParallel
    optimizers: tuple[torch.optim.Optimizer, ...]
    parameters: dict[torch.Tensor, Parameter]
    groups: Groups | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """DDP's process group, on which DDP itself may be communicating."""
        group: dist.ProcessGroup = self.ddp.process_group
        return group

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, on which communication is ordered."""
        return next(iter(self.parameters)).device
