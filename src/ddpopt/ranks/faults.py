"""Names the rank at fault when training breaks, where torch only names a connection.

[Note: faults]
When a rank ends, the others get an error of the transport out of backward or out of DDP's forward.
A rank that gets one tells so through the process group's store (a *word*), hears the others' words
and asks for their processes; see [Note: presence]. A rank that raised an error of its own comes
first; then the ranks that have told nothing and whose process is gone. Ranks that have told that
they lost a connection are victims, also if they have ended since, so they are never named.
All this happens after an error only. It uses no collective, and each call of the store is bounded.
Since it takes a socket, a thread and the store, it is done only where somebody asked for it.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ddpopt import _logs, config
from ddpopt.errors import PeerError
from ddpopt.ranks.presence import Card, Presence, RollCall

_SETTLE_S = 3.0  # in which a fault shows itself, and words of other ranks arrive
_POLL_S = 0.1
_RANKS_SHOWN = 8
_LONGEST_TEXT = 500
_LOST, _RAISED = "lost a connection", "raised"
_COMPILES = "compiles"
_CONNECTION = re.compile(
    r"gloo/|nccl|process ?group|c10d|socket|timed? ?out|broken pipe"
    r"|connection (was )?(closed|reset|refused)",
    re.IGNORECASE,
)


class _Finding(NamedTuple):
    """A sentence, and the ranks that are certainly at fault."""

    text: str
    ranks: tuple[int, ...] = ()


_UNNAMED = _Finding(
    "another rank has ended, hangs, or did not come within the process group's timeout"
)


@contextlib.contextmanager
def naming_peers(what: str = "training") -> Iterator[None]:
    """Have errors of a connection in this block name the rank that broke; `what` begins them.

    Any other error in the block is told to the other ranks, whose error then names this rank and
    that error. Uncaught errors are explained too from then on, in a line after the traceback.

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
        raise  # it was named where it was raised
    except Exception as error:
        if is_connection_error(error):
            raise _peer_error(what, error) from error
        _tell_error(error)
        raise


@contextlib.contextmanager
def communicating(what: str) -> Iterator[None]:
    """As `naming_peers`, for a block that does nothing but communicate."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:  # as torch's are, whatever their text
        raise _peer_error(what, error) from error


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Let ranks that lose patience in a collective know that this one compiles in this block."""
    roll_call = _here.roll_call
    if roll_call is None:
        yield
        return
    roll_call.note(_COMPILES)
    try:
        yield
    finally:
        roll_call.note("")


