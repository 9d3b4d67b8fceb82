"""Does training with an algorithm end where training with allreduce does?

    torchrun --standalone --nproc-per-node 4 -m benchmarks.algorithms.convergence

Every algorithm gets the same weights, the same batches on each rank and the same number of them;
no model is compiled, and nothing is timed. See benchmarks/README.md.
"""
# test: skip, an hour; tests/system/test_algorithm_benchmarks.py runs a small one

from __future__ import annotations

import argparse
import dataclasses
import gc
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.algorithms import convergence_report as report
from benchmarks.algorithms.convergence_report import Result
from benchmarks.algorithms.convergence_tasks import TASKS, Data, Task
from benchmarks.algorithms.peers import Settings, find_peer
from benchmarks.harness.session import names, today, versions

_ALGORITHMS = (
    "ddpopt", "decentralized", "shift_one", "decentralized:communication_interval=4",
    "low_precision", "async:sync_interval_ms=10", "async:sync_interval_ms=100", "bytegrad",
    "qadam", "ddpopt_adam", "fp16", "powersgd", "post_local_sgd",
)  # fmt: skip
_WARMUP = 5  # a fifth of the steps


def train(task: Task, data: Data, name: str, seed: int) -> Result:
    """Train on all ranks, average, and test."""
    torch.manual_seed(seed)
    module = task.build()
    ddp = DistributedDataParallel(module)
    peer, options = find_peer(name)
    settings = Settings(
        make_optimizer=task.make_optimizer, lr=task.lr, warmup_steps=task.num_steps // _WARMUP
    )
    optimizer, handle = peer.start(ddp, settings, options)
    losses = []
    for inputs, targets in task.batches(data, seed, dist.get_rank()):
        loss = task.loss(ddp, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    num_exchanges = 0
    if handle is None:
        _average(module)
    else:
        handle.detach()
        num_exchanges = handle.num_communications
    mean_losses = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean_losses)
    test_loss, accuracy = task.test(module, data)
    return Result(
        peer=name,
        seed=seed,
        losses=tuple(mean_losses.tolist()),
        test_loss=test_loss,
        accuracy=accuracy if task.is_classification else None,
        num_exchanges=num_exchanges,
    )


@torch.no_grad()
def _average(module: nn.Module) -> None:
    """Give all ranks the mean of their weights, which post-local SGD leaves different."""
    for parameter in module.parameters():
        parameter.div_(dist.get_world_size())
        dist.all_reduce(parameter)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algorithms.convergence",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tasks", type=names, default=list(TASKS))
    add("--algorithms", type=names, default=list(_ALGORITHMS), help="NAME or NAME:option=value")
    add("--seeds", type=int, default=3, help="how many")
    add("--steps", type=int, help="those of the task if not given")
    add("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    args = parser.parse_args(arguments)
    for name in args.algorithms:
        find_peer(name)
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on the process group that torchrun describes."""
    args = _parse(arguments)
    shown = shlex.join(sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first, num_ranks = dist.get_rank() == 0, dist.get_world_size()
    for name in args.tasks:
        task = TASKS[name]
        if args.steps is not None:
            task = dataclasses.replace(task, num_steps=args.steps)
        data = task.load()
        results = []
        for seed in range(args.seeds):
            for algorithm in args.algorithms:
                results.append(train(task, data, algorithm, seed))
                if is_first:
                    print(f"{name}, seed {seed}, {report.line(results[-1])}", flush=True)
        if is_first:
            run = report.Run(
                command=f"torchrun --nproc-per-node {num_ranks} "
                f"-m benchmarks.algorithms.convergence {shown}",
                date=today(),
                versions=versions(),
                task=task.name,
                description=task.description,
                num_ranks=num_ranks,
                batch=task.batch,
                results=results,
            )
            report.write(run, args.output)
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
