"""`ddpopt explain`: compile a model in this process alone, and show how it was split."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt._text import format_ms
from ddpopt.cli.factory import Loaded, find_factory
from ddpopt.cli.output import InputError, Report, Screen, Table, explained
from ddpopt.cli.parser import LATENCY_US
from ddpopt.cli.process_groups import one_rank_group
from ddpopt.inspection.explain import Explanation, explain
from ddpopt.options import resolve_options
from ddpopt.planning.batch import call_model, find_loss
from ddpopt.planning.costs import Network
from ddpopt.planning.merging import buckets_of_caps
from ddpopt.planning.plan import DDP_DEFAULT_CAPS, BucketPlan, plan
from ddpopt.planning.simulation import Simulation, format_bandwidth, simulate

_NUM_STEPS = 3  # DDP forms its buckets after the first, and reports them in the third
_MIB = 1024 * 1024


def run(args: argparse.Namespace, screen: Screen) -> Report:
    options = {"inner": args.inner, "split": args.split}
    resolve_options(None, options)  # reports a bad one before the model is made
    if (args.world_size is None) != (args.bandwidth is None):
        raise InputError("--world-size and --bandwidth predict together; give both or neither")
    if args.html is not None and args.html.suffix != ".html":
        raise InputError(f"--html is {args.html}, which does not end in .html; rename it")
    loaded = find_factory(args.factory)()
    best = None
    if args.world_size:  # before DDP adds its hooks to the parameters
        network = Network(latency_s=LATENCY_US * 1e-6, bytes_per_s=args.bandwidth)
        best = plan(*loaded, network=network, world_size=args.world_size, backend=args.inner)
    with one_rank_group():
        explanation = _train(loaded, options, args.bucket_cap_mb, best, screen)
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


def _train(
    loaded: Loaded,
    options: dict[str, Any],
    cap_mb: float | None,
    best: BucketPlan | None,
    screen: Screen,
) -> Explanation:
    ddp = DistributedDataParallel(loaded.model, bucket_cap_mb=cap_mb)
    compiled: Any = torch.compile(ddp, backend="ddpopt", options=options)
    for _ in screen.track(range(_NUM_STEPS), "compiling and training"):
        ddp.zero_grad()
        torch.autograd.backward(find_loss(call_model(compiled, loaded.inputs)))
    return explain(ddp, best)


def _simulate(best: BucketPlan, args: argparse.Namespace) -> dict[str, Simulation]:
    """Return an iteration with DDP's own buckets, and one with the best ones."""
    cap_mb = args.bucket_cap_mb
    caps = (int(cap_mb * _MIB),) if cap_mb else DDP_DEFAULT_CAPS
    own = dataclasses.replace(best, sizes=buckets_of_caps(best.profile, caps))
    plans = {"ddp": own, "best": best}
    return {name: simulate(each, world_size=args.world_size) for name, each in plans.items()}


def _comparison(simulations: dict[str, Simulation], args: argparse.Namespace) -> list[str | Table]:
    rows = []
    for name, simulation in simulations.items():
        timeline = simulation.timeline
        times_s = (timeline.iteration_s, timeline.exposed_s, timeline.bound_s)
        shown = (f"{len(timeline.buckets)}", *map(format_ms, times_s))
        rows.append(({"ddp": "DDP's"}.get(name, name), *shown, f"{simulation.efficiency:.1%}"))
    header = ("buckets", "number", "iteration ms", "exposed", "bound", "efficiency")
    return [
        f"\n{args.world_size} ranks at {format_bandwidth(args.bandwidth)}, {LATENCY_US:g} us a "
        f"message ({simulations['best'].basis}):\n",
        Table(header=header, rows=rows),
    ]
