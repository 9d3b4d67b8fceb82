"""`attach`: put an algorithm to work on a DDP model, on all ranks or on none."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._text import quote
from ddpopt.algorithms.algorithm import Algorithm
from ddpopt.algorithms.comm import Groups
from ddpopt.algorithms.handle import Handle
from ddpopt.algorithms.optimizer_state import send_states
from ddpopt.algorithms.training import Training
from ddpopt.algorithms.value_text import text_of
from ddpopt.errors import AttachError, OptionError, PeerError
from ddpopt.ranks.agree import Fact, communicating, require_equal
from ddpopt.ranks.store import name_ranks
from ddpopt.split.state import MODES_WITHOUT_ALGORITHM, ddp_of, find_mode

HandleT = TypeVar("HandleT", bound=Handle)


def attach(
    ddp_model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm[HandleT],
) -> HandleT:
    """Let `algorithm` communicate for a DDP model in place of DDP's allreduce. Collective.

    First, weights and optimizer states are made equal to rank 0's. Attach between two steps, after
    loading model and optimizer, and before the handle's own `load_state_dict`. `ddp_model` may be
    compiled. `optimizer` is the optimizer that updates its parameters, or a sequence of optimizers
    if there are several.

    Raises:
        TypeError: an argument is something else, or a parameter's dtype cannot be averaged.
        NotImplementedError: a parameter has sparse gradients.
        OptionError: the algorithm's values, an optimizer or DDP's options do not fit.
        AttachError: there is no process group, DDP already has a comm hook or an algorithm, another
            DDP module reduces some of its parameters, ranks differ, or something else failed.
        PeerError: a rank did not make this call.

    If `ddp_model` is a DDP module, each of these is raised on all ranks, whichever it concerns, and
    nothing is left behind on any, except after a PeerError.
    """
    ddp = ddp_of(ddp_model)
    if not dist.is_initialized() or dist.get_rank(ddp.process_group) < 0:
        raise AttachError("this rank has no process group any more; init_process_group comes first")
    training = Training(
        ddp=ddp,
        optimizers=tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,),
        parameters=_torch.reduced_or_trainable_parameters(ddp),
    )
    remedy = "build model, optimizer and algorithm alike on all ranks"

    def check_and_describe() -> list[Fact]:
        _check(training, algorithm)
        return _facts_of(training, algorithm)

    require_equal(ddp, check_and_describe, AttachError, remedy)
    # First what may be refused, so that then nothing has changed.
    send_states(training)
    with communicating("making weights equal on all ranks"):
        _send_weights(training)
    return _make_handle(training, algorithm)


def _make_handle(training: Training, algorithm: Algorithm[HandleT]) -> HandleT:
    """A handle that has taken over on all ranks, or an error on all. Collective."""
    with communicating("making the algorithm's process groups"):
        ranks_per_node = algorithm.ranks_per_node(training.group.size())
        groups = Groups(training.group, training.device, ranks_per_node)
        if algorithm.agrees_on_cpu:
            groups.make_agreement()
    training = dataclasses.replace(training, groups=groups)
    handles: list[HandleT] = []  # one, once this rank has made it

    def make_and_take_over() -> list[Fact]:
        # Neither of the two makes a collective call, so that each may fail on one rank without
        # others waiting for it.
        handle = algorithm.handle_type(training, algorithm)
        handles.append(handle)
        handle.take_over()
        return []  # nothing is compared, so that no remedy is shown: it may only raise

    try:
        require_equal(training.ddp, make_and_take_over, AttachError, remedy="")
    except BaseException as error:
        for handle in handles:
            handle.abandon()  # undoes `take_over`, and raises nothing
        # Unless all ranks know of the failure, others may be waiting on a group, which so has to
        # stay, as in `detach`. After a PeerError, or KeyboardInterrupt, they do not know.
        if isinstance(error, Exception) and not isinstance(error, PeerError):
            groups.end()
        raise
    return handles[0]


# ---- Whether it can be attached here -------------------------------------------------------------


def _check(training: Training, algorithm: Any) -> None:
    """Raise why `algorithm` cannot be attached to `training`, as far as this rank knows."""
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"the algorithm is {quote(algorithm)}; give one of ddpopt.algorithms, such as "
            "Decentralized()"
        )
    _check_is_free(training.ddp)
    mode = find_mode(training.ddp, MODES_WITHOUT_ALGORITHM)
    if mode is not None:
        raise OptionError(f"no algorithm can be attached to this DDP module: {mode.value}")
    _check_is_alone(training)
    _check_optimizers(training.optimizers)
    for tensor, parameter in training.parameters.items():
        if parameter.is_sparse:
            raise NotImplementedError(
                f"{parameter.name} has sparse gradients, which algorithms do not take; make its "
                "embedding with sparse=False"
            )
        if not tensor.dtype.is_floating_point:
            raise TypeError(
                f"{parameter.name} is of {tensor.dtype}, which cannot be averaged; freeze it "
                "before DDP is made, or use a real floating point type"
            )
    _check_nodes(training, algorithm)
    algorithm.check(training)


def _check_nodes(training: Training, algorithm: Algorithm[Any]) -> None:
    """Raise OptionError if ranks of several nodes would count as one node.

    LOCAL_WORLD_SIZE counts all ranks of a node that were started, and DDP's group may have only
    some of them.
    """
    ranks_per_node = algorithm.ranks_per_node(training.group.size())
    is_given = getattr(algorithm, "local_world_size", None) is not None
    if ranks_per_node == 1 or is_given:
        return
    ranks = dist.get_process_group_ranks(training.group)
    for first in range(0, len(ranks), ranks_per_node):
        node = ranks[first : first + ranks_per_node]
        if len({rank // ranks_per_node for rank in node}) > 1:
            raise OptionError(
                f"{name_ranks(node)} of DDP's process group would count as one node, since "
                f"LOCAL_WORLD_SIZE is {ranks_per_node}, and are of several; give local_world_size, "
                "the number of that group's ranks on each node, or hierarchical=False"
            )


def _check_is_free(ddp: DistributedDataParallel) -> None:
    """Raise AttachError if an algorithm or another comm hook reduces the module's buckets."""
    # The comm hook of an algorithm stays after `detach`, since DDP keeps hooks; it is idle then.
    reduction = _torch.bucket_reduction(ddp)
    if reduction is None and _torch.has_comm_hook(ddp):
        raise AttachError(
            "this DDP module has a comm hook, and takes only one; attach the algorithm to a DDP "
            "module without"
        )
    if reduction is not None and not reduction.is_idle:
        raise AttachError("this model has an algorithm already; detach it first")


