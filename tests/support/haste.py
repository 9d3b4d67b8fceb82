"""What makes compiling in tests take less time, without a difference that a test could see."""

from __future__ import annotations

import gc

from torch._dynamo import guards

_TIMES_RARER = 20


def hurry() -> None:
    """Have this process spend no time on what only a log or a small memory needs, for good.

    Dynamo measures each graph's guards after a flush of the CPU's caches, 18 ms, for its log alone.
    A tenth of the time goes into looking for cycles among the objects that compiling makes.
    """
    guards.profile_guard_manager = lambda *_: 0.0
    first, *others = gc.get_threshold()
    gc.set_threshold(_TIMES_RARER * first, *others)
