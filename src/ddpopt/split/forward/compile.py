"""Compile the sections of a stitched forward graph into one callable.

It cuts nothing and plans nothing: `cut.py` made the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ddpopt import _events, _torch
from ddpopt._events import Label
from ddpopt.split.sections import Progress, compile_section


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
    # Plain attributes in place of the submodules: the generated code then calls them without the
    # cost of nn.Module's call.
    vars(stitched).update(compiler.compiled)
    forward: Callable[..., Any] = stitched.forward
    return forward


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
        self._graph = graph
        self._progress = Progress(graph, len(names))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _torch.to_fake(super().get_attr(target, args, kwargs), self._fake_mode)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        section = self.fetch_attr(target)
        hidden_floats = _torch.hidden_float_symbols(section.graph, self._fake_mode)
        with hidden_floats, _torch.section_tracing() as has_run_aot:
            index = self._names.index(target)
            compiled = self._compile(index, section, args)
            self.compiled[target] = _events.telling(compiled, Label(self._graph, index))
            if has_run_aot():
                return compiled(*args)
        with self._fake_mode, _apart_from_saved_tensors_hooks():
            return section(*args)

    def _compile(self, index: int, section: fx.GraphModule, args: Any) -> Callable[..., Any]:
        self._progress.tell(index)
        where = f"section {index} of {len(self._names)} ({self._names[index]})"
        return compile_section(
            where, lambda: self._inner(section, list(args)), lambda: section.forward
        )


def _apart_from_saved_tensors_hooks() -> contextlib.AbstractContextManager[None]:
    """Hide what a fake run saves from hooks around the compile, a checkpoint's for example.

    Autograd calls only the innermost of nested hooks.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)
