"""An explanation as plain data, which JSON and the page are made of."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ddpopt.bucketing.timeline import BucketTimes, Timeline
from ddpopt.inspection.recording import RecordedBucket, RecordedStep
from ddpopt.split.plan import NodeText, Section, SplitPlan

if TYPE_CHECKING:
    from ddpopt.inspection.explain import BucketReport, Explanation

FORMAT = "ddpopt explanation 1"


def document_of(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation as dicts, lists, strings, numbers and None; times in seconds."""
    return {
        "format": FORMAT,
        "versions": {
            "ddpopt": importlib.metadata.version("ddpopt"),
            "torch": str(torch.__version__),
        },
        "model": explanation.model,
        "tuning": explanation.tuning,
        "hints": list(explanation.hints),
        "graphs": [
            _graph(plan, explanation.nodes.get(plan.graph, ())) for plan in explanation.plans
        ],
        "buckets": [_bucket(bucket) for bucket in explanation.buckets],
        "predicted": explanation.predicted and _predicted(explanation.predicted, explanation.basis),
        "measured": explanation.measured
        and _measured(explanation.measured, explanation.num_measured),
    }


def to_json(document: Mapping[str, Any]) -> str:
    """Return a document as JSON text."""
    return json.dumps(document, indent=1, allow_nan=False)


def _graph(plan: SplitPlan, nodes: Sequence[Sequence[NodeText]]) -> dict[str, Any]:
    sections = plan.sections or [
        Section(
            index=0,
            start=0,
            stop=plan.num_nodes,
            first_node=nodes[0][0].name if nodes and nodes[0] else "",
            parameters=tuple(parameter.name for parameter in plan.arrival),
            completes=(),
        )
    ]
    return {
        "name": plan.graph,
        "inner": plan.inner,
        "num_nodes": plan.num_nodes,
        "split": plan.split,
        "is_shared": plan.is_shared,
        "headline": plan.headline(),
        "fallback": plan.fallback and _reason(plan.fallback, plan.detail),
        "instead": plan.instead and _reason(plan.instead, plan.detail),
        "sections": [
            {
                "index": section.index,
                "num_nodes": section.num_nodes,
                "first_node": section.first_node,
                "parameters": list(section.parameters),
                "completes": list(section.completes),
                "nodes": [
                    _record(node, "name", "target", "shape", "source") for node in members or ()
                ],
            }
            for section, members in itertools.zip_longest(sections, nodes[: len(sections)])
        ],
    }


def _reason(reason: enum.Enum, detail: str) -> dict[str, str]:
    return {"name": reason.name, "text": reason.value, "detail": detail}


def _bucket(bucket: BucketReport) -> dict[str, Any]:
    return {
        **{f.name: _plain(getattr(bucket, f.name)) for f in dataclasses.fields(bucket)},
        "is_as_planned": bucket.is_as_planned,
        "predicted": _times(bucket.predicted),
        "measured": _times(bucket.measured),
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _times(times: BucketTimes | RecordedBucket | None) -> dict[str, float | None] | None:
    return None if times is None else _record(times, "ready_s", "launched_s", "finished_s")


def _predicted(timeline: Timeline, basis: str) -> dict[str, Any]:
    names = ("backward_s", "forward_s", "between_s", "communication_s", "alone_s")
    further = ("iteration_s", "exposed_s", "bound_s")
    return {"basis": basis, **_record(timeline, *names, *further)}


def _measured(step: RecordedStep, num_steps: int) -> dict[str, Any]:
    return {
        "num_steps": num_steps,
        "backward_s": step.backward_s,
        "forward_s": step.forward_stop_s - step.forward_start_s,
        "exposed_s": step.exposed_s,
        "communication_s": step.communication_s,
        "sections": [
            _record(section, "graph", "section", "kind", "start_s", "stop_s")
            for section in step.sections
        ],
    }


def _record(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}
