"""Does training with an algorithm end where training with allreduce does?

    torchrun --standalone --nproc-per-node 4 -m benchmarks.algorithms.convergence

Every algorithm gets the same weights, the same batches on each rank and the same number of them;
no model is compiled, and nothing is timed. See benchmarks/README.md.
"""
# test: skip, an hour; tests/system/test_benchmarks.py runs a small one

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.algorithms.peers import PEERS, make_peers
from benchmarks.harness.models import load_example
from benchmarks.harness.peers import find_peer, label
from benchmarks.harness.report import pyplot, table, write_run
from benchmarks.harness.session import split_names, today, versions
from ddpopt.algorithms import attach

_ALGORITHMS = (
    "ddpopt", "decentralized", "shift_one", "decentralized:communication_interval=4",
    "low_precision", "async:sync_interval_ms=10", "async:sync_interval_ms=100", "bytegrad",
    "qadam", "fp16", "powersgd", "post_local_sgd",
)  # fmt: skip
_BASE = "ddpopt"  # DDP's allreduce
_HEADER = (
    "algorithm", "loss, last steps", "held out", "less allreduce's", "exchanges a step",
)  # fmt: skip
_LEARNING_RATE, _NUM_STEPS = 2e-3, 500
# Parts of all steps: the first, in which some algorithms do a plain allreduce; the last, whose
# losses are averaged; and those over which a plot's losses are.
_WARMUP_PART, _LAST_PART, _SMOOTHED_PART = 0.2, 0.05, 0.04
_CONTEXT, _BATCH = 64, 8  # windows of so many bytes, so many in a batch
_HELD_OUT_PART = 0.05  # of the text
_NUM_TESTED_WINDOWS = 128


class Text:
    """Python's standard library as bytes: what ranks draw at random, and what is held out."""

    def __init__(self) -> None:
        self._bytes: Tensor = load_example().read_standard_library()
        self._num_train = int(len(self._bytes) * (1 - _HELD_OUT_PART))

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(self._num_train - _CONTEXT, (_BATCH, 1), generator=generator)
        return self._windows(starts)

    def held_out(self) -> tuple[Tensor, Tensor]:
        last = len(self._bytes) - _CONTEXT - 1
        starts = torch.linspace(self._num_train, last, _NUM_TESTED_WINDOWS).long()
        return self._windows(starts[:, None])

    def _windows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs, and targets in one dimension."""
        windows = self._bytes[starts + torch.arange(_CONTEXT + 1)].long()
        return windows[:, :-1], windows[:, 1:].flatten()


class Result(NamedTuple):
    """One training. `losses` are each step's, the mean over ranks, each with its own weights.

    `test_loss` is of the mean of all ranks' weights on held-out data.
    """

    peer: str
    seed: int
    losses: tuple[float, ...]
    test_loss: float
    num_exchanges: int

    @property
    def last_loss(self) -> float:
        return statistics.mean(self.losses[-max(1, round(_LAST_PART * len(self.losses))) :])


def train(text: Text, name: str, seed: int, num_steps: int) -> Result:
    """Train on all ranks, average, and test."""
    peer, options = find_peer(name, make_peers(int(_WARMUP_PART * num_steps)))
    torch.manual_seed(seed)
    ddp = peer.wrap(load_example().GPT(2, 64, 2, _CONTEXT))
    optimizer = peer.optimizer(ddp.parameters(), lr=_LEARNING_RATE)
    handle: Any = attach(ddp, optimizer, peer.algorithm(**options)) if peer.algorithm else None
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses = []
    for _ in range(num_steps):
        inputs, targets = text.draw(generator)
        loss = F.cross_entropy(ddp(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if handle is not None:
        handle.detach()  # which gives all ranks the mean of their weights
    mean_losses = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean_losses)
    with torch.no_grad():
        if handle is None:  # post-local SGD leaves them different
            for parameter in ddp.parameters():
                parameter.div_(dist.get_world_size())
                dist.all_reduce(parameter)
        inputs, targets = text.held_out()
        test_loss = F.cross_entropy(ddp.module(inputs), targets).item()
    num_exchanges = 0 if handle is None else handle.num_communications
    return Result(name, seed, tuple(mean_losses.tolist()), test_loss, num_exchanges)


# ---- the report -------------------------------------------------------------------------------

_Results = Mapping[str, Sequence[Result]]  # by algorithm, each by seed


def write(results: _Results, facts: Mapping[str, str], folder: Path) -> None:
    """Write `convergence.json`, `.md`, and `.png` where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    every = [result for of_peer in results.values() for result in of_peer]
    num_seeds, num_steps = len({result.seed for result in every}), len(every[0].losses)
    samples = [(step + 1) * _BATCH * dist.get_world_size() for step in range(num_steps)]
    seeds = "one seed." if num_seeds == 1 else f"{num_seeds} seeds: mean, lowest and highest."
    lines = [
        "examples/train_gpt.py on Python's standard library: 2 layers of width 64, windows of "
        f"{_CONTEXT} bytes, {_BATCH} a step and rank; AdamW, lr {_LEARNING_RATE:g}.",
        f"{num_steps} steps, {samples[-1]} samples in all; {seeds}",
        "",
        *(f"- {peer}: {label(peer, PEERS)}" for peer in results),
        "",
        *table(_HEADER, [_row(results, peer) for peer in results]),
    ]
    if _write_plot(results, samples, folder / "convergence.png"):
        lines += ["", "![loss against samples](convergence.png)"]
    write_run(folder / "convergence", facts, {"results": every}, lines)


