"""Inspection of what was decided. The core never imports this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpopt._lazy import import_from

if TYPE_CHECKING:
    from ddpopt.inspection.explain import Explanation
    from ddpopt.inspection.recording import Recording
    from ddpopt.inspection.traces import merge_traces

__all__ = ["Explanation", "Recording", "merge_traces"]

_WHERE = {
    "explain": "Explanation",
    "recording": "Recording",
    "traces": "merge_traces",
}


def __getattr__(name: str) -> Any:
    return import_from(__name__, _WHERE, name)
