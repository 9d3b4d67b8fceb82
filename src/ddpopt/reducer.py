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

import collections
import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpopt._indices import BucketIndex, ParameterIndex, numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter that the Reducer reduces.

    `index` is its position in the Reducer's list, `name` its name in the module inside DDP.
    Parameters of equal `group` (dtype and device) may share a bucket.
    """

    index: ParameterIndex
    name: str
    num_bytes: int
    group: str
    is_sparse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerRules:
    """How a Reducer forms buckets.

    `caps_bytes` are the limits: the k-th for the k-th bucket of its group, the last one for all
    further ones. `follows_arrival` says whether it rebuilds buckets in the order of arrival (see
    [Note: buckets]). `is_provisional` says that they are about to be replaced by better ones.
    `arrives_last` are parameters, by index, whose gradients have to arrive last: when one arrives,
    DDP reduces gradients of further parameters, which are in no bucket and have to be final then.
    """

    caps_bytes: tuple[int, ...]
    follows_arrival: bool
    is_provisional: bool = False
    arrives_last: tuple[ParameterIndex, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that one allreduce carries. `cap_bytes` is the limit that applied."""

    index: BucketIndex
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
    if rules.follows_arrival:
        return number_buckets(_fill(arrival, rules.caps_bytes))
    registered = sorted(arrival, key=lambda parameter: parameter.index)
    closed = _fill(registered, rules.caps_bytes)
    # At construction buckets are ordered by their first parameter, then reversed, because
    # gradients are expected in reverse order of registration.
    closed.sort(key=lambda bucket: min(p.index for p in bucket[0]), reverse=True)
    return number_buckets(closed)


def known_buckets(
    parameters: Sequence[Parameter], actual: Sequence[Sequence[ParameterIndex]], rules: ReducerRules
) -> tuple[Bucket, ...]:
    """Buckets that the Reducer has, had or will be given, from the indices of their parameters.

    They are in launch order, which is the order in which those of a group were closed. LIMIT: DDP
    launches the buckets of its construction last first, so if these stay (`follows_arrival` is
    false) a bucket may be shown with the limit of another one.
    """
    by_index = {parameter.index: parameter for parameter in parameters}
    closed: list[tuple[list[Parameter], int]] = []
    num_closed = collections.Counter[str]()  # by group
    for indices in actual:
        members = [by_index[parameter_index] for parameter_index in indices]
        if any(parameter.is_sparse for parameter in members):  # alone, see `_fill`
            cap_bytes = members[0].num_bytes
        else:
            group = members[0].group
            cap_bytes = _cap_of(rules.caps_bytes, num_closed[group])
            num_closed[group] += 1
        closed.append((members, cap_bytes))
    return number_buckets(closed)


def in_launch_order(
    parameters: Iterable[Parameter], buckets: Sequence[Bucket]
) -> tuple[Parameter, ...]:
    """Parameters sorted by bucket; those in one bucket keep their order."""
    bucket_of = {p.index: bucket.index for bucket in buckets for p in bucket.parameters}
    return tuple(sorted(parameters, key=lambda parameter: bucket_of[parameter.index]))


class Misplaced(NamedTuple):
    """A parameter in another bucket than planned; buckets are numbered in launch order."""

    parameter: Parameter
    planned: BucketIndex
    actual: BucketIndex


def find_misplaced(
    parameters_of_graph: Sequence[Parameter],
    planned: Sequence[Bucket],
    actual: Sequence[Sequence[ParameterIndex]],
) -> Misplaced | None:
    """The first parameter of a graph that is reduced in another bucket than planned.

    All parameters of the graph are in `planned`. `actual` are the Reducer's buckets by parameter
    index. Only the graph's parameters are compared: how the rest of a bucket is composed changes
    nothing for it. Nor does the number of a bucket: it may have others before it which hold nothing
    of the graph. None if gradients of the graph share buckets as planned, and these have the
    planned order. A parameter that is in no actual bucket is left out.
    """
    own_indices = {parameter.index for parameter in parameters_of_graph}
    actual_bucket_of: dict[ParameterIndex, BucketIndex] = {}
    # The graph's parameters in each actual bucket, without buckets that have none.
    actual_parts: list[set[ParameterIndex]] = []
    for number, indices in numbered(BucketIndex, actual):
        actual_bucket_of.update(dict.fromkeys(indices, number))
        part = own_indices.intersection(indices)
        if part:
            actual_parts.append(part)
    planned_bucket_of: dict[ParameterIndex, BucketIndex] = {}
    for bucket in planned:
        for parameter in bucket.parameters:
            planned_bucket_of[parameter.index] = bucket.index

    # The k-th part that is planned has to be the k-th one that is actual.
    for bucket in planned:
        members = [
            parameter
            for parameter in bucket.parameters
            if parameter.index in own_indices and parameter.index in actual_bucket_of
        ]
        part = actual_parts.pop(0) if members and actual_parts else set()
        if part == {parameter.index for parameter in members}:
            continue
        # Name first who left the bucket, then who joined it; nobody whose two numbers are equal,
        # since the user reads both.
        left = [parameter for parameter in members if parameter.index not in part]
        joined = [parameter for parameter in parameters_of_graph if parameter.index in part]
        for parameter in (*left, *joined, *members):
            planned_number = planned_bucket_of[parameter.index]
            actual_number = actual_bucket_of[parameter.index]
            if planned_number != actual_number:
                return Misplaced(parameter, planned_number, actual_number)
    return None


