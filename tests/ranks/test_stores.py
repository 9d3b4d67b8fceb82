"""Calls of a store that does not answer, or fails."""

from __future__ import annotations

import functools
import gc
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.ranks.stores import StoreConnection, StoreGoneError
from tests.support.hanging import LIMIT_S, hanging_store


def _hold(holders: list[StoreConnection], store: Any) -> int:
    return len(holders)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ddpopt store"]


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.usefixtures("one_rank")
def test_a_call_returns_what_the_store_does() -> None:
    """One connection makes several; another sees what was set."""
    connection = StoreConnection(_group())
    connection.ask(lambda store: store.set("test/stores", "x"), LIMIT_S)
    assert connection.ask(lambda store: store.get("test/stores"), LIMIT_S) == b"x"
    connection.close()
    again = StoreConnection(_group())
    assert again.ask(lambda store: store.get("test/stores"), LIMIT_S) == b"x"
    again.close()
    assert not _threads()


@pytest.mark.usefixtures("one_rank")
def test_a_connection_that_is_dropped_ends_its_thread() -> None:
    """Also if what it was asked last refers to it, and without keeping the group's own store."""
    holders = [StoreConnection(_group())]
    asked = functools.partial(_hold, holders)
    holders[0].ask(asked, LIMIT_S)
    del holders, asked
    gc.collect()
    end_s = time.monotonic() + LIMIT_S
    while _threads() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not _threads()


@pytest.mark.usefixtures("one_rank")
def test_a_store_that_does_not_answer_is_asked_once() -> None:
    """Whoever asks after the limit is told at once."""
    with hanging_store() as store:
        connection = StoreConnection(_group())
        began_s = time.monotonic()
        for limit_s in (0.05, LIMIT_S):
            with pytest.raises(StoreGoneError, match=r"no answer within 0\.05 s"):
                connection.ask(lambda store: store.check(["x"]), limit_s)
        connection.close()
        assert time.monotonic() - began_s < LIMIT_S
        assert store.num_calls == 1


@pytest.mark.usefixtures("one_rank")
def test_what_fails_in_a_call_is_told() -> None:
    """With its own words, and as the cause; it is the last call of that connection."""
    connection = StoreConnection(_group())
    with pytest.raises(StoreGoneError, match="no such key") as caught:
        connection.ask(lambda store: {}["no such key"], LIMIT_S)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(StoreGoneError, match="no such key"):
        connection.ask(lambda store: store.check(["x"]), LIMIT_S)


class _Only:
    """A store of the user's own, of which there is one connection only."""

    def clone(self) -> Any:
        raise RuntimeError('Tried to call pure virtual function "Store::clone"')

    def get(self, key: str) -> str:
        return key.upper()


@pytest.mark.usefixtures("one_rank")
def test_a_store_without_a_second_connection_is_called_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As stores that are written in Python."""
    monkeypatch.setattr(_torch, "store_of", lambda _: _Only())
    connection = StoreConnection(_group())
    assert connection.ask(lambda store: store.get("x"), LIMIT_S) == "X"
    connection.close()
