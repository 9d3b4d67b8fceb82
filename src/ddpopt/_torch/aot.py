"""AOTAutograd and Inductor: compiling a section, cutting a backward, and what both describe."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from ddpopt._indices import Argument
from ddpopt._torch import names
from ddpopt._torch.dynamo import CompilerFn, lookup_backend
from ddpopt._torch.names import PrivateName
from ddpopt._torch.values import fake_mode_of
from ddpopt.errors import NotCutError, Reason


@contextlib.contextmanager
def section_tracing() -> Iterator[Callable[..., Any]]:
    """Give the forward section compiled in this block a TracingContext of its own.

    AOTAutograd writes a graph's metadata into Dynamo's TracingContext, and keeps the context for
    whatever it compiles of that graph later: with one context for all sections it would find the
    last one's metadata. Guards and fake mode stay shared.

    Yields `call_first(compiled, args, has_parts)`, which makes the compiled section's first call,
    and has to be called inside this block. It returns the section's fake outputs, with the strides
    that Inductor chose; None if AOTAutograd compiled nothing, or if the compiled code returns more
    than the section does: effect tokens, or the parts of a tensor subclass (the caller says by
    `has_parts` whether there are any). Outside of Dynamo there is no TracingContext: `call_first`
    then makes no call and returns None.
    """
    outer = names.TRACING_CONTEXT.get().try_get()
    if outer is None:  # where Inductor would look for donated buffers, so it finds none
        yield lambda *_: None
        return
    context = copy.copy(outer)
    names.FW_METADATA.set(None, context)
    # Code that AOTAutograd compiles while this is set returns fake outputs from its first call.
    names.FAKIFY_FIRST_CALL.set(True, context)
    # That call has fake arguments, which the program's hooks on saved tensors are not to see.
    no_hooks = names.NO_SAVED_TENSOR_HOOKS.get()

    def call_first(compiled: Callable[..., Any], args: Sequence[Any], has_parts: bool) -> Any:
        metadata = names.FW_METADATA.get(context)
        if metadata is None:  # AOTAutograd has not written any, so it compiled nothing
            return None
        if not has_parts and not names.TOKENS.get(metadata):
            return compiled(*args)
        # Tokens and parts would shift the outputs (splits.md, fault 18). The call is made all the
        # same, else the first call of a training step would get the fake outputs. AOTAutograd may
        # raise here, where it takes a token or a part for an output, and makes a view of it.
        with contextlib.suppress(Exception):
            compiled(*args)
        return None

    try:
        # A backward with retain_graph=True runs again, and needs the saved tensors unchanged.
        with names.TRACING.get()(context), no_hooks(), _no_donated_buffers():
            yield call_first
    finally:
        names.FAKIFY_FIRST_CALL.set(False, context)
        _note_none_donated(context)


def _note_none_donated(context: Any) -> None:
    """Say in the metadata of a TracingContext's graph that backward overwrites no saved tensors.

    AOTAutograd, which may store the metadata, looks there in a backward with retain_graph, when the
    settings of `_no_donated_buffers` no longer hold.
    """
    metadata = None if context is None else names.FW_METADATA.get(context)
    if metadata is not None:
        # Under those settings it is left None, which is taken for "some" there.
        names.DONATED_IDXS.set([], metadata)


@contextlib.contextmanager
def _no_donated_buffers(further_tag: str = "") -> Iterator[None]:
    """Make what is compiled in this block leave saved tensors unchanged in its backward.

    The backward is compiled with its forward, while the settings hold. torch's caches keep what is
    compiled under a tag of its own (the program's tag, ours and `further_tag`), so that nothing
    compiled elsewhere, with donated buffers, is found in its place.

    Inductor's backward may reuse the memory of saved tensors ("donated buffers"), unless it is
    compiled in a backward with retain_graph=True. Its cache does not distinguish the two
    (torch 2.11 to 2.13): a backward with retain_graph could get one that overwrites what the next
    backward needs. AOTAutograd's own cache avoids that, but a section's first call bypasses it.
    """
    settings = names.settings({names.DONATED_BUFFER: False, names.COMPILE_BACKWARD_NOW: True})
    with settings, _tagged_cache(f"{_users_cache_tag()}{_NOT_DONATED}{further_tag}"):
        yield


_NOT_DONATED = " ddpopt: no donated buffers"


def _users_cache_tag() -> str:
    """The tag that the program has set for torch's caches; empty if it has set none."""
    return str(torch.compiler.config.cache_key_tag)


def _tagged_cache(tag: str) -> contextlib.AbstractContextManager[None]:
    """Let torch's caches find, in a block, only what was stored with this tag."""
    config: Any = torch.compiler.config  # its `patch` has no types
    patched: contextlib.AbstractContextManager[None] = config.patch(cache_key_tag=tag)
    return patched


Compiled = Callable[..., Any]  # takes a list and empties it
# (section graph, inputs, which of the whole graph's inputs each is, None for others) -> compiled
CompileSection = Callable[[fx.GraphModule, list[Any], Sequence[int | None]], Compiled]


class CutsBackward(Protocol):
    """Cuts the backward of one graph: AOTAutograd calls its methods, in this order."""

    @property
    def cache_key(self) -> str | None:
        """A text that differs from other cutters' if these would cut the same graph otherwise.

        Equal in any process. None if the result must not come from a cache.
        """

    def edit_forward(self, forward: fx.GraphModule) -> None:
        """Change the forward before it is compiled."""

    def compile_backward(
        self, backward: fx.GraphModule, inputs: list[Any], compile_section: CompileSection
    ) -> tuple[Sequence[Any], Any]:
        """The compiled sections, and data for running them, which can be pickled."""

    def make_backward(self, compiled: Sequence[Any], stored: Any) -> Callable[[list[Any]], Any]:
        """Return what AOTAutograd is to run, given what `compile_backward` returned.

        `compile_backward` may have run in another process: then only this method is called.
        """


# (graph, inputs, what cuts its backward) -> compiled forward
AOTCompilerFn = Callable[[fx.GraphModule, list[Any], CutsBackward], Callable[..., Any]]


def aot_inductor(compiler: CompilerFn) -> AOTCompilerFn:
    """A compiler like this one, which `inductor()` made, but with a cut backward."""

    def compile_graph(gm: fx.GraphModule, inputs: list[Any], cutting: CutsBackward) -> Any:
        """Compile one graph; Inductor calls `inner_compile` for its forward and its backward.

        Each forward is edited by `cutting` first. Each backward is cut by it, and `compile_section`
        compiles the sections.
        """
        # Looked up now: raised while Inductor compiles, TorchDriftError would be Inductor's error.
        names.COMPILE_FX_INNER.get()
        # What puts the cut backward into AOTAutograd's cache; None if it is not to be cached.
        storage = None if cutting.cache_key is None else _find_storage()
        tag = _users_cache_tag() + _NOT_DONATED

        def compile_inner(graph: fx.GraphModule, values: Any, **options: Any) -> Any:
            # While AOTAutograd bundles what Inductor compiled, to store it, Inductor's own cache is
            # off; this puts it on. The tag is without the cut's key, since the code of a graph does
            # not depend on where others are cut.
            not_bundled = names.settings({names.BUNDLED_AUTOGRAD_CACHE: False})
            with _tagged_cache(tag), not_bundled:
                return compile_part(graph, values, **options)

        forwards: list[Any] = []

        def inner_compile(graph: fx.GraphModule, graph_inputs: Any, **options: Any) -> Any:
            if not options.get(names.IS_BACKWARD.text, False):
                cutting.edit_forward(graph)
                forwards.append(compile_inner(graph, graph_inputs, **options))
                return forwards[-1]
            # The backward's inputs, by number, whose memory is the same in each call.
            static_inputs = set(options.pop(names.STATIC_INPUTS.text, ()))
            (whole_output,) = graph.graph.find_nodes(op="output")
            if names.STRIDES_KEPT.text not in whole_output.meta:
                raise names.STRIDES_KEPT.drift()  # Inductor sets it in each backward

            def compile_section(
                section: fx.GraphModule, section_inputs: list[Any], origins: Sequence[int | None]
            ) -> Compiled:
                (output,) = section.graph.find_nodes(op="output")
                values: Any = output.args[0]
                # Inductor keeps the strides of these; the next section relies on them.
                output.meta[names.STRIDES_KEPT.text] = list(range(len(values)))
                # By `origins`: the whole backward's input that each of the section's is, or None.
                static = [i for i, origin in enumerate(origins) if origin in static_inputs]
                own_options = {**options, names.STATIC_INPUTS.text: static}
                return compile_inner(section, section_inputs, **own_options)

            # `stored` is plain data, of which and the sections `make_backward` makes the backward.
            sections, stored = cutting.compile_backward(graph, list(graph_inputs), compile_section)
            # Now, before AOTAutograd stores that metadata.
            _note_none_donated(names.TRACING_CONTEXT.get().try_get())
            if storage is not None and storage.are_storable([*forwards, *sections]):
                return storage.CutBackward(sections, stored)
            # Without bundling AOTAutograd stores no entry for the graph; Inductor still stores its
            # sections. `_cut_backward_settings`, around all this, restores the setting.
            names.BUNDLED_AUTOGRAD_CACHE.set(False)
            return cutting.make_backward(sections, stored)

        compile_fx, patches = names.COMPILE_FX.get(), names.INDUCTOR_CONFIG.get(compiler)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_cut_backward_settings(cutting.cache_key if storage else None))
            if storage is not None:
                # For a `CutBackward` made above, and for one that AOTAutograd finds in its cache.
                stack.enter_context(storage.made_by(cutting.make_backward))
            return compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches)

    return compile_graph


