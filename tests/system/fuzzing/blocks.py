"""Layers of random models: one class a kind, each from (batch, WIDTH) to (batch, WIDTH).

Constructors take the block, the modules within it, and the linear layers made before it, whose
parameters it may share. `regions.py` has the blocks that run other blocks or end a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import prune

from tests.support.backward_functions import NotesOwnSizeOfWeight, NotesSize
from tests.system.fuzzing.spec import Block

WIDTH = 8


class Part(nn.Module):
    """What all have in common.

    Its input comes in its dtype: the caller converts. Blocks at which Dynamo ends a graph do
    everything in `forward`, because each frame around the break is one more graph.
    """

    def __init__(self, block: Block, inner: Sequence[nn.Module], earlier: list[nn.Linear]) -> None:
        super().__init__()
        self.choice = block.choice
        self.inner = nn.ModuleList(inner)
        self.make(earlier)
        self.dtype = getattr(torch, block.dtype)
        for name, parameter in self.named_parameters(recurse=False):
            if not parameter.is_complex():
                setattr(self, name, nn.Parameter(parameter.detach().to(self.dtype)))
        for module in self.children():
            if module is not self.inner and module not in earlier:
                module.to(self.dtype)

    def make(self, earlier: list[nn.Linear]) -> None:
        """Make parameters and submodules."""

    def run_inner(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.inner:
            x = module(x.to(module.dtype))
        return x


ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.tanh,
    torch.relu,
    F.gelu,
    lambda x: x,
    F.silu,
)


class Linear(Part):
    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH, bias=self.choice % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.choice % len(ACTIVATIONS)](self.layer(x))


class Again(Part):
    """An earlier layer, called once more."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = earlier[self.choice % len(earlier)] if earlier else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.layer(x.to(self.layer.weight.dtype)))


