"""Before a long run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpopt._lazy import import_from

if TYPE_CHECKING:
    from ddpopt.checks.verify import Verification

__all__ = ["Verification"]

_WHERE = {
    "verify": "Verification",
}


def __getattr__(name: str) -> Any:
    return import_from(__name__, _WHERE, name)
