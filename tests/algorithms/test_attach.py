"""`attach`: what it refuses on all ranks, what a failure leaves, and that ranks start equal."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import time
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
from ddpopt.errors import AttachError
from ddpopt.inspection.metrics import source_of
from tests.support.algorithms import FLAT, attached_mlp, flat_weights
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import Ranks, error_of


class _OddError(Exception):
    """An error that can neither be pickled nor made from a text."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(f"odd {second}")
        self.lock = threading.Lock()


class _FailingAtFirst(BackgroundHandle):
    """Fails before its base class has made anything, or after that, and again in `close`."""

    def __init__(self, training: Any, algorithm: Any) -> None:
        if algorithm.when == "before" and dist.get_rank() == 1:
            raise _OddError(1, "at first")
        super().__init__(training, algorithm)
        if algorithm.when == "after" and dist.get_rank() == 1:
            raise _OddError(1, "at last")
        self.is_made = True

    def close(self) -> None:
        assert self.is_made
        super().close()


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
    (f"{_HANDLE}.metrics.set_source", FLAT),
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
        "source": source_of(ddp),
        "comm hook": (_torch.has_comm_hook(ddp), _torch.hook_states(ddp)),
    }


def _fail_to_attach(rank: int, where: str, algorithm: Any) -> str:
    """Rank 1 fails; then both train as with DDP alone, attach again, and train."""
    # The hooks of handles that other tests have dropped go with the next one that is detached.
    gc.collect()
    attached_mlp()[2].detach()
    torch.manual_seed(0)
    ddp, twin = (DistributedDataParallel(MLP(2)) for _ in range(2))
    twin.load_state_dict(ddp.state_dict())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = _traces(ddp, optimizer)
    with contextlib.ExitStack() as stack:
        if where and rank == 1:
            stack.enter_context(mock.patch(where, side_effect=ArithmeticError("no luck")))
        error = error_of(lambda: attach(ddp, optimizer, algorithm))
    after = _traces(ddp, optimizer)
    assert after == before, (before, after)
    x = batches(rank, [(4, WIDTH)])[0]
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
    return error


@pytest.mark.quick("ddpopt.algorithms.handle.FlatWeights-Decentralized")
@pytest.mark.parametrize(
    ("where", "algorithm"), FAILURES, ids=lambda v: v if isinstance(v, str) else v.name
)
def test_an_attach_that_fails_on_one_rank_leaves_nothing_on_any(
    ranks: Ranks, where: str, algorithm: Any
) -> None:
    """The error is raised on all ranks, wherever it comes from, and names the rank that failed."""
    for error in ranks.run(_fail_to_attach, where, algorithm):
        why = "ArithmeticError: no luck" if where else "_OddError: odd "
        assert error.startswith(f"AttachError: on rank 1: {why}")


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


def _attach_on_nodes_of(rank: int) -> str:
    ddp = DistributedDataParallel(MLP(1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(1 + rank)}):
        return error_of(lambda: attach(ddp, optimizer, ByteGrad()))


def test_ranks_with_unequal_local_world_sizes_are_refused(ranks: Ranks) -> None:
    for error in ranks.run(_attach_on_nodes_of):
        assert "ranks on each node is 2 instead of 1" in error