class Tied(Part):
    """A layer with an earlier one's weight, transposed for odd choices."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)

    def __init__(self, block: Block, inner: Sequence[nn.Module], earlier: list[nn.Linear]) -> None:
        super().__init__(block, inner, earlier)
        if earlier:
            self.layer.weight = earlier[self.choice % len(earlier)].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight.t() if self.choice % 2 else self.layer.weight
        return torch.tanh(F.linear(x.to(weight.dtype), weight, self.layer.bias.to(weight.dtype)))


class Convolution(Part):
    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.unflatten(1, (2, WIDTH // 2))).flatten(1)


class Image(Part):
    """Convolutions that Inductor computes with channels last, and a pooling between them."""

    def make(self, earlier: list[nn.Linear]) -> None:
        pools = (nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(1))
        self.widen, self.narrow = nn.Conv2d(2, 16, 3, padding=1), nn.Conv2d(16, WIDTH, 1)
        self.pool = pools[self.choice % len(pools)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.relu(self.widen(x.unflatten(1, (2, 2, WIDTH // 4))))
        return self.narrow(self.pool(wide)).flatten(1)


class Images(Part):
    """Convolutions with batch norms, added up in place; with channels last for odd choices."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(2))
        formats = (torch.contiguous_format, torch.channels_last)
        self.memory_format = formats[self.choice % 2]
        self.to(memory_format=self.memory_format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (2, 2, WIDTH // 4)).contiguous(memory_format=self.memory_format)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(x)), inplace=True)
        return x.flatten(1)


class Norm(Part):
    def make(self, earlier: list[nn.Linear]) -> None:
        made = (nn.LayerNorm(WIDTH), nn.GroupNorm(2, WIDTH), nn.RMSNorm(WIDTH))
        self.layer = made[self.choice % len(made)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class BatchNorm(Part):
    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.BatchNorm1d(WIDTH, momentum=None if self.choice == 5 else 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Embedding(Part):
    """A table whose rows are chosen by the input; with sparse gradients for choice 1."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.table = nn.Embedding(5, WIDTH, sparse=self.choice % 3 == 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, 0].detach().float().abs() * 3).long().clamp(max=4)
        # Its rows must not be x's gradient itself, which eager DDP would divide with them.
        return x + self.table(rows) * 2


class Scalar(Part):
    """A parameter without dimensions."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.weight = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Empty(Part):
    """A parameter without elements."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.weight = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.weight])


class Flat(Part):
    """Two matrices that are views of one parameter."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.weight = nn.Parameter(torch.randn(2 * WIDTH * WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in self.weight.split(WIDTH * WIDTH):
            x = torch.tanh(x @ matrix.view(WIDTH, WIDTH))
        return x


class Buffers(Part):
    """Writes buffers in several ways: a counter, a running mean, a new tensor, through a view."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=self.choice % 2 == 0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0).float()
        if self.choice % 4 == 0:
            self.count.add_(1)
            return self.layer(x) + self.count  # divided, torch.compile's gradient is wrong (2.13)
        if self.choice % 4 == 1:
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
        elif self.choice % 4 == 2:
            self.mean = self.mean * 0.9 + mean * 0.1
        else:
            self.mean[: WIDTH // 2].copy_(mean[WIDTH // 2 :])
        return self.layer(x) - self.mean.to(x.dtype)


class Noted(Part):
    """A layer whose backward writes a buffer, which a hook on the layer's weight reads."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.choice % 2:
            return NotesOwnSizeOfWeight.apply(x, self.layer.weight, self.size) + self.layer.bias
        return NotesSize.apply(self.layer(x), self.size)

    def hook(self) -> None:
        """Put the hook on the weight, unless that is frozen."""
        if self.layer.weight.requires_grad:
            self.layer.weight.register_hook(
                lambda gradient: gradient / (self.size + 1).to(gradient.dtype)
            )


class InPlace(Part):
    def make(self, earlier: list[nn.Linear]) -> None:
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        if self.choice % 5 == 0:
            y.add_(self.weight)
        elif self.choice % 5 == 1:
            y[:, 0] = self.weight[0]
        elif self.choice % 5 == 2:
            y[:, : WIDTH // 2].mul_(self.weight[: WIDTH // 2])
        elif self.choice % 5 == 3:
            y = F.relu(x * self.weight, inplace=True)
        else:
            y.view(-1)[::2].copy_((x * self.weight).view(-1)[1::2])
        return y


class Dropout(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.3, self.training)


class Attention(Part):
    """Rows attend to rows: to all, to those before them, or also through their mean weight."""

    def make(self, earlier: list[nn.Linear]) -> None:
        if self.choice % 3 == 2:
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        else:
            self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.choice % 3 == 2:
            y, weights = self.attend(x, x, x)
            return x + y * weights.mean()
        # With a batch's dimension, of one: without, torch takes none of its kernels.
        q, k, v = self.mix(x).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.choice % 3 == 1)
        return x + self.out(y[0].transpose(0, 1).flatten(1))


class Flex(Part):
    """`flex_attention`, which has no backward on the CPU: what is trained comes after it."""

    _HEAD = 16  # columns of a head, the least that it takes on a GPU

    def make(self, earlier: list[nn.Linear]) -> None:
        self.mix = nn.Linear(WIDTH, 6 * self._HEAD).requires_grad_(False)
        self.out = nn.Linear(2 * self._HEAD, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x.detach()).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)[:, None]
        y = flex_attention(q, k, v, score_mod=lambda score, _b, _h, i, j: score - (i - j).abs())
        return x + self.out(y[0].transpose(0, 1).flatten(1))


class Conditional(Part):
    """`torch.cond`, with a layer in each branch."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.one, self.other
        return torch.cond(x.sum() > 0, lambda y: one(y).sin(), lambda y: other(y).cos(), (x,))


class Cell(Part):
    def make(self, earlier: list[nn.Linear]) -> None:
        self.cell = nn.GRUCell(WIDTH, WIDTH) if self.choice % 2 else nn.RNNCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x, torch.tanh(x))


class Recurrent(Part):
    """A recurrent layer that Dynamo unrolls, over the two halves of each row."""

    def make(self, earlier: list[nn.Linear]) -> None:
        width = WIDTH // 2
        if self.choice % 4 == 0:
            self.layer = nn.GRU(width, width, num_layers=2, batch_first=True)
        elif self.choice % 4 == 1:
            self.layer = nn.RNN(width, width // 2, bidirectional=True, batch_first=True)
        elif self.choice % 4 == 2:
            self.layer = nn.LSTMCell(width, width)
        else:
            self.layer = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.unflatten(1, (2, WIDTH // 2))
        if not isinstance(self.layer, nn.LSTMCell):
            return self.layer(halves)[0].flatten(1)
        first = self.layer(halves[:, 0])
        second = self.layer(halves[:, 1], first)
        return torch.cat([first[0], second[0]], 1)


class Parametrized(Part):
    """A weight that is computed from others."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Pruned(Parametrized):
    """A weight that a hook computes before forward."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)
        if self.choice % 2:
            nn.utils.weight_norm(self.layer)
        else:
            prune.l1_unstructured(self.layer, "weight", 0.25)


class Sorted(Part):
    """Operators with several results, some without a gradient."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, order = self.layer(x).sort(dim=1)
        if self.choice % 3 == 0:
            return values + order.to(values.dtype) * 0.1
        if self.choice % 3 == 1:
            largest, place = x.max(dim=1, keepdim=True)
            return values * largest + place
        first, second = torch.unbind(values.unflatten(1, (2, WIDTH // 2)), 1)
        return torch.cat([second, first * second], 1)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight * 0.5, (gradient * x).sum(0)


class _Product(torch.autograd.Function):
    """Two results, of which the second does not depend on the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return x @ weight, x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        of_product, of_double = gradients
        return of_product @ weight.t() + 2 * of_double, x.t() @ of_product


@torch.library.custom_op("fuzzing::product", mutates_args=())
def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


_product.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[1]))
_product.register_autograd(
    lambda ctx, gradient: _Product.backward(ctx, gradient, torch.zeros_like(ctx.saved_tensors[0])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("fuzzing::add_sum", mutates_args=("total",))
def _add_sum(x: torch.Tensor, total: torch.Tensor) -> None:
    total.add_(x.sum())


class Operator(Part):
    """A custom operator with a gradient; for odd choices, one that writes a buffer as well."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(_product(x, self.layer.weight) + self.layer.bias)
        if self.choice % 2:
            _add_sum(y.detach(), self.total)
            y = y + (self.total.mean() / 4).to(y.dtype)
        return y


class Complex(Part):
    """Complex numbers: Fourier transforms, rotations, a product of matrices, writes to parts."""

    def make(self, earlier: list[nn.Linear]) -> None:
        pairs = torch.randn(WIDTH, 2) / 2
        if self.choice % 2:
            self.weight = nn.Parameter(torch.view_as_complex(pairs))
        else:
            self.weight = nn.Parameter(pairs)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # There is no complex number of bfloat16, and a complex parameter is one of float32.
        wide = self.layer(x).to(torch.float64 if self.dtype == torch.float64 else torch.float32)
        weight = self.weight
        if not weight.is_complex():
            weight = torch.view_as_complex(weight.to(wide.dtype))
        return self.rotate(wide, weight).to(x.dtype)

    def rotate(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        half = WIDTH // 2
        if self.choice % 6 < 2:
            return torch.fft.irfft(torch.fft.rfft(x) * weight[: half + 1], n=WIDTH)
        if self.choice % 6 == 2:
            pairs = torch.view_as_complex(x.unflatten(1, (half, 2)))
            turned = pairs * torch.polar(torch.ones_like(x[0, :half]), weight.angle()[:half])
            return torch.view_as_real(turned).flatten(1) + turned.abs().repeat(1, 2)
        if self.choice % 6 == 3:
            spectrum = torch.fft.fft(x) * weight
            return spectrum.real + torch.fft.ifft(spectrum).imag
        if self.choice % 6 == 4:
            spectrum = torch.fft.rfft(x)
            filtered = spectrum.clone()
            filtered[:, 1:half] *= weight[1:half]
            filtered[:, 0] = spectrum[:, 0].conj() * weight[0]
            return torch.fft.irfft(filtered, n=WIDTH)
        numbers = torch.complex(x, -x)
        turned = numbers @ torch.outer(weight, weight.conj()).to(numbers.dtype)
        return torch.view_as_real(turned).select(2, 1)


class Scatter(Part):
    """Values that are gathered and put elsewhere, several at one place."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("places", torch.tensor([3, 1, 1, 6, 0, 3, 7, 2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x))
        if self.choice % 6 == 0:
            return torch.index_put(x, (self.places[: len(x)] % len(x),), y, accumulate=True)
        if self.choice % 6 == 1:
            return x * y + torch.zeros_like(x).scatter_add(1, self.places.expand_as(y), y)
        if self.choice % 6 == 2:
            return torch.index_add(x, 1, self.places[: WIDTH // 2], y[:, ::2], alpha=2)
        if self.choice % 6 == 3:
            part = torch.slice_scatter(x, y[:, : WIDTH // 2] * 2, 1, 2, 2 + WIDTH // 2)
            return torch.select_scatter(part, y[:, 0] * x[:, 1], 1, 1)
        if self.choice % 6 == 4:
            return x.scatter_reduce(1, self.places.expand_as(y), y, "mean") * y
        gathered = y.gather(1, self.places.expand_as(y))
        return torch.index_copy(gathered, 1, self.places[3:6], x[:, :3] * y[:, 3:6])


class Strided(Part):
    """Writes to every other element, to diagonals, and through views with strides of their own."""

    def make(self, earlier: list[nn.Linear]) -> None:
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        z = y.clone()
        if self.choice % 6 == 0:
            z[::2] = x[::2] * self.weight
        elif self.choice % 6 == 1:
            z.diagonal().mul_(self.weight[: min(z.shape)])
            z[:, 1:].diagonal().add_(x.diagonal()[: min(len(x), WIDTH - 1)])
        elif self.choice % 6 == 2:
            windows = z.unfold(1, 4, 2) @ self.weight[:4]
            z = F.pad(windows, (0, WIDTH - windows.shape[1])) + y
        elif self.choice % 6 == 3:
            z[:, ::2], z[:, 1::2] = y[:, 1::2] * self.weight[::2], y[:, ::2]
        elif self.choice % 6 == 4:
            torch.as_strided(z, (len(x), WIDTH // 2), (WIDTH, 2)).mul_(self.weight[::2])
        else:
            z.t()[1:4].add_(self.weight[1:4, None] * x.t()[:3])
            z = torch.roll(z, 1, 1).flip(0)
        return torch.tanh(z)


class Function(Part):
    """An autograd function of the user's: one whose gradient is not the formula's, or of two."""

    def make(self, earlier: list[nn.Linear]) -> None:
        shape = (WIDTH, WIDTH) if self.choice % 2 else (WIDTH,)
        self.weight = nn.Parameter(torch.randn(shape) / len(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.choice % 2:
            product, double = _Product.apply(x, self.weight)
            return torch.tanh(product) + double
        return _Scaled.apply(x, self.weight)


class Unused(Part):
    def make(self, earlier: list[nn.Linear]) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Detached(Unused):
    """A layer that takes part in forward only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).detach()


class Choose(Part):
    """One of two layers, by the data (so by rank too) or by the number of rows.

    Not by the number of the call: a checkpoint calls it again.
    """

    def make(self, earlier: list[nn.Linear]) -> None:
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_first = x.shape[0] % 2 == 1 if self.choice % 2 else x.sum() > 0
        return self.first(x) if is_first else self.second(x)
