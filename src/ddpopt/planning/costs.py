"""What an iteration costs: its computation, with the times of gradients, and its allreduces.

Pure numbers: times in seconds, sizes in bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpopt._text import count, quote
from ddpopt._values import BEYOND, POSITIVE, RANKS, Limits, check_kind, check_number
from ddpopt.errors import PlanError

if TYPE_CHECKING:
    import torch

ALGORITHMS = ("ring", "tree", "hierarchical")
_PROFILE_TIMES = ("backward_s", "forward_s", "between_s", "cut_s", "after_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A parameter's gradient, ready `ready_s` after backward began.

    Plans are made for times without communication in backward; `undisturbed` makes such times of
    measured ones. Only gradients of equal `group` (dtype and device) may share a bucket.
    """

    name: str
    num_bytes: int
    ready_s: float
    group: str = ""

    def __post_init__(self) -> None:
        _check_text(self, "name", "group")
        # 0 for a parameter without elements.
        sizes = Limits(at_least=0, below=BEYOND, is_whole=True)
        check_number("Gradient.num_bytes", self.num_bytes, sizes, PlanError)
        _check_numbers(self, "ready_s")

    @classmethod
    def from_dict(cls, content: Any, path: str) -> Gradient:
        """The gradient that a JSON object at this path of its document describes."""
        check_keys(cls, content, path)
        with naming_in_errors(path):
            return cls(**content)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBucket:
    """The gradients of one allreduce, in the order of arrival.

    They are reduced once the profile's gradient at index `last` is ready; that one may be of
    another group, see `Profile.buckets_of`.
    """

    gradients: tuple[Gradient, ...]
    last: int

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters, in the order of `gradients`."""
        return tuple(gradient.name for gradient in self.gradients)

    @property
    def num_bytes(self) -> int:
        """Size of its gradients."""
        return sum(gradient.num_bytes for gradient in self.gradients)

    @property
    def group(self) -> str:
        """The dtype and device that its gradients share."""
        return self.gradients[0].group


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The computation of one iteration, without any communication.

    `gradients` are in the order in which they become ready. `cut_s` is what each additional section
    of backward costs, unless `ready_s` contains it; `after_s` is the time that backward takes after
    the last allreduce (DDP copies reduced gradients back), `between_s` the time between backward
    and the next forward (the optimizer). `source` says where the times are from.

    Raises:
        PlanError: a time is negative or not finite, or gradients are not in order.
    """

    gradients: tuple[Gradient, ...]
    backward_s: float
    forward_s: float = 0.0
    between_s: float = 0.0
    cut_s: float = 0.0
    after_s: float = 0.0
    source: str = "given"

    def __post_init__(self) -> None:
        _check_numbers(self, *_PROFILE_TIMES)
        _check_text(self, "source")
        remedy = "give a tuple of Gradient"  # or a list, which callers may well write
        check_kind("Profile.gradients", self.gradients, (tuple, list), remedy, PlanError)
        for gradient in self.gradients:
            check_kind("one of Profile.gradients", gradient, Gradient, remedy, PlanError)
        ready = [gradient.ready_s for gradient in self.gradients]
        if not ready:
            raise PlanError("a profile has no gradients; the model has no parameter to reduce")
        if ready != sorted(ready):
            raise PlanError("the gradients of a profile must be in the order of their ready_s")
        if self.backward_s < ready[-1]:
            raise PlanError(
                f"backward_s is {self.backward_s}, before the last gradient at {ready[-1]} s"
            )

    @classmethod
    def from_dict(cls, content: Any, path: str) -> Profile:
        """The profile that a JSON object at this path of its document describes."""
        check_keys(cls, content, path)
        listed = content["gradients"]
        if not isinstance(listed, list):
            raise PlanError(f"{path}.gradients is {quote(listed)}; it must be a list")
        gradients = tuple(
            Gradient.from_dict(gradient, f"{path}.gradients[{index}]")
            for index, gradient in enumerate(listed)
        )
        with naming_in_errors(path):
            return cls(**{**content, "gradients": gradients})

    @property
    def num_bytes(self) -> int:
        """Size of all gradients."""
        return sum(gradient.num_bytes for gradient in self.gradients)

    def buckets_of(self, sizes: Sequence[int]) -> list[PlannedBucket]:
        """Buckets in launch order: the next `sizes[k]` gradients, in turn, complete together.

        If they are of several groups, each group is a bucket, in the order in which groups appear,
        and each of these buckets waits for the last of the `sizes[k]`, of whatever group that is.
        """
        buckets: list[PlannedBucket] = []
        start = 0
        for size in sizes:
            stop = start + size
            groups: dict[str, list[Gradient]] = {}
            for gradient in self.gradients[start:stop]:
                groups.setdefault(gradient.group, []).append(gradient)
            buckets += [
                PlannedBucket(gradients=tuple(members), last=stop - 1)
                for members in groups.values()
            ]
            start = stop
        return buckets

    def with_ready_times(self, ready_s: Sequence[float], **changes: Any) -> Profile:
        """The profile with these times for its gradients, and any other changes."""
        pairs = zip(self.gradients, ready_s, strict=True)
        gradients = tuple(dataclasses.replace(gradient, ready_s=t) for gradient, t in pairs)
        return dataclasses.replace(self, gradients=gradients, **changes)

    def slowed(self, factor: float) -> Profile:
        """The profile of a computation that takes `factor` times as long."""
        times = {name: getattr(self, name) * factor for name in _PROFILE_TIMES}
        return self.with_ready_times([g.ready_s * factor for g in self.gradients], **times)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceCost:
    """An allreduce of n bytes takes `startup_s + n * s_per_byte`.

    While bytes move, computation loses the fraction `interference` of its speed; while computation
    runs, bytes take `contention` times as long; and each allreduce, of whatever size, delays
    computation by `launch_s`.

    Raises:
        PlanError: a number is negative or not finite, `interference` is not below 1, or
            `contention` is below 1.
    """

    startup_s: float
    s_per_byte: float
    interference: float = 0.0
    contention: float = 1.0
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, "startup_s", "s_per_byte", "launch_s")
        _check_numbers(self, "interference", below=1)
        _check_numbers(self, "contention", at_least=1)

    @classmethod
    def from_dict(cls, content: Any, path: str) -> AllreduceCost:
        """The cost that a JSON object at this path of its document describes."""
        check_keys(cls, content, path)
        with naming_in_errors(path):
            return cls(**content)

    @property
    def s_per_mib(self) -> float:
        """The rate in the unit that people read."""
        return self.s_per_byte * 2**20

    def seconds(self, num_bytes: float) -> float:
        """Return how long an allreduce of `num_bytes` takes."""
        return self.startup_s + self.s_per_byte * num_bytes

    def extrapolated(self, from_ranks: int, to_ranks: int) -> AllreduceCost:
        """This cost, which is that of a ring of `from_ranks`, in a ring of `to_ranks`.

        A ring of n ranks reduces in 2 (n - 1) steps, one after another. In each of them every rank
        sends 1 / n of the bytes to the next, which is 2 (n - 1) / n of them in all (Patarasuk and
        Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). So
        `startup_s` grows with the steps and `s_per_byte` with the bytes: from 8 ranks to 16, by
        30 / 14 and (30 / 16) / (14 / 8). Links are taken to be equal. What computation loses stays,
        except that one rank alone communicates nothing.

        Raises:
            PlanError: a number of ranks is no whole number, or below 1; or `from_ranks` is 1, whose
                cost says nothing of messages, and `to_ranks` more.
        """
        check_number("from_ranks", from_ranks, RANKS, PlanError)
        check_number("to_ranks", to_ranks, RANKS, PlanError)
        if from_ranks == to_ranks:
            return self
        if from_ranks == 1:
            raise PlanError(
                f"the cost is that of 1 rank, from which none follows for {to_ranks}; give a "
                "network"
            )
        steps, steps_before = _steps_of_ring(to_ranks), _steps_of_ring(from_ranks)
        return dataclasses.replace(
            self,
            startup_s=self.startup_s * (steps / steps_before),
            s_per_byte=self.s_per_byte * ((steps * from_ranks) / (steps_before * to_ranks)),
            launch_s=self.launch_s if to_ranks > 1 else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The links of a cluster, from which the cost of an allreduce follows for any world size.

    `latency_s` is that of a message between nodes, `bytes_per_s` the rate of a node's link in each
    direction; `node_latency_s` and `node_bytes_per_s` are the same between the ranks of one node.
    `interference`, `contention` and `launch_s` are as in `AllreduceCost`.

    Raises:
        PlanError: a number is out of range, or `algorithm` is not one of `ALGORITHMS`.
    """

    latency_s: float
    bytes_per_s: float
    algorithm: str = "ring"
    ranks_per_node: int = 1
    node_latency_s: float = 0.0
    node_bytes_per_s: float = math.inf
    interference: float = 0.0
    contention: float = 1.0
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, "latency_s", "launch_s", "node_latency_s")
        _check_numbers(self, "interference", below=1)
        _check_numbers(self, "contention", at_least=1)
        check_number("ranks_per_node", self.ranks_per_node, RANKS, PlanError)
        for name in ("bytes_per_s", "node_bytes_per_s"):
            # A link may be infinitely fast, as by default those within a node are.
            check_number(name, getattr(self, name), Limits(above=0, below=None), PlanError)
        if self.algorithm not in ALGORITHMS:
            raise PlanError(f"algorithm is {quote(self.algorithm)}; valid are {list(ALGORITHMS)}")

    def allreduce(self, world_size: int) -> AllreduceCost:
        """Return what an allreduce over `world_size` ranks costs.

        Formulas and their sources are in docs/simulation.md: a ring (Patarasuk and Yuan, 2009), a
        pipelined pair of trees (Sanders, Speck and Traff, 2009), or a ring around the nodes between
        a scatter and a gather within them.

        Raises:
            PlanError: `world_size` is no whole number, or below 1.
        """
        check_number("world_size", world_size, RANKS, PlanError)
        inside = min(self.ranks_per_node, world_size)
        nodes = math.ceil(world_size / self.ranks_per_node)
        slowest = min(self.bytes_per_s, self.node_bytes_per_s if inside > 1 else math.inf)
        steps = _steps_of_ring(world_size)
        if nodes == 1:
            latency = steps * self.node_latency_s
            per_byte = steps / world_size / self.node_bytes_per_s
        elif self.algorithm == "hierarchical":
            steps_within, steps_between = _steps_of_ring(inside), _steps_of_ring(nodes)
            latency = steps_within * self.node_latency_s + steps_between * self.latency_s
            per_byte = (
                steps_within / inside / self.node_bytes_per_s
                + steps_between / nodes / self.bytes_per_s
            )
        elif self.algorithm == "ring":
            # Bytes pass the ranks of a node in turn: one step in `inside` leads to another node.
            steps_between = math.ceil(steps / inside)
            latency = steps_between * self.latency_s
            latency += (steps - steps_between) * self.node_latency_s
            per_byte = steps / world_size / slowest
        else:  # "tree": up and down again, between nodes and within each
            within_s = math.ceil(math.log2(inside)) * self.node_latency_s
            latency = 2 * (math.ceil(math.log2(nodes)) * self.latency_s + within_s)
            per_byte = 2 / slowest
        return AllreduceCost(
            startup_s=latency,
            s_per_byte=per_byte,
            interference=self.interference,
            contention=self.contention,
            launch_s=self.launch_s if world_size > 1 else 0.0,
        )


def describe_extrapolation(from_ranks: int, to_ranks: int) -> str:
    """How a cost was computed for other ranks than it is known for; "" if it is for these."""
    if from_ranks == to_ranks:
        return ""
    return f"extrapolated from {count(from_ranks, 'rank')} to {to_ranks}"


def _steps_of_ring(num_ranks: int) -> int:
    """The number of successive messages; each carries 1 / `num_ranks` of all bytes."""
    return 2 * (num_ranks - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The rates of a device: FLOPs of large matrix products, bytes of large copies, small calls.

    `flops_per_s` is by dtype; a missing dtype is assumed to be as slow as the slowest. `launch_s`
    is the additional cost of each call.

    Raises:
        PlanError: a rate is not positive and finite, or there is no rate of FLOPs.
    """

    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        remedy = "give rates by dtype, as {torch.float32: 1e13}"
        check_kind("Device.flops_per_s", self.flops_per_s, Mapping, remedy, PlanError)
        if not self.flops_per_s:
            raise PlanError("Device.flops_per_s is empty; give a rate for torch.float32 at least")
        rates = {f"flops_per_s[{dtype}]": rate for dtype, rate in self.flops_per_s.items()}
        for name, rate in {**rates, "bytes_per_s": self.bytes_per_s}.items():
            check_number(f"Device.{name}", rate, POSITIVE, PlanError)
        _check_numbers(self, "launch_s")

    def seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype | None = None) -> float:
        """Return how long a call takes without its launch: the longer of arithmetic and memory.

        This is the roofline model (Williams, Waterman and Patterson, 2009).
        """
        rates = self.flops_per_s
        rate = min(rates.values()) if dtype is None or dtype not in rates else rates[dtype]
        return max(flops / rate, moved_bytes / self.bytes_per_s)


