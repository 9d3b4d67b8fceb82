"""`attach`: have an algorithm communicate for a DDP model in place of DDP's allreduce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpopt import _torch
from ddpopt.algorithms._runtime import comm_hook
from ddpopt.algorithms._runtime.handle import Algorithm, HandleT, Training
from ddpopt.errors import AttachError, OptionError
from ddpopt.ranks.agreement import Fact, Word, agree
from ddpopt.ranks.faults import communicating
from ddpopt.split import state


def attach(
    ddp_model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm[HandleT],
) -> HandleT:
    """Have `algorithm` communicate for a DDP model in place of DDP's allreduce. Collective.

    Weights, optimizer states and learning rates are checked and made equal to rank 0's first.
    Attach between two steps, after loading what all ranks share and before loading what each rank
    keeps for itself.

    Args:
        ddp_model: A DistributedDataParallel module, compiled (by `torch.compile`) or not, without
            a comm hook.
        optimizer: The optimizer of its parameters, or all of them.
        algorithm: Of this package.

    Returns:
        The handle: `detach`, `paused`, `average`, `state_dict`, `load_state_dict`, and what the
        algorithm adds.

    Raises:
        TypeError: `ddp_model`, `optimizer` or `algorithm` is something else, or parameters have a
            dtype that cannot be averaged.
        NotImplementedError: a parameter has sparse gradients.
        OptionError: the algorithm's values, the optimizer or DDP's options do not fit.
        AttachError: there is no process group, DDP has a comm hook or an algorithm, or ranks
            differ.
        PeerError: a rank did not make this call.

    All but the first kind are raised on all ranks, if they concern any of them.
    """
    ddp = state.ddp_of(ddp_model)
    if not dist.is_initialized() or dist.get_rank(ddp.process_group) < 0:
        raise AttachError("this rank has no process group any more; init_process_group comes first")
    optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    parameters = _torch.trainable_parameters(ddp)
    training = Training(ddp=ddp, optimizers=optimizers, parameters=parameters)
    problem = _find_problem(training, algorithm)
    word = Word([] if problem else _facts(training, algorithm), problem)
    remedy = "build model, optimizer and algorithm alike on all ranks"
    agree(ddp, word, AttachError, remedy)
    with communicating("making weights and optimizers equal on all ranks"):
        _start_equal(training)
    comm_hook.register(ddp)
    handle = algorithm.make_handle(training)
    comm_hook.occupy(ddp, handle)
    return handle


def _find_problem(training: Training, algorithm: Any) -> Exception | None:
    """Say why `algorithm` cannot be attached on this rank; nothing is communicated."""
    if not isinstance(algorithm, Algorithm):
        return TypeError(
            f"the algorithm is {algorithm!r}; give one of ddpopt.algorithms, such as "
            "Decentralized()"
        )
    problems = (_problem_of_ddp, _problem_of_optimizers, _problem_of_parameters)
    found = (problem for find in problems if (problem := find(training)) is not None)
    return next(found, None) or algorithm.find_problem(training)


def _problem_of_ddp(training: Training) -> Exception | None:
    if comm_hook.is_occupied(training.ddp):
        return AttachError("this model has an algorithm already; detach it first")
    if comm_hook.is_foreign(training.ddp):
        return AttachError(
            "this DDP module has a comm hook, and takes only one; attach the algorithm to a DDP "
            "module without"
        )
    reason = _torch.cannot_attach(training.ddp)
    return (
        OptionError(f"no algorithm can be attached to this DDP module: {reason}")
        if reason
        else None
    )


def _problem_of_optimizers(training: Training) -> Exception | None:
    for optimizer in training.optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return TypeError(f"an optimizer is a {type(optimizer).__name__}, none of torch.optim")
        if isinstance(optimizer, torch.optim.LBFGS):
            return OptionError(
                "LBFGS runs forward and backward several times in one step, and communication "
                "would be out of step; use an optimizer without a closure"
            )
    return None


def _problem_of_parameters(training: Training) -> Exception | None:
    for parameter, described in training.parameters.items():
        if described.is_sparse:
            return NotImplementedError(
                f"{described.name} has sparse gradients, which algorithms do not take; make its "
                "embedding with sparse=False"
            )
        if not parameter.dtype.is_floating_point:
            return TypeError(
                f"{described.name} is of {parameter.dtype}, which cannot be averaged; freeze it, "
                "or use a real floating point type"
            )
    return None


def _facts(training: Training, algorithm: Algorithm[Any]) -> list[Fact]:
    """List what has to be equal on all ranks."""
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
    """Yield the tensors that an optimizer keeps of its parameters, in their order, with a name."""
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
        sent = tensor.detach()
        if sent.device.type == "cpu" and training.device.type != "cpu":
            sent = sent.to(training.device)  # Adam counts steps on the CPU, NCCL sends no such
        sent = sent.contiguous()
        dist.broadcast(sent, group=training.group, group_src=0)
        tensor.copy_(sent)
