"""The command line `ddpopt`, one module per command; `main` runs it."""

from __future__ import annotations

from ddpopt.cli.main import main

__all__ = ["main"]
