"""Cut a forward graph into section graphs and a graph that calls them in order; compile both.

Like `torch.fx.passes.split_module`, which does the partitioning, but sections are the plan's, each
returns a tuple, and Dynamo's metadata goes to the sections that it belongs to. The given graph is
left unchanged, because Dynamo keeps using it.

    x, w0, w1                                 x, w0, w1
        |                                         |
    linear(x, w0)                             submod_0(x, w0)    linear, relu
    relu                        ->                |
    linear(relu, w1)    <- cut                submod_1(_, w1)    linear
        |                                         |

The split of the backward graph begins with the same copy, and names its sections as here.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from ddpopt import _events, _logs, _torch
from ddpopt._events import Label
from ddpopt.errors import NotCutError, Reason
from ddpopt.split.nodes import (
    IS_COPY,
    call_nodes,
    find_overwritten,
    is_composite,
    is_differentiable,
    output_values,
    written_by,
)
from ddpopt.split.plan import Section


def copy_for_splitting(gm: fx.GraphModule) -> fx.GraphModule:
    """Return an equal graph in which as little as possible prevents a cut.

    It shares parameters and submodules with the given one.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, val_map={}))
    for node in list(graph.nodes):
        _inline_constant(node)
        _read_again_for_each_user(node)
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            _move_next_to_producer(node, node.args[0])
    copied = _torch.graph_module(gm, graph)
    _torch.carry_dynamo_metadata(gm, copied)
    return copied


def _inline_constant(node: fx.Node) -> None:
    """Replace a symbolic integer that tracing has since found to be constant by its value.

    AOTAutograd would have to return it from its section as a plain int, which it cannot do.
    """
    constant = _torch.constant_of(_torch.dynamo_value(node))
    if node.op == "placeholder" or constant is None:
        return
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: constant if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: constant if n is node else n)


def _read_again_for_each_user(node: fx.Node) -> None:
    """Give each user of a float argument its own `item` call: the tensor behind it can cross."""
    is_float_argument = (
        node.target == "item"
        and isinstance(_torch.dynamo_value(node), torch.SymFloat)
        and isinstance(node.args[0], fx.Node)
        and node.args[0].op == "placeholder"
    )
    if is_float_argument:
        for user in list(node.users)[1:]:
            with node.graph.inserting_before(user):
                user.replace_input_with(node, node.graph.node_copy(node, lambda n: n))


def _move_next_to_producer(node: fx.Node, producer: fx.Node) -> None:
    """Take a tuple apart right where it is made: it cannot cross a cut, but its elements can."""
    takes_tuple_apart = isinstance(_torch.dynamo_value(producer), tuple | list)
    if takes_tuple_apart and not isinstance(node.args[1], fx.Node):
        place = producer
        while place.next.target is operator.getitem and place.next.args[0] is producer:
            place = place.next
            if place is node:
                return
        place.append(node)


def split_forward(gm: fx.GraphModule, sections: Sequence[Section]) -> fx.GraphModule:
    """Return a graph whose calls are the sections, as submodules `submod_0`, `submod_1`, ...

    `gm` comes from `copy_for_splitting`.
    """
    calls = call_nodes(gm.graph)
    section_of = {
        node: section.index for section in sections for node in calls[section.start : section.stop]
    }
    # From the last write to the first, so that each section copies what the one before has made.
    bounds = [*(section.start for section in sections), len(calls)]
    overwritten = find_overwritten(gm.graph, bounds)
    for start, value in sorted(overwritten, key=lambda found: found[0], reverse=True):
        _pass_on("clone", value, calls[start], section_of, section_of[calls[start]])
    for value in _find_to_detach(gm.graph, section_of):
        next_start = sections[section_of[value] + 1].start
        _pass_on("detach", value, calls[next_start], section_of, section_of[value])
    stitched = split_module(gm, gm, section_of.__getitem__, keep_original_order=True)
    for node in list(stitched.graph.find_nodes(op="call_module")):
        section_graph = stitched.get_submodule(str(node.target))
        assert isinstance(section_graph, fx.GraphModule)
        _return_tuple(section_graph, node)
        _torch.carry_dynamo_metadata(gm, section_graph)
    stitched.recompile()
    return stitched


def _pass_on(
    method: str, value: fx.Node, place: fx.Node, section_of: dict[fx.Node, int], made_in: int
) -> None:
    """Make all calls from `place` on use `value.method()`, computed in section `made_in`."""
    section = section_of[place]
    with place.graph.inserting_before(place):
        passed = place.graph.call_method(method, (value,))
    passed.meta = {**value.meta, IS_COPY: True}
    value.replace_all_uses_with(
        passed,
        delete_user_cb=lambda user: user is not passed and section_of.get(user, section) >= section,
    )
    section_of[passed] = made_in


