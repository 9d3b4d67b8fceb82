"""What a node of a graph is and does, what it shows people, and what a graph writes to in place.

Questions that the other modules of this folder ask of Dynamo's graphs, which a cut forward is made
of, and of AOTAutograd's backwards; what they ask of one kind alone says so.
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from ddpopt import _torch
from ddpopt.split.cut import NodeText

_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def call_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something, in order."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


# Operators of these libraries work on this rank alone. They compute and do nothing else, unless
# torch knows them as impure, or as random.
_LOCAL_LIBRARIES = frozenset({"aten", "prims", "inductor", "quantized_decomposed"})
_LOCAL_MODULES = frozenset({"_operator", "builtins", "math", "torch"})
# Of torch's modules, those whose functions may do anything: they communicate, or stand for a
# program's own `autograd.Function` (Dynamo's `allow_in_graph`).
_OPAQUE_MODULES = ("torch.distributed", "torch._dynamo")
# By operator. An operator lives as long as the process, or as the library that defines it, and a
# new definition is another object: so no entry is ever wrong.
_purity_of_operators: dict[Any, bool] = {}


def is_pure(node: fx.Node) -> bool:
    """Whether a call is known to do nothing but compute what it returns, or set a mode.

    A call of anything else may communicate, draw random numbers or print, as far as we know:
    operators of other libraries do not say. Such a call is made once, and keeps its place among
    calls of its kind. Of writes in place `written_by` tells: here `a += b` is pure, and `a.add_(b)`
    is not.
    """
    name = name_of(node)
    if node.op != "call_function":
        # Dynamo's methods are a tensor's, but modules, if it did not look into them, are anybody's.
        return node.op == "call_method" and not name.endswith("_") and not _draws(name)
    library = _torch.namespace_of(node.target)
    if library is not None:
        if node.target not in _purity_of_operators:
            # A library of torch's has the operators that begin and end a chain of effects.
            is_known = library in _LOCAL_LIBRARIES and not _torch.is_effect_token(name)
            # torch takes the operators that draw Inductor's seeds for pure; their tags tell.
            is_impure = node.is_impure() or _is_random(node.target)
            _purity_of_operators[node.target] = is_known and not is_impure
        return _purity_of_operators[node.target]
    if sets_mode(node):
        return True  # torch takes it for impure
    if node.is_impure():
        return False
    if _torch.is_higher_order(node.target):
        return _torch.only_runs_graphs(name) and all(map(is_pure, _calls_of_graphs(node)))
    is_stateful = _torch.changes_state(name) or _draws(name)
    return _is_local_function(node.target) and not is_stateful


def may_communicate(node: fx.Node) -> bool:
    """Whether a call may exchange data with other ranks, as far as anybody knows.

    Collectives do, and operators of other libraries may: they do not say. A call that draws random
    numbers, writes to a tensor or prints is not pure either, but works on this rank alone. A call
    that makes or takes a DTensor may communicate for the DTensor.
    """
    values = [_torch.dynamo_value(n) for n in (node, *node.all_input_nodes)]
    # Before anything else: an operator on DTensors has the name of one that is local.
    if any(type(leaf).__module__.startswith("torch.distributed") for leaf in leaves(values)):
        return True
    if is_pure(node) or node.op == "call_method":  # methods are a tensor's
        return False
    library = _torch.namespace_of(node.target)
    if node.op == "call_module":
        # Only graphs from before Dynamo looked into modules have such calls.
        kind = type(attribute_of(node.graph.owning_module, node))
        is_local = kind.__module__.startswith("torch.nn.")
        is_local &= not issubclass(kind, torch.nn.SyncBatchNorm)
    elif library is not None:
        # A wait exchanges nothing: the collective for which it waits is another call, and counts.
        is_local = library in _LOCAL_LIBRARIES or _torch.is_wait(node.target)
    elif _torch.is_higher_order(node.target):
        # It runs graphs, or one operator, which is among its arguments (`run_with_rng_state`).
        libraries = {_torch.namespace_of(argument) for argument in leaves(node.args)} - {None}
        # One that is given no operator, and may do more than to run graphs, may do anything.
        is_local = bool(libraries) or _torch.only_runs_graphs(name_of(node))
        is_local &= libraries <= _LOCAL_LIBRARIES
        is_local &= not any(map(may_communicate, _calls_of_graphs(node)))
    else:
        is_local = _is_local_function(node.target)
    return not is_local


def _is_random(operator: Any) -> bool:
    # Not all that draw are in fx's list of such operators (splits.md, fault 17).
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


# Functions of torch.nn.functional that draw, although ATen has no operator of the name that does.
_DRAWING_FUNCTIONS = frozenset(
    {
        *("dropout1d", "dropout2d", "dropout3d", "gumbel_softmax", "multi_head_attention_forward"),
        *("fractional_max_pool2d", "fractional_max_pool3d"),
    }
)


@functools.lru_cache(maxsize=1024)
def _draws(name: str) -> bool:
    """Whether a method or a function of torch's may draw random numbers, by its name.

    Most are named as ATen's operator; any of its overloads may be the one that is called.
    """
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    return name in _DRAWING_FUNCTIONS or any(map(_is_random, overloads))


def _is_local_function(function: Any) -> bool:
    """Whether a Python function is of torch's, or Python's own, and works on this rank alone."""
    module = getattr(function, "__module__", None) or "torch"  # as most of torch's builtins
    return module.partition(".")[0] in _LOCAL_MODULES and not module.startswith(_OPAQUE_MODULES)


def _calls_of_graphs(node: fx.Node) -> list[fx.Node]:
    """The calls of the graphs that a higher-order operator runs."""
    return [call for gm in graphs_of(node) for call in call_nodes(gm.graph)]


def graphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a call of a higher-order operator is given, in the order of its arguments."""
    attributes = [n for n in node.all_input_nodes if n.op == "get_attr"]
    modules = [attribute_of(node.graph.owning_module, n) for n in attributes]
    return [module for module in modules if isinstance(module, fx.GraphModule)]