def _check_numbers(owner: Any, *names: str, at_least: float = 0, below: float = BEYOND) -> None:
    """Raise PlanError unless these attributes are numbers in range."""
    for name in names:
        what = f"{type(owner).__name__}.{name}"
        limits = Limits(at_least=at_least, below=below)
        check_number(what, getattr(owner, name), limits, PlanError)


def _check_text(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, str):
            raise PlanError(f"{type(owner).__name__}.{name} is {quote(value)}; it must be text")


def check_keys(kind: type, content: Any, path: str) -> None:
    """Raise PlanError unless a JSON value is an object with this dataclass's fields as its keys.

    Fields that have a default may be missing. `path` says where in its document the value is, as
    `profile.gradients[3]`.
    """
    if not isinstance(content, dict):
        raise PlanError(f"{path} is {quote(content)}; it must be an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in content:
            raise PlanError(f"{path} has no {name!r}")
    for name in content:
        if name not in fields:
            raise PlanError(f"{path} has a key {quote(name)}; its keys are {', '.join(fields)}")


@contextlib.contextmanager
def naming_in_errors(path: str) -> Iterator[None]:
    """Begin the message of a ValueError in this block with a path in a document, or its name."""
    try:
        yield
    except ValueError as error:  # a PlanError is one too
        raise PlanError(f"{path}: {error}") from error


def fit_cost(num_bytes: Sequence[float], seconds: Sequence[float]) -> AllreduceCost:
    """Fit the cost of an allreduce to measured times by the method of Theil and Sen.

    The rate is the median of the slopes between all pairs of sizes, the start-up time the median
    of what is left; a few disturbed measurements change neither. Both are at least 0.

    Raises:
        PlanError: there are fewer than two different sizes.
    """
    points = list(zip(num_bytes, seconds, strict=True))
    pairs = itertools.combinations(points, 2)
    slopes = [(t - s) / (n - m) for (m, s), (n, t) in pairs if n != m]
    if not slopes:
        raise PlanError("a fit needs allreduces of two different sizes or more")
    slope = max(0.0, statistics.median(slopes))
    rest = statistics.median(s - slope * n for n, s in points)
    return AllreduceCost(startup_s=max(0.0, rest), s_per_byte=slope)