def _find_to_detach(graph: fx.Graph, section_of: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the values that require grad and to which later sections pass back no gradient.

    Otherwise the backward of the section that made them would get zeros, and give zeros to
    parameters that have no gradient in eager DDP, and that optimizers leave alone.
    """
    passing = find_passing_gradients(graph)
    found = []
    for node, section in section_of.items():
        value = _torch.dynamo_value(node)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            later = [user for user in node.users if section_of.get(user) != section]
            if later and passing.isdisjoint(later):
                found.append(node)
    return found


def _return_tuple(section_graph: fx.GraphModule, call: fx.Node) -> None:
    """Make a section that returns a single bare value return a tuple, as AOTAutograd requires."""
    output = next(iter(section_graph.graph.find_nodes(op="output")))
    if isinstance(output.args[0], tuple):
        return
    output.args = ((output.args[0],),)
    section_graph.recompile()
    with call.graph.inserting_after(call):
        element = call.graph.call_function(operator.getitem, (call, 0))
    call.replace_all_uses_with(element, delete_user_cb=lambda user: user is not element)


def find_passing_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that may pass a gradient back to their inputs, the output among them.

    Others detach or compare their inputs, or are used only by such nodes. A node for which that
    cannot be determined counts as passing.
    """
    passing = set(graph.find_nodes(op="output"))
    for node in reversed(call_nodes(graph)):
        is_used = not passing.isdisjoint(node.users)
        has_other_readers = bool(written_by(node))  # of the memory that it writes to
        if has_other_readers or (is_used and is_differentiable(node)):
            passing.add(node)
    return passing


_T = TypeVar("_T")

_QUIET_S = 3.0  # of compiling before anything is reported, and between reports


@dataclass(slots=True)
class SectionCompiler:
    """Compiles the sections of one graph."""

    graph: str
    num_sections: int
    _began_s: float = field(default_factory=time.monotonic)
    _reported_s: float = 0.0

    def compile(self, index: int, where: str, compile_it: Callable[[], _T]) -> _T:
        """Compile a section by `compile_it`; at times report which, if all of them take long.

        Raises:
            NotCutError: `compile_it` raised; `where` says on which section.
        """
        taken_s = time.monotonic() - self._began_s
        if taken_s >= self._reported_s + _QUIET_S:
            self._reported_s = taken_s
            text = "graph %s: compiling section %d of %d, after %.0f s"
            _logs.progress(text, self.graph, index + 1, self.num_sections, taken_s)
        try:
            return compile_it()
        except _torch.control_flow_exceptions():
            raise
        except Exception as error:  # whatever the inner compiler raises
            detail = f"{type(error).__name__} on {where}: {error}"
            raise NotCutError(Reason.SECTION_FAILED, detail) from error


def compile_sections(
    stitched: fx.GraphModule, example_inputs: Sequence[Any], inner: _torch.CompilerFn, graph: str
) -> Callable[..., Any]:
    """Compile each section with `inner`; return a callable with the unsplit graph's signature.

    `graph` is the unsplit graph's name. Sections are compiled in forward order, each with the fake
    tensors that earlier ones return, so that it sees the strides that Inductor chose.

    Raises:
        NotCutError: `inner` raised.
    """
    fake_mode = _torch.fake_mode_of(example_inputs)
    sections = _CompilingSections(stitched, inner, fake_mode, graph)
    sections.run(*(_torch.to_fake(value, fake_mode) for value in example_inputs))
    for name in sections.compiled:
        stitched.delete_submodule(name)
    # Plain attributes instead of submodules: the generated code then calls them without the cost
    # of nn.Module's call.
    vars(stitched).update(sections.compiled)
    forward: Callable[..., Any] = stitched.forward
    return forward


class _CompilingSections(fx.Interpreter):
    """Runs the stitched graph on fake tensors and compiles each section on reaching it."""

    def __init__(
        self, stitched: fx.GraphModule, inner: _torch.CompilerFn, fake_mode: Any, graph: str
    ) -> None:
        super().__init__(stitched)
        self.extra_traceback = False  # our errors name the section; the interpreter adds noise
        self.compiled: dict[str, Callable[..., Any]] = {}
        self._inner = inner
        self._fake_mode = fake_mode
        self._graph = graph
        self._num_sections = len(stitched.graph.find_nodes(op="call_module"))
        self._compiler = SectionCompiler(graph, self._num_sections)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _torch.to_fake(super().get_attr(target, args, kwargs), self._fake_mode)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        section = self.fetch_attr(target)
        hidden_floats = _torch.hidden_float_symbols(section.graph, self._fake_mode)
        with hidden_floats, _torch.section_tracing() as call_first:
            index = len(self.compiled)
            compiled = self._compiler.compile(
                index,
                f"section {index} of {self._num_sections} ({target})",
                lambda: self._inner(section, list(args)),
            )
            self.compiled[target] = _events.notifying(compiled, Label(self._graph, index))
            returned = [n for n in output_values(section) if isinstance(n, fx.Node)]
            has_parts = any(is_composite(_torch.dynamo_value(n)) for n in returned)
            outputs = call_first(compiled, args, has_parts)
            if outputs is not None:
                return outputs
        # Hooks around the compile, such as a checkpoint's, must not see what a fake run saves;
        # autograd calls only the innermost.
        unseen = torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)
        with self._fake_mode, unseen:
            return section(*args)
