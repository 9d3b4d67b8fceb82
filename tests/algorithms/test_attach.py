"""`attach`: what it refuses on all ranks, what a failure leaves, and that ranks start equal."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    LowPrecisionDecentralized,
    attach,
)
from ddpopt.algorithms.handle import BackgroundHandle
from ddpopt.errors import AttachError, OptionError
from ddpopt.inspection.metrics import algorithm_metrics_of
from tests.support.algorithms import FLAT, Trial, X, inputs_of
from tests.support.models import MLP, twins
from tests.support.on_ranks import on_ranks
from tests.support.ranks import error_of


class _OddError(Exception):
    """An error that can neither be pickled nor made from a text."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(f"odd {second}")
        self.lock = threading.Lock()


closed: list[bool] = []  # of `_FailingAtFirst`, on this rank


class _FailingAtFirst(BackgroundHandle):
    """Fails before its base class has made anything, or after that."""

    def __init__(self, training: Any, algorithm: Any) -> None:
        if algorithm.when == "before" and dist.get_rank() == 1:
            raise _OddError(1, "at first")
        super().__init__(training, algorithm)
        if algorithm.when == "after" and dist.get_rank() == 1:
            raise _OddError(1, "at last")
        self.is_made = True

    def close(self) -> None:
        closed.append(self.is_made)
        super().close()
        raise ArithmeticError("in close")


@dataclass(frozen=True)
class _FailsAtFirst(Algorithm[_FailingAtFirst]):
    when: str
    handle_type = _FailingAtFirst

    def check(self, training: Any) -> None:
        if self.when == "in check" and dist.get_rank() == 1:
            raise _OddError(1, "in check")


_HANDLE, _UPDATES = "ddpopt.algorithms.handle", "ddpopt.algorithms.updates"
_DDP = "torch.nn.parallel.DistributedDataParallel"
FAILURES: list[tuple[str, Any]] = [
    (f"{_HANDLE}.FlatWeights", FLAT),
    (f"{_HANDLE}.Worker", ByteGrad(local_world_size=2)),
    ("ddpopt.algorithms.comm.start_thread", FLAT),
    (f"{_HANDLE}.metrics.set_algorithm_metrics", FLAT),
    (f"{_UPDATES}.register_optimizer_step_pre_hook", FLAT),
    (f"{_UPDATES}.register_optimizer_step_post_hook", FLAT),
    ("ddpopt.algorithms.async_.FairLock", AsyncModelAverage(sync_interval_ms=1)),
    ("ddpopt.algorithms.comm.FlatWeights.copy", LowPrecisionDecentralized(hierarchical=False)),
    (f"{_DDP}.register_forward_pre_hook", FLAT),
    (f"{_DDP}.register_comm_hook", FLAT),
    ("torch.optim.Optimizer.register_step_pre_hook", FLAT),
    ("torch.optim.Optimizer.register_step_post_hook", FLAT),
    ("", _FailsAtFirst("in check")),
    ("", _FailsAtFirst("before")),
    ("", _FailsAtFirst("after")),
]


def _traces(ddp: Any, optimizer: Any) -> dict[str, object]:
    """All that an algorithm could leave behind, besides an idle comm hook."""
    from torch.optim import optimizer as optimizers  # its private names are read here

    gc.collect()
    stop_s = time.monotonic() + 60
    while time.monotonic() < stop_s:  # a thread that was told to end may not have
        threads = [t.name for t in threading.enumerate() if t.name.startswith("ddpopt-")]
        if not threads:
            break
        time.sleep(0.01)
    tables_of_hooks = (
        ddp._forward_pre_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    )
    return {
        "threads": threads,
        "groups": len(dist.distributed_c10d._world.pg_map),
        "hooks": [len(hooks) for hooks in tables_of_hooks],
        "source": algorithm_metrics_of(ddp),
        "comm hook": (_torch.has_comm_hook(ddp), _torch.hook_states(ddp)),
    }


