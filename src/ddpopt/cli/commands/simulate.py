"""`ddpopt simulate` and `ddpopt sweep`: a saved plan on clusters of other sizes."""

from __future__ import annotations

import argparse
import dataclasses
import json

from ddpopt.bucketing.costs import ALGORITHMS, Network
from ddpopt.bucketing.plan import BucketPlan
from ddpopt.bucketing.simulate import Stragglers, render, simulate, sweep
from ddpopt.cli.output import Report, Screen, explained
from ddpopt.cli.parser import LATENCY_US
from ddpopt.errors import PlanError


def run_simulate(args: argparse.Namespace, _screen: Screen) -> Report:
    """Simulate one iteration."""
    plan = _load(args)
    network = None if args.bandwidth is None else _network(plan, args, args.bandwidth)
    if network is None and _link_options(args):
        raise PlanError(f"{', '.join(_link_options(args))} given without --bandwidth")
    simulation = simulate(
        plan, world_size=args.world_size, network=network, stragglers=_stragglers(args)
    )
    return Report(data=json.loads(simulation.to_json()), parts=[str(simulation)])


def run_sweep(args: argparse.Namespace, _screen: Screen) -> Report:
    """Compare the efficiency on many clusters."""
    plan = _load(args)
    network = _network(plan, args, args.bandwidths[0])
    cells = sweep(plan, args.world_sizes, args.bandwidths, network, _stragglers(args))
    return Report(
        data=[{**dataclasses.asdict(cell), "best": cell.best} for cell in cells],
        parts=[render(cells)],
    )


def _load(args: argparse.Namespace) -> BucketPlan:
    with explained(f"the plan {args.plan} cannot be read"):
        return BucketPlan.load(args.plan)


def _network(plan: BucketPlan, args: argparse.Namespace, bytes_per_s: float) -> Network:
    latency_us = LATENCY_US if args.latency_us is None else args.latency_us
    inside = {} if args.node_bandwidth is None else {"node_bytes_per_s": args.node_bandwidth}
    return Network(
        latency_s=latency_us * 1e-6,
        bytes_per_s=bytes_per_s,
        algorithm=args.algorithm or ALGORITHMS[0],
        ranks_per_node=1 if args.ranks_per_node is None else args.ranks_per_node,
        node_latency_s=(args.node_latency_us or 0.0) * 1e-6,
        interference=plan.cost.interference,
        contention=plan.cost.contention,
        launch_s=plan.cost.launch_s,
        **inside,
    )


def _link_options(args: argparse.Namespace) -> list[str]:
    names = ("latency_us", "algorithm", "ranks_per_node", "node_latency_us", "node_bandwidth")
    return ["--" + name.replace("_", "-") for name in names if getattr(args, name) is not None]


def _stragglers(args: argparse.Namespace) -> Stragglers | None:
    if args.stragglers is None:
        return None
    return Stragglers(mean_delay=args.stragglers, seed=args.seed)
