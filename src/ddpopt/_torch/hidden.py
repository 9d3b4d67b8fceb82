"""Keeps Dynamo out of ddpopt's own code: all of it, so that no function can be forgotten.

[Note: hidden code]
With a backward in a compiled function, and in all that such a function calls, Dynamo looks at each
Python frame that begins: gates, hooks, what they call of torch, and the compiled sections, which it
would compile once more. The rule has two halves, since Dynamo meets a function of ours in two ways:

- A frame of ours begins. It runs as it is, and so does everything that it calls.
- A function that Dynamo traces calls one of ours, a hook for example. The graph breaks there, as at
  functions of torch that Dynamo skips.

Some functions of ours call functions of users, which are to be compiled as if we were not there:
`calls_users_code` marks them. Their own frames run as they are, and Dynamo goes on with what they
call. What a function compiled by itself (`torch.compile`) does is its own affair: it is compiled
wherever it is called. What Dynamo may look into stands in `_traced.py`.

Dynamo is told both as data, about our files and our code objects: nothing of torch is replaced.

The public way, `torch.compiler.disable` on each function that autograd or a hook calls, does all of
that but for one function, at more cost. `_traced.around_ddp_forward` stands in DDP's own method:

    torch.compile(ddp, fullgraph=True)       DDP in a compiled function
    optimize_ddp = "python_reducer"          Dynamo looks at the method's frame
    Dynamo traces through the method

On the left the method has to be traced, on the right its frame has to be skipped, and what it calls
compiled. With `disable(recursive=False)` the left raises "Skip inlining torch.compiler.disable()d
function", in programs too that only import ddpopt; without it Dynamo compiles the frame. And each
call of a disabled function takes longer, compiled or not: 0.5 us with torch 2.13, 0.8 with 2.11, of
an empty hook's 0.1. Code that is marked here costs a program nothing where Dynamo is not active.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ddpopt import _traced
from ddpopt._torch import names

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NAME = __name__.partition(".")[0]
_FOLDER = Path(__file__).parent.parent
# Code of ours, which lives as long as the process.
_calling_users: set[types.CodeType] = set()
# The code of ours that `hide_from_dynamo` found last, each with what it told Dynamo of it.
_told: list[tuple[types.CodeType, Any]] = []
# As `hide_from_dynamo` last looked for code: how much is in `_calling_users`, and our modules, each
# with the ids of what its names are.
_searched: list[object] = []
# Containers, and what stands around a function in a class or module (a property, a partial, a
# cache). In these too functions of ours are looked for, beside our classes and their instances.
_CONTAINERS_AND_WRAPPERS = (
    dict,
    list,
    tuple,
    types.CellType,
    classmethod,
    staticmethod,
    property,
    functools.partial,
    functools.cached_property,
    type(functools.cache(id)),
    dataclasses.Field,
)


def calls_users_code(function: _Function) -> _Function:
    """Let Dynamo compile what this function of ours calls; see [Note: hidden code]."""
    _calling_users.add(function.__code__)
    return function


def hide_from_dynamo() -> None:
    """Keep Dynamo out of the code of ddpopt's that is imported by now. Idempotent.

    This imports Dynamo, so it is called where something of ours is first put into a program's own
    calls (hooks, DDP's forward), not when ddpopt is imported. It takes 1 ms, and 20 if a module of
    ours was imported in between. If torch has moved a name that it needs, it warns, and Dynamo
    compiles more than it should.
    """
    with names.doing_without(names.Need.HIDE):
        _hide_from_tracing()
    with names.doing_without(names.Need.HIDE):  # done even if the other lacked a name
        _hide_frames()


@functools.cache
def _hide_from_tracing() -> None:
    """Make Dynamo break graphs at calls of ours, which it would trace.

    By this it also skips frames of ours whose code is imported later; not what these call.
    """
    # `trace_rules.add("ddpopt")` would do, but for `_traced.py`: it takes whole directories.
    files = {str(path) for path in _FOLDER.rglob("*.py")} - {_traced.__file__}
    names.FORCE_SKIP_FILES.get().update(files)


def _hide_frames() -> None:
    """Make Dynamo run frames of ours, and what they call, as they are."""
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == _NAME]
    # Code of ours is new only in a module that is being imported, whose names then change. What was
    # found before may have been marked since, see `calls_users_code`.
    state = [len(_calling_users), *((m, list(map(id, vars(m).values()))) for m in modules)]
    if state != _searched:
        _search(modules)
        _searched[:] = state
    _tell_again()


def _search(modules: list[types.ModuleType]) -> None:
    """Set `_told` to all code of these modules, each with what Dynamo is to do with its frames.

    What functions in `_calling_users` call is compiled all the same; code of `_traced.py` that is
    not among them is left to Dynamo.
    """
    strategy, action = names.FRAME_STRATEGY.get(), names.FRAME_ACTION.get()
    # What becomes of a frame, and of the frames that begin while it runs.
    skipped = strategy(action.SKIP, action.SKIP)
    skipped_alone = strategy(action.SKIP, action.DEFAULT)
    strategies: list[tuple[types.CodeType, Any]] = []
    for code in _code_of(modules):
        if code in _calling_users:
            strategies.append((code, skipped_alone))
        elif code.co_filename != _traced.__file__:
            strategies.append((code, skipped))
    _told[:] = strategies  # at once: another thread may be in `_tell_again`, which goes through it


def hide_again() -> None:
    """Tell Dynamo what `hide_from_dynamo` has told it; without looking for code, in 0.3 ms.

    `torch._dynamo.reset` forgets this of code that Dynamo had met before it was told, and calls the
    backends that it has called: ours calls this. LIMIT: where only algorithms or records are at
    work, and nothing was compiled by ours, what our functions call is compiled after a reset.
    """
    with names.doing_without(names.Need.HIDE):
        _tell_again()


def _tell_again() -> None:
    """Tell Dynamo of all code in `_told`."""
    tell = names.SET_STRATEGY.get()
    for code, strategy in _told:
        tell(code, strategy)


def _code_of(modules: list[types.ModuleType]) -> list[types.CodeType]:
    """The code of all functions of ours in these modules, of lambdas and nested ones too.

    Looked for in all that the modules hold and that is ours or may hold ours.
    """
    codes: list[types.CodeType] = []
    rest: list[Any] = [vars(module) for module in modules]
    seen: set[int] = set()
    while rest:
        held = rest.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, types.CodeType):
            if held.co_filename.startswith(str(_FOLDER)):
                codes.append(held)
            rest += held.co_consts  # among them the code of nested functions
        elif isinstance(held, types.FunctionType):
            # Another's function may stand around ours, as a decorator of torch's does.
            rest += [held.__code__, held.__closure__, held.__dict__]
            rest += [held.__defaults__, held.__kwdefaults__]
        elif isinstance(held, _CONTAINERS_AND_WRAPPERS) or _is_of_ours(held):
            rest += gc.get_referents(held)
    return codes


def _is_of_ours(held: Any) -> bool:
    """Whether something is a class that is defined in ddpopt, or an object of such a class."""
    kind = held if isinstance(held, type) else type(held)
    return kind.__module__.partition(".")[0] == _NAME
