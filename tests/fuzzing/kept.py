"""Cases that once failed, by what was wrong, and the outcome that is right now."""

from __future__ import annotations

from fuzzing.spec import Case

KEPT: dict[str, Case] = {}
