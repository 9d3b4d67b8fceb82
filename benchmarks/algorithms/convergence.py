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
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.algorithms.convergence_tasks import TASKS, Data, Task
from benchmarks.algorithms.peers import PEERS, Settings, find_peer
from benchmarks.harness.peers import label
from benchmarks.harness.report import pyplot, table, write_json
from benchmarks.harness.session import names, today, versions

_ALGORITHMS = (
    "ddpopt", "decentralized", "shift_one", "decentralized:communication_interval=4",
    "low_precision", "async:sync_interval_ms=10", "async:sync_interval_ms=100", "bytegrad",
    "qadam", "ddpopt_adam", "fp16", "powersgd", "post_local_sgd",
)  # fmt: skip
_WARMUP = 5  # a fifth of the steps
_BASE = "ddpopt"
_LAST = 0.05  # of the steps, whose losses are averaged
_SMOOTHED = 0.04
_HEADER = (
    "algorithm", "loss, last steps", "held out", f"less {_BASE}'s", "right, held out",
    "exchanges a step",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One training. `losses` are each step's, the mean over ranks, each with its own weights.

    `test_loss` and `accuracy` are of the mean of all ranks' weights on held-out data; there is no
    accuracy where nothing is classified.
    """

    peer: str
    seed: int
    losses: tuple[float, ...]
    test_loss: float
    accuracy: float | None
    num_exchanges: int

    @property
    def last_loss(self) -> float:
        return statistics.mean(self.losses[-max(1, round(_LAST * len(self.losses))) :])


_Results = Mapping[str, Sequence[Result]]  # by algorithm, each by seed


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


# ---- the report -------------------------------------------------------------------------------


def _line(result: Result) -> str:
    accuracy = "" if result.accuracy is None else f", {result.accuracy:.1%} right"
    return (
        f"{result.peer}: loss {result.losses[0]:.3f} -> {result.last_loss:.3f}, "
        f"held out {result.test_loss:.3f}{accuracy}"
    )


def write(task: Task, results: _Results, facts: Mapping[str, str], folder: Path) -> None:
    """Write `convergence-<task>.json`, `.md`, and `.png` where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"convergence-{task.name}"
    picture = stem.with_suffix(".png")
    every = [result for of_peer in results.values() for result in of_peer]
    write_json({**facts, "results": every}, stem.with_suffix(".json"))
    is_drawn = _write_plot(task, results, picture)
    num_seeds = len({result.seed for result in every})
    num_steps = len(every[0].losses)
    num_samples = num_steps * task.batch * dist.get_world_size()
    seeds = "one seed." if num_seeds == 1 else f"{num_seeds} seeds: mean, lowest and highest."
    lines = [
        f"# Convergence, {task.name}",
        "",
        f"    {facts['command']}",
        "",
        f"{facts['date']}; {facts['versions']}; {dist.get_world_size()} ranks.",
        f"{task.description}.",
        f"{num_steps} steps, {num_samples} samples in all; {seeds}",
        "",
        *(f"- {name}: {label(name, PEERS)}" for name in results),
        "",
        *table(_HEADER, [_row(results, name) for name in results]),
        *(["", f"![loss against samples]({picture.name})"] if is_drawn else []),
    ]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _row(results: _Results, name: str) -> Sequence[str]:
    own, base = results[name], results.get(_BASE, ())
    less = [a.test_loss - b.test_loss for a, b in zip(own, base, strict=False)]
    right = [100 * result.accuracy for result in own if result.accuracy is not None]
    exchanges = statistics.mean(r.num_exchanges / len(r.losses) for r in own)
    return (
        name,
        _shown([result.last_loss for result in own]),
        _shown([result.test_loss for result in own]),
        _shown(less, "+.3f") if less else "-",
        f"{_shown(right, '.1f')} %" if right else "-",
        f"{exchanges:.2g}" if exchanges else "-",
    )


def _shown(values: Sequence[float], layout: str = ".3f") -> str:
    text = format(statistics.mean(values), layout)
    if len(values) == 1:
        return text
    return f"{text} ({format(min(values), layout)} to {format(max(values), layout)})"


def _write_plot(task: Task, results: _Results, path: Path) -> bool:
    """Plot loss against samples, the mean over seeds, smoothed; False without matplotlib."""
    plots = pyplot()
    if plots is None:
        return False
    figure, panel = plots.subplots(figsize=(10.5, 5), layout="constrained")
    colours = plots.get_cmap("tab20").colors
    for index, (name, own) in enumerate(results.items()):
        by_step = zip(*(result.losses for result in own), strict=True)
        losses = _smooth([statistics.mean(step) for step in by_step])
        samples = [(step + 1) * task.batch * dist.get_world_size() for step in range(len(losses))]
        style = {"color": "black", "linewidth": 2.0} if name == _BASE else {}
        given = {"color": colours[index % len(colours)], "linewidth": 1.1, **style}
        panel.plot(samples, losses, label=label(name, PEERS), **given)
    panel.set_xlabel("samples")
    num_seeds = len(own)
    over_seeds = f", mean over {num_seeds} seeds" if num_seeds > 1 else ""
    panel.set_ylabel(f"loss, mean of the last {_SMOOTHED:.0%} of steps{over_seeds}")
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    if high < 10 * low:  # else there is a number at each power of ten
        panel.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_title(f"{task.name}, {dist.get_world_size()} ranks")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    plots.close(figure)
    return True


def _smooth(losses: Sequence[float]) -> list[float]:
    width = max(1, round(_SMOOTHED * len(losses)))
    return [statistics.mean(losses[max(0, end - width) : end]) for end in range(1, len(losses) + 1)]


# ---- the program ------------------------------------------------------------------------------


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
    is_first = dist.get_rank() == 0
    for name in args.tasks:
        task = TASKS[name]
        if args.steps is not None:
            task = dataclasses.replace(task, num_steps=args.steps)
        data = task.load()
        results: dict[str, list[Result]] = {algorithm: [] for algorithm in args.algorithms}
        for seed in range(args.seeds):
            for algorithm, of_peer in results.items():
                of_peer.append(train(task, data, algorithm, seed))
                if is_first:
                    print(f"{name}, seed {seed}, {_line(of_peer[-1])}", flush=True)
        if is_first:
            torchrun = f"torchrun --nproc-per-node {dist.get_world_size()}"
            command = f"{torchrun} -m benchmarks.algorithms.convergence {shown}"
            facts = {"command": command, "date": today(), "versions": versions()}
            write(task, results, facts, args.output)
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
