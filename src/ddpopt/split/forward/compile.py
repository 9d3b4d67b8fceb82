"""Compile the sections of a stitched forward graph into one callable.

It cuts nothing and plans nothing: `cut.py` made the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ddpopt import _events, _torch
from ddpopt._events import Label
from ddpopt.split.nodes import is_composite, output_values
from ddpopt.split.sections import SectionCompiler


def compile_sections(
    stitched: fx.GraphModule, example_inputs: Sequence[Any], inner: _torch.CompilerFn, graph: str
) -> Callable[..., Any]:
    """Compile each section with `inner`; return a callable with the unsplit graph's signature.

    `graph` is the unsplit graph's name. Sections are compiled in forward order, each with the fake
    tensors that earlier ones return, so that it sees the strides that Inductor chose.

    Raises:
        SectionCompileError: `inner` raised.
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
            has_parts = any(is_composite(n.meta.get("example_value")) for n in returned)
            outputs = call_first(compiled, args, has_parts)
            if outputs is not None:
                return outputs
        # Hooks around the compile, such as a checkpoint's, must not see what a fake run saves;
        # autograd calls only the innermost.
        unseen = torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)
        with self._fake_mode, unseen:
            return section(*args)
