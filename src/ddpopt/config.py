"""ddpopt's process-wide flags, as torch's own config modules have them.

The most specific setting wins: `torch.compile(..., options={"enabled": ...})`, then an
assignment or `patch` of this module, then the environment, then the default. See `options.py`
for the per-compile ones. `torch._dynamo.config.optimize_ddp = False` switches splitting off
whatever is set here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence

from ddpopt.errors import OptionError

BUCKETS = ("ddp", "auto")
DISAGREEMENTS = ("warning", "error")
_BOOLEANS = {"0": False, "1": True}


def _read_boolean(variable: str, default: bool) -> bool:
    text = os.environ.get(variable)
    if text is None:
        return default
    if text not in _BOOLEANS:
        raise OptionError(
            f"the environment variable {variable} is {text!r}; valid values are '0' and '1'"
        )
    return _BOOLEANS[text]


def check_boolean(flag: str, value: object) -> bool:
    """Return `value` if it is a bool.

    Raises:
        OptionError: it is anything else.
    """
    if not isinstance(value, bool):
        raise OptionError(f"{flag!r} is {value!r}, a {type(value).__name__}; give True or False")
    return value


def check_choice(flag: str, value: object, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`.

    Raises:
        OptionError: it is anything else.
    """
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{flag!r} is {value!r}; valid values are {list(choices)}")
    return value


check_enabled = functools.partial(check_boolean, "enabled")
check_buckets = functools.partial(check_choice, "buckets", choices=BUCKETS)
_check_disagreement = functools.partial(check_choice, "disagreement", choices=DISAGREEMENTS)


def check_dump_dir(value: object) -> str:
    """Return `value` if it is a str.

    Raises:
        OptionError: it is anything else.
    """
    if not isinstance(value, str):
        raise OptionError(
            f"'dump_dir' is {value!r}, a {type(value).__name__}; give the name of a folder, or '' "
            "for no dumps"
        )
    return value


enabled: bool = _read_boolean("DDPOPT_ENABLED", default=True)
"""Whether graphs are split. Read when a graph is compiled. Environment: `DDPOPT_ENABLED`."""

buckets: str = check_buckets(os.environ.get("DDPOPT_BUCKETS", "ddp"))
"""Whose buckets DDP reduces: its own (`"ddp"`), or the best that are found in the first iterations
(`"auto"`). Read when a graph is compiled. Environment: `DDPOPT_BUCKETS`."""

dump_dir: str = check_dump_dir(os.environ.get("DDPOPT_DUMP_DIR", ""))
"""The folder that each compile's graphs and plan are written to; `""` writes none. Read when a
graph is compiled. Environment: `DDPOPT_DUMP_DIR`."""

verify: bool = _read_boolean("DDPOPT_VERIFY", default=False)
"""Whether each DDP model's first training forward is preceded by `ddpopt.verify`, which raises
`VerificationError` where it fails; a warning says what cannot be verified. Set it on all ranks
alike. Environment: `DDPOPT_VERIFY`."""

disagreement: str = _check_disagreement(os.environ.get("DDPOPT_DISAGREEMENT", "warning"))
"""What follows where ranks compiled for different DDP models: a `"warning"` or an `"error"`
(`DisagreementError`), on every rank. They compare in `ddpopt.warmup`; for an error also after the
steps that compile, by the process group's store. Environment: `DDPOPT_DISAGREEMENT`."""

name_peers: bool = _read_boolean("DDPOPT_NAME_PEERS", default=False)
"""Whether a process opens a socket by which other ranks see that it lives, so that errors of lost
connections name the rank, without a `ddpopt.naming_peers` block. Read when a graph is compiled.
Environment: `DDPOPT_NAME_PEERS`."""

_CHECKS: dict[str, Callable[[object], object]] = {
    "enabled": check_enabled,
    "buckets": check_buckets,
    "dump_dir": check_dump_dir,
    "verify": functools.partial(check_boolean, "verify"),
    "disagreement": _check_disagreement,
    "name_peers": functools.partial(check_boolean, "name_peers"),
}

VARIABLES = tuple(f"DDPOPT_{flag.upper()}" for flag in _CHECKS)
"""The environment variables that are read here."""


@contextlib.contextmanager
def patch(**flags: object) -> Iterator[None]:
    """Set flags for the duration of a `with` block or of a decorated function.

    Raises:
        OptionError: a name is not a flag, or a value has the wrong type; nothing is set then.
    """
    module = sys.modules[__name__]
    for name, value in flags.items():
        _check_flag(name, value)
    previous = {name: getattr(module, name) for name in flags}
    for name, value in flags.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in previous.items():
            setattr(module, name, value)


def _check_flag(name: str, value: object) -> None:
    if name not in _CHECKS:
        raise OptionError(f"ddpopt.config has no flag {name!r}; its flags are {sorted(_CHECKS)}")
    _CHECKS[name](value)


class _ConfigModule(types.ModuleType):
    """A module whose flags are checked when they are assigned."""

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("__"):
            _check_flag(name, value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _ConfigModule
