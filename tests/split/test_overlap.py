"""A property of all of `split`: communication overlaps backward, by the order of events."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.split.gates import CompiledSection
from tests.support.device import DEVICE
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import Ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
]


def _record_events(rank: int, inner: str, ddp_options: dict[str, Any]) -> tuple[list[str], Any]:
    """Train; return the events of the last backward, and the cut.

    `launch k` is the start of bucket k's allreduce; `section s` and `end s` enclose the backward of
    section s.
    """
    events: list[str] = []
    compile_section = torch._dynamo.lookup_backend(inner)
    sections: list[int] = []

    def marking(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        compiled = compile_section(gm, example_inputs)
        index = len(sections)
        sections.append(index)

        def run(*args: Any) -> Any:
            outputs = compiled(*args)
            if torch._guards.TracingContext.try_get() is None:
                node = next(o.grad_fn for o in outputs if o.requires_grad)
                node.register_prehook(lambda _: events.append(f"section {index}"))
                node.register_hook(lambda *_: events.append(f"end {index}"))
            return outputs

        return run

    return _train(rank, events, {"inner": marking}, ddp_options, _launch_into(events))


def _record_gated_events(
    rank: int, inner: str, ddp_options: dict[str, Any]
) -> tuple[list[str], Any]:
    """As `_record_events`, with the backward split."""
    events: list[str] = []
    indices: dict[tuple[int, ...], int] = {}
    run = CompiledSection.run

    def marking(section: CompiledSection, values: list[Any]) -> Any:
        index = indices.setdefault(section.flow.releases, len(indices))
        events.append(f"section {index}")
        gradients = run(section, values)
        events.append(f"end {index}")
        return gradients

    options = {"inner": inner, "split": "backward"}
    with mock.patch.object(CompiledSection, "run", marking):
        return _train(rank, events, options, ddp_options, _launch_into(events))


def _launch_into(events: list[str]) -> Any:
    def launch(_, bucket):
        events.append(f"launch {bucket.index()}")
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    return launch


def _train(
    rank: int, events: list[str], options: dict[str, Any], ddp_options: dict[str, Any], launch: Any
) -> tuple[list[str], Any]:
    ddp = DistributedDataParallel(MLP().to(DEVICE), bucket_cap_mb=0.03, **ddp_options)
    ddp.register_comm_hook(None, launch)
    compiled = torch.compile(ddp, backend="ddpopt", options=options)
    for x in batches(rank, [(2, WIDTH)] * 4):
        events.clear()
        compiled(x).sum().backward()
    return events, ddpopt.explain(ddp).cuts


@pytest.mark.quick("{}-aot_eager-forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("ddp_options", OPTIONS, ids=str)
def test_a_buckets_allreduce_is_launched_before_the_next_sections_backward(
    ranks: Ranks, inner: str, ddp_options: dict[str, Any], split: str
) -> None:
    """It is for every bucket but the last, on both ranks, in every mode of the Reducer."""
    record = _record_events if split == "forward" else _record_gated_events
    for events, (cut,) in ranks.run(record, inner, ddp_options):
        assert cut.split == split
        assert len(cut.sections) >= 3
        expected = []
        for section in cut.sections if split == "backward" else reversed(cut.sections):
            expected += [f"section {section.index}", f"end {section.index}"]
            expected += [f"launch {bucket}" for bucket in section.completes]
        assert events == expected
        launched = [event for event in events if event.startswith("launch")]
        assert launched == [f"launch {bucket.index}" for bucket in cut.buckets]


def test_the_unsplit_compile_launches_nothing_before_its_backward_is_done(ranks: Ranks) -> None:
    """So the launches between sections above are there because the graph was cut."""
    for events, (cut,) in ranks.run(_record_unsplit):
        assert cut.fallback is ddpopt.errors.Reason.DISABLED
        num_launches = len(events) - 2
        assert num_launches >= 3
        assert events == ["section 0", "end 0", *(f"launch {k}" for k in range(num_launches))]


def _record_unsplit(rank: int) -> tuple[list[str], Any]:
    with ddpopt.config.patch(enabled=False):
        return _record_events(rank, "aot_eager", {})
