"""A property of all of `split`: predicted buckets are the Reducer's, by parameter index.

A row for each way to use DDP, with a live Reducer; random modules with its own function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.beside import compiled
from tests.support.buckets import assigned_by_torch, real_buckets
from tests.support.cuts import only_cut
from tests.support.fake_ddp import cut_of
from tests.support.models import MLP
from tests.support.releases import needs_delayed_parameters

WIDE = 512  # a layer of this width holds 1.002 MiB


class Matrices(nn.Module):
    """Six matrices, used by a function of `(matrices, x)`."""

    def __init__(self, function: Callable[..., torch.Tensor], width: int = 64) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(width, width) / 8 for _ in range(6))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.matrices, x)


def _by_keyword(matrices: Any, x: torch.Tensor) -> torch.Tensor:
    for matrix in matrices:
        x = F.linear(input=x, weight=matrix).relu()
    return x


def _in_nested_lists(matrices: Any, x: torch.Tensor) -> torch.Tensor:
    for first, second in zip(matrices[::2], matrices[1::2], strict=True):
        x = (x @ torch.cat([first, *[second]], dim=1)).relu()[:, :64]
    return x


def _in_checkpoints(matrices: Any, x: torch.Tensor) -> torch.Tensor:
    for matrix in matrices:
        x = checkpoint(lambda v, w: (v @ w).relu(), x, matrix, use_reentrant=False)
    return x


def _reused(matrices: Any, x: torch.Tensor) -> torch.Tensor:
    for i in (0, 1, 2, 1, 3, 4, 0, 5, 5):
        x = (x @ matrices[i]).relu()
    return x


def _out_of_order(matrices: Any, x: torch.Tensor) -> torch.Tensor:
    for i in (3, 0, 5, 1, 4, 2):
        x = (x @ matrices[i]).relu()
    return x


class Flat(nn.Module):
    """Weights that are views of one flat parameter, and parameters that share a storage."""

    def __init__(self) -> None:
        super().__init__()
        storage = torch.randn(4, 64, 64) / 8
        self.views = nn.ParameterList(nn.Parameter(storage[i]) for i in range(4))
        self.flat = nn.Parameter(torch.randn(2 * 64 * 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.views:
            x = (x @ weight).relu()
        for weight in self.flat.split(64 * 64):
            x = (x @ weight.view(64, 64)).relu()
        return x


class Mixed(MLP):
    """Layers of float32 and bfloat16 in turn."""

    def __init__(self) -> None:
        super().__init__(depth=7)
        for layer in list(self.layers)[::3]:
            layer.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).relu()
        return x


class Sparse(MLP):
    """Two tables with sparse gradients, one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 64, sparse=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, 0].abs() * 3).long().clamp(max=9)
        for layer, table in zip(self.layers[::3], self.tables, strict=True):
            x = layer(x + table(rows)).relu()
        for layer in (*self.layers[1:3], *self.layers[4:]):
            x = layer(x).relu()
        return x


def _without(model: nn.Module, change: Callable[[nn.Module], Any]) -> nn.Module:
    change(model)
    return model


def _ignore_first(model: nn.Module) -> None:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["layers.0.weight", "layers.3.bias"]
    )


def _tie(model: MLP) -> None:
    model.layers[-1].weight = model.layers[0].weight
    model.layers[2].weight = model.layers[4].weight


def _freeze(model: MLP) -> None:
    model.layers[1].requires_grad_(False)
    model.layers[5].bias.requires_grad_(False)


@dataclass(frozen=True)
class Row:
    model: Callable[[], nn.Module]
    options: dict[str, Any]
    width: int = 64
    min_sections: int = 2


SMALL = {"bucket_cap_mb": 0.03}
ROWS: dict[str, Row] = {
    "default caps": Row(lambda: MLP(width=WIDE), {}, WIDE),
    "cap 0.5": Row(lambda: MLP(width=WIDE), {"bucket_cap_mb": 0.5}, WIDE, 6),
    "cap 3": Row(lambda: MLP(width=WIDE), {"bucket_cap_mb": 3}, WIDE, 2),
    "cap 25": Row(lambda: MLP(width=WIDE), {"bucket_cap_mb": 25}, WIDE, 0),
    "list of caps": Row(lambda: MLP(width=WIDE), {"bucket_cap_mb_list": [0.1, 2, 1]}, WIDE, 3),
    "find unused": Row(MLP, {**SMALL, "find_unused_parameters": True}),
    "find unused, default caps": Row(
        lambda: MLP(width=WIDE), {"find_unused_parameters": True}, WIDE, min_sections=0
    ),
    "find unused, used out of order": Row(
        lambda: Matrices(_out_of_order), {**SMALL, "find_unused_parameters": True}
    ),
    "find unused, static": Row(
        MLP, {**SMALL, "find_unused_parameters": True, "static_graph": True}
    ),
    "static": Row(MLP, {**SMALL, "static_graph": True}),
    "mixed dtypes": Row(Mixed, {"bucket_cap_mb": 0.01}),
    "mixed dtypes, find unused": Row(
        Mixed, {"bucket_cap_mb": 0.01, "find_unused_parameters": True}
    ),
    "sparse gradients": Row(Sparse, SMALL),
    "ignored": Row(lambda: _without(MLP(), _ignore_first), SMALL),
    "tied": Row(lambda: _without(MLP(), _tie), SMALL),
    "reused": Row(lambda: Matrices(_reused), SMALL),
    "used out of order": Row(lambda: Matrices(_out_of_order), SMALL),
    "views of flat storage": Row(Flat, {"bucket_cap_mb": 0.02}),
    "by keyword": Row(lambda: Matrices(_by_keyword), SMALL),
    "in nested lists": Row(lambda: Matrices(_in_nested_lists), SMALL),
    "in a higher-order op": Row(lambda: Matrices(_in_checkpoints), SMALL),
    "frozen": Row(lambda: _without(MLP(), _freeze), SMALL),
    "one parameter above the cap": Row(
        lambda: nn.Sequential(MLP(2), nn.Linear(64, 512), nn.Linear(512, 64), MLP(2)), SMALL
    ),
    "hundreds of tiny parameters": Row(
        lambda: nn.Sequential(*(nn.LayerNorm(64) for _ in range(300))), SMALL, min_sections=4
    ),
}


