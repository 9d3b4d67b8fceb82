"""`ddpopt explain`: compile a model in this process alone, and show how it was split."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt.bucketing.ahead import plan
from ddpopt.bucketing.batch import call_model, find_loss
from ddpopt.bucketing.costs import Network
from ddpopt.bucketing.merging import buckets_of_caps
from ddpopt.bucketing.plan import DDP_DEFAULT_CAPS, BucketPlan
from ddpopt.bucketing.simulate import Simulation, format_bandwidth, simulate
from ddpopt.cli.factory import Loaded, find_factory
from ddpopt.cli.output import InputError, Report, Screen, Table, check_can_write, explained
from ddpopt.cli.parser import LATENCY_US
from ddpopt.cli.process_groups import one_rank_group
from ddpopt.inspection.explain import Explanation, explain
from ddpopt.options import resolve_options

_NUM_STEPS = 3  # DDP forms its buckets after the first, and tells them in the third
_MIB = 1024 * 1024


def run(args: argparse.Namespace, screen: Screen) -> Report:
    """Run some steps on one rank, and explain."""
    options: dict[str, Any] = {"inner": args.inner} | ({"split": args.split} if args.split else {})
    resolve_options(None, options)  # report a bad one before the model is made
    _check(args)
    loaded = find_factory(args.factory)()
    # Before DDP hangs its hooks on the parameters.
    best = _plan(loaded, args) if args.world_size else None
    with one_rank_group():
        explanation = _train(loaded, options, args, best, screen)
    parts: list[str | Table] = [str(explanation)]
    data = explanation.to_dict()
    if best is not None:
        simulations = _simulate(best, args)
        parts += _comparison(simulations, args)
        data["prediction"] = {name: json.loads(s.to_json()) for name, s in simulations.items()}
    if args.html is not None:
        with explained(f"{args.html} cannot be written"):
            explanation.save(args.html)
        parts.append(f"\nwritten: {args.html}")
    return Report(data=data, parts=parts, status=0 if explanation.plans else 1)


def _check(args: argparse.Namespace) -> None:
    if (args.world_size is None) != (args.bandwidth is None):
        raise InputError("--world-size and --bandwidth predict together; give both or neither")
    check_can_write(args.html)
    if args.html is not None and args.html.suffix != ".html":
        raise InputError(f"--html is {args.html}, which does not end in .html; rename it")


def _train(
    loaded: Loaded,
    options: dict[str, Any],
    args: argparse.Namespace,
    best: BucketPlan | None,
    screen: Screen,
) -> Explanation:
    cap: dict[str, Any] = {"bucket_cap_mb": args.bucket_cap_mb} if args.bucket_cap_mb else {}
    with screen.progress("compiling and training", _NUM_STEPS) as advance:
        ddp = DistributedDataParallel(loaded.model, **cap)
        compiled: Any = torch.compile(ddp, backend="ddpopt", options=options)
        for _ in range(_NUM_STEPS):
            ddp.zero_grad()
            torch.autograd.backward(find_loss(call_model(compiled, loaded.inputs)))
            advance()
        return explain(ddp, best)


def _plan(loaded: Loaded, args: argparse.Namespace) -> BucketPlan:
    network = Network(latency_s=LATENCY_US * 1e-6, bytes_per_s=args.bandwidth)
    return plan(*loaded, network=network, world_size=args.world_size, backend=args.inner)


def _simulate(best: BucketPlan, args: argparse.Namespace) -> dict[str, Simulation]:
    """Return an iteration with DDP's own buckets, and one with the best."""
    caps: Sequence[int] = DDP_DEFAULT_CAPS
    if args.bucket_cap_mb is not None:
        caps = (int(args.bucket_cap_mb * _MIB),)
    own = dataclasses.replace(best, sizes=buckets_of_caps(best.profile, caps))
    plans = {"ddp": own, "best": best}
    return {name: simulate(each, world_size=args.world_size) for name, each in plans.items()}


def _comparison(simulations: dict[str, Simulation], args: argparse.Namespace) -> list[str | Table]:
    rows = []
    for name, simulation in zip(("DDP's", "best"), simulations.values(), strict=True):
        timeline = simulation.timeline
        times = (timeline.iteration_s, timeline.exposed_s, timeline.bound_s)
        milliseconds = (f"{time_s * 1e3:.1f}" for time_s in times)
        rows.append(
            (name, f"{len(timeline.buckets)}", *milliseconds, f"{simulation.efficiency:.1%}")
        )
    header = ("buckets", "number", "iteration ms", "exposed", "bound", "efficiency")
    return [
        f"\n{args.world_size} ranks at {format_bandwidth(args.bandwidth)}, {LATENCY_US:g} us a "
        f"message ({simulations['best'].basis}):\n",
        Table(header=header, rows=rows),
    ]
