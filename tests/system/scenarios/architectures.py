"""Rows about what is in a model: layers, operators, outputs, inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ddpopt.errors import Reason
from tests.support.device import DEVICE
from tests.support.models import MLP, WIDTH, Broken
from tests.system.scenarios.scenario import Scenario, Trainer


class Block(nn.Module):
    """A pre-norm transformer block on (batch, time, width)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = MLP(2)
        self.dropout = nn.Dropout(dropout)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.dropout(self.mlp(x))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.run = run or (lambda block, x: block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (-1, 2))
        for block in self.blocks:
            x = self.run(block, x)
        return x


def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Keep only the block's input for backward."""
    return checkpoint(block, x, use_reentrant=False)


def _save_matrix_products(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.MUST_RECOMPUTE


def selectively_checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Keep the results of matrix products, and recompute everything else."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _save_matrix_products)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


class FlexBlock(Block):
    """Attention by `flex_attention`, which has no backward on the CPU: its inputs are frozen.

    So it attends to the batch itself, and what is trained comes after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x.detach())).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod=lambda score, _b, _h, i, j: score - (i - j).abs())
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class FlexTransformer(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FlexBlock() for _ in range(3))


class ConvNet(nn.Module):
    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.head = nn.Linear(64, 3)
        self.memory_format = memory_format
        self.to(memory_format=memory_format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (4, 4, 4)).contiguous(memory_format=self.memory_format)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(x)), inplace=True)
        return self.head(x.flatten(1))


class Tied(MLP):
    """The last layer has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].weight = self.layers[0].weight


class TwoTypes(MLP):
    """Layers of float32 and float64 in turn."""

    def __init__(self) -> None:
        super().__init__()
        for layer in list(self.layers)[::2]:
            layer.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).relu()
        return x


class Complex(nn.Module):
    """Complex weights between real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights = nn.ParameterList(
            torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 8 for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).to(torch.complex64)
        for weight in self.weights:
            x = x @ weight
        return self.last(x.abs())


class SharedAcrossBreak(MLP):
    """A weight that is used before and after a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x).relu()
        torch._dynamo.graph_break()
        for layer in (*self.layers[3:], self.layers[0]):
            x = layer(x).relu()
        return x


class Regions(MLP):
    """Autocast around a part, and a stretch without gradients in another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            for layer in list(self.layers)[:4]:
                x = layer(x).relu()
        with torch.no_grad():
            scale = x.abs().mean() + 1
        for layer in list(self.layers)[4:]:
            x = layer(x.float() / scale).relu()
        return x


class Parts(MLP):
    """Tuples, sizes and views made early and used late."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.layers[0](x).chunk(2, dim=1)
        half, top = left.shape[1], right.max(dim=1)
        for layer in self.layers[1:]:
            x = layer(x).relu_()
        return torch.cat([x[:, :half] * left, right], dim=1) + top.values[:, None]


class Shapes(MLP):
    """Sizes that tracing finds to be numbers only after they were used."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (-1, 3))
        batch, time, width = x.shape
        for layer in self.layers[:3]:
            x = layer(x.reshape(batch * time, width)).relu().view(batch, time, width)
        x = x + self.position
        for layer in self.layers[3:]:
            x = layer(x.reshape(batch * time, width)).relu().view(batch, time, width)
        return x


class Scalars(MLP):
    """A Python float, an int and a size, made early from data and used late."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, positive, rows = x.mean().item(), (x > 0).sum().item(), x.shape[0]
        for layer in self.layers:
            x = layer(x).relu() * (1 + scale)
        return x * (positive / rows)


class ZeroDimensional(MLP):
    """Zero-dimensional tensors that pass from layer to layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total, count = x.sum(), x.shape[0]
        for layer in self.layers:
            x = layer(x).relu() + total / (count * WIDTH)
            total, count = x.sum(), count + 1
        return x * total


class Sparse(MLP):
    """An embedding with sparse gradients in front."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table((x[:, 0].abs() * 3).long().clamp(max=9)))


class Counting(MLP):
    """A buffer that is written to in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            self.seen += x.detach().mean()
        return x * self.seen


class InPlace(MLP):
    """Writes to activations, to a part of one, and through a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).relu_()
        for layer in list(self.layers)[1:]:
            y = layer(x)
            y[:, 0] = 1.0
            y.view(-1)[3:7].mul_(0.5)
            x = y.add_(x)
        return x


