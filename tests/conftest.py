"""Fixtures: a process group of one in this process, and two, four or eight further processes.

Also the choice of a set of tests; `tests/support/sets.py` has the rule.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist

import ddpopt.backend
from tests.support.device import ONE_RANK_BACKEND, compute_exactly
from tests.support.ranks import MakeRanks, Ranks
from tests.support.registration import is_installed
from tests.support.sets import ALL, NIGHTLY, QUICK, REST, place_of, set_of
from tests.support.speed import speed_up_compiles


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--set", choices=[ALL, QUICK, REST, NIGHTLY], default=ALL, help="see CONTRIBUTING.md"
    )


# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("ddpopt", deadline=None)
hypothesis.settings.load_profile("ddpopt")


def pytest_configure(config: pytest.Config) -> None:
    speed_up_compiles()
    compute_exactly()
    # On a hit AOTAutograd's cache returns a backward that may overwrite what it saved, whatever
    # `retain_graph` says (torch 2.13); so no test may find what another session compiled.
    folder = tempfile.TemporaryDirectory(prefix="ddpopt-inductor-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
    config.add_cleanup(folder.cleanup)


@pytest.hookimpl(tryfirst=True)  # before -k, so that a row is the first one whatever is asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--set")
    if chosen == ALL:
        return
    wanted = set(set_of(chosen, items))
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = [item for item in items if item in wanted]
    items.sort(key=place_of)


def pytest_collection_finish() -> None:
    gc.freeze()  # all files of tests are imported: no collection need look through these


@pytest.fixture(scope="session")
def _group() -> Iterator[None]:
    dist.init_process_group(ONE_RANK_BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()


@pytest.fixture
def one_rank(_group: None) -> Iterator[None]:
    """A group of one rank, and a Dynamo that has compiled nothing yet."""
    if not is_installed():  # the test before left it so
        ddpopt.backend.install()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes with a gloo group; see ranks.py."""
    workers = Ranks()
    yield workers
    workers.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes with a gloo group, for tests of up to four ranks."""
    workers = Ranks(4, is_forked=True)
    yield workers
    workers.stop()


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    """Eight processes with a gloo group, for tests of up to eight ranks."""
    workers = Ranks(8, is_forked=True)
    yield workers
    workers.stop()


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """A function that returns so many processes with a gloo group, for `on_ranks`."""
    made: dict[int, Ranks] = {}
    yield lambda num_ranks: made.setdefault(num_ranks, Ranks(num_ranks, is_forked=True))
    for workers in made.values():
        workers.stop()


@pytest.fixture
def make_ranks() -> Iterator[MakeRanks]:
    """A function that starts ranks for one test, which may kill them or leave them in any state."""
    made: list[Ranks] = []

    def make(num_ranks: int = 2) -> Ranks:
        made.append(Ranks(num_ranks, is_forked=True))
        return made[-1]

    yield make
    for workers in made:
        workers.stop()
