"""The commands that explain a model, predict from a plan and measure the network."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt._text import count, format_ms, write_text
from ddpopt.cli.inputs import Loaded, blaming, find_factory, one_rank_group, torchrun_group
from ddpopt.cli.output import LATENCY_US, InputError, Report, Screen, Table, as_input_error
from ddpopt.errors import PlanError
from ddpopt.inspection.explain import explain
from ddpopt.inspection.explanation import Explanation
from ddpopt.options import resolve_options
from ddpopt.planning.batch import call_model, find_loss
from ddpopt.planning.calibrate import calibrate
from ddpopt.planning.costs import ALGORITHMS, Network
from ddpopt.planning.merging import buckets_of_caps
from ddpopt.planning.plan import DDP_DEFAULT_CAPS, BucketPlan, plan
from ddpopt.planning.simulation import (
    Simulation,
    Stragglers,
    format_bandwidth,
    render,
    simulate,
    sweep,
)

_NUM_STEPS = 3  # DDP forms its buckets after the first, and reports them in the third
_MIB = 1024 * 1024
_EFFICIENCIES = """
efficiency (the iteration of one rank alone, divided by this one) with the buckets
  saved: of the plan; default: of DDP; replanned: that are best for these links"""
_LINKS = ("latency_us", "algorithm", "ranks_per_node")


def run_explain(args: argparse.Namespace, screen: Screen) -> Report:
    """Compile a model in this process alone, and show how it was split; 1 if nothing compiled."""
    options = {"inner": args.inner, "split": args.split}
    resolve_options(None, options)  # reports a bad one before the model is made
    if (args.world_size is None) != (args.bandwidth is None):
        raise InputError("--world-size and --bandwidth predict together; give both or neither")
    if args.html is not None and args.html.suffix != ".html":
        raise InputError(f"--html is {args.html}, which does not end in .html; rename it")
    loaded = find_factory(args.factory)()
    best_plan: BucketPlan | None = None
    if args.world_size:  # before DDP adds its hooks to the parameters
        network = Network(latency_s=LATENCY_US * 1e-6, bytes_per_s=args.bandwidth)
        best_plan = plan(*loaded, network=network, world_size=args.world_size, backend=args.inner)
    with one_rank_group(), blaming(f"a step of {args.factory}"):
        explanation = _train(loaded, options, args.bucket_cap_mb, best_plan, screen)
    parts: list[str | Table] = [str(explanation)]
    data = explanation.to_dict()
    if best_plan is not None:
        simulations = _simulate(best_plan, args)
        parts += _comparison(simulations, args)
        data["prediction"] = {name: json.loads(s.to_json()) for name, s in simulations.items()}
    if args.html is not None:
        with as_input_error(f"{args.html} cannot be written"):
            explanation.save(args.html)
        parts.append(f"\nwritten: {args.html}")
    return Report(data=data, parts=parts, status=0 if explanation.cuts else 1)


def _train(
    loaded: Loaded,
    options: dict[str, Any],
    cap_mb: float | None,
    best_plan: BucketPlan | None,
    screen: Screen,
) -> Explanation:
    """What is known about the model after some steps; the DDP module ends with this function."""
    ddp = DistributedDataParallel(loaded.model, bucket_cap_mb=cap_mb)
    compiled: Any = torch.compile(ddp, backend="ddpopt", options=options)
    for _ in screen.track(range(_NUM_STEPS), "compiling and training"):
        ddp.zero_grad()
        torch.autograd.backward(find_loss(call_model(compiled, loaded.inputs)))
    return explain(ddp, best_plan)


def _simulate(best_plan: BucketPlan, args: argparse.Namespace) -> dict[str, Simulation]:
    """An iteration with DDP's own buckets, and one with the best ones."""
    cap_mb = args.bucket_cap_mb
    caps = (int(cap_mb * _MIB),) if cap_mb else DDP_DEFAULT_CAPS
    plan_of_ddp = dataclasses.replace(best_plan, sizes=buckets_of_caps(best_plan.profile, caps))
    return {
        "ddp": simulate(plan_of_ddp, world_size=args.world_size),
        "best": simulate(best_plan, world_size=args.world_size),
    }


