"""Every public way to run autograd, on a cut backward: the same as in eager, or refused by name.

A row is a program that runs autograd in one way, and what comes of it. It runs on eager DDP and on
one whose backward is cut (inner compiler aot_eager, which computes what eager does); where
AOTAutograd itself does otherwise than eager, also on the unsplit compile. docs/compatibility.md has
the table for users.
"""

from __future__ import annotations

import enum
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
from tests.support.device import DEVICE

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

Door = Callable[[Case], Any]  # returns what is compared, beside the gradients of the weights


@dataclass(frozen=True, slots=True)
class Row:
    door: Door
    outcome: Outcome
    model: type[nn.Module]
    # Whether a cut graph runs. Where torch.compile leaves a program to eager, it may go on to.
    is_cut: bool


ROWS: dict[str, Row] = {}


def row(
    outcome: Outcome = SAME, *, model: type[nn.Module] = TwoHeads, is_cut: bool = True
) -> Callable[[Door], Door]:
    """Put a door into the table, by its name."""

    def add(door: Door) -> Door:
        assert door.__name__ not in ROWS
        ROWS[door.__name__] = Row(door, outcome, model, is_cut)
        return door

    return add


# From 2.15 on (2.14 was not tried) torch leaves a forward to eager in which it sees dual numbers.
_SEES_DUAL_NUMBERS = installed_release() >= (2, 15)


# ---- backward and grad: of what, to what -------------------------------------------------------


@row()
def backward(case: Case) -> Any:
    x = _x()
    torch.autograd.backward(case.loss(x))
    return x.grad


@row()
def backward_with_inputs_the_input_alone(case: Case) -> Any:
    x = _x()
    case.loss(x).backward(inputs=[x])
    return x.grad


@row()
def backward_with_inputs_weights_of_the_first_section(case: Case) -> Any:
    x = _x()
    case.loss(x).backward(inputs=case.weights[-2:])
    return x.grad


@row()
def backward_with_inputs_weights_of_the_last_section(case: Case) -> Any:
    x = _x()
    case.loss(x).backward(inputs=case.weights[:1])
    return x.grad


@row()
def backward_with_inputs_one_weight_after_another(case: Case) -> Any:
    loss = case.loss(_x())
    for weight in case.weights:
        loss.backward(inputs=[weight], retain_graph=True)


@row()
def backward_with_inputs_an_output(case: Case) -> Any:
    outputs = case.forward(_x())
    _loss(outputs).backward(inputs=[outputs[0]])
    return outputs[0].grad


@row()
def grad_of_a_tensor_before_the_graph(case: Case) -> Any:
    before = _x() * 2
    return torch.autograd.grad(case.loss(before), [before, *case.weights[2:4]])


@row()
def grad_of_outputs_and_from_them_on(case: Case) -> Any:
    x = _x()
    outputs = case.forward(x)
    passed_in = torch.autograd.grad(_loss(outputs), outputs, retain_graph=True)
    return passed_in, torch.autograd.grad(outputs, [x, *case.weights], passed_in)


@row(AS_UNSPLIT, model=ReturnsTrunk)
def grad_of_an_output_that_the_graph_reads(case: Case) -> Any:
    outputs = case.forward(_x())
    return torch.autograd.grad(_loss(outputs), outputs[0])


@row()
def grad_with_an_unused_tensor(case: Case) -> Any:
    x, unused = _x(), _x()
    return torch.autograd.grad(case.loss(x), [x, unused, *case.weights], allow_unused=True)


@row()
def grad_with_an_unused_tensor_that_is_not_allowed(case: Case) -> Any:
    return torch.autograd.grad(case.loss(_x()), [*case.weights, _x()])


@row()
def grad_that_materializes(case: Case) -> Any:
    x, unused = _x(), _x()
    return torch.autograd.grad(case.loss(x), [x, unused, *case.weights], materialize_grads=True)


@row()
def grad_of_a_batch_of_gradients(case: Case) -> Any:
    x = _x()
    left, _ = case.forward(x)
    return torch.autograd.grad(left, [x, *case.weights[:-2]], _vectors(), is_grads_batched=True)


@row(AS_UNSPLIT)
def grad_under_vmap(case: Case) -> Any:
    x = _x()
    left, _ = case.forward(x)
    return torch.vmap(lambda v: torch.autograd.grad(left, x, v, retain_graph=True))(_vectors())


@row()
def several_roots_one_without_a_gradient(case: Case) -> Any:
    x = _x()
    left, right = case.forward(x)
    torch.autograd.backward([left, right.sum()], [torch.ones_like(left), None])
    return x.grad


