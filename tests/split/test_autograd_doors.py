"""Every public way to run autograd, on a cut backward: the same as in eager, or refused by name.

A row is a program that runs autograd in one way, and what comes of it. It runs on eager DDP and on
one whose backward is cut (inner compiler aot_eager, which computes what eager does); where
AOTAutograd itself does otherwise than eager, also on the unsplit compile. docs/compatibility.md has
the table for users.
"""

from __future__ import annotations

import enum
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as checkpoints
from torch import nn
from torch.autograd import forward_ad, functional, graph
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import _backward as pipelining
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt._torch.names import installed_release
from ddpopt.errors import HookError
from ddpopt.split import gates
from tests.support.beside import compiled
from tests.support.device import DEVICE
from tests.support.ranks import error_of

SIZE = 8
BATCH = 4


class Outcome(enum.Enum):
    SAME = "results are equal to eager's, or it raises what eager raises"
    AS_UNSPLIT = "it does what the unsplit compile does, which is not what eager does"
    REFUSED = "a HookError that names the remedy; eager goes on"


SAME, AS_UNSPLIT, REFUSED = Outcome


class TwoHeads(nn.Module):
    """The outputs are of two heads, neither of which the graph reads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.left, self.right = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.trunk:
            x = torch.tanh(layer(x))
        return self.left(x), self.right(x)


class ReturnsTrunk(TwoHeads):
    """The graph reads its first output again, to make the second."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.trunk:
            x = torch.tanh(layer(x))
        x = self.left(x)
        return x, self.right(x)


class SharesMemory(TwoHeads):
    """Adds parameters to activations, so that gradients are views of what backward passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ParameterList(torch.randn(BATCH, SIZE) for _ in self.trunk)
        self.rows = nn.ParameterList(torch.randn(SIZE) for _ in self.trunk)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer, term, row in zip(self.trunk, self.terms, self.rows, strict=True):
            x = (layer(x) + term).relu() + row.expand(BATCH, SIZE)
        return self.left(x) + self.terms[0], self.right(x)


class Breaks(TwoHeads):
    """Two graphs, the second of which takes two outputs of the first."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second, third = self.trunk
        x = torch.tanh(first(x))
        y = torch.tanh(second(x))
        torch._dynamo.graph_break()
        y = torch.tanh(third(y)) + x
        return self.left(y), self.right(x)


class UsesFunc(TwoHeads):
    """Transforms of torch.func are in the graph, each around a layer."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second, third = self.trunk
        x = torch.func.vmap(lambda row: torch.tanh(first(row)))(x)
        x = x + torch.func.grad(lambda x: torch.tanh(second(x)).sum())(x)
        _, tangent = torch.func.jvp(lambda x: torch.tanh(third(x)), (x,), (x.detach(),))
        output, pull_back = torch.func.vjp(self.left, x + tangent)
        return output, self.right(pull_back(torch.ones_like(output))[0])


class CheckpointsLayers(TwoHeads):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.trunk:
            x = checkpoints.checkpoint(lambda x, f=layer: f(x).tanh(), x, use_reentrant=False)
        return self.left(x), self.right(x)


class RecomputesExactly(TwoHeads):
    """Backward makes calls of the forward again which no autocast has rounded."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def exactly(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
            with torch.autocast(DEVICE.type, enabled=False):
                return torch.tanh(layer(x.float()))

        for layer in self.trunk:
            x = checkpoints.checkpoint(exactly, x, layer, use_reentrant=False)
        return self.left(x), self.right(x)


@dataclass(frozen=True, slots=True)
class Case:
    """A DDP module, which is given to a door in one of three forms."""

    ddp: DistributedDataParallel
    # The module itself, or what torch.compile made of it.
    forward: Any
    # What the door registers; removed after it.
    hooks: list[Any] = field(default_factory=list)

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.ddp.module.parameters())

    @property
    def is_eager(self) -> bool:
        """Whether gradients may share memory, so that a hook that writes to one has to copy it."""
        return self.forward is self.ddp

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if w.grad is None else w.grad.detach().clone() for w in self.weights]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return _loss(self.forward(x))


