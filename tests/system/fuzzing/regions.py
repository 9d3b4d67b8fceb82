"""Blocks that run other blocks, and those at which Dynamo ends a graph; `KINDS` has all by name."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.system.fuzzing import blocks, effects
from tests.system.fuzzing.blocks import WIDTH, Part


class Residual(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.run_inner(x)


class Parallel(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(sum([module(x.to(module.dtype)) for module in self.inner], start=x * 0.5))


class Early(Part):
    """Something made early, and used once the inner blocks have run.

    Halves and a maximum with its places, a size, a sum, or numbers that are read from a tensor.
    """

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)
        if self.choice % 3 == 1:
            self.position = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.choice % 3 == 0:
            left, right = y.chunk(2, dim=1)
            half, top = left.shape[1], right.max(dim=1)
            z = self.run_inner(y)
            return torch.cat([z[:, :half] * left, right], dim=1) + top.values[:, None]
        if self.choice % 3 == 1:
            batch, time, width = y.repeat(3, 1).unflatten(0, (-1, 3)).shape
            z = self.run_inner(y.repeat(3, 1).reshape(batch * time, width)).to(x.dtype)
            return (z.view(batch, time, width) + self.position).mean(1)
        total, count = y.sum(), y.shape[0]
        return torch.tanh(self.run_inner(y) + total / (count * WIDTH)) * total.tanh()


class Numbers(Part):
    """Numbers that are read from a tensor early, and used once the inner blocks have run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, positive, rows = x.mean().item(), (x > 0).sum().item(), x.shape[0]
        return self.run_inner(x) * (1 + scale) * (positive / rows)


class Chunk(Part):
    """Gives each inner block the same rows, and takes columns of each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.run_inner(x).chunk(2, dim=1)
        return torch.cat([right, left * x[:, : WIDTH // 2]], dim=1)


def _save_products(
    other: CheckpointPolicy, _context: Any, op: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else other


class Checkpoint(Part):
    """Selective for odd choices: saves products, and may recompute, or has to, all else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.choice % 2:
            others = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
            policy = functools.partial(_save_products, others[self.choice // 2 % 2])
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(self.run_inner, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(self.run_inner, x, use_reentrant=False)


class Hooked(Part):
    """Hooks on a module, in both directions, or on a tensor."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)
        if self.choice % 5 == 0:
            self.layer.register_forward_hook(lambda _m, _args, out: out * 2)
        elif self.choice % 5 == 1:
            self.layer.register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
        elif self.choice % 5 == 2:
            self.layer.register_full_backward_hook(lambda _m, into, _out: (into[0] * 0.5,))
        elif self.choice % 5 == 3:
            self.layer.register_full_backward_pre_hook(lambda _m, out: (out[0] * 2,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.choice % 5 == 4 and y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y


class Autocast(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.run_inner(x).to(x.dtype)


class NoGrad(Part):
    """Inner blocks without gradients; their parameters are frozen."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.inner.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.run_inner(x)
        return x + y


class Broken(Part):
    """Ends Dynamo's graph between two inner blocks, in one frame, so there are graphs of several.

    A break within a loop, as of blocks among others, has Dynamo compile each of them by itself.
    """

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.LSTM(WIDTH, WIDTH) if self.choice % 3 == 2 else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(self.inner) // 2
        for module in self.inner[:half]:
            x = module(x.to(module.dtype))
        x = x.to(self.dtype)
        if self.choice % 3 == 0:
            x = self.layer(x)
            torch._dynamo.graph_break()
        elif self.choice % 3 == 1:
            x = self.layer(x) if x.sum() > 0 else -self.layer(x * 0.5)
        else:  # it ends a graph too, unless Dynamo's flag allows it
            y, (hidden, _) = self.layer(x)
            x = y + hidden[-1]
        for module in self.inner[half:]:
            x = module(x.to(module.dtype))
        return x


class Break(Part):
    """Ends Dynamo's graph in several ways."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.choice % 4 == 0:
            x = self.layer(x)
            torch._dynamo.graph_break()
            return torch.tanh(x)
        if self.choice % 4 == 1:
            return self.layer(x) if x.sum() > 0 else -self.layer(x * 0.5)
        if self.choice % 4 == 2:
            return self.layer(x) + x.detach().float().mean().item()
        return self.uncompiled(x)

    @torch.compiler.disable
    def uncompiled(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


KINDS: dict[str, type[Part]] = {
    "linear": blocks.Linear,
    "again": blocks.Again,
    "tied": blocks.Tied,
    "convolution": blocks.Convolution,
    "image": blocks.Image,
    "images": blocks.Images,
    "norm": blocks.Norm,
    "batchnorm": blocks.BatchNorm,
    "embedding": blocks.Embedding,
    "scalar": blocks.Scalar,
    "empty": blocks.Empty,
    "flat": blocks.Flat,
    "buffers": blocks.Buffers,
    "noted": blocks.Noted,
    "inplace": blocks.InPlace,
    "dropout": blocks.Dropout,
    "attention": blocks.Attention,
    "flex": blocks.Flex,
    "conditional": blocks.Conditional,
    "operator": blocks.Operator,
    "cell": blocks.Cell,
    "recurrent": blocks.Recurrent,
    "complex": blocks.Complex,
    "scatter": blocks.Scatter,
    "strided": blocks.Strided,
    "parametrized": blocks.Parametrized,
    "pruned": blocks.Pruned,
    "sorted": blocks.Sorted,
    "function": blocks.Function,
    "break": Break,
    "broken": Broken,
    "unused": blocks.Unused,
    "detached": blocks.Detached,
    "choose": blocks.Choose,
    "linalg": effects.Linalg,
    "collective": effects.Collective,
    "statistics": effects.Statistics,
    **dict.fromkeys(effects.EFFECTS, effects.Effect),
    "residual": Residual,
    "parallel": Parallel,
    "chunk": Chunk,
    "early": Early,
    "numbers": Numbers,
    "checkpoint": Checkpoint,
    "hooked": Hooked,
    "autocast": Autocast,
    "no_grad": NoGrad,
}
