"""`plan`: the best buckets for a model before it is wrapped in DistributedDataParallel."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpopt.errors import PlanError
from ddpopt.planning.batch import LossFn, call_model, find_loss
from ddpopt.planning.costs import ALLREDUCE, AllreduceCost, Network, check_communication
from ddpopt.planning.device import Device, now
from ddpopt.planning.estimates import estimate, scale
from ddpopt.planning.plan import BucketPlan, plan_buckets

_NUM_STEPS = 5
# What an additional section of backward costs: benchmarks/cost/overhead.py measured 40 us.
_CUT_S = 50e-6


def plan(  # noqa: PLR0913  # what a plan depends on; all but two have defaults
    model: nn.Module,
    example_inputs: Any,
    *,
    network: AllreduceCost | Network,
    world_size: int | None = None,
    backend: str | Callable[..., Any] | None = "inductor",
    device: Device | None = None,
    loss: LossFn | None = None,
    communication: str = ALLREDUCE,
) -> BucketPlan:
    """Return the best buckets for a model, a batch and a network; apply them with `ddp_kwargs()`.

    The part of backward that each gradient has to wait for is estimated (see `estimate`); forward
    and backward are timed, which leaves gradients, buffers and the random number state unchanged.
    With several ranks, make the plan on one and broadcast `to_json()`: times differ between ranks.

    Args:
        model: What DDP is to wrap, compiled or not, on its device, in the mode used in training.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
        network: What `calibrate` measured, or the links of a cluster.
        world_size: Number of ranks; None means that of the default process group.
        backend: Compiles the model for the measurement; None measures it uncompiled.
        device: Rates of the device, to run nothing: then times are estimated too, as they are for
            models on the meta device.
        loss: Computes a scalar from the model's output; the default is as in `estimate`.
        communication: "sharded" plans for `ddpopt.algorithms.ShardedUpdate`: for the whole
            iteration, since half of the communication runs behind forward.

    Raises:
        PlanError: the model cannot be traced, `world_size` is missing or below 1, or
            `communication` is something else.
    """
    check_communication(communication)
    if world_size is None:
        if not dist.is_initialized():
            raise PlanError("world_size is None without a process group; give the number of ranks")
        world_size = dist.get_world_size()
    cost = network.allreduce(world_size) if isinstance(network, Network) else network
    profile = estimate(model, example_inputs, device=device, loss=loss)
    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    if device is None and not is_on_meta:
        forward_s, backward_s = _measure(model, example_inputs, backend, loss)
        profile = dataclasses.replace(scale(profile, forward_s, backward_s), cut_s=_CUT_S)
    return plan_buckets(profile, cost, world_size, communication)


def _measure(
    model: nn.Module,
    example_inputs: Any,
    backend: str | Callable[..., Any] | None,
    loss: LossFn | None,
) -> tuple[float, float]:
    """Return the median times of forward and backward, without the first step, which compiles."""
    compiled: Any = torch.compile(model, backend=backend) if backend is not None else model
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    devices = {parameter.device for parameter in gradients}
    indices = [device.index for device in devices if device.type != "cpu"]
    times: list[tuple[float, float]] = []
    try:
        with torch.random.fork_rng(devices=indices):
            for _ in range(_NUM_STEPS + 1):
                model.zero_grad(set_to_none=True)
                start_s = max(map(now, devices))
                value = find_loss(call_model(compiled, example_inputs), loss)
                middle_s = max(map(now, devices))
                value.backward()  # type: ignore[no-untyped-call]  # as torch has it
                times.append((middle_s - start_s, max(map(now, devices)) - middle_s))
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
    forward_s, backward_s = map(statistics.median, zip(*times[1:], strict=True))
    return forward_s, backward_s
