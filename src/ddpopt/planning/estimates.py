"""The profile of one iteration from the model's graph alone: nothing is run on real data.

Forward and backward are traced into one graph with fake tensors; `call_costs.py` knows what its
calls cost. Measurements come from elsewhere; `scale` brings the two together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from ddpopt import _torch
from ddpopt.errors import PlanError
from ddpopt.planning.batch import Batch, LossFn, as_batch, call_model, find_loss
from ddpopt.planning.call_costs import call_costs
from ddpopt.planning.costs import Gradient, Profile
from ddpopt.planning.device import Device, measure_device

_MEASURED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def estimate(
    model: nn.Module,
    example_inputs: Any,
    *,
    device: Device | None = None,
    loss: LossFn | None = None,
) -> Profile:
    """Return the profile of one iteration as a device with these rates would run it.

    Calls run one after another in the order of eager autograd; see [Note: costs of a call]. Forward
    ends where the loss is computed. An unused parameter is ready at the end of backward. The
    current autocast and the model's current mode (train or eval) apply. Neither the model nor the
    random number state changes.

    Args:
        model: Compiled or not; the profile takes its names, so pass what DDP is to wrap, or wraps.
            On the meta device it is traced as if it were on the accelerator, or on the CPU if there
            is none, and takes no memory.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
            Only shapes and dtypes matter.
        device: Rates of the device; None measures those of the model's device, in under 1 s.
        loss: Computes a scalar from the model's output. Default: the output's `loss` (an attribute
            or a key), or else the sum of its floating point tensors.

    Raises:
        PlanError: the model has no parameter that requires grad, it cannot be traced, the loss is
            not a scalar that depends on a parameter, or a gradient is sparse.
    """
    graph, trained = _trace(model, example_inputs, loss)
    returned: Any = graph.output_node().args[0]
    made_loss, *made = returned
    for name, node in zip(trained, made, strict=True):
        if node is not None and node.meta["val"].layout is not torch.strided:
            raise PlanError(
                f"the gradient of {name} is sparse, which DDP reduces in a bucket of its own; use "
                "a dense one (sparse=False)"
            )
    if device is None:
        values = [node.meta.get("val") for node in graph.nodes]
        used = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        first = next(iter(trained.values()))
        device = measure_device(first.device, [d for d in _MEASURED_DTYPES if d in used])
    costs = call_costs(graph, device)
    # By place in the graph: 0 is ready at once, such as an input that is passed through; the last
    # is the end of backward. A gradient may precede the loss if it does not depend on its value.
    ends_s = [0.0, *itertools.accumulate(cost.seconds for cost in costs.values())]
    ends_s.append(ends_s[-1])
    places = {name: place for place, name in enumerate(costs, 1)}
    forward_s = ends_s[places.get(made_loss.name, 0)]
    ready = {
        name: len(costs) + 1 if node is None else places.get(node.name, 0)
        for name, node in zip(trained, made, strict=True)
    }
    gradients = tuple(
        Gradient(
            name=name,
            num_bytes=trained[name].numel() * trained[name].element_size(),
            ready_s=max(ends_s[ready[name]] - forward_s, 0.0),
            group=f"{trained[name].dtype} on {trained[name].device}",
        )
        for name in sorted(ready, key=ready.__getitem__)
    )
    return Profile(
        gradients=gradients,
        backward_s=ends_s[-1] - forward_s,
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


def _trace(
    model: nn.Module, example_inputs: Any, loss: LossFn | None
) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """Trace forward and backward into one graph of aten operations.

    The graph returns the loss and the gradients of the parameters, None for an unused one. The
    parameters of a model on the meta device are returned as fake tensors on the device traced for.
    """
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not trained:
        what = "requires grad; unfreeze one" if parameters else "exists; there is nothing to reduce"
        raise PlanError(f"no parameter of {type(model).__name__} {what}")
    if not isinstance(example_inputs, torch.Tensor | Mapping | tuple | list):
        raise PlanError(
            f"example_inputs is a {type(example_inputs).__name__}; it must be a tensor, a tuple of "
            "positional arguments or a dict of keyword arguments"
        )
    inputs = (parameters, dict(model.named_buffers()), *as_batch(example_inputs))

    def trace(parameters: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
        state = {f"model.{name}": value for name, value in {**parameters, **buffers}.items()}
        wanted = [parameters[name] for name in trained]
        return functional_call(_Step(model, loss), state, (wanted, Batch(args, kwargs)))

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
    return graph, {name: inputs[0][name] for name in trained}


class _Step(nn.Module):
    """Forward and backward as one module, since checkpointed parts of forward run in both."""

    def __init__(self, model: nn.Module, loss: LossFn | None) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, wanted: list[torch.Tensor], batch: Batch) -> list[torch.Tensor | None]:
        """Return the loss, and its gradients with respect to `wanted`."""
        value = find_loss(call_model(self.model, batch), self._loss)
        return [value, *torch.autograd.grad(value, wanted, allow_unused=True)]


def _to_fake(values: Any, device: torch.device | str) -> Any:
    """Return fake tensors on `device` in place of all tensors.

    Tracing on the meta device itself would give operations that no device runs: attention, for
    one, is decomposed there.
    """
    mode = _torch.fake_mode_of(())

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )
        return made.requires_grad_(value.requires_grad)

    return map_aggregate(values, fake)
