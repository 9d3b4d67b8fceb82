"""A model of DDP's Reducer: which parameters will share a bucket, and when buckets close.

Pure: it reads no graph, no module and no process group. `_torch` reads the facts from a live DDP
module; `split` decides where to cut.

[Note: buckets]
A *bucket* is the Reducer's unit: gradients that are packed together and reduced by one allreduce.
The Reducer forms buckets twice. At construction it takes the parameters in registration order.
Unless it has to look for unused parameters in every iteration, it then forms them again, once,
from the *arrival order*: the order in which gradients became final in the first backward. A
bucket closes when its size reaches its limit after a gradient was added, so a bucket may exceed
its limit. Once the list of limits is used up, its last one applies to all further buckets. Buckets
are launched in order: bucket k + 1 waits for bucket k.
Source: `compute_bucket_assignment_by_size` and `Reducer::rebuild_buckets` of torch's
`reducer.cpp`, read as a specification; tests compare with the original.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter that the Reducer reduces.

    `index` is its position in the Reducer's list, `name` its name in the module inside DDP.
    Parameters of equal `group` (dtype and device) may share a bucket.
    """

    index: int
    name: str
    num_bytes: int
    group: str
    is_sparse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerRules:
    """How a Reducer forms buckets.

    `caps_bytes` are the limits: the k-th for the k-th bucket of its group, the last one for all
    further ones. `is_rebuilt` says whether buckets follow the arrival order (see
    [Note: buckets]). `is_provisional` says that they are about to be replaced by better ones.
    `arrives_last` are the parameters, by index, on whose gradient others that the Reducer does not
    reduce are reduced: theirs have to be final before it arrives.
    """

    caps_bytes: tuple[int, ...]
    is_rebuilt: bool
    is_provisional: bool = False
    arrives_last: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that one allreduce carries. `cap_bytes` is the limit that applied."""

    index: int
    parameters: tuple[Parameter, ...]
    cap_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.parameters)


def predict_buckets(arrival: Sequence[Parameter], rules: ReducerRules) -> tuple[Bucket, ...]:
    """The buckets that the Reducer will use, in the order of their launch.

    `arrival` holds every parameter of the Reducer in the order in which gradients will become
    final in the first backward.
    """
    if rules.is_rebuilt:
        return _number(_fill(arrival, rules.caps_bytes))
    registered = sorted(arrival, key=lambda parameter: parameter.index)
    closed = _fill(registered, rules.caps_bytes)
    # At construction buckets are ordered by their first parameter, then reversed, because
    # gradients are expected in reverse order of registration.
    closed.sort(key=lambda bucket: min(p.index for p in bucket[0]), reverse=True)
    return _number(closed)


def known_buckets(
    parameters: Sequence[Parameter], actual: Sequence[Sequence[int]], rules: ReducerRules
) -> tuple[Bucket, ...]:
    """Buckets that the Reducer has, had or will be given, from the indices of their parameters.

    They are in launch order.
    """
    by_index = {parameter.index: parameter for parameter in parameters}
    members = ([by_index[index] for index in bucket] for bucket in actual)
    return _number([(m, cap_of(rules.caps_bytes, k)) for k, m in enumerate(members)])


def in_launch_order(
    parameters: Iterable[Parameter], buckets: Sequence[Bucket]
) -> tuple[Parameter, ...]:
    """Return parameters sorted by bucket; those in one bucket keep their order."""
    bucket_of = {p.index: bucket.index for bucket in buckets for p in bucket.parameters}
    return tuple(sorted(parameters, key=lambda parameter: bucket_of[parameter.index]))


# Where fine buckets end, as fractions of all bytes: finer at both ends, because the first and the
# last bucket are what cannot be hidden.
_FINE_ENDS = (1 / 64, 1 / 32, *(k / 16 for k in range(1, 16)), 31 / 32, 63 / 64)


def fine_buckets(arrival: Sequence[Parameter]) -> tuple[Bucket, ...]:
    """Return small buckets at whose ends a graph is cut while the best buckets are being searched.

    There are about twenty at most, so that cuts stay cheap.
    """
    *starts, total = itertools.accumulate((p.num_bytes for p in arrival), initial=0)
    ends = [end * total for end in _FINE_ENDS]
    fine = itertools.groupby(
        zip(arrival, starts, strict=True), lambda pair: bisect.bisect_right(ends, pair[1])
    )
    return _number([([parameter for parameter, _ in members], 0) for _, members in fine])


class Misplaced(NamedTuple):
    """A parameter in another bucket than planned; buckets are numbered in launch order."""

    parameter: Parameter
    planned: int
    actual: int


def find_misplaced(
    own: Sequence[Parameter], planned: Sequence[Bucket], actual: Sequence[Sequence[int]]
) -> Misplaced | None:
    """The first parameter of `own` that is reduced in another bucket than planned.

    `actual` are the Reducer's buckets by parameter index. Only parameters of `own` are compared:
    how the rest of a bucket is composed changes nothing for a graph that holds `own`.
    """
    indices = {parameter.index for parameter in own}
    bucket_of = {index: bucket for bucket, members in enumerate(actual) for index in members}
    planned_for = {p.index: bucket.index for bucket in planned for p in bucket.parameters}
    parts = [part for members in actual if (part := indices.intersection(members))]
    for bucket in planned:
        members = [p for p in bucket.parameters if p.index in indices and p.index in bucket_of]
        part = parts.pop(0) if members and parts else set()
        if part != {parameter.index for parameter in members}:
            outside = [parameter for parameter in members if parameter.index not in part]
            for first in (*outside, *(p for p in own if p.index in part), *members):
                if planned_for[first.index] != bucket_of[first.index]:
                    return Misplaced(first, planned_for[first.index], bucket_of[first.index])
    return None


def _fill(
    order: Sequence[Parameter], caps_bytes: Sequence[int]
) -> list[tuple[list[Parameter], int]]:
    """Pack parameters in the given order; return the buckets in the order of their closing."""
    closed: list[tuple[list[Parameter], int]] = []
    filling: dict[str, list[Parameter]] = {}  # by group, as is what follows
    num_bytes = collections.Counter[str]()
    num_closed = collections.Counter[str]()
    for parameter in order:
        if parameter.is_sparse:
            closed.append(([parameter], parameter.num_bytes))
            continue
        group = parameter.group
        filling.setdefault(group, []).append(parameter)
        num_bytes[group] += parameter.num_bytes
        cap = cap_of(caps_bytes, num_closed[group])
        if num_bytes[group] >= cap:
            closed.append((filling[group], cap))
            filling[group], num_bytes[group] = [], 0
            num_closed[group] += 1
    # Open buckets close in reverse order of their groups' first appearance: the Reducer walks a
    # hash table that puts new keys in front.
    for group, members in reversed(filling.items()):
        if members:
            closed.append((members, cap_of(caps_bytes, num_closed[group])))
    return closed


def cap_of(caps_bytes: Sequence[int], num_closed: int) -> int:
    """The limit of the bucket that follows `num_closed` others of its group."""
    return caps_bytes[min(num_closed, len(caps_bytes) - 1)]


def _number(closed: Sequence[tuple[list[Parameter], int]]) -> tuple[Bucket, ...]:
    return tuple(
        Bucket(index=index, parameters=tuple(parameters), cap_bytes=cap)
        for index, (parameters, cap) in enumerate(closed)
    )