def is_connection_error(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is torch's error of a broken connection."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError):
            return True
        if type(cause) is RuntimeError and _CONNECTION.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


def introduce_if_asked() -> None:
    """As `introduce`, if `config.name_peers` asks for it."""
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


def _explain_uncaught() -> None:
    """Have `sys.excepthook` print one more line; set once, since others may wrap it."""
    if _here.is_explaining:
        return
    _here.is_explaining = True
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


class _Here:
    """The ranks that this process is one of, None while it is alone."""

    roll_call: RollCall | None = None
    is_explaining = False


_here = _Here()


def _peer_error(what: str, error: BaseException) -> PeerError:
    finding = _UNNAMED if _here.roll_call is None else _find_fault(_here.roll_call)
    found = PeerError(
        f"{what} failed: {finding.text}; look at the other ranks' logs and start all of them "
        f"again, as torchrun does with --max-restarts ({str(error)[:_LONGEST_TEXT]})"
    )
    found.ranks = finding.ranks
    return found


def _tell_error(error: BaseException) -> None:
    if _here.roll_call is not None:
        _here.roll_call.tell(_RAISED, f"{type(error).__name__}: {error}")


# ---- who is at fault --------------------------------------------------------------------------

_Cards = Mapping[int, Card]


def _find_fault(roll_call: RollCall) -> _Finding:
    """Say which rank is at fault in an error that this rank just got."""
    roll_call.tell(_LOST)
    end_s = time.monotonic() + _SETTLE_S
    cards = roll_call.hear()
    while (finding := _judge(roll_call, cards)) is None and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        cards = roll_call.hear()
    if finding is None and not roll_call.problem:
        finding = _find_compiler(roll_call, cards)
    if finding is None:
        finding = _blame_store(roll_call) if roll_call.problem else _doubt(roll_call, cards)
    if roll_call.own.has_store:
        _linger(roll_call, finding.ranks)
    return finding


def _judge(roll_call: RollCall, cards: _Cards) -> _Finding | None:
    """Name ranks, if it is certain of some that they are at fault."""
    raised = [card for card in cards.values() if card.word == _RAISED]
    if raised:
        first = min(raised, key=lambda card: card.turn)
        return _Finding(f"{first} raised {first.text}", (first.rank,))
    found = roll_call.presence_of(_silent(roll_call, cards))
    is_far = all(presence is Presence.UNREACHABLE for presence in found.values())
    if is_far and 1 < len(found) == roll_call.size - 1:
        return _Finding(
            f"no other rank can be reached from {roll_call.own}: this machine is cut off from the "
            "others, or theirs are down"
        )
    for presence in (Presence.ENDED, Presence.UNREACHABLE, Presence.STOPPED):
        ranks = tuple(rank for rank, other in found.items() if other is presence)
        if ranks:
            has_store = any(roll_call.known[rank].has_store for rank in ranks)
            more = ", which held the process group's store," if has_store else ""
            said = presence.value[len(ranks) > 1]
            return _Finding(f"{_names(roll_call, ranks)}{more} {said}", ranks)
    return None


def _silent(roll_call: RollCall, cards: _Cards) -> list[int]:
    """Return the known ranks that told nothing, without this one."""
    told = {card.rank for card in cards.values() if card.word}
    return sorted(roll_call.known.keys() - told - {roll_call.own.rank})


def _find_compiler(roll_call: RollCall, cards: _Cards) -> _Finding | None:
    """Name the ranks that still compile, and tell them for what the others gave up.

    Or return what another rank has told, if it can no longer be seen that they compile.
    """
    silent = _silent(roll_call, cards)
    ranks = tuple(rank for rank in silent if rank in cards and cards[rank].doing == _COMPILES)
    if ranks:
        text = (
            f"{_names(roll_call, ranks)} compiled for longer than the process group's timeout; "
            "call ddpopt.warmup before the first step, or give init_process_group a longer timeout"
        )
        roll_call.tell(_LOST, text)
        return _Finding(text, ranks)
    return next((_Finding(card.text) for card in cards.values() if card.text), None)


def _blame_store(roll_call: RollCall) -> _Finding:
    """Say what is known if all ranks answer and the store does not."""
    where = "" if roll_call.place is None else f" at {roll_call.place[0]}:{roll_call.place[1]}"
    return _Finding(
        f"the process group's store{where} has gone ({roll_call.problem}): the process that "
        "holds it (torchrun's, or rank 0's) has ended, or this machine is cut off from its"
    )


def _doubt(roll_call: RollCall, cards: _Cards) -> _Finding:
    """Say what is known if nobody can be named."""
    silent = _silent(roll_call, cards)
    unknown = [rank for rank in range(roll_call.size) if rank not in roll_call.known]
    parts = ["no rank that can be asked has ended, and none told an error of its own"]
    if silent:
        parts.append(
            f"of {_names(roll_call, silent)} nothing was heard, so one of them may hang, wait for "
            "something else, or be late"
        )
    if unknown:
        parts.append(
            f"{_names(roll_call, unknown)} cannot be asked: ddpopt has compiled nothing there, or "
            "no connection to its machine is let through"
        )
    return _Finding("; ".join(parts))


def _names(roll_call: RollCall, ranks: Sequence[int]) -> str:
    names = [str(roll_call.known.get(rank, f"rank {rank}")) for rank in ranks[:_RANKS_SHOWN]]
    if len(ranks) > _RANKS_SHOWN:
        names.append(f"{len(ranks) - _RANKS_SHOWN} more")
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _linger(roll_call: RollCall, lost: Sequence[int]) -> None:
    """Keep the store, which ends with this process, until the others have found out too."""
    end_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < end_s and not roll_call.problem:
        told = {rank for rank, card in roll_call.hear().items() if card.word}
        if len(told | {*lost, roll_call.own.rank}) == roll_call.size:
            return
        time.sleep(_POLL_S)
