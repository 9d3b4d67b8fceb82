"""Run it with: torchrun --nproc-per-node 2 examples/train_gpt.py

Trains a small byte-level GPT on Python's own standard library, compiled with ddpopt, and checks
at the end that all ranks hold the same parameters. Gloo on CPU, NCCL where every rank has a GPU;
several nodes by torchrun's own flags. `--compare eager` trains an uncompiled twin as well, and
`--algorithm async` (or another) communicates in another way than DDP's allreduce. With
`torchrun --max-restarts 3` and `--checkpoint run.pt` it survives the loss of a rank. `--overlap
page.html` ends with a table of four ways to compile the model: how long a step takes, and how long
it waits for communication. On one machine that is next to nothing, unless `--network 1gbit`
emulates a link (slow_link.py).
"""
# test: skip, it trains for minutes; tests/system/test_examples.py trains a smaller model

import argparse
import copy
import functools
import gc
import inspect
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import Checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

EAGER = "eager-ddp"
ALLREDUCE = "allreduce"
ALGORITHMS = [
    ALLREDUCE,
    "decentralized",
    "shift-one",
    "low-precision",
    "async",
    "bytegrad",
    "qadam",
]
MAX_TEXT_BYTES = 8_000_000
REPORT_EVERY = 10
# Gradients are views of DDP's buckets, which give their memory back until the next backward.
LESS_MEMORY = {"gradient_as_bucket_view": True}
if "lazy_bucket_allocation" in inspect.signature(DDP).parameters:  # from torch 2.15 on
    LESS_MEMORY["lazy_bucket_allocation"] = True
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "encodings", "site-packages", "test", "tests"}