def _row(results: _Results, name: str) -> Sequence[str]:
    own, base = results[name], results.get(_BASE, ())
    less = [a.test_loss - b.test_loss for a, b in zip(own, base, strict=False)]
    exchanges = statistics.mean(r.num_exchanges / len(r.losses) for r in own)
    return (
        name,
        _shown([result.last_loss for result in own]),
        _shown([result.test_loss for result in own]),
        _shown(less, "+.3f") if less else "-",
        f"{exchanges:.2g}" if exchanges else "-",
    )


def _shown(values: Sequence[float], layout: str = ".3f") -> str:
    text = format(statistics.mean(values), layout)
    if len(values) == 1:
        return text
    return f"{text} ({format(min(values), layout)} to {format(max(values), layout)})"


def _write_plot(results: _Results, samples: Sequence[int], path: Path) -> bool:
    """Plot loss against samples, the mean over seeds, smoothed; False without matplotlib."""
    plots = pyplot()
    if plots is None:
        return False
    figure, panel = plots.subplots(figsize=(10.5, 5), layout="constrained")
    colours = plots.get_cmap("tab20").colors
    width = max(1, round(_SMOOTHED_PART * len(samples)))
    for index, (name, own) in enumerate(results.items()):
        by_step = zip(*(result.losses for result in own), strict=True)
        losses = [statistics.mean(step) for step in by_step]
        smooth = [statistics.mean(losses[max(0, k - width) : k]) for k in range(1, len(losses) + 1)]
        style = {"color": "black", "linewidth": 2.0} if name == _BASE else {}
        given = {"color": colours[index % len(colours)], "linewidth": 1.1, **style}
        panel.plot(samples, smooth, label=label(name, PEERS), **given)
    panel.set_xlabel("samples")
    panel.set_ylabel(f"loss, mean of the last {_SMOOTHED_PART:.0%} of steps, and over seeds")
    panel.set_title(f"the example's GPT, {dist.get_world_size()} ranks")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    plots.close(figure)
    return True


# ---- the program ------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on the process group that torchrun describes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algorithms.convergence",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--algorithms",
        type=split_names,
        default=list(_ALGORITHMS),
        help="NAME or NAME:option=value",
    )
    add("--seeds", type=int, default=3, help="how many")
    add("--steps", type=int, default=_NUM_STEPS)
    add("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    args = parser.parse_args(arguments)
    for algorithm in args.algorithms:
        find_peer(algorithm, PEERS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shown = shlex.join(sys.argv[1:] if arguments is None else arguments)
    torchrun = f"torchrun --nproc-per-node {dist.get_world_size()}"
    command = f"{torchrun} -m benchmarks.algorithms.convergence {shown}"
    num_ranks = f"{dist.get_world_size()} ranks"
    facts = {"command": command, "date": today(), "versions": versions(), "ranks": num_ranks}
    text = Text()
    results: dict[str, list[Result]] = {name: [] for name in args.algorithms}
    for seed in range(args.seeds):
        for name, of_peer in results.items():
            result = train(text, name, seed, args.steps)
            of_peer.append(result)
            if dist.get_rank() == 0:
                losses = f"loss {result.losses[0]:.3f} -> {result.last_loss:.3f}"
                print(f"{name}, seed {seed}: {losses}, held out {result.test_loss:.3f}", flush=True)
    if dist.get_rank() == 0:
        write(results, facts, args.output)
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
