"""A cut forward: section graphs, a graph that calls them in order, and both compiled.

    x, w0, w1                                 x, w0, w1
        |                                         |
    linear(x, w0)                             submod_0(x, w0)    linear, relu
    relu                        ->                |
    linear(relu, w1)    <- boundary           submod_1(_, w1)    linear
        |                                         |

`torch.fx.passes.split_module` does the partitioning. Beside that, each section is made to return a
tuple, as AOTAutograd needs it, and gets Dynamo's metadata of its nodes. A value that a later
section writes to is cloned for it, and a value to which later sections pass back no gradient is
detached.

Dynamo keeps using its graph, so all of this is done to a copy, see `copy_for_cutting`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from ddpopt import _torch
from ddpopt._indices import SectionIndex
from ddpopt.split.cut import Section
from ddpopt.split.nodes import (
    IS_COPY,
    attribute_of,
    call_nodes,
    clone_keeps_strides,
    find_overwritten,
    is_composite,
    is_differentiable,
    is_pure,
    output_values,
    written_by,
)
from ddpopt.split.section_compiler import SectionCompiler
from ddpopt.steps.sections import Label, report_runs

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

# ---- The copy --------------------------------------------------------------------------------


def copy_for_cutting(gm: fx.GraphModule) -> fx.GraphModule:
    """An equal graph in which as little as possible stands in the way of a boundary.

    It shares parameters and submodules with the given one. Both splits begin with such a copy.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, val_map={}))
    # From the last node to the first: where one number is computed from another, the later one is
    # copied first, and then each copy of it gets its own copy of the earlier one.
    for node in reversed(list(graph.nodes)):
        _compute_again_for_each_user(node)
    for node in list(graph.nodes):
        _inline_constant(node)
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            _move_next_to_producer(node, node.args[0])
    copied = _torch.graph_module(gm, graph)
    _torch.carry_dynamo_metadata(gm, copied)
    return copied


def _inline_constant(node: fx.Node) -> None:
    """Replace a symbolic integer that tracing has since found to be constant by its value.

    Otherwise the section that computes the integer would have to return a plain int, which
    AOTAutograd cannot do. The call stays, without users. A placeholder keeps its users: sections
    take placeholders as inputs, and return no placeholder.
    """
    constant = _torch.constant_of(_torch.dynamo_value(node))
    if node.op == "placeholder" or constant is None:
        return
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: constant if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: constant if n is node else n)


def _compute_again_for_each_user(node: fx.Node) -> None:
    """Give each user of a number its own call: what the number comes of can cross.

    Only integers can cross themselves. `scale = float(x.shape[1]) / 8` is a number where the size
    is a symbol, and a constant where it is not, so it should not decide where a graph is cut.
    """
    value = _torch.dynamo_value(node)
    if node.op == "placeholder" or not isinstance(value, torch.SymFloat | torch.SymBool):
        return
    # Any placeholder can cross: a float argument comes as a tensor, `item` of which is read.
    sources = [n for n in node.all_input_nodes if n.op != "placeholder"]
    are_numbers = all(isinstance(_torch.dynamo_value(n), _SYMBOLS) for n in sources)
    if not are_numbers or not is_pure(node):
        return
    for user in list(node.users):
        if user.op != "output":  # a number that the graph returns keeps this call
            with node.graph.inserting_before(user):
                user.replace_input_with(node, node.graph.node_copy(node, lambda n: n))
    if not node.users:
        node.graph.erase_node(node)


def _move_next_to_producer(node: fx.Node, producer: fx.Node) -> None:
    """Take a tuple apart right where it is made: it cannot cross, but its elements can.

    `node` is an indexing of `producer`, which may also make a tensor: then nothing is done.
    """
    takes_tuple_apart = isinstance(_torch.dynamo_value(producer), tuple | list)
    is_index_computed = isinstance(node.args[1], fx.Node)  # by a call that may come later
    if not takes_tuple_apart or is_index_computed:
        return
    # Behind the elements that stand there already, so that elements keep their order.
    last = producer
    while last.next.target is operator.getitem and last.next.args[0] is producer:
        last = last.next
        if last is node:
            return
    last.append(node)


# ---- Section graphs --------------------------------------------------------------------------


