"""How ranks talk by a collective of DDP's group, where all of them make the same call.

Whoever needs all ranks to be alike gives facts; the first difference is found here and named, the
same on all ranks. Where some ranks may not come to the call, they meet as in `ranks/meetings.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import DDPOptError, PeerError
from ddpopt.ranks.store import LONGEST_TEXT, name_ranks

# Python's own errors that say what is wrong with an argument, on whichever rank.
_PASSED_ON = (TypeError, NotImplementedError)

_MOST_DISTINCT = 8  # values that are sent where ranks differ

T = TypeVar("T")


# ---- Sending -------------------------------------------------------------------------------------


@contextlib.contextmanager
def communicating(what: str) -> Iterator[None]:
    """Have the error of a collective that fails in this block say what to do.

    Raises:
        PeerError: for a RuntimeError, which is taken for a collective's; it begins with `what`.
    """
    try:
        yield
    except DDPOptError:
        raise  # it says what to do
    except torch.OutOfMemoryError:
        raise  # a failure of this rank alone
    except RuntimeError as error:
        # A collective that fails raises one of several subclasses, or RuntimeError itself.
        raise PeerError(
            f"{what} failed: another rank has ended, hangs, or did not come within the process "
            "group's timeout; look at the other ranks' logs and start all of them again, as "
            f"torchrun does with --max-restarts ({str(error)[:LONGEST_TEXT]})"
        ) from error


@dataclass(frozen=True, slots=True)
class Shared(Generic[T]):
    """A value that some ranks have, and which ranks these are."""

    # No NamedTuple: on Python 3.10 none is generic.

    value: T
    ranks: list[int]


def gather_distinct(
    ddp: DistributedDataParallel,
    value: T,
    what: str,
    group: dist.ProcessGroup | None = None,
) -> list[Shared[T]]:
    """The different values of a group's ranks (default: DDP's), rank 0's first. Collective.

    Values count as equal if their texts are, by `repr`. Each rank sends every other rank a digest
    of the text, of 32 bytes. Only if digests differ are values sent, each by the first rank that
    has it; the list ends after 8 values.

    Raises:
        PeerError: a rank did not make this call; the message begins with `what`.
    """
    group = group or ddp.process_group
    digest = hashlib.sha256(repr(value).encode()).digest()
    digests = [digest] * group.size()  # to be overwritten by the ranks' own
    ranks_by_digest: dict[bytes, list[int]] = {}
    with communicating(what), _on_device(ddp):
        dist.all_gather_object(digests, digest, group=group)
        for rank, each in enumerate(digests):
            ranks_by_digest.setdefault(each, []).append(rank)
        if len(ranks_by_digest) == 1:
            return [Shared(value, list(range(len(digests))))]
        found = []
        for ranks in itertools.islice(ranks_by_digest.values(), _MOST_DISTINCT):
            sent = [value]
            source = dist.get_global_rank(group, ranks[0])
            dist.broadcast_object_list(sent, src=source, group=group)
            found.append(Shared(sent[0], ranks))
    return found


def gather_on_rank_0(ddp: DistributedDataParallel, value: T, what: str) -> list[T] | None:
    """The value of each rank, on rank 0 of DDP's group; None on the others. Collective.

    Raises:
        PeerError: a rank did not make this call; the message begins with `what`.
    """
    group = ddp.process_group
    values: list[T] | None = [value] * group.size() if group.rank() == 0 else None
    with communicating(what), _on_device(ddp):
        dist.gather_object(value, values, dst=dist.get_global_rank(group, 0), group=group)
    return values


def decide_on_rank_0(
    ddp: DistributedDataParallel,
    what: str,
    decide: Callable[[], T],
    decide_otherwise: Callable[[Exception], T],
) -> T:
    """What rank 0 of DDP's group decides, on all ranks. Collective.

    If `decide` raises, rank 0's decision is what `decide_otherwise`, which has to return, makes of
    the error: the others are waiting. None is no decision.

    Raises:
        PeerError: a rank did not make this call; the message begins with `what`.
    """
    group = ddp.process_group
    decision: list[T | None] = [None]
    if group.rank() == 0:
        try:
            decision = [decide()]
        except Exception as error:
            # Whatever it is, it must not keep this rank from answering the others.
            decision = [decide_otherwise(error)]
    with communicating(what), _on_device(ddp):
        dist.broadcast_object_list(decision, src=dist.get_global_rank(group, 0), group=group)
    assert decision[0] is not None, "rank 0 has decided something"
    return decision[0]


def _on_device(ddp: DistributedDataParallel) -> contextlib.AbstractContextManager[Any]:
    """Make DDP's device the current one, through which NCCL sends objects."""
    device = next(ddp.parameters()).device
    index = None if device.type == "cpu" else device.index
    return torch.accelerator.device_index(index)


