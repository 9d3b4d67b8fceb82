"""What ranks tell each other through the store, in one process and with a store that hangs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
import unittest.mock
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.ranks import rollcall
from ddpopt.ranks.presence import Presence, introduction
from ddpopt.ranks.rollcall import RollCall
from ddpopt.ranks.stores import StoreGoneError
from tests.support.hanging import LIMIT_S, hanging_store


@pytest.fixture
def roll_call(one_rank: None) -> Iterator[RollCall]:
    """The ranks of a group of one."""
    assert dist.group.WORLD is not None
    made = RollCall(dist.group.WORLD)
    yield made
    made.close()


def test_the_last_word_of_a_rank_counts(roll_call: RollCall) -> None:
    """And none that it withdrew."""
    assert roll_call.hear() == {}
    roll_call.withdraw()  # of nothing
    roll_call.tell("first", "x")
    roll_call.tell("second", "y" * 1000)
    word = roll_call.hear()[0]
    assert (word.kind, word.text) == ("second", "y" * 500)
    roll_call.withdraw()
    assert roll_call.hear() == {}


def test_words_of_a_process_before_are_not_heard(roll_call: RollCall) -> None:
    """A group that is made anew on the same store finds them there."""
    roll_call.tell("raised", "of old")
    assert dist.group.WORLD is not None
    again = RollCall(dist.group.WORLD)
    try:
        assert again.hear() == {}
        again.tell("raised", "of now")
        assert again.hear()[0].text == "of now"
    finally:
        again.close()


def test_a_roll_call_is_of_one_group(roll_call: RollCall) -> None:
    """Not of one that is made later, under the same name."""
    assert dist.group.WORLD is not None
    assert roll_call.is_of(dist.group.WORLD)
    assert not roll_call.is_of(dist.new_group([0], backend="gloo"))


def test_its_thread_ends_when_all_ranks_are_known(roll_call: RollCall) -> None:
    """Here at once."""
    end_s = time.monotonic() + LIMIT_S
    while any(t.name == "ddpopt roll call" for t in threading.enumerate()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert list(roll_call.known) == [0]


def test_a_store_that_hangs_is_given_up(
    roll_call: RollCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Telling is then in vain, hearing an error; what is only noted is not tried again."""
    monkeypatch.setattr(rollcall, "_STORE_S", 0.05)
    with hanging_store() as store:
        roll_call.tell("raised", "x")
        with pytest.raises(StoreGoneError, match="no answer within"):
            roll_call.hear()
        for _ in range(3):
            roll_call.note("compiles")
        assert store.num_calls == 3


@pytest.mark.usefixtures("one_rank")
def test_a_store_that_hangs_holds_no_roll_call_up() -> None:
    """It is made without its answer."""
    assert dist.group.WORLD is not None
    with hanging_store() as store:
        began_s = time.monotonic()
        made = RollCall(dist.group.WORLD)
        assert time.monotonic() - began_s < LIMIT_S
        store.is_over.set()
        made.close()


def test_a_store_that_fails_says_why(roll_call: RollCall) -> None:
    """With its own words."""
    with hanging_store() as store:
        store.is_over.set()
        with pytest.raises(StoreGoneError, match="over"):
            roll_call.hear()


@pytest.mark.parametrize("answer", [Presence.ENDED, Presence.UNREACHABLE, Presence.HERE])
def test_only_a_rank_that_answers_is_known(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, answer: Presence
) -> None:
    """Not one of the attempt before, whose identity is in the store, nor one behind a firewall."""
    assert dist.group.WORLD is not None
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(
        rollcall, "find_presence", lambda _own, others, _s: {other.rank: answer for other in others}
    )
    own, listener = introduction(1, None)
    _torch.store_of(dist.group.WORLD).set(f"{rollcall._KEY}/1", own.to_json())
    made = RollCall(dist.group.WORLD)
    try:
        end_s = time.monotonic() + LIMIT_S
        while answer is Presence.HERE and 1 not in made.known and time.monotonic() < end_s:
            time.sleep(0.01)
        assert (1 in made.known) == (answer is Presence.HERE)
    finally:
        made.close()
        listener.close()


def test_a_rank_that_ended_before_it_was_asked_is_known_on_its_machine(one_rank: None) -> None:
    """By the number of its process."""
    assert dist.group.WORLD is not None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own, listener = introduction(1, None)
    listener.close()
    gone = dataclasses.replace(own, pid=ended.pid)
    with unittest.mock.patch.object(dist, "get_world_size", return_value=2):
        _torch.store_of(dist.group.WORLD).set(f"{rollcall._KEY}/1", gone.to_json())
        made = RollCall(dist.group.WORLD)
    try:
        made.hear()
        assert made.presence_without({}) == {1: Presence.ENDED}
    finally:
        made.close()
