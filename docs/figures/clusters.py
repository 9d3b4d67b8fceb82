"""Predicts an iteration of three models on four clusters, for the table in docs/simulation.md.

Run `python docs/figures/clusters.py` in the repository: it prints the table, and by how much two
rules of thumb make iterations longer. Nothing here is measured: models are traced on the meta
device, and the constants are the assumptions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpopt.planning import Device, Network, Profile, estimate, simulate
from ddpopt.planning.merging import buckets_of_caps
from ddpopt.planning.plan import DDP_DEFAULT_CAPS, plan_buckets

MIB = 2**20
DTYPE = torch.bfloat16
# An H100: 40 % of its peak, 80 % of its memory's rate, kernels that are launched ahead.
DEVICE = Device(flops_per_s={DTYPE: 989e12 * 0.4}, bytes_per_s=3.35e12 * 0.8)
ADAMW_BYTES = 14  # per parameter: reads gradient, parameter and two moments, writes the last three
WORDS, CONTEXT, SEQUENCES = 50257, 1024, 8
IMAGES = 256
LATENCY_S = 10e-6
RANKS_PER_NODE = 8


class GPT(nn.Module):
    """GPT-2: its parameters, with the head's matrix that of the words."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        logits = F.linear(self.norm(x), self.words.weight).flatten(0, 1)
        return F.cross_entropy(logits, tokens.flatten())


class Bottleneck(nn.Module):
    """Three convolutions beside an identity, or beside a fourth where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            *_convolution(inputs, width, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, 4 * width, 1),
        )
        self.beside = nn.Sequential()
        if inputs != 4 * width:
            self.beside.extend(_convolution(inputs, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.way(x) + self.beside(x))


class ResNet50(nn.Module):
    """ResNet-50 for ImageNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, inputs = [], 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for index in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if index == 0 and width > 64 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return F.cross_entropy(logits, logits.argmax(1))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def _gpt(layers: int, width: int) -> tuple[nn.Module, Tensor]:
    return GPT(layers, width), torch.empty(SEQUENCES, CONTEXT, dtype=torch.long)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "ResNet-50": lambda: (ResNet50(), torch.empty(IMAGES, 3, 224, 224, dtype=DTYPE)),
    "GPT-2 medium": lambda: _gpt(24, 1024),
    "GPT-2 large": lambda: _gpt(36, 1280),
}


class Cluster(NamedTuple):
    """Its name in the table, its ranks and its links."""

    name: str
    world_size: int
    network: Network


def _nodes(count: int, algorithm: str) -> Cluster:
    network = Network(
        latency_s=LATENCY_S,
        bytes_per_s=400e9 / 8,
        algorithm=algorithm,
        ranks_per_node=RANKS_PER_NODE,
        node_latency_s=3e-6,
        node_bytes_per_s=360e9,  # 80 % of NVLink's
    )
    name = f"{count} x {RANKS_PER_NODE}, 400gbit, {algorithm}"
    return Cluster(name, count * RANKS_PER_NODE, network)


CLUSTERS = (
    Cluster("8 x 1, 25gbit, ring", 8, Network(latency_s=30e-6, bytes_per_s=25e9 / 8)),
    _nodes(8, "hierarchical"),
    _nodes(64, "hierarchical"),
    _nodes(64, "tree"),
)
# Caps of the buckets, of which the last one is for all further ones.
RULES = {"4 MiB": (4 * MIB,), "doubling from 1 MiB": tuple(MIB * 2**k for k in range(12))}


def profile(model: str) -> Profile:
    """Return the computation of an iteration, from the model's graph."""
    with torch.device("meta"):
        module, batch = MODELS[model]()
    found = estimate(module.to(DTYPE), batch, device=DEVICE)
    num_parameters = found.num_bytes // DTYPE.itemsize
    return dataclasses.replace(found, between_s=num_parameters * ADAMW_BYTES / DEVICE.bytes_per_s)


class Cell(NamedTuple):
    """Seconds of an iteration, and numbers of buckets."""

    default_s: float
    num_default: int
    best_s: float
    num_best: int
    bound_s: float
    rules_s: tuple[float, ...]  # with the buckets of RULES

    def __str__(self) -> str:
        times_s = (self.default_s, self.best_s, self.bound_s)
        default, best, bound = (f"{time_s * 1e3:.0f}" for time_s in times_s)
        return f"{default} ({self.num_default}), {best} ({self.num_best}), {bound}"


def cell(computation: Profile, cluster: Cluster) -> Cell:
    """Return what the model does on the cluster."""
    cost = cluster.network.allreduce(cluster.world_size)
    best = plan_buckets(computation, cost, cluster.world_size)

    def iteration_s(sizes: tuple[int, ...]) -> float:
        plan = dataclasses.replace(best, sizes=sizes)
        found = simulate(plan, world_size=cluster.world_size, network=cluster.network)
        return found.timeline.iteration_s

    default, *others = (
        buckets_of_caps(computation, caps) for caps in (DDP_DEFAULT_CAPS, *RULES.values())
    )
    return Cell(
        default_s=iteration_s(default),
        num_default=len(default),
        best_s=iteration_s(best.sizes),
        num_best=len(best.sizes),
        bound_s=best.timeline().bound_s,
        rules_s=tuple(map(iteration_s, others)),
    )


def main() -> None:
    """Print the table, and by how much rules are worse than the best buckets."""
    profiles = [profile(model) for model in MODELS]
    print(f"| nodes x ranks | {' | '.join(MODELS)} |\n|{'---|' * (len(MODELS) + 1)}")
    rows = {each.name: [cell(found, each) for found in profiles] for each in CLUSTERS}
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(map(str, row))} |")
    for i, rule in enumerate(RULES):
        longer = [each.rules_s[i] / each.best_s - 1 for row in rows.values() for each in row]
        print(f"{rule}: {min(longer):.0%} to {max(longer):.0%} longer than with the best buckets")


if __name__ == "__main__":
    main()
