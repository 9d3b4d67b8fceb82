"""Ranks that are threads of this process, with a store in it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.meetings.measuring import FakeGroup


def on_ranks(size: int, run: Callable[[Any], Any], groups: Any = None) -> list[str]:
    """Run it on ranks; return what each returned, or its error."""

    def report(rank: int) -> str:
        try:
            return str(run(groups[rank] if groups else FakeGroup(rank, size)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(report, range(size)))
