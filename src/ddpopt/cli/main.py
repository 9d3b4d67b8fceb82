"""The command `ddpopt`: read the arguments, run one command, show its report, return a status.

0 means success, 1 that the check or the work failed, 2 bad input, 130 Ctrl-C, 141 that nobody reads
the output any more. The parser imports nothing that takes time; a command's module is imported when
it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ddpopt._text import check_can_write, installed_version, quote
from ddpopt.cli.output import LATENCY_US, Report, Screen
from ddpopt.errors import (
    DDPOptError,
    PeerError,
    PlanError,
    TorchDriftError,
    UnsupportedModeError,
)
from ddpopt.planning.costs import ALGORITHMS
from ddpopt.planning.simulation import parse_bandwidth

_FAILED, _BAD_INPUT, _INTERRUPTED, _CLOSED = 1, 2, 130, 141
_MOST_DIGITS, _MOST_MIB = 18, 1e9  # whole numbers are below `_values.BEYOND`, as in plans
_EXIT_STATUS = "Exit status: 0 fine, 1 the check or the work failed, 2 bad input, 130 Ctrl-C."
_T = TypeVar("_T")
_Parser = argparse.ArgumentParser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; bad input exits with status 2 and says why."""
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
    except (TorchDriftError, UnsupportedModeError, PeerError) as error:
        # Of torch here, or of another rank, and not of the arguments.
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _FAILED
    except DDPOptError as error:  # about what the arguments name, so usage would not help
        parser.exit(_BAD_INPUT, f"{parser.prog}: error: {error}\n")


def find_command(name: str) -> Callable[[argparse.Namespace, Screen], Report | None]:
    """A command, importing only its module, given as `module:function`."""
    module, _, function = name.partition(":")
    command: Callable[[argparse.Namespace, Screen], Report | None]
    command = getattr(importlib.import_module(f"ddpopt.cli.{module}"), function)
    return command


def _show(report: Report, screen: Screen) -> int:
    """Show a report on stdout; return its status, or that nobody reads the output any more."""
    try:
        screen.show(report)
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # else Python would flush, and complain, at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED
    return report.status


# ---- arguments ----------------------------------------------------------------------------------


