"""Who the ranks are and what they told, through the store; whether their processes are there.

On this machine, with a store that answers and with one that hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.ranks import faults, presence
from ddpopt.ranks.presence import Card, Presence, RollCall, find_presence, introduce
from tests.support.hanging import LIMIT_S, hanging_store

_INTRODUCED = """
import json, time
from ddpopt.ranks.presence import introduce
card, listener = introduce(1, ("127.0.0.1", 1))
print(json.dumps(card), flush=True)
{more}
time.sleep(600)
"""


@contextlib.contextmanager
def _other(more: str = "") -> Iterator[tuple[subprocess.Popen[str], Card]]:
    """A process that has introduced itself as rank 1."""
    command = [sys.executable, "-c", _INTRODUCED.format(more=more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Card(*json.loads(process.stdout.readline()))
        finally:
            process.kill()


@pytest.fixture
def own() -> Iterator[Card]:
    """This process as rank 0."""
    card, listener = introduce(0, ("127.0.0.1", 1))
    yield card
    listener.close()


def _ask(own: Card, other: Card) -> Presence:
    return find_presence(own, [other], 2.0)[other.rank]


def _ask_until(own: Card, other: Card, expected: Presence) -> Presence:
    """Ask until the answer is the expected one; a signal takes its time."""
    end_s = time.monotonic() + LIMIT_S
    while (found := _ask(own, other)) is not expected and time.monotonic() < end_s:
        time.sleep(0.01)
    return found


def test_a_process_is_there_until_it_is_killed(own: Card) -> None:
    """Also while it is stopped, and also if nobody has waited for it."""
    with _other() as (process, other):
        assert other.pid == process.pid
        assert _ask(own, other) is Presence.HERE
        process.send_signal(signal.SIGSTOP)
        assert _ask_until(own, other, Presence.STOPPED) is Presence.STOPPED
        process.send_signal(signal.SIGCONT)
        assert _ask_until(own, other, Presence.HERE) is Presence.HERE
        process.kill()
        assert _ask_until(own, other, Presence.ENDED) is Presence.ENDED


def test_what_a_process_forked_does_not_stand_for_it(own: Card) -> None:
    """As workers of a data loader, which outlive a killed rank by seconds."""
    more = "import os\nchild = os.fork()\nprint(child, flush=True) if child else None"
    with _other(more) as (process, other):
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            assert _ask_until(own, other, Presence.ENDED) is Presence.ENDED
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_local_address_of_another_machine_is_not_asked(own: Card) -> None:
    """It would be this machine that answers, or refuses."""
    for address in ("127.0.0.1", "::1", own.address):
        far = own._replace(rank=1, machine="another", address=address, port=1)
        assert _ask(own, far) is Presence.UNKNOWN


def test_who_does_not_answer_is_given_up(own: Card) -> None:
    """A full queue drops what comes, as a machine that is down."""
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        silent = own._replace(rank=1, port=full.getsockname()[1])
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        began_s = time.monotonic()
        assert _ask(own, silent) is Presence.UNREACHABLE
        assert time.monotonic() - began_s < LIMIT_S


def test_many_are_asked_together(own: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, each with its own answer."""
    monkeypatch.setattr(presence, "_AT_ONCE", 3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but it does not listen
        closed = free.getsockname()[1]
        others = [
            own._replace(rank=rank, port=own.port if rank % 2 else closed) for rank in range(8)
        ]
        found = find_presence(own, others, 2.0)
    assert [found[rank] for rank in range(8)] == [Presence.ENDED, Presence.HERE] * 4


def test_rank_0_holds_the_store_unless_torchruns_agent_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a store that is reached by the network."""
    place = ("127.0.0.1", 1)
    assert introduce(0, place)[0].has_store
    assert not introduce(1, place)[0].has_store
    assert not introduce(0, None)[0].has_store
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not introduce(0, place)[0].has_store


def test_a_card_survives_the_store(own: Card) -> None:
    """It is text there, and names rank, host and process."""
    assert Card(*json.loads(json.dumps(own))) == own
    assert str(own) == f"rank 0 (host {socket.gethostname()}, pid {os.getpid()})"


# ---- the roll call ----------------------------------------------------------------------------


@pytest.fixture
def roll_call(one_rank: None) -> Iterator[RollCall]:
    """The ranks of a group of one."""
    assert dist.group.WORLD is not None
    made = RollCall(dist.group.WORLD)
    yield made
    made.close()


def _heard_of_own(roll_call: RollCall) -> tuple[str, str]:
    """Return the word and the text that the store has of this rank."""
    roll_call.hear()
    card = roll_call.known[roll_call.own.rank]
    return card.word, card.text


def test_the_last_word_of_a_rank_counts(roll_call: RollCall) -> None:
    """And none that it withdrew."""
    roll_call.tell("first", "x")
    roll_call.tell("second", "y" * 1000)
    assert _heard_of_own(roll_call) == ("second", "y" * 500)
    roll_call.tell("")
    assert _heard_of_own(roll_call) == ("", "")


def test_words_of_a_process_before_are_not_heard(roll_call: RollCall) -> None:
    """A group that is made again on the same store finds them there."""
    roll_call.tell("raised", "of old")
    assert dist.group.WORLD is not None
    again = RollCall(dist.group.WORLD)
    try:
        assert _heard_of_own(again) == ("", "")
        again.tell("raised", "of now")
        assert _heard_of_own(again) == ("raised", "of now")
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
    """Until there is another word to tell; compiling would be held up each time."""
    monkeypatch.setattr(presence, "_STORE_S", 0.05)
    here = faults._Here()
    here.roll_call = roll_call
    monkeypatch.setattr(faults, "_here", here)
    with hanging_store() as store:
        for _ in range(3):
            with faults.compiling():
                pass
        assert store.num_calls == 1
        roll_call.tell("raised", "x")
        assert roll_call.hear() == []
        assert store.num_calls == 2
        assert roll_call.problem == "no answer within 0.05 s"
    roll_call.tell("raised", "y")
    assert _heard_of_own(roll_call) == ("raised", "y")


def test_compiling_is_told_and_withdrawn_but_hides_no_error(
    roll_call: RollCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that was told before, nor one that another thread told meanwhile."""
    here = faults._Here()
    here.roll_call = roll_call
    monkeypatch.setattr(faults, "_here", here)
    with faults.compiling():
        assert _heard_of_own(roll_call)[0] == "compiles"
    assert _heard_of_own(roll_call)[0] == ""
    with faults.compiling():
        roll_call.tell("lost a connection")
    with faults.compiling():
        assert _heard_of_own(roll_call)[0] == "lost a connection"
    assert _heard_of_own(roll_call)[0] == "lost a connection"


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
        roll_call.hear()
        assert roll_call.problem == "over"


@pytest.mark.parametrize("answer", [Presence.ENDED, Presence.UNREACHABLE, Presence.HERE])
def test_only_a_rank_that_answers_is_known(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, answer: Presence
) -> None:
    """Not one of the attempt before, whose card is in the store, nor one behind a firewall."""
    assert dist.group.WORLD is not None
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(
        presence, "find_presence", lambda _own, others, _s: {other.rank: answer for other in others}
    )
    own, listener = introduce(1, None)
    _torch.store_of(dist.group.WORLD).set(f"{presence._KEY}/1", json.dumps(own))
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
    own, listener = introduce(1, None)
    listener.close()
    gone = own._replace(pid=ended.pid)
    with mock.patch.object(dist, "get_world_size", return_value=2):
        _torch.store_of(dist.group.WORLD).set(f"{presence._KEY}/1", json.dumps(gone))
        made = RollCall(dist.group.WORLD)
    try:
        assert made.ask(made.hear()) == {1: Presence.ENDED}
    finally:
        made.close()
