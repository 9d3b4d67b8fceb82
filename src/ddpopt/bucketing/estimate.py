"""The profile of one iteration from the model's graph alone: nothing is run on real data.

Forward and backward are traced into one graph with fake tensors; `call_costs.py` knows what its
calls cost. What was measured comes from elsewhere; `scale` brings the two together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from ddpopt import _torch
from ddpopt.bucketing import batch as batches
from ddpopt.bucketing.batch import Batch, as_batch
from ddpopt.bucketing.call_costs import call_costs
from ddpopt.bucketing.costs import Gradient, Profile
from ddpopt.bucketing.device import Device, measure_device
from ddpopt.errors import PlanError

_MEASURED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class JointGraph(NamedTuple):
    """Forward and backward in one graph, and the names of the nodes that it returns.

    `gradients` are by the parameter's name, None for one that is not used; `parameters` are fake
    tensors on the device that was traced for.
    """

    graph: fx.Graph
    loss: str
    gradients: Mapping[str, str | None]
    parameters: Mapping[str, torch.Tensor]


def estimate(
    model: nn.Module,
    example_inputs: Any,
    *,
    device: Device | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Profile:
    """Return the profile of one iteration as a device of these rates would run it.

    Calls run one after another in the order of eager autograd; see [Note: costs of a call]. Forward
    ends where the loss is made. A parameter that is not used is ready at the end of backward.
    Autocast and the model's mode (train or eval) count as they are. Neither the model nor the
    random number state changes.

    Args:
        model: Compiled or not; its names are those of the profile, so give what DDP is to wrap, or
            wraps. On the meta device it is traced as if it were on the accelerator, or on the CPU
            where there is none, and takes no memory.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
            Only shapes and dtypes matter.
        device: Its rates; None measures those of the device that the model is on, in under 1 s.
        loss: Makes a scalar of the model's output. Default: the output's `loss` (an attribute or a
            key), or else the sum of its floating point tensors.

    Raises:
        PlanError: the model has no parameter that requires grad, it cannot be traced, the loss is
            no scalar that depends on a parameter, or a gradient is sparse.
    """
    joint = trace_joint(model, example_inputs, loss)
    if device is None:
        values = [node.meta.get("val") for node in joint.graph.nodes]
        used = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        first = next(iter(joint.parameters.values()))
        device = measure_device(first.device, [d for d in _MEASURED_DTYPES if d in used])
    costs = call_costs(joint.graph, device)
    ends_s = dict(zip(costs, itertools.accumulate(c.seconds for c in costs.values()), strict=True))
    forward_s = ends_s.get(joint.loss, 0.0)
    backward_s = max(ends_s.values(), default=0.0) - forward_s
    place = {node: index for index, node in enumerate(costs)} | {None: len(costs)}
    # One that is no call is an input handed through, and there at once. A gradient that does not
    # depend on the loss's arithmetic may stand before it in the graph.
    ordered = sorted(joint.gradients.items(), key=lambda item: place.get(item[1], -1))
    gradients = []
    for name, node in ordered:
        parameter = joint.parameters[name]
        after_s = ends_s.get(node, 0.0) - forward_s if node is not None else backward_s
        gradients.append(
            Gradient(
                name=name,
                num_bytes=parameter.numel() * parameter.element_size(),
                ready_s=max(after_s, 0.0),
                group=f"{parameter.dtype} on {parameter.device}",
            )
        )
    return Profile(
        gradients=tuple(gradients),
        backward_s=backward_s,
        forward_s=forward_s,
        source="estimated",
    )


def scale(profile: Profile, forward_s: float, backward_s: float) -> Profile:
    """Return a profile stretched to measured times of forward and backward.

    Raises:
        PlanError: a time is negative or not finite, or the profile's backward takes no time.
    """
    if not profile.backward_s > 0:
        raise PlanError("the profile's backward_s is 0, which cannot be stretched; measure instead")
    factor = backward_s / profile.backward_s
    return profile.with_ready_times(
        [min(gradient.ready_s * factor, backward_s) for gradient in profile.gradients],
        forward_s=forward_s,
        backward_s=backward_s,
        source=f"{profile.source}, scaled",
    )


def trace_joint(
    model: nn.Module, example_inputs: Any, loss: Callable[[Any], torch.Tensor] | None = None
) -> JointGraph:
    """Trace forward and backward into one graph of aten operations; arguments as for `estimate`.

    Raises:
        PlanError: as `estimate`.
    """
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not trained:
        what = "requires grad; unfreeze one" if parameters else "exists; there is nothing to reduce"
        raise PlanError(f"no parameter of {type(model).__name__} {what}")
    args, kwargs = _arguments(example_inputs)
    inputs = (parameters, dict(model.named_buffers()), args, kwargs)

    def trace(parameters: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
        state = {f"model.{name}": value for name, value in {**parameters, **buffers}.items()}
        wanted = [parameters[name] for name in trained]
        return functional_call(_Step(model, loss or find_loss), state, (wanted, args, kwargs))

    try:
        if any(parameter.is_meta for parameter in parameters.values()):
            inputs = _to_fake(inputs, torch.accelerator.current_accelerator() or "cpu")
        with torch.enable_grad(), _torch.uncompiled_while_tracing():
            graph = make_fx(trace, tracing_mode="fake")(*inputs).graph
    except PlanError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise PlanError(
            f"{type(model).__name__} cannot be traced ({type(error).__name__}: {reason}); the "
            "inputs must fit its forward, whose course must not depend on values (torch.where "
            "instead of if) and whose constant tensors must be buffers; or else measure its profile"
        ) from error
    returned: Any = graph.output_node().args[0]
    made_loss, *gradients = returned
    return JointGraph(
        graph=graph,
        loss=made_loss.name,
        gradients=dict(zip(trained, map(_name_of_gradient, trained, gradients), strict=True)),
        parameters={name: inputs[0][name] for name in trained},
    )


class _Step(nn.Module):
    """Forward and backward as one module, since checkpointed parts of forward run in both."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(
        self, wanted: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor | None]:
        """Return the loss, and its gradients by what is wanted."""
        value = _check_loss(self._loss(self.model(*args, **kwargs)))
        return [value, *torch.autograd.grad(value, wanted, allow_unused=True)]


