"""`ddpopt simulate` and `ddpopt sweep`: a saved plan on other clusters."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ddpopt.cli.output import Report, Screen, explained
from ddpopt.cli.parser import LATENCY_US
from ddpopt.errors import PlanError
from ddpopt.planning.costs import ALGORITHMS, Network
from ddpopt.planning.plan import BucketPlan
from ddpopt.planning.simulation import Stragglers, render, simulate, sweep

_LINKS = ("latency_us", "algorithm", "ranks_per_node")


def run_simulate(args: argparse.Namespace, _screen: Screen) -> Report:
    plan, stragglers = _load(args)
    network = None if args.bandwidth is None else _network(plan, args, args.bandwidth)
    given = ["--" + name.replace("_", "-") for name in _given(args)]
    if network is None and given:
        raise PlanError(f"{', '.join(given)} given without --bandwidth")
    simulation = simulate(plan, world_size=args.world_size, network=network, stragglers=stragglers)
    return Report(data=json.loads(simulation.to_json()), parts=[str(simulation)])


def run_sweep(args: argparse.Namespace, _screen: Screen) -> Report:
    plan, stragglers = _load(args)
    network = _network(plan, args, args.bandwidths[0])
    cells = sweep(plan, args.world_sizes, args.bandwidths, network, stragglers)
    return Report(
        data=[{**dataclasses.asdict(cell), "best": cell.best} for cell in cells],
        parts=[render(cells)],
    )


def _load(args: argparse.Namespace) -> tuple[BucketPlan, Stragglers]:
    with explained(f"the plan {args.plan} cannot be read"):
        plan = BucketPlan.load(args.plan)
    if args.communication is not None:
        plan = dataclasses.replace(plan, communication=args.communication)
    return plan, Stragglers(mean_delay=args.stragglers, seed=args.seed)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in _LINKS if getattr(args, name) is not None}


def _network(plan: BucketPlan, args: argparse.Namespace, bytes_per_s: float) -> Network:
    links = _given(args)
    return Network(
        latency_s=links.get("latency_us", LATENCY_US) * 1e-6,
        bytes_per_s=bytes_per_s,
        algorithm=links.get("algorithm", ALGORITHMS[0]),
        ranks_per_node=links.get("ranks_per_node", 1),
        interference=plan.cost.interference,
        contention=plan.cost.contention,
        launch_s=plan.cost.launch_s,
    )
