r"""Records a training step without ddpopt's cuts and one with them, and draws both.

    sudo python docs/figures/step.py

Two ranks in network namespaces, one core and one thread each, train a model of the benchmarks over
a link of 1 Gbit/s, compiled with `options={"enabled": False}` and then with ddpopt as it comes.
Rank 0's traces (build/step/*/rank0.json) become docs/images/step.png; `--draw` draws those that are
there. Needs root, `ip`, `tc` and matplotlib. The machine must have nothing else to do.

Each way's page is saved beside its traces. docs/images/page.png is that of tuned buckets:

    sudo python docs/figures/step.py --buckets auto --folder build/page --image build/page/step.png
    chromium --headless --hide-scrollbars --window-size=1400,1240 --virtual-time-budget=5000 \
        --screenshot=docs/images/page.png "file://$PWD/build/page/with/page.html#select=bucket-7"
"""
# test: skip, it needs root and a quiet machine; tests/system/test_figures.py draws small recordings

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "docs" / "images" / "step.png"
WAYS: dict[str, dict[str, Any]] = {"without": {"enabled": False}, "with": {}}
TITLES = {
    "without": "torch.compile, the backward graph is one piece",
    "with": 'torch.compile(ddp, backend="ddpopt")',
}
NUM_WARM_STEPS = 28  # buckets="auto" looks for buckets, then compares them, for up to 25
NUM_STEPS = 9

FORWARD, BACKWARD, HIDDEN, EXPOSED = "#8c959f", "#57606a", "#0969da", "#cf222e"


# ---- what a trace tells -----------------------------------------------------------------------


class Span(NamedTuple):
    """From when to when, in ms from the start of forward."""

    start: float
    stop: float

    @property
    def length(self) -> float:
        """How long."""
        return self.stop - self.start


class Step(NamedTuple):
    """One step of a trace. `sections` are those of backward; `ready` has the last gradient."""

    forward: Span
    sections: tuple[Span, ...]
    ready: float
    allreduces: tuple[Span, ...]

    @property
    def end(self) -> float:
        """When the last allreduce has finished, and the optimizer may begin."""
        return max(span.stop for span in self.allreduces)

    @property
    def exposed(self) -> float:
        """For how long communication ran when no gradient was left to be computed."""
        return max(0.0, self.end - self.ready)