def call_model(model: Callable[..., Any], example_inputs: Any) -> Any:
    """Return the output for inputs as `estimate` takes them."""
    args, kwargs = _arguments(example_inputs)
    return model(*args, **kwargs)


def find_loss(output: Any) -> torch.Tensor:
    """Return an output's `loss` (attribute or key), or else the sum of its floating tensors.

    Raises:
        PlanError: it has neither.
    """
    loss = batches.find_loss(output, torch.sum)
    if loss is None:
        raise PlanError(
            f"the model's output ({type(output).__name__}) has no floating point tensor that "
            "depends on a parameter; give loss, which makes a scalar of the output"
        )
    return loss


def _check_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise PlanError(
            f"the loss ({shape}) must be a tensor of one element that depends on a parameter"
        )
    return loss


def _arguments(example_inputs: Any) -> Batch:
    if not isinstance(example_inputs, torch.Tensor | Mapping | tuple | list):
        raise PlanError(
            f"example_inputs is a {type(example_inputs).__name__}; it must be a tensor, a tuple of "
            "positional arguments or a dict of keyword arguments"
        )
    return as_batch(example_inputs)


def _to_fake(values: Any, device: torch.device | str) -> Any:
    """Return fake tensors on `device` in place of all tensors.

    On the meta device itself operations would be traced that no device runs so: attention, for
    one, comes apart there.
    """
    tensors: list[torch.Tensor] = []
    map_aggregate(values, lambda v: tensors.append(v) if isinstance(v, torch.Tensor) else None)

    def make() -> list[torch.Tensor]:
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors
        ]

    nodes: Any = make_fx(make, tracing_mode="fake")().graph.output_node().args[0]
    fakes = iter(
        node.meta["val"].requires_grad_(tensor.requires_grad)
        for node, tensor in zip(nodes, tensors, strict=True)
    )
    return map_aggregate(values, lambda v: next(fakes) if isinstance(v, torch.Tensor) else v)


def _name_of_gradient(parameter: str, node: fx.Node | None) -> str | None:
    if node is None:
        return None
    if node.meta["val"].layout is not torch.strided:
        raise PlanError(
            f"the gradient of {parameter} is sparse, which DDP reduces in a bucket of its own; use "
            "a dense one (sparse=False)"
        )
    return node.name
