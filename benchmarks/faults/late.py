"""Sharded updates where parameters arrive late: does anything read one before it is there?

    sudo python -m benchmarks.faults.late

Two ranks on an emulated network, on which gathering parameters takes much longer than the forward
that reads them, train a small GPT: with plain DDP, with ShardedUpdate, and with ShardedUpdate whose
readers do not wait. A row fails if ShardedUpdate's parameters are not plain DDP's, or if those
without waits are: then a missing wait would not be seen here.
"""
# test: skip, it needs root; tests/algorithms/test_sharded_update.py has a slower network, made up

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.cluster import Cluster, open_cluster, why_not_emulated
from benchmarks.harness.models import find_model
from ddpopt.algorithms import ShardedUpdate, attach
from ddpopt.algorithms.shards import Shard

PLAIN, SHARDED, NO_WAITS = "plain DDP", "ShardedUpdate", "ShardedUpdate, readers do not wait"
_NUM_RANKS, _NUM_STEPS = 2, 10
_TOLERANCE = 1e-5  # fusions that a wait divides round otherwise


@contextlib.contextmanager
def _without_waits() -> Iterator[None]:
    """Let readers go on at once; what they read arrives by the end of forward."""

    def reach(shard: Shard, address: int) -> None:
        shard.awaited.add(address)

    with mock.patch.object(Shard, "reach", reach):
        yield


def train(way: str, is_compiled: bool) -> dict[str, Any]:
    """Be one rank; return the parameters after the last step, and how long a step took."""
    torch.manual_seed(0)
    model = find_model("small")
    ddp = DistributedDataParallel(model.build(), bucket_cap_mb=0.25)
    forward: Any = torch.compile(ddp, backend="ddpopt") if is_compiled else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    handle = None if way == PLAIN else attach(ddp, optimizer, ShardedUpdate(overlap_forward=True))
    torch.manual_seed(dist.get_rank())
    batch = model.batch()
    times = []
    with _without_waits() if way == NO_WAITS else contextlib.nullcontext():
        for _ in range(_NUM_STEPS):
            started_s = time.perf_counter()
            model.loss(forward(**batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started_s)
    if handle is not None:
        handle.detach()
    values = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
    return {"values": values, "step_s": sorted(times)[len(times) // 2]}


def _be_a_rank(way: str, is_compiled: bool, output: Path) -> None:
    dist.init_process_group("gloo")
    found = train(way, is_compiled)
    torch.save(found, output / f"rank{dist.get_rank()}.pt")
    gc.collect()  # DDP has to go before its group
    dist.destroy_process_group()


def _run(cluster: Cluster, way: str, is_compiled: bool) -> list[dict[str, Any]]:
    """Return what the ranks found."""
    with tempfile.TemporaryDirectory() as folder:
        worker = [sys.executable, "-m", "benchmarks.faults.late", "--way", way, "--output", folder]
        if any(cluster.run([*worker, *["--compile"] * is_compiled])):
            raise RuntimeError(f"a rank of {way} failed")
        return [torch.load(Path(folder) / f"rank{rank}.pt") for rank in cluster.local_ranks]


def _rows(cluster: Cluster) -> Iterator[tuple[str, bool]]:
    """Yield each row of the table, and whether it is as it has to be."""
    for is_compiled in (False, True):
        plain = _run(cluster, PLAIN, is_compiled)[0]["values"]
        for way in (SHARDED, NO_WAITS):
            ranks = _run(cluster, way, is_compiled)
            difference = max(float((rank["values"] - plain).abs().max()) for rank in ranks)
            is_good = (difference <= _TOLERANCE) == (way == SHARDED)
            how = "compiled" if is_compiled else "not compiled"
            step_ms = 1e3 * max(rank["step_s"] for rank in ranks)
            verdict = "as it has to be" if is_good else "WRONG"
            yield f"| {way}, {how} | {difference:.2g} | {step_ms:.0f} | {verdict} |", is_good


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a row is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.late", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rate", default="40mbit", help="of the links, as tc has it")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.way:
        _be_a_rank(args.way, args.compile, args.output)
        return 0
    with open_cluster(_NUM_RANKS) as cluster:
        if not cluster.is_shaped:
            sys.exit(f"no network is emulated: {why_not_emulated()}")
        cluster.set_rate(args.rate)
        print("| how | largest difference from plain DDP | step ms | |\n| --- | --: | --: | --- |")
        are_good = []
        for row, is_good in _rows(cluster):
            print(row, flush=True)
            are_good.append(is_good)
    return 0 if all(are_good) else 1


if __name__ == "__main__":
    sys.exit(main())
