"""The numbers of DDP modules, by the order in which they first reduce gradients."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.steps.numbers import number_of

X = torch.ones(2, 4)


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(4, 4))


def _run(ddp: DistributedDataParallel) -> None:
    ddp(X).sum().backward()


def test_modules_are_numbered_by_their_first_backward_and_not_by_forwards(one_rank: None) -> None:
    """The numbers of one process group follow each other."""
    first, second, last = _ddp(), _ddp(), _ddp()
    outputs = [last(X), first(X)]
    assert number_of(first) == number_of(last) == 0
    outputs[1].sum().backward()
    _run(second)
    outputs[0].sum().backward()
    assert number_of(first) > 0
    assert number_of(second) == number_of(first) + 1
    assert number_of(last) == number_of(first) + 2


def test_a_number_stays(one_rank: None) -> None:
    ddp = _ddp()
    _run(ddp)
    number = number_of(ddp)
    _run(_ddp())
    _run(ddp)
    assert number_of(ddp) == number > 0


def test_a_backward_that_reduces_nothing_gives_no_number(one_rank: None) -> None:
    """Backwards under `no_sync`, and of the module in DDP, reduce nothing."""
    ddp = _ddp()
    with ddp.no_sync():
        _run(ddp)
    with torch.no_grad():
        ddp(X)
    ddp.module(X).sum().backward()
    assert number_of(ddp) == 0
    ddp.zero_grad()
    _run(ddp)
    assert number_of(ddp) > 0


def test_a_forward_whose_parameters_are_frozen_is_not_the_first(one_rank: None) -> None:
    """A critic's is, where its generator is trained first."""
    critic, generator = _ddp(), _ddp()
    critic.requires_grad_(False)
    critic(generator(X)).sum().backward()
    assert number_of(critic) == 0 < number_of(generator)
    critic.requires_grad_(True)
    _run(critic)
    assert number_of(critic) == number_of(generator) + 1


def test_a_copy_gets_a_number_of_its_own(one_rank: None) -> None:
    ddp = _ddp()
    _run(ddp)
    copied = copy.deepcopy(ddp)
    assert number_of(copied) == 0
    _run(copied)
    assert number_of(copied) == number_of(ddp) + 1
