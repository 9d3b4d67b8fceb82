"""Whether all ranks have the same, by one collective.

Facts come from the callers; here the first difference is found and named, the same on all ranks.
Where a collective fails, `communicating` adds what to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, config
from ddpopt.errors import DisagreementError, PeerError
from ddpopt.ranks.store import LONGEST_TEXT, name_ranks

_REMEDY = (
    "gradients are averaged in the order of parameters, whatever their names: build model and DDP "
    "alike on all ranks, with the same releases"
)

T = TypeVar("T")


class Fact(NamedTuple):
    """Something that has to be equal on all ranks, and a remedy of its own, if it has one."""

    name: str
    value: str
    remedy: str = ""


class RankReport(NamedTuple):
    """A rank's facts, from the most to the least telling, and its problem, if it has one."""

    facts: Sequence[Fact]
    problem: Exception | None = None


@contextlib.contextmanager
def communicating(what: str) -> Iterator[None]:
    """Add what to do to an error of a collective in this block.

    Raises:
        PeerError: a collective failed; the message begins with `what`.
    """
    try:
        yield
    except (PeerError, torch.OutOfMemoryError):
        raise  # the first says what to do; running out of memory is this rank's own affair
    except RuntimeError as error:  # like torch's own, whatever their text
        raise PeerError(
            f"{what} failed: another rank has ended, hangs, or did not come within the process "
            "group's timeout; look at the other ranks' logs and start all of them again, as "
            f"torchrun does with --max-restarts ({str(error)[:LONGEST_TEXT]})"
        ) from error


def all_gather_object(
    ddp: DistributedDataParallel, own: T, what: str, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Return what each rank gives, over a group (default: DDP's), on DDP's device. Collective.

    Raises:
        PeerError: a rank did not make this call; the message begins with `what`.
    """
    group = group or ddp.process_group
    given = [own] * dist.get_world_size(group)
    with communicating(what), _on_device(ddp):
        dist.all_gather_object(given, own, group=group)
    return given


def broadcast_object(ddp: DistributedDataParallel, own: T, what: str) -> T:
    """Return what rank 0 of DDP's group gives; what others give is ignored. Collective.

    Raises:
        PeerError: a rank did not make this call; the message begins with `what`.
    """
    group, given = ddp.process_group, [own]
    with communicating(what), _on_device(ddp):
        dist.broadcast_object_list(given, src=dist.get_global_rank(group, 0), group=group)
    return given[0]


def _on_device(ddp: DistributedDataParallel) -> contextlib.AbstractContextManager[Any]:
    """Make DDP's device the current one, through which NCCL sends objects."""
    device = next(ddp.parameters()).device
    index = None if device.type == "cpu" else device.index
    return torch.accelerator.device_index(index)


def require_equal(
    ddp: DistributedDataParallel,
    own: RankReport,
    error: type[Exception],
    remedy: str,
    *,
    title: str = "",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise on all ranks unless all have equal facts and none has a problem. Collective.

    Raises:
        Exception: the first problem, with its class and its rank; or else `error`, with the ranks
            that differ, the first difference and a remedy. The message begins with `title`.
        PeerError: a rank did not make this call.
    """
    reports = all_gather_object(ddp, own, "comparing settings with the other ranks", group)
    for rank, report in enumerate(reports):
        if report.problem is not None:
            raise type(report.problem)(f"{title}on rank {rank}: {report.problem}")
    difference = find_difference([report.facts for report in reports], remedy)
    if difference is not None:
        raise error(f"{title}{difference}")


def find_difference(all_facts: Sequence[Sequence[Fact]], remedy: str) -> str | None:
    """Say where ranks first differ from rank 0, which do, and what to do; None if none does."""
    by_name = [{fact.name: fact for fact in facts} for facts in all_facts]
    for name in dict.fromkeys(fact.name for facts in all_facts for fact in facts):
        ours = by_name[0].get(name)
        ranks = [rank for rank, facts in enumerate(by_name) if facts.get(name) != ours]
        if not ranks:
            continue
        theirs = by_name[ranks[0]].get(name)
        if ours is None or theirs is None:
            what = f"{name} is missing{' on rank 0' if ours is None else ''}"
        else:
            what = f"{name} is {theirs.value} instead of {ours.value}"
        verb = "differs" if len(ranks) == 1 else "differ"
        why = next((fact.remedy for fact in (ours, theirs) if fact and fact.remedy), remedy)
        return f"{name_ranks(ranks)} {verb} from rank 0: {what}; {why}"
    return None


def compare_models(ddp: DistributedDataParallel, facts: Sequence[Fact]) -> None:
    """Warn or raise on all ranks if they compile for different DDP modules. Collective.

    Otherwise they would average gradients of different parameters, or wait for each other.

    Raises:
        DisagreementError: they do, and `config.disagreement` is "error".
        PeerError: a rank did not make this call.
    """
    all_facts = all_gather_object(ddp, tuple(facts), "comparing what ranks compile for")
    difference = find_difference(all_facts, _REMEDY)
    if difference is None:
        return
    text = (
        f"ranks compiled for different DistributedDataParallel({type(ddp.module).__name__}) "
        f"modules: {difference}"
    )
    if config.disagreement == "error":
        raise DisagreementError(text)
    _logs.warning("%s", text)
