"""The body of a test on ranks: what it gets, and that it can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import on_ranks as module
from tests.support.on_ranks import gather, on_ranks
from tests.support.ranks import RankError, Ranks


@on_ranks(2)
@pytest.mark.parametrize("row", ["a", "b"])
def test_a_body_has_its_rank_rows_and_fixtures(rank: int, row: str, tmp_path: Path) -> None:
    (tmp_path / f"{row}{rank}").touch()
    names = gather(sorted(path.name for path in tmp_path.iterdir()))
    assert any(names == [f"{row}0", f"{row}1"] for names in names)


@on_ranks()
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_group_has_as_many_ranks_as_the_test_asks_for(rank: int, num_ranks: int) -> None:
    assert dist.get_world_size() == num_ranks
    assert gather(rank) == list(range(num_ranks))


@on_ranks(2)
def _fails_on_rank_1(rank: int, how: str) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))  # waits for rank 1
    elif how == "assert":
        raise AssertionError("rank 1 is wrong")
    else:
        with pytest.raises(ValueError, match="nobody raises it"):
            pass


@pytest.mark.parametrize("how", ["assert", "raises"])
def test_a_body_that_fails_on_one_rank_fails(make_ranks: Any, how: str) -> None:
    workers: Ranks = make_ranks(2)
    with pytest.raises(RankError, match=r"rank 1:(.|\n)*(rank 1 is wrong|DID NOT RAISE)"):
        workers.run(module._run_body, __name__, "_fails_on_rank_1", {"how": how})
