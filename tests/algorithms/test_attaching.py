"""`attach`: what it refuses, on all ranks, and that ranks start equal."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import ByteGrad, Decentralized, attach
from ddpopt.errors import AttachError, OptionError
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import Ranks, error_of

FLAT = Decentralized(hierarchical=False)


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def _setting(algorithm: Any = FLAT, **ddp_options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2), **ddp_options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return ddp, optimizer, attach(ddp, optimizer, algorithm)


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"peer_selection": "ring"}, OptionError, "'ring'"),
        ({"communication_interval": 0}, OptionError, "0; the least is 1"),
        ({"communication_interval": 1.0}, TypeError, "float"),
        ({"communication_interval": True}, TypeError, "bool"),
        ({"hierarchical": 1}, TypeError, "hierarchical is 1"),
        ({"local_world_size": 0}, OptionError, "local_world_size is 0"),
        ({"local_world_size": -1}, OptionError, "local_world_size is -1"),
    ],
)
def test_bad_values_are_refused_when_the_algorithm_is_made(
    options: dict[str, Any], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        Decentralized(**options)


def _refuse(rank: int) -> list[str]:
    """Each of these is refused on both ranks, though it may concern only one of them."""
    ddp = DistributedDataParallel(MLP(2))
    hooked = DistributedDataParallel(MLP(2))
    hooked.register_comm_hook(None, allreduce_hook)
    sparse = DistributedDataParallel(nn.Embedding(8, 4, sparse=True))
    imaginary = DistributedDataParallel(Imaginary())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    mine = [optimizer, torch.optim.SGD(ddp.parameters(), lr=0.2)][rank]
    lbfgs = torch.optim.LBFGS(ddp.parameters())
    small: Any = ByteGrad(local_world_size=[2, 1][rank])
    environment = os.environ.pop("LOCAL_WORLD_SIZE", None)
    try:
        said = [
            error_of(lambda: attach(ddp, [optimizer, lbfgs][rank], FLAT)),
            error_of(lambda: attach(ddp, optimizer, Decentralized)),  # type: ignore[arg-type]
            error_of(lambda: attach(ddp, [optimizer, "SGD"][rank : rank + 1], FLAT)),  # type: ignore[arg-type]
            error_of(lambda: attach(ddp, mine, FLAT)),
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
        said.append(error_of(lambda: attach(ddp, optimizer, FLAT)))
        handle.detach()
        said.append(error_of(handle.average))
        said.append(error_of(lambda: attach(MLP(2), optimizer, FLAT)))
        return said
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
    for said in ranks.run(_refuse):
        for (kind, text), message in zip(REFUSALS, said, strict=True):
            assert message.startswith(f"{kind}: "), message
            assert text in message


def test_without_a_process_group_attach_refuses(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(1))
    ddp.process_group = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(AttachError, match="init_process_group"):
        attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), FLAT)


def _start_apart(rank: int) -> bool:
    """Weights and momentum that were changed on one rank are rank 0's after `attach`."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2))
    optimizer = torch.optim.Adam(ddp.parameters())
    ddp(torch.full((2, WIDTH), 1.0)).sum().backward()
    optimizer.step()
    expected = _flat(ddp), [s["exp_avg"].clone() for s in optimizer.state.values()]
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.add_(rank)
            optimizer.state[parameter]["exp_avg"].add_(rank)
    attach(ddp, optimizer, FLAT).detach()
    momenta = [s["exp_avg"] for s in optimizer.state.values()]
    return torch.equal(_flat(ddp), expected[0]) and all(map(torch.equal, momenta, expected[1]))


def test_ranks_start_with_rank_0s_weights_and_optimizer(ranks: Ranks) -> None:
    assert ranks.run(_start_apart) == [True, True]


def _unfreeze(rank: int) -> torch.Tensor:
    """A layer that DDP reduces is frozen at `attach` only."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.module.layers[0].requires_grad_(False)
    handle = attach(ddp, optimizer, FLAT)
    ddp.module.layers[0].requires_grad_(True)
    for x in batches(rank, [(4, WIDTH)] * 2):
        optimizer.zero_grad()
        ddp(x).square().sum().backward()
        optimizer.step()
    handle.detach()
    return _flat(ddp)


def test_a_layer_that_is_unfrozen_later_is_averaged_too(ranks: Ranks) -> None:
    assert torch.equal(*ranks.run(_unfreeze))


def _unfreeze_unknown(rank: int) -> list[str]:
    """A layer was frozen when DDP was made."""
    module = MLP(3)
    for layer in (0, 1):
        module.layers[layer].weight.requires_grad_(False)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, optimizer, FLAT)
    said: list[str] = []
    with mock.patch("ddpopt._logs.warning", lambda text, *given: said.append(text % given)):
        for step in range(3):
            module.layers[0].weight.requires_grad_(step > 0)
            ddp(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
    handle.detach()
    return said


def test_one_that_ddp_does_not_reduce_is_named_once(ranks: Ranks) -> None:
    for said in ranks.run(_unfreeze_unknown):
        (text,) = said
        assert text.startswith("layers.0.weight was unfrozen, and each rank trains its own")
        assert "make DDP anew" in text


def _unequal_groups(rank: int) -> float:
    """Only rank 0 has made further groups, by which torch would name the algorithm's."""
    mine = [dist.new_group([0], use_local_synchronization=True) for _ in range(3 * (1 - rank))]
    ddp, optimizer, handle = _setting(Decentralized(local_world_size=2))
    ddp(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    handle.detach()
    for group in mine:
        dist.destroy_process_group(group)
    return _flat(ddp).sum().item()


def test_ranks_may_be_in_different_numbers_of_groups(ranks: Ranks) -> None:
    first, second = ranks.run(_unequal_groups)
    assert first == second


@pytest.mark.parametrize(("given", "variable", "size"), [(2, None, 2), (None, "4", 4), (2, "4", 2)])
def test_a_nodes_size_is_given_or_torchruns(
    monkeypatch: pytest.MonkeyPatch, given: int | None, variable: str | None, size: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    assert ByteGrad(local_world_size=given).ranks_per_node(8) == size
    assert ByteGrad(hierarchical=False, local_world_size=given).ranks_per_node(8) == 1


def test_a_size_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(OptionError, match="LOCAL_WORLD_SIZE is 'two'; it must be a whole number"):
        ByteGrad().ranks_per_node(8)
