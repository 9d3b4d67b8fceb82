"""BucketPlan: which gradients share a bucket, with what it was planned from. Plain data.

It is made before DDP exists or for a DDP module that runs, saved as JSON, and applied by DDP's
own arguments or by `rebucket`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpopt.errors import PlanError
from ddpopt.planning.costs import AllreduceCost, Gradient, Profile, by_group
from ddpopt.planning.merging import best_buckets, buckets_of_caps, uniform_buckets
from ddpopt.planning.timeline import Timeline, predict
from ddpopt.plans import format_bytes, shorten, table

_MIB = 1024 * 1024
_VERSION = 1
DDP_DEFAULT_CAPS = (_MIB, 25 * _MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBucket:
    """The gradients of one allreduce, by their parameters' names, in the order of arrival."""

    parameters: tuple[str, ...]
    num_bytes: int
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Buckets for one model, and the costs for which they are best.

    `sizes[k]` gradients of the profile, in its order, complete together; where they are of several
    groups, they make a bucket for each.

    Raises:
        PlanError: `sizes` does not add up to the number of gradients, or `world_size` is below 1.
    """

    profile: Profile
    cost: AllreduceCost
    world_size: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise PlanError(f"world_size is {self.world_size!r}; it must be 1 or more")
        total = len(self.profile.gradients)
        if sum(self.sizes) != total or min(self.sizes) < 1:
            raise PlanError(
                f"the sizes of buckets {list(self.sizes)} must be above 0 and add up to the "
                f"number of gradients, {total}"
            )

    @functools.cached_property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        """The buckets in the order of their launch."""
        return tuple(
            PlannedBucket(
                parameters=tuple(gradient.name for gradient in gradients),
                num_bytes=sum(gradient.num_bytes for gradient in gradients),
                group=group,
            )
            for members in self.profile.split(self.sizes)
            for group, gradients in by_group(members).items()
        )

    @property
    def hash(self) -> str:
        """A digest of the buckets alone: ranks with equal ones can train together."""
        content = [[bucket.parameters, bucket.num_bytes] for bucket in self.buckets]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def timeline(self) -> Timeline:
        """Return the predicted times of an iteration with this plan."""
        return predict(self.profile, self.sizes, self.cost)

    def timeline_of_caps(self, caps_bytes: Sequence[int] = DDP_DEFAULT_CAPS) -> Timeline:
        """Return the predicted times with the buckets that DDP forms by caps in bytes."""
        return predict(self.profile, buckets_of_caps(self.profile, caps_bytes), self.cost)

    def ddp_kwargs(self) -> dict[str, Any]:
        """Return arguments for DistributedDataParallel by which it forms these buckets.

        `bucket_cap_mb_list` where all gradients are of one dtype and device. Else the list would
        count for each group by itself, and the best single `bucket_cap_mb` is given instead.
        """
        if len({gradient.group for gradient in self.profile.gradients}) == 1:
            return {"bucket_cap_mb_list": [bucket.num_bytes / _MIB for bucket in self.buckets]}
        best = min(
            uniform_buckets(self.profile),
            key=lambda sizes: predict(self.profile, sizes, self.cost).backward_s,
        )
        gradients = self.profile.gradients[: best[0]]
        return {"bucket_cap_mb": sum(gradient.num_bytes for gradient in gradients) / _MIB}

    def to_json(self) -> str:
        """Return the plan as JSON text, equal for equal plans."""
        content = {"version": _VERSION, **dataclasses.asdict(self), "hash": self.hash}
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: the text is none, of another version, or was changed by hand.
        """
        try:
            content = json.loads(text)
            version = content["version"]
            if version != _VERSION:
                raise PlanError(f"the plan is of version {version!r}; this reads {_VERSION}")
            profile = content["profile"]
            gradients = tuple(Gradient(**gradient) for gradient in profile.pop("gradients"))
            plan = cls(
                profile=Profile(gradients=gradients, **profile),
                cost=AllreduceCost(**content["cost"]),
                world_size=content["world_size"],
                sizes=tuple(content["sizes"]),
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"this is no plan that ddpopt saved: {error!r}") from error
        if content.get("hash") != plan.hash:
            raise PlanError(
                f"the plan's hash is {content.get('hash')!r}, but its buckets have {plan.hash!r}; "
                "plan again rather than edit a plan"
            )
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a file as JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> BucketPlan:
        """Read a plan that was saved.

        Raises:
            PlanError: the file holds no plan.
            OSError: it cannot be read.
        """
        return cls.from_json(Path(path).read_text())

    def __str__(self) -> str:
        timeline = self.timeline()
        rows = [
            (
                f"{index}",
                format_bytes(bucket.num_bytes),
                *(f"{t * 1e3:.1f}" for t in (times.ready_s, times.launched_s, times.finished_s)),
                shorten(bucket.parameters),
            )
            for index, (bucket, times) in enumerate(
                zip(self.buckets, timeline.buckets, strict=True)
            )
        ]
        header = ("bucket", "size", "ready ms", "launch", "finish", "parameters")
        default = self.timeline_of_caps()
        return "\n".join(
            [
                f"{len(rows)} buckets for {self.world_size} ranks ({self.profile.source} times): "
                f"backward {timeline.backward_s * 1e3:.1f} ms, of it computation "
                f"{timeline.computed_s * 1e3:.1f}; DDP's default buckets "
                f"{default.backward_s * 1e3:.1f}; bound of the iteration "
                f"{timeline.bound_s * 1e3:.1f}",
                "",
                *table(header, rows),
            ]
        )


def plan_buckets(profile: Profile, cost: AllreduceCost, world_size: int) -> BucketPlan:
    """Return the best buckets for a profile and a network; see planning/merging.py."""
    return BucketPlan(
        profile=profile, cost=cost, world_size=world_size, sizes=best_buckets(profile, cost)
    )
