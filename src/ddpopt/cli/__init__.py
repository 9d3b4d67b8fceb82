"""The command line `ddpopt`."""

from ddpopt.cli.main import main

__all__ = ["main"]
