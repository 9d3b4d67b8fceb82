"""A property of all of `split`: communication overlaps backward, by the order of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import Reason
from ddpopt.split.cut import Cut
from ddpopt.split.gates import CompiledSection
from tests.support.beside import compiled
from tests.support.cuts import only_cut
from tests.support.device import DEVICE
from tests.support.models import MLP, WIDTH, batches
from tests.support.on_ranks import on_ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
]


def _marking(events: list[str], inner: str) -> Callable[..., Any]:
    """An inner compiler whose graphs add `section s` and `end s` around their backward."""
    compile_section = torch._dynamo.lookup_backend(inner)
    num_sections = 0

    def compile_marked(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        nonlocal num_sections
        graph, index = compile_section(gm, example_inputs), num_sections
        num_sections += 1

        def run(*args: Any) -> Any:
            outputs = graph(*args)
            if torch._guards.TracingContext.try_get() is None:
                node = next(o.grad_fn for o in outputs if o.requires_grad)
                node.register_prehook(lambda _: events.append(f"section {index}"))
                node.register_hook(lambda *_: events.append(f"end {index}"))
            return outputs

        return run

    return compile_marked


def _record_events(
    rank: int, inner: str, ddp_options: dict[str, Any], **options: Any
) -> tuple[list[str], Cut]:
    """Train; return the events of the last backward, and the cut.

    `launch k` is the start of bucket k's allreduce; `section s` and `end s` enclose the backward of
    section s.
    """
    events: list[str] = []
    indices: dict[tuple[int, ...], int] = {}
    run_section = CompiledSection.run

    def run(section: CompiledSection, values: list[Any]) -> Any:
        index = indices.setdefault(section.flow.releases, len(indices))
        events.append(f"section {index}")
        gradients = run_section(section, values)
        events.append(f"end {index}")
        return gradients

    def launch(_, bucket):  # DDP refuses annotations that are strings
        events.append(f"launch {bucket.index()}")
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp = DistributedDataParallel(MLP().to(DEVICE), bucket_cap_mb=0.03, **ddp_options)
    ddp.register_comm_hook(None, launch)
    is_gated = options.get("split") == "backward"  # and then sections have no node of their own
    model = compiled(ddp, inner if is_gated else _marking(events, inner), **options)
    with mock.patch.object(CompiledSection, "run", run):
        for x in batches(rank, [(2, WIDTH)] * 4):
            events.clear()
            model(x).sum().backward()
    return events, only_cut(ddp)


@on_ranks(2)
@pytest.mark.quick("aot_eager-{}-forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
@pytest.mark.parametrize(
    ("inner", "ddp_options"),
    [*(("aot_eager", options) for options in OPTIONS), ("inductor", {})],
    ids=str,
)
def test_a_buckets_allreduce_is_launched_before_the_next_sections_backward(
    rank: int, inner: str, ddp_options: dict[str, Any], split: str
) -> None:
    """Every bucket but the last is launched early, on both ranks, in every mode of the Reducer."""
    events, cut = _record_events(rank, inner, ddp_options, split=split)
    assert cut.split == split
    assert len(cut.sections) >= 3
    expected = []
    for section in cut.sections if split == "backward" else reversed(cut.sections):
        expected += [f"section {section.index}", f"end {section.index}"]
        expected += [f"launch {bucket}" for bucket in section.completes]
    assert events == expected
    launched = [event for event in events if event.startswith("launch")]
    assert launched == [f"launch {bucket.index}" for bucket in cut.buckets]


@on_ranks(2)
def test_the_unsplit_compile_launches_nothing_before_its_backward_is_done(rank: int) -> None:
    """So the launches between sections above are there because the graph was cut."""
    events, cut = _record_events(rank, "aot_eager", {}, enabled=False)
    assert cut.fallback is Reason.DISABLED
    num_launches = len(events) - 2
    assert num_launches >= 3
    assert events == ["section 0", "end 0", *(f"launch {k}" for k in range(num_launches))]
