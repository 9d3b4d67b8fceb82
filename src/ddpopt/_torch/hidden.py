"""Keeps Dynamo out of ddpopt's own code, by file, so that no function can be forgotten.

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
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any, TypeVar

from ddpopt import _traced
from ddpopt._torch import names

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_REASON = "Dynamo is kept out of ddpopt's own code"
# Code of ours, which lives as long as the process.
_calling_users: set[types.CodeType] = set()


def calls_users_code(function: _Function) -> _Function:
    """Let Dynamo compile what this function of ours calls; see [Note: hidden code]."""
    _calling_users.add(function.__code__)
    return function


def hide_from_dynamo() -> None:
    """Keep Dynamo out of all of ddpopt's code from here on. Idempotent.

    This imports Dynamo, so it is called where hooks are registered or the backend is loaded, not
    when ddpopt is imported. If torch has moved a name that it needs, it warns, and Dynamo compiles
    more than it should.
    """
    with names.doing_without(names.Need.HIDE):
        _hide_from_tracing()
    with names.doing_without(names.Need.HIDE):
        _hide_frames()


def _is_hidden(filename: str | None) -> bool:
    if filename is None:  # of a builtin
        return False
    return filename.startswith(_PACKAGE) and filename != _traced.__file__


def _hide_from_tracing() -> None:
    """Make Dynamo break graphs at calls of ours, which it would trace."""
    original = names.CHECK_FILE.get()
    if hasattr(original, "ddpopt_replaces"):
        return
    result = names.SKIP_RESULT.get()

    def check_file(filename: str | None, *more: Any, **keywords: Any) -> Any:
        if _is_hidden(filename):
            return result(True, _REASON)
        return original(filename, *more, **keywords)

    # `trace_rules.add("ddpopt")` would do, but for `_traced.py`: it hides whole directories.
    check_file.ddpopt_replaces = original  # type: ignore[attr-defined]
    names.CHECK_FILE.set(check_file)


def _hide_frames() -> None:
    """Make Dynamo run frames of ours, and what they call, as they are.

    Dynamo's own rules for files would skip only our frames themselves. It would still compile the
    frames that these call: of other packages, and of generated code such as compiled sections.
    """
    callback = names.CATCH_ERRORS.get()
    original = callback.__call__
    if hasattr(original, "ddpopt_replaces"):
        return
    result, action = names.CALLBACK_RESULT.get(), names.FRAME_ACTION.get()
    strategy = names.FRAME_STRATEGY.get()
    # The answer says what becomes of a frame, and of the frames that begin while it runs. Dynamo
    # asks once for a function, and remembers.
    skipped = result(frame_exec_strategy=strategy(action.SKIP, action.SKIP))
    skipped_alone = result(frame_exec_strategy=strategy(action.SKIP, action.DEFAULT))

    def look_at(self: Any, frame: Any, *more: Any) -> Any:
        code = frame.f_code
        if code in _calling_users:
            return skipped_alone
        return skipped if _is_hidden(code.co_filename) else original(self, frame, *more)

    # For `torch.compiler.disable(recursive=False)` Dynamo looks who called the frame, beyond frames
    # of its own file. So `look_at` has to count as a function of that file.
    look_at.__code__ = look_at.__code__.replace(co_filename=original.__code__.co_filename)
    look_at.ddpopt_replaces = original  # type: ignore[attr-defined]
    callback.__call__ = look_at
