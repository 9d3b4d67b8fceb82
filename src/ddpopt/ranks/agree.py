"""Whether all ranks have the same: by one collective, or through the store without waiting.

Facts come from the callers; here the first difference is found and named, the same on all ranks.
Where a collective fails, `communicating` adds what to do.

[Note: agreement]
If ranks compile for different DDP modules, they average gradients of different parameters, or wait
for each other. `warmup` makes all ranks `compare` the facts that a module's buckets follow from.
Compiling by itself asks nobody, unless `config.disagreement` is "error". Then each rank publishes
its facts through the store when a graph is compiled: a digest of them, once for each DDP module,
and again only if it changed; the first rank with a digest adds its facts. One counter says how many
ranks have published, another how many of them published the same. The last one to publish also says
in which step the verdict is due: before the forward of the next one (of the one after the next, if
no step that communicates was in progress). All ranks have ended a backward since then, so all find
the verdict in the same step, and none raises while another waits in an allreduce. If some rank
publishes nothing within a minute, since it compiles nothing, nothing is compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, config
from ddpopt._events import Observer, will_communicate
from ddpopt.errors import DisagreementError, PeerError, TorchDriftError
from ddpopt.ranks.store import LONGEST_TEXT, GroupStore, name_ranks, next_key

_LIMIT_S = 60.0  # after which ranks that have published nothing are no longer waited for
_STORE_S = 10.0  # for one exchange with the store
_TITLE = "comparing what ranks compile for"
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


@dataclass(slots=True, eq=False)
class _Comparison(Observer):
    """What this rank published of one DDP module, and its steps.

    `digest` is that of the facts, under `key` in the store, which is there until all is compared.
    """

    num_steps: int = 0
    key: str = ""
    digest: str = ""
    since_s: float = 0.0
    store: GroupStore | None = None

    def is_news(self, ddp: DistributedDataParallel, facts: str) -> bool:
        """Note the facts of the module; return whether they differ from the last ones."""
        digest = hashlib.sha256(facts.encode()).hexdigest()
        if digest == self.digest:
            return False
        name = f"agreement/{type(ddp.module).__name__}"
        self.key = f"{self.key}+" if self.key else next_key(ddp.process_group, name)
        self.digest, self.since_s = digest, time.monotonic()
        return True

    def publish(self, ddp: DistributedDataParallel, facts: str) -> None:
        """Write facts that are news for the other ranks, and when to compare if all have."""
        due = self.num_steps + (1 if will_communicate(ddp) else 2)
        try:
            self.store = store = GroupStore(ddp.process_group, _TITLE, self.key, _STORE_S)
            store.set_own(self.digest)
            if store.increment(f"num/{self.digest}") == 1:  # by one rank for all: they can be long
                store.set(f"facts/{self.digest}", facts)
            if store.increment("num_published") == store.size:
                store.set("due", str(due))
        except (PeerError, TorchDriftError) as error:
            self._give_up(error)

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Count a step, and compare if it is due.

        Raises:
            DisagreementError: as `compare`.
        """
        if not will_communicate(ddp):
            return
        self.num_steps += 1
        if self.store is None:
            return
        try:
            (due,) = self.store.get("due")
            is_due = bool(due) and self.num_steps >= int(due)
            all_facts = _read_facts(self.store) if is_due else []
        except PeerError as error:
            self._give_up(error)
            return
        if is_due:
            self.store = None
            _act_on(ddp, all_facts)
        elif not due and time.monotonic() - self.since_s > _LIMIT_S:
            self._give_up(f"some rank compiles nothing for this DDP module in {_LIMIT_S:.0f} s")

    def _give_up(self, reason: object) -> None:
        """Stop comparing, unless there is news."""
        self.store = None
        _logs.info("ranks do not compare what they compile: %s", reason)


_comparisons: weakref.WeakKeyDictionary[DistributedDataParallel, _Comparison]
_comparisons = weakref.WeakKeyDictionary()


def observe(ddp: DistributedDataParallel) -> Observer | None:
    """Return the observer that counts a module's steps, if ranks are to compare by themselves."""
    return _comparison_of(ddp) if config.disagreement == "error" else None


def _comparison_of(ddp: DistributedDataParallel) -> _Comparison:
    return _comparisons.setdefault(ddp, _Comparison())


def compare(ddp: DistributedDataParallel, facts: Sequence[Fact]) -> None:
    """Compare what ranks compile for. Collective.

    Raises:
        DisagreementError: on all ranks, if they differ and `config.disagreement` is "error".
        PeerError: a rank did not make this call.
    """
    all_facts = all_gather_object(ddp, tuple(facts), _TITLE)
    comparison = _comparison_of(ddp)
    comparison.is_news(ddp, json.dumps(facts))
    comparison.store = None
    _act_on(ddp, all_facts)


def publish(ddp: DistributedDataParallel, facts: Sequence[Fact]) -> None:
    """Let the other ranks compare what this one compiles for, without waiting for them."""
    comparison, text = _comparison_of(ddp), json.dumps(facts)
    if dist.get_world_size(ddp.process_group) > 1 and comparison.is_news(ddp, text):
        comparison.publish(ddp, text)


def _read_facts(store: GroupStore) -> list[list[Fact]]:
    """Return each rank's facts, or an empty list if they are equal."""
    digests = store.get_all()
    known = list(set(digests))
    if len(known) == 1:
        return []
    texts = dict(zip(known, store.get(*(f"facts/{each}" for each in known)), strict=True))
    return [[Fact(*fact) for fact in json.loads(texts[each])] for each in digests]


def _act_on(ddp: DistributedDataParallel, all_facts: Sequence[Sequence[Fact]]) -> None:
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
