"""Sections are ranges in a profile of the user's."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ddpopt._torch import names, runtime
from ddpopt.steps import sections
from tests.support.beside import compiled
from tests.support.models import MLP, WIDTH

CAP_MB = 0.03  # two layers a bucket
FORWARD = [f"section {k} forward" for k in range(3)]
BACKWARD = [f"section {k} backward" for k in range(3)]
WHOLE = ["section 0 forward", "section 0 backward"]

_MLP = functools.partial(MLP, bias=False)


class _AddsWeights(torch.nn.Module):
    """Two buckets that are complete at one place, as only a traced backward shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(WIDTH, 2 * WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weights[0] + self.weights[1])


def _step(module: torch.nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    ddp = DistributedDataParallel(module, bucket_cap_mb=CAP_MB)
    model = compiled(ddp, **options)
    return lambda: model(torch.ones(8, WIDTH)).sum().backward()


def _ranges(profiler: profile, path: Path) -> list[str]:
    """Return the ranges of ours in the file that `export_chrome_trace` writes, in their order."""
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    ranges = [event for event in events if str(event.get("name", "")).startswith("ddpopt: ")]
    assert {event["cat"] for event in ranges} <= {"user_annotation"}
    ranges.sort(key=lambda event: event["ts"])
    return [event["name"].split(" ", 2)[2] for event in ranges]  # as in `ddpopt: 0/0 section 1 ...`


@pytest.mark.quick("forward")
@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (_MLP, {"split": "forward"}, [*FORWARD, *reversed(BACKWARD)]),
        (_MLP, {"split": "backward"}, BACKWARD),
        (_MLP, {"enabled": False}, WHOLE),
        (_AddsWeights, {"split": "forward"}, WHOLE),
        (_AddsWeights, {"split": "backward"}, WHOLE),
    ],
    ids=["forward", "backward", "off", "left whole in forward", "left whole in backward"],
)
def test_a_profile_has_each_section_that_ran_once(
    one_rank: None,
    tmp_path: Path,
    module: Callable[[], torch.nn.Module],
    options: dict[str, Any],
    expected: list[str],
) -> None:
    """Ranges are in the order in which sections ran; steps before and after it leave none."""
    step = _step(module(), **options)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    step()
    assert _ranges(profiler, tmp_path / "trace.json") == expected


def test_without_a_profiler_nobody_is_notified_of_sections() -> None:
    assert sections.find_listener() is None
    with profile(activities=[ProfilerActivity.CPU]):
        assert sections.find_listener() is not None
    assert sections.find_listener() is None


def test_where_torch_has_moved_its_flag_sections_run_without_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The missing name of torch is no error in the middle of a step."""
    runtime._profiler_enabled.cache_clear()
    moved = names.PrivateName("torch._C._autograd", "_moved", names.Need.RECORD)
    monkeypatch.setattr(names, "PROFILER_ENABLED", moved)
    with profile(activities=[ProfilerActivity.CPU]):
        assert sections.find_listener() is None


def test_a_compiled_graph_is_found_behind_any_number_of_views() -> None:
    model = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager")
    output = model(torch.randn(2, 4))
    node = output.grad_fn
    for _ in range(10):
        output = output.view(2, 4).t().t()
    assert sections._find_node(output) is node
    assert sections._find_node(torch.randn(2, requires_grad=True).exp().view(2)) is None