def sets_mode(node: fx.Node) -> bool:
    """Whether a call switches autocast or gradients on or off for the calls after it."""
    name = name_of(node)
    is_autocast = _torch.enters_autocast(name) or _torch.exits_autocast(name)
    return is_autocast or _torch.sets_grad_mode(name)


# In the `meta` of a call of our own that passes on a value as it is. By this the proof takes the
# two for one value.
IS_COPY = "ddpopt_is_copy"


# Not all releases have the tag for reductions.
_GENERATED_TAGS = {
    getattr(torch.Tag, name) for name in ("pointwise", "reduction") if hasattr(torch.Tag, name)
}


def may_be_fused(value: fx.Node, reader: fx.Node) -> bool:
    """Whether a compiler could fuse the call that makes `value` with `reader`, into one loop.

    It can if it generates the loops of both: those of ATen's elementwise operators and reductions.
    Others call libraries. The choice of sections and the estimates of `ddpopt.plan` ask
    this.
    """
    return _has_generated_loop(value) and _has_generated_loop(reader)


def _has_generated_loop(node: fx.Node) -> bool:
    return not _GENERATED_TAGS.isdisjoint(getattr(node.target, "tags", ()))


def uses_streams(graph: fx.Graph) -> bool:
    """Whether a graph says on which stream its calls run: then each has to keep its place."""
    return any(_torch.uses_stream(node.target) for node in graph.nodes)


def output_values(gm: fx.GraphModule) -> Sequence[Any]:
    """Return what a graph returns: nodes, None and constants."""
    (output,) = gm.graph.find_nodes(op="output")
    values: Sequence[Any] = output.args[0]
    return values


def is_composite(value: object) -> bool:
    """Whether a tensor consists of others, as a DTensor or a nested tensor does."""
    return _torch.is_subclass(value) or getattr(value, "is_nested", False)


