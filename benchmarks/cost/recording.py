"""What recording costs: steps inside of `ddpopt.record` beside steps without, in turns.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.cost.recording --models gpt,fused

Entering and leaving the block, where the profiler starts and is read, is not part of a step.
"""
# test: skip, minutes; tests/system/test_benchmarks.py runs a small one

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.harness.models import Model, find_model
from benchmarks.harness.report import ratios, table

_WARM_UP_STEPS = 6
_SPLITS = ("forward", "backward")


def measure(model: Model, split: str, inner: str, rounds: int, steps: int) -> Sequence[str]:
    """Return a row: the times of a step without and with a recording, and their ratio."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model.build(), bucket_cap_mb=4)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": inner, "split": split})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    batch = model.batch()

    def step() -> float:
        dist.barrier()
        began_s = time.perf_counter()
        model.loss(compiled(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began_s

    for _ in range(_WARM_UP_STEPS):
        step()
    plain: list[float] = []
    recorded: list[float] = []
    for _ in range(rounds):
        for times, is_recorded in ((plain, False), (recorded, True)):
            context: Any = ddpopt.record(ddp) if is_recorded else contextlib.nullcontext()
            with context:
                step()
                times.append(statistics.median(step() for _ in range(steps)))
    sections = sum(len(plan.sections) for plan in ddpopt.explain(ddp).plans)
    milliseconds = (f"{1e3 * statistics.median(times):.1f}" for times in (plain, recorded))
    ratio = ratios(recorded, plain).median
    return (model.name, split, str(sections), *milliseconds, f"{ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt")
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [
        measure(find_model(name), split, args.inner, args.rounds, args.steps)
        for name in args.models.split(",")
        for split in _SPLITS
    ]
    if dist.get_rank() == 0:
        header = ("model", "split", "sections", "step ms", "recorded ms", "ratio")
        print("\n".join(table(header, rows)))
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
