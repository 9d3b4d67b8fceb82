"""A board in a store that answers, does not answer, or fails."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.errors import PeerError
from ddpopt.ranks.stores import Board, next_key
from tests.support.hanging import LIMIT_S, hanging_store


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _board(limit_s: float = LIMIT_S) -> Board:
    return Board(_group(), "testing", "test/board", limit_s)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ddpopt store"]


@pytest.mark.usefixtures("one_rank")
def test_what_is_put_on_a_board_is_there() -> None:
    """Also of one that is made again under the same key."""
    board = _board()
    assert board.words() == [""]
    board.tell("here")
    board.put("note", "x")
    assert board.get("note", "other") == ["x", ""]
    assert [board.count("number") for _ in range(2)] == [1, 2]
    assert [board.put_first("answer", text) for text in ("yes", "no", "")] == ["yes"] * 3
    assert _board().words() == ["here"]
    assert not _threads()


@pytest.mark.usefixtures("one_rank")
def test_no_two_boards_have_a_key() -> None:
    """Whatever their name."""
    keys = [next_key(_group(), name) for name in ("a", "a", "b")]
    assert len(set(keys)) == 3


@pytest.mark.usefixtures("one_rank")
def test_the_connection_is_the_boards_own() -> None:
    """So that the group's store ends with its group, and other calls do not wait for it."""
    board = _board()
    assert board._ask(id) != id(_torch.store_of(_group()))
    assert board._ask(id) == board._ask(id)
    assert not _threads()


@pytest.mark.usefixtures("one_rank")
def test_a_store_that_does_not_answer_is_asked_once() -> None:
    """A call after the limit fails at once."""
    with hanging_store() as store:
        board = _board(0.05)
        began_s = time.monotonic()
        for _ in range(2):
            with pytest.raises(PeerError, match=r"^testing: .* gone \(no answer within 0\.05 s\)"):
                board.words()
            board.limit_s = LIMIT_S
        assert time.monotonic() - began_s < LIMIT_S
        assert store.num_calls == 1


@pytest.mark.usefixtures("one_rank")
def test_what_fails_in_a_call_is_told() -> None:
    """With its own words, and as the cause; it is the last call of that board."""
    board = _board()
    with pytest.raises(PeerError, match="no such key") as caught:
        board._ask(lambda store: {}["no such key"])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(PeerError, match="no such key"):
        board.words()


class _Only:
    """A store of the user's own, with one connection only."""

    def clone(self) -> Any:
        raise RuntimeError('Tried to call pure virtual function "Store::clone"')

    def check(self, keys: list[str]) -> bool:
        return keys == ["test/board/x"]

    def get(self, key: str) -> bytes:
        return key.upper().encode()


@pytest.mark.usefixtures("one_rank")
def test_a_store_without_a_second_connection_is_called_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As stores that are written in Python."""
    monkeypatch.setattr(_torch, "store_of", lambda _: _Only())
    assert _board().get("y", "x") == ["", "TEST/BOARD/X"]