def has_ragged_sizes(graph: fx.Graph) -> bool:
    """Whether torch can compile Dynamo's graph only once, so that no cut may be tried.

    So it is with nested tensors, and with others that consist of tensors (`is_composite`) if their
    sizes have symbols that are in no input's size: only the first compile of such a graph finds the
    symbols that Dynamo chose. Symbols of plain inputs do not count, since on another rank these
    sizes may be numbers. Where a nested tensor is an input, Inductor compiles no section that
    returns a size with a symbol: it takes the nested tensor's symbol for a number ("Cannot convert
    symbols to int", 2.13).
    """
    of_inputs: set[Any] = set()  # the symbols in sizes of plain inputs
    of_composites: set[Any] = set()
    for node in graph.nodes:
        value = _torch.dynamo_value(node)
        if getattr(value, "is_nested", False):
            return True
        if is_composite(value):
            of_composites |= _torch.free_symbols(value)
        elif node.op == "placeholder":
            of_inputs |= _torch.free_symbols(value)
    return not of_composites <= of_inputs


def name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", "")


def attribute_of(gm: torch.nn.Module | None, node: fx.Node) -> Any:
    """The attribute of a graph's module that a `get_attr` or `call_module` node names."""
    return functools.reduce(getattr, str(node.target).split("."), gm)


def leaves(value: Any) -> list[Any]:
    """Return what nested lists and tuples hold."""
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def storage_keys(node: fx.Node) -> list[int]:
    """Identify the memory of the tensors that a node of Dynamo's graph stands for, by storages.

    Tensors with equal keys share memory.
    """
    keys = (_torch.storage_key(tensor) for tensor in _tensors_of(_torch.dynamo_value(node)))
    return [key for key in keys if key is not None]


def clone_keeps_strides(value: Any) -> bool:
    """Whether a clone has the strides of what it copies; True if these do not matter.

    They do not for what is no strided tensor, or has no elements. A slice, and an expanded tensor,
    has strides that no clone has.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return True
    if any(isinstance(size, int) and size == 0 for size in value.shape):
        return True
    # By their text: comparing symbolic sizes would have torch compile for these sizes alone.
    return str(torch.empty_like(value).stride()) == str(value.stride())


def num_bytes_of(value: Any) -> int:
    """The size of a tensor as it was in the first call, and 0 for anything else."""
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(map(_torch.size_hint, value.shape)) * value.element_size()


def is_differentiable(node: fx.Node) -> bool:
    """Whether gradients may flow back through a call of Dynamo's graph; True if nobody knows."""
    value = _torch.dynamo_value(node)
    tensors = _tensors_of(value)
    if tensors:
        # Under functorch a tensor does not say whether it requires grad.
        return any(tensor.requires_grad or _torch.is_of_functorch(tensor) for tensor in tensors)
    # Numbers have no gradient. Of a call without an example value, None, nothing is known.
    return not all(isinstance(leaf, _NUMBERS) for leaf in leaves(value))


def _tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def describe(nodes: Iterable[fx.Node]) -> tuple[NodeText, ...]:
    """Nodes as text for people, which keeps neither the graph nor its tensors alive."""
    return tuple(
        NodeText(
            name=node.name,
            target=_target_text(node),
            shape=_shape_text(_torch.traced_value(node)),
            source=_source_text(node.stack_trace or ""),
        )
        for node in nodes
    )


def _target_text(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return f".{node.target}" if node.op == "call_method" else node.target
    if _torch.namespace_of(node.target) is not None:
        return str(node.target)  # an operator
    return f"{getattr(node.target, '__module__', '') or ''}.{name_of(node)}"


def _shape_text(value: Any) -> str:
    """`float32[8, 64]`, for each tensor in a value; empty if that cannot be told."""
    try:
        return ", ".join(
            f"{str(t.dtype).removeprefix('torch.')}[{', '.join(map(str, t.shape))}]"
            for t in _tensors_of(value)
        )
    except Exception:  # raised by someone's subclass; what is shown is not worth a training run
        return ""


_FRAME = re.compile(r'File "(?:.*/)?([^"/]+)", line (\d+)')


def _source_text(stack_trace: str) -> str:
    """Return `file.py:12` of the innermost frame."""
    found = _FRAME.findall(stack_trace[-2000:])
    return ":".join(found[-1]) if found else ""


class ValueInMemory(NamedTuple):
    """A value in memory that some call writes to, and for how long the graph needs the value."""

    node: fx.Node
    made: int  # the position of the call that makes the value; below zero for `is_input`
    last_use: int  # the position of the last call that uses it; the number of calls if returned

    @property
    def is_input(self) -> bool:
        """Whether the value is an input or an attribute of the graph: memory of the caller's."""
        return self.made < 0


@dataclass(slots=True)
class WrittenMemory:
    """One storage that some call writes to: the values in it, and the writes.

    x = relu(a); v = x.view(-1); x.add_(1)      x, v, and what add_ returns; written at 2
    """

    values: list[ValueInMemory] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)  # the positions of calls, in order
    # Whether `as_strided` reads it, which may read more of it than the values have.
    is_read_by_strides: bool = False


