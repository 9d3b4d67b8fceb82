"""BucketPlan: which gradients share a bucket, and what that was planned from; `plan` makes one.

A plan is plain data. It is made before DDP exists or for a running DDP module, saved as JSON, and
applied through DDP's own arguments or by `rebucket`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpopt import _copies
from ddpopt._text import as_html, count, format_ms, quote, shorten, write_text
from ddpopt._values import POSITIVE_WHOLE, RANKS, check_kind, check_number
from ddpopt.errors import PlanError
from ddpopt.planning.batch import LossFn, call_model, find_loss
from ddpopt.planning.costs import (
    AllreduceCost,
    Device,
    Network,
    PlannedBucket,
    Profile,
    check_keys,
    describe_extrapolation,
    naming_in_errors,
)
from ddpopt.planning.estimates import estimate, scale, wrapped_module
from ddpopt.planning.merging import best_buckets, buckets_of_caps, uniform_caps
from ddpopt.planning.randomness import restoring_randomness
from ddpopt.planning.timeline import Timeline, bucket_table, predict
from ddpopt.steps.clock import Clock

_MIB = 1024 * 1024
_VERSION = 1
DDP_DEFAULT_CAPS = (_MIB, 25 * _MIB)
_NUM_STEPS = 5  # that are timed
# The cost of an additional section of backward; benchmarks/cost/overhead.py measured 40 us.
_CUT_S = 50e-6


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Buckets for one model, and the costs for which they are best.

    The next `sizes[k]` gradients of the profile, in its order, complete together; if they are of
    several groups, each group gets a bucket.

    `cost` is that of `world_size` ranks. The buckets may be used by any number of them; what is
    predicted may not, see `for_ranks`.

    Raises:
        PlanError: `sizes` does not add up to the number of gradients, two of these share a name, or
            a number of ranks or a size is no whole number, or below 1.
    """

    profile: Profile
    cost: AllreduceCost
    world_size: int
    sizes: tuple[int, ...]
    # The number of ranks whose cost was known, if that of `world_size` was computed from it.
    extrapolated_from: int | None = None

    def __post_init__(self) -> None:
        check_number("world_size", self.world_size, RANKS, PlanError)
        if self.extrapolated_from is not None:
            check_number("extrapolated_from", self.extrapolated_from, RANKS, PlanError)
        check_kind("profile", self.profile, Profile, "give what estimate returns", PlanError)
        check_kind("cost", self.cost, AllreduceCost, "give what calibrate returns", PlanError)
        remedy = "give the number of gradients of each bucket, as (2, 5)"
        # A list is what callers write; `load` makes a tuple of a file's.
        check_kind("sizes", self.sizes, (tuple, list), remedy, PlanError)
        total = len(self.profile.gradients)
        for index, size in enumerate(self.sizes):
            check_number(f"sizes[{index}]", size, POSITIVE_WHOLE, PlanError)
        if sum(self.sizes) != total:
            raise PlanError(
                f"the sizes of buckets must add up to the number of gradients, {total}; they add "
                f"up to {quote(sum(self.sizes))}"
            )
        if len({gradient.name for gradient in self.profile.gradients}) < total:
            raise PlanError("two gradients have the same name; give each its parameter's name")

    @functools.cached_property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        """The buckets in the order of their launch."""
        return tuple(self.profile.buckets_of(self.sizes))

    @property
    def caps_bytes(self) -> tuple[int, ...]:
        """The limits with which DDP's Reducer forms these buckets, one for each.

        Gradients without elements may be left over at the end, in a bucket that no limit closes.
        With a limit of 0 the Reducer would close one behind each of them.
        """
        return tuple(max(1, bucket.num_bytes) for bucket in self.buckets)

    @property
    def hash(self) -> str:
        """A digest of the buckets that DDP forms: ranks with equal ones can train together."""
        content: list[Any] = [[bucket.parameters, bucket.num_bytes] for bucket in self.buckets]
        if not self._has_one_group:
            # Here they follow from one cap, which the cost decides.
            content.append(self.ddp_kwargs())
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def _has_one_group(self) -> bool:
        """Whether all gradients are of one dtype and device, so that DDP can form any buckets."""
        return len({gradient.group for gradient in self.profile.gradients}) == 1

    @property
    def basis_ranks(self) -> int:
        """The number of ranks whose cost was given or measured; `cost` may be extrapolated."""
        return self.extrapolated_from or self.world_size

    @property
    def extrapolation(self) -> str:
        """How `cost` was computed from that of other ranks, for users; "" if it was not."""
        return describe_extrapolation(self.basis_ranks, self.world_size)

    def for_ranks(
        self, num_ranks: int, network: Network | AllreduceCost | None = None
    ) -> BucketPlan:
        """The same buckets, with the cost of an allreduce among `num_ranks` ranks.

        Without `network` that is the cost of a ring with more or fewer ranks of the same kind
        (`AllreduceCost.extrapolated` has the formula and its source), and `extrapolated_from` has
        the number of ranks whose cost was known, also after a second extrapolation. With a
        `network` it is the cost in that network; an `AllreduceCost` is taken as it is, with what it
        says of computation. Otherwise computation is as it was: each rank is taken to have as large
        a batch. From one rank no cost leads back to more.

        Raises:
            PlanError: `num_ranks` is no whole number, or below 1; the plan is for 1 rank, from
                whose cost none follows for more; or `network` is neither.
        """
        check_number("num_ranks", num_ranks, RANKS, PlanError)
        if network is not None:
            remedy = "give a ddpopt.planning.Network, or what calibrate returned"
            check_kind("network", network, (Network, AllreduceCost), remedy, PlanError)
            cost = network.allreduce(num_ranks) if isinstance(network, Network) else network
            return dataclasses.replace(
                self, cost=cost, world_size=num_ranks, extrapolated_from=None
            )
        if num_ranks == self.world_size:
            return self
        return dataclasses.replace(
            self,
            cost=self.cost.extrapolated(self.world_size, num_ranks),
            world_size=num_ranks,
            extrapolated_from=None if num_ranks == self.basis_ranks else self.basis_ranks,
        )

    def timeline(self) -> Timeline:
        """The predicted times of an iteration with this plan."""
        return predict(self.profile, self.sizes, self.cost)

    def ddp_kwargs(self) -> dict[str, Any]:
        """Return arguments for DistributedDataParallel with which it forms these buckets.

        `bucket_cap_mb_list`, or the best `bucket_cap_mb` if gradients are of several dtypes or
        devices: the list would apply to each of them separately.

        Which cap is best depends on the cost, so that it may differ for another number of ranks.
        The number is the plan's, whoever asks; all ranks have to ask an equal plan.
        """
        if self._has_one_group:
            return {"bucket_cap_mb_list": [cap / _MIB for cap in self.caps_bytes]}

        def predict_iteration_s(cap_bytes: int) -> float:
            sizes = buckets_of_caps(self.profile, (cap_bytes,))
            # By the cost among the plan's ranks, not among the process group's: a rank that asks
            # before it joins would get another cap.
            return predict(self.profile, sizes, self.cost).iteration_s

        return {"bucket_cap_mb": min(uniform_caps(self.profile), key=predict_iteration_s) / _MIB}

    def to_json(self) -> str:
        """The plan as JSON text, equal for equal plans."""
        return json.dumps({"version": _VERSION, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the text is not a plan, or is of another version; the message says where.
        """
        return cls._read(text, "the text")

    def save(self, path: str | Path) -> None:
        """Write the plan to a file as JSON; an existing file or link of that name is replaced.

        Raises:
            OSError: the file cannot be written, or a folder or a device has that name.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> BucketPlan:
        """Read a saved plan.

        Raises:
            PlanError: the file holds no plan (see `from_json`); the message names it.
            OSError: the file cannot be read.
        """
        return cls._read(Path(path).read_bytes(), str(path))

    @classmethod
    def _read(cls, text: str | bytes, name: str) -> BucketPlan:
        """The plan in a JSON text, whose name is in front of whatever is wrong with it."""
        try:
            content = json.loads(text, object_pairs_hook=_unique)
        except PlanError as error:  # of `_unique`
            raise PlanError(f"{name}: {error}") from error
        except ValueError as error:
            raise PlanError(
                f"{name} is not JSON: {error}; give what BucketPlan.save or to_json wrote"
            ) from error
        except RecursionError as error:
            raise PlanError(f"{name} has lists in lists, deeper than a plan has them") from error
        with naming_in_errors(name):
            if not isinstance(content, dict) or "version" not in content:
                raise PlanError("it has no 'version', as a plan has that BucketPlan.save wrote")
            version = content.pop("version")
            if version != _VERSION or type(version) is not int:  # true and 1.0 are equal to 1
                raise PlanError(
                    f"its version is {quote(version)}, and this ddpopt reads {_VERSION}; plan "
                    "again, or read it with the release that wrote it"
                )
            for key in ("hash", "communication"):  # older plans have them
                content.pop(key, None)
            check_keys(cls, content, "the plan")
            if not isinstance(content["sizes"], list):
                raise PlanError(f"sizes is {quote(content['sizes'])}; it must be a list")
            content["sizes"] = tuple(content["sizes"])
            content["profile"] = Profile.from_dict(content["profile"], "profile")
            content["cost"] = AllreduceCost.from_dict(content["cost"], "cost")
            return cls(**content)

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def __str__(self) -> str:
        default_sizes = tuple(buckets_of_caps(self.profile, DDP_DEFAULT_CAPS))
        default = dataclasses.replace(self, sizes=default_sizes).timeline()
        timeline = self.timeline()
        names = (shorten(bucket.parameters) for bucket in self.buckets)
        basis = f"{self.profile.source} times"
        if self.extrapolation:
            basis += f", allreduces {self.extrapolation}"
        return "\n".join(
            [
                f"{count(len(self.buckets), 'bucket')} for {count(self.world_size, 'rank')} "
                f"({basis}): backward {format_ms(timeline.backward_s)} ms, "
                f"of it computation {format_ms(timeline.computed_s)}; with DDP's default buckets "
                f"{format_ms(default.backward_s)}; whatever the buckets, an iteration takes "
                f"{format_ms(timeline.bound_s)} or more",
                "",
                *bucket_table(timeline.buckets, "parameters", names),
            ]
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, which has each key once: of two values Python's parser would drop one."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        (twice, *_) = [key for key in content if keys.count(key) > 1]
        raise PlanError(f"an object has the key {quote(twice)} twice; leave one out")
    return content


def plan_buckets(profile: Profile, cost: AllreduceCost, world_size: int) -> BucketPlan:
    """The best buckets for a profile and a network; see [Note: merging]."""
    return BucketPlan(
        profile=profile,
        cost=cost,
        world_size=world_size,
        sizes=best_buckets(profile, cost),
    )


def plan(  # noqa: PLR0913  # what a plan depends on; all but two have defaults
    model: nn.Module,
    batch: Any,
    *,
    network: AllreduceCost | Network,
    world_size: int | None = None,
    backend: str | Callable[..., Any] | None = "inductor",
    device: Device | None = None,
    loss_fn: LossFn | None = None,
) -> BucketPlan:
    """The best buckets for a model, a batch and a network; apply them with `ddp_kwargs()`.

    The part of backward that each gradient has to wait for is estimated (see `estimate`); forward
    and backward are timed, on a copy of the model. The model, what it holds, and the random number
    states of torch, Python and numpy are left unchanged.
    With several ranks, make the plan on one and broadcast `to_json()`: times differ between ranks.

    Args:
        model: What DDP is to wrap, or wraps, or the DDP module; compiled or not, on its device, in
            the mode used in training.
        batch: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
        network: What `calibrate` measured among `world_size` ranks, or the links of a cluster.
        world_size: Number of ranks; None means that of the default process group. For others than
            were measured, see `BucketPlan.for_ranks`.
        backend: Compiles the model for the measurement; None measures it uncompiled.
        device: Rates of the device, to run nothing: then times are estimated too, as they are for
            models on the meta device.
        loss_fn: Computes a scalar from the model's output; the default is as in `estimate`.

    Raises:
        TypeError: `model` is no module.
        PlanError: another argument is of a wrong kind; the model cannot be traced or copied, or
            `world_size` is missing or below 1.
    """
    check_kind("model", model, nn.Module, "give what DDP is to wrap", TypeError)
    remedy = "give what calibrate returned, or a ddpopt.planning.Network"
    check_kind("network", network, (AllreduceCost, Network), remedy, PlanError)
    if backend is not None and not callable(backend):
        remedy = "give the name of a backend, or None to measure the model uncompiled"
        check_kind("backend", backend, str, remedy, PlanError)
    if world_size is None:
        if not dist.is_initialized():
            raise PlanError("world_size is None without a process group; give the number of ranks")
        world_size = dist.get_world_size()
    check_number("world_size", world_size, RANKS, PlanError)
    cost = network.allreduce(world_size) if isinstance(network, Network) else network
    # Of the DDP module, if it is one: with a static graph it may have unused parameters.
    profile = estimate(model, batch, device=device, loss_fn=loss_fn)
    model = wrapped_module(model)
    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    if device is None and not is_on_meta:
        # Measured without cuts. What one costs where times are only estimated is not known.
        forward_s, backward_s = _measure(model, batch, backend, loss_fn)
        profile = dataclasses.replace(scale(profile, forward_s, backward_s), cut_s=_CUT_S)
    return plan_buckets(profile, cost, world_size)


def _measure(
    model: nn.Module,
    batch: Any,
    backend: str | Callable[..., Any] | None,
    loss_fn: LossFn | None,
) -> tuple[float, float]:
    """The median times of forward and backward, without the first step, which compiles.

    What is run is a copy: a forward may keep what it likes, backward's hooks may step an optimizer,
    and the Reducer of a DistributedDataParallel that the model is in would take notes.
    """
    copied, own_loss, _ = _copies.copy_model(model, loss_fn, PlanError)
    batch = _copies.copy_batch(batch, PlanError)
    # If the copy uses the model all the same: a backward that reaches its parameters raises, and
    # its buffers are restored.
    with _copies.shielded(model, _copies.copy_buffers(model), PlanError, "the model"):
        return _time_steps(copied, batch, backend, own_loss)


def _time_steps(
    model: nn.Module, batch: Any, backend: str | Callable[..., Any] | None, loss_fn: LossFn | None
) -> tuple[float, float]:
    """Run steps of a model; return the median times of forward and backward, the first aside."""
    compiled: Any = torch.compile(model, backend=backend) if backend is not None else model
    parameters = set(model.parameters())
    clocks = [Clock(device) for device in {parameter.device for parameter in parameters}]
    times: list[tuple[float, float]] = []
    with restoring_randomness(model):
        for _ in range(_NUM_STEPS + 1):
            model.zero_grad(set_to_none=True)
            start_s = max(clock.finish() for clock in clocks)
            value = find_loss(call_model(compiled, batch), loss_fn)
            middle_s = max(clock.finish() for clock in clocks)
            # Leaves outside of the model, such as a teacher's parameters, get no gradient. To find
            # them the graph is walked through, so backward's time begins behind that.
            with _copies.sparing_others(value, parameters):
                backward_start_s = max(clock.finish() for clock in clocks)
                value.backward()  # type: ignore[no-untyped-call]  # as torch has it
                stop_s = max(clock.finish() for clock in clocks)
            times.append((middle_s - start_s, stop_s - backward_start_s))
    forward_s, backward_s = map(statistics.median, zip(*times[1:], strict=True))
    return forward_s, backward_s
