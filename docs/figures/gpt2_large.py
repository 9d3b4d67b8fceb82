"""Computes how a GPT-2-large-sized model scales to 1,024 ranks, for docs/simulation.md.

Run `python docs/figures/gpt2_large.py` in the repository: it prints the table and writes
docs/images/scaling-gpt2-large.svg. Nothing here is measured; the constants are the assumptions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from ddpopt.bucketing.costs import Gradient, Network, Profile
from ddpopt.bucketing.merging import buckets_of_caps
from ddpopt.bucketing.plan import DDP_DEFAULT_CAPS, BucketPlan, plan_buckets
from ddpopt.bucketing.simulate import simulate

LAYERS, WIDTH, VOCABULARY, CONTEXT = 36, 1280, 50257, 1024
SEQUENCES = 8  # of CONTEXT tokens, on each rank and iteration
FLOP_PER_S = 312e12 * 0.4  # an A100's bf16 peak, of which 40 % are used
BYTES_PER_GRADIENT = 4  # float32, as with autocast
ADAMW_BYTES = 28  # per parameter: reads gradient, parameter and two moments, writes the last three
MEMORY_BYTES_PER_S = 1.5e12
RANKS_PER_NODE = 8
NODE_BYTES_PER_S, NODE_LATENCY_S = 240e9, 3e-6  # inside a node: 80 % of NVLink's 300 GB/s
LATENCY_S = 10e-6
GBIT_PER_S = (800, 200, 100)  # of a node's link; the lines of the picture
WORLD_SIZES = tuple(2**k for k in range(3, 11))

IMAGE = Path(__file__).parents[1] / "images" / "scaling-gpt2-large.svg"


class Parameter(NamedTuple):
    """A parameter and the multiply-adds of its operator on one token, where it is a matrix."""

    name: str
    count: int
    multiply_adds: int = 0


def parameters() -> list[Parameter]:
    """Return the parameters in the order in which backward has their gradients ready.

    The head is the token embedding, so that its gradient is complete only at the end.
    """
    backward = [Parameter("ln_f.bias", WIDTH), Parameter("ln_f.weight", WIDTH)]
    for layer in reversed(range(LAYERS)):
        for name, inputs, outputs in (
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("ln_2", 0, WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("ln_1", 0, WIDTH),
        ):
            macs = inputs * outputs
            if name == "attn.c_attn":  # scores, and values weighted by them, come before
                macs += 2 * CONTEXT * WIDTH
            backward.append(Parameter(f"h.{layer}.{name}.bias", outputs))
            backward.append(Parameter(f"h.{layer}.{name}.weight", inputs * outputs or WIDTH, macs))
    return [
        *backward,
        Parameter("wpe.weight", CONTEXT * WIDTH),
        Parameter("wte.weight", VOCABULARY * WIDTH),
    ]


def profile() -> Profile:
    """Return the computation of an iteration; backward takes twice the time of forward."""
    forward_s_per_mac = 2 * SEQUENCES * CONTEXT / FLOP_PER_S
    head_s = VOCABULARY * WIDTH * forward_s_per_mac
    forward_s = head_s
    ready_s = 2 * head_s
    gradients = []
    for name, count, macs in parameters():
        forward_s += macs * forward_s_per_mac
        ready_s += 2 * macs * forward_s_per_mac
        gradients.append(Gradient(name=name, num_bytes=count * BYTES_PER_GRADIENT, ready_s=ready_s))
    num_parameters = sum(parameter.count for parameter in parameters())
    return Profile(
        gradients=tuple(gradients),
        backward_s=ready_s,
        forward_s=forward_s,
        between_s=num_parameters * ADAMW_BYTES / MEMORY_BYTES_PER_S,
        source="computed from FLOP counts",
    )


class Curve(NamedTuple):
    """Efficiencies over WORLD_SIZES at one speed of a node's link."""

    gbit_per_s: int
    algorithm: str
    planned: tuple[float, ...]
    num_buckets: tuple[int, ...]
    default: tuple[float, ...]
    at_end: tuple[float, ...]


def curves() -> list[Curve]:
    """Return all that the documentation shows; the picture leaves the last one out."""
    return [*(curve(speed, "hierarchical") for speed in GBIT_PER_S), curve(GBIT_PER_S[1], "tree")]


def curve(gbit_per_s: int, algorithm: str) -> Curve:
    """Return how the model scales with a plan for each point, DDP's buckets, and one bucket."""
    computation = profile()
    network = Network(
        latency_s=LATENCY_S,
        bytes_per_s=gbit_per_s * 1e9 / 8,
        algorithm=algorithm,
        ranks_per_node=RANKS_PER_NODE,
        node_latency_s=NODE_LATENCY_S,
        node_bytes_per_s=NODE_BYTES_PER_S,
    )
    plans = [plan_buckets(computation, network.allreduce(n), n) for n in WORLD_SIZES]
    default = buckets_of_caps(computation, DDP_DEFAULT_CAPS)

    def efficiency(plan: BucketPlan, sizes: tuple[int, ...]) -> float:
        fixed = BucketPlan(
            profile=plan.profile, cost=plan.cost, world_size=plan.world_size, sizes=sizes
        )
        return simulate(fixed, world_size=plan.world_size, network=network).efficiency

    return Curve(
        gbit_per_s=gbit_per_s,
        algorithm=algorithm,
        planned=tuple(efficiency(plan, plan.sizes) for plan in plans),
        num_buckets=tuple(len(plan.buckets) for plan in plans),
        default=tuple(efficiency(plan, default) for plan in plans),
        at_end=tuple(efficiency(plan, (len(computation.gradients),)) for plan in plans),
    )


