"""The profile of one iteration from the model's graph alone: nothing is run on real data.

Forward and backward are traced into one graph with fake tensors, whose calls cost what a `Device`
takes for them. Measurements come from elsewhere; `scale` brings the two together.

[Note: costs of a call]
FLOPs are those of torch's own formulas (`torch.utils.flop_counter`), 0 where there is none. Bytes
moved are the inputs read and the outputs written. Views, elements of tuples and empty tensors
are free. Compilers fuse elementwise operations and reductions (`may_be_fused`): a value that one
makes and only one other reads is neither written nor read, and its maker is launched with the
reader. This is simpler than what a compiler does, which also fuses values with several readers.

A value's memory belongs to the call that made it. Views and in-place operations pass on the memory
of their first input, so reading them reads that.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from ddpopt import _copies, _torch
from ddpopt._values import check_kind
from ddpopt.errors import PlanError
from ddpopt.planning.batch import (
    Batch,
    LossFn,
    as_batch,
    call_model,
    check_loss_fn,
    find_loss,
    has_loss,
)
from ddpopt.planning.calibrate import measure_device
from ddpopt.planning.costs import Device, Gradient, Profile
from ddpopt.planning.randomness import restoring_randomness
from ddpopt.split.nodes import call_nodes, leaves, may_be_fused, name_of

_MEASURED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Operators that read of their first input only as many bytes as they write.
_GATHERS = frozenset({"embedding", "gather", "index", "index_select"})


def estimate(
    model: nn.Module,
    batch: Any,
    *,
    device: Device | None = None,
    loss_fn: LossFn | None = None,
) -> Profile:
    """The profile of one iteration as a device with these rates would run it.

    Calls run one after another in the order of eager autograd; see [Note: costs of a call]. Forward
    ends where the loss is computed. The gradient of a parameter that the loss does not depend on is
    ready at the end of backward. But if the loss is only the sum of outputs, for want of another,
    it is ready at the beginning: the training's own loss is taken to use the parameter, since DDP
    refuses unused ones (unless the graph is static, when the end counts here too). The current
    autocast and the model's current mode (train or eval) apply.
    The model, what it holds, and the random number states of torch, Python and numpy are left
    unchanged.

    Args:
        model: What DDP is to wrap, or wraps, or the DDP module; compiled or not. It needs no memory
            for a second one. On the meta device it is traced as if it were on the accelerator, or
            on the CPU if there is none, and takes no memory.
        batch: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
            Only shapes and dtypes matter.
        device: Rates of the device; None measures those of the model's device, in under 1 s.
        loss_fn: Computes a scalar from the model's output. Default: the output's `loss` (an
            attribute or a key), or else the sum of its floating point tensors.

    Raises:
        TypeError: `model` is no module.
        PlanError: the model has no parameter that requires grad, it cannot be traced, the loss is
            not a scalar that depends on a parameter, or a gradient is sparse.
    """
    check_kind("model", model, nn.Module, "give what DDP is to wrap", TypeError)
    if device is not None:
        remedy = "give a ddpopt.planning.Device, or None to measure the model's own"
        check_kind("device", device, Device, remedy, PlanError)
    check_loss_fn(loss_fn, PlanError)
    graph, trained, loss_is_sum_of_outputs = _trace(wrapped_module(model), batch, loss_fn)
    returned: Any = graph.output_node().args[0]
    made_loss, *made = returned
    for name, node in zip(trained, made, strict=True):
        if node is not None and _torch.aten_value(node).layout is not torch.strided:
            raise PlanError(
                f"the gradient of {name} is sparse, which DDP reduces in a bucket of its own; use "
                "a dense one (sparse=False)"
            )
    if device is None:
        values = [_torch.aten_value(node) for node in graph.nodes]
        used = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        first = next(iter(trained.values()))
        device = measure_device(first.device, [d for d in _MEASURED_DTYPES if d in used])
    costs = call_costs(graph, device)
    # `ends_s[n]` is the time at which the first n calls have run. A value that no call makes, such
    # as an input that is passed through, is ready at `ends_s[0]`. The end of backward is the last
    # time twice: the second one is for unused gradients, which so come behind all others. A
    # gradient that does not depend on the loss's value may be ready before the loss.
    ends_s = [0.0, *itertools.accumulate(cost.seconds for cost in costs.values())]
    ends_s.append(ends_s[-1])
    num_calls_to = {name: number for number, name in enumerate(costs, 1)}
    forward_s = ends_s[num_calls_to.get(made_loss.name, 0)]
    ddp = _torch.unwrap_compiled(model)
    may_be_unused = isinstance(ddp, DistributedDataParallel) and ddp.static_graph
    # An unused parameter: used by the training's own loss, at the beginning of backward, or by
    # nothing.
    num_calls_to_unused = 0 if loss_is_sum_of_outputs and not may_be_unused else len(costs) + 1
    num_calls_before = {
        name: num_calls_to_unused if node is None else num_calls_to.get(node.name, 0)
        for name, node in zip(trained, made, strict=True)
    }
    gradients = tuple(
        Gradient(
            name=name,
            num_bytes=trained[name].numel() * trained[name].element_size(),
            ready_s=max(ends_s[num_calls_before[name]] - forward_s, 0.0),
            # As `reducer_parameters` has it.
            group=f"{trained[name].dtype} on {trained[name].device}",
        )
        for name in sorted(num_calls_before, key=num_calls_before.__getitem__)
    )
    return Profile(
        gradients=gradients,
        backward_s=ends_s[-1] - forward_s,
        forward_s=forward_s,
        source="estimated",
    )


def scale(profile: Profile, forward_s: float, backward_s: float) -> Profile:
    """A profile stretched to measured times of forward and backward.

    Raises:
        PlanError: a time is negative or not finite, or the profile's backward takes no time.
    """
    if not profile.backward_s > 0:
        raise PlanError("the profile's backward_s is 0, which cannot be stretched; measure instead")
    factor = backward_s / profile.backward_s
    # A Profile refuses a gradient that rounding puts behind the end of backward.
    return profile.with_ready_times(
        [min(gradient.ready_s * factor, backward_s) for gradient in profile.gradients],
        forward_s=forward_s,
        backward_s=backward_s,
        source=f"{profile.source}, scaled",
    )


def wrapped_module(model: nn.Module) -> nn.Module:
    """The module inside a DDP module, compiled or not; any other model as it is.

    So parameters have the same names with and without DDP, and DDP's own forward is not traced.
    """
    ddp = _torch.unwrap_compiled(model)
    return ddp.module if isinstance(ddp, DistributedDataParallel) else model


def _trace(
    model: nn.Module, batch: Any, loss_fn: LossFn | None
) -> tuple[fx.Graph, dict[str, torch.Tensor], bool]:
    """Trace forward and backward into one graph of aten operations.

    Returns the graph, which returns the loss and a gradient for each trained parameter (None if the
    loss does not depend on the parameter); a fake tensor for each trained parameter, on the device
    traced for, by the name that it has without wrappers of `torch.compile` and of checkpoints; and
    whether the loss is the sum of outputs, for want of another.
    """
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not trained:
        what = "requires grad; unfreeze one" if parameters else "exists; there is nothing to reduce"
        raise PlanError(f"no parameter of {type(model).__name__} {what}")
    if not isinstance(batch, torch.Tensor | Mapping | tuple | list):
        raise PlanError(
            f"batch is a {type(batch).__name__}; it must be a tensor, a tuple of "
            "positional arguments or a dict of keyword arguments"
        )
    other_device = None
    if any(parameter.is_meta for parameter in parameters.values()):
        # On the meta device operations are traced that no device runs: attention, for one, is
        # decomposed there. A build for GPUs has an accelerator that this machine may lack.
        other_device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    fake = functools.partial(_to_fake, _torch.fake_mode_with_real_tensors(), other_device)
    # A forward may keep what it computes, which here are fake tensors: so this is a copy of the
    # model. Its own tensors serve in the copy, since fake ones are put in their place.
    step = _Step(*_copies.copy_model(model, loss_fn, PlanError, shares_tensors=True))
    tensors = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    inputs: Any = map_aggregate((tensors, *as_batch(batch)), fake)

    def trace(tensors: Any, args: Any, kwargs: Any) -> Any:
        wanted = [tensors[f"model.{name}"] for name in trained]
        return functional_call(step, dict(tensors), (wanted, Batch(args, kwargs)))

    try:
        # Fake tensors draw no numbers, but a forward may also ask Python's or numpy's generator.
        with restoring_randomness(model), torch.enable_grad(), _torch.uncompiled_while_tracing():
            graph = make_fx(trace, tracing_mode="fake")(*inputs).graph
    except PlanError:  # of the loss
        raise
    except Exception as error:
        # The model's own forward may raise anything, and so may torch, which traces it with tensors
        # that have no values.
        reason = str(error).partition("\n")[0]
        raise PlanError(
            f"{type(model).__name__} cannot be traced ({type(error).__name__}: {reason}); the "
            "inputs must fit its forward, whose course must not depend on values (torch.where "
            "instead of if); or else measure its profile"
        ) from error
    plain_of = _torch.plain_names(parameters)
    trained_tensors = {plain_of[name]: inputs[0][f"model.{name}"] for name in trained}
    return graph, trained_tensors, step.loss_is_sum_of_outputs


class _Step(nn.Module):
    """Forward, loss and backward as one module, for `functional_call` to put fake tensors into.

    A backward runs checkpointed parts of the forward once more: while it runs, the fake tensors
    have to be in place of the parameters too.

    `in_loss` are modules that the loss uses beside the model, such as a teacher. They are
    submodules too, so that their tensors are replaced as well.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, in_loss: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.model = model
        self.in_loss = nn.ModuleList(in_loss)
        # In a tuple: a loss that is a module is in `in_loss`, and would be registered once more.
        self._loss = (loss_fn,)
        # Whether the loss is the sum of outputs, for want of another. Known once `forward` ran.
        self.loss_is_sum_of_outputs = False

    def forward(self, wanted: list[torch.Tensor], batch: Batch) -> list[torch.Tensor | None]:
        """The loss, and its gradients with respect to `wanted`."""
        output = call_model(self.model, batch)
        self.loss_is_sum_of_outputs = self._loss == (None,) and not has_loss(output)
        value = find_loss(output, *self._loss)
        return [value, *torch.autograd.grad(value, wanted, allow_unused=True)]


