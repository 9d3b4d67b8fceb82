"""Names the rank at fault when training breaks, where torch only names a connection.

[Note: faults]
When a rank ends, the others get a transport error from backward or from DDP's forward. A rank that
gets one says so through the process group's store (a *word*), reads the others' words and checks
for their processes; see [Note: presence]. A rank that raised an error of its own is named first;
then the ranks that have told nothing and whose process is gone. Ranks that have told of a lost
connection are victims, even if they have ended since, so they are never named.
All this happens only after an error. It uses no collective, and each call of the store is bounded.
Since it takes a socket, a thread and the store, it is done only if somebody asked for it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ddpopt import _logs, config
from ddpopt.errors import PeerError
from ddpopt.ranks.presence import Card, Presence, RollCall
from ddpopt.ranks.rendezvous import RANKS_SHOWN, name_ranks
from ddpopt.ranks.stores import LONGEST_TEXT

_SETTLE_S = 3.0  # for a fault to show itself, and for other ranks' words to arrive
_POLL_S = 0.1
_LOST, _RAISED, _COMPILES = "lost a connection", "raised", "compiles"
_CONNECTION = re.compile(
    r"gloo/|nccl|process ?group|c10d|socket|timed? ?out|broken pipe"
    r"|connection (was )?(closed|reset|refused)",
    re.IGNORECASE,
)


class _Here:
    """The ranks to which this process belongs, None while it is alone."""

    roll_call: RollCall | None = None


_here = _Here()


@contextlib.contextmanager
def naming_peers(what: str = "training") -> Iterator[None]:
    """Make connection errors in this block name the rank at fault; `what` begins their messages.

    Any other error in the block is reported to the other ranks, whose errors then name this rank
    and its error. From then on uncaught errors are explained too, in a line after the traceback.

    Raises:
        PeerError: a connection broke, or a collective took longer than the group's timeout. Its
            `ranks` has the ranks that are known to be at fault.
    """
    introduce()
    if _here.roll_call is not None and _here.roll_call.own.word:
        _here.roll_call.tell("")  # training goes on
    try:
        yield
    except PeerError:
        raise  # it already names the rank
    except Exception as error:
        if is_connection_error(error):
            raise _peer_error(what, error) from error
        _tell_error(error)
        raise


@contextlib.contextmanager
def communicating(what: str) -> Iterator[None]:
    """As `naming_peers`, for a block that only communicates."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:  # like torch's own, whatever their text
        raise _peer_error(what, error) from error


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Let ranks that time out in a collective know that this rank compiles in this block."""
    roll_call = _here.roll_call
    if roll_call is None or roll_call.problem or roll_call.own.word:
        yield  # a failed store would delay each compile, and a word about an error matters more
        return
    roll_call.tell(_COMPILES)
    try:
        yield
    finally:
        if roll_call.own.word == _COMPILES:
            roll_call.tell("")


def is_connection_error(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is torch's error of a broken connection."""
    if isinstance(error, dist.DistError):
        return True
    if type(error) is RuntimeError and _CONNECTION.search(str(error)):
        return True
    return error.__cause__ is not None and is_connection_error(error.__cause__)


def introduce_if_asked() -> None:
    """As `introduce`, if `config.name_peers` is set."""
    if config.name_peers:
        introduce()


