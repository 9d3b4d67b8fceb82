"""The table of lines: what is proved, by what, and in which order where time is short.

Each line of the GPU has its twin on the CPU, with smaller models and compilers that take less time;
where something is a GPU's alone, the twin runs what is nearest, and says what that stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

RIGHT, TOOLS, OVERLAP, COST = "Right", "Tools", "Overlap", "Cost"
_GATES = "tests/split/backward/test_gates.py"
_ORDER = "tests/split/test_overlap.py"
_GROUPS = {2: "two ranks", 1: "one rank"}  # by gloo, and by NCCL; see `features.in_ranks`
# Shards of rows run beside each other.
_NUM_SHARDS = 3
_NUM_INDUCTOR_SHARDS = 2
_RATES_GBIT = (100, 400)
_NUM_RANKS = 64
_MODELS = ("gpt2-small", "gpt2-medium", "bert-base", "resnet50-imagenet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One of them.

    `run` is `module:function`, called with findings, the device and `arguments`. It is killed after
    `limit_s`, and not begun with less than `least_s` left of the budget. One that `is_alone` runs
    beside no other, since its figures are times. `stands_for` says what a twin has in place of what
    is a GPU's alone.
    """

    name: str
    part: str
    shows: str
    run: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 150.0
    least_s: float = 15.0
    is_alone: bool = False
    stands_for: str = ""


def lines_for(device: str, *, is_all: bool) -> list[Line]:
    """Return the lines of a device in the order of their worth; not all are for CI."""
    if device == "cuda":
        own = {"inner": "inductor", "is_cuda": True}
        return [*_right(**own), *_tools(**own), *_times_cuda()]
    if is_all:
        own = {"inner": "aot_eager", "is_cuda": False}
        return [*_right(**own), *_tools(**own), *_times_cpu()]
    return list(_few())


# ---- right ------------------------------------------------------------------------------------


def _right(inner: str, *, is_cuda: bool) -> Iterator[Line]:
    yield _tests(
        "gates",
        "Gates under every way to run a backward, one rank by NCCL",
        [_GATES],
        "" if is_cuda else "one rank by gloo in place of NCCL",
    )
    yield _tests(
        "order of events",
        "A bucket's allreduce is launched before the next section's backward",
        [_ORDER] if is_cuda else [_ORDER, "-k", "not inductor"],
        "" if is_cuda else "aot_eager in place of Inductor with Triton",
    )
    for shard in range(_NUM_SHARDS):
        for split in ("auto", "forward"):
            yield _rows("aot_eager", split, shard, _NUM_SHARDS)
    for shard in range(_NUM_INDUCTOR_SHARDS):
        for split in ("auto", "forward"):
            stands_for = "" if is_cuda else "Inductor's C++ in place of Triton"
            yield _rows("inductor", split, shard, _NUM_INDUCTOR_SHARDS, stands_for)
    for num_ranks in (2, 1):
        yield from _features(inner, num_ranks, is_cuda=is_cuda)


def _tests(name: str, shows: str, select: list[str], stands_for: str) -> Line:
    return Line(
        name=name,
        part=RIGHT,
        shows=shows,
        run="benchmarks.gpu.testing:run_tests",
        arguments={"select": select},
        limit_s=240,
        stands_for=stands_for,
    )


def _rows(inner: str, split: str, shard: int, num_shards: int, stands_for: str = "") -> Line:
    return Line(
        name=f"rows, {inner}, {split}, {shard + 1} of {num_shards}",
        part=RIGHT,
        shows="Models, modes and loops of the compatibility page train as eager DDP does, on two "
        "ranks by gloo",
        run="benchmarks.gpu.testing:run_rows",
        arguments={"inner": inner, "split": split, "part": shard, "num_parts": num_shards},
        limit_s=900 if stands_for else 300,  # Inductor's C++ takes its time
        stands_for=stands_for,
    )