def _to_fake(mode: Any, device: torch.device | str | None, value: Any) -> Any:
    """A fake tensor of `mode` for a tensor, on `device`, or on its own device if that is None."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value  # make_fx replaces tensors of other kinds
    with mode:
        made = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=device or value.device
        )
    return made.requires_grad_(value.requires_grad)


# ---- Costs of calls ----------------------------------------------------------------------------


class CallCost(NamedTuple):
    """See [Note: costs of a call]."""

    flops: int
    moved_bytes: int
    seconds: float


def call_costs(graph: fx.Graph, device: Device) -> dict[str, CallCost]:
    """Return what each aten operation costs, by its node's name, in the order of the graph.

    Raises:
        PlanError: a value has no `meta["val"]`, which make_fx and AOTAutograd set, or has a
            symbolic shape.
    """
    values = _Values(graph)
    # Formulas are looked up by the operation's name alone, since all its overloads cost the same.
    registry = FlopCounterMode(display=False).flop_registry
    formulas = {getattr(target, "__name__", ""): formula for target, formula in registry.items()}
    costs = {}
    for node in call_nodes(graph):
        flops = moved_bytes = 0
        seconds = 0.0
        if not _is_free(node):
            flops, moved_bytes = _count_flops(node, formulas), values.moved_bytes(node)
            dtype = next((tensor.dtype for tensor in _tensors(node)), None)
            seconds = device.seconds(flops, moved_bytes, dtype)
            seconds += 0.0 if values.is_fused(node) else device.launch_s
        costs[node.name] = CallCost(flops, moved_bytes, seconds)
    return costs


class _Values:
    """The values of a graph: whose memory they are in, their sizes in bytes, and their readers."""

    def __init__(self, graph: fx.Graph) -> None:
        self.owner: dict[fx.Node, fx.Node] = {}
        self.size: dict[fx.Node, int] = {}
        # Which calls read the memory of a node; views read none.
        self._readers: dict[fx.Node, set[fx.Node]] = {}
        for node in graph.nodes:
            if node.op != "output":
                self.owner[node] = owner = self._find_owner(node)
                size = _num_bytes(node)
                # An expanded view has more elements than memory.
                self.size[node] = min(size, self.size.get(owner, size))
            if not _is_free(node):
                for source in node.all_input_nodes:
                    self._readers.setdefault(self.owner[source], set()).add(node)

    def _find_owner(self, node: fx.Node) -> fx.Node:
        """The node to which a value's memory belongs, given those of the nodes before."""
        if not node.all_input_nodes:
            return node
        first = node.all_input_nodes[0]
        if name_of(node) == "getitem":
            # An element of a tuple owns its memory, unless the call that made the tuple is a view.
            return node if self.owner[first] is first else self.owner[first]
        # `add_` is in place, `__and__` is not.
        is_in_place = _base_name(node).endswith("_") and not _base_name(node).endswith("__")
        return self.owner[first] if _is_view(node) or is_in_place else node

    def is_fused(self, node: fx.Node) -> bool:
        """Whether a node's value exists only inside its reader's loop.

        The graph's output is a reader too, with which nothing is fused.
        """
        readers = self._readers.get(node, ())
        return (
            self.owner[node] is node
            and len(readers) == 1
            and all(may_be_fused(node, reader) for reader in readers)
        )

    def moved_bytes(self, node: fx.Node) -> int:
        """The bytes that a call reads and writes, without values that are fused with a reader."""
        written = 0 if self.is_fused(node) else self.size[node]
        reads = [
            0 if self.is_fused(self.owner[source]) else self.size[source]
            for source in node.all_input_nodes
        ]
        if _base_name(node) in _GATHERS:  # it reads no more of a table than it writes
            reads[0] = min(reads[0], self.size[node])
        return sum(reads) + written


