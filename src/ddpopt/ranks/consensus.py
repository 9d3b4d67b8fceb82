"""Ranks tell each other what they are about to do before they depend on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist

from ddpopt.errors import AttachError, OptionError, PeerError
from ddpopt.ranks import faults

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (AttachError, OptionError, TypeError, NotImplementedError)
}


class Fact(NamedTuple):
    """Something that has to be equal on all ranks."""

    name: str
    value: str


class _Word(NamedTuple):
    facts: tuple[Fact, ...]
    problem: tuple[str, str] | None  # class and text


def agree(
    group: dist.ProcessGroup, facts: Sequence[Fact], problem: Exception | None = None
) -> None:
    """Raise on all ranks unless all have equal facts and none has a problem. Collective.

    Raises:
        AttachError: facts differ; the first difference is named.
        PeerError: a rank did not make this call.
        Exception: the first problem, with its class and its rank, on all ranks.
    """
    faults.introduce_if_asked()
    told = None if problem is None else (type(problem).__name__, str(problem))
    words = [_Word((), None)] * dist.get_world_size(group)
    with naming_peers("comparing settings with the other ranks"):
        dist.all_gather_object(words, _Word(tuple(facts), told), group=group)
    for rank, word in enumerate(words):
        if word.problem is not None:
            kind, text = word.problem
            raise _KINDS[kind](f"on rank {rank}: {text}")
    for rank, word in enumerate(words):
        if word.facts != words[0].facts:
            raise AttachError(
                f"rank {rank} differs from rank 0: {_difference(words[0].facts, word.facts)}; "
                "build model, optimizer and algorithm alike on all ranks"
            )


def _difference(first: Sequence[Fact], other: Sequence[Fact]) -> str:
    for ours, theirs in zip(first, other, strict=False):
        if ours.name != theirs.name:
            return f"{theirs.name} where rank 0 has {ours.name}"
        if ours.value != theirs.value:
            return f"{ours.name} is {theirs.value} instead of {ours.value}"
    return f"{len(other)} facts instead of {len(first)}"


@contextlib.contextmanager
def naming_peers(what: str) -> Iterator[None]:
    """As `ddpopt.naming_peers`, for a block that does nothing but communicate."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:  # as torch's are, whatever their text
        raise faults.peer_error(what, error) from error