@row()
def one_of_the_outputs_alone(case: Case) -> Any:
    x = _x()
    left, _ = case.forward(x)
    return torch.autograd.grad(left.sum(), [x, *case.weights[:-2]])


@row()
def roots_of_two_graphs(case: Case) -> Any:
    x, other = _x(), _x(1)
    torch.autograd.backward([case.loss(x), case.loss(other)])
    return x.grad, other.grad


@row()
def edges_as_inputs(case: Case) -> Any:
    x = _x()
    before = x * 2
    outputs = case.forward(before)
    edges = [get_gradient_edge(t) for t in (x, before, *outputs, *case.weights)]
    return torch.autograd.grad(_loss(outputs), edges)


@row()
def edges_as_inputs_of_backward(case: Case) -> Any:
    edges = [get_gradient_edge(weight) for weight in case.weights[2:5]]
    torch.autograd.backward(case.loss(_x()), inputs=edges)


@row()
def edges_as_roots(case: Case) -> Any:
    x = _x()
    edges = [get_gradient_edge(output) for output in case.forward(x)]
    torch.autograd.backward(edges, [torch.ones_like(x), torch.ones_like(x)])
    return x.grad


@row()
def edges_of_every_node_as_inputs(case: Case) -> Any:
    loss = case.loss(_x())
    edges = [GradientEdge(node, 0) for node in _nodes(loss.grad_fn)]
    torch.autograd.grad(loss, edges, allow_unused=True)


# ---- Again, and twice ----------------------------------------------------------------------------


@row()
def retained_three_times(case: Case) -> Any:
    x = _x()
    loss = case.loss(x)
    for is_last in (False, False, True):
        loss.backward(retain_graph=not is_last)
    return x.grad


@row()
def twice_without_retaining(case: Case) -> Any:
    loss = case.loss(_x())
    loss.backward()
    loss.backward()


@row()
def create_graph(case: Case) -> Any:
    x = _x()
    gradients = torch.autograd.grad(case.loss(x), [x, *case.weights], create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients)
    return gradients


@row(AS_UNSPLIT)
def differentiating_an_inputs_gradient(case: Case) -> Any:
    x = _x()
    (gradient,) = torch.autograd.grad(case.loss(x), x, create_graph=True)
    gradient.square().sum().backward()


