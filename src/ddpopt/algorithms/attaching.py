"""`attach` and `HierarchicalAlgorithm`: checks that settings are valid and equal on all ranks.

What an algorithm does in a step is up to its handle, in `handle.py`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.algorithms.handle import Algorithm, HandleT, Training, agree_on, check_free
from ddpopt.config import check_boolean
from ddpopt.errors import AttachError, OptionError
from ddpopt.ranks.agreement import Fact, communicating
from ddpopt.split import state
from ddpopt.split.ddp_modes import KEEPING_ALLREDUCE, find_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalAlgorithm(Algorithm[HandleT]):
    """As `Algorithm`, optionally hierarchical; flags must be bool, and counts at least 1.

    Attributes:
        hierarchical: See [Note: hierarchical] in `algorithms/comm.py`.
        local_world_size: Ranks on each node; None means LOCAL_WORLD_SIZE, which torchrun sets.
    """

    hierarchical: bool = True
    local_world_size: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                check_boolean(field.name, value, TypeError)
            elif isinstance(field.default, int):
                check_count(field.name, value, 1)
        if self.local_world_size is not None:
            check_count("local_world_size", self.local_world_size, 1)

    def ranks_per_node(self, num_ranks: int) -> int:
        """As `Algorithm.ranks_per_node`; raise OptionError if unknown, or no divisor."""
        if not self.hierarchical:
            return 1
        given = str(self.local_world_size or os.environ.get("LOCAL_WORLD_SIZE", ""))
        if not given:
            raise OptionError(
                "hierarchical=True (the default) needs the number of ranks on each node, and "
                "LOCAL_WORLD_SIZE is not set; start with torchrun, give local_world_size, or pass "
                "hierarchical=False"
            )
        if not given.isdecimal() or not int(given):
            raise OptionError(f"LOCAL_WORLD_SIZE is {given!r}; it must be a whole number above 0")
        size = int(given)
        if num_ranks % size:
            raise OptionError(
                f"{num_ranks} ranks cannot be divided into nodes of {size} (local_world_size or "
                "LOCAL_WORLD_SIZE); pass hierarchical=False, or equal numbers of ranks on all nodes"
            )
        return size


def check_count(name: str, value: object, least: int) -> None:
    """Raise TypeError unless `value` is an int, OptionError if it is below `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; give an int")
    if value < least:
        raise OptionError(f"{name} is {value}; the least is {least}")


def attach(
    ddp_model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm[HandleT],
) -> HandleT:
    """Let `algorithm` communicate for a DDP model in place of DDP's allreduce. Collective.

    First, weights and optimizer states are made equal to rank 0's. Attach between two steps, after
    loading what all ranks share and before loading what each rank keeps for itself.

    Args:
        ddp_model: A DistributedDataParallel module without a comm hook, compiled or not.
        optimizer: The optimizer of its parameters, or all of their optimizers.
        algorithm: One of this package's algorithms.

    Raises:
        TypeError: an argument is something else, or a parameter's dtype cannot be averaged.
        NotImplementedError: a parameter has sparse gradients.
        OptionError: the algorithm's values, the optimizer or DDP's options do not fit.
        AttachError: there is no process group, DDP already has a comm hook or an algorithm, or
            ranks differ.
        PeerError: a rank did not make this call.

    If `ddp_model` is a DDP module, each of these is raised on all ranks, whichever it concerns.
    """
    ddp = state.ddp_of(ddp_model)
    if not dist.is_initialized() or dist.get_rank(ddp.process_group) < 0:
        raise AttachError("this rank has no process group any more; init_process_group comes first")
    optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    parameters = _torch.reduced_or_trainable_parameters(ddp)
    training = Training(ddp=ddp, optimizers=optimizers, parameters=parameters)
    remedy = "build model, optimizer and algorithm alike on all ranks"
    agree_on(ddp, lambda: _check(training, algorithm), remedy)
    with communicating("making weights and optimizers equal on all ranks"):
        _start_equal(training)
    return algorithm.handle_type(training, algorithm)


def _check(training: Training, algorithm: Any) -> list[Fact]:
    """Return what has to be equal on all ranks; raise why `algorithm` cannot be attached here."""
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"the algorithm is {algorithm!r}; give one of ddpopt.algorithms, such as "
            "Decentralized()"
        )
    check_free(training.ddp)
    mode = find_mode(training.ddp, KEEPING_ALLREDUCE)
    if mode is not None:
        raise OptionError(f"no algorithm can be attached to this DDP module: {mode.value}")
    for optimizer in training.optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"an optimizer is a {type(optimizer).__name__}, not one of torch.optim")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptionError(
                "LBFGS runs forward and backward several times in one step, and communication "
                "would be out of step; use an optimizer without a closure"
            )
    for parameter, described in training.parameters.items():
        if described.is_sparse:
            raise NotImplementedError(
                f"{described.name} has sparse gradients, which algorithms do not take; make its "
                "embedding with sparse=False"
            )
        if not parameter.dtype.is_floating_point:
            raise TypeError(
                f"{described.name} is of {parameter.dtype}, which cannot be averaged; freeze it "
                "before DDP is made, or use a real floating point type"
            )
    algorithm.ranks_per_node(training.group.size())
    algorithm.check(training)
    return _facts(training, algorithm)


def _facts(training: Training, algorithm: Algorithm[Any]) -> list[Fact]:
    facts = [Fact("the algorithm", repr(algorithm))]
    facts += [
        Fact(f"parameter {p.name}", f"{t.dtype} {list(t.shape)} on {t.device.type}")
        for t, p in training.parameters.items()
    ]
    index_of = {t: k for k, t in enumerate(training.parameters)}
    for number, optimizer in enumerate(training.optimizers):
        facts.append(Fact(f"optimizer {number}", type(optimizer).__name__))
        for place, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number}, group {place}"
            members = [index_of.get(p) for p in group["params"]]
            facts.append(Fact(f"{where}, parameters", str(members)))
            for name in sorted(group.keys() - {"params"}):
                facts.append(Fact(f"{where}, {name}", str(group[name])))
        for tensor, name in _state_of(optimizer):
            facts.append(
                Fact(f"optimizer {number}, {name}", f"{tensor.dtype} {list(tensor.shape)}")
            )
    return facts


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the tensors that an optimizer keeps for its parameters, in their order, with names."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield value, f"state {name} of parameter {index}"


@torch.no_grad()
def _start_equal(training: Training) -> None:
    """Give all ranks rank 0's weights and optimizer states. Collective."""
    tensors = [*training.parameters]
    for optimizer in training.optimizers:
        tensors += [tensor for tensor, _ in _state_of(optimizer)]
    for tensor in tensors:
        # Adam counts steps on the CPU, but NCCL sends GPU tensors only.
        sent = tensor.detach().to(training.device).contiguous()
        dist.broadcast(sent, group=training.group, group_src=0)
        tensor.copy_(sent)