def _base_name(node: fx.Node) -> str:
    """An operation's name without its overload."""
    return name_of(node).partition(".")[0]


def _is_view(node: fx.Node) -> bool:
    return _torch.is_view(node.target)


def _is_free(node: fx.Node) -> bool:
    is_empty = _base_name(node).startswith(("empty", "new_empty"))
    return _is_view(node) or name_of(node) == "getitem" or is_empty


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node stands for; raises PlanError if the graph does not have them."""
    # None has no "val": the result of a call without one, or a gradient that nobody needs. Nor need
    # a constant in an attribute have one, and then it counts for nothing.
    may_be_none = not node.users or name_of(node) == "getitem"
    if not _torch.has_aten_value(node) and node.op != "get_attr" and not may_be_none:
        raise PlanError(
            f"node {node.name} ({name_of(node)}) has no meta['val']; trace the graph with make_fx "
            "and tracing_mode='fake'"
        )
    return [leaf for leaf in leaves(_torch.aten_value(node)) if isinstance(leaf, torch.Tensor)]


def _num_bytes(node: fx.Node) -> int:
    """The size of all tensors that a node stands for; raises PlanError if it is symbolic."""
    tensors = _tensors(node)
    for tensor in tensors:
        if not all(isinstance(size, int) for size in tensor.shape):
            raise PlanError(
                f"node {node.name} has the symbolic shape {tuple(tensor.shape)}; costs need static "
                "shapes, as make_fx with tracing_mode='fake' gives them"
            )
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)


def _count_flops(node: fx.Node, formulas: Mapping[str, Any]) -> int:
    """The FLOPs of a call by torch's formula for its operation, 0 without one."""
    # The CPU's attention has no formula of its own (torch 2.11 to 2.13).
    formula = formulas.get(_torch.without_device(_base_name(node)))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), _torch.aten_value)
    return int(formula(*args, **kwargs, out_val=_torch.aten_value(node)))
