"""What `torch.compile` made: a model's compiled parts, and what compiles each of them.

A *context* here is the object of Dynamo's that each call of `torch.compile` makes, and that
compiles a module or function when this is called. It holds the backend, with its options. Whatever
has one and the same backend shares compiled code, whichever the context.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpopt._torch import names


def unwrap_compiled(module: Any) -> Any:
    """The module that `torch.compile` wrapped, or the object itself."""
    is_wrapper = isinstance(module, names.OPTIMIZED_MODULE.get())
    return names.ORIG_MOD.get(module) if is_wrapper else module


def is_whole_forward(path: tuple[str, ...]) -> bool:
    """Whether a path below DDP leads to its module, or to what `torch.compile` wrapped there."""
    return path in ((), (names.ORIG_MOD.name,))


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `torch.compile` made this module, or its `compile` was called."""
    is_wrapper = isinstance(module, names.OPTIMIZED_MODULE.get())
    return is_wrapper or names.COMPILED_CALL.get(module) is not None


def compiled_parts(model: nn.Module) -> list[Any]:
    """The contexts, once each, of all parts of a model for which `torch.compile` was called.

    Parts are modules that it wrapped, and functions that are a module's own attributes, not its
    class's, including the one that `Module.compile` keeps.
    """
    optimized = names.OPTIMIZED_MODULE.get()
    contexts = []
    for part in model.modules():
        if isinstance(part, optimized):  # whose compiled `forward` has the same context
            contexts.append(names.DYNAMO_CTX.get(part))
        else:
            contexts += map(context_of, compiled_functions(part).values())
    return list({id(context): context for context in contexts}.values())


def compiled_functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """A module's own attributes that are functions which `torch.compile` returned."""
    is_compiled = names.GET_COMPILER_CONFIG.is_in
    return {
        name: attribute
        for name, attribute in vars(module).items()
        if inspect.isfunction(attribute) and is_compiled(attribute)
    }


def context_of(function: Callable[..., Any]) -> Any:
    """The context of a function that `torch.compile` returned."""
    # The getter is defined in a method of the context, whose `self` is in the getter's closure.
    getter = names.GET_COMPILER_CONFIG.get(function)
    try:
        return inspect.getclosurevars(getter).nonlocals["self"]
    except KeyError as error:
        raise names.GET_COMPILER_CONFIG.drift() from error


def backend_of(context: Any) -> Any:
    """The innermost backend of a context: for us `ddpopt`'s function, without options."""
    return innermost_backend(names.CALLBACK.get(context))


def innermost_backend(backend: Any) -> Any:
    """Unwrap a backend from what `torch.compile`, Dynamo and `functools.partial` put around it."""
    while True:
        if isinstance(backend, functools.partial):
            backend = backend.func
        elif names.ORIG_BACKEND.is_in(backend):
            backend = names.ORIG_BACKEND.get(backend)
        elif names.COMPILER_FN.is_in(backend):
            backend = names.COMPILER_FN.get(backend)
        else:
            return backend


def compile_options(context: Any) -> dict[str, Any]:
    """Return the `mode` and `options` that `torch.compile` got for a context, if it got any."""
    return dict(names.BACKEND_OPTIONS.find(compiler_of(context), {}))


def context_with_own_code(context: Any) -> Any:
    """A context that compiles as this one does, but shares its code with nothing else."""
    compiled = torch.compile(
        lambda: None,  # which is never called: only its context is wanted
        # A new object around the backend and its options, since code is shared by backend objects.
        backend=functools.partial(compiler_of(context)),
        fullgraph=names.FULLGRAPH.get(context),
        dynamic=names.DYNAMIC.get(context),
    )
    return context_of(compiled)


def compiler_of(context: Any) -> Any:
    """The backend of a context as `torch.compile` wrapped it, with its options bound."""
    backend = names.CALLBACK.get(context)
    while names.ORIG_BACKEND.is_in(backend):
        backend = names.ORIG_BACKEND.get(backend)
    return backend


def compiled_by(callback: Any, module: nn.Module) -> nn.Module:
    """Return what `torch.compile` returns for a module, but with a callback of another context's.

    So the module runs the code that is compiled for that other context. (Within a compiled
    function it is known which callback is active, not which context.)
    """
    never_called = torch.compile(lambda: None, backend="eager")
    context = context_of(never_called)
    names.CALLBACK.set(callback, context)
    compiled: nn.Module = context(module)
    return compiled