@pytest.mark.quick("default caps-auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
@pytest.mark.parametrize("name", ROWS)
def test_predicted_buckets_are_the_reducers(one_rank: None, name: str, split: str) -> None:
    """The parameter sets are equal in every row, in launch order, after the rebuild.

    What has sections can be cut in backward, in every row.
    """
    row = ROWS[name]
    ddp = DistributedDataParallel(compiled(row.model(), split=split), **row.options)
    for _ in range(4):
        ddp(torch.randn(3, row.width)).float().sum().backward()
    cut = only_cut(ddp)
    predicted = [{p.index for p in bucket.parameters} for bucket in cut.buckets]
    assert predicted == [set(bucket) for bucket in real_buckets(ddp)]
    assert len(cut.sections) >= row.min_sections
    if cut.sections:
        assert cut.split == ("backward" if split == "auto" else split)


@needs_delayed_parameters
def test_delayed_parameters_are_not_in_buckets(one_rank: None) -> None:
    """DDP reduces them by itself after backward."""
    model = MLP()
    delayed = [(f"layers.{i}.weight", model.layers[i].weight) for i in (0, 4)]
    ddp = DistributedDataParallel(
        compiled(model),
        delay_all_reduce_named_params=[(f"_orig_mod.{n}", p) for n, p in delayed],
        param_to_hook_all_reduce=delayed[0][1],
        **SMALL,
    )
    for _ in range(4):
        ddp(torch.randn(3, 64)).sum().backward()
    cut = only_cut(ddp)
    predicted = [{p.index for p in bucket.parameters} for bucket in cut.buckets]
    assert predicted == [set(bucket) for bucket in real_buckets(ddp)]
    assert len(cut.arrival) == 10


@st.composite
def _trees(draw: st.DrawFn) -> tuple[nn.Module, list[int], float]:
    """Draw layers with random sizes, dtypes, sharing and frozen flags, an order of use, a cap."""
    count = draw(st.integers(2, 8))
    dtypes = st.sampled_from([torch.float32, torch.float32, torch.float64])
    layers = [nn.Linear(8, 8, bias=draw(st.booleans()), dtype=draw(dtypes)) for _ in range(count)]
    for i in range(1, count):
        if draw(st.integers(0, 4)) == 0 and layers[i].weight.dtype == layers[i - 1].weight.dtype:
            layers[i].weight = layers[i - 1].weight
    for layer in layers[1:]:
        layer.weight.requires_grad_(draw(st.integers(0, 4)) > 0)
    layers[0].weight.requires_grad_(True)
    order = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    return nn.ModuleList(layers), [0, *order], draw(st.floats(0.0001, 0.003))


class Ordered(nn.Module):
    """Runs layers in an order given by their indices."""

    def __init__(self, layers: nn.ModuleList, order: list[int]) -> None:
        super().__init__()
        self.layers, self.order = layers, order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = torch.tanh(self.layers[i](x.to(self.layers[i].weight.dtype)))
        return x


@settings(deadline=None, max_examples=15)
@given(_trees())
def test_random_modules_have_the_buckets_of_the_reducers_own_function(
    tree: tuple[nn.ModuleList, list[int], float],
) -> None:
    """The order of use implies that of arrival, whatever is shared or frozen."""
    layers, order, cap = tree
    cut = cut_of(Ordered(layers, order), torch.randn(2, 8), bucket_cap_mb=cap)
    parameters = [p for p in layers.parameters() if p.requires_grad]
    used = {
        index
        for index, parameter in enumerate(parameters)
        if any(parameter is p for i in order for p in layers[i].parameters())
    }
    unused = [i for i in range(len(parameters)) if i not in used]
    # Where none may be unused, the loss takes those that the forward does not use.
    arrival = [*reversed(unused), *_sorted_by_first_use(used, order, layers, parameters)]
    real = assigned_by_torch(parameters, [int(cap * 1024 * 1024)], arrival)
    assert [[p.index for p in bucket.parameters] for bucket in cut.buckets] == real


def _sorted_by_first_use(
    used: set[int], order: list[int], layers: nn.ModuleList, parameters: list[torch.Tensor]
) -> list[int]:
    """Return used parameters by their first use, the latest first.

    The parameter whose first use comes latest arrives first; of those first used together, the last
    registered.
    """
    first_use = {
        index: min(
            step
            for step, i in enumerate(order)
            if any(p is parameters[index] for p in layers[i].parameters())
        )
        for index in used
    }
    return sorted(used, key=lambda index: (-first_use[index], -index))