@on_ranks(2)
@pytest.mark.quick("ddpopt.algorithms.handle.FlatWeights-Decentralized")
@pytest.mark.parametrize(
    ("where", "algorithm"), FAILURES, ids=lambda v: v if isinstance(v, str) else v.name
)
def test_an_attach_that_fails_on_one_rank_leaves_nothing_on_any(
    rank: int, where: str, algorithm: Any
) -> None:
    """The error is raised on all ranks, wherever it comes from, and names the rank that failed.

    Then both train as with DDP alone, attach again, and train.
    """
    # The hooks of handles that other tests have dropped go with the next one that is detached.
    gc.collect()
    Trial().handle.detach()
    ddp, twin = twins(MLP(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = _traces(ddp, optimizer)
    closed.clear()
    with contextlib.ExitStack() as stack:
        if where and rank == 1:
            stack.enter_context(mock.patch(where, side_effect=ArithmeticError("no luck")))
        # `pytest.raises` would keep the error's frames, and with them the handle and its thread.
        error = error_of(lambda: attach(ddp, optimizer, algorithm))
    why = "ArithmeticError: no luck" if where else "_OddError: odd "
    assert error.startswith(f"AttachError: on rank 1: {why}")
    assert _traces(ddp, optimizer) == before
    # Only a handle that was made is closed, and what that raises hides nothing.
    assert closed == [True] * (not where and algorithm.when != "in check" and rank == 0)
    (x,) = inputs_of(rank, 1)
    for model in (ddp, twin):
        model(x).square().sum().backward()
    pairs = zip(ddp.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    handle = attach(ddp, optimizer, FLAT)
    for _ in range(2):
        ddp(x).square().mean().backward()
        optimizer.step()
    assert handle.num_communications == 2
    handle.detach()
    assert _traces(ddp, optimizer) == before


def test_the_rank_that_failed_has_the_cause(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(1))
    optimizer = torch.optim.SGD(ddp.parameters())
    failing = mock.patch(f"{_HANDLE}.Worker", side_effect=ArithmeticError)
    with failing, pytest.raises(AttachError, match="on rank 0: ArithmeticError") as raised:
        attach(ddp, optimizer, FLAT)
    assert isinstance(raised.value.__cause__, ArithmeticError)


def test_a_ddp_module_that_was_never_made_is_no_other_one(one_rank: None) -> None:
    """Its constructor raised, and somebody keeps the error with its frames, as a notebook does."""
    with pytest.raises(RuntimeError, match="any parameter that requires a gradient") as raised:
        DistributedDataParallel(MLP(1).requires_grad_(False))
    ddp = DistributedDataParallel(MLP(1))
    attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), FLAT).detach()
    assert raised.tb is not None  # the reference that has kept the module until here


@on_ranks(4)
def test_ranks_of_several_nodes_are_no_node(rank: int) -> None:
    """LOCAL_WORLD_SIZE is not of the group's ranks, which are of two nodes: 0 and 2, or 1 and 3."""
    group = [dist.new_group([first, first + 2]) for first in range(2)][rank % 2]
    ddp = DistributedDataParallel(MLP(1), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        names = f"ranks {rank % 2}, {rank % 2 + 2} .* local_world_size"
        with pytest.raises(OptionError, match=names):
            attach(ddp, optimizer, ByteGrad())
        handle = attach(ddp, optimizer, ByteGrad(local_world_size=1))  # as the error advises
    assert (handle.groups.ring_index, handle.groups.ring_size) == (rank // 2, 2)
    handle.detach()


class _Config:
    """It has no text of its own, so that `str` shows its address."""

    def __init__(self, scale: float = 0.5) -> None:
        self.scale = scale

    def adjust(self) -> None:
        pass


SETTINGS: dict[str, Callable[[], Any]] = {
    "function": lambda: _traces,
    "lambda": lambda: lambda lr: lr,
    "object": _Config,
    "method": lambda: _Config().adjust,
    "partial": lambda: functools.partial(_traces, 1),
    "set": lambda: {"decay", "embedding", "norm", "bias"},
}
# Settings that differ between the two ranks, and what of it the error shows.
UNEQUAL_SETTINGS: dict[str, tuple[Callable[[int], Any], str]] = {
    "kind": (lambda rank: [_traces, _Config][rank], r".*_Config instead of .*_traces"),
    "attribute": (lambda rank: _Config(0.5 + rank), r".*scale.*1\.5.* instead of .*scale.*0\.5"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_compared_by_what_they_are(name: str) -> None:
    """Not by a text, which has addresses and the order of hashes, and refused equal ranks."""
    ddp = DistributedDataParallel(MLP(1))
    groups = [{"params": list(ddp.parameters()), "mine": SETTINGS[name]()}]
    attach(ddp, torch.optim.SGD(groups, lr=0.1), FLAT).detach()


@on_ranks(2)
@pytest.mark.parametrize("name", UNEQUAL_SETTINGS)
def test_settings_that_differ_in_kind_or_in_an_attribute_are_refused(rank: int, name: str) -> None:
    ddp = DistributedDataParallel(MLP(1))
    make, shown = UNEQUAL_SETTINGS[name]
    groups = [{"params": list(ddp.parameters()), "mine": make(rank)}]
    with pytest.raises(AttachError, match=f"group 0, mine is {shown}"):
        attach(ddp, torch.optim.SGD(groups, lr=0.1), FLAT)


# ---- a parameter in two DDP modules --------------------------------------------------------------


@on_ranks(2)
def test_a_parameter_in_two_ddp_modules_is_refused(rank: int) -> None:
    """All ranks refuse it, be it on rank 1 alone; a frozen one is taken.

    So is one whose other module is garbage, which the garbage collector has to find.
    """
    model = MLP(2)
    others: list[Any] = [DistributedDataParallel(nn.Sequential(MLP(1), model.layers[1]))]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(AttachError, match=r"on rank 0: layers\.1\.weight"):
        attach(ddp, optimizer, FLAT)
    others[0].circle = others
    if rank == 0:
        others = []
    with pytest.raises(AttachError, match=r"on rank 1: layers\.1\.weight .*\(Sequential\)"):
        attach(ddp, optimizer, FLAT)
    others = []
    frozen = MLP(1).requires_grad_(False)
    other = DistributedDataParallel(nn.Sequential(frozen, MLP(1)))
    ddp = DistributedDataParallel(nn.Sequential(frozen, model))  # the first one is not needed
    handle = attach(ddp, optimizer, FLAT)
    for module in (ddp, other):
        module(X).sum().backward()
    optimizer.step()
    handle.detach()


class Imaginary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


@dataclass(frozen=True)
class Refusal:
    """Arguments of `attach` on a rank that it refuses on all, though one alone may be wrong."""

    error: type[Exception]
    names: str
    algorithm: Callable[[int], Any] = lambda rank: FLAT
    optimizer: Callable[[int, Any], Any] = lambda rank, parameters: _sgd(parameters)
    module: Callable[[], nn.Module] = lambda: DistributedDataParallel(MLP(2))


def _sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def _with_hook() -> nn.Module:
    ddp = DistributedDataParallel(MLP(2))
    ddp.register_comm_hook(None, allreduce_hook)
    return ddp


def _with_algorithm() -> nn.Module:
    ddp = DistributedDataParallel(MLP(2))
    attach(ddp, _sgd(ddp.parameters()), FLAT)
    return ddp


def _delaying() -> nn.Module:
    model = MLP(2)
    first, *_, last = model.named_parameters()
    return DistributedDataParallel(
        model, delay_all_reduce_named_params=[first], param_to_hook_all_reduce=last[1]
    )


class _Wrapper(torch.optim.Optimizer):
    """It wraps another optimizer, and calls no constructor of torch's."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = wrapped.param_groups, wrapped.state


REFUSALS = {
    "LBFGS": Refusal(
        OptionError,
        "rank 1: LBFGS",
        optimizer=lambda rank, ps: torch.optim.LBFGS(ps) if rank == 1 else _sgd(ps),
    ),
    "a class": Refusal(TypeError, "Decentralized", lambda rank: Decentralized),
    "no optimizer": Refusal(
        TypeError,
        "rank 1: .* str",
        optimizer=lambda rank, ps: ["SGD"] if rank == 1 else [_sgd(ps)],
    ),
    "an empty list": Refusal(OptionError, "no optimizer is given", optimizer=lambda rank, ps: []),
    "a wrapper": Refusal(
        OptionError, "_Wrapper calls none", optimizer=lambda rank, ps: _Wrapper(_sgd(ps))
    ),
    "a mode": Refusal(OptionError, "delay_all_reduce_named_params", module=_delaying),
    "a setting": Refusal(
        AttachError,
        "optimizer 0, group 0, lr is 0.2 instead of 0.1",
        optimizer=lambda rank, ps: _sgd(ps, 0.1 + 0.1 * rank),
    ),
    "intervals": Refusal(
        AttachError,
        "communication_interval=2",
        lambda rank: Decentralized(hierarchical=False, communication_interval=rank + 1),
    ),
    "sizes": Refusal(AttachError, "local_world_size=1", lambda r: ByteGrad(local_world_size=2 - r)),
    "no size": Refusal(OptionError, "LOCAL_WORLD_SIZE", lambda rank: Decentralized()),
    "unequal nodes": Refusal(
        OptionError, "2 ranks .* nodes of 3", lambda rank: Decentralized(local_world_size=3)
    ),
    "an odd number of nodes": Refusal(
        OptionError,
        r"1 nodes of 2 ranks \(hierarchical=True",
        lambda rank: Decentralized(peer_selection="shift_one", local_world_size=2),
    ),
    "a comm hook": Refusal(AttachError, "comm hook", module=_with_hook),
    "sparse": Refusal(
        NotImplementedError,
        "weight .* sparse",
        module=lambda: DistributedDataParallel(nn.Embedding(8, 4, sparse=True)),
    ),
    "complex": Refusal(
        TypeError, r"torch\.complex64", module=lambda: DistributedDataParallel(Imaginary())
    ),
    "an algorithm": Refusal(AttachError, "has an algorithm already", module=_with_algorithm),
    "no DDP": Refusal(TypeError, "MLP", module=lambda: MLP(2)),
}


@on_ranks(2)
@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_on_all_ranks_before_anything_hangs(rank: int, name: str) -> None:
    refusal = REFUSALS[name]
    module = refusal.module()
    optimizer = refusal.optimizer(rank, module.parameters())
    with mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        with pytest.raises(refusal.error, match=refusal.names):
            attach(module, optimizer, refusal.algorithm(rank))


@on_ranks(2)
def test_ranks_with_unequal_local_world_sizes_are_refused(rank: int) -> None:
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(1 + rank)}),
        pytest.raises(AttachError, match="ranks on each node is 2 instead of 1"),
    ):
        Trial(ByteGrad())


def test_without_a_process_group_attach_refuses(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(1))
    ddp.process_group = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(AttachError, match="init_process_group"):
        attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), FLAT)


@on_ranks(2)
def test_ranks_start_with_rank_0s_weights_and_optimizer(rank: int) -> None:
    """They differ before; what is expected is of both before that."""
    ddp = DistributedDataParallel(MLP(2))
    optimizer = torch.optim.Adam(ddp.parameters())
    ddp(X).sum().backward()
    optimizer.step()
    expected = copy.deepcopy([ddp.state_dict(), optimizer.state_dict()])
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.add_(rank)
            optimizer.state[parameter]["exp_avg"].add_(rank)
    attach(ddp, optimizer, FLAT).detach()
    found = [ddp.state_dict(), optimizer.state_dict()]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
