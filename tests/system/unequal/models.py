"""The modules that scripts train: small, in float64, so that only faults make a difference.

In float64 a sum in another order differs by 1e-16; what comes of it after forty steps is far below
what any fault does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.system.unequal.actions import NUM_RANKS
from tests.system.unequal.script import Block, Script

WIDTH = 8
LONGEST = 12  # the rows of a table of positions
DTYPE = torch.float64

# torch 2.13 has renamed it.
_all_gather = getattr(fc, "all_gather_single_autograd", None) or fc.all_gather_tensor_autograd


class _MeanOfRanks(torch.autograd.Function):
    """The mean over all ranks, forward and backward, as a synchronised norm needs it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.group_name = group_name
        return fc.wait_tensor(fc.all_reduce(x, "sum", group_name)) / NUM_RANKS

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = fc.wait_tensor(fc.all_reduce(gradient, "sum", ctx.group_name))
        return total / NUM_RANKS, None


class Layer(nn.Module):
    """One block. Every kind ends in a tanh, so that activations stay small."""

    def __init__(self, block: Block, group_name: str) -> None:
        super().__init__()
        self.kind, self.group_name = block.kind, group_name
        self.has_positions = block.has_positions
        self.branch = 0  # which layer a "branch" uses; a step sets it
        if self.kind == "wide":
            # It runs last, its gradient arrives first, and it is registered before the other.
            self.last = _linear(WIDTH, 3 * WIDTH)
            self.first = _linear(WIDTH, WIDTH)
        elif self.kind == "conv":
            self.first = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, dtype=DTYPE)
        else:
            self.first = _linear(WIDTH, WIDTH)
        if self.kind in ("unused", "branch"):
            self.other = _linear(WIDTH, WIDTH)
        if self.kind == "batchnorm":
            self.statistics = nn.BatchNorm1d(WIDTH, dtype=DTYPE)
        if self.has_positions:
            self.register_buffer("positions", 0.1 * torch.randn(LONGEST, WIDTH, dtype=DTYPE))
            self.second = _linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._mix(x)
        if self.has_positions:
            # A checkpoint computes the sum again in backward, from the buffer.
            y = self.second(torch.sigmoid(y + self.positions[: x.shape[1]]))
        return torch.tanh(y)

    def _mix(self, x: torch.Tensor) -> torch.Tensor:  # noqa: PLR0911  # one for each kind
        if self.kind == "conv":
            return self.first(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "wide":
            return self.last(self.first(x)).unflatten(-1, (3, WIDTH)).sum(-2)
        if self.kind == "branch" and self.branch:
            return self.other(x)
        y = self.first(x)
        if self.kind == "shared":
            return self.first(torch.sigmoid(y))
        if self.kind == "batchnorm":
            return self.statistics(y.flatten(0, 1)).view_as(y)
        if self.kind == "norm":
            return y - _MeanOfRanks.apply(y.mean((0, 1)), self.group_name)
        if self.kind == "gather":
            # Each rank's mean, of which each row takes as much as it is like it.
            own = y.mean((0, 1)).unsqueeze(0)
            means = _all_gather(own, 0, self.group_name)
            return y + torch.softmax(y @ means.T, -1) @ means
        if self.kind == "exchange":
            # As experts do: a row for each rank goes there, through its layer, and back.
            sent = y.mean((0, 1)) * torch.arange(1.0, NUM_RANKS + 1, dtype=DTYPE)[:, None]
            rows = [1] * NUM_RANKS
            got = fc.all_to_all_single_autograd(sent, rows, rows, self.group_name)
            back = fc.all_to_all_single_autograd(torch.sigmoid(got), rows, rows, self.group_name)
            return y + back.sum(0)
        return y


class Model(nn.Module):
    """The blocks of a script, one after another, with a graph break between two of them or none."""

    def __init__(self, script: Script, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.is_checkpointed = tuple(block.is_checkpointed for block in script.blocks)
        layers = [Layer(block, group.group_name) for block in script.blocks]
        self.order = tuple(range(len(layers)))
        if script.is_registered_in_reverse:
            layers, self.order = layers[::-1], self.order[::-1]
        self.layers = nn.ModuleList(layers)
        self.num_before_break = script.num_before_break

    def choose(self, branch: int) -> None:
        """Have the blocks that have two layers use this one."""
        for layer in self.layers:
            layer.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In a loop Dynamo would take a break for a reason to compile each layer by itself.
        x = self._run(x, range(self.num_before_break))
        if self.num_before_break:
            torch._dynamo.graph_break()
        return self._run(x, range(self.num_before_break, len(self.layers)))

    def _run(self, x: torch.Tensor, places: range) -> torch.Tensor:
        for place in places:
            layer = self.layers[self.order[place]]
            if self.is_checkpointed[place]:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    return nn.Linear(num_inputs, num_outputs, dtype=DTYPE)