def median_step(path: Path) -> Step:
    """Return the step of a trace of `ddpopt.record` that is the median by its length."""
    events = json.loads(path.read_text())["traceEvents"]
    starts = [e["name"].rpartition(" ")[2] for e in events if e["name"].startswith("forward, ")]
    steps = sorted((_read(events, int(number)) for number in starts), key=lambda step: step.end)
    return steps[len(steps) // 2]


def _read(events: list[dict[str, Any]], number: int) -> Step:
    ranges = [event for event in events if event["ph"] == "X"]
    (forward,) = (e for e in ranges if e["name"] == f"forward, step {number}")
    (backward,) = (e for e in ranges if e["name"] == f"backward, step {number}")
    origin = forward["ts"]

    def span(event: dict[str, Any]) -> Span:
        start = (event["ts"] - origin) / 1e3
        return Span(start, start + event["dur"] / 1e3)

    within = span(backward)
    arrivals = [e for e in events if e["ph"] == "i" and e["args"]["step"] == number]
    sections = [e for e in ranges if e["name"].endswith(" backward")]
    allreduces = _allreduces(events, number, origin)
    if not allreduces:
        raise ValueError(f"step {number} has no allreduces; the trace's notes say why")
    return Step(
        forward=span(forward),
        sections=tuple(s for s in map(span, sections) if within.start <= s.start < within.stop),
        ready=max((e["ts"] - origin) / 1e3 for e in arrivals if e["name"].endswith(" ready")),
        allreduces=allreduces,
    )


def _allreduces(events: list[dict[str, Any]], number: int, origin: float) -> tuple[Span, ...]:
    """Return a step's allreduces; one that was launched behind another begins when that ends."""
    ends: dict[int, list[float]] = {}
    for event in events:
        if event["ph"] == "e":
            ends.setdefault(event["id"], []).append(event["ts"])
    spans: list[Span] = []
    for event in events:
        if event["ph"] == "b" and event["args"]["step"] == number:
            stop = min(ts for ts in ends[event["id"]] if ts >= event["ts"])
            start = max([(event["ts"] - origin) / 1e3, *(span.stop for span in spans[-1:])])
            spans.append(Span(start, (stop - origin) / 1e3))
    return tuple(spans)


# ---- the picture ------------------------------------------------------------------------------


def draw(steps: dict[str, Step], path: Path) -> None:
    """Draw a panel for each step on one axis of time: computation above, allreduces below."""
    import matplotlib as mpl  # noqa: PLC0415  # optional

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure, panels = pyplot.subplots(len(steps), 1, sharex=True, figsize=(9, 4.6), squeeze=False)
    for panel, (name, step) in zip(panels[:, 0], steps.items(), strict=True):
        _draw_step(panel, TITLES[name], step)
    panels[0, 0].set_xlim(0, 1.04 * max(step.end for step in steps.values()))
    panels[-1, 0].set_xlabel("ms from the start of forward, optimizer left out")
    kinds = {
        "forward": FORWARD,
        "backward, by sections": BACKWARD,
        "allreduce behind computation": HIDDEN,
        "allreduce exposed": EXPOSED,
    }
    patches = [Patch(color=colour, label=label) for label, colour in kinds.items()]
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_step(panel: Any, title: str, step: Step) -> None:
    pieces = step.sections or (Span(step.forward.stop, step.ready),)
    panel.broken_barh([_bar(step.forward)], (1.1, 0.8), color=FORWARD)
    # Lines between sections are white edges; what autograd does between them belongs to backward.
    panel.broken_barh([_bar(Span(step.forward.stop, step.ready))], (1.1, 0.8), color=BACKWARD)
    for piece in pieces[:-1]:
        panel.vlines(piece.stop, 1.1, 1.9, color="white", linewidth=1.2)
    for each in step.allreduces:
        hidden = Span(each.start, max(each.start, min(each.stop, step.ready)))
        exposed = Span(min(each.stop, max(each.start, step.ready)), each.stop)
        for part, colour in ((hidden, HIDDEN), (exposed, EXPOSED)):
            panel.broken_barh(
                [_bar(part)], (0.1, 0.8), color=colour, edgecolor="white", linewidth=0.8
            )
    panel.vlines(step.ready, 0, 2, color=EXPOSED, linewidth=1, linestyles="dashed")
    panel.set_yticks([1.5, 0.5], ["computation", "allreduces"])
    panel.set_ylim(0, 2)
    panel.set_title(
        f"{title}: {step.end:.0f} ms, of which {step.exposed:.0f} ms of communication are exposed",
        fontsize=10,
        loc="left",
    )
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _bar(span: Span) -> tuple[float, float]:
    return (span.start, span.length)


# ---- the recordings ---------------------------------------------------------------------------


def record_all(args: argparse.Namespace) -> None:
    """Start two ranks for each way of compiling, one way after the other."""
    from benchmarks.harness.cluster import open_cluster, why_not_emulated  # noqa: PLC0415

    with open_cluster(2) as cluster:
        if not cluster.is_shaped:
            sys.exit(f"no network is emulated: {why_not_emulated()}")
        cluster.set_rate(args.rate)
        for way in WAYS:
            print(f"recording {way} ddpopt's cuts", flush=True)
            command = [sys.executable, __file__, "--way", way, "--folder", str(args.folder)]
            command += ["--model", args.model, "--buckets", args.buckets]
            if any(cluster.run(command)):
                sys.exit(f"a rank failed {way} ddpopt's cuts")


def record_one(args: argparse.Namespace) -> None:
    """Be one rank: train the model compiled in one way, and record the last steps."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    import ddpopt  # noqa: PLC0415
    from benchmarks.harness.models import find_model  # noqa: PLC0415

    torch.manual_seed(0)
    model = find_model(args.model)
    ddp = DistributedDataParallel(model.build())
    options = WAYS[args.way] or {"buckets": args.buckets}
    compiled = torch.compile(ddp, backend="ddpopt", options=options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    batch = model.batch()

    def step() -> None:
        dist.barrier()
        model.loss(compiled(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(NUM_WARM_STEPS):
        step()
    with ddpopt.record(ddp, folder=args.folder / args.way) as recording:
        for _ in range(NUM_STEPS):
            step()
    if dist.get_rank() == 0:
        print(recording, flush=True)
        ddpopt.explain(ddp).save(args.folder / args.way / "page.html")


def main(arguments: list[str] | None = None) -> None:
    """Record, draw, and print what the picture shows."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", default="gpt70", help="see `python -m benchmarks.harness.models`")
    add("--rate", default="1gbit", help="of the link, as tc has it")
    add("--buckets", default="ddp", choices=["ddp", "auto"], help="of the step with ddpopt")
    add("--folder", type=Path, default=ROOT / "build" / "step", help="of the traces")
    add("--image", type=Path, default=IMAGE)
    add("--draw", action="store_true", help="draw the traces that are there")
    add("--way", choices=list(WAYS), help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))  # for the benchmarks' networks and models
    if args.way:
        import torch.distributed as dist  # noqa: PLC0415

        dist.init_process_group("gloo")
        record_one(args)
        gc.collect()  # DDP has to go before its group: see docs/faq.md
        dist.destroy_process_group()
        return
    if not args.draw:
        record_all(args)
    steps = {way: median_step(args.folder / way / "rank0.json") for way in WAYS}
    draw(steps, args.image)
    for way, step in steps.items():
        print(f"{way}: {step.end:.0f} ms, {step.exposed:.0f} ms exposed")


if __name__ == "__main__":
    main()
