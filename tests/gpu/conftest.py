"""What people do with a GPU. The same bodies run on the CPU, unless TEST_DEVICE is cuda.

`python -m tests.gpu` runs all, line by line. Without TEST_DEVICE, as in `make test-all`, the first
row of each test runs, but those of Inductor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.device import DEVICE

HERE = Path(__file__).parent
_ON_INDUCTOR = (
    "::test_modes_with_cuda_graphs_cut_forward",
    "::test_a_first_step_has_a_cost_with_an_empty_and_a_filled_cache",
)
Run = Callable[..., list[Any]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    others = []
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker("gpu")
        item.add_marker("slow")
        test = item.nodeid.partition("[")[0]
        is_long = test in seen or test.endswith(_ON_INDUCTOR)
        if is_long and "TEST_DEVICE" not in os.environ:
            others.append(item)
        seen.add(test)
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture
def device() -> str:
    """The type of the device, cpu or cuda."""
    return DEVICE.type


@pytest.fixture
def inner_backend(device: str) -> str:
    """The backend that compiles sections: on the CPU, one that takes less time than Inductor."""
    return "inductor" if device == "cuda" else "aot_eager"


@pytest.fixture(params=["two_ranks", "one_rank"])
def run_on_ranks(request: pytest.FixtureRequest) -> Run:
    """A function that calls `function(rank, ...)` on all ranks, and returns their results.

    Two have gloo, since NCCL refuses two on one device; one has the device's own backend.
    """
    if request.param == "two_ranks":
        two: Run = request.getfixturevalue("ranks").run
        return two
    request.getfixturevalue("one_rank")
    return lambda function, *arguments: [function(0, *arguments)]