def _attach_to_a_part(rank: int) -> list[str]:
    """DDP has a rank of each node, of two: 0 and 2, or 1 and 3."""
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    group = groups[rank % 2]
    ddp = DistributedDataParallel(MLP(1), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        error = error_of(lambda: attach(ddp, optimizer, ByteGrad()))
        handle = attach(ddp, optimizer, ByteGrad(local_world_size=1))  # as the error advises
    places = str(handle.groups.place)
    handle.detach()
    return [error, places]


def test_ranks_of_several_nodes_are_no_node(four_ranks: Ranks) -> None:
    """LOCAL_WORLD_SIZE is not of the group's ranks."""
    for rank, (error, place) in enumerate(four_ranks.run(_attach_to_a_part)):
        assert f"ranks {rank % 2}, {rank % 2 + 2} of DDP's process group would count" in error
        assert "give local_world_size" in error
        assert place == f"({rank // 2}, 2)"


class _Config:
    """It has no text of its own, so that `str` shows its address."""

    scale = 0.5

    def adjust(self) -> None:
        pass


def _attach_with_settings(rank: int) -> dict[str, str]:
    """Equal settings without an equal `str`; at last one that differs."""
    settings: dict[str, Any] = {
        "function": _attach_on_nodes_of,
        "lambda": lambda lr: lr,
        "object": _Config(),
        "method": _Config().adjust,
        "partial": functools.partial(_share, 1),
        "set": {"decay", "embedding", "norm", "bias"},
        "differs": [_share, _refuse][rank],
    }
    return {name: _attach_with_setting(value) for name, value in settings.items()}


def _attach_with_setting(value: Any) -> str:
    ddp = DistributedDataParallel(MLP(1))
    groups = [{"params": list(ddp.parameters()), "mine": value}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return error_of(lambda: attach(ddp, optimizer, FLAT).detach())


def test_settings_are_compared_by_what_they_are(ranks: Ranks) -> None:
    """Not by a text, which has addresses and the order of hashes, and refused equal ranks."""
    for errors in ranks.run(_attach_with_settings):
        differs = errors.pop("differs")
        assert set(errors.values()) == {"nothing"}
        assert "group 0, mine is tests.algorithms.test_attach._refuse instead of" in differs


# ---- a parameter in two DDP modules --------------------------------------------------------------


def _share(rank: int) -> list[str]:
    """Attach where another module has a layer of the model, on rank 1 only or on both."""
    x = torch.ones(2, WIDTH)
    model = MLP(2)
    others: list[Any] = [DistributedDataParallel(nn.Sequential(MLP(1), model.layers[1]))]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    errors = [error_of(lambda: attach(ddp, optimizer, FLAT))]
    others[0].circle = others  # which the garbage collector has to find
    if rank == 0:
        others = []
    errors.append(error_of(lambda: attach(ddp, optimizer, FLAT)))
    others = []
    frozen = MLP(1).requires_grad_(False)
    other = DistributedDataParallel(nn.Sequential(frozen, MLP(1)))
    ddp = DistributedDataParallel(nn.Sequential(frozen, model))  # the first one is not needed
    handle = attach(ddp, optimizer, FLAT)
    ddp(x).sum().backward()
    other(x).sum().backward()
    optimizer.step()
    handle.detach()
    return errors


def test_a_parameter_in_two_ddp_modules_is_refused(ranks: Ranks) -> None:
    """All ranks refuse it; a frozen one is taken, and one whose other module is garbage."""
    for first, second in ranks.run(_share):
        assert first.startswith("AttachError: on rank 0: layers.1.weight is also in another Distr")
        assert second.startswith("AttachError: on rank 1: layers.1.weight is also in another Distr")
        assert "DistributedDataParallel(Sequential)" in second


def _refuse(rank: int) -> list[str]:
    """Each of these is refused on both ranks, though it may concern only one of them."""
    ddp = DistributedDataParallel(MLP(2))
    hooked = DistributedDataParallel(MLP(2))
    hooked.register_comm_hook(None, allreduce_hook)
    sparse = DistributedDataParallel(nn.Embedding(8, 4, sparse=True))
    imaginary = DistributedDataParallel(Imaginary())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with_other_lr = [optimizer, torch.optim.SGD(ddp.parameters(), lr=0.2)][rank]
    lbfgs = torch.optim.LBFGS(ddp.parameters())
    small: Any = ByteGrad(local_world_size=[2, 1][rank])
    environment = os.environ.pop("LOCAL_WORLD_SIZE", None)
    try:
        errors = [
            error_of(lambda: attach(ddp, [optimizer, lbfgs][rank], FLAT)),
            error_of(lambda: attach(ddp, optimizer, Decentralized)),  # type: ignore[arg-type]
            error_of(lambda: attach(ddp, [optimizer, "SGD"][rank : rank + 1], FLAT)),  # type: ignore[arg-type]
            error_of(lambda: attach(ddp, with_other_lr, FLAT)),
            error_of(
                lambda: attach(
                    ddp,
                    optimizer,
                    Decentralized(hierarchical=False, communication_interval=rank + 1),
                )
            ),
            error_of(lambda: attach(ddp, optimizer, small)),
            error_of(lambda: attach(ddp, optimizer, Decentralized())),
            error_of(lambda: attach(ddp, optimizer, Decentralized(local_world_size=3))),
            error_of(
                lambda: attach(
                    ddp, optimizer, Decentralized(peer_selection="shift_one", local_world_size=2)
                )
            ),
            error_of(lambda: attach(hooked, optimizer, FLAT)),
            error_of(lambda: attach(sparse, optimizer, FLAT)),
            error_of(lambda: attach(imaginary, optimizer, FLAT)),
        ]
        handle = attach(ddp, optimizer, FLAT)
        errors.append(error_of(lambda: attach(ddp, optimizer, FLAT)))
        handle.detach()
        errors.append(error_of(handle.average))
        errors.append(error_of(lambda: attach(MLP(2), optimizer, FLAT)))
        return errors
    finally:
        if environment is not None:
            os.environ["LOCAL_WORLD_SIZE"] = environment


class Imaginary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


REFUSALS = [
    ("OptionError", "on rank 1: LBFGS"),
    ("TypeError", "such as Decentralized()"),
    ("TypeError", "on rank 1: an optimizer is a str"),
    ("AttachError", "optimizer 0, group 0, lr is 0.2 instead of 0.1"),
    ("AttachError", "communication_interval=2"),
    ("AttachError", "local_world_size=1"),
    ("OptionError", "LOCAL_WORLD_SIZE is not set"),
    ("OptionError", "2 ranks cannot be divided into nodes of 3"),
    ("OptionError", "there are 1 nodes of 2 ranks (hierarchical=True; True is the default)"),
    ("AttachError", "has a comm hook"),
    ("NotImplementedError", "weight has sparse gradients"),
    ("TypeError", "torch.complex64"),
    ("AttachError", "has an algorithm already"),
    ("AttachError", "was detached"),
    ("TypeError", "this is a MLP"),
]


def test_bad_input_is_refused_on_all_ranks_before_anything_hangs(ranks: Ranks) -> None:
    for errors in ranks.run(_refuse):
        for (kind, text), message in zip(REFUSALS, errors, strict=True):
            assert message.startswith(f"{kind}: "), message
            assert text in message


def test_without_a_process_group_attach_refuses(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(1))
    ddp.process_group = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(AttachError, match="init_process_group"):
        attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), FLAT)


def _start_apart(rank: int) -> bool:
    """Change weights and momentum on rank 1, attach, and return whether they are rank 0's."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2))
    optimizer = torch.optim.Adam(ddp.parameters())
    ddp(torch.full((2, WIDTH), 1.0)).sum().backward()
    optimizer.step()
    expected = flat_weights(ddp), [s["exp_avg"].clone() for s in optimizer.state.values()]
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.add_(rank)
            optimizer.state[parameter]["exp_avg"].add_(rank)
    attach(ddp, optimizer, FLAT).detach()
    momenta = [s["exp_avg"] for s in optimizer.state.values()]
    return torch.equal(flat_weights(ddp), expected[0]) and all(
        map(torch.equal, momenta, expected[1])
    )


def test_ranks_start_with_rank_0s_weights_and_optimizer(ranks: Ranks) -> None:
    assert ranks.run(_start_apart) == [True, True]
