"""The command line, `python -m ddpopt`: a saved plan on clusters of other sizes.

`simulate` shows one iteration on one cluster, `sweep` the efficiency on many.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from ddpopt.bucket_plan import BucketPlan
from ddpopt.errors import PlanError
from ddpopt.planning.costs import ALGORITHMS, Network
from ddpopt.simulator import Stragglers, simulate
from ddpopt.sweep import parse_bandwidth, render, sweep

_LATENCY_US = 50.0
_T = TypeVar("_T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; bad input exits with status 2 and says why."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        plan = BucketPlan.load(args.plan)
        print(args.run(plan, args))
    except (PlanError, OSError, UnicodeDecodeError) as error:
        parser.error(str(error))
    return 0


def _simulate(plan: BucketPlan, args: argparse.Namespace) -> str:
    network = None if args.bandwidth is None else _network(plan, args, args.bandwidth)
    if network is None and _link_options(args):
        raise PlanError(f"{', '.join(_link_options(args))} given without --bandwidth")
    simulation = simulate(
        plan, world_size=args.world_size, network=network, stragglers=_stragglers(args)
    )
    return simulation.to_json() if args.json else str(simulation)


def _sweep(plan: BucketPlan, args: argparse.Namespace) -> str:
    network = _network(plan, args, args.bandwidths[0])
    cells = sweep(plan, args.world_sizes, args.bandwidths, network, _stragglers(args))
    if not args.json:
        return render(cells)
    return json.dumps([{**dataclasses.asdict(cell), "best": cell.best} for cell in cells], indent=1)


def _network(plan: BucketPlan, args: argparse.Namespace, bytes_per_s: float) -> Network:
    latency_us = _LATENCY_US if args.latency_us is None else args.latency_us
    inside = {} if args.node_bandwidth is None else {"node_bytes_per_s": args.node_bandwidth}
    return Network(
        latency_s=latency_us * 1e-6,
        bytes_per_s=bytes_per_s,
        algorithm=args.algorithm or ALGORITHMS[0],
        ranks_per_node=1 if args.ranks_per_node is None else args.ranks_per_node,
        node_latency_s=(args.node_latency_us or 0.0) * 1e-6,
        interference=plan.cost.interference,
        contention=plan.cost.contention,
        **inside,
    )


def _link_options(args: argparse.Namespace) -> list[str]:
    names = ("latency_us", "algorithm", "ranks_per_node", "node_latency_us", "node_bandwidth")
    return ["--" + name.replace("_", "-") for name in names if getattr(args, name) is not None]


def _stragglers(args: argparse.Namespace) -> Stragglers | None:
    if args.stragglers is None:
        return None
    return Stragglers(mean_delay=args.stragglers, seed=args.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddpopt", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    one = commands.add_parser("simulate", help="show one iteration on one cluster")
    one.set_defaults(run=_simulate)
    one.add_argument("--world-size", type=int, required=True, help="number of ranks")
    one.add_argument(
        "--bandwidth",
        type=_argument(parse_bandwidth),
        help="of a node's link, such as 10gbit; default: the ring that the plan's cost implies",
    )
    many = commands.add_parser("sweep", help="show the efficiency on many clusters")
    many.set_defaults(run=_sweep)
    many.add_argument(
        "--world-sizes",
        type=_argument(lambda text: [_whole(part) for part in text.split(",")]),
        default="2,8,64,1024",
        help="numbers of ranks (default %(default)s)",
    )
    many.add_argument(
        "--bandwidths",
        type=_argument(lambda text: [parse_bandwidth(part) for part in text.split(",")]),
        default="1gbit,10gbit,100gbit",
        help="of a node's link (default %(default)s)",
    )
    for command in (one, many):
        _add_common(command)
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", help="the file that BucketPlan.save wrote")
    command.add_argument("--json", action="store_true", help="print JSON")
    links = command.add_argument_group("links")
    links.add_argument("--algorithm", choices=ALGORITHMS, help=f"default: {ALGORITHMS[0]}")
    links.add_argument(
        "--latency-us",
        type=float,
        help=f"of a message between nodes, in microseconds (default {_LATENCY_US:g})",
    )
    links.add_argument("--ranks-per-node", type=int, help="default: 1")
    links.add_argument(
        "--node-latency-us", type=float, help="of a message inside a node (default 0)"
    )
    links.add_argument(
        "--node-bandwidth",
        type=_argument(parse_bandwidth),
        help="between the ranks of a node (default: no limit)",
    )
    stragglers = command.add_argument_group("stragglers")
    stragglers.add_argument(
        "--stragglers",
        type=float,
        metavar="MEAN",
        help="mean delay of a rank as a part of its computation, such as 0.02",
    )
    stragglers.add_argument("--seed", type=int, default=0, help="of the delay (default 0)")


def _whole(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise PlanError(f"{text!r} is no whole number above 0")
    return int(text)


def _argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return `parse` with errors of which argparse shows the message."""

    def parse_argument(text: str) -> _T:
        try:
            return parse(text)
        except PlanError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


if __name__ == "__main__":
    sys.exit(main())
