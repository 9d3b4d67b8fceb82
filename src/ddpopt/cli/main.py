"""`main`: read the arguments, run one command, show its report, and return an exit status.

0 means success, 1 that the check or the work failed, 2 bad input, 130 Ctrl-C, 141 that nobody reads
the output any more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from ddpopt.cli.output import Report, Screen
from ddpopt.cli.parser import make_parser
from ddpopt.errors import DDPOptError, TorchDriftError, UnsupportedModeError

_FAILED, _BAD_INPUT, _INTERRUPTED, _CLOSED = 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; bad input exits with status 2 and says why.

    An exception in the user's own model is not caught, because its traceback is what helps.
    """
    parser = make_parser()
    args = parser.parse_args(arguments)
    screen = Screen(as_json=args.json)
    try:
        # A model, or its compiler, may print; only the report belongs on stdout.
        with contextlib.redirect_stdout(sys.stderr):
            report = find_command(args.command)(args, screen)
        return 0 if report is None else _show(report, screen)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (TorchDriftError, UnsupportedModeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _FAILED
    except DDPOptError as error:  # about what the arguments name, so usage would not help
        parser.exit(_BAD_INPUT, f"{parser.prog}: error: {error}\n")


def find_command(name: str) -> Callable[[argparse.Namespace, Screen], Report | None]:
    """Return a command, importing only what it needs: `module:function` in `commands/`."""
    module, _, function = name.partition(":")
    command: Callable[[argparse.Namespace, Screen], Report | None]
    command = getattr(importlib.import_module(f"ddpopt.cli.commands.{module}"), function)
    return command


def _show(report: Report, screen: Screen) -> int:
    try:
        screen.show(report)
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # else Python would flush, and complain, at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED
    return report.status