def make_stitched_graph(gm: fx.GraphModule, sections: Sequence[Section]) -> fx.GraphModule:
    """A graph whose calls are the sections, as submodules `submod_0`, `submod_1`, ...

    `gm` comes from `copy_for_cutting`, and is changed.
    """
    calls = call_nodes(gm.graph)
    section_of: dict[fx.Node, SectionIndex] = {}
    for section in sections:
        section_of.update(dict.fromkeys(calls[section.start : section.stop], section.index))
    # A section writes to a copy of what an earlier section made, and may have saved for its own
    # backward; see `find_overwritten`. From the last section to the first, so that a later clone
    # comes to copy the one to which the section before it has written.
    bounds = [*(section.start for section in sections), len(calls)]
    overwritten = find_overwritten(gm.graph, bounds)
    for start, value in sorted(overwritten, key=lambda item: item[0], reverse=True):
        first_call = calls[start]
        with gm.graph.inserting_before(first_call):
            if clone_keeps_strides(_torch.dynamo_value(value)):
                clone = gm.graph.call_method("clone", (value,))
            else:
                clone = gm.graph.call_function(clone_with_strides, (value,))
        section_of[clone] = section_of[first_call]
        _use_instead(clone, value, section_of, first=section_of[first_call])
    # A detach stands at the end of the section that makes its value, and so before the clones of
    # the next section: split_module wants each section's calls together.
    last_of = {section.index: calls[section.stop - 1] for section in sections}
    for value in _find_to_detach(gm.graph, section_of):
        made_in = section_of[value]
        with gm.graph.inserting_after(last_of[made_in]):
            detached = gm.graph.call_method("detach", (value,))
        last_of[made_in] = detached
        section_of[detached] = made_in
        _use_instead(detached, value, section_of, first=made_in + 1)
    # split_module has sections read modules themselves, and passes all other attributes to them.
    # No compiler takes an object that is no tensor, so sections are made to read objects too.
    objects = _find_objects(gm)
    for node in objects:
        # split_module looks for symbolic sizes in the values that cross, and knows only some types.
        _torch.forget_dynamo_value(node)
    stitched = split_module(gm, gm, section_of.__getitem__, keep_original_order=True)
    object_names = {node.target for node in objects}
    for call in list(stitched.graph.find_nodes(op="call_module")):
        section_graph = stitched.get_submodule(str(call.target))
        assert isinstance(section_graph, fx.GraphModule)
        _read_as_attributes(stitched, section_graph, call, object_names)
        _return_tuple(section_graph, call)
        _torch.carry_dynamo_metadata(gm, section_graph)
    stitched.recompile()
    return stitched


