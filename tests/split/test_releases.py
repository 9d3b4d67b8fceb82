"""A gradient is released where autograd releases it: behind all that its autograd node does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpopt._indices import Argument
from ddpopt.errors import Reason
from ddpopt.split import facts
from ddpopt.split.gates import CompiledSection, Run
from ddpopt.split.nodes import call_nodes, is_pure, may_communicate
from ddpopt.split.releases import _arguments_passed_on
from tests.support.backward_functions import NotesAfterGradient, NotesOfWeight, ReadsAfterGradient
from tests.support.beside import Beside, compiled
from tests.support.cuts import only_cut
from tests.support.graphs import Capture
from tests.support.models import batches

SIZE = 16
CAP = {"bucket_cap_mb": 0.0005, "broadcast_buffers": False}  # each layer has a bucket of its own
Step = Callable[[torch.Tensor, nn.Linear, torch.Tensor], torch.Tensor]


def _linear(x: torch.Tensor, layer: nn.Linear, note: torch.Tensor) -> torch.Tensor:
    return NotesAfterGradient.apply(x, layer.weight, note) + layer.bias


def _identity(x: torch.Tensor, layer: nn.Linear, note: torch.Tensor) -> torch.Tensor:
    return x @ NotesOfWeight.apply(layer.weight, note).t() + layer.bias


def _transposed(x: torch.Tensor, layer: nn.Linear, note: torch.Tensor) -> torch.Tensor:
    """As `_identity`, of a view of the weight."""
    return x @ NotesOfWeight.apply(layer.weight.t(), note) + layer.bias


def _reading(x: torch.Tensor, layer: nn.Linear, note: torch.Tensor) -> torch.Tensor:
    return ReadsAfterGradient.apply(x, layer.weight, note) + layer.bias


def _checkpointed(x: torch.Tensor, layer: nn.Linear, note: torch.Tensor) -> torch.Tensor:
    return checkpoint(_linear, x, layer, note, use_reentrant=False)


STEPS: Sequence[Step] = (_linear, _identity, _transposed, _reading, _checkpointed)


class Layers(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))
        for k in range(4):
            self.register_buffer(f"note{k}", torch.ones(()))

    def note(self, k: int) -> torch.Tensor:
        return getattr(self, f"note{k}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(self.step(x, layer, self.note(k)))
        return x


def _scale_by_notes(model: Layers) -> None:
    """Have a hook on each weight read the layer's note, and update it."""
    for k, layer in enumerate(model.layers):

        def hook(weight: torch.Tensor, k: int = k) -> None:
            weight.grad.div_(model.note(k) + 1e-6)
            with torch.no_grad():
                model.note(k).add_(0.5)

        layer.weight.register_post_accumulate_grad_hook(hook)


@pytest.mark.quick("_linear-backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
@pytest.mark.parametrize("step", STEPS)
def test_a_hook_finds_all_that_the_node_of_its_gradient_did(
    one_rank: None, step: Step, split: str
) -> None:
    """A Function notes something after the gradient is there, or returns one as it got it."""
    beside = Beside(Layers(step), ddp_options=CAP, split=split)
    beside.change(_scale_by_notes)
    beside.train(batches(0, [(8, SIZE)] * 3))
    assert len(beside.cut.sections) == 4


@pytest.mark.quick("_linear")
@pytest.mark.parametrize("step", STEPS)
def test_a_stack_of_functions_is_cut_between_its_layers(one_rank: None, step: Step) -> None:
    """Each weight's hook runs before the section of the layer below begins."""
    events: list[str] = []
    ddp = DistributedDataParallel(Layers(step), **CAP)
    for k, layer in enumerate(ddp.module.layers):
        layer.weight.register_hook(lambda _, k=k: events.append(f"weight {k}"))
    model = compiled(ddp, split="backward")
    original = CompiledSection._run

    def noting(section: CompiledSection, run: Run) -> Any:
        events.append(f"section {section.label.section}")
        return original(section, run)

    for _ in range(3):  # until DDP has formed its buckets, gradients arrive behind all sections
        events.clear()
        with mock.patch.object(CompiledSection, "_run", noting):
            model(torch.randn(8, SIZE)).sum().backward()
    for k in range(1, 4):
        # Layer k's weight is of bucket 3 - k, and its bias of the bucket before.
        assert events.index(f"weight {k}") < events.index(f"section {4 - k}"), events


def _where_it_is_made(
    _calls: Sequence[fx.Node], gradients: dict[int, tuple[int, ...]], _num_before: Any
) -> dict[int, int]:
    return {argument: max(calls, default=-1) for argument, calls in gradients.items()}


@pytest.mark.quick("_linear")
@pytest.mark.parametrize("step", [_linear, _identity])
def test_a_release_before_the_node_is_done_is_not_proven(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    """The proof finds a node's calls by numbers, whatever the planner took for its end."""
    monkeypatch.setattr(facts, "_release_places", _where_it_is_made)
    ddp = DistributedDataParallel(Layers(step), **CAP)
    compiled(ddp, split="backward")(torch.randn(8, SIZE))
    assert only_cut(ddp).fallback is Reason.NOT_PROVEN
    assert "runs behind its release" in only_cut(ddp).detail


@pytest.mark.parametrize("num_graphs", [1, 2])
def test_of_an_operator_with_several_graphs_no_inputs_are_known(num_graphs: int) -> None:
    """Not by their number either: what follows the first graph may be another graph."""
    body = fx.Graph()
    inputs = [body.placeholder(name) for name in ("x", "y")]
    body.output(inputs[1])
    graphs = [fx.GraphModule(nn.Module(), body)] * num_graphs
    graph = fx.Graph()
    value = graph.placeholder("value")
    bodies = [graph.placeholder(f"body_{k}") for k in range(2)]
    operands = (value, value) if num_graphs == 1 else (bodies[1], value)
    call = graph.call_function(_run_graphs, (bodies[0], *operands))
    passed_on = _arguments_passed_on(call, graphs, {value: Argument(5)})
    assert passed_on == (dict.fromkeys(inputs, 5) if num_graphs == 1 else {})


def _run_graphs(*_: Any) -> None:
    """Stands for an operator that runs graphs."""


def test_a_function_that_dynamo_does_not_look_into_is_known_as_impure(one_rank: None) -> None:
    """`allow_in_graph` puts one into the graph as a call of Dynamo's own."""

    @torch._dynamo.allow_in_graph
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    capture = Capture()
    torch.compile(Doubled.apply, backend=capture)(torch.ones(2, requires_grad=True))
    (call,) = call_nodes(capture.gm.graph)
    assert not is_pure(call)
    assert may_communicate(call)