def introduce() -> None:
    """Tell the other ranks who this process is, without waiting for any. Idempotent."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    group = dist.group.WORLD
    assert group is not None
    if _here.roll_call is not None:
        if _here.roll_call.is_of(group):
            return
        _here.roll_call.close()
        _here.roll_call = None
    try:
        _here.roll_call = RollCall(group)
    except Exception as error:  # whatever it is, training matters more
        _logs.info("broken connections will not be traced to a rank: %s", error)
        return
    _explain_uncaught()


@functools.cache
def _explain_uncaught() -> None:
    """Make `sys.excepthook` print one more line; set once, since others may wrap it."""
    previous = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        previous(kind, error, trace)
        roll_call = _here.roll_call
        if isinstance(error, PeerError) or roll_call is None:
            return
        if is_connection_error(error):
            text = _find_fault(roll_call).text
            print(f"[rank{roll_call.own.rank}]: ddpopt: {text}; look there first", file=sys.stderr)
        else:
            _tell_error(error)

    sys.excepthook = explain


def _peer_error(what: str, error: BaseException) -> PeerError:
    finding = _Finding(
        "another rank has ended, hangs, or did not come within the process group's timeout"
    )
    if _here.roll_call is not None:
        finding = _find_fault(_here.roll_call)
    found = PeerError(
        f"{what} failed: {finding.text}; look at the other ranks' logs and start all of them "
        f"again, as torchrun does with --max-restarts ({str(error)[:LONGEST_TEXT]})"
    )
    found.ranks = finding.ranks
    return found


def _tell_error(error: BaseException) -> None:
    if _here.roll_call is not None:
        _here.roll_call.tell(_RAISED, f"{type(error).__name__}: {error}")


class _Finding(NamedTuple):
    """A sentence, and the ranks that are certainly at fault."""

    text: str
    ranks: tuple[int, ...] = ()


def _find_fault(roll_call: RollCall) -> _Finding:
    """Say which rank is at fault in an error that this rank just got."""
    roll_call.tell(_LOST)
    end_s = time.monotonic() + _SETTLE_S
    cards = roll_call.hear()
    while (finding := _judge(roll_call, cards)) is None and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        cards = roll_call.hear()
    finding = finding or _doubt(roll_call, cards)
    if roll_call.own.has_store:
        _linger(roll_call, finding.ranks)
    return finding


def _judge(roll_call: RollCall, cards: Sequence[Card]) -> _Finding | None:
    """Name the ranks that are certainly at fault, if any."""
    raised = [card for card in cards if card.word == _RAISED]
    if raised:
        first = min(raised, key=lambda card: card.turn)
        return _Finding(f"{first} raised {first.text}", (first.rank,))
    silent = _silent(cards)
    found = roll_call.ask(silent)
    if 1 < len(silent) == roll_call.size - 1 and set(found.values()) == {Presence.UNREACHABLE}:
        return _Finding(
            f"no other rank can be reached from {roll_call.own}: this machine is cut off from the "
            "others, or theirs are down"
        )
    for presence in (Presence.ENDED, Presence.UNREACHABLE, Presence.STOPPED):
        lost = [card for card in silent if found[card.rank] is presence]
        if lost:
            has_store = any(card.has_store for card in lost)
            more = ", which held the process group's store," if has_store else ""
            said = presence.value[len(lost) > 1]
            return _Finding(f"{_name(lost)}{more} {said}", tuple(card.rank for card in lost))
    return None


def _silent(cards: Sequence[Card]) -> list[Card]:
    """Return the cards of ranks that told of no error."""
    return [card for card in cards if card.word in ("", _COMPILES)]


def _doubt(roll_call: RollCall, cards: Sequence[Card]) -> _Finding:
    """Say what is known if every rank that can be asked is there.

    Later it cannot be seen that a rank has compiled for too long, so the others are told now.
    """
    if roll_call.problem:
        where = "" if roll_call.place is None else " at {}:{}".format(*roll_call.place)
        return _Finding(
            f"the process group's store{where} has gone ({roll_call.problem}): the process that "
            "holds it (torchrun's, or rank 0's) has ended, or this machine is cut off from its"
        )
    compiling = [card for card in cards if card.word == _COMPILES]
    if compiling:
        text = (
            f"{_name(compiling)} compiled for longer than the process group's timeout; call "
            "ddpopt.warmup before the first step, or give init_process_group a longer timeout"
        )
        roll_call.tell(_LOST, text)
        return _Finding(text, tuple(card.rank for card in compiling))
    for card in cards:
        if card.text:
            return _Finding(card.text)
    parts = ["no rank that can be asked has ended, and none told an error of its own"]
    if silent := _silent(cards):
        parts.append(
            f"of {_name(silent)} nothing was heard, so one of them may hang, wait for something "
            "else, or be late"
        )
    known = {roll_call.own.rank, *(card.rank for card in cards)}
    if unknown := set(range(roll_call.size)) - known:
        parts.append(
            f"{name_ranks(unknown)} cannot be asked: ddpopt has compiled nothing there, or no "
            "connection to its machine is let through"
        )
    return _Finding("; ".join(parts))


def _name(cards: Sequence[Card]) -> str:
    names = [str(card) for card in cards[:RANKS_SHOWN]]
    if len(cards) > RANKS_SHOWN:
        names.append(f"{len(cards) - RANKS_SHOWN} more")
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _linger(roll_call: RollCall, lost: Sequence[int]) -> None:
    """Keep the store, which ends with this process, alive until the others have found out too."""
    end_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < end_s and not roll_call.problem:
        cards = roll_call.hear()
        silent = {card.rank for card in _silent(cards)}
        if len(cards) == roll_call.size - 1 and silent <= set(lost):
            return
        time.sleep(_POLL_S)
