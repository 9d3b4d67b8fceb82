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

_PEERS = ("nosplit", "intree", "forward", "backward")
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
    """Return the cost with an empty cache, and with the one that this left."""
    with tempfile.TemporaryDirectory() as cache:
        costs = {
            state: [in_process(model, peer, cap_mb, device, cache)] for state in ("cold", "warm")
        }
    print(f"{model} {peer}: {costs}", file=sys.stderr, flush=True)
    return costs


def in_process(model: str, peer: str, cap_mb: float, device: str, cache: str) -> Cost:
    """Return what the first step takes in a process of its own, with this cache."""
    arguments = ["--worker", "--models", model, "--peers", peer, "--cap-mb", str(cap_mb)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cost.compiling", *arguments, "--device", device],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Cost(*json.loads(done.stdout.splitlines()[-1]))


def report(costs: Mapping[str, Mapping[str, Mapping[str, Sequence[Cost]]]]) -> list[str]:
    """Return a table in Markdown: medians, and their ratios to those of `_BASES`."""
    header = ["model, peer"]
    for state in ("cold", "warm"):
        header += [f"{state} CPU s", f"{state} s", *(f"of {base}'s" for base in _BASES)]
    rows = []
    for model, by_peer in costs.items():
        medians = {
            (peer, state): [statistics.median(column) for column in zip(*taken, strict=True)]
            for peer, by_state in by_peer.items()
            for state, taken in by_state.items()
        }
        for peer, by_state in by_peer.items():
            row = [f"{model}, {peer}"]
            for state in by_state:
                cpu_s, wall_s = medians[peer, state]
                bases = (medians.get((base, state)) for base in _BASES)
                ratios = (f"{cpu_s / base[0]:.2f}" if base else "-" for base in bases)
                row += [f"{cpu_s:.1f}", f"{wall_s:.1f}", *ratios]
            rows.append(row)
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt70", help="names in benchmarks.harness.models")
    parser.add_argument("--peers", default=",".join(_PEERS), help="names in harness.peers")
    parser.add_argument("--cap-mb", type=float, default=25.0, help="DDP's bucket_cap_mb")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models, peers = arguments.models.split(","), arguments.peers.split(",")
    if arguments.worker:
        cost = measure(models[0], peers[0], arguments.cap_mb, arguments.device)
        print(json.dumps(cost), flush=True)
        os._exit(0)  # neither the compile workers nor the process group are waited for
    costs: dict[str, dict[str, dict[str, list[Cost]]]] = {}
    for model in models:
        of_peers = costs[model] = {peer: {"cold": [], "warm": []} for peer in peers}
        for peer in peers * arguments.rounds:
            found = cold_and_warm(model, peer, arguments.cap_mb, arguments.device)
            for state, taken in found.items():
                of_peers[peer][state] += taken
    print("\n".join(report(costs)))


if __name__ == "__main__":
    main()
