"""FX graphs: what Dynamo and AOTAutograd note in them, operators, storages and symbols."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import fx, nn

from ddpopt._torch import names
from ddpopt._torch.runtime import do_without
from ddpopt.errors import TorchDriftError


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a module of a graph that finds in `root` what the graph refers to.

    Under Dynamo its code is made when it is first needed. `fx.GraphModule` makes it at once, and
    anew after each change, at a cost of 20 ms for 500 nodes.
    """
    try:
        make = names.MAKE_GRAPH_MODULE.get()
    except TorchDriftError as error:
        do_without(str(error), names.Need.LAZY)
        make = fx.GraphModule
    made: fx.GraphModule = make(root, graph)
    return made


def carry_dynamo_metadata(source: fx.GraphModule, target: fx.GraphModule) -> None:
    """Give `target`, whose placeholders are copies of some of `source`'s, Dynamo's metadata.

    From it AOTAutograd recognises a graph of Dynamo's, deduplicates inputs by their source and
    finds out which inputs are parameters. New placeholders get the source None.
    """
    target.meta = dict(source.meta)
    for row in (names.PARAMETER_SOURCES, names.USER_STACKS):
        if row.is_in(source):
            row.mark(target, row.of(source))
    given = {node.name: node for node in source.graph.find_nodes(op="placeholder")}
    for node in target.graph.find_nodes(op="placeholder"):
        names.DYNAMO_SOURCE.mark(node, names.DYNAMO_SOURCE.find(given.get(node.name)))


def mark_as_new(placeholder: fx.Node) -> None:
    """Tell AOTAutograd that Dynamo knows no source for a placeholder."""
    names.DYNAMO_SOURCE.mark(placeholder, None)


def depth_below_frame(placeholder: fx.Node) -> int:
    """Return how many modules lie between the object that a frame was given and a parameter.

    1 for `self.linear.weight`, 0 for `self.weight`.
    """
    name = names.SOURCE_NAME.find(names.DYNAMO_SOURCE.find(placeholder), "")
    return str(name() if callable(name) else name).count("._modules[")  # a method in some releases


def ends_in_graph_break(gm: fx.GraphModule) -> bool:
    """Whether another graph follows this one in its frame; True if Dynamo does not tell."""
    return bool(names.GRAPH_BREAK.find(names.STOP_REASON.find(gm), True))


TensorT = TypeVar("TensorT", bound=torch.Tensor)


def without_memory(kind: type[TensorT], like: torch.Tensor) -> TensorT:
    """Return a tensor of this subclass that has `like`'s shape, dtype and device, but no values."""
    make: Any = names.MAKE_WRAPPER.of(torch.Tensor)
    return make(kind, like.shape, dtype=like.dtype, device=like.device)


RUNNING_AVERAGES = ("running_mean", "running_var")


def written_arguments(target: object, name: str) -> set[tuple[int | None, str]]:
    """Return the places (None: keyword only) and names of the arguments that an operator writes to.

    `target` is the operator, or else it is ATen's operator `name`. All overloads count if it is not
    known which is called. Running averages count too, although schemas do not declare them.
    """
    if isinstance(target, names.OVERLOAD.get()):
        overloads = [target]
    else:
        kind = names.PACKET.get()
        packet: Any = target if isinstance(target, kind) else getattr(torch.ops.aten, name, None)
        is_packet = isinstance(packet, kind)
        overloads = [getattr(packet, o) for o in packet.overloads()] if is_packet else []
    for overload in overloads:
        schema = names.SCHEMA.of(overload)  # looked up each time; some cannot be hashed
        if overload not in _writes:
            _writes[overload] = _find_writes(schema)
    return {place for overload in overloads for place in _writes[overload]}


_writes: dict[Any, tuple[tuple[int | None, str], ...]] = {}


