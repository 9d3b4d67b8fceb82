"""Measure what compiling costs: `python -m benchmarks.cost.compiling --models gpt70,bert`.

Each figure is of a process of its own, which makes the model, wraps it in DDP alone, and takes the
first step, forward and backward; what `torch.compile` imports is in it. Peers take turns: a round
is each peer once with an empty cache (cold) and once with the one that this left (warm). CPU
seconds are those of the process and of the programs that it waited for, as the C++ compiler, and
hold on a machine that does other things as well. On a GPU Triton compiles in worker processes that
nobody waits for: its CPU seconds are missing there.
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

from benchmarks.harness.models import find_model
from benchmarks.harness.peers import find_peer
from benchmarks.harness.report import table
from benchmarks.harness.session import split_names

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
    ddp = peer.wrap(model.build().to(device), bucket_cap_mb=cap_mb)
    batch = {name: value.to(device) for name, value in model.batch().items()}
    wall_s, cpu_s = time.perf_counter(), _cpu_s()
    compiled = peer.compile(ddp, "inductor", options)  # which imports the compilers
    loss = model.loss(compiled(**batch))
    with peer.around_backward("inductor"):
        loss.backward()
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
        header += [f"{state} s", f"{state} CPU s", *(f"CPU of {base}'s" for base in _BASES)]
    rows = []
    for model, by_peer in costs.items():
        for peer, by_state in by_peer.items():
            row = [f"{model}, {peer}"]
            for state in _STATES:
                cost = _median(by_state[state])
                row += [f"{cost.wall_s:.1f}", f"{cost.cpu_s:.1f}"]
                for base in _BASES:
                    ratio = "-"
                    if base in by_peer:
                        ratio = f"{cost.cpu_s / _median(by_peer[base][state]).cpu_s:.2f}"
                    row.append(ratio)
            rows.append(row)
    return table(header, rows)


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost.compiling", description=(__doc__ or "").partition(":")[0]
    )
    add = parser.add_argument
    add("--models", type=split_names, default=["gpt70"], help="names in benchmarks.harness.models")
    add("--peers", type=split_names, default=list(_PEERS), help="names in benchmarks.harness.peers")
    add("--cap-mb", type=float, default=25.0, help="DDP's bucket_cap_mb")
    add("--rounds", type=int, default=3)
    add("--device", default="cpu")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        cost = measure(args.models[0], args.peers[0], args.cap_mb, args.device)
        print(json.dumps(cost), flush=True)
        os._exit(0)  # neither the compile workers nor the process group are waited for
    costs: dict[str, dict[str, dict[str, list[Cost]]]] = {}
    for model in args.models:
        costs[model] = {peer: {state: [] for state in _STATES} for peer in args.peers}
        for _ in range(args.rounds):
            for peer in args.peers:
                by_state = cold_and_warm(model, peer, args.cap_mb, args.device)
                for state in _STATES:
                    costs[model][peer][state] += by_state[state]
    print("\n".join(report(costs)))


if __name__ == "__main__":
    main()
