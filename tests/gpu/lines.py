"""The table of lines: what is proved, by which tests, and in which order where time is short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.gpu.test_times import MODELS
from tests.support.device import DEVICE
from tests.system.scenarios.rows import names_of

_RIGHT, _TOOLS, _OVERLAP, _COST = "Right", "Tools", "Overlap", "Cost"
_HERE = "tests/gpu"
_TESTS = {
    "training": "test_features.py::test_training_features_equal_eager_ddp",
    "attention": "test_features.py::test_attention_kernels_equal_eager_ddp",
    "algorithms": "test_features.py::test_ranks_are_equal_after_each_algorithm",
    "modes": "test_features.py::test_modes_with_cuda_graphs_cut_forward",
    "DataParallel": "test_features.py::test_two_replicas_have_the_gradients_of_the_whole_batch",
    "tools": "test_tools.py::test_tools_work_on_the_device",
}
_ROWS = "tests/system/test_training.py::test_training_equals_eager_ddp"
_SHARDS = {"aot_eager": 3, "inductor": 2}  # which run beside each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Some tests, as pytest is told which.

    A line is killed after `limit_s`, and not begun with less than `least_s` left. One that
    `is_alone` runs beside no other, since its figures are times.
    """

    name: str
    part: str
    shows: str
    select: Sequence[str]
    limit_s: float = 200.0
    least_s: float = 15.0
    is_alone: bool = False


def all_lines() -> list[Line]:
    """Return the lines in the order of their worth."""
    return [*_right(), *_tools(), *_times()]


def _right() -> Iterator[Line]:
    on_cpu = [] if DEVICE.type == "cuda" else ["-k", "not inductor"]
    yield Line(
        name="gates",
        part=_RIGHT,
        shows="Gates under every way to run a backward, on one rank",
        select=["tests/split/test_gates.py"],
        limit_s=240,
    )
    yield Line(
        name="order of events",
        part=_RIGHT,
        shows="A bucket's allreduce is launched before the next section's backward",
        select=["tests/split/test_overlap.py", *on_cpu],
        limit_s=240,
    )
    for inner, num_shards in _SHARDS.items():
        for shard in range(num_shards):
            for split in ("auto", "forward"):
                rows = names_of(inner, split)[shard::num_shards]
                yield Line(
                    name=f"rows, {inner}, {split}, {shard + 1} of {num_shards}",
                    part=_RIGHT,
                    shows="Models, modes and loops of the compatibility page train as eager DDP "
                    "does, on two ranks by gloo",
                    select=[f"{_ROWS}[{row}-{inner}-{split}]" for row in rows],
                    limit_s=300 if DEVICE.type == "cuda" else 900,  # Inductor's C++ takes long
                )
    for group in ("two ranks", "one rank"):
        yield _here(
            "training",
            group,
            "GradScaler and float16, fused optimizers, an optimizer in backward, offloaded "
            "tensors, buckets that pass late",
        )
        yield _here(
            "attention",
            group,
            "FlexAttention with gradients, and each kernel of scaled_dot_product_attention",
        )
        yield _here(
            "algorithms",
            group,
            "Each communication algorithm trains, on streams and events of its own",
        )
    yield _here("modes", "", "CUDA graphs and autotuning, with the split that the pages say")
    yield _here("DataParallel", "", "Two replicas on one device have the gradients of one module")


def _tools() -> Iterator[Line]:
    shows = "record, verify, warmup, calibrate, buckets='auto' and plan on the device"
    for group in ("two ranks", "one rank"):
        yield _here("tools", group, shows)


def _times() -> Iterator[Line]:
    def alone(name: str, part: str, shows: str, test: str, model: str = "") -> Line:
        return Line(
            name=f"{name}, {model}" if model else name,
            part=part,
            shows=shows,
            select=[f"{_HERE}/test_times.py::{test}" + (f"[{model}]" if model else "")],
            limit_s=240,
            least_s=45,
            is_alone=True,
        )

    yield alone(
        "overlap in a profile",
        _OVERLAP,
        "In a profile of steps, communication runs beside computation, and unsplit less of it does",
        "test_more_runs_beside_communication_than_unsplit",
    )
    first, *others = (
        alone(
            "peers",
            _OVERLAP,
            "All peers on one emulated network: iteration, backward, exposed communication, cost",
            "test_peers_compute_the_same_losses",
            model,
        )
        for model in MODELS
    )
    yield first
    yield alone(
        "compile time",
        _COST,
        "The first step with an empty cache and with a filled one",
        "test_a_first_step_has_a_cost_with_an_empty_and_a_filled_cache",
        MODELS[0],
    )
    yield from others


def _here(name: str, group: str, shows: str) -> Line:
    """Return the line of one of `_TESTS`, on one of the groups of the fixture `run_on_ranks`."""
    rows = ["-k", group.replace(" ", "_")] if group else []
    return Line(
        name=f"{name}, {group or 'one rank'}",
        part=_TOOLS if name == "tools" else _RIGHT,
        shows=shows,
        select=[f"{_HERE}/{_TESTS[name]}", *rows],
    )
