"""A fault: a change of the source in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "ddpopt"


@dataclass(frozen=True, slots=True)
class Fault:
    """`name` is unique and stays while the changed line does. `module` is relative to the package.

    `text` is the module's whole source with the fault. `tests` are files or tests to run first,
    where the module's own are not those that should find it.
    """

    name: str
    module: str
    text: str
    tests: tuple[str, ...] = ()


def read(module: str) -> str:
    """The source of a module, without a fault."""
    return (SOURCE / module).read_text()
