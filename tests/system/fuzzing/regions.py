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


class Chunk(Part):
    """Gives each inner block the same rows, and takes columns of each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.run_inner(x).chunk(2, dim=1)
        return torch.cat([right, left * x[:, : WIDTH // 2]], dim=1)


def _save_products(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpoint(Part):
    """Selective for odd choices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.choice % 2:
            contexts = functools.partial(create_selective_checkpoint_contexts, _save_products)
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
        with torch.autocast("cpu", torch.bfloat16):
            return self.run_inner(x).to(x.dtype)


class NoGrad(Part):
    """Inner blocks without gradients; their parameters are frozen."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.inner.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.run_inner(x)
        return x + y


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
    "checkpoint": Checkpoint,
    "hooked": Hooked,
    "autocast": Autocast,
    "no_grad": NoGrad,
}
