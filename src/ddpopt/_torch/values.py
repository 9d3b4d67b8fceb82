"""Values in graphs: tensors and their memory, fake tensors, numbers that may be symbols."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from ddpopt._torch import names
from ddpopt._torch.graphs import dynamo_value


def storage_key(tensor: torch.Tensor) -> int | None:
    """A number for a tensor's memory, equal for all that share it; None if it has no storage.

    It may come again when no tensor has the memory any more.
    """
    try:
        # torch makes one such object for each memory, and keeps it as long.
        return id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None  # sparse and other storage-less layouts


def is_of_functorch(tensor: torch.Tensor) -> bool:
    """Whether vmap, grad or jvp work on a tensor: it does not say then whether it requires grad."""
    return names.IS_OF_FUNCTORCH.get()(tensor)


def is_subclass(value: object) -> bool:
    """Whether AOTAutograd takes a tensor apart into others, as it does with a DTensor."""
    protocol = ("__tensor_flatten__", "__tensor_unflatten__")
    return isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in protocol)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class is `torch.Tensor`, a fake tensor's, or a parameter's of any kind.

    AOTAutograd checks the operators of a graph's first run with a mode that refuses other classes.
    """
    return isinstance(tensor, nn.Parameter) or type(tensor) in (
        torch.Tensor,
        names.FAKE_TENSOR.get(),
    )


def fake_mode_of(inputs: object) -> Any:
    """The fake mode with which Dynamo traced, or a new one outside Dynamo."""
    return names.DETECT_FAKE_MODE.get()(inputs) or names.FAKE_TENSOR_MODE.get()()


def fake_mode_with_real_tensors() -> Any:
    """A new fake mode, in which a real tensor counts as the fake one that stands for it."""
    return names.FAKE_TENSOR_MODE.get()(allow_non_fake_inputs=True)


def to_fake(value: Any, fake_mode: Any) -> Any:
    """The fake tensor that stands for `value` in this compile; other values unchanged."""
    if not isinstance(value, torch.Tensor) or isinstance(value, names.FAKE_TENSOR.get()):
        return value
    return names.TO_FAKE_TENSOR.get()(value, fake_mode)


def free_symbols(value: object) -> frozenset[Any]:
    """The symbols in the sizes and strides of a tensor, or in a number; none in other values."""
    from torch.fx.experimental import symbolic_shapes  # noqa: PLC0415  # it imports sympy

    if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return frozenset(symbolic_shapes.free_symbols(value))
    return frozenset()


def size_hint(size: int | torch.SymInt) -> int:
    """A size as it was in the first call; 1 if it depends on data."""
    if isinstance(size, int):
        return size
    hint = names.HINT.get(names.SYM_NODE.get(size))
    return 1 if hint is None else int(hint)


def constant_of(value: object) -> int | None:
    """The number that a symbolic integer is known to equal, None if it may vary."""
    from torch.fx.experimental import sym_node, symbolic_shapes  # noqa: PLC0415  # import sympy

    if not isinstance(value, torch.SymInt):
        return None
    # The node of a jagged size is of another class, and `is_concrete_int` cannot ask it.
    if not isinstance(names.SYM_NODE.get(value), sym_node.SymNode):
        return None
    return int(value) if symbolic_shapes.is_concrete_int(value) else None


@contextlib.contextmanager
def hidden_float_symbols(graph: fx.Graph, fake_mode: Any) -> Iterator[None]:
    """Hide from AOTAutograd, in a block, symbols of float arguments that do not occur in `graph`.

    AOTAutograd turns all float symbols that it finds unused into constants, and makes Dynamo start
    over. That is right for a whole graph, but another section may use what this one does not: the
    graph would be recompiled at each new value.
    """
    shape_env = names.SHAPE_ENV.get(fake_mode)
    if shape_env is None:
        yield
        return
    values: dict[Any, Any] = names.VALUES.get(shape_env)
    used = {s for node in graph.nodes for s in free_symbols(dynamo_value(node))}
    hidden = {s: v for s, v in values.items() if not s.is_integer and s not in used}
    for symbol in hidden:
        del values[symbol]
    try:
        yield
    finally:
        values.update(hidden)
