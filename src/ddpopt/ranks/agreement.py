"""Whether ranks compile for the same DDP module, found out without waiting for anybody.

[Note: agreement]
Each rank tells what a DDP module's buckets follow from: its parameters in the Reducer's order,
limits, options, releases. It writes a digest of that to the store of DDP's process group, once for
each DDP module, and again only if it changed; the first rank of a digest adds what it is of. A
counter in the store says how many ranks have told, another how many of them told the same.

`warmup` has all ranks tell, and compare when all have. Compiling by itself calls no store, unless
`config.disagreement` asks for an error. Then each rank tells when a graph is compiled, and the last
one to tell also says in which step the verdict is due: before the forward of the next one (of the
one after the next, if no step was under way that communicates). All ranks have ended a backward
since then, so all find the verdict in the same step, and none raises while another waits in an
allreduce. If some rank tells nothing within a minute, since it compiles nothing, nothing is
compared. No call of the store is waited for longer than a limit; see `stores.py`.

What else each rank compiled is no matter: sections, fallbacks and shapes of inputs may differ,
since the Reducer has the same buckets on all ranks and launches them in the same order. But where
a graph has collectives of its own, cuts say which of DDP's come between them; so ranks tell where
such graphs are cut.
"""

from __future__ import annotations

import collections
import hashlib
import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch, config
from ddpopt._events import Observer
from ddpopt.errors import DisagreementError, TorchDriftError
from ddpopt.ranks import stores
from ddpopt.ranks.stores import StoreGoneError
from ddpopt.split import state
from ddpopt.split.plan import SplitPlan

_LIMIT_S = 60.0  # after which ranks that have told nothing are not waited for
_STORE_S = 10.0  # for one exchange with the store
_RANKS_SHOWN = 8

_CUTS = "where graphs with collectives of their own are cut"
_ORDER = (
    "gradients are averaged in the order of parameters, whatever their names: build model and DDP "
    "alike on all ranks, with the same releases"
)
_OTHER_ORDER = (
    "DDP's collectives come between others of the model there, so that ranks wait for each other: "
    "compile with the same options on all ranks, all with options={'enabled': False} if some must"
)

Facts = dict[str, Any]
_UNTOLD = (StoreGoneError, TorchDriftError)


@dataclass(slots=True)
class _Told:
    """What this rank told of one DDP module, and where; `since_s` is None once all is compared."""

    key: str
    digest: str
    since_s: float | None


_num_modules: collections.Counter[str] = collections.Counter()
_told: weakref.WeakKeyDictionary[DistributedDataParallel, _Told] = weakref.WeakKeyDictionary()
_num_steps: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()


def tell(ddp: DistributedDataParallel, plans: Sequence[SplitPlan] = ()) -> None:
    """Tell the other ranks what graphs are compiled for, without waiting for them.

    `plans` are those of the graphs, if they were compiled for a copy.
    """
    size = dist.get_world_size(ddp.process_group)
    if size == 1 or state.of(ddp).is_copy:
        return
    try:
        facts = json.dumps(facts_of(ddp, plans or state.of(ddp).plans))
        digest = hashlib.sha256(facts.encode()).hexdigest()
        before = _told.get(ddp)
        if before is not None and before.digest == digest:
            return
        key = _next_key(ddp) if before is None else f"{before.key}+"
        is_counted = ddp.require_backward_grad_sync and torch.is_grad_enabled()
        due = _num_steps.get(ddp, 0) + (1 if is_counted else 2)

        def write(store: Any) -> None:
            store.set(f"{key}/{dist.get_rank(ddp.process_group)}", digest)
            if store.add(f"{key}/{digest}", 1) == 1:  # once for all ranks: facts can be long
                store.set(f"{key}/facts/{digest}", facts)
            if store.add(f"{key}/told", 1) == size:
                store.set(f"{key}/due", str(due))

        stores.ask(ddp.process_group, write, _STORE_S)
    except _UNTOLD as error:
        _logs.info("ranks do not compare what they compile: %s", error)
        return
    _told[ddp] = _Told(key, digest, time.monotonic())


def observe(ddp: DistributedDataParallel) -> Observer | None:
    """Return who counts a module's steps, if ranks are to compare what they compile."""
    return _Steps() if config.disagreement == "error" else None


class _Steps(Observer):
    def before_forward(self, ddp: DistributedDataParallel) -> None:
        before_forward(ddp)


def before_forward(ddp: DistributedDataParallel) -> None:
    """Count a step, and compare if that is due.

    Raises:
        DisagreementError: ranks differ, and `config.disagreement` is "error"; on all ranks.
    """
    if not ddp.require_backward_grad_sync or not torch.is_grad_enabled():
        return
    step = _num_steps[ddp] = _num_steps.get(ddp, 0) + 1
    told = _told.get(ddp)
    if told is not None and told.since_s is not None:
        _act_on(_look(ddp, told, step))


