"""Compile sections: those of a stitched forward into one callable, those of a backward for gates.

It cuts nothing and plans nothing: `splitting` made the graphs.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ddpopt import _events, _logs, _torch
from ddpopt._events import Label
from ddpopt.errors import SectionCompileError
from ddpopt.split.backward.cut import SectionGraph
from ddpopt.split.backward.gates import CompiledSection
from ddpopt.split.backward.tangents import ANY

_QUIET_S = 3.0  # of compiling before anything is said of it


def compile_sections(
    stitched: fx.GraphModule, example_inputs: Sequence[Any], inner: _torch.CompilerFn, graph: str
) -> Callable[..., Any]:
    """Compile each section with `inner`; return a callable with the unsplit graph's signature.

    `graph` is its name, for messages.

    Sections are compiled in forward order, each with the fake tensors that the ones before it
    return, so that it sees the strides that Inductor chose for them.

    Raises:
        SectionCompileError: `inner` raised, and torch's `suppress_errors` is off.
    """
    fake_mode = _torch.fake_mode_of(example_inputs)
    names = [str(node.target) for node in stitched.graph.find_nodes(op="call_module")]
    compiler = _SectionCompiler(stitched, inner, fake_mode, names, graph)
    compiler.run(*(_torch.to_fake(value, fake_mode) for value in example_inputs))
    for name in names:
        stitched.delete_submodule(name)
    return _StitchedGraph(stitched, compiler.compiled, graph)


class _StitchedGraph:
    """Calls the stitched graph; while somebody listens, with sections that tell that they run."""

    def __init__(
        self, stitched: fx.GraphModule, compiled: dict[str, Callable[..., Any]], graph: str
    ) -> None:
        self._forward: Callable[..., Any] = stitched.forward
        # Plain attributes in place of the submodules: the generated code then calls them without
        # the cost of nn.Module's call.
        self._attributes = vars(stitched)
        self._attributes.update(compiled)
        self._compiled = compiled
        self._telling = {
            name: _events.telling(section, Label(graph, index))
            for index, (name, section) in enumerate(compiled.items())
        }

    def __call__(self, *args: Any) -> Any:
        if _events.current is None:
            return self._forward(*args)
        self._attributes.update(self._telling)
        try:
            return self._forward(*args)
        finally:
            self._attributes.update(self._compiled)


class _SectionCompiler(fx.Interpreter):
    """Runs the stitched graph on fake tensors and compiles each section when it comes by."""

    def __init__(
        self,
        stitched: fx.GraphModule,
        inner: _torch.CompilerFn,
        fake_mode: Any,
        names: Sequence[str],
        graph: str,
    ) -> None:
        super().__init__(stitched)
        self.extra_traceback = False  # our errors name the section; the interpreter adds noise
        self.compiled: dict[str, Callable[..., Any]] = {}
        self._inner = inner
        self._fake_mode = fake_mode
        self._names = names
        self._progress = Progress(graph, len(names))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _torch.to_fake(super().get_attr(target, args, kwargs), self._fake_mode)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        section = self.fetch_attr(target)
        hidden_floats = _torch.hidden_float_symbols(section.graph, self._fake_mode)
        with hidden_floats, _torch.section_tracing() as trace:
            compiled = self._compile(target, section, args)
            self.compiled[target] = compiled
            if trace.has_run_aot:
                return compiled(*args)
        with self._fake_mode, _apart_from_saved_tensors_hooks():
            return section(*args)

    def _compile(self, name: str, section: fx.GraphModule, args: Any) -> Callable[..., Any]:
        index = self._names.index(name)
        self._progress.tell(index)
        where = f"section {index} of {len(self._names)} ({name})"
        return _compile(where, lambda: self._inner(section, list(args)), lambda: section.forward)


def _apart_from_saved_tensors_hooks() -> contextlib.AbstractContextManager[None]:
    """Keep what a fake run saves from the hooks of whoever compiles, a checkpoint for example.

    Of nested hooks autograd calls the innermost.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)


def compile_backward_sections(
    sections: Sequence[SectionGraph],
    inputs: Sequence[Any],
    compile_section: _torch.CompileSection,
    graph: str,
    descent: Mapping[int, int],
) -> tuple[CompiledSection, ...]:
    """Compile each section of a backward graph; equal ones once.

    `inputs` are the fake values of the whole graph's inputs, `graph` is its name, `descent` is what
    `find_descent` returned.

    Raises:
        SectionCompileError: the inner compiler raised, and torch's `suppress_errors` is off.
    """
    compiled: dict[object, Callable[..., Any]] = {}
    result = []
    progress = Progress(graph, len(sections))
    for index, section in enumerate(sections):
        progress.tell(index)
        placeholders = section.graph.graph.find_nodes(op="placeholder")
        origins = [slot if slot < len(inputs) else None for slot in section.takes]
        values = [
            node.meta.get("val") if origin is None else inputs[origin]
            for node, origin in zip(placeholders, origins, strict=True)
        ]
        call = functools.partial(compile_section, section.graph, values, origins)
        key = _identity(section.graph, values) or index
        if key not in compiled:
            compiled[key] = _compile(
                f"backward section {index} of {len(sections)}",
                call,
                functools.partial(_boxed, section.graph),
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
    return tuple(result)


class Progress:
    """Tells which section is being compiled, once compiling has taken some time."""

    def __init__(self, graph: str, num_sections: int) -> None:
        self._graph = graph
        self._num_sections = num_sections
        self._began_s = time.monotonic()

    def tell(self, index: int) -> None:
        """The compiler comes to section `index`."""
        taken_s = time.monotonic() - self._began_s
        if taken_s >= _QUIET_S:
            _logs.progress(
                "graph %s: compiling section %d of %d, after %.0f s",
                self._graph,
                index + 1,
                self._num_sections,
                taken_s,
            )


def _identity(section: fx.GraphModule, values: Sequence[Any]) -> object | None:
    """Return what two sections have in common that one compiled callable can serve.

    None where a section holds attributes, which the code does not show, or symbols.
    """
    if section.graph.find_nodes(op="get_attr"):
        return None
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    if any(_torch.free_symbols(value) for value in values):
        return None
    kinds = [(v.shape, v.stride(), v.dtype, v.device, v.storage_offset()) for v in values]
    return (section.code, tuple(kinds))


def _boxed(section: fx.GraphModule) -> Callable[..., Any]:
    def run(values: list[Any]) -> Any:
        arguments = tuple(values)
        values.clear()
        return section.forward(*arguments)

    return run


def _compile(
    where: str,
    compile_it: Callable[[], Callable[..., Any]],
    uncompiled: Callable[[], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile a section; say which one it was if that fails."""
    try:
        return compile_it()
    except _torch.control_flow_exceptions():
        raise
    except Exception as error:
        if _torch.suppresses_errors():
            _logs.warning("%s runs uncompiled: the inner compiler raised %r", where, error)
            return uncompiled()
        raise SectionCompileError(
            f"the inner compiler raised {type(error).__name__} on {where}: {error}"
        ) from error
