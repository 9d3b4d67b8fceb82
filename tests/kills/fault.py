"""A fault: a change of the source in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "ddpopt"


@dataclass(frozen=True, slots=True)
class Fault:
    """`name` is unique and stays while the changed line does. `module` is relative to the package.

    `text` is the module's whole source with the fault. `tests` are files or tests to run beside the
    module's own, where these are not those that should find it; or, with `has_all_tests`, alone.
    """

    name: str
    module: str
    text: str
    tests: tuple[str, ...] = ()
    has_all_tests: bool = False


def read(module: str) -> str:
    """The source of a module, without a fault."""
    return (SOURCE / module).read_text()