# ---- Comparing -----------------------------------------------------------------------------------


class Fact(NamedTuple):
    """Something that has to be equal on all ranks, and a remedy of its own, if it has one."""

    name: str
    value: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What one rank tells the others: its facts, or its problem."""

    facts: Sequence[Fact] = ()
    problem: Exception | None = None


def require_equal(
    ddp: DistributedDataParallel,
    find_facts: Callable[[], Sequence[Fact]],
    error_type: type[DDPOptError],
    remedy: str,
    *,
    title: str = "",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise on all ranks unless all find equal facts. Collective.

    `find_facts` returns them from the most to the least telling, or raises why this rank cannot go
    on. Only a PeerError is raised at once: the other ranks have one too, or are not there to be
    told. The messages of all others begin with `title`.

    Raises:
        DDPOptError, TypeError, NotImplementedError: `find_facts` raised it on some rank, which is
            named.
        DDPOptError: `find_facts` raised another error, which is the cause on its own rank; or facts
            differ, and the message names the first one, who has it, and a remedy. It is of
            `error_type`.
        PeerError: a rank did not make this call.
    """
    cause: Exception | None = None
    try:
        report = _Report(facts=tuple(find_facts()))
    except PeerError:
        raise
    except Exception as problem:
        if isinstance(problem, DDPOptError) or type(problem) in _PASSED_ON:
            report = _Report(problem=problem)
        else:
            # An error of users' code, or of another library: other ranks may not know its class, or
            # may not be able to make an object of it from a text alone.
            cause = problem
            report = _Report(problem=error_type(f"{type(problem).__name__}: {problem}"))
    reports = gather_distinct(ddp, report, "comparing settings with the other ranks", group)
    this_rank = (group or ddp.process_group).rank()
    for each in reports:
        reported = each.value.problem
        if reported is not None:
            error = type(reported)(f"{title}on rank {each.ranks[0]}: {reported}")
            if cause is not None and this_rank in each.ranks:
                raise error from cause
            raise error
    facts_of_ranks = [Shared(each.value.facts, each.ranks) for each in reports]
    difference = find_difference(facts_of_ranks, remedy)
    if difference is not None:
        raise error_type(f"{title}{difference}")


def find_difference(facts_of_ranks: Sequence[Shared[Sequence[Fact]]], remedy: str) -> str | None:
    """The first fact that differs from rank 0's, on which ranks, and the remedy; None if equal."""
    # The names of all facts, in the order in which they first appear.
    names: dict[str, None] = {}
    by_name: list[dict[str, Fact]] = []
    for each in facts_of_ranks:
        by_name.append({fact.name: fact for fact in each.value})
        names.update(dict.fromkeys(fact.name for fact in each.value))

    for name in names:
        of_rank_0 = by_name[0].get(name)
        others = [
            (own.get(name), each.ranks)
            for own, each in zip(by_name, facts_of_ranks, strict=True)
            if own.get(name) != of_rank_0
        ]
        if not others:
            continue
        of_other = others[0][0]
        ranks = [rank for _, own_ranks in others for rank in own_ranks]
        if of_rank_0 is None:
            what = f"{name} is missing on rank 0"
        elif of_other is None:
            what = f"{name} is missing"
        else:
            what = f"{name} is {of_other.value} instead of {of_rank_0.value}"
        for fact in (of_rank_0, of_other):
            if fact is not None and fact.remedy:
                remedy = fact.remedy
                break
        verb = "differs" if len(ranks) == 1 else "differ"
        return f"{name_ranks(ranks)} {verb} from rank 0: {what}; {remedy}"
    return None
