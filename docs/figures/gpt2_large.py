"""Computes how a GPT-2-large-sized model scales to 1,024 ranks, for docs/simulation.md.

Run `python docs/figures/gpt2_large.py` in the repository: it writes
docs/images/scaling-gpt2-large.png, which needs matplotlib. Nothing here is measured; the constants
are the assumptions.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ddpopt.planning.costs import Gradient, Network, Profile
from ddpopt.planning.merging import buckets_of_caps
from ddpopt.planning.plan import DDP_DEFAULT_CAPS, BucketPlan, plan_buckets
from ddpopt.planning.simulation import simulate

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

IMAGE = Path(__file__).parents[1] / "images" / "scaling-gpt2-large.png"


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
    planned: tuple[float, ...]
    default: tuple[float, ...]
    at_end: tuple[float, ...]


def curve(gbit_per_s: int) -> Curve:
    """Return how the model scales with a plan for each point, DDP's buckets, and one bucket."""
    computation = profile()
    network = Network(
        latency_s=LATENCY_S,
        bytes_per_s=gbit_per_s * 1e9 / 8,
        algorithm="hierarchical",
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
        planned=tuple(efficiency(plan, plan.sizes) for plan in plans),
        default=tuple(efficiency(plan, default) for plan in plans),
        at_end=tuple(efficiency(plan, (len(computation.gradients),)) for plan in plans),
    )


COLOURS = ("#1a7f37", "#0969da", "#bc4c00")
STYLES = {
    "planned for each point": "solid",
    "DDP's default buckets": "dashed",
    "one at the end": "dotted",
}


def draw(shown: list[Curve], path: Path) -> None:
    """Draw efficiency over ranks; a colour for each speed, a style for each kind of buckets."""
    import matplotlib as mpl  # noqa: PLC0415  # optional

    mpl.use("Agg")
    from matplotlib import pyplot, ticker  # noqa: PLC0415
    from matplotlib.lines import Line2D  # noqa: PLC0415

    figure, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for each, colour in zip(shown, COLOURS, strict=True):
        lines = (each.planned, each.default, each.at_end)
        for efficiencies, style in zip(lines, STYLES.values(), strict=True):
            panel.plot(WORLD_SIZES, efficiencies, color=colour, linestyle=style)
    panel.set_xscale("log", base=2)
    panel.set_xticks(WORLD_SIZES, list(map(str, WORLD_SIZES)))
    panel.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
    panel.grid(axis="y", color="#d8dee4")
    panel.set_xlabel(f"ranks ({RANKS_PER_NODE} a node)")
    panel.set_ylabel("efficiency")
    panel.set_title("Weak scaling of a GPT-2-large-sized model: computed, not measured", loc="left")
    speeds = zip(shown, COLOURS, strict=True)
    handles = [Line2D([], [], color=c, label=f"{s.gbit_per_s} Gbit/s a node") for s, c in speeds]
    handles += [Line2D([], [], color="#57606a", linestyle=s, label=k) for k, s in STYLES.items()]
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Write the picture."""
    draw([curve(speed) for speed in GBIT_PER_S], IMAGE)


if __name__ == "__main__":
    main()