# They return a view where strides allow it, and a copy elsewhere.
_VIEWS_OR_COPIES = frozenset(
    {"contiguous", "flatten", "ravel", "reshape", "reshape_as", "sum_to_size"}
)


def find_written_memory(graph: fx.Graph) -> list[WrittenMemory]:
    """The memory that some call of Dynamo's graph writes to in place.

    What a reshape returns counts as its input's memory even if it was copied: that depends on
    sizes, which differ between ranks, and cuts must not.
    """
    calls = call_nodes(graph)
    position_of = {node: position for position, node in enumerate(calls)}
    # By the key of the storage, see `storage_keys`.
    memory_of = collections.defaultdict[int, WrittenMemory](WrittenMemory)
    # By the storage that a reshape returned: the storage as which it counts, its input's.
    counts_as: dict[int, int] = {}

    def keys_of(node: fx.Node) -> list[int]:
        return [counts_as.get(key, key) for key in storage_keys(node)]

    # Attributes as well: a view of a buffer is memory of the caller's (splits.md, fault 21).
    inputs = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    for node in (*inputs, *calls):
        position = position_of.get(node, -1)
        # An input can have such a name too, in a graph that an operator runs: it has no inputs.
        if name_of(node) in _VIEWS_OR_COPIES and node.all_input_nodes:
            sources = keys_of(node.all_input_nodes[0])
            counts_as.update((key, source) for key in storage_keys(node) for source in sources)
        # The output, a user without a position, is behind all calls.
        users = (position_of.get(user, len(calls)) for user in node.users)
        value = ValueInMemory(node, made=position, last_use=max(users, default=position))
        for key in keys_of(node):
            memory_of[key].values.append(value)
        if name_of(node).startswith("as_strided"):
            for key in itertools.chain(*map(keys_of, node.all_input_nodes)):
                memory_of[key].is_read_by_strides = True
        for target in written_by(node):
            for key in keys_of(target):
                memory_of[key].writes.append(position)
    return [memory for memory in memory_of.values() if memory.writes]


def mutation_spans(written: Sequence[WrittenMemory]) -> Iterable[tuple[int, int]]:
    """Spans of boundaries that no cut may have: two values cross in memory written behind them.

        0  y = relu(x)
        1  v = y.view(-1)        in the memory of y
                                 <- a boundary here, at 2, is forbidden: the span (2, 2)
        2  y.add_(1)             has to change v as well
        3  z = v * y

    A section that gets `y` and `v` as two inputs would have to be told that they share memory. A
    single value can cross, see `find_overwritten`; but not where `as_strided` reads the memory,
    since the copy has no more of it than the value. A span (first, last) includes both ends, and is
    empty if first > last. `written` is what `find_written_memory` returned.
    """
    for memory in written:
        earlier_last_use = -1  # of the values that were made before
        for value in sorted(memory.values, key=lambda value: value.made):
            # A boundary in this span separates this value from its last use, an earlier one from
            # its last use, and both from the last write.
            yield value.made + 1, min(value.last_use, earlier_last_use, memory.writes[-1])
            earlier_last_use = max(earlier_last_use, value.last_use)
            if memory.is_read_by_strides:
                yield value.made + 1, min(value.last_use, memory.writes[-1])


def find_overwritten(graph: fx.Graph, bounds: Sequence[int]) -> list[tuple[int, fx.Node]]:
    """The values that a section takes from an earlier one and writes to: it has to write to a copy.

    The section that made such a value may have saved it for its backward, and AOTAutograd cannot
    save what a write to an input overwrites. Each value is paired with the start of the section
    that writes to it. `bounds` are the starts of all sections, then the end of the graph.
    """
    overwritten = []
    for memory in find_written_memory(graph):
        if any(value.is_input for value in memory.values):
            continue  # the caller is meant to see writes to what it passed in, or has in a module
        for start, stop in itertools.pairwise(bounds):
            if any(start <= write < stop for write in memory.writes):
                # One at most: where two would cross, `mutation_spans` forbids the boundary.
                crossing = [v.node for v in memory.values if v.made < start <= v.last_use]
                overwritten += [(start, node) for node in crossing]
    return overwritten