def _find_objects(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that read an attribute of the graph which is neither a tensor nor a module.

    A call of a function under `torch._dynamo.nonstrict_trace` has two such arguments, the function
    and the structure of its arguments, beside the tensors in that structure.
    """
    return [
        node
        for node in gm.graph.find_nodes(op="get_attr")
        if not isinstance(attribute_of(gm, node), torch.Tensor | torch.nn.Module)
    ]


def _read_as_attributes(
    stitched: fx.GraphModule, section_graph: fx.GraphModule, call: fx.Node, attributes: set[Any]
) -> None:
    """Make a section read attributes of these names itself, in place of taking them as arguments.

    `call` is the section's call in the stitched graph.
    """
    graph = section_graph.graph
    kept = []
    # Each such argument of the section, behind its placeholder.
    read: list[tuple[fx.Node, fx.Node]] = []
    for placeholder, argument in zip(graph.find_nodes(op="placeholder"), call.args, strict=True):
        assert isinstance(argument, fx.Node)
        if argument.op == "get_attr" and argument.target in attributes:
            read.append((placeholder, argument))
        else:
            kept.append(argument)
    call.args = tuple(kept)
    for placeholder, argument in read:
        name = str(argument.target)
        setattr(section_graph, name, getattr(stitched, name))
        with graph.inserting_before(call_nodes(graph)[0]):
            attribute = graph.create_node("get_attr", name)  # get_attr() warns of such objects
        placeholder.replace_all_uses_with(attribute)
        graph.erase_node(placeholder)
        if not argument.users:  # no section that is yet to be changed takes it
            stitched.graph.erase_node(argument)
    section_graph.recompile()


def clone_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of a tensor that is a slice, or expanded, which `clone` would change.

    What comes of a value depends on them: `reshape` returns a view or a copy, `as_strided` reads
    by strides alone (splits.md, fault 20). Copied is the memory from the first element to the last.
    """
    if tensor.numel() == 0:
        return tensor.clone()
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    copied = tensor.as_strided((last + 1,), (1,)).clone()
    return copied.as_strided(tensor.shape, tensor.stride(), 0)


def _use_instead(
    copied: fx.Node, value: fx.Node, section_of: Mapping[fx.Node, SectionIndex], first: int
) -> None:
    """Make section `first` and all later ones, and the output, use `copied` in place of `value`.

    `copied` is the clone or detach of `value`, and goes on using it. All calls are in `section_of`,
    `copied` too.
    """
    # With the example value of the original: `split_module` and later clones read its sizes and
    # strides, `_find_to_detach` whether it requires grad, and the proof its storage, in which a
    # write to the copy is one to the original, as in the whole graph.
    copied.meta = {**value.meta, IS_COPY: True}
    # The output is in no section, and comes behind all of them.
    value.replace_all_uses_with(
        copied,
        delete_user_cb=lambda user: user is not copied and section_of.get(user, first) >= first,
    )


def _find_to_detach(graph: fx.Graph, section_of: Mapping[fx.Node, SectionIndex]) -> list[fx.Node]:
    """The values that require grad and to which later sections pass back no gradient.

    Otherwise the backward of the section that made them would get zeros, and give zeros to
    parameters that have no gradient in eager DDP, and that optimizers leave alone.
    """
    passing = find_passing_gradients(graph)
    to_detach = []
    for node, section in section_of.items():
        value = _torch.dynamo_value(node)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            # The output is in no section, and among those that pass a gradient.
            later_users = [user for user in node.users if section_of.get(user) != section]
            if later_users and passing.isdisjoint(later_users):
                to_detach.append(node)
    return to_detach


def find_passing_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that may pass a gradient back to their inputs, the output among them.

    Only uses by such nodes say where backward reaches a parameter. Other nodes detach or compare
    their inputs, or are used only by such nodes. A node for which that cannot be determined counts
    as passing.
    """
    passing = set(graph.find_nodes(op="output"))
    for node in reversed(call_nodes(graph)):
        is_used = not passing.isdisjoint(node.users)
        # If the node writes in place, a node that reads the memory later may pass a gradient back
        # through it.
        writes_in_place = bool(written_by(node))
        if writes_in_place or (is_used and is_differentiable(node)):
            passing.add(node)
    return passing


def _return_tuple(section_graph: fx.GraphModule, call: fx.Node) -> None:
    """Make a section that returns a single bare value return a tuple, as AOTAutograd requires.

    `call`, the section's call in the stitched graph, is the tuple then; its users get the value.
    """
    (output,) = section_graph.graph.find_nodes(op="output")
    if isinstance(output.args[0], tuple):
        return  # it returns several, or none, which split_module makes an empty tuple
    output.args = ((output.args[0],),)
    section_graph.recompile()
    with call.graph.inserting_after(call):
        element = call.graph.call_function(operator.getitem, (call, 0))
    call.replace_all_uses_with(element, delete_user_cb=lambda user: user is not element)


# ---- Compiling -------------------------------------------------------------------------------


def compile_forward_sections(
    stitched: fx.GraphModule, example_inputs: Sequence[Any], inner: _torch.CompilerFn, graph: str
) -> Callable[..., Any]:
    """Compile each section with `inner`; return a callable with the unsplit graph's signature.

    `graph` is the unsplit graph's name. Sections are compiled in forward order, each with the fake
    tensors that earlier ones return, so that it sees the strides that Inductor chose.

    Raises:
        NotCutError: `inner` raised.
    """
    fake_mode = _torch.fake_mode_of(example_inputs)  # Dynamo's, or a new one without Dynamo
    sections = _CompilingSections(stitched, inner, fake_mode, graph)
    sections.run(*(_torch.to_fake(value, fake_mode) for value in example_inputs))
    # Plain attributes instead of submodules: the generated code then calls them without the cost
    # of nn.Module's call.
    for name in sections.compiled:
        stitched.delete_submodule(name)
    vars(stitched).update(sections.compiled)
    forward: Callable[..., Any] = stitched.forward
    return forward


class _CompilingSections(fx.Interpreter):
    """Runs the stitched graph on fake tensors, and compiles each section on reaching it.

    The compiled sections, by the names of their submodules, are in `compiled`.
    """

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
        """A fake tensor for a real one that is an attribute of the graph, as for inputs."""
        return _torch.to_fake(super().get_attr(target, args, kwargs), self._fake_mode)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Compile the section that this call runs; return the fake values that it returns.

        Its arguments are all in `args`: `split_module` makes no keyword arguments.
        """
        section = self.fetch_attr(target)
        index = len(self.compiled)
        # AOTAutograd is to find this section's float symbols alone (it would make constants of the
        # others, and have Dynamo start over), and a place for its graph's metadata.
        hidden_floats = _torch.hidden_float_symbols(section.graph, self._fake_mode)
        with hidden_floats, _torch.section_tracing() as call_first:
            compiled = self._compiler.compile(
                index,
                f"section {index} of {self._num_sections} ({target})",
                lambda: self._inner(section, list(args)),
            )
            self.compiled[target] = report_runs(compiled, Label(self._graph, index))
            # The first call of compiled code returns fake tensors, with Inductor's strides: it is
            # made here, not by a training step. Where it returns parts of a composite tensor, and
            # so more than the section, its outputs are of no use: `call_first` then returns None.
            returned = [n for n in output_values(section) if isinstance(n, fx.Node)]
            has_parts = any(is_composite(_torch.dynamo_value(n)) for n in returned)
            outputs = call_first(compiled, args, has_parts)
            if outputs is not None:
                return outputs
        # Without outputs from a first call (none comes without AOTAutograd either), the section's
        # graph is run. Hooks around the compile, such as a checkpoint's, must not see what a fake
        # run saves; autograd calls only the innermost.
        unseen = torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)
        with self._fake_mode, unseen:
            return section(*args)