def settle(ddp: DistributedDataParallel) -> None:
    """Compare now; all ranks have told, and all call this.

    Raises:
        DisagreementError: as `before_forward`.
    """
    told = _told.get(ddp)
    if told is not None and told.since_s is not None:
        _act_on(_look(ddp, told, None))


def _look(ddp: DistributedDataParallel, told: _Told, step: int | None) -> str:
    """Return what is wrong, if that can be said in this step: "" if nothing is, or not yet."""

    def read(store: Any) -> tuple[bool, str | None]:
        is_told = bool(store.check([f"{told.key}/due"]))
        is_due = is_told and (step is None or step >= int(store.get(f"{told.key}/due")))
        return is_told, _compare(ddp, told, store) if is_due else None

    assert told.since_s is not None
    try:
        is_told, difference = stores.ask(ddp.process_group, read, _STORE_S)
    except _UNTOLD as error:
        told.since_s = None
        _logs.info("ranks do not compare what they compile: %s", error)
        return ""
    if difference is not None:
        told.since_s = None
    elif not is_told and time.monotonic() - told.since_s > _LIMIT_S:
        told.since_s = None
        _logs.info(
            "some rank has compiled nothing for this DDP module within %.0f s, so ranks do not "
            "compare what they compile",
            _LIMIT_S,
        )
    return difference or ""


def _compare(ddp: DistributedDataParallel, told: _Told, store: Any) -> str:
    size = dist.get_world_size(ddp.process_group)
    if store.add(f"{told.key}/{told.digest}", 0) == size:
        return ""
    digests = [store.get(f"{told.key}/{rank}").decode() for rank in range(size)]
    known = {digest: json.loads(store.get(f"{told.key}/facts/{digest}")) for digest in digests}
    facts = [known[digest] for digest in digests]
    return (
        f"ranks compiled for different DistributedDataParallel({type(ddp.module).__name__}) "
        f"modules: {find_difference(facts)}"
    )


def _act_on(difference: str) -> None:
    if difference and config.disagreement == "error":
        raise DisagreementError(difference)
    if difference:
        _logs.warning("%s", difference)


def facts_of(ddp: DistributedDataParallel, plans: Sequence[SplitPlan]) -> Facts:
    """Return what has to be equal on all ranks, from the most to the least telling."""
    communicating = {_cuts_of(plan) for plan in plans if plan.num_collectives}
    parameters = {
        parameter.name: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        for tensor, parameter in _torch.reducer_parameters(ddp).items()
    }
    return {
        "parameters": list(parameters.items()),
        "bucket limits in bytes": list(_torch.reducer_caps(ddp)),
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        _CUTS: sorted(communicating),
        "torch": torch.__version__,
        "ddpopt": _own_version(),
    }


def _cuts_of(plan: SplitPlan) -> str:
    where = ", ".join(str(section.start) for section in plan.sections[1:])
    cuts = f"{plan.split} cut at {where}" if where else "whole"
    return f"{plan.num_collectives} collectives, {cuts}"


def find_difference(facts: Sequence[Facts]) -> str:
    """Say in what ranks first differ from rank 0, which do, and what follows."""
    for name, expected in facts[0].items():
        ranks = [rank for rank, other in enumerate(facts) if other.get(name) != expected]
        if ranks:
            shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
            more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
            word = "rank" if len(ranks) == 1 else "ranks"
            other = facts[ranks[0]].get(name)
            what = (
                _first_parameter(other or [], expected)
                if name == "parameters"
                else f"{name} is {other} instead of {expected}"
            )
            why = _OTHER_ORDER if name == _CUTS else _ORDER
            return f"{word} {shown}{more} from rank 0: {what}; {why}"
    return "no difference is left"


def _first_parameter(theirs: Sequence[Sequence[str]], ours: Sequence[Sequence[str]]) -> str:
    for place, (other, own) in enumerate(zip(theirs, ours, strict=False)):
        if other != own:
            return f"parameter {place} is {' '.join(other)} instead of {' '.join(own)}"
    return f"{len(theirs)} parameters instead of {len(ours)}"


def _next_key(ddp: DistributedDataParallel) -> str:
    """Return a name that one DDP module has on all ranks, if they compile in the same order."""
    own = f"{ddp.process_group.group_name}/{type(ddp.module).__name__}"
    _num_modules[own] += 1
    return f"ddpopt/agreement/{type(ddp.module).__name__}/{_num_modules[own]}"


def _own_version() -> str:
    try:
        return version("ddpopt")
    except PackageNotFoundError:
        return "not installed"
