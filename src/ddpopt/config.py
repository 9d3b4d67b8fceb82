"""ddpopt's process-wide flags, in the style of torch's own config modules.

The most specific setting wins: `torch.compile(..., options={"enabled": ...})`, then an
assignment or `patch` of this module, then the environment, then the default. See `options.py`
for the per-compile ones. `torch._dynamo.config.optimize_ddp = False`, which turns off PyTorch's own
`DDPOptimizer`, makes no difference.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ddpopt._text import quote
from ddpopt._values import check_boolean, check_choice
from ddpopt.errors import OptionError

_Value = TypeVar("_Value", bool, str)
# This module's own options, for the life of the process.
_declared: dict[str, tuple[bool | str, Sequence[str]]] = {}


def check_flag(flag: str, value: object) -> None:
    """Raise OptionError unless the flag exists and may have this value."""
    if flag not in _declared:
        raise OptionError(
            f"ddpopt.config has no flag {quote(flag)}; its flags are {sorted(_declared)}"
        )
    default, choices = _declared[flag]
    if isinstance(default, bool):
        check_boolean(quote(flag), value)
    else:
        check_choice(quote(flag), value, choices)


def _declare(flag: str, default: _Value, choices: Sequence[str] = ()) -> _Value:
    """Register a flag and its valid values; return its value: the environment's or the default.

    The environment is read here alone, when this module is imported.
    """
    _declared[flag] = default, choices
    variable = f"DDPOPT_{flag.upper()}"
    text = os.environ.get(variable)
    if text is None:
        return default
    if isinstance(default, bool):
        check_choice(f"the environment variable {variable}", text, ("0", "1"))
        return text == "1"
    check_choice(f"the environment variable {variable}", text, choices)
    return text


enabled: bool = _declare("enabled", True)
"""Whether graphs are split. Read when a graph is compiled. Environment: `DDPOPT_ENABLED`."""

buckets: str = _declare("buckets", "ddp", ("ddp", "auto", "*.json"))
"""Which buckets DDP reduces: its own (`"ddp"`), the best ones found during the first iterations
(`"auto"`), or those of a saved plan (the path of its file, which ends in `.json`). Read when a
graph is compiled. Environment: `DDPOPT_BUCKETS`."""

dump_dir: str = _declare("dump_dir", "")
"""The folder to which each compile's graphs and cut are written; `""` writes nothing. Read when a
graph is compiled. Environment: `DDPOPT_DUMP_DIR`."""

verify: bool = _declare("verify", False)
"""Whether to run `ddpopt.verify` before each DDP model's first training forward, raising
`VerificationError` if it fails; a warning says what cannot be verified. Set it to the same value
on all ranks. Environment: `DDPOPT_VERIFY`."""

disagreement: str = _declare("disagreement", "warning", ("warning", "error"))
"""What happens if `ddpopt.warmup` or `ddpopt.verify` finds that ranks compile for different DDP
models: a `"warning"` or an `"error"` (`DisagreementError`), on every rank. Environment:
`DDPOPT_DISAGREEMENT`."""

VARIABLES = tuple(f"DDPOPT_{flag.upper()}" for flag in _declared)
"""The environment variables that are read here."""

# Options of `torch.compile` that have no flag here.
_OPTIONS_ALONE = ("split", "inner")


def describe_unread(variable: str) -> str:
    """Why a variable `DDPOPT_...` is not read; what follows the semicolon is what to do."""
    option = variable.removeprefix("DDPOPT_").lower()
    if option in _OPTIONS_ALONE:
        return (
            f"the environment variable {variable} is not read; {option} is an option, not a "
            f"variable: options={{{option!r}: ...}}"
        )
    read = difflib.get_close_matches(variable, VARIABLES, n=1) or VARIABLES
    return f"the environment variable {variable} is not read; ddpopt reads {', '.join(read)}"


for _variable in sorted(os.environ):
    if _variable.startswith("DDPOPT_") and _variable not in VARIABLES:
        warnings.warn(describe_unread(_variable), stacklevel=2)


@contextlib.contextmanager
def patch(**flags: object) -> Iterator[None]:
    """Set flags for the duration of a `with` block or of a decorated function.

    Raises:
        OptionError: a name is not a flag, or it cannot have the value; no flag is set then.
    """
    for name, value in flags.items():
        check_flag(name, value)
    previous = {name: globals()[name] for name in flags}
    globals().update(flags)
    try:
        yield
    finally:
        globals().update(previous)


class _ConfigModule(types.ModuleType):
    """A module whose flags are checked when they are assigned."""

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("__"):
            check_flag(name, value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _ConfigModule
