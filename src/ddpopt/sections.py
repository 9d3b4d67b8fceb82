"""Compile the sections of a stitched graph and join them into one callable.

It cuts nothing and plans nothing: `splitting` made the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ddpopt import _torch, logs
from ddpopt.errors import SectionCompileError


def compile_sections(
    stitched: fx.GraphModule, example_inputs: Sequence[Any], inner: _torch.CompilerFn
) -> Callable[..., Any]:
    """Compile each section with `inner`; return a callable with the unsplit graph's signature.

    Sections are compiled in forward order, each with the fake tensors that the ones before it
    return, so that it sees the strides that Inductor chose for them.

    Raises:
        SectionCompileError: `inner` raised, and torch's `suppress_errors` is off.
    """
    fake_mode = _torch.fake_mode_of(example_inputs)
    names = [str(node.target) for node in stitched.graph.find_nodes(op="call_module")]
    compiler = _SectionCompiler(stitched, inner, fake_mode, names)
    compiler.run(*(_torch.to_fake(value, fake_mode) for value in example_inputs))
    for name, compiled in compiler.compiled.items():
        # A plain attribute in place of the submodule: the generated code then calls it without
        # the cost of nn.Module's call.
        stitched.delete_submodule(name)
        stitched.__dict__[name] = compiled
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
    ) -> None:
        super().__init__(stitched)
        self.extra_traceback = False  # our errors name the section; the interpreter adds noise
        self.compiled: dict[str, Callable[..., Any]] = {}
        self._inner = inner
        self._fake_mode = fake_mode
        self._names = names

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
        with self._fake_mode:
            return section(*args)

    def _compile(self, name: str, section: fx.GraphModule, args: Any) -> Callable[..., Any]:
        where = f"section {self._names.index(name)} of {len(self._names)} ({name})"
        try:
            return self._inner(section, list(args))
        except _torch.control_flow_exceptions():
            raise
        except Exception as error:
            if _torch.suppresses_errors():
                logs.warning("%s runs uncompiled: the inner compiler raised %r", where, error)
                uncompiled: Callable[..., Any] = section.forward
                return uncompiled
            raise SectionCompileError(
                f"the inner compiler raised {type(error).__name__} on {where}: {error}"
            ) from error