def markdown(shown: list[Curve]) -> list[str]:
    """Return the table of the documentation."""
    lines = [
        "| Gbit/s | algorithm | ranks | planned | its buckets | DDP's default | one at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in shown:
        for i, world_size in enumerate(WORLD_SIZES):
            if world_size in (8, 16, 64, 256, 1024):
                lines.append(
                    f"| {each.gbit_per_s} | {each.algorithm} | {world_size} "
                    f"| {each.planned[i]:.1%} | {each.num_buckets[i]} "
                    f"| {each.default[i]:.1%} | {each.at_end[i]:.1%} |"
                )
    return lines


LEFT, RIGHT, TOP, BOTTOM = 80, 620, 100, 470  # of the plot, in pixels
COLOURS = ("#1a7f37", "#0969da", "#bc4c00")
DASHES = (
    ("planned for each point", ""),
    ("DDP's default buckets", "7 4"),
    ("one at the end", "2 4"),
)


def svg(shown: list[Curve]) -> str:
    """Return the picture."""
    lowest = math.floor(10 * min(min(each.at_end + each.default) for each in shown)) / 10

    def x(index: int) -> float:
        return LEFT + (RIGHT - LEFT) * index / (len(WORLD_SIZES) - 1)

    def y(efficiency: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (efficiency - lowest) / (1 - lowest)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="880" height="540" viewBox="0 0 880 540"',
        '     font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#1f2328" role="img"',
        '     aria-labelledby="title description">',
        '  <title id="title">Weak scaling of a GPT-2-large-sized model, computed</title>',
        '  <desc id="description">Efficiency over 8 to 1,024 ranks for three speeds of a node\'s '
        "link, with buckets planned for each point, DDP's default buckets, and one allreduce "
        "after backward. The numbers are in the table of docs/simulation.md.</desc>",
        '  <rect x="0.5" y="0.5" width="879" height="539" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
        '  <text x="24" y="36" font-size="17" font-weight="bold">'
        "Weak scaling of a GPT-2-large-sized model</text>",
        '  <text x="24" y="60" fill="#57606a">Hierarchical allreduces; computed '
        "from FLOP counts and link speeds, not measured</text>",
        '  <text x="24" y="88" font-size="12" fill="#57606a">efficiency</text>',
        f'  <text x="{(LEFT + RIGHT) / 2:g}" y="516" text-anchor="middle" font-size="12" '
        f'fill="#57606a">ranks ({RANKS_PER_NODE} a node)</text>',
    ]
    for tenth in range(round(lowest * 10), 11):
        at = y(tenth / 10)
        parts += [
            f'  <path d="M{LEFT},{at:.1f} H{RIGHT}" stroke="#d8dee4"/>',
            f'  <text x="{LEFT - 10}" y="{at + 5:.1f}" text-anchor="end">{tenth * 10} %</text>',
        ]
    for index, world_size in enumerate(WORLD_SIZES):
        parts.append(
            f'  <text x="{x(index):.1f}" y="{BOTTOM + 22}" text-anchor="middle">{world_size}</text>'
        )
    for each, colour in zip(shown, COLOURS, strict=True):
        lines = (each.planned, each.default, each.at_end)
        for efficiencies, (_, dash) in zip(lines, DASHES, strict=True):
            points = " ".join(f"{x(i):.1f},{y(e):.1f}" for i, e in enumerate(efficiencies))
            parts.append(f'  <polyline points="{points}" {_stroke(colour, dash)}/>')
    for row, (each, colour) in enumerate(zip(shown, COLOURS, strict=True)):
        parts += _legend(TOP + 40 + 26 * row, _stroke(colour, ""), f"{each.gbit_per_s} Gbit/s")
    for row, (name, dash) in enumerate(DASHES):
        parts += _legend(TOP + 160 + 26 * row, _stroke("#57606a", dash), name)
    parts += [
        f'  <text x="650" y="{TOP + 16}" font-size="12" fill="#57606a">link of a node</text>',
        f'  <text x="650" y="{TOP + 136}" font-size="12" fill="#57606a">allreduces</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _stroke(colour: str, dash: str) -> str:
    dashes = f'stroke-width="1.7" stroke-dasharray="{dash}"' if dash else 'stroke-width="2.6"'
    return f'fill="none" stroke="{colour}" {dashes}'


def _legend(y: int, stroke: str, name: str) -> list[str]:
    return [
        f'  <path d="M650,{y} H690" {stroke}/>',
        f'  <text x="700" y="{y + 5}">{name}</text>',
    ]


def main() -> None:
    """Print the table and write the picture."""
    computed = curves()
    print("\n".join(markdown(computed)))
    IMAGE.write_text(svg(computed[:-1]))


if __name__ == "__main__":
    main()
