"""Models around one operator or module of torch's database, which also draws what it is given.

Nothing here trains or compiles.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

WIDTH = 4
_DTYPES = (torch.float32, torch.complex64, torch.int64)  # the first that an operator has
_OPERATORS = {info.full_name: info for info in op_db}
_MODULES = {info.formatted_name.replace("nn_", "nn."): info for info in module_db}
_DIFFERENTIABLE = [name for name, info in _OPERATORS.items() if info.supports_autograd]
_IN_PLACE = [n for n in _DIFFERENTIABLE if _OPERATORS[n].inplace_variant is not None]
NAMES = (*_DIFFERENTIABLE, *_MODULES, *(f"{name}:in_place" for name in _IN_PLACE))


class Sample(NamedTuple):
    """A call. `make` returns what is called: an operator's function, or a new module."""

    make: Callable[[], Callable[..., Any]]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@functools.lru_cache(maxsize=1)
def samples_of(name: str) -> list[Sample]:
    """Return the calls that torch tests an operator or a module with, the same ones each time.

    `name` may end in `:in_place`, for the operator's variant that writes into its input.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch itself should no longer use
        torch.manual_seed(0)
        return _draw(name)


def _draw(name: str) -> list[Sample]:
    if name in _MODULES:
        return _samples_of_module(_MODULES[name])
    name, _, is_in_place = name.partition(":")
    info = _OPERATORS[name]
    has = info.supported_backward_dtypes("cpu") or info.supported_dtypes("cpu")
    dtype = next((dtype for dtype in _DTYPES if dtype in has), _DTYPES[0])
    function = info.inplace_variant if is_in_place else info.op
    return [
        Sample(lambda: function, (sample.input, *sample.args), sample.kwargs)
        for sample in info.sample_inputs("cpu", dtype, requires_grad=dtype != torch.int64)
    ]


def _samples_of_module(info: Any) -> list[Sample]:
    draw, dtype, settings = info.module_inputs_func, _DTYPES[0], {"requires_grad": True}
    return [
        Sample(functools.partial(_make, info.module_cls, sample), called.args, called.kwargs)
        for sample in draw(info, device="cpu", dtype=dtype, training=True, **settings)
        if (called := sample.forward_input) is not None
    ]


def _make(module_class: type[nn.Module], sample: Any) -> nn.Module:
    made, called = sample.constructor_input, sample.forward_input
    module = module_class(*made.args, **made.kwargs)
    if isinstance(module, LazyModuleMixin):  # DDP refuses it before its first call
        module(*called.args, **called.kwargs)
    return module


def calls_of(name: str, *, is_empty: bool = False) -> Iterator[tuple[int, Sample]]:
    """Give an operator's calls by number, first the middle one and the last.

    With `is_empty`, only those that are given a tensor without elements.
    """
    samples = samples_of(name)
    last = len(samples) - 1
    for number in dict.fromkeys([len(samples) // 2, last, *range(last)] if samples else []):
        tensors = tensors_in((samples[number].arguments, samples[number].keywords))
        if not is_empty or any(tensor.numel() == 0 for tensor in tensors):
            yield number, samples[number]


class Surrounded(nn.Module):
    """Layers before, beside and behind a call; all it returns goes into `behind`, and out.

        x - before - times 1 - operator - behind - output
                   - beside ---------------------/

    The tensors that torch would train are parameters here. They are multiplied by a one whose
    gradient is that of the layers before, so that the operator gets the values of its sample.
    """

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.beside = nn.Linear(WIDTH, WIDTH)
        self.operator = sample.make()
        self.behind = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.leaves, self.form = pytree.tree_flatten((sample.arguments, sample.keywords))
        self.trained = nn.ParameterList()
        self.places: list[int] = []
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                value = leaf.detach().clone()
                self.leaves[place] = None
                if leaf.requires_grad:
                    self.trained.append(nn.Parameter(value))
                    self.places.append(place)
                else:
                    self.register_buffer(f"fixed_{place}", value)
        self.fixed = [
            int(name.removeprefix("fixed_")) for name, _ in self.named_buffers(recurse=False)
        ]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output, that of the layer beside, and what the operator takes and returns."""
        for layer in self.before:
            x = layer(x).tanh()
        mean = x.mean()
        one = 1 + (mean - mean.detach())
        leaves = list(self.leaves)
        taken = [parameter * one for parameter in self.trained]
        for place, value in zip(self.places, taken, strict=True):
            leaves[place] = value
        for place in self.fixed:
            leaves[place] = getattr(self, f"fixed_{place}")
        arguments, keywords = pytree.tree_unflatten(leaves, self.form)
        returned = tensors_in(self.operator(*arguments, **keywords))
        beside = self.beside(x)
        for tensor in returned:
            x = x * (1 + size_of(tensor))
        for layer in self.behind:
            x = layer(x)
        return x + beside, beside, *taken[:1], *returned


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of what an operator takes or returns, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def size_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that all finite elements of a tensor change."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    sizes = dense.abs() if dense.is_complex() else dense.float().abs()
    return sizes.nan_to_num(0.0, 0.0, 0.0).sum().log1p()


def without_seeds() -> AbstractContextManager[Any]:
    """Have random operators not set a seed, which breaks Dynamo's graph, in this block."""
    return mock.patch.object(common_methods_invocations, "wrapper_set_seed", _call)


def _call(operator: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return operator(*arguments, **keywords)
