"""Rank 0 logs plans whole; another rank logs what differs, in the forward after its backward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import _logs, _torch
from ddpopt.errors import PeerError
from ddpopt.ranks.stores import Board
from tests.support.models import MLP, batches
from tests.support.ranks import Ranks


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _said(
    rank: int,
    options: Sequence[dict[str, Any]],
    logging_ranks: Sequence[int] = (0, 1),
    is_warmed_up: bool = False,
    num_steps: int = 2,
) -> list[str]:
    """Return what a rank logs at INFO in some steps, with options of its own."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.0316)
    own = {"inner": "aot_eager", **options[rank]}
    compiled = torch.compile(ddp, backend="ddpopt", options=own)
    logger, collector = logging.getLogger(_torch.LOG_NAME), _Collector()
    level = logging.INFO if rank in logging_ranks else logging.WARNING
    logger.addHandler(collector)
    try:
        with mock.patch.object(logger, "level", level):
            logger.manager._clear_cache()
            assert _logs.is_on() == (rank in logging_ranks)
            inputs = batches(rank, [(2, 64)] * num_steps)
            if is_warmed_up:
                ddpopt.warmup(compiled, (inputs[0],), lambda output: output.sum())
            for x in inputs:
                compiled(x).sum().backward()
    finally:
        logger.removeHandler(collector)
        logger.manager._clear_cache()
    return collector.said


def test_rank_0_logs_plans_whole_and_the_others_that_theirs_are_equal(ranks: Ranks) -> None:
    """Once each, whether the first step or `warmup` compiles."""
    for is_warmed_up in (False, True):
        first, second = ranks.run(_said, [{}, {}], (0, 1), is_warmed_up)
        (whole,) = (said for said in first if "for 3 DDP buckets" in said)
        assert "layers.5.weight" in whole
        assert second == ["1 graph is as on rank 0"]


def test_another_rank_logs_the_lines_that_differ(ranks: Ranks) -> None:
    """Here the inner compiler; buckets and sections are equal."""
    options = [{"split": "forward", "inner": inner} for inner in ("aot_eager", "eager")]
    _, second = ranks.run(_said, options)
    (said,) = second
    assert "is not as on rank 0" in said
    before, after = said.splitlines()[1:]
    assert before.startswith("-graph ")
    assert after == "+" + before[1:].replace("aot_eager", "eager")


@pytest.mark.parametrize("logging_ranks", [[1], [0]])
def test_with_logs_on_one_rank_that_one_logs_its_plan_whole(
    ranks: Ranks, logging_ranks: list[int]
) -> None:
    """Nothing is looked for where rank 0 has left nothing, and nobody else says anything."""
    said = ranks.run(_said, [{}, {}], logging_ranks)
    (own,) = (text for text in said[logging_ranks[0]] if "for 3 DDP buckets" in text)
    assert "layers.5.weight" in own
    assert said[1 - logging_ranks[0]] == []


def _said_without_a_store(rank: int) -> list[str]:
    with mock.patch.object(Board, "get", side_effect=PeerError("the store has gone")):
        return _said(rank, [{}, {}])


def test_without_a_store_all_ranks_log_plans_whole(ranks: Ranks) -> None:
    """And say why."""
    _, second = ranks.run(_said_without_a_store)
    assert any("the store has gone" in said for said in second)
    assert any("for 3 DDP buckets" in said for said in second)