def for_sections(compiler: CompilerFn) -> CompilerFn:
    """A compiler like this one, for sections of a forward.

    It is this one itself, or if that is Inductor, as `inductor()` makes it, Inductor with
    `compile_part` as its inner compiler. (`aot_inductor` compiles a backward's sections so.)
    """
    if not isinstance(compiler, names.INDUCTOR.get()):
        return compiler
    # Looked up now: raised while Inductor compiles, TorchDriftError would be Inductor's error.
    names.COMPILE_FX_INNER.get()
    compile_fx, patches = names.COMPILE_FX.get(), names.INDUCTOR_CONFIG.get(compiler)

    def compile_section(section: fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(section, inputs, inner_compile=compile_part, config_patches=patches)

    return compile_section


def compile_part(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Compile as Inductor's inner compiler does, but so that complex values keep their order.

    Inductor generates no code for complex values, so it calls ATen for what works on them. Take
    `z = slice_scatter(y, y[:, 1:8] * 2, 1, 1, 8)`, where nobody reads y after it: Inductor writes
    in place, `v = aten.slice(y, 1, 1, 8); aten.copy_(v, ...)`, and z is y from then on. But it
    calls `aten.slice` too, and its scheduler takes the write for one to v alone. So whatever reads
    z is free to run before the write, and does if less memory is needed in that order, or if it is
    fused with a kernel that runs before. Which of these happens to a graph is chance, so that a
    section can compute something else than the whole graph (torch 2.13 and 2.15; see docs/faq.md).

    Without the pass that does so, `reinplace`, there are no such writes (splits.md, fault 13). What
    else writes to a part of a complex tensor keeps its place as long as nothing is ordered anew.
    """
    settings: dict[PrivateName, Any] = {}
    if has_complex_values(graph):
        reinplace = names.REINPLACE_PASS.name
        names.REINPLACE_PASS.get()  # raises if the function, and so the pass, has another name
        # LIMIT: TORCHINDUCTOR_DISABLED_PASSES in the environment overrides this.
        # Beside those that the program has disabled, as names between commas.
        disabled = ",".join(filter(None, [str(names.DISABLED_PASSES.get()), reinplace]))
        settings = {names.DISABLED_PASSES: disabled, names.REORDER_FOR_MEMORY: False}
    # Inductor's cache knows code by its settings too.
    with names.settings(settings):
        return names.COMPILE_FX_INNER.get()(graph, inputs, **options)


def has_complex_values(gm: fx.GraphModule) -> bool:
    """Whether a graph of ATen, or one that it runs, has a complex value; its inputs count."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            value = aten_value(node)
            for part in value if isinstance(value, list | tuple) else [value]:
                if isinstance(part, torch.Tensor) and part.is_complex():
                    return True
    return False


def _find_storage() -> Any:
    """The module `_torch/cached.py`, by which AOTAutograd can store cut backwards.

    None if this release of torch is too old for it, or lacks a name that it needs (and warns).
    """
    if not names.OUTPUT_CODE.is_expected:
        return None
    with names.doing_without(names.Need.CACHE):
        output_code = names.OUTPUT_CODE.get()()  # an object has the key, its class has not
        names.CACHE_KEY.get(output_code)
        names.OUTPUT_LOADABLE.get()
        return importlib.import_module("ddpopt._torch.cached")  # which loads Inductor
    return None  # a name is missing


def aot_eager(gm: fx.GraphModule, inputs: list[Any], cutting: CutsBackward) -> Any:
    """Compile as the backend `aot_eager` does, but with a cut backward."""
    boxed_nop = names.BOXED_NOP.get()

    def compile_forward(graph: fx.GraphModule, graph_inputs: Any) -> Any:
        cutting.edit_forward(graph)
        return boxed_nop(graph, graph_inputs)

    def compile_backward(graph: fx.GraphModule, graph_inputs: Any) -> Any:
        def compile_section(
            section: fx.GraphModule, values: list[Any], _origins: object
        ) -> Compiled:
            return boxed_nop(section, values)

        sections, stored = cutting.compile_backward(graph, list(graph_inputs), compile_section)
        return cutting.make_backward(sections, stored)

    with _cut_backward_settings(None):
        return lookup_backend("aot_eager")(
            gm, inputs, fw_compiler=compile_forward, bw_compiler=compile_backward
        )


@contextlib.contextmanager
def _cut_backward_settings(key: str | None) -> Iterator[None]:
    """The settings with which a graph is compiled whose backward is cut.

    The backward is compiled with the forward, not when it first runs: a run of the forward makes
    the gates of the backward's sections, and needs these. With a `key`, see
    `CutsBackward.cache_key`, AOTAutograd searches its cache for a backward that was cut with that
    key, and stores the whole result in one entry. Without one AOTAutograd stores nothing and
    searches for nothing; Inductor's cache of compiled sections stays on.
    """
    if key is None:
        caches = (names.AUTOGRAD_CACHE, names.REMOTE_AUTOGRAD_CACHE, names.BUNDLED_AUTOGRAD_CACHE)
        settings: dict[PrivateName, Any] = dict.fromkeys(caches, False)
    else:
        settings = {names.BUNDLED_AUTOGRAD_CACHE: True}
    with _no_donated_buffers("" if key is None else f"; {key}"), names.settings(settings):
        yield
    # `aot_inductor` has done so where AOTAutograd stores the metadata; `aot_eager` has not.
    _note_none_donated(names.TRACING_CONTEXT.get().try_get())


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell AOTAutograd that a function takes its arguments as a list, which it empties."""
    names.BOXED_CALL.set_on_ours(function, True)
    return function


def restride(gm: fx.GraphModule, inputs: list[Any]) -> None:
    """Adapt the fake values in a backward graph, in place, to the fake `inputs` that it will have.

    Inductor may have chosen other strides in the forward for what it saved than were traced. What
    was a view with the traced strides may not be one with those, as after channels-last pooling:
    `view` would raise there, `reshape` copies.
    """
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp  # noqa: PLC0415  # as rarely used

    values = map(aten_value, gm.graph.find_nodes(op="placeholder"))
    if not all(map(_have_equal_strides, values, inputs)):
        for view in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            view.target = torch.ops.aten.reshape.default
        gm.recompile()
        propagation: Any = FakeTensorProp(gm, mode=fake_mode_of(inputs))
        propagation.propagate_dont_convert_inputs(*inputs)


def _have_equal_strides(value: object, other: object) -> bool:
    """Whether two values do not differ in strides, as two that have none do not."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True
    return value.layout is not torch.strided or value.stride() == other.stride()


def aten_value(node: fx.Node) -> Any:
    """What AOTAutograd, or make_fx, found a node of a graph of ATen to return; None if unknown.

    A fake tensor, a number that may be symbolic, or a tuple of such.
    """
    return node.meta.get(names.VALUE.text)


def has_aten_value(node: fx.Node) -> bool:
    return names.VALUE.text in node.meta


def set_aten_value(node: fx.Node, value: Any) -> None:
    node.meta[names.VALUE.text] = value


def is_tangent(placeholder: fx.Node) -> bool:
    """Whether an input of a backward graph is the gradient of an output of the forward."""
    return placeholder.name.startswith(names.TANGENTS.text)


def is_held_outside(placeholder: fx.Node) -> bool:
    """Whether an input of a backward graph is held by somebody else: a parameter or a tangent."""
    return placeholder.name.startswith((names.PRIMALS.text, names.TANGENTS.text))


def input_name(index: int, is_held: bool) -> str:
    """A name for the input of a section of a backward; `is_held`: its memory is not to be reused.

    By the beginning of the name Inductor tells whether the memory is free after its last use.
    """
    return f"{names.HELD_NAME.text if is_held else 'saved'}{index}"


def check_backward(backward: fx.GraphModule) -> None:
    """Raise TorchDriftError if a backward graph lacks a mark that AOTAutograd gives each of them.

    Whoever reads the marks one by one could not tell: an input may well have no value, and a call
    no number. The same goes for the count of writes, which `versions` reads while sections run:
    some tensors have none.
    """
    names.TENSOR_VERSION.get(torch.empty(0))
    placeholders = backward.graph.find_nodes(op="placeholder")
    # One tangent is always there: the token's, which each graph returns whose backward is cut.
    if not any(map(is_tangent, placeholders)):
        raise names.TANGENTS.drift()
    if not any(map(has_aten_value, placeholders)):
        raise names.VALUE.drift()
    calls = [node for node in backward.graph.nodes if node.op == "call_function"]
    if calls and all(autograd_number(node) is None for node in calls):
        raise names.AUTOGRAD_NUMBER.drift()
    if calls and not any(names.CUSTOM.text in node.meta for node in calls):
        # While AOTAutograd traced, `set_mark` marked the calls by which a gradient is made.
        raise names.CUSTOM.drift()


def gradient_arguments(backward: fx.GraphModule) -> list[Argument | None]:
    """Return, for each value that a backward graph returns, which argument's gradient it is.

    Arguments are numbered as in the graph that AOTAutograd was given; it is None if the value is
    not a gradient, or AOTAutograd does not tell.

    Raises:
        NotCutError: values and descriptions do not match one to one.
    """
    gradient, plain = names.GRADIENT_OUTPUT.get(), names.PLAIN_INPUT.get()
    (output,) = backward.graph.find_nodes(op="output")
    descriptions = output.meta.get(names.DESCRIPTION.text, ())
    if len(descriptions) != len(output.args[0]):
        raise NotCutError(Reason.NOT_DESCRIBED)
    arguments: list[Argument | None] = []
    for description in descriptions:
        is_gradient = isinstance(description, gradient)
        of_input = names.GRADIENT_OF.get(description) if is_gradient else None
        # A part of an argument, such as a tensor subclass's, is not `plain`.
        arguments.append(names.INPUT_INDEX.get(of_input) if isinstance(of_input, plain) else None)
    return arguments


def autograd_number(node: fx.Node) -> int | None:
    """The number of the autograd node for which a call of a backward graph was traced.

    None if AOTAutograd does not tell. A call of the forward that is recomputed has the number of
    the autograd node that it made in the forward.
    """
    number = node.meta.get(names.AUTOGRAD_NUMBER.text)
    return number if isinstance(number, int) else None


def traced_graph() -> fx.Graph | None:
    """The graph into which make_fx, for AOTAutograd, is tracing what runs now; None outside."""
    mode = names.PROXY_MODE.get()()
    return None if mode is None else names.TRACER.get(mode).graph


def set_mark(node: fx.Node, key: str, value: int) -> None:
    """Mark a node with a number under `key`; the nodes that torch makes of it have the mark too.

    torch copies these marks where it traces a graph anew, takes a part of it, or replaces a
    pattern of calls.
    """
    marks = node.meta.get(names.CUSTOM.text) or {}
    # A new dict, since nodes may share one.
    node.meta[names.CUSTOM.text] = {**marks, key: value}


def mark_of(node: fx.Node, key: str) -> int | None:
    """The number with which a node was marked, see `set_mark`; None without one."""
    marks = node.meta.get(names.CUSTOM.text) or {}
    value = marks.get(key)
    return value if isinstance(value, int) else None  # always, but the type is Any


def argument_placeholders(forward: fx.GraphModule) -> dict[fx.Node, Argument]:
    """Return, for inputs of a forward, which argument of AOTAutograd's graph each of them is.

    Left out are inputs that are no argument as it was given, such as a part of a tensor subclass.
    """
    plain = names.PLAIN_INPUT.get()
    placeholders = forward.graph.find_nodes(op="placeholder")
    if not any(names.DESCRIPTION.text in node.meta for node in placeholders):
        raise names.DESCRIPTION.drift()
    arguments: dict[fx.Node, Argument] = {}
    for node in placeholders:
        description = node.meta.get(names.DESCRIPTION.text)
        if isinstance(description, plain):
            arguments[node] = names.INPUT_INDEX.get(description)
    return arguments


def inductor(mode: str | None, options: Mapping[str, Any]) -> CompilerFn:
    """Return Inductor with `mode` and `options` applied as `torch.compile` applies them.

    Raises:
        RuntimeError: an option is unknown or has the wrong type, or the mode is unknown.
    """
    dynamic = None  # no matter: Dynamo has decided which sizes are dynamic
    return names.INDUCTOR.get()(mode, dict(options), dynamic)


def inductor_options() -> list[str]:
    return names.INDUCTOR_OPTIONS.get()()


def has_cuda_graphs(inductor: CompilerFn) -> bool:
    """Whether a compiler that `inductor()` made records CUDA graphs."""
    options = names.INDUCTOR_CONFIG.get(inductor)
    return bool(options.get("triton.cudagraphs", names.CUDAGRAPHS.get()))


def drawing_as_eager() -> contextlib.AbstractContextManager[None]:
    """Make Inductor compile random operators in this block so that they draw what eager draws."""
    return names.settings({names.FALLBACK_RANDOM: True})
