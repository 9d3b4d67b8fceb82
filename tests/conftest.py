"""Fixtures: a process group of one in this process, and two, four or eight further processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import ddpopt.backend
from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # DDP has to go before its group: see docs/faq.md
    dist.destroy_process_group()


@pytest.fixture
def one_rank(_group: None) -> Iterator[None]:
    """A gloo group of one rank, and a Dynamo that has compiled nothing yet."""
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
    workers = Ranks(4)
    yield workers
    workers.stop()


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    """Eight processes with a gloo group, for tests of up to eight ranks."""
    workers = Ranks(8)
    yield workers
    workers.stop()
