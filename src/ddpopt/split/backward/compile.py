"""Compile a graph whole and its backward in sections: from AOTAutograd's graphs to a GatedGraph.

AOTAutograd traces the graph with a token as one more input, which it returns as one more output.
See [Note: tokens, gates and runs] in gates.py for what the token is for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ddpopt import _torch
from ddpopt._events import Label
from ddpopt.errors import CutRefusedError, ForwardInstead
from ddpopt.split.backward.cut import SectionGraph
from ddpopt.split.backward.facts import ANY, find_descent, gradient_nodes, saved_arguments
from ddpopt.split.backward.gates import TOKEN_DTYPE, CompiledSection, GatedGraph, run_first_section
from ddpopt.split.nodes import graph_name, output_values
from ddpopt.split.sections import SectionCompiler

Cut = Callable[[fx.GraphModule, Mapping[str, int]], Sequence[SectionGraph]]


def compile_gated(
    gm: fx.GraphModule, example_inputs: Sequence[Any], aot: _torch.AOTCompilerFn, cut: Cut
) -> GatedGraph:
    """Return the compiled graph, with Dynamo's signature, and gates where `cut` cuts it.

    `gm` is a copy, which is used up. `cut` is given the backward graph, and what `saved_arguments`
    tells of the forward; it returns no section to have backward compiled whole.

    Raises:
        CutRefusedError: this graph's backward cannot be cut.
        SectionCompileError: the inner compiler raised on a section.
    """
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    if any(map(_torch.is_subclass, tensors)):
        raise CutRefusedError(ForwardInstead.SUBCLASSES)
    device = next(tensor.device for tensor in tensors if tensor.requires_grad)
    num_inputs = len(example_inputs)
    was_autocast_on = _torch.is_autocast_on()
    further: list[CompiledSection] = []
    saved: dict[str, int] = {}
    places: dict[Hashable, int] = {}
    descent: dict[int, int] = {}

    def edit_forward(graph: fx.GraphModule) -> None:
        saved.update(saved_arguments(graph))
        described = _torch.outputs_described(graph)
        places.update({output: place for place, output in enumerate(described)})
        _return_token_itself(graph)

    def compile_backward(
        graph: fx.GraphModule, inputs: list[Any], compile_graph: _torch.CompileSection
    ) -> Callable[..., Any]:
        (output,) = graph.graph.find_nodes(op="output")
        arguments = _torch.gradient_arguments(graph)
        returned = zip(output_values(graph), arguments, strict=True)
        # The gradient of the token, which is no value of the graph's, is the run's handle.
        output.args = (tuple(None if a == num_inputs else value for value, a in returned),)
        _torch.restride(graph, inputs)
        devices = {node.meta["val"].device for node in gradient_nodes(graph).values()}
        if devices - {device}:
            raise CutRefusedError(
                ForwardInstead.DEVICES, f"they are on {sorted(map(str, devices))}"
            )
        sections = cut(graph, saved)
        if not sections:
            return compile_graph(graph, inputs, list(range(len(inputs))))
        descent.update(find_descent(graph, places))
        if descent:
            _torch.autograd_node()  # backwards need it; find out now if it has moved
        first, *rest = _compile_sections(sections, inputs, compile_graph, graph_name(gm), descent)
        # AOTAutograd's own node does it for the first section.
        further.extend(dataclasses.replace(s, without_autocast=was_autocast_on) for s in rest)
        num_kept = sum(len(section.keeps) for section in sections)
        return run_first_section(first, arguments, num_inputs, num_kept, device, bool(descent))

    _add_token(gm)
    token = torch.empty(1, device=device, dtype=TOKEN_DTYPE, requires_grad=True)
    compiled = aot(gm, [*example_inputs, token], edit_forward, compile_backward)
    return GatedGraph(compiled, further, device, has_descent=bool(descent))


def _add_token(gm: fx.GraphModule) -> None:
    """Add the token as the last input and, so that it has a gradient, a copy as the last output."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(list(placeholders)[-1]):
        token = gm.graph.placeholder("ddpopt_token")
    _torch.mark_as_new(token)
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        copied = gm.graph.call_method("clone", (token,))
    output.args = ((*output_values(gm), copied),)
    gm.recompile()


def _return_token_itself(forward: fx.GraphModule) -> None:
    """Take the copy out of the traced forward, where it would be a kernel of its own."""
    token = list(forward.graph.find_nodes(op="placeholder"))[-1]
    for user in list(token.users):
        if user.target is torch.ops.aten.clone.default and user.args == (token,):
            user.replace_all_uses_with(token)
            forward.graph.erase_node(user)
    forward.recompile()


def _compile_sections(
    sections: Sequence[SectionGraph],
    inputs: Sequence[Any],
    compile_graph: _torch.CompileSection,
    graph: str,
    descent: Mapping[int, int],
) -> list[CompiledSection]:
    """Compile each section of a backward graph; equal ones once.

    `inputs` are the fake values of the whole graph's inputs, `graph` is its name, `descent` is what
    `find_descent` returned.
    """
    compiled: dict[object, Callable[..., Any]] = {}
    result = []
    compiler = SectionCompiler(graph, len(sections))
    for index, section in enumerate(sections):
        placeholders = section.graph.graph.find_nodes(op="placeholder")
        origins = [slot if slot < len(inputs) else None for slot in section.takes]
        values = [
            node.meta.get("val") if origin is None else inputs[origin]
            for node, origin in zip(placeholders, origins, strict=True)
        ]
        key = _identity(section.graph, values) or index
        if key not in compiled:
            compiled[key] = compiler.compile(
                index,
                f"backward section {index} of {len(sections)}",
                functools.partial(compile_graph, section.graph, values, origins),
                functools.partial(_run_uncompiled, section.graph),
            )
        result.append(
            CompiledSection(
                call=compiled[key],
                takes=section.takes,
                keeps=section.keeps,
                drops=section.drops,
                releases=section.releases,
                descent=tuple(descent.get(argument, ANY) for argument in section.releases),
                label=Label(graph, index),
            )
        )
    return result


def _identity(section: fx.GraphModule, values: Sequence[Any]) -> object | None:
    """Return what two sections have in common that one compiled callable can serve.

    None where a section holds attributes, which the code does not show, or symbols.
    """
    if section.graph.find_nodes(op="get_attr"):
        return None
    if not all(isinstance(v, torch.Tensor) and not _torch.free_symbols(v) for v in values):
        return None
    kinds = [(v.shape, v.stride(), v.dtype, v.device, v.storage_offset()) for v in values]
    return (section.code, tuple(kinds))


def _run_uncompiled(section: fx.GraphModule, values: list[Any]) -> Any:
    arguments = tuple(values)
    values.clear()
    return section.forward(*arguments)