class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then an MLP four times as wide."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Maps bytes to logits of the next byte, or to the mean loss where targets are given."""

    def __init__(self, layers: int, width: int, heads: int, context: int):
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.byte(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return logits if targets is None else F.cross_entropy(logits, targets.flatten())

    @torch.no_grad()
    def continue_text(self, prompt: bytes, num_bytes: int) -> str:
        positions = self.position.weight
        tokens = torch.tensor([list(prompt)], device=positions.device)
        for _ in range(num_bytes):
            odds = (self(tokens[:, -len(positions) :])[-1:] / 0.8).softmax(-1)
            tokens = torch.cat([tokens, odds.multinomial(1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def read_standard_library() -> Tensor:
    """Read the sources of Python's standard library, in a fixed order, as one tensor of bytes."""
    root, text = sysconfig.get_paths()["stdlib"], bytearray()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for name in sorted(name for name in names if name.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as source:
                text += source.read()
    if not text:
        raise FileNotFoundError(f"no .py sources in {root}: is the standard library zipped?")
    return torch.frombuffer(text[:MAX_TEXT_BYTES], dtype=torch.uint8)


def start_algorithm(ddp: DDP, args: argparse.Namespace) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer, and the handle of what communicates in DDP's place, None if nothing."""
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
    if args.algorithm == ALLREDUCE:
        return optimizer, None
    from ddpopt import algorithms

    nodes = {"hierarchical": args.hierarchical}
    averaging = {**nodes, "communication_interval": args.communication_interval}
    if args.algorithm == "decentralized":
        algorithm = algorithms.Decentralized(**averaging)
    elif args.algorithm == "shift-one":
        algorithm = algorithms.Decentralized(peer_selection="shift_one", **averaging)
    elif args.algorithm == "low-precision":
        algorithm = algorithms.LowPrecisionDecentralized(**averaging)
    elif args.algorithm == "async":
        algorithm = algorithms.AsyncModelAverage(
            sync_interval_ms=args.sync_interval_ms, warmup_steps=args.warmup_steps
        )
    elif args.algorithm == "bytegrad":
        algorithm = algorithms.ByteGrad(**nodes)
    else:
        optimizer = algorithms.QAdamOptimizer(
            ddp.parameters(), lr=args.lr, warmup_steps=args.warmup_steps
        )
        algorithm = algorithms.QAdam(**nodes)
    return optimizer, algorithms.attach(ddp, optimizer, algorithm)


def train(model: GPT, backend: str, text: Tensor, args: argparse.Namespace) -> tuple[Tensor, float]:
    """Return the loss of each step, averaged over the ranks, and the tokens/s of all ranks."""
    device, rank, num_ranks = model.head.weight.device, dist.get_rank(), dist.get_world_size()
    ddp = DDP(model, bucket_cap_mb=args.bucket_cap_mb, **LESS_MEMORY)
    if args.network:
        slow_link().connect(ddp)
    options = ddpopt_options(args) if backend == "ddpopt" else None
    compiled = ddp if backend == EAGER else torch.compile(ddp, backend=backend, options=options)
    optimizer, handle = start_algorithm(ddp, args)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
    generator = torch.Generator().manual_seed(args.seed + rank)
    parts = {"model": model, "optimizer": optimizer, "warmup": warmup}
    saved = Checkpoint(args.checkpoint, parts, generator) if args.checkpoint else None
    first, means = saved.load() if saved else (0, torch.empty(0))
    if first and rank == 0:
        print(f"going on after step {first} of {args.checkpoint}", flush=True)

    has_bar = rank == 0 and tqdm is not None and sys.stderr.isatty()
    steps = range(first, args.steps)
    steps = tqdm(steps) if has_bar else steps
    show = steps.set_postfix_str if has_bar else functools.partial(print, flush=True)
    losses, start_s, tokens_per_s = [], 0.0, 0.0
    for step in steps:
        starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
        windows = text[starts + torch.arange(args.context + 1)].to(device, torch.long)
        loss = compiled(windows[:, :-1], windows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()  # before the next forward, so that buckets' memory is given back
        warmup.step()
        losses.append(loss.detach())
        if step == first:
            start_s = time.perf_counter()  # the first step compiles and is left out
            if rank == 0 and backend == "ddpopt":
                import ddpopt  # for this table alone: the backend is found by its name

                print(f"\n{ddpopt.explain(ddp)}", flush=True)
        tokens = (step - first) * windows[:, 1:].numel() * num_ranks
        tokens_per_s = tokens / (time.perf_counter() - start_s)
        if rank == 0 and (step + 1) % REPORT_EVERY == 0:
            show(f"{backend} {step + 1}: loss {loss.item():.3f}, {tokens_per_s:,.0f} tokens/s")
        if saved and ((step + 1) % args.checkpoint_every == 0 or step + 1 == args.steps):
            means, losses = torch.cat([means, average_over_ranks(losses)]), []
            saved.save(step + 1, means)
    if handle is not None:
        handle.detach()  # averages what the ranks have learned on their own
    return torch.cat([means, average_over_ranks(losses)]), tokens_per_s


def ddpopt_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"inner": args.inner, **({"split": args.split} if args.split else {})}


class Way:
    """A copy of the model, compiled in one of the ways that are compared."""

    def __init__(self, model: GPT, args: argparse.Namespace, optimize_ddp: bool, **how: Any):
        self.ddp = DDP(copy.deepcopy(model), bucket_cap_mb=args.bucket_cap_mb, **LESS_MEMORY)
        if args.network:
            slow_link().connect(self.ddp)
        self.compiled = torch.compile(self.ddp, **how)
        self.optimize_ddp = optimize_ddp

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Run forward and backward; return how many seconds they took."""
        dist.barrier()
        start_s = time.perf_counter()
        with torch._dynamo.config.patch(optimize_ddp=self.optimize_ddp):
            self.compiled(inputs, targets).backward()
        stop_s = time.perf_counter()
        self.ddp.zero_grad()
        return stop_s - start_s


def compile_ways(model: GPT, args: argparse.Namespace) -> dict[str, Way]:
    """Return what is compared, tuned buckets last."""
    # Dynamo runs what it has compiled for another module if the backends are equal; these are not.
    inner = torch._dynamo.lookup_backend(args.inner)
    ours, tuned = ddpopt_options(args), {**ddpopt_options(args), "buckets": "auto"}
    ways = {
        "torch.compile, not split": Way(model, args, False, backend=functools.partial(inner)),
        "PyTorch's DDPOptimizer": Way(model, args, True, backend=functools.partial(inner)),
        "ddpopt": Way(model, args, True, backend="ddpopt", options=ours),
        'ddpopt, buckets="auto"': Way(model, args, True, backend="ddpopt", options=tuned),
    }
    if args.bucket_cap_mb is not None and args.bucket_cap_mb < 1:
        del ways["PyTorch's DDPOptimizer"]  # which raises for buckets smaller than DDP's first
    return ways


def report_overlap(
    model: GPT, text: Tensor, args: argparse.Namespace, report: Callable[[str], None]
) -> None:
    """Compare four ways to compile the model, on copies; they take turns."""
    import ddpopt

    ways = compile_ways(model, args)
    windows = text[: args.batch * (args.context + 1)].unflatten(0, (args.batch, -1))
    windows = windows.to(model.head.weight.device, torch.long)
    batch = windows[:, :-1], windows[:, 1:]
    for name, way in ways.items():
        report(f"compiling: {name}")
        for _ in range(5):  # the first step compiles, and DDP tells its buckets in the fourth
            way.step(*batch)
    for _ in range(25):  # in which better buckets are found, and compared with those before
        way.step(*batch)
    report(f"\n{ddpopt.explain(way.ddp).tuning}")

    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(7):
        for name, way in ways.items():
            times[name].append(way.step(*batch) * 1e3)
    exposed_ms = {}
    for name, way in ways.items():
        with ddpopt.record(way.ddp) as recording:
            for _ in range(5):
                way.step(*batch)
        exposed_ms[name] = (recording.median_step().exposed_s or 0.0) * 1e3
    network = f"an EMULATED {args.network:g} Gbit/s link" if args.network else "loopback"
    report(f"\n{'forward and backward, ms; ' + network:55}  total  exposed communication")
    for name in ways:
        report(f"{name:55}{statistics.median(times[name]):7.0f}{exposed_ms[name]:23.0f}")
    if dist.get_rank() == 0:
        args.overlap.parent.mkdir(parents=True, exist_ok=True)
        ddpopt.explain(way.ddp).save(args.overlap)
    report(f"the timeline of a step of the last one: open {args.overlap} in a browser")


def link_rate(text: str) -> float:
    """Return a rate in Gbit/s."""
    gbit: float = slow_link().parse_gbit(text)
    return gbit


def slow_link() -> ModuleType:
    """Import what emulates a network; it needs ddpopt, which not everything here does."""
    import slow_link

    return slow_link


def average_over_ranks(losses: list[Tensor]) -> Tensor:
    """Return the mean of each loss, on the CPU."""
    if not losses:
        return torch.empty(0)
    means = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(means)
    return means.cpu()


def is_equal_on_all_ranks(model: nn.Module) -> bool:
    """Bitwise, so that NaNs and signed zeros count: the smallest and the largest bits must meet."""
    bits = torch.cat([p.detach().flatten() for p in model.parameters()]).view(torch.int32)
    smallest, largest = bits.clone(), bits.clone()
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return torch.equal(smallest, largest)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=4, help="windows a step on each rank")
    add("--context", type=int, default=128, help="bytes a window")
    add("--layers", type=int, default=6)
    add("--width", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--lr", type=float, default=1e-3)
    add("--bucket-cap-mb", type=float, help="DDP's bucket size; its own default if not given")
    add("--backend", default="ddpopt", help=f"a torch.compile backend, or {EAGER}: uncompiled")
    add("--inner", default="inductor", help="what ddpopt compiles its sections with")
    add("--split", choices=["auto", "forward", "backward"], help="what ddpopt splits")
    add("--algorithm", default=ALLREDUCE, choices=ALGORITHMS, help="how ranks communicate",
        type=lambda name: name.replace("_", "-"))  # fmt: skip
    add("--hierarchical", action="store_true", help="average within each machine first")
    add("--communication-interval", type=int, default=1, help="steps, of the decentralized ones")
    add("--sync-interval-ms", type=float, default=500, help="of async")
    add("--warmup-steps", type=int, default=50, help="with allreduce, of async and qadam")
    add("--checkpoint", type=Path, help="a file to save to, and to go on from if it exists")
    add("--checkpoint-every", type=int, default=50, help="steps between two saves")
    add("--seed", type=int, default=0)
    add("--compare", choices=["eager"], help="train an uncompiled twin too, compare the losses")
    add(
        "--network",
        type=link_rate,
        help="emulate a link of this rate between ranks, such as 1gbit, on CPUs",
    )
    add("--overlap", type=Path, help="compare steps of four compilers, and write a page of them")
    add("--sample", type=int, default=200, help="bytes of text to generate at the end")
    args = parser.parse_args()
    if args.checkpoint and args.algorithm != ALLREDUCE:
        parser.error("--checkpoint saves rank 0's weights, which only allreduce keeps equal")
    if args.network and args.algorithm != ALLREDUCE:
        parser.error("--network emulates a link for DDP's allreduce only")
    return args


def open_process_group(*, is_on_cpu: bool) -> torch.device:
    """NCCL if each rank of this machine finds a GPU of its own, else gloo on CPU."""
    if is_on_cpu or torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> None:
    args = parse_arguments()
    device = open_process_group(is_on_cpu=bool(args.network))
    report = functools.partial(print, flush=True) if dist.get_rank() == 0 else lambda line: None
    torch.manual_seed(args.seed)
    model, text = GPT(args.layers, args.width, args.heads, args.context), read_standard_library()
    twin = copy.deepcopy(model.to(device))
    num_parameters = sum(p.numel() for p in model.parameters())
    report(f"{num_parameters / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of text, {device}")
    if args.network:
        slow_link().emulate(args.network)
        report(f"the network is EMULATED: a thread sleeps as long as {args.network:g} Gbit/s take")

    losses, tokens_per_s = train(model, args.backend, text, args)
    first, last = losses[:10].mean().item(), losses[-10:].mean().item()
    verdict = "fell" if last < first else "DID NOT FALL"
    report(
        f"{tokens_per_s:,.0f} tokens/s; loss {verdict}: {first:.3f} -> {last:.3f} (10-step means)"
    )
    is_equal = is_equal_on_all_ranks(model)
    if args.compare:
        args.checkpoint = None  # which is the other's
        eager_losses, eager_tokens_per_s = train(twin, EAGER, text, args)
        # Training amplifies rounding: a correct Inductor compile drifts too, after 100 steps or so.
        gaps = (losses - eager_losses).abs()
        report(f"eager twin: {eager_tokens_per_s:,.0f} tokens/s; largest difference of a loss:")
        report(f"{gaps.max():.3g}; in the first 20 steps {gaps[:20].max():.3g}")
    if dist.get_rank() == 0 and args.sample:
        report(f"sample:\n{model.continue_text(b'def ', args.sample)}")
    if args.overlap:
        report_overlap(model, text, args, report)
    # Not in a `finally`: a rank that fails must exit at once, so that torchrun ends the others.
    dist.barrier()
    gc.collect()  # DDP and what was compiled have to go before their group: see docs/faq.md
    dist.destroy_process_group()
    if not is_equal:
        sys.exit("FAILED: the ranks ended with different parameters")
    report("all ranks hold bitwise equal parameters")


if __name__ == "__main__":
    main()
