"""Compile sections: those of a stitched forward into one callable, those of a backward for gates.

It cuts nothing and plans nothing: `splitting` made the graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ddpopt import _torch, logs
from ddpopt.errors import SectionCompileError
from ddpopt.gates import CompiledSection
from ddpopt.splitting.backward import SectionGraph


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
        return _compile(where, lambda: self._inner(section, list(args)), lambda: section.forward)


def compile_backward_sections(
    sections: Sequence[SectionGraph],
    inputs: Sequence[Any],
    compile_section: _torch.CompileSection,
) -> tuple[CompiledSection, ...]:
    """Compile each section of a backward graph; equal ones once.

    `inputs` are the fake values of the whole graph's inputs.

    Raises:
        SectionCompileError: the inner compiler raised, and torch's `suppress_errors` is off.
    """
    compiled: dict[object, Callable[..., Any]] = {}
    result = []
    for index, section in enumerate(sections):
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
            )
        )
    return tuple(result)


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
            logs.warning("%s runs uncompiled: the inner compiler raised %r", where, error)
            return uncompiled()
        raise SectionCompileError(
            f"the inner compiler raised {type(error).__name__} on {where}: {error}"
        ) from error
