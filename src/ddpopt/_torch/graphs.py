"""Dynamo's graphs: their names and metadata, where they stand in a frame, what nodes return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from ddpopt._torch import names


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph that finds in `root` what the graph refers to.

    Under Dynamo its code is made when it is first needed. `fx.GraphModule` makes it at once, and
    anew after each change, at a cost of 20 ms for 500 nodes.
    """
    make: Callable[..., fx.GraphModule] = fx.GraphModule
    with names.doing_without(names.Need.LAZY):
        make = names.MAKE_GRAPH_MODULE.get()
    return make(root, graph)


def carry_dynamo_metadata(source: fx.GraphModule, target: fx.GraphModule) -> None:
    """Give `target`, a copy of `source` or a section of such a copy, Dynamo's metadata.

    From it AOTAutograd recognises a graph of Dynamo's, deduplicates inputs by their source and
    finds out which inputs are parameters. New placeholders get the source None.
    """
    target.meta = dict(source.meta)
    # Hooks on saved tensors, by which AOTAutograd's cache tells graphs, are children to which no
    # node refers, so that `target` has not got them with its nodes.
    for name, hook in source.named_children():
        if name.startswith(names.SAVED_TENSORS_HOOKS.text):
            setattr(target, name, hook)
    for attribute in (names.PARAMETER_SOURCES, names.USER_STACKS):
        if attribute.is_in(source):
            attribute.set_on_ours(target, attribute.get(source))
    # Copies of placeholders have the originals' names.
    originals = {node.name: node for node in source.graph.find_nodes(op="placeholder")}
    for node in target.graph.find_nodes(op="placeholder"):
        dynamo_source = names.DYNAMO_SOURCE.find(originals.get(node.name), default=None)
        names.DYNAMO_SOURCE.set_on_ours(node, dynamo_source)


def wants_cuda_graphs(gm: fx.GraphModule) -> bool:
    """Whether the program asks for CUDA graphs of this graph, by `override_cudagraphs`."""
    annotation = gm.meta.get(names.CUDA_GRAPHS_WANTED.text)
    # Inductor makes none for the backward alone, so `bwd` does not matter.
    return annotation is not None and bool(annotation.fwd)


def mark_as_new(placeholder: fx.Node) -> None:
    """Note on a placeholder that was added to Dynamo's graph that it has no source in the program.

    AOTAutograd asserts that each placeholder has such a note, and takes None for one without.
    """
    names.DYNAMO_SOURCE.set_on_ours(placeholder, None)


def depth_below_frame(placeholder: fx.Node) -> int:
    """Return how many modules lie between the `self` of a frame and a parameter of its graph.

    1 for `self.linear.weight`, 0 for `self.weight`, and 0 if Dynamo does not tell.
    """
    source = names.DYNAMO_SOURCE.find(placeholder)
    name = names.SOURCE_NAME.find(source, "")
    path = str(name() if callable(name) else name)  # a method in some releases
    # Such as `L['self']._modules['linear']._parameters['weight']`.
    return path.count(f".{names.MODULES.name}[")


def ends_in_graph_break(gm: fx.GraphModule) -> bool:
    """Whether another graph follows this one in its frame; True if Dynamo does not tell."""
    return bool(names.GRAPH_BREAK.find(names.STOP_REASON.find(gm), True))


def follows_graph_break() -> bool:
    """Whether the graph that is compiled now begins where another broke; True if nobody tells.

    Between the two graphs code may have run that is not compiled. There may be no graph before the
    break: Dynamo compiles none that has no call.
    """
    with names.doing_without(names.Need.PREDICT):
        tracing = names.TRACING_CONTEXT.get().try_get()
        code = [] if tracing is None else names.TRACED_CODE.get(tracing)
        # The first code is the frame's, others are inlined. Dynamo continues behind a break in a
        # function that it makes and names.
        return not code or code[0].co_name.startswith(names.RESUMED_CODE.get())
    return True  # torch has moved a name


def dynamo_value(node: fx.Node) -> Any:
    """What Dynamo found a node of its graph to return, when it traced; None if unknown.

    A fake tensor, a number that may be symbolic, or a tuple of such.
    """
    return node.meta.get(names.EXAMPLE_VALUE.text)


def forget_dynamo_value(node: fx.Node) -> None:
    """Take from a node of a copy what Dynamo found it to return."""
    node.meta.pop(names.EXAMPLE_VALUE.text, None)


def traced_value(node: fx.Node) -> Any:
    """What a node returned when it was traced, by Dynamo or else into a graph of ATen."""
    return node.meta.get(names.EXAMPLE_VALUE.text, node.meta.get(names.VALUE.text))


def check_dynamo_graph(gm: fx.GraphModule) -> None:
    """Raise TorchDriftError if a graph of Dynamo's lacks a mark that it gives each of them.

    Without values it would seem to have no memory that calls share or write to, and no nested
    tensors; without a name it would be taken for any other graph. (One that somebody has traced
    again, which has no values, is none of Dynamo's.)
    """
    if not names.PARAMETER_SOURCES.is_in(gm):
        return
    # A graph without inputs need not have values: after a break in a region under no_grad it may
    # hold nothing but the calls that set the mode. It has no parameters, so it is not cut anyway.
    has_inputs = bool(gm.graph.find_nodes(op="placeholder"))
    if has_inputs and not any(names.EXAMPLE_VALUE.text in node.meta for node in gm.graph.nodes):
        raise names.EXAMPLE_VALUE.drift()
    if names.COMPILE_ID.text not in gm.meta:
        raise names.COMPILE_ID.drift()


def graph_name(gm: fx.GraphModule) -> str:
    """Dynamo's name for a graph: its frame and the number of the frame's compile."""
    return str(gm.meta.get(names.COMPILE_ID.text, "?"))