class MutatedInput(MLP):
    """Writes to its input at the start, and uses it at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        x.mul_(0.5)
        return super().forward(y) + x


class InputMutatedLate(MLP):
    """Writes to its input at the start and at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        x.mul_(0.5)
        y = super().forward(y)
        x[0] = 2.0
        return y + x


class ViewsOfInputs(MLP):
    """Returns views of its input beside what it computes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().forward(x), x[:, 3:], x.view(-1)


@dataclass
class Result:
    value: torch.Tensor
    hidden: list[torch.Tensor]
    count: int


class ReturnsDataclass(MLP):
    def forward(self, x: torch.Tensor) -> Result:
        hidden = []
        for layer in self.layers:
            x = layer(x).relu()
            hidden.append(x)
        return Result(x, hidden, len(hidden))


class ReturnsNested(ReturnsDataclass):
    """Dictionaries, tuples, a number and a None; and outputs of all layers."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        result = super().forward(x)
        first, *rest = result.hidden
        return {"value": result.value, "hidden": (first, [tuple(rest), None]), "count": 6}


def _loss_of_dataclass(result: Result) -> torch.Tensor:
    return result.value.pow(2).mean() + sum(h.mean() for h in result.hidden) / result.count


def _loss_of_nested(result: dict[str, Any]) -> torch.Tensor:
    first, (rest, nothing) = result["hidden"]
    assert nothing is None
    return _loss_of_dataclass(Result(result["value"], [first, *rest], result["count"]))


class Conditional(MLP):
    """`torch.cond`, with a layer in each branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[:2]:
            x = layer(x).relu()
        one, other = self.layers[2], self.layers[3]
        x = torch.cond(x.sum() > 85, lambda y: one(y).sin(), lambda y: other(y).cos(), (x,))
        for layer in list(self.layers)[4:]:
            x = layer(x).relu()
        return x


class UnusedBranch(MLP):
    """Two layers that no forward uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers[:2], *self.layers[4:]):
            x = layer(x).relu()
        return x


class AlternatingBranch(MLP):
    """The branch depends on the batch's size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.layers[2] if x.shape[0] > 4 else self.layers[3]
        for layer in (*self.layers[:2], branch, *self.layers[4:]):
            x = layer(x).relu()
        return x


class Recurrent(nn.Module):
    """An LSTM between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = MLP(4), MLP(4)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (hidden, _) = self.lstm(self.first(x).unflatten(0, (-1, 2)))
        return self.last(y) + hidden[-1][:, None]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (-1, 2))
        for layer in self.layers:
            y, weights = layer(x, x, x)
            x = x + y * weights.mean()
        return x


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return x @ weight, x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        of_product, of_double = gradients
        return of_product @ weight.t() + 2 * of_double, x.t() @ of_product


class WithFunction(MLP):
    """A custom autograd Function with two outputs on every second layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i % 2:
                product, double = _Product.apply(x, layer.weight)
                x = product + layer.bias + double
            else:
                x = layer(x).relu()
        return x


@torch.library.custom_op("ddpopt_tests::product", mutates_args=())
def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _product_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = ctx.saved_tensors
    return gradient @ weight.t(), x.t() @ gradient


_product.register_autograd(
    _product_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("ddpopt_tests::add_sum", mutates_args=("total",))
def _add_sum(x: torch.Tensor, total: torch.Tensor) -> None:
    total.add_(x.sum())


class WithCustomOps(MLP):
    """A custom operator with a gradient on every second layer, and one that writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = _product(x, layer.weight) + layer.bias if i % 2 else layer(x).relu()
            _add_sum(x.detach(), self.total)
        return x + self.total.mean() / 100


def _frozen() -> MLP:
    model = MLP()
    model.layers[1].requires_grad_(False)
    model.layers[4].weight.requires_grad_(False)
    return model


def _train_and_note_inputs(trainer: Trainer) -> None:
    for (x,) in trainer.steps():
        trainer.loss(x).backward()
        trainer.note("input", x)
        trainer.update()


def _train_inputs_too(trainer: Trainer) -> None:
    for (x,) in trainer.steps():
        trainer.loss(x.requires_grad_()).backward()
        trainer.note("input's gradient", x.grad)
        trainer.update()


def _write_to_returned_views(trainer: Trainer) -> None:
    for (x,) in trainer.steps():
        value, part, flat = trainer.forward(x)
        loss = value.pow(2).mean() + part.mean()
        trainer.note("loss", loss)
        loss.backward()
        flat[3] = 2.0
        trainer.note("input", x)
        trainer.note("other view", part)
        trainer.update()


