"""How ranks talk by a collective of DDP's group, where all of them are at the same place.

Whoever needs all ranks to be alike gives facts; the first difference is found here and named, the
same on all ranks. Where ranks may not be at the same place, they talk through `ranks/store.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import DDPOptError, PeerError
from ddpopt.ranks.store import LONGEST_TEXT, name_ranks

# Python's own errors that say what is wrong with an argument, on whichever rank.
_PASSED_ON = (TypeError, NotImplementedError)

T = TypeVar("T")


# ---- Sending -------------------------------------------------------------------------------------


@contextlib.contextmanager
def communicating(what: str) -> Iterator[None]:
    """Add what to do to an error of a collective in this block.

    Raises:
        PeerError: a collective failed; the message begins with `what`.
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


def all_gather_object(
    ddp: DistributedDataParallel,
    value: T,
    what: str,
    group: dist.ProcessGroup | None = None,
) -> list[T]:
    """The value of each rank, by rank of a group (default: DDP's). Collective.

    Raises:
        PeerError: a rank did not make this call; the message begins with `what`.
    """
    group = group or ddp.process_group
    all_ranks = [value] * dist.get_world_size(group)
    with communicating(what), _on_device(ddp):
        dist.all_gather_object(all_ranks, value, group=group)
    return all_ranks


def decide_on_rank_0(
    ddp: DistributedDataParallel,
    what: str,
    decide: Callable[[], T],
    decide_otherwise: Callable[[Exception], T],
) -> T:
    """What rank 0 of DDP's group decides, on all ranks. Collective.

    If `decide` raises, it is what `decide_otherwise` makes of the error: the others are waiting.

    Raises:
        PeerError: a rank did not make this call; the message begins with `what`.
    """
    group = ddp.process_group
    decision: list[T | None] = [None]
    if dist.get_rank(group) == 0:
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
            # Code that users or others wrote raised it. Other ranks may not know its class, or may
            # not be able to make it of a text alone.
            cause = problem
            report = _Report(problem=error_type(f"{type(problem).__name__}: {problem}"))
    reports = all_gather_object(ddp, report, "comparing settings with the other ranks", group)
    this_rank = dist.get_rank(group or ddp.process_group)
    for rank, each in enumerate(reports):
        if each.problem is not None:
            error = type(each.problem)(f"{title}on rank {rank}: {each.problem}")
            if cause is not None and rank == this_rank:
                raise error from cause
            raise error
    difference = find_difference([each.facts for each in reports], remedy)
    if difference is not None:
        raise error_type(f"{title}{difference}")


def find_difference(facts_by_rank: Sequence[Sequence[Fact]], remedy: str) -> str | None:
    """Where ranks first differ from rank 0, which do, and what to do; None if none does."""
    # The names of all facts, in the order in which they first appear.
    names: dict[str, None] = {}
    by_name: list[dict[str, Fact]] = []
    for facts in facts_by_rank:
        by_name.append({fact.name: fact for fact in facts})
        names.update(dict.fromkeys(fact.name for fact in facts))

    for name in names:
        of_rank_0 = by_name[0].get(name)
        ranks = [rank for rank, facts in enumerate(by_name) if facts.get(name) != of_rank_0]
        if not ranks:
            continue
        of_other = by_name[ranks[0]].get(name)
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