@row(AS_UNSPLIT)
def differentiating_weights_gradients(case: Case) -> Any:
    gradients = torch.autograd.grad(case.loss(_x()), case.weights, create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()


# ---- Hooks ---------------------------------------------------------------------------------------


@row()
def hooks_on_tensors(case: Case) -> Any:
    def add_one(weight: torch.Tensor) -> None:
        weight.grad.add_(1)

    for weight in case.weights:
        case.hooks.append(weight.register_hook(lambda gradient: gradient * 2))
        case.hooks.append(weight.register_post_accumulate_grad_hook(add_one))
    x = _x()
    before = x * 2
    before.register_hook(lambda gradient: gradient * 3)
    before.retain_grad()
    outputs = case.forward(before)
    outputs[0].register_hook(lambda gradient: gradient * 0.5)
    outputs[1].retain_grad()
    _loss(outputs).backward()
    return x.grad, before.grad, outputs[1].grad


@row()
def hooks_on_accumulation_nodes(case: Case) -> Any:
    seen = []
    nodes = [get_gradient_edge(weight).node for weight in case.weights]
    for node in nodes:
        case.hooks.append(node.register_prehook(lambda gradients: _times(2, gradients)))
        case.hooks.append(node.register_hook(lambda _, gradients: seen.append(gradients[0].sum())))
    case.loss(_x()).backward()
    return len(seen), sum(seen)


@row()
def multi_grad_hook_all(case: Case) -> Any:
    seen: list[Any] = []
    x = _x()
    left, right = case.forward(x)
    tensors = [x, left, *case.weights[::3]]
    case.hooks.append(graph.register_multi_grad_hook(tensors, seen.append))
    _loss((left, right)).backward()
    return seen


@row()
def multi_grad_hook_all_where_some_get_none(case: Case) -> Any:
    seen: list[Any] = []
    hook = graph.register_multi_grad_hook([case.weights[0], *case.weights[3:5]], seen.append)
    case.hooks.append(hook)
    case.loss(_x()).backward(inputs=case.weights[3:])
    return seen


@row()
def multi_grad_hook_any(case: Case) -> Any:
    # Of weights that lie apart: autograd orders those of one section by itself.
    seen: list[Any] = []
    tensors = [case.weights[0], case.weights[-1]]
    case.hooks.append(graph.register_multi_grad_hook(tensors, seen.append, mode="any"))
    case.loss(_x()).backward()
    return seen


@row()
def hooks_on_every_node_that_look(case: Case) -> Any:
    loss = case.loss(_x())
    num_calls = [0, 0]

    def count(kind: int) -> None:
        num_calls[kind] += 1

    nodes = _nodes(loss.grad_fn)
    for node in nodes:
        case.hooks.append(node.register_prehook(lambda _: count(0)))
        case.hooks.append(node.register_hook(lambda _, __: count(1)))
        node.metadata["key"] = "value"
    loss.backward()
    assert num_calls == [len(nodes)] * 2


@row()
def hooks_on_every_node_that_return_what_they_got(case: Case) -> Any:
    loss = case.loss(_x())
    for node in _nodes(loss.grad_fn):
        case.hooks.append(node.register_prehook(lambda gradients: gradients))
        case.hooks.append(node.register_hook(lambda gradients, _: gradients))
    loss.backward()


@row()
def prehook_on_the_outputs_node_that_returns_others(case: Case) -> Any:
    outputs = case.forward(_x())
    for node in dict.fromkeys(output.grad_fn for output in outputs):
        case.hooks.append(node.register_prehook(lambda gradients: _times(2, gradients)))
    _loss(outputs).backward()


@row(REFUSED)
def hook_on_the_outputs_node_that_returns_others(case: Case) -> Any:
    left, _ = case.forward(_x())
    case.hooks.append(left.grad_fn.register_hook(lambda gradients, _: _times(2, gradients)))
    left.sum().backward()


@row(REFUSED)
def prehooks_on_every_node_that_return_others(case: Case) -> Any:
    loss = case.loss(_x())
    for node in _nodes(loss.grad_fn):
        case.hooks.append(node.register_prehook(lambda gradients: _times(1, gradients)))
    loss.backward()


@row(REFUSED)
def prehooks_on_every_node_that_return_none(case: Case) -> Any:
    loss = case.loss(_x())
    for node in _nodes(loss.grad_fn):
        case.hooks.append(node.register_prehook(lambda gradients: (None,) * len(gradients)))
    loss.backward()


@row()
def full_backward_hooks_on_the_module(case: Case) -> Any:
    seen: list[Any] = []
    ddp = case.ddp
    case.hooks.append(ddp.register_full_backward_pre_hook(lambda _, after: _times(2, after)))
    case.hooks.append(ddp.register_full_backward_hook(lambda _, *both: seen.append(both)))
    x = _x()
    case.loss(x).backward()
    return x.grad, seen


@row()
def a_backward_in_a_hook(case: Case) -> Any:
    seen: list[Any] = []

    def hook(_: torch.Tensor) -> None:
        case.hooks.pop().remove()
        with torch.enable_grad():
            loss = case.loss(_x(1))
        seen.extend(torch.autograd.grad(loss, case.weights))

    case.hooks.append(case.weights[-1].register_hook(hook))
    case.loss(_x()).backward()
    return seen


@row()
def a_callback_that_a_hook_queues(case: Case) -> Any:
    have_gradients: list[bool] = []

    def queue(_: torch.Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(
            lambda: have_gradients.extend(w.grad is not None for w in case.weights)
        )

    case.hooks.append(case.weights[2].register_hook(queue))
    case.loss(_x()).backward()
    return have_gradients


# ---- Saved tensors -------------------------------------------------------------------------------


@row()
def saved_tensors_hooks(case: Case) -> Any:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().double()

    with graph.saved_tensors_hooks(pack, torch.Tensor.float):
        loss = case.loss(_x())
    loss.backward()


@row()
def save_on_cpu(case: Case) -> Any:
    with graph.save_on_cpu():
        loss = case.loss(_x())
    loss.backward()


@row()
def saved_tensors_hooks_disabled(case: Case) -> Any:
    with graph.disable_saved_tensors_hooks("not here"):
        case.loss(_x()).backward()


@row()
def version_of_a_weight_incremented(case: Case) -> Any:
    loss = case.loss(_x())
    graph.increment_version(case.weights[2])
    loss.backward()


@row()
def version_of_an_input_incremented(case: Case) -> Any:
    before = _x() * 1
    loss = case.loss(before)
    graph.increment_version(before)
    loss.backward()


# ---- Modes and threads ---------------------------------------------------------------------------


@row()
def without_autograds_threads(case: Case) -> Any:
    loss = case.loss(_x())
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()


@row()
def backward_in_another_thread(case: Case) -> Any:
    loss = case.loss(_x())
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


@row()
def forward_in_another_thread(case: Case) -> Any:
    losses: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: losses.append(case.loss(_x())))
    thread.start()
    thread.join()
    losses[0].backward()


@row()
def backward_under_no_grad(case: Case) -> Any:
    loss = case.loss(_x())
    with torch.no_grad():
        loss.backward()


@row()
def backward_in_inference_mode(case: Case) -> Any:
    x = _x()
    loss = case.loss(x)
    with torch.inference_mode():
        loss.backward()
    return x.grad.clone()


@row()
def a_gradient_made_in_inference_mode(case: Case) -> Any:
    outputs = case.forward(_x())
    with torch.inference_mode():
        passed_in = torch.ones(BATCH, SIZE, device=DEVICE)
    torch.autograd.backward(outputs, [passed_in, passed_in])


@row()
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def anomaly_mode(case: Case) -> Any:
    with torch.autograd.detect_anomaly():
        case.loss(_x()).backward()


@row()
def anomaly_mode_finds_a_nan_behind_the_graph(case: Case) -> Any:
    with torch.autograd.detect_anomaly():
        before = torch.sqrt(_x() * 0)
        case.loss(before).backward()


# ---- Checkpoints around the compiled module ------------------------------------------------------


def _checkpointed(case: Case, *, use_reentrant: bool, early_stop: bool) -> Any:
    x = _x()
    with checkpoints.set_checkpoint_early_stop(early_stop):
        _loss(checkpoints.checkpoint(case.forward, x, use_reentrant=use_reentrant)).backward()
    return x.grad


@row()
def checkpoint_that_stops_early(case: Case) -> Any:
    return _checkpointed(case, use_reentrant=False, early_stop=True)


@row()
def checkpoint_that_does_not_stop_early(case: Case) -> Any:
    return _checkpointed(case, use_reentrant=False, early_stop=False)


@row()
def checkpoint_that_is_reentrant(case: Case) -> Any:
    return _checkpointed(case, use_reentrant=True, early_stop=True)


@row()
def checkpoint_that_is_reentrant_and_does_not_stop_early(case: Case) -> Any:
    return _checkpointed(case, use_reentrant=True, early_stop=False)


@row(model=CheckpointsLayers)
def checkpoints_in_the_graph_that_do_not_stop_early(case: Case) -> Any:
    with checkpoints.set_checkpoint_early_stop(False):
        case.loss(_x()).backward()


# ---- torch.func, forward mode, torch.autograd.functional ----------------------------------------


@row(model=UsesFunc)
def func_in_the_graph(case: Case) -> Any:
    x = _x()
    case.loss(x).backward()
    return x.grad


@row(SAME if _SEES_DUAL_NUMBERS else AS_UNSPLIT, is_cut=not _SEES_DUAL_NUMBERS)
def forward_mode(case: Case) -> Any:
    with forward_ad.dual_level():
        left, _ = case.forward(forward_ad.make_dual(_x().detach(), _x(1).detach()))
        return tuple(forward_ad.unpack_dual(left))


@row()
def reverse_mode_at_a_level_of_forward_mode(case: Case) -> Any:
    with forward_ad.dual_level():
        case.loss(_x()).backward()


def _left(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: case.forward(x)[0]


@row()
def functional_jacobian(case: Case) -> Any:
    return functional.jacobian(_left(case), _x().detach())


@row()
def functional_jacobian_vectorized(case: Case) -> Any:
    return functional.jacobian(_left(case), _x().detach(), vectorize=True)


@row(SAME if _SEES_DUAL_NUMBERS else AS_UNSPLIT, is_cut=not _SEES_DUAL_NUMBERS)
def functional_jacobian_in_forward_mode(case: Case) -> Any:
    x = _x().detach()
    return functional.jacobian(_left(case), x, vectorize=True, strategy="forward-mode")


@row()
def functional_vjp(case: Case) -> Any:
    return functional.vjp(_left(case), _x().detach(), _x(1).detach())


@row(AS_UNSPLIT)
def functional_jvp(case: Case) -> Any:
    return functional.jvp(_left(case), _x().detach(), _x(1).detach())


@row(AS_UNSPLIT)
def functional_hessian(case: Case) -> Any:
    return functional.hessian(case.loss, _x().detach())


@row(AS_UNSPLIT)
def functional_hvp(case: Case) -> Any:
    return functional.hvp(case.loss, _x().detach(), _x(1).detach())


# ---- Stages of torch.distributed.pipelining ------------------------------------------------------


@row()
def pipelining_stage_backward(case: Case) -> Any:
    x = _x()
    outputs = case.forward(x)
    return pipelining.stage_backward(outputs, [torch.ones_like(x), torch.ones_like(x)], [x])


@row()
def pipelining_stage_backward_input_alone(case: Case) -> Any:
    x = _x()
    pipelining.stage_backward_input([case.loss(x)], None, [x], case.weights)
    return x.grad


@row(REFUSED)
def pipelining_stage_backward_input_then_weight(case: Case) -> Any:
    x = _x()
    loss = case.loss(x)
    # The first call detaches the loss. On torch 2.11 that frees the nodes of Functions: the groups
    # hold only their contexts, and the second call raises an error of torch's.
    node = loss.grad_fn
    _, groups = pipelining.stage_backward_input([loss], None, [x], case.weights)
    pipelining.stage_backward_weight(case.weights, groups)
    del node
    return x.grad


@row(REFUSED)
def a_nodes_kept_gradient_passed_in_twice(case: Case) -> Any:
    # What pipelining does, without its groups of weights.
    loss = case.loss(_x())
    nodes = [node for node in _nodes(loss.grad_fn) if node.name() == "GateBackward"]
    (node, *_) = nodes or _nodes(loss.grad_fn)
    (kept,) = torch.autograd.grad(loss, [GradientEdge(node, 0)], retain_graph=True)
    for _ in range(2):
        edge = GradientEdge(node, 0)
        torch.autograd.grad(edge, case.weights, kept, allow_unused=True, retain_graph=True)


# ---- What is not cut: weights of others; programs under a transform or a mode, which stay eager --


@row(is_cut=False)
def func_functional_call(case: Case) -> Any:
    # None of these is a parameter that DDP reduces.
    other = {n: (p * 2).detach().requires_grad_() for n, p in case.forward.named_parameters()}
    _loss(torch.func.functional_call(case.forward, other, (_x(),))).backward()
    return [weight.grad for weight in other.values()]


@row(is_cut=False)
def func_grad_of_a_functional_call(case: Case) -> Any:
    x = _x().detach()

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return _loss(torch.func.functional_call(case.forward, weights, (x,)))

    weights = {name: weight.detach() for name, weight in case.forward.named_parameters()}
    return list(torch.func.grad(loss)(weights).values())


@row(is_cut=False)
def func_grad(case: Case) -> Any:
    return torch.func.grad(case.loss)(_x().detach())


@row(is_cut=False)
def func_vjp(case: Case) -> Any:
    loss, pull_back = torch.func.vjp(case.loss, _x().detach())
    return pull_back(torch.ones_like(loss))


@row(is_cut=False)
def func_jvp(case: Case) -> Any:
    return torch.func.jvp(case.loss, (_x().detach(),), (_x(1).detach(),))


@row(is_cut=False)
def func_vmap(case: Case) -> Any:
    return torch.func.vmap(case.forward)(_vectors())


@row(is_cut=False)
def func_jacrev(case: Case) -> Any:
    return torch.func.jacrev(case.loss)(_x().detach())


@row(is_cut=False)
def mutation_of_saved_tensors_allowed(case: Case) -> Any:
    x = _x()
    with graph.allow_mutation_on_saved_tensors():
        before = x * 1
        loss = case.loss(before)
        with torch.no_grad():
            before.mul_(2)
        loss.backward()
    return x.grad


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
        options: dict[str, Any] = {"inner": "aot_eager"}
        options |= {"enabled": False} if form == "unsplit" else {"split": "backward"}
        case = Case(ddp, torch.compile(ddp, backend="ddpopt", options=options))
        for _ in range(3):  # until then all gradients are accumulated after all sections
            case.loss(_x()).backward()
        if form == "cut":
            (cut,) = ddpopt.explain(ddp).cuts
            assert cut.split == "backward"
            assert len(cut.sections) > 3
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
    """What a door returns, and the weights' gradients; or the error that it raises."""
    case.ddp.zero_grad()
    try:
        with case.ddp.no_sync():  # a backward in part would leave DDP waiting
            returned = door(case)
        return _leaves([returned, case.gradients()])
    except Exception as error:  # each door raises what it likes: it is compared
        return [type(error), str(error)[:60]]
    finally:
        for hook in case.hooks:
            hook.remove()
        case.hooks.clear()


def _are_equal(actual: Sequence[Any], expected: Sequence[Any]) -> bool:
    def are_equal(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return torch.allclose(one, other, rtol=1e-4, atol=1e-6)
        return type(one) is type(other) and one == other

    return len(actual) == len(expected) and all(map(are_equal, actual, expected))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", ROWS)
def test_what_comes_of_running_autograd_by(
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