def _find_writes(schema: Any) -> tuple[tuple[int | None, str], ...]:
    return tuple(
        (None if argument.kwarg_only else place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in RUNNING_AVERAGES
    )


def is_higher_order(target: object) -> bool:
    """Whether a call's target is an operator that takes graphs or kernels as arguments."""
    return isinstance(target, names.HIGHER_ORDER.get())


def namespace_of(target: object) -> str | None:
    """Return the library that an operator belongs to, such as `aten`; None for anything else."""
    is_operator = isinstance(target, (names.OVERLOAD.get(), names.PACKET.get()))
    return str(target).partition(".")[0] if is_operator else None


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identify a tensor's memory, so that aliases compare equal; None if it has no storage."""
    try:
        return names.STORAGE_DATA.of(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None  # sparse and other storage-less layouts


def is_of_functorch(tensor: torch.Tensor) -> bool:
    """Whether vmap, grad or jvp work on a tensor: it does not say then whether it requires grad."""
    return names.IS_OF_FUNCTORCH.get()(tensor)


def is_subclass(value: object) -> bool:
    """Whether AOTAutograd takes a tensor apart into others, as it does with a DTensor."""
    return names.IS_SUBCLASS.get()(value)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what a parameter holds, is of no class that somebody derived.

    AOTAutograd checks the operators of a graph's first run with a mode that refuses others.
    """
    kinds = (torch.Tensor, torch.nn.Parameter, names.FAKE_TENSOR.get())
    return isinstance(tensor, torch.nn.Parameter) or type(tensor) in kinds


def fake_mode_of(inputs: object) -> Any:
    """Return the fake mode with which Dynamo traced, or a new one outside Dynamo."""
    return names.DETECT_FAKE_MODE.get()(inputs) or names.FAKE_TENSOR_MODE.get()()


def to_fake(value: Any, fake_mode: Any) -> Any:
    """Return the fake tensor that stands for `value` in this compile; other values unchanged."""
    if not isinstance(value, torch.Tensor) or isinstance(value, names.FAKE_TENSOR.get()):
        return value
    return names.TO_FAKE_TENSOR.get()(value, fake_mode)


def own_memory(fake: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like the given one, strides included, that shares no memory with it."""
    with names.FAKE_MODE.find(fake, contextlib.nullcontext()):
        return fake.clone()


def free_symbols(value: object) -> frozenset[Any]:
    if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return frozenset(names.FREE_SYMBOLS.get()(value))
    return frozenset()


def size_hint(size: int | torch.SymInt) -> int:
    """Return a size as it was in the first call; 1 if it depends on data."""
    if isinstance(size, int):
        return size
    node = names.SYM_NODE.of(size)
    return names.HINT.of(node) if names.HAS_HINT.of(node)() else 1


def constant_of(value: object) -> int | None:
    """Return the number that a symbolic integer is known to equal, None if it may vary."""
    is_symbolic = isinstance(value, torch.SymInt)
    return names.MAYBE_AS_INT.of(names.SYM_NODE.of(value))() if is_symbolic else None


@contextlib.contextmanager
def hidden_float_symbols(graph: fx.Graph, fake_mode: Any) -> Iterator[None]:
    """Hide the symbols of float arguments that do not occur in `graph` from AOTAutograd.

    It turns all float symbols that it finds unused into constants, and makes Dynamo start over.
    That is right for a whole graph; a section would be recompiled at each new value.
    """
    shape_env = names.SHAPE_ENV.of(fake_mode)
    if shape_env is None:
        yield
        return
    is_type, kind = names.SYMBOL_IS_TYPE.get(), names.SYMBOL_TYPES.get().FLOAT
    values: dict[Any, Any] = names.VALUES.of(shape_env)
    used = {s for node in graph.nodes for s in free_symbols(node.meta.get("example_value"))}
    hidden = {s: v for s, v in values.items() if is_type(s, kind) and s not in used}
    for symbol in hidden:
        del values[symbol]
    try:
        yield
    finally:
        values.update(hidden)