def make_parser() -> _Parser:
    """The parser; what it parses has `command`, as `module:function`."""
    parser = _Parser(
        prog="ddpopt",
        description="See, predict and measure how DDP's communication overlaps with backward.",
        epilog=_EXIT_STATUS,
    )
    version = f"%(prog)s {installed_version()}"
    parser.add_argument(
        "--version", action="version", version=version, help="print the version and exit"
    )
    top = parser.add_subparsers(metavar="COMMAND", required=True)
    rows: tuple[tuple[str, str, Callable[[_Parser], None]], ...] = (
        ("explain", "show how a model is split, without other processes", _explain),
        ("simulate", "show one iteration of a plan on one cluster", _simulate),
        ("sweep", "show the efficiency of a plan on many clusters", _sweep),
        ("calibrate", "measure what an allreduce costs, under torchrun", _calibrate),
        ("bench", "measure a model under each way to train, under torchrun", _bench),
        (
            "doctor",
            "check whether training can be split here, on torchrun's ranks if it starts it",
            _doctor,
        ),
        ("help", "explain what messages and figures refer to", _help),
    )
    for name, summary, add_arguments in rows:
        command = top.add_parser(
            name, help=summary, description=f"{summary.capitalize()}.", epilog=_EXIT_STATUS
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        add_arguments(command)
    return parser


def _explain(command: _Parser) -> None:
    command.set_defaults(command="commands:run_explain")
    _add_factory(command)
    add = command.add_argument
    split_help = "which graph to split (default: %(default)s)"
    add("--split", default="auto", metavar="auto|backward|forward", help=split_help)
    add("--inner", default="aot_eager", help="what compiles each section (default %(default)s)")
    cap_help = "size of DDP's buckets (default: DDP's own, 25)"
    add("--bucket-cap-mb", type=_megabytes, metavar="MIB", help=cap_help)
    add("--html", type=_output, metavar="FILE", help="also write a page for a browser")
    links = command.add_argument_group("prediction", "How it would run on a cluster; give both.")
    links.add_argument("--world-size", type=_whole, help="number of ranks")
    links.add_argument("--bandwidth", type=_bandwidth, help="of a node's link, such as 10gbit")


def _simulate(command: _Parser) -> None:
    command.set_defaults(command="commands:run_simulate")
    command.add_argument("--world-size", type=_whole, required=True, help="number of ranks")
    link_help = "of a node's link, such as 10gbit; default: the ring that the plan's cost implies"
    command.add_argument("--bandwidth", type=_bandwidth, help=link_help)
    _add_cluster(command)


def _sweep(command: _Parser) -> None:
    command.set_defaults(command="commands:run_sweep")
    add = command.add_argument
    ranks_help = "numbers of ranks (default %(default)s)"
    add("--world-sizes", type=_list_of(_whole), default="2,8,64,1024", help=ranks_help)
    link_help = "of a node's link (default %(default)s)"
    add("--bandwidths", type=_list_of(_bandwidth), default="1gbit,10gbit,100gbit", help=link_help)
    _add_cluster(command)


def _add_cluster(command: _Parser) -> None:
    command.add_argument("plan", help="the file that BucketPlan.save wrote")
    # No defaults here: `simulate` refuses links that are given without --bandwidth.
    add = command.add_argument_group("links").add_argument
    add("--algorithm", choices=ALGORITHMS, help=f"default: {ALGORITHMS[0]}")
    latency_help = f"of a message between nodes, in microseconds (default {LATENCY_US:g})"
    add("--latency-us", type=_real, help=latency_help)
    add(
        "--ranks-per-node",
        type=_whole,
        help="of a node, within which a byte costs nothing (default: 1)",
    )
    add = command.add_argument_group("stragglers").add_argument
    delay_help = "mean delay of a rank as a part of its computation, such as 0.02"
    add("--stragglers", type=_real, default=0.0, metavar="MEAN", help=delay_help)
    add("--seed", type=_seed, default=0, help="of the delay (default 0)")


def _calibrate(command: _Parser) -> None:
    command.set_defaults(command="commands:run_calibrate")
    _add_backend(command)
    output_help = "also write the JSON to a file"
    command.add_argument("--output", type=_output, metavar="FILE", help=output_help)


def _bench(command: _Parser) -> None:
    command.set_defaults(command="bench:run")
    _add_factory(command)
    _add_backend(command)
    add = command.add_argument
    add("--inner", default="inductor", help="what compiles graphs (default %(default)s)")
    add("--steps", type=_whole, default=5, help="of a turn (default %(default)s)")
    add("--rounds", type=_whole, default=5, help="turns of each (default %(default)s)")
    caps_help = "sizes of DDP's buckets, 'default' for DDP's own (default %(default)s)"
    add("--caps", type=_list_of(_cap), default="default", metavar="MIB,...", help=caps_help)
    peers_help = "which of eager, intree, nosplit, forward, backward, auto (default: all)"
    add("--peers", metavar="NAME,...", help=peers_help)


def _doctor(command: _Parser) -> None:
    command.set_defaults(command="doctor:run")


def _help(command: _Parser) -> None:
    command.set_defaults(command="help:run")
    command.add_argument("topic", metavar="TOPIC", nargs="?", help="without one, lists all")


def _add_factory(command: _Parser) -> None:
    factory_help = (
        "a function without arguments that returns (model, batch), as "
        "package.module:function or path/to/file.py:function"
    )
    command.add_argument("factory", metavar="MODULE:FACTORY", help=factory_help)


def _add_backend(command: _Parser) -> None:
    backend_help = "default: nccl where there are GPUs, else gloo"
    command.add_argument("--backend", choices=("gloo", "nccl"), help=backend_help)


def _argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return `parse`, raising errors whose messages argparse shows."""

    def parse_argument(text: str) -> _T:
        try:
            return parse(text)
        except (PlanError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


_bandwidth = _argument(parse_bandwidth)


@_argument
def _output(text: str) -> Path:
    """The path of a result, checking before long work that it can be written."""
    check_can_write(text)
    return Path(text)


@_argument
def _whole(text: str) -> int:
    digits = text.strip()
    # Python reads no more than 4300 digits.
    if not digits.isdecimal() or len(digits) > _MOST_DIGITS or not int(digits):
        raise PlanError(
            f"{quote(text)} is no whole number above 0, of at most {_MOST_DIGITS} digits"
        )
    return int(digits)


@_argument
def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise PlanError(f"{quote(text)} is no number, such as 0.5") from error


@_argument
def _seed(text: str) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > _MOST_DIGITS:
        raise PlanError(f"{quote(text)} is no whole number of at most {_MOST_DIGITS} digits")
    return int(digits)


@_argument
def _megabytes(text: str) -> float:
    with contextlib.suppress(ValueError):  # it is no number
        if 0 < float(text) < _MOST_MIB:
            return float(text)
    raise PlanError(f"{quote(text)} is no size above 0 in MiB, such as 25 or 0.5, and below 1e9")


def _cap(text: str) -> float | None:
    return None if text.strip() == "default" else _megabytes(text)


def _list_of(parse: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    return lambda text: [parse(part) for part in text.split(",")]