def _features(inner: str, num_ranks: int, *, is_cuda: bool) -> Iterator[Line]:
    group = _GROUPS[num_ranks]
    in_place = ["aot_eager in place of Inductor with Triton"]
    if num_ranks == 1:
        in_place.append("gloo in place of NCCL")

    def line(name: str, shows: str, kind: str, stands_for: list[str], **more: Any) -> Line:
        return Line(
            name=f"{name}, {group}",
            part=RIGHT,
            shows=shows,
            run="benchmarks.gpu.features:run_features",
            arguments={"kind": kind, "num_ranks": num_ranks, "inner": inner, **more},
            limit_s=200,
            stands_for="" if is_cuda else "; ".join(stands_for),
        )

    yield line(
        "training",
        "Autocast, GradScaler, channels_last, fused optimizers, an optimizer in backward, "
        "offloaded tensors, buckets that pass late",
        "TRAINING",
        [*in_place, "memory that is not pinned", "a thread that sleeps in place of a side stream"],
    )
    yield line(
        "attention",
        "FlexAttention with gradients, and each kernel of scaled_dot_product_attention",
        "ATTENTION",
        [*in_place, "FlexAttention's forward alone"],
    )
    yield line(
        "algorithms",
        "Each communication algorithm trains, on streams and events of its own",
        "ALGORITHMS",
        [*in_place, "no streams"],
        splits=["backward"],
    )
    if num_ranks == 1:
        yield line(
            "modes",
            "CUDA graphs and autotuning, with the split that the pages say",
            "MODES",
            ["Inductor's C++, which has no CUDA graphs", "gloo in place of NCCL"],
            splits=["auto"],
        )
        yield line(
            "DataParallel",
            "Two replicas on one device have the gradients of one module",
            "REPLICAS",
            [*in_place],
            splits=["auto"],
        )


# ---- tools ------------------------------------------------------------------------------------


def _tools(inner: str, *, is_cuda: bool) -> Iterator[Line]:
    for num_ranks in (2, 1):
        in_place = "aot_eager in place of Inductor"
        if num_ranks == 1:
            in_place += "; gloo in place of NCCL"
        yield Line(
            name=f"tools, {_GROUPS[num_ranks]}",
            part=TOOLS,
            shows="record, verify, warmup, calibrate, buckets='auto' and plan on the device",
            run="benchmarks.gpu.tools:run_tools",
            arguments={"num_ranks": num_ranks, "inner": inner},
            stands_for="" if is_cuda else in_place,
        )


# ---- overlap and cost -------------------------------------------------------------------------

_SEEN = "In a profile of steps, communication runs beside computation, and unsplit less of it does"
_PEERS = "All peers on one emulated network: iteration, backward, exposed communication, cost"


def _profile(**arguments: Any) -> Line:
    return Line(
        name="overlap in a profile",
        part=OVERLAP,
        shows=_SEEN,
        run="benchmarks.gpu.overlap:see_overlap",
        arguments={"num_ranks": _NUM_RANKS, **arguments},
        limit_s=200,
        is_alone=True,
    )


def _model(model: str, **arguments: Any) -> Line:
    return Line(
        name=f"peers, {model}",
        part=OVERLAP,
        shows=_PEERS,
        run="benchmarks.gpu.overlap:measure_model",
        arguments={"model": model, "num_ranks": _NUM_RANKS, **arguments},
        limit_s=240,
        least_s=45,
        is_alone=True,
    )


def _compiling(model: str, peers: list[str], cap_mb: float) -> Line:
    return Line(
        name=f"compile time, {model}",
        part=COST,
        shows="The first step with an empty cache and with a filled one",
        run="benchmarks.gpu.cost:measure_compiling",
        arguments={"model": model, "peers": peers, "cap_mb": cap_mb},
        limit_s=240,
        least_s=45,
        is_alone=True,
    )


def _times_cuda() -> Iterator[Line]:
    yield _profile(model="gpt2-small", inner="inductor", cap_mb=None, gbit=100)
    first, *others = (
        _model(model, inner="inductor", rates_gbit=_RATES_GBIT, rounds=5) for model in _MODELS
    )
    yield first
    yield _compiling("gpt2-small", ["nosplit", "intree", "forward", "backward"], 25.0)
    yield from others


def _times_cpu() -> Iterator[Line]:
    yield _profile(model="tiny", inner="aot_eager", cap_mb=1.0, gbit=5)
    yield _model("tiny", inner="aot_eager", rates_gbit=[0.5, 2], rounds=3, cap_mb=1.0)
    yield _compiling("tiny", ["nosplit", "backward"], 1.0)


# ---- those for CI -----------------------------------------------------------------------------


def _few() -> Iterator[Line]:
    """Yield a line of each program, with few rows."""
    select = [_GATES, "-k", "retained_graph_runs_backward_again"]
    yield _tests("gates", "Gates under two ways to run a backward", select, "one rank by gloo")
    yield _rows("aot_eager", "auto", 0, 40)
    by_name = {line.name: line for line in _right("aot_eager", is_cuda=False)}
    for name, kind in (("training", "FEW"), ("algorithms", "FEW_ALGORITHMS")):
        line = by_name[f"{name}, two ranks"]
        arguments = {**line.arguments, "kind": kind, "splits": ["backward"]}
        yield dataclasses.replace(line, arguments=arguments)
    yield next(_tools("aot_eager", is_cuda=False))
    yield _profile(model="tiny", inner="aot_eager", cap_mb=1.0, gbit=5)
    peers = ["nosplit", "backward"]
    yield _model("tiny", inner="aot_eager", rates_gbit=[2], rounds=1, cap_mb=1.0, peers=peers)
