"""The arguments of every command. It runs nothing, and imports nothing that takes time."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ddpopt.bucketing.costs import ALGORITHMS
from ddpopt.bucketing.simulate import parse_bandwidth
from ddpopt.errors import DDPOptError, PlanError

LATENCY_US = 50.0
_EXIT_STATUS = "Exit status: 0 fine, 1 the check or the work failed, 2 bad input, 130 Ctrl-C."
_T = TypeVar("_T")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; what it parses has `command`, as `module:function` of `commands/`."""
    parser = argparse.ArgumentParser(
        prog="ddpopt",
        description="See, predict and measure how DDP's communication overlaps with backward.",
        epilog=_EXIT_STATUS,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_explain(commands)
    _add_simulate(commands)
    _add_sweep(commands)
    _add_calibrate(commands)
    _add_bench(commands)
    _add_trace(commands)
    _add_doctor(commands)
    return parser


def _add(commands: Any, name: str, runs: str, summary: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=_EXIT_STATUS
    )
    command.set_defaults(command=runs)
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


def _add_explain(commands: Any) -> None:
    summary = "show how a model is split, without other processes"
    command = _add(commands, "explain", "explain:run", summary)
    _add_factory(command)
    command.add_argument(
        "--split", metavar="forward|backward", help="which graph to split (default: forward)"
    )
    inner = "what compiles each section (default %(default)s)"
    command.add_argument("--inner", default="aot_eager", help=inner)
    cap = "size of DDP's buckets (default: DDP's own, 25)"
    command.add_argument("--bucket-cap-mb", type=_megabytes, metavar="MIB", help=cap)
    page = "also write a page for a browser"
    command.add_argument("--html", type=Path, metavar="FILE", help=page)
    links = command.add_argument_group("prediction", "How it would run on a cluster; give both.")
    links.add_argument("--world-size", type=_whole, help="number of ranks")
    links.add_argument("--bandwidth", type=_bandwidth, help="of a node's link, such as 10gbit")


def _add_simulate(commands: Any) -> None:
    summary = "show one iteration of a plan on one cluster"
    command = _add(commands, "simulate", "simulate:run_simulate", summary)
    command.add_argument("--world-size", type=int, required=True, help="number of ranks")
    command.add_argument(
        "--bandwidth",
        type=_bandwidth,
        help="of a node's link, such as 10gbit; default: the ring that the plan's cost implies",
    )
    _add_cluster(command)


def _add_sweep(commands: Any) -> None:
    summary = "show the efficiency of a plan on many clusters"
    command = _add(commands, "sweep", "simulate:run_sweep", summary)
    command.add_argument(
        "--world-sizes",
        type=_list_of(_whole),
        default="2,8,64,1024",
        help="numbers of ranks (default %(default)s)",
    )
    command.add_argument(
        "--bandwidths",
        type=_list_of(_bandwidth),
        default="1gbit,10gbit,100gbit",
        help="of a node's link (default %(default)s)",
    )
    _add_cluster(command)


def _add_cluster(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", help="the file that BucketPlan.save wrote")
    links = command.add_argument_group("links")
    links.add_argument("--algorithm", choices=ALGORITHMS, help=f"default: {ALGORITHMS[0]}")
    latency = f"of a message between nodes, in microseconds (default {LATENCY_US:g})"
    links.add_argument("--latency-us", type=float, help=latency)
    links.add_argument("--ranks-per-node", type=int, help="default: 1")
    inside = "of a message inside a node (default 0)"
    links.add_argument("--node-latency-us", type=float, help=inside)
    between = "between the ranks of a node (default: no limit)"
    links.add_argument("--node-bandwidth", type=_bandwidth, help=between)
    stragglers = command.add_argument_group("stragglers")
    stragglers.add_argument(
        "--stragglers",
        type=float,
        metavar="MEAN",
        help="mean delay of a rank as a part of its computation, such as 0.02",
    )
    stragglers.add_argument("--seed", type=int, default=0, help="of the delay (default 0)")


def _add_calibrate(commands: Any) -> None:
    summary = "measure what an allreduce costs, under torchrun"
    command = _add(commands, "calibrate", "calibrate:run", summary)
    _add_backend(command)
    output = "also write the JSON to a file"
    command.add_argument("--output", type=Path, metavar="FILE", help=output)


def _add_bench(commands: Any) -> None:
    summary = "measure a model under each way to train, under torchrun"
    command = _add(commands, "bench", "bench:run", summary)
    _add_factory(command)
    _add_backend(command)
    inner = "what compiles graphs (default %(default)s)"
    command.add_argument("--inner", default="inductor", help=inner)
    command.add_argument("--steps", type=_whole, default=5, help="of a turn (default %(default)s)")
    rounds = "turns of each (default %(default)s)"
    command.add_argument("--rounds", type=_whole, default=5, help=rounds)
    command.add_argument(
        "--caps",
        type=_list_of(_cap),
        default="default",
        metavar="MIB,...",
        help="sizes of DDP's buckets, 'default' for DDP's own (default %(default)s)",
    )
    peers = "which of eager, intree, nosplit, forward, backward, auto (default: all)"
    command.add_argument("--peers", metavar="NAME,...", help=peers)


def _add_trace(commands: Any) -> None:
    trace = commands.add_parser("trace", help="work on traces that ddpopt.record wrote")
    below = trace.add_subparsers(metavar="COMMAND", required=True)
    command = _add(below, "merge", "merge_traces:run", "make one trace of all ranks' traces")
    command.add_argument("paths", nargs="+", metavar="FILE", help="traces, or folders of them")
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="the trace to write; open it in https://ui.perfetto.dev or chrome://tracing",
    )


def _add_doctor(commands: Any) -> None:
    command = _add(commands, "doctor", "doctor:run", "check whether training can be split here")
    names = "list each private name of torch that is needed"
    command.add_argument("--verbose", action="store_true", help=names)


def _add_factory(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns (model, example_inputs), as "
        "package.module:function or path/to/file.py:function",
    )


def _add_backend(command: argparse.ArgumentParser) -> None:
    default = "default: nccl where there are GPUs, else gloo"
    command.add_argument("--backend", choices=("gloo", "nccl"), help=default)


def _argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return `parse`, raising errors whose message argparse shows."""

    def parse_argument(text: str) -> _T:
        try:
            return parse(text)
        except DDPOptError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


_bandwidth = _argument(parse_bandwidth)


@_argument
def _whole(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise PlanError(f"{text!r} is no whole number above 0")
    return int(text)


@_argument
def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise PlanError(f"{text!r} is no size above 0 in MiB, such as 25 or 0.5")
    return value


def _cap(text: str) -> float | None:
    return None if text.strip() == "default" else _megabytes(text)


def _list_of(parse: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    return lambda text: [parse(part) for part in text.split(",")]
