"""Faults that change nothing that anybody could notice, each with the reason."""

from __future__ import annotations

EQUAL: dict[str, str] = {}