def written_by(node: fx.Node) -> list[fx.Node]:
    """The inputs that a call writes to in place, as far as its form and schema show."""
    values = leaves(node.kwargs.get("out"))
    if _is_in_place(node):
        values += leaves(node.args[0] if node.args else node.kwargs.get("input"))
    if _torch.is_higher_order(node.target):
        # Which of its inputs it writes to is not told, so all count.
        values += node.all_input_nodes if _writes_within(node) else []
    else:
        for position, name in _written_arguments(node):
            values += leaves(_argument(node, position, name))
    return list(dict.fromkeys(value for value in values if isinstance(value, fx.Node)))


def _written_arguments(node: fx.Node) -> list[tuple[int | None, str]]:
    """The positions (None: keyword only) and names of the arguments that a call writes to.

    torch.batch_norm(x, w, b, mean, var, ...)    (3, "running_mean"), (4, "running_var")
    F.batch_norm(x, mean, var, w, b, ...)        (1, "running_mean"), (2, "running_var")
    """
    # A method or a builtin has the name and the arguments of its operator. A Python function may
    # have an operator's name, as above, and the arguments in another order.
    is_named_as_operator = node.op == "call_method" or inspect.isbuiltin(node.target)
    operator_name = name_of(node) if is_named_as_operator else ""
    written = list(_torch.written_arguments(node.target, operator_name))
    if node.op == "call_function" and inspect.isfunction(node.target):
        # Functions in torch.nn.functional have no schema.
        names = _parameter_names(node.target)
        written += [(names.index(name), name) for name in _torch.RUNNING_AVERAGES if name in names]
        if "max_norm" in names and _argument(node, names.index("max_norm"), "max_norm") is not None:
            written.append((names.index("weight"), "weight"))  # an embedding shortens its rows
    return written


def _argument(node: fx.Node, position: int | None, name: str) -> Any:
    """An argument of a call, by its position or else by its name; None if the call lacks it.

    What operators call `self` is the `input` of torch's functions.
    """
    if position is not None and position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, node.kwargs.get("input") if name == "self" else None)


def _writes_within(node: fx.Node) -> bool:
    """Whether a higher-order operator writes to one of its inputs, as far as that is known.

    `cond(p, if_true, if_false, (x,))` does if one of the two graphs writes to memory of the graph's
    inputs. A write to a value that the graph made itself is nobody else's matter.
    """
    if _torch.is_triton_kernel(node.target):
        return True  # nothing says which of its inputs a kernel writes
    for gm in graphs_of(node):
        for memory in find_written_memory(gm.graph):
            if any(value.is_input for value in memory.values):
                return True
    return False


# `operator.iadd` and others stand for `a += b`, `setitem` for `a[i] = b`; tensors have `idiv`, too.
_IN_PLACE_OPERATORS = frozenset(
    name for name in vars(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")
) - {"index", "inv", "invert", "is_", "is_not", "itemgetter"} | {"setitem", "idiv"}


def _is_in_place(node: fx.Node) -> bool:
    """Whether a call says that it writes to its first input.

    As `add_`, `a += b`, `a[i] = b` and `inplace=True` do.
    """
    if node.op == "call_module":
        return bool(getattr(attribute_of(node.graph.owning_module, node), "inplace", False))
    name = name_of(node)
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_") in _IN_PLACE_OPERATORS  # `a.__iadd__(b)` (splits.md, fault 19)
    if name in _IN_PLACE_OPERATORS or name.endswith("_"):
        return True
    if node.op != "call_function":
        return False
    names = _parameter_names(node.target)
    position = names.index("inplace") if "inplace" in names else None
    # `inplace=1` says so too.
    return position is not None and bool(_argument(node, position, "inplace"))


@functools.lru_cache(maxsize=256)  # a graph calls few functions, many times
def _parameter_names(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()  # builtins without a signature
