"""`explain`: the plans in force for a DDP model and its buckets, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, records
from ddpopt.bucket_plan import BucketPlan
from ddpopt.buckets import Parameter
from ddpopt.plans import Observation, Plan, format_bytes, shorten, table


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """One bucket, planned and actual; names in the order of arrival.

    `actual` is empty until DDP has formed its buckets and told them. `graphs` hold its
    parameters; `completed_by` is the section whose backward produces the last gradient, as in
    `4/0 section 2`. `launched_after` counts the backward sections that had started when its
    allreduce was launched, in the step that `observe` saw.
    """

    index: int
    num_bytes: int
    planned: tuple[str, ...]
    actual: tuple[str, ...]
    graphs: tuple[str, ...]
    completed_by: str
    launched_after: int | None

    @property
    def is_as_planned(self) -> bool | None:
        """Whether DDP's bucket has the planned parameters; None where one is not known (yet)."""
        return set(self.planned) == set(self.actual) if self.planned and self.actual else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is known of one model: its buckets, and a plan for each compiled graph.

    `bucket_plan` is what its buckets were assigned by, `tuning` what `buckets="auto"` decided.
    """

    model: str
    plans: tuple[Plan, ...]
    buckets: tuple[BucketReport, ...]
    observation: Observation | None
    bucket_plan: BucketPlan | None = None
    tuning: str = ""

    def __str__(self) -> str:
        if not self.plans:
            return (
                f"ddpopt has compiled no graph of this {self.model}. Either its forward has not "
                "run yet, or it does not run under torch.compile(..., backend='ddpopt'), or "
                "Dynamo skips it (as it skips a torch.nn container right under DDP)."
            )
        parts = [self._bucket_table()] if self.buckets else []
        parts += [self.tuning] if self.tuning else []
        parts += [f"planned: {self.bucket_plan}"] if self.bucket_plan else []
        parts += ["\n".join([plan.headline(), *plan.section_table()]) for plan in self.plans]
        return "\n\n".join(parts)

    def _bucket_table(self) -> str:
        header = ("bucket", "size", "completed by", "launched", "DDP's", "parameters")
        rows = [
            (
                f"{bucket.index}",
                format_bytes(bucket.num_bytes),
                bucket.completed_by + (" (spans graphs)" if len(bucket.graphs) > 1 else ""),
                self._launched(bucket),
                {True: "as planned", False: "DIFFERS", None: "-"}[bucket.is_as_planned],
                shorten(bucket.planned or bucket.actual),
            )
            for bucket in self.buckets
        ]
        return "\n".join([f"{self.model}: {len(rows)} DDP buckets", "", *table(header, rows)])

    def _launched(self, bucket: BucketReport) -> str:
        if bucket.launched_after is None or self.observation is None:
            return "-"
        return f"after {bucket.launched_after} of {self.observation.num_backwards}"


def explain(model: torch.nn.Module) -> Explanation:
    """Return the plans that ddpopt made for a DDP model, which print as a table.

    `model` is a DistributedDataParallel module, or what `torch.compile` made of one. Plans exist
    once a forward with gradients has run, DDP's own buckets some steps later.

    Raises:
        TypeError: there is no DistributedDataParallel at the top of `model`.
    """
    ddp = records.ddp_of(model)
    record = records.of(ddp)
    plans = records.plans_of(ddp)
    return Explanation(
        model=type(ddp.module).__name__,
        plans=plans,
        buckets=tuple(_report_buckets(ddp, plans, record.actual_buckets, record.observation)),
        observation=record.observation,
        bucket_plan=record.bucket_plan,
        tuning=record.tuner.outcome if record.tuner else "",
    )


def _report_buckets(
    ddp: DistributedDataParallel,
    plans: Sequence[Plan],
    actual: Sequence[Sequence[int]] | None,
    observation: Observation | None,
) -> list[BucketReport]:
    """Merge the latest plan of the whole model, which knows most graphs, with DDP's buckets."""
    whole = [plan for plan in plans if plan.buckets and not plan.is_shared]
    planned = [bucket.parameters for bucket in whole[-1].buckets] if whole else []
    parameters = {p.index: p for p in _torch.reducer_parameters(ddp).values()} if actual else {}
    formed = [[parameters[index] for index in bucket] for bucket in actual or ()]
    launched = observation.launched_after if observation else ()
    return [
        _report_bucket(
            index,
            planned[index] if index < len(planned) else (),
            formed[index] if index < len(formed) else (),
            plans,
            launched[index] if index < len(launched) else None,
        )
        for index in range(max(len(planned), len(formed)))
    ]


def _report_bucket(
    index: int,
    planned: Sequence[Parameter],
    actual: Sequence[Parameter],
    plans: Sequence[Plan],
    launched_after: int | None,
) -> BucketReport:
    members = {parameter.name for parameter in planned or actual}
    newest = {plan.frame: plan for plan in plans}.values()  # of a frame's compiles
    graphs = [plan for plan in newest if members & {p.name for p in plan.arrival}]
    return BucketReport(
        index=index,
        num_bytes=sum(parameter.num_bytes for parameter in planned or actual),
        planned=tuple(parameter.name for parameter in planned),
        actual=tuple(parameter.name for parameter in actual),
        graphs=tuple(plan.graph for plan in graphs),
        completed_by=_completing_section(graphs[0], members) if graphs else "-",
        launched_after=launched_after,
    )


def _completing_section(plan: Plan, members: set[str]) -> str:
    """Return the section with a member that runs last."""
    ran_last_first = reversed(plan.sections) if plan.split == "backward" else plan.sections
    for section in ran_last_first:
        if members & set(section.parameters):
            return f"{plan.graph} section {section.index}"
    return plan.graph