def _x(seed: int = 0) -> torch.Tensor:
    """An input that requires a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, SIZE, generator=generator).to(DEVICE).requires_grad_()


def _vectors() -> torch.Tensor:
    """Three gradients of an output."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(3, BATCH, SIZE, generator=generator).to(DEVICE)


def _loss(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    left, right = outputs
    return left.sin().sum() + right.square().mean()


def _nodes(root: Any) -> list[Any]:
    """All autograd nodes that can be reached from one."""
    reached: dict[Any, None] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        if node is not None and node not in reached:
            reached[node] = None
            pending.extend(further for further, _ in node.next_functions)
    return list(reached)


def _times(factor: float, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    return tuple(None if g is None else g * factor for g in gradients)


# ---- The table ---------------------------------------------------------------------------------

# Gets an input; returns what is compared beside the gradients of the input and of the weights.
Door = Callable[[Case, torch.Tensor], Any]


@dataclass(frozen=True, slots=True)
class Row:
    door: Door
    outcome: Outcome
    model: type[nn.Module]
    # Whether a cut graph runs. Where torch.compile leaves a program to eager, it may go on to.
    is_cut: bool


ROWS: dict[str, Row] = {}


def row(
    outcome: Outcome = SAME, *models: type[nn.Module], is_cut: bool = True
) -> Callable[[Door], Door]:
    """Put a door into the table, by its name, for each model."""

    def add(door: Door) -> Door:
        for model in models or (TwoHeads,):
            name = f"{door.__name__}-{model.__name__}" if len(models) > 1 else door.__name__
            assert name not in ROWS
            ROWS[name] = Row(door, outcome, model, is_cut)
        return door

    return add


MODELS = (TwoHeads, SharesMemory, Breaks)


# From 2.15 on (2.14 was not tried) torch leaves a forward to eager in which it sees dual numbers.
_SEES_DUAL_NUMBERS = installed_release() >= (2, 15)


# ---- backward and grad: of what, to what -------------------------------------------------------


@row()
def backward(case: Case, x: torch.Tensor) -> Any:
    torch.autograd.backward(case.loss(x))


@row()
def backward_with_inputs(case: Case, x: torch.Tensor) -> Any:
    # The input; weights of the first section, of the last, one by one; an output.
    case.loss(x).backward(inputs=[x])
    case.loss(x).backward(inputs=case.weights[-2:])
    case.loss(x).backward(inputs=case.weights[:1])
    loss = case.loss(x)
    for weight in case.weights:
        loss.backward(inputs=[weight], retain_graph=True)
    outputs = case.forward(x)
    _loss(outputs).backward(inputs=[outputs[0]])
    return outputs[0].grad


@row(SAME, *MODELS)
def grad_of_every_pair(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    pairs = itertools.combinations([x, *case.weights], 2)
    return [torch.autograd.grad(loss, pair, retain_graph=True) for pair in pairs]


@row()
def grad_of_a_tensor_before_the_graph(case: Case, x: torch.Tensor) -> Any:
    before = x * 2
    return torch.autograd.grad(case.loss(before), [before, *case.weights[2:4]])


@row()
def grad_of_outputs_and_from_them_on(case: Case, x: torch.Tensor) -> Any:
    outputs = case.forward(x)
    passed_in = torch.autograd.grad(_loss(outputs), outputs, retain_graph=True)
    return passed_in, torch.autograd.grad(outputs, [x, *case.weights], passed_in)


@row(AS_UNSPLIT, ReturnsTrunk)
def grad_of_an_output_that_the_graph_reads(case: Case, x: torch.Tensor) -> Any:
    outputs = case.forward(x)
    return torch.autograd.grad(_loss(outputs), outputs[0])


@row()
def grad_with_an_unused_tensor(case: Case, x: torch.Tensor) -> Any:
    unused = _x()
    wanted = [x, unused, *case.weights]
    materialized = torch.autograd.grad(case.loss(x), wanted, materialize_grads=True)
    return materialized, torch.autograd.grad(case.loss(x), wanted, allow_unused=True)


@row()
def grad_with_an_unused_tensor_that_is_not_allowed(case: Case, x: torch.Tensor) -> Any:
    return torch.autograd.grad(case.loss(x), [*case.weights, _x()])


@row()
def grad_of_a_batch_of_gradients(case: Case, x: torch.Tensor) -> Any:
    left, _ = case.forward(x)
    return torch.autograd.grad(left, [x, *case.weights[:-2]], _vectors(), is_grads_batched=True)


@row(AS_UNSPLIT)
def grad_under_vmap(case: Case, x: torch.Tensor) -> Any:
    left, _ = case.forward(x)
    return torch.vmap(lambda v: torch.autograd.grad(left, x, v, retain_graph=True))(_vectors())


@row()
def several_roots_one_without_a_gradient(case: Case, x: torch.Tensor) -> Any:
    left, right = case.forward(x)
    torch.autograd.backward([left, right.sum()], [torch.ones_like(left), None])


@row()
def one_of_the_outputs_alone(case: Case, x: torch.Tensor) -> Any:
    left, _ = case.forward(x)
    return torch.autograd.grad(left.sum(), [x, *case.weights[:-2]])


@row()
def roots_of_two_graphs(case: Case, x: torch.Tensor) -> Any:
    other = _x(1)
    torch.autograd.backward([case.loss(x), case.loss(other)])
    return other.grad


@row()
def edges(case: Case, x: torch.Tensor) -> Any:
    # As inputs of grad and of backward, then as roots.
    before = x * 2
    outputs = case.forward(before)
    inputs = [get_gradient_edge(t) for t in (x, before, *outputs, *case.weights)]
    gradients = torch.autograd.grad(_loss(outputs), inputs)
    of_weights = [get_gradient_edge(weight) for weight in case.weights[2:5]]
    torch.autograd.backward(case.loss(x), inputs=of_weights)
    roots = [get_gradient_edge(output) for output in case.forward(x)]
    torch.autograd.backward(roots, [torch.ones_like(x), torch.ones_like(x)])
    return gradients


@row()
def edges_of_every_node_as_inputs(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    inputs = [GradientEdge(node, 0) for node in _nodes(loss.grad_fn)]
    torch.autograd.grad(loss, inputs, allow_unused=True)


# ---- Again, and twice ----------------------------------------------------------------------------


@row(SAME, *MODELS)
def retained_three_times(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    for is_last in (False, False, True):
        loss.backward(retain_graph=not is_last)


@row()
def twice_without_retaining(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    loss.backward()
    loss.backward()


@row()
def twice_without_retaining_the_first_time_a_part(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    torch.autograd.grad(loss, case.weights[-2:])
    loss.backward()


@row()
def outstanding_forwards_in_any_order(case: Case, x: torch.Tensor) -> Any:
    for order in itertools.permutations(range(3)):
        losses = [case.loss(_x(seed)) for seed in range(3)]
        for k in order:
            losses[k].backward()


@row()
def one_backward_through_several_forwards(case: Case, x: torch.Tensor) -> Any:
    (case.loss(case.forward(x)[0]) + case.loss(x)).backward()


class _BackwardInBackward(torch.autograd.Function):
    """The identity; its backward adds the gradient of a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, case: Case) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.case = case
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (inner,) = torch.autograd.grad(ctx.case.loss(x), x)
        return gradient + inner, None


@row()
def a_backward_in_a_backward(case: Case, x: torch.Tensor) -> Any:
    case.loss(_BackwardInBackward.apply(case.forward(x)[0], case)).backward()


@row()
def create_graph(case: Case, x: torch.Tensor) -> Any:
    gradients = torch.autograd.grad(case.loss(x), [x, *case.weights], create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients)
    return gradients


@row(AS_UNSPLIT)
def differentiating_an_inputs_gradient(case: Case, x: torch.Tensor) -> Any:
    (gradient,) = torch.autograd.grad(case.loss(x), x, create_graph=True)
    gradient.square().sum().backward()


@row(AS_UNSPLIT)
def differentiating_each_weights_gradient(case: Case, x: torch.Tensor) -> Any:
    gradients = torch.autograd.grad(case.loss(x), case.weights, create_graph=True)
    errors = []
    for gradient in gradients:
        for inputs in (None, case.weights):
            again = functools.partial(gradient.square().sum().backward, retain_graph=True)
            errors.append(error_of(functools.partial(again, inputs=inputs)))
    return errors


# ---- Hooks ---------------------------------------------------------------------------------------


@row()
def hooks_on_tensors(case: Case, x: torch.Tensor) -> Any:
    def add_one(weight: torch.Tensor) -> None:
        weight.grad.add_(1)

    for weight in case.weights:
        case.hooks.append(weight.register_hook(lambda gradient: gradient * 2))
        case.hooks.append(weight.register_post_accumulate_grad_hook(add_one))
    before = x * 2
    before.register_hook(lambda gradient: gradient * 3)
    before.retain_grad()
    outputs = case.forward(before)
    outputs[0].register_hook(lambda gradient: gradient * 0.5)
    outputs[1].retain_grad()
    _loss(outputs).backward()
    return before.grad, outputs[1].grad


@row(SAME, *MODELS)
def hooks_that_write_to_gradients(case: Case, x: torch.Tensor) -> Any:
    def add_one(weight: torch.Tensor) -> None:
        weight.grad.add_(1)

    for weight in case.weights:
        double = torch.Tensor.mul if case.is_eager else torch.Tensor.mul_
        case.hooks.append(weight.register_hook(lambda gradient, f=double: f(gradient, 2)))
        case.hooks.append(weight.register_post_accumulate_grad_hook(add_one))
    for seed in range(2):
        case.loss(_x(seed)).backward()


@row(SAME, TwoHeads, SharesMemory)
def hooks_that_overwrite_one_gradient_after_another(case: Case, x: torch.Tensor) -> Any:
    # No section reads or writes a gradient that was handed out.
    gradients = []
    for weight in case.weights:
        case.ddp.zero_grad()
        fill = torch.full_like if case.is_eager else torch.Tensor.fill_
        hook = weight.register_hook(lambda gradient, fill=fill: fill(gradient, torch.nan))
        case.loss(x).backward()
        hook.remove()
        gradients.append(case.gradients())
    return gradients


@row()
def hooks_on_accumulation_nodes(case: Case, x: torch.Tensor) -> Any:
    seen = []
    nodes = [get_gradient_edge(weight).node for weight in case.weights]
    for node in nodes:
        case.hooks.append(node.register_prehook(lambda gradients: _times(2, gradients)))
        case.hooks.append(node.register_hook(lambda _, gradients: seen.append(gradients[0].sum())))
    case.loss(x).backward()
    return len(seen), sum(seen)


@row()
def multi_grad_hooks(case: Case, x: torch.Tensor) -> Any:
    seen: list[Any] = []
    left, right = case.forward(x)
    tensors = [x, left, *case.weights[::3]]
    case.hooks.append(graph.register_multi_grad_hook(tensors, seen.append))
    # Weights that lie apart: autograd orders those of one section by itself.
    apart = [case.weights[0], case.weights[-1]]
    case.hooks.append(graph.register_multi_grad_hook(apart, seen.append, mode="any"))
    _loss((left, right)).backward()
    return seen


@row()
def multi_grad_hook_where_some_get_none(case: Case, x: torch.Tensor) -> Any:
    seen: list[Any] = []
    hook = graph.register_multi_grad_hook([case.weights[0], *case.weights[3:5]], seen.append)
    case.hooks.append(hook)
    case.loss(x).backward(inputs=case.weights[3:])
    return seen


@row()
def hooks_on_every_node_that_look(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    num_calls = [0, 0]

    def count(kind: int) -> None:
        num_calls[kind] += 1

    nodes = _nodes(loss.grad_fn)
    for node in nodes:
        case.hooks.append(node.register_prehook(lambda _: count(0)))
        case.hooks.append(node.register_hook(lambda _, __: count(1)))
        # And some that return what they got.
        case.hooks.append(node.register_prehook(lambda gradients: gradients))
        case.hooks.append(node.register_hook(lambda gradients, _: gradients))
        node.metadata["key"] = "value"
    loss.backward()
    assert num_calls == [len(nodes)] * 2


@row()
def prehook_on_the_outputs_node_that_returns_others(case: Case, x: torch.Tensor) -> Any:
    outputs = case.forward(x)
    for node in dict.fromkeys(output.grad_fn for output in outputs):
        case.hooks.append(node.register_prehook(lambda gradients: _times(2, gradients)))
    _loss(outputs).backward()


@row(REFUSED)
def hook_on_the_outputs_node_that_returns_others(case: Case, x: torch.Tensor) -> Any:
    left, _ = case.forward(x)
    case.hooks.append(left.grad_fn.register_hook(lambda gradients, _: _times(2, gradients)))
    left.sum().backward()


@row(REFUSED)
def prehooks_on_every_node_that_return_others(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    for node in _nodes(loss.grad_fn):
        case.hooks.append(node.register_prehook(lambda gradients: _times(1, gradients)))
    loss.backward()


@row(REFUSED)
def prehooks_on_every_node_that_return_none(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    for node in _nodes(loss.grad_fn):
        case.hooks.append(node.register_prehook(lambda gradients: (None,) * len(gradients)))
    loss.backward()


@row()
def full_backward_hooks_on_the_module(case: Case, x: torch.Tensor) -> Any:
    seen: list[Any] = []
    ddp = case.ddp
    case.hooks.append(ddp.register_full_backward_pre_hook(lambda _, after: _times(2, after)))
    case.hooks.append(ddp.register_full_backward_hook(lambda _, *both: seen.append(both)))
    case.loss(x).backward()
    return seen


@row()
def a_backward_in_a_hook(case: Case, x: torch.Tensor) -> Any:
    seen: list[Any] = []

    def hook(_: torch.Tensor) -> None:
        case.hooks.pop().remove()
        with torch.enable_grad():
            loss = case.loss(_x(1))
        seen.extend(torch.autograd.grad(loss, case.weights))

    case.hooks.append(case.weights[-1].register_hook(hook))
    case.loss(x).backward()
    return seen


@row()
def the_same_backward_in_a_hook(case: Case, x: torch.Tensor) -> Any:
    seen: list[Any] = []
    loss = case.loss(x)

    def hook(_: torch.Tensor) -> None:
        case.hooks.pop().remove()
        seen.extend(torch.autograd.grad(loss, case.weights, retain_graph=True))

    case.hooks.append(case.weights[2].register_hook(hook))
    loss.backward(retain_graph=True)
    return seen


@row()
def a_callback_that_a_hook_queues(case: Case, x: torch.Tensor) -> Any:
    have_gradients: list[bool] = []

    def queue(_: torch.Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(
            lambda: have_gradients.extend(w.grad is not None for w in case.weights)
        )

    case.hooks.append(case.weights[2].register_hook(queue))
    case.loss(x).backward()
    return have_gradients


# ---- Saved tensors -------------------------------------------------------------------------------


@row()
def saved_tensors_hooks(case: Case, x: torch.Tensor) -> Any:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().double()

    with graph.saved_tensors_hooks(pack, torch.Tensor.float):
        loss = case.loss(x)
    loss.backward()
    with graph.save_on_cpu():
        loss = case.loss(x)
    loss.backward()
    with graph.disable_saved_tensors_hooks("not here"):
        case.loss(x).backward()


@row()
def version_of_a_weight_incremented(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    graph.increment_version(case.weights[2])
    loss.backward()


@row()
def version_of_an_input_incremented(case: Case, x: torch.Tensor) -> Any:
    before = x * 1
    loss = case.loss(before)
    graph.increment_version(before)
    loss.backward()


# ---- Modes and threads ---------------------------------------------------------------------------


@row()
def without_autograds_threads(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()


@row()
def in_other_threads(case: Case, x: torch.Tensor) -> Any:
    # Forward in one, backward in another.
    losses: list[torch.Tensor] = []

    def run(call: Callable[[], object]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    run(lambda: losses.append(case.loss(x)))
    run(losses[0].backward)


@row()
def backward_under_no_grad(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    with torch.no_grad():
        loss.backward()


@row()
def backward_in_inference_mode(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    with torch.inference_mode():
        loss.backward()


@row()
def a_gradient_made_in_inference_mode(case: Case, x: torch.Tensor) -> Any:
    outputs = case.forward(x)
    with torch.inference_mode():
        passed_in = torch.ones(BATCH, SIZE, device=DEVICE)
    torch.autograd.backward(outputs, [passed_in, passed_in])


@row(AS_UNSPLIT)  # which rounds otherwise
def autocast_around_backward_alone(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss.backward()


@row(SAME, RecomputesExactly)
def autocast_around_forward_and_backward(case: Case, x: torch.Tensor) -> Any:
    with torch.autocast(DEVICE.type, torch.bfloat16):
        case.loss(x).backward()


@row()
def another_default_dtype_in_backward(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    torch.set_default_dtype(torch.float64)
    try:
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)


@row()
def anomaly_mode(case: Case, x: torch.Tensor) -> Any:
    with torch.autograd.detect_anomaly():
        case.loss(x).backward()


@row()
def anomaly_mode_finds_a_nan_behind_the_graph(case: Case, x: torch.Tensor) -> Any:
    with torch.autograd.detect_anomaly():
        before = torch.sqrt(x * 0)
        case.loss(before).backward()


# ---- Checkpoints around the compiled module ------------------------------------------------------


@row()
def checkpoints_around_the_module(case: Case, x: torch.Tensor) -> Any:
    for use_reentrant, early_stop in itertools.product((False, True), repeat=2):
        with checkpoints.set_checkpoint_early_stop(early_stop):
            outputs = checkpoints.checkpoint(case.forward, x, use_reentrant=use_reentrant)
            _loss(outputs).backward()


@row(SAME, CheckpointsLayers)
def checkpoints_in_the_graph_that_do_not_stop_early(case: Case, x: torch.Tensor) -> Any:
    with checkpoints.set_checkpoint_early_stop(False):
        case.loss(x).backward()


# ---- torch.func, forward mode, torch.autograd.functional ----------------------------------------


@row(SAME, UsesFunc)
def func_in_the_graph(case: Case, x: torch.Tensor) -> Any:
    case.loss(x).backward()


@row(SAME if _SEES_DUAL_NUMBERS else AS_UNSPLIT, is_cut=not _SEES_DUAL_NUMBERS)
def forward_mode(case: Case, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        left, _ = case.forward(forward_ad.make_dual(x.detach(), _x(1).detach()))
        return tuple(forward_ad.unpack_dual(left))


@row()
def reverse_mode_at_a_level_of_forward_mode(case: Case, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        case.loss(x).backward()


def _left(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: case.forward(x)[0]


@row()
def functional_jacobian_and_vjp(case: Case, x: torch.Tensor) -> Any:
    x, left = x.detach(), _left(case)
    plain, vectorized = (functional.jacobian(left, x, vectorize=v) for v in (False, True))
    return plain, vectorized, functional.vjp(left, x, _x(1).detach())


@row(SAME if _SEES_DUAL_NUMBERS else AS_UNSPLIT, is_cut=not _SEES_DUAL_NUMBERS)
def functional_jacobian_in_forward_mode(case: Case, x: torch.Tensor) -> Any:
    x = x.detach()
    return functional.jacobian(_left(case), x, vectorize=True, strategy="forward-mode")


@row(AS_UNSPLIT)
def functional_jvp(case: Case, x: torch.Tensor) -> Any:
    return functional.jvp(_left(case), x.detach(), _x(1).detach())


@row(AS_UNSPLIT)
def functional_hessian(case: Case, x: torch.Tensor) -> Any:
    return functional.hessian(case.loss, x.detach())


@row(AS_UNSPLIT)
def functional_hvp(case: Case, x: torch.Tensor) -> Any:
    return functional.hvp(case.loss, x.detach(), _x(1).detach())


# ---- Stages of torch.distributed.pipelining ------------------------------------------------------


@row()
def pipelining_stage_backward(case: Case, x: torch.Tensor) -> Any:
    outputs = case.forward(x)
    return pipelining.stage_backward(outputs, [torch.ones_like(x), torch.ones_like(x)], [x])


@row()
def pipelining_stage_backward_input_alone(case: Case, x: torch.Tensor) -> Any:
    pipelining.stage_backward_input([case.loss(x)], None, [x], case.weights)


@row(REFUSED)
def pipelining_stage_backward_input_then_weight(case: Case, x: torch.Tensor) -> Any:
    loss = case.loss(x)
    # The first call detaches the loss. On torch 2.11 that frees the nodes of Functions: the groups
    # hold only their contexts, and the second call raises an error of torch's.
    node = loss.grad_fn
    _, groups = pipelining.stage_backward_input([loss], None, [x], case.weights)
    pipelining.stage_backward_weight(case.weights, groups)
    del node


@row(REFUSED)
def a_nodes_kept_gradient_passed_in_twice(case: Case, x: torch.Tensor) -> Any:
    # What pipelining does, without its groups of weights.
    loss = case.loss(x)
    nodes = [node for node in _nodes(loss.grad_fn) if node.name() == "GateBackward"]
    (node, *_) = nodes or _nodes(loss.grad_fn)
    (kept,) = torch.autograd.grad(loss, [GradientEdge(node, 0)], retain_graph=True)
    for _ in range(2):
        edge = GradientEdge(node, 0)
        torch.autograd.grad(edge, case.weights, kept, allow_unused=True, retain_graph=True)


# ---- What is not cut: weights of others; programs under a transform or a mode, which stay eager --


@row(is_cut=False)
def func_functional_call(case: Case, x: torch.Tensor) -> Any:
    # None of these is a parameter that DDP reduces.
    other = {n: (p * 2).detach().requires_grad_() for n, p in case.forward.named_parameters()}
    _loss(torch.func.functional_call(case.forward, other, (x,))).backward()
    return [weight.grad for weight in other.values()]


@row(is_cut=False)
def func_grad_of_a_functional_call(case: Case, x: torch.Tensor) -> Any:
    x = x.detach()

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return _loss(torch.func.functional_call(case.forward, weights, (x,)))

    weights = {name: weight.detach() for name, weight in case.forward.named_parameters()}
    return list(torch.func.grad(loss)(weights).values())


@row(is_cut=False)
def func_over_the_module(case: Case, x: torch.Tensor) -> Any:
    x, other = x.detach(), _x(1).detach()
    loss, pull_back = torch.func.vjp(case.loss, x)
    return (
        pull_back(torch.ones_like(loss)),
        torch.func.grad(case.loss)(x),
        torch.func.jvp(case.loss, (x,), (other,)),
        torch.func.vmap(case.forward)(_vectors()),
        torch.func.jacrev(case.loss)(x),
    )


@row(is_cut=False)
def mutation_of_saved_tensors_allowed(case: Case, x: torch.Tensor) -> Any:
    with graph.allow_mutation_on_saved_tensors():
        before = x * 1
        loss = case.loss(before)
        with torch.no_grad():
            before.mul_(2)
        loss.backward()


# ---- Running it ----------------------------------------------------------------------------------


class Models:
    """Each model as eager DDP, unsplit and cut, with buckets that have settled."""

    def __init__(self) -> None:
        self._cases: dict[tuple[type[nn.Module], str], Case] = {}

    def get(self, model: type[nn.Module], form: str) -> Case:
        if (model, form) not in self._cases:
            self._cases[model, form] = self._make(model, form)
        return self._cases[model, form]

    def _make(self, model: type[nn.Module], form: str) -> Case:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(model().to(DEVICE), bucket_cap_mb=0.0001)
        if form == "eager":
            return Case(ddp, ddp)
        options: dict[str, Any] = {"split": "backward"} if form == "cut" else {"enabled": False}
        case = Case(ddp, compiled(ddp, **options))
        for _ in range(3):  # until then all gradients are accumulated after all sections
            case.loss(_x()).backward()
        if form == "cut":
            cuts = ddpopt.explain(ddp).cuts
            assert {cut.split for cut in cuts} == {"backward"}
            assert sum(len(cut.sections) for cut in cuts) > 3
        return case


@pytest.fixture(scope="module")
def models(_group: None) -> Iterator[Models]:
    """All rows share compiled code, and what Dynamo compiles anew for a row stays."""
    ddpopt.backend.install()
    torch._dynamo.reset()
    # The unsplit compile refuses retain_graph otherwise; what we compile never donates buffers.
    not_donated = torch._functorch.config.patch(donated_buffer=False)
    with not_donated, torch._dynamo.config.patch(recompile_limit=100):
        yield Models()
    torch._dynamo.reset()


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _run(door: Door, case: Case) -> list[Any]:
    """What a door returns, and gradients; or the error that it raises."""
    case.ddp.zero_grad()
    x = _x()
    try:
        with case.ddp.no_sync():  # a backward in part would leave DDP waiting
            returned = door(case, x)
        return _leaves([returned, x.grad, case.gradients()])
    except Exception as error:  # each door raises what it likes: it is compared
        return [type(error), str(error)[:60]]
    finally:
        for hook in case.hooks:
            hook.remove()
        case.hooks.clear()


def _are_equal(actual: Sequence[Any], expected: Sequence[Any]) -> bool:
    def are_equal(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
        return type(one) is type(other) and one == other

    return len(actual) == len(expected) and all(map(are_equal, actual, expected))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", ROWS)
def test_autograd_run_in_any_way_does_as_in_eager_or_is_refused(
    models: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's outcome is the one that it states."""
    row = ROWS[name]
    eager = _run(row.door, models.get(row.model, "eager"))
    case = models.get(row.model, "cut")
    num_calls = [0]
    call = gates.GatedGraph.__call__

    def counting(gated: gates.GatedGraph, *args: Any) -> Any:
        num_calls[0] += 1
        return call(gated, *args)

    monkeypatch.setattr(gates.GatedGraph, "__call__", counting)
    cut = _run(row.door, case)
    if not row.is_cut:
        torch._dynamo.reset()
    assert (num_calls[0] > 0) is row.is_cut
    if row.outcome is SAME:
        assert _are_equal(cut, eager), (cut, eager)
    elif row.outcome is AS_UNSPLIT:
        unsplit = _run(row.door, models.get(row.model, "unsplit"))
        assert _are_equal(cut, unsplit), (cut, unsplit)
        assert not _are_equal(cut, eager), "it has come to be the same"
    else:
        assert not isinstance(eager[0], type), eager
        assert cut[0] is HookError, cut
