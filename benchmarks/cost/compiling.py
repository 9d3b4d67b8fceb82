"""Measure what compiling costs: `python -m benchmarks.cost.compiling --models gpt70,bert`.

Each figure is of a process of its own, which makes the model, wraps it in DDP alone, and takes the
first step, forward and backward; what `torch.compile` imports is in it. Peers take turns: a round
is each peer once with an empty cache (cold) and once with the one that this left (warm). CPU
seconds are those of the process and of what it started, the C++ compiler for example, and hold on
a machine that does other things as well.
"""
# test: skip, minutes; tests/system/test_benchmarks.py runs it small

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.models import find_model
from benchmarks.harness.peers import find_peer
from benchmarks.harness.report import table
from benchmarks.harness.session import names

_PEERS = ("nosplit", "intree", "forward", "backward")
_STATES = ("cold", "warm")
_BASES = ("nosplit", "intree")  # what the others are divided by


class Cost(NamedTuple):
    """What the first step took in a process."""

    cpu_s: float
    wall_s: float


def measure(model_name: str, peer_name: str, cap_mb: float, device: str) -> Cost:
    peer, options = find_peer(peer_name)
    model = find_model(model_name)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.config.optimize_ddp = peer.optimize_ddp
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model.build().to(device), bucket_cap_mb=cap_mb)
    batch = {name: value.to(device) for name, value in model.batch().items()}
    wall_s, cpu_s = time.perf_counter(), _cpu_s()
    compiled = peer.compile(ddp, "inductor", options)  # which imports the compilers
    model.loss(compiled(**batch)).backward()
    return Cost(cpu_s=_cpu_s() - cpu_s, wall_s=time.perf_counter() - wall_s)


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def cold_and_warm(model: str, peer: str, cap_mb: float, device: str) -> dict[str, list[Cost]]:
    """Return the cost with an empty cache, and with the one that this left; a process each."""
    arguments = ["--worker", "--models", model, "--peers", peer, "--cap-mb", str(cap_mb)]
    costs = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in _STATES:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.cost.compiling", *arguments, "--device", device],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            costs[state] = [Cost(*json.loads(done.stdout.splitlines()[-1]))]
    print(f"{model} {peer}: {costs}", file=sys.stderr, flush=True)
    return costs


def report(costs: Mapping[str, Mapping[str, Mapping[str, Sequence[Cost]]]]) -> list[str]:
    """Return a table in Markdown: medians, and their ratios to those of `_BASES`."""
    header = ["model, peer"]
    for state in _STATES:
        header += [f"{state} CPU s", f"{state} s", *(f"of {base}'s" for base in _BASES)]
    rows = []
    for model, by_peer in costs.items():
        for peer, by_state in by_peer.items():
            row = [f"{model}, {peer}"]
            for state in _STATES:
                own = _median(by_state[state])
                bases = [by_peer[base][state] if base in by_peer else () for base in _BASES]
                row += [f"{own.cpu_s:.1f}", f"{own.wall_s:.1f}"]
                row += [f"{own.cpu_s / _median(base).cpu_s:.2f}" if base else "-" for base in bases]
            rows.append(row)
    return table(header, rows)


def _median(taken: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(column) for column in zip(*taken, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--models", type=names, default=["gpt70"], help="names in benchmarks.harness.models")
    add("--peers", type=names, default=list(_PEERS), help="names in benchmarks.harness.peers")
    add("--cap-mb", type=float, default=25.0, help="DDP's bucket_cap_mb")
    add("--rounds", type=int, default=3)
    add("--device", default="cpu")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        cost = measure(given.models[0], given.peers[0], given.cap_mb, given.device)
        print(json.dumps(cost), flush=True)
        os._exit(0)  # neither the compile workers nor the process group are waited for
    costs: dict[str, dict[str, dict[str, list[Cost]]]] = {}
    for model in given.models:
        of_peers = costs[model] = {peer: {state: [] for state in _STATES} for peer in given.peers}
        for peer in given.peers * given.rounds:
            for state, taken in cold_and_warm(model, peer, given.cap_mb, given.device).items():
                of_peers[peer][state] += taken
    print("\n".join(report(costs)))


if __name__ == "__main__":
    main()