_UNUSED = {"bucket_cap_mb": 0.03, "find_unused_parameters": True}
_GROWING = (2, 3, 1, 5)

ARCHITECTURES: dict[str, Callable[[], Scenario]] = {
    "mlp": lambda: Scenario(MLP()),
    "transformer": lambda: Scenario(Transformer()),
    "MultiheadAttention": lambda: Scenario(Attending()),
    "flex_attention": lambda: Scenario(
        FlexTransformer(), note="projections frozen: no backward on the CPU"
    ),
    "LSTM": lambda: Scenario(Recurrent(), note="Dynamo breaks the graph at it"),
    "LSTM in the graph": lambda: Scenario(Recurrent(), dynamo_config={"allow_rnn": True}),
    "conv and batch norm": lambda: Scenario(ConvNet(), ddp_options={"bucket_cap_mb": 0.001}),
    "channels_last": lambda: Scenario(
        ConvNet(torch.channels_last), ddp_options={"bucket_cap_mb": 0.001}
    ),
    "buffers not broadcast": lambda: Scenario(
        ConvNet(), ddp_options={"bucket_cap_mb": 0.001, "broadcast_buffers": False}
    ),
    "mutated buffer": lambda: Scenario(Counting()),
    "dropout": lambda: Scenario(Transformer(dropout=0.5)),
    "tied weights": lambda: Scenario(Tied()),
    "frozen parameters": lambda: Scenario(_frozen()),
    "two dtypes": lambda: Scenario(TwoTypes()),
    "bfloat16 parameters": lambda: Scenario(MLP().bfloat16(), dtype=torch.bfloat16),
    "complex parameters": lambda: Scenario(Complex()),
    "sparse embedding": lambda: Scenario(Sparse()),
    "dynamic batch": lambda: Scenario(
        Transformer(), steps=tuple(((2 * n, WIDTH),) for n in _GROWING)
    ),
    "last short batch": lambda: Scenario(
        MLP(), steps=(((4, WIDTH),),) * 3 + (((3, WIDTH),), ((4, WIDTH),))
    ),
    "graph break": lambda: Scenario(Broken()),
    "weight shared across a graph break": lambda: Scenario(SharedAcrossBreak()),
    "activation checkpointing": lambda: Scenario(Transformer(run=checkpointed)),
    "selective activation checkpointing": lambda: Scenario(
        Transformer(run=selectively_checkpointed)
    ),
    "autocast and no_grad regions": lambda: Scenario(Regions()),
    "torch.cond": lambda: Scenario(Conditional()),
    "custom autograd Function": lambda: Scenario(WithFunction()),
    "custom operators": lambda: Scenario(WithCustomOps()),
    "unused branch": lambda: Scenario(UnusedBranch(), ddp_options=_UNUSED),
    "alternating branch": lambda: Scenario(
        AlternatingBranch(),
        ddp_options=_UNUSED,
        steps=tuple(((n, WIDTH),) for n in (3, 6, 4, 7, 2, 5)),
    ),
    "tuples, sizes and views": lambda: Scenario(Parts()),
    "sizes found to be constant": lambda: Scenario(
        Shapes(), steps=tuple(((3 * n, WIDTH),) for n in _GROWING)
    ),
    "zero-dimensional tensors": lambda: Scenario(ZeroDimensional()),
    "numbers read from tensors": lambda: Scenario(
        Scalars(),
        note="a number read early and used late spans all buckets",
        dynamo_config={"capture_scalar_outputs": True},
        fallbacks=frozenset({Reason.NO_LEGAL_CUT}),
    ),
    "in-place operators": lambda: Scenario(InPlace()),
    "mutated inputs": lambda: Scenario(
        MutatedInput(),
        train=_train_and_note_inputs,
        is_exact_on_inductor=False,
        note="Inductor of torch 2.13 gives other gradients, unsplit too",
    ),
    "inputs mutated at both ends": lambda: Scenario(
        InputMutatedLate(), train=_train_and_note_inputs
    ),
    "views of inputs as outputs": lambda: Scenario(ViewsOfInputs(), train=_write_to_returned_views),
    "inputs that require grad": lambda: Scenario(MLP(), train=_train_inputs_too),
    "nested outputs": lambda: Scenario(ReturnsNested(), loss=_loss_of_nested),
    "dataclass outputs": lambda: Scenario(ReturnsDataclass(), loss=_loss_of_dataclass),
}