def _comparison(simulations: dict[str, Simulation], args: argparse.Namespace) -> list[str | Table]:
    """A table of iterations with DDP's buckets and with the best ones; see `Simulation`."""
    rows = []
    for name, simulation in simulations.items():
        timeline = simulation.timeline
        rows.append(
            (
                "DDP's" if name == "ddp" else name,
                str(len(timeline.buckets)),
                format_ms(timeline.iteration_s),
                format_ms(timeline.exposed_s),
                format_ms(timeline.bound_s),
                f"{simulation.efficiency:.1%}",
            )
        )
    header = ("buckets", "number", "iteration ms", "waiting", "at least", "efficiency")
    return [
        f"\n{args.world_size} ranks at {format_bandwidth(args.bandwidth)}, {LATENCY_US:g} us a "
        f"message ({simulations['best'].basis}):\n",
        Table(header=header, rows=rows),
        "\nwaiting: for communication, from the last gradient on; at least: with whatever buckets\n"
        "efficiency: the iteration of one rank alone, divided by this one",
    ]


def run_simulate(args: argparse.Namespace, _screen: Screen) -> Report:
    """Show one iteration of a plan on --world-size ranks, by its own links or by --bandwidth."""
    saved, stragglers = _load(args)
    network = None if args.bandwidth is None else _network(saved, args, args.bandwidth)
    flags = ["--" + name.replace("_", "-") for name in _links_of(args)]
    if network is None and flags:
        raise PlanError(f"{', '.join(flags)} given without --bandwidth")
    simulation = simulate(saved, world_size=args.world_size, network=network, stragglers=stragglers)
    data = json.loads(simulation.to_json())
    data["plan_world_size"] = saved.world_size
    return Report(data=data, parts=[str(simulation), _describe_saved(saved, args)])


def run_sweep(args: argparse.Namespace, _screen: Screen) -> Report:
    """Show the efficiency of a saved plan on many clusters."""
    saved, stragglers = _load(args)
    network = _network(saved, args, args.bandwidths[0])  # `sweep` puts each bandwidth in it
    cells = sweep(saved, args.world_sizes, args.bandwidths, network, stragglers)
    return Report(
        data=[{**dataclasses.asdict(cell), "best": cell.best} for cell in cells],
        parts=[render(cells), _EFFICIENCIES, _describe_saved(saved, args)],
    )


def _describe_saved(saved: BucketPlan, args: argparse.Namespace) -> str:
    """For how many ranks the plan in the file is."""
    ranks = count(saved.world_size, "rank")
    if saved.extrapolation:
        ranks += f", its allreduces {saved.extrapolation}"
    return f"\nsaved: {args.plan}, {count(len(saved.buckets), 'bucket')} for {ranks}"


def _load(args: argparse.Namespace) -> tuple[BucketPlan, Stragglers]:
    with as_input_error(f"the plan {args.plan} cannot be read"):
        saved = BucketPlan.load(args.plan)
    return saved, Stragglers(mean_delay=args.stragglers, seed=args.seed)


def _links_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that describe links, as far as they were given."""
    return {name: getattr(args, name) for name in _LINKS if getattr(args, name) is not None}


def _network(saved: BucketPlan, args: argparse.Namespace, bytes_per_s: float) -> Network:
    """The network that arguments describe, with what the plan's cost says of computation."""
    links = _links_of(args)
    return Network(
        latency_s=links.get("latency_us", LATENCY_US) * 1e-6,
        bytes_per_s=bytes_per_s,
        algorithm=links.get("algorithm", ALGORITHMS[0]),
        ranks_per_node=links.get("ranks_per_node", 1),
        interference=saved.cost.interference,
        contention=saved.cost.contention,
        launch_s=saved.cost.launch_s,
    )


def run_calibrate(args: argparse.Namespace, _screen: Screen) -> Report | None:
    """Measure what an allreduce costs among torchrun's processes; only rank 0 reports."""
    with torchrun_group(args.backend, "calibrate") as backend:
        cost, rank, world_size = calibrate(), dist.get_rank(), dist.get_world_size()
    if rank:
        return None
    data = {
        "format": "ddpopt calibration 1",
        "backend": backend,
        "world_size": world_size,
        "cost": dataclasses.asdict(cost),
    }
    parts = [
        f"an allreduce among {world_size} ranks ({backend}) takes {cost.startup_s * 1e3:.3f} ms "
        f"and {cost.s_per_mib * 1e3:.3f} ms per MiB\n"
        f"  meanwhile computation loses {cost.interference:.0%} of its speed, and beside "
        f"computation bytes take {cost.contention:.2f} times as long; each launch delays it by "
        f"{cost.launch_s * 1e3:.3f} ms\n"
        f"  for ddpopt.plan: network=ddpopt.planning.{cost!r}, world_size={world_size}"
    ]
    if args.output is not None:
        with as_input_error(f"{args.output} cannot be written"):
            write_text(args.output, json.dumps(data, indent=1) + "\n")
        parts.append(f"written: {args.output}")
    return Report(data=data, parts=parts)