class Order(enum.Enum):
    """How the order of gradients in actual buckets differs from that in planned ones."""

    EQUAL = enum.auto()  # where buckets end may differ
    OTHERS_MOVED = enum.auto()  # it is equal without the `others` of `compare_order`
    DIFFERENT = enum.auto()


def compare_order(
    planned: Sequence[Bucket],
    actual: Sequence[Sequence[ParameterIndex]],
    others: Collection[ParameterIndex],
) -> Order:
    """Compare the order of gradients with the planned one, and if it differs also without `others`.

    `others` are the indices of parameters that no compiled graph uses. Buckets hold parameters of
    one group, and those of several groups close in an order of their own: the order within each
    group counts. Only parameters of planned buckets are compared.
    """
    group_of = {p.index: p.group for bucket in planned for p in bucket.parameters}
    planned_order = [parameter.index for bucket in planned for parameter in bucket.parameters]
    actual_order = [index for bucket in actual for index in bucket if index in group_of]

    def by_group(order: Sequence[ParameterIndex]) -> dict[str, list[ParameterIndex]]:
        indices: dict[str, list[ParameterIndex]] = {}
        for index in order:
            indices.setdefault(group_of[index], []).append(index)
        return indices

    if by_group(planned_order) == by_group(actual_order):
        return Order.EQUAL
    planned_order = [index for index in planned_order if index not in others]
    actual_order = [index for index in actual_order if index not in others]
    is_equal = by_group(planned_order) == by_group(actual_order)
    return Order.OTHERS_MOVED if is_equal else Order.DIFFERENT


def _fill(
    order: Sequence[Parameter], caps_bytes: Sequence[int]
) -> list[tuple[list[Parameter], int]]:
    """Pack parameters in the given order; return the buckets in the order of their closing.

    Each comes with the limit that applied; a sparse parameter gets a bucket for itself, at once.
    """
    closed: list[tuple[list[Parameter], int]] = []
    # For each group: the bucket that is being filled, its size, and how many were closed before it.
    filling: dict[str, list[Parameter]] = {}
    num_bytes = collections.Counter[str]()
    num_closed = collections.Counter[str]()
    for parameter in order:
        if parameter.is_sparse:
            closed.append(([parameter], parameter.num_bytes))
            continue
        group = parameter.group
        filling.setdefault(group, []).append(parameter)
        num_bytes[group] += parameter.num_bytes
        if is_full(num_bytes[group], caps_bytes, num_closed[group]):
            closed.append((filling[group], _cap_of(caps_bytes, num_closed[group])))
            filling[group], num_bytes[group] = [], 0
            num_closed[group] += 1
    # Open buckets close in reverse order of their groups' first appearance: the Reducer walks a
    # hash table that puts new keys in front.
    for group, members in reversed(filling.items()):
        if members:
            closed.append((members, _cap_of(caps_bytes, num_closed[group])))
    return closed


def is_full(num_bytes: int, caps_bytes: Sequence[int], num_closed: int) -> bool:
    """Whether a bucket of this size is closed, as the one behind `num_closed` others."""
    return num_bytes >= _cap_of(caps_bytes, num_closed)


def _cap_of(caps_bytes: Sequence[int], num_closed: int) -> int:
    """The limit of the bucket that follows `num_closed` others of its group."""
    return caps_bytes[min(num_closed, len(caps_bytes) - 1)]


def number_buckets(closed: Sequence[tuple[list[Parameter], int]]) -> tuple[Bucket, ...]:
    """Buckets of these parameters and limits, numbered in the order given, that of their launch."""
    return tuple(
        Bucket(index=index, parameters=tuple(parameters), cap_bytes=cap)
        for index, (parameters, cap) in numbered(BucketIndex, closed)
    )
