"""The per-compile options: `torch.compile(..., mode=..., options={...})`, checked and resolved.

`buckets`, `enabled`, `inner` and `split` are ours; every other key is passed on to Inductor as one
of its options.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ddpopt import _torch, config
from ddpopt._text import quote
from ddpopt._values import check_choice, check_kind
from ddpopt.errors import OptionError, TorchDriftError

OWN_OPTIONS = ("buckets", "enabled", "inner", "split")
SPLITS = ("auto", "backward", "forward")
NO_COMPILER = "install it (Debian: apt-get install g++), set CXX, or use inner='aot_eager'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one `torch.compile` call asked for.

    `inner` compiles a section or a whole graph and has the signature of a Dynamo backend:
    `(graph_module, example_inputs) -> callable`. `aot` is the same compiler with access to the
    backward graph that AOTAutograd makes; None if the compiler does not give access to it, such as
    Inductor with CUDA graphs (`has_cuda_graphs`). `drift` names what this torch lacks for the
    compilers that were asked for, "" if nothing.
    """

    inner: _torch.CompilerFn
    inner_name: str
    enabled: bool
    split: str
    buckets: str
    aot: _torch.AOTCompilerFn | None
    has_cuda_graphs: bool = False
    drift: str = ""

    @property
    def cuts_forward_alone(self) -> bool:
        """Whether only forward is cut: as requested, or for lack of a backward graph to cut."""
        return self.split == "forward" or self.aot is None


def resolve_options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Check `mode` and `options` as `torch.compile` passed them on, and fill in the defaults.

    Where torch lacks a name that a compiler needs, `drift` of what is returned says so: no error.

    Raises:
        OptionError: a key is unknown, or a value is invalid; the message lists what is valid.
    """
    if options is not None:
        check_kind("options", options, Mapping, "give a dict, as {'buckets': 'auto'}", OptionError)
    given = dict(options or {})
    enabled, buckets = (given.pop(flag, getattr(config, flag)) for flag in ("enabled", "buckets"))
    buckets = os.fspath(buckets) if isinstance(buckets, os.PathLike) else buckets
    config.check_flag("enabled", enabled)
    config.check_flag("buckets", buckets)
    split = given.pop("split", SPLITS[0])  # "auto"
    check_choice("the option 'split'", split, SPLITS)
    inner = given.pop("inner", "inductor")
    name = inner if isinstance(inner, str) else getattr(inner, "__name__", type(inner).__name__)
    # Compiles a forward's or a backward's graph that AOTAutograd made; None if the inner compiler
    # has no part that does this alone, or uses CUDA graphs: then only forward is cut.
    aot: _torch.AOTCompilerFn | None = None
    has_cuda_graphs = False
    compiler, drift = _run_uncompiled, ""  # if `inner` cannot be resolved
    try:
        compiler = _resolve_inner(inner, mode, given)  # what is left is for Inductor
        has_cuda_graphs = inner == "inductor" and _torch.has_cuda_graphs(compiler)
        if inner == "aot_eager":
            aot = _torch.aot_eager
        elif inner == "inductor" and not has_cuda_graphs:
            aot = _torch.aot_inductor(compiler)
    except TorchDriftError as error:
        is_found = compiler is not _run_uncompiled  # it then compiles graphs whole
        drift = str(error) if is_found else f"{error}; the graph runs uncompiled"
    return Options(
        inner=compiler,
        inner_name=name,
        enabled=enabled,
        split=split,
        buckets=buckets,
        aot=aot,
        has_cuda_graphs=has_cuda_graphs,
        drift=drift,
    )


def _run_uncompiled(gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
    """Compile as the backend `eager` does, without looking it up."""
    forward: Callable[..., Any] = gm.forward
    return forward


def _resolve_inner(
    inner: Any, mode: str | None, inductor_options: dict[str, Any]
) -> _torch.CompilerFn:
    """The compiler that the option `inner` names, or is; raises OptionError or TorchDriftError."""
    if inner == "inductor":
        return _inductor(mode, inductor_options)
    if inductor_options or mode:
        keys = [*inductor_options, *(["mode"] if mode else [])]
        raise OptionError(
            f"{keys} cannot be given with the inner compiler {quote(inner)}, because only Inductor "
            f"takes options and modes; ddpopt's own options are {list(OWN_OPTIONS)}; bind an "
            "inner compiler's own arguments with functools.partial"
        )
    if callable(inner):
        return inner  # type: ignore[no-any-return]
    if not isinstance(inner, str):
        raise OptionError(
            f"the option 'inner' is {quote(inner)}, a {type(inner).__name__}; give the name of a "
            "registered backend or a callable (graph_module, example_inputs) -> callable"
        )
    if inner == "ddpopt":
        raise OptionError("the option 'inner' is 'ddpopt', which would compile with itself")
    try:
        return _torch.lookup_backend(inner)
    except TorchDriftError:
        raise
    except Exception as error:  # InvalidBackend, or a third party's entry point that fails
        raise OptionError(
            f"the option 'inner' is {quote(inner)}, which is no backend that loads here ({error}); "
            f"registered are {sorted(torch.compiler.list_backends(exclude_tags=()))}"
        ) from error


def _inductor(mode: str | None, options: dict[str, Any]) -> _torch.CompilerFn:
    """Inductor with a mode, or with options, as `torch.compile` makes it; raises OptionError.

    Ours and Inductor's options come in one dictionary, so a misspelt `bukcets` gets here. Inductor
    would name its own options only, so names are checked before.
    """
    known = _torch.inductor_options() if options else []
    for key in options:
        name = str(key)  # a key may be anything
        if name.replace("-", "_") not in known:  # Inductor, too, takes dashes
            close = difflib.get_close_matches(name, [*OWN_OPTIONS, *known])
            hint = (
                f"did you mean {' or '.join(map(repr, close))}?"
                if close
                else f"ddpopt's own options are {list(OWN_OPTIONS)}, and Inductor's those of "
                "torch._inductor.list_options()"
            )
            raise OptionError(f"unknown option {quote(key)}; {hint}")
    try:
        return _torch.inductor(mode, options)
    except (RuntimeError, AttributeError, KeyError) as error:
        raise OptionError(
            f"Inductor refused mode {quote(mode)} or options {quote(options)}: {error}"
        ) from error