def _check_is_alone(training: Training) -> None:
    """Raise AttachError if another DDP module shares a parameter with this one."""
    if _find_shared(training) is None:
        return
    # An earlier DDP module around the same model may only wait to be collected.
    gc.collect()
    shared = _find_shared(training)
    if shared is not None:
        parameter_name, module_name = shared
        raise AttachError(
            f"{parameter_name} is also in another DistributedDataParallel({module_name}), which "
            "would reduce its gradients too; delete that one, or freeze what they share before "
            "they are made"
        )


def _find_shared(training: Training) -> tuple[str, str] | None:
    """The name of a parameter that another live DDP module reduces too, and the module's class.

    Names, because users are told to delete the module, and the traceback of an error would keep it
    alive. Modules whose algorithm was detached are ignored: a user who wraps the model anew, to
    resume from a checkpoint, may still hold the old handle, and through it the old wrapper.
    """
    for ddp in _torch.live_ddp_modules():
        if ddp is training.ddp:
            continue
        reduction = _torch.bucket_reduction(ddp)
        if reduction is not None and reduction.is_idle:  # its algorithm was detached
            continue
        for tensor in _torch.reducer_parameters(ddp):
            if tensor in training.parameters:
                return training.parameters[tensor].name, type(ddp.module).__name__
    return None


def _check_optimizers(optimizers: Sequence[Any]) -> None:
    """Raise if the updates that an optimizer makes cannot be observed."""
    if not optimizers:
        raise OptionError("no optimizer is given; give attach all that update the model")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"an optimizer is a {type(optimizer).__name__}, not one of torch.optim; "
                "give attach all that update the model"
            )
        if not _torch.calls_step_hooks(optimizer):
            raise OptionError(
                f"step() of the {type(optimizer).__name__} calls none of the hooks of "
                "torch.optim.Optimizer, so that no update would be noticed; if it wraps an "
                "optimizer, give attach that one, or call Optimizer.__init__ in its constructor"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptionError(
                "LBFGS runs forward and backward several times in one step, and communication "
                "would be out of step; use an optimizer without a closure"
            )


# ---- What has to be equal on all ranks -----------------------------------------------------------


def _facts_of(training: Training, algorithm: Algorithm[Any]) -> list[Fact]:
    """The facts that have to be equal on all ranks, from the most to the least telling."""
    # The environment may say how many ranks a node has, and say it differently.
    ranks_per_node = algorithm.ranks_per_node(training.group.size())
    facts = [
        Fact("the algorithm", text_of(algorithm)),
        Fact("ranks on each node", str(ranks_per_node)),
    ]
    index_of: dict[torch.Tensor, int] = {}
    for index, (tensor, parameter) in enumerate(training.parameters.items()):
        index_of[tensor] = index
        kind = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device.type}"
        facts.append(Fact(f"parameter {parameter.name}", kind))
    for number, optimizer in enumerate(training.optimizers):
        facts.append(Fact(f"optimizer {number}", type(optimizer).__name__))
        for group_index, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number}, group {group_index}"
            members = [index_of.get(tensor) for tensor in group["params"]]
            facts.append(Fact(f"{where}, parameters", str(members)))
            settings = sorted(group.keys() - {"params"})
            facts += [Fact(f"{where}, {name}", text_of(group[name])) for name in settings]
    return facts


@torch.no_grad()
def _send_weights(training: Training) -> None:
    """Overwrite weights with rank 0's. Collective."""
    for tensor in training.parameters:
        sent = tensor.detach().to(training.device).contiguous()
        dist.broadcast(sent, group=training.group, group_src=0)
        tensor.copy_(sent)
