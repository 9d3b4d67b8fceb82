"""`ddpopt calibrate`: what an allreduce costs among the processes that torchrun started."""

from __future__ import annotations

import argparse
import dataclasses
import json

import torch.distributed as dist

from ddpopt._text import write_text
from ddpopt.cli.output import Report, Screen, explained
from ddpopt.cli.process_groups import torchrun_group
from ddpopt.planning.calibrate import calibrate


def run(args: argparse.Namespace, _screen: Screen) -> Report | None:
    """Measure; only rank 0 reports."""
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
        f"computation bytes take {cost.contention:.2f} times as long; each launch keeps it up by "
        f"{cost.launch_s * 1e3:.3f} ms\n"
        f"  for ddpopt.plan: network=ddpopt.{cost!r}, world_size={world_size}"
    ]
    if args.output is not None:
        with explained(f"{args.output} cannot be written"):
            write_text(args.output, json.dumps(data, indent=1) + "\n")
        parts.append(f"written: {args.output}")
    return Report(data=data, parts=parts)
