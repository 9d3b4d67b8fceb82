"""QAdam: Adam in the warm-up, momenta averaged in 8 bits after it, in one process and on ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import QAdam, QAdamOptimizer, attach
from ddpopt.errors import AttachError, NonFiniteError, OptionError
from tests.algorithms import step_machine
from tests.algorithms.simulators import BesideSimulator, ReferenceQAdam, flat_gradients
from tests.support.algorithms import ALGORITHMS, Trial, X, flat_weights, inputs_of
from tests.support.models import MLP, WIDTH
from tests.support.on_ranks import gather, on_ranks
from tests.support.ranks import Ranks

LR = 0.01
FLAT = ALGORITHMS["QAdam"]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups that differ in everything that may differ."""
    first, *others = model.parameters()
    return [
        {"params": [first], "betas": (0.8, 0.9), "weight_decay": 0.1},
        {"params": others, "lr": 2 * LR, "eps": 1e-6},
    ]


def _update(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    """Make a step, and return the weights after it."""
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    return flat_weights(model)


# ---- the optimizer alone ----------------------------------------------------------------------


def test_the_warmup_is_bitwise_torch_adam() -> None:
    torch.manual_seed(0)
    model = MLP(2)
    twin = copy.deepcopy(model)
    qadam = QAdamOptimizer(_groups(model), lr=LR, warmup_steps=6)
    adam = torch.optim.Adam(_groups(twin), lr=LR)
    for step, x in enumerate(inputs_of(0, 7)):
        is_equal = torch.equal(_update(model, qadam, x), _update(twin, adam, x))
        assert is_equal == (step < 6)


def test_after_the_warmup_the_variance_stays() -> None:
    """Groups keep to their settings; weight decay goes on, the variance's correction does not."""
    torch.manual_seed(0)
    model = MLP(2).double()  # differences of large gradients are divided by small variances
    twin = copy.deepcopy(model)
    optimizer = QAdamOptimizer(_groups(model), lr=LR, warmup_steps=3)
    reference = ReferenceQAdam(_groups(twin), lr=LR, warmup_steps=3)
    for x in inputs_of(0, 8):
        found, expected = (
            _update(model, optimizer, x.double()),
            _update(twin, reference, x.double()),
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_weight_without_gradients_in_the_warmup_moves_no_further_than_in_adam() -> None:
    """It has no variance: its first momentum would be divided by eps."""
    for kind, options in ((QAdamOptimizer, {"warmup_steps": 3}), (torch.optim.Adam, {})):
        weight = nn.Parameter(torch.zeros(2))
        optimizer: Any = kind([weight], lr=LR, **options)
        for step in range(4):
            weight.grad = torch.tensor([1.0, float(step == 3)])
            before = weight.detach().clone()
            optimizer.step()
        assert 0 < (weight - before).detach().abs()[1] <= LR * 3.17


def test_state_and_copies_go_on_bitwise() -> None:
    """Here they are from `state_dict` and from `copy.deepcopy`; the state is that of Adam."""
    torch.manual_seed(0)
    model = MLP(2)
    optimizer = QAdamOptimizer(model.parameters(), lr=LR, warmup_steps=2)
    inputs = inputs_of(0, 6)
    for x in inputs[:3]:
        _update(model, optimizer, x)
    twin, optimizer_of_twin = copy.deepcopy((model, optimizer))
    third = copy.deepcopy(model)
    loaded = QAdamOptimizer(third.parameters(), warmup_steps=9)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x in inputs[3:]:
        expected = _update(model, optimizer, x)
        assert torch.equal(_update(twin, optimizer_of_twin, x), expected)
        assert torch.equal(_update(third, loaded, x), expected)
    assert set(optimizer.state[next(model.parameters())]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"warmup_steps": 0}, OptionError, "warmup_steps is 0"),
        ({"warmup_steps": 1.5}, TypeError, "warmup_steps is 1.5"),
        ({"lr": -1.0}, OptionError, "lr is -1.0"),
        ({"lr": float("nan")}, OptionError, "lr is nan"),
        ({"eps": -1e-8}, OptionError, "eps is -1e-08"),
        ({"weight_decay": -0.1}, OptionError, "weight_decay is -0.1"),
        ({"betas": (0.9, 1.0)}, OptionError, r"\(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, OptionError, r"\(-0.1, 0.9\)"),
        ({"betas": (0.9,)}, OptionError, r"\(0.9,\)"),
    ],
)
def test_bad_values_of_the_optimizer_are_refused(
    options: dict[str, Any], error: type[Exception], names: str
) -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(error, match=names):
        QAdamOptimizer(parameters, **options)
    with pytest.raises(error, match=names):
        QAdamOptimizer([{"params": parameters, **options}])
    optimizer = QAdamOptimizer([nn.Parameter(torch.zeros(2))])
    with pytest.raises(error, match=names):
        optimizer.add_param_group({"params": parameters, **options})


def test_a_step_through_grad_scaler_is_refused() -> None:
    model = MLP(1)
    optimizer = QAdamOptimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, WIDTH)).sum()).backward()
    with pytest.raises(OptionError, match="GradScaler"):
        scaler.step(optimizer)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match="sparse=False"):
        QAdamOptimizer(model.parameters()).step()


# ---- on ranks ---------------------------------------------------------------------------------


class Distance(nn.Module):
    """One parameter, and so one bucket; the loss is its distance to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 101, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight - x


@on_ranks()
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(2, {}), (3, {}), (4, {}), (4, {"hierarchical": True, "local_world_size": 2})],
)
def test_momenta_are_averaged_as_the_simulator_does(
    num_ranks: int, options: dict[str, Any]
) -> None:
    """In the warm-up gradients are averaged, exactly. Ranks are bitwise equal."""
    settings: Any = {"lr": LR, "warmup_steps": 4, "weight_decay": 0.01}
    beside = BesideSimulator(
        QAdam(**{"hierarchical": False, **options}),
        Distance,
        lambda parameters: QAdamOptimizer(parameters, **settings),
        lambda parameters: ReferenceQAdam(parameters, **settings),
        shape=(101,),
    )
    for _ in range(10):
        beside.step()
        first, *others = gather(beside.model.weight)
        assert all(torch.equal(first, other) for other in others)
    beside.handle.detach(average=False)


@pytest.mark.quick("4")
@pytest.mark.parametrize("num_scripts", [4, 12])
def test_whatever_a_loop_does_qadam_trains_as_its_simulator(ranks: Ranks, num_scripts: int) -> None:
    """Micro-batches are accumulated, gradients in a pause are gradients; see `step_machine`."""
    step_machine.check(ranks, FLAT, num_scripts)


def test_micro_batches_may_come_after_an_evaluation_without_no_grad(one_rank: None) -> None:
    """It makes DDP reduce in the first of them already, whose gradient is no momentum yet."""
    trial = Trial(FLAT, make_optimizers=lambda m: QAdamOptimizer(m.parameters(), warmup_steps=1))
    trial.train([X, X])
    momentum = [state["exp_avg"].clone() for state in trial.optimizer.state.values()]
    trial.optimizer.zero_grad()
    trial.ddp(X)
    with trial.ddp.no_sync():
        trial.ddp(X).sum().backward()
    trial.ddp(X).sum().backward()
    found = flat_gradients(trial.model)
    gradients = torch.autograd.grad(2 * trial.model(X).sum(), list(trial.model.parameters()))
    expected = [0.9 * m + 0.1 * g for m, g in zip(momentum, gradients, strict=True)]
    torch.testing.assert_close(found, torch.cat([value.flatten() for value in expected]))
    trial.handle.detach()


def test_other_optimizers_and_unused_parameters_are_refused(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(2))
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        with pytest.raises(OptionError, match=f"{kind.__name__};.*QAdamOptimizer"):
            attach(ddp, kind(ddp.parameters()), FLAT)
    with pytest.raises(OptionError, match="find_unused_parameters=True"):
        Trial(FLAT, find_unused_parameters=True)


@on_ranks(4)
def test_training_goes_on_after_a_step_that_failed(rank: int) -> None:
    """With NaN on one rank after the warm-up, and with a second backward without zero_grad."""
    trial = Trial(
        QAdam(local_world_size=2),
        make_optimizers=lambda m: QAdamOptimizer(m.parameters(), lr=LR, warmup_steps=4),
    )
    for step, x in enumerate(inputs_of(rank, 10)):
        if step == 6:
            with pytest.raises(NonFiniteError):
                trial.backward(x.fill_(torch.nan) if rank == 3 else x)
        elif step == 8:
            trial.backward(x)
            with pytest.raises(OptionError, match="zero_grad"):
                trial.ddp(x).square().mean().backward()
        else:
            trial.step(x)
    first, *others = gather(trial.weights)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)
    trial.handle.detach(average=False)


@on_ranks(2)
@pytest.mark.parametrize("left_out", [2, 5], ids=["in the warm-up", "after it"])
def test_an_update_that_one_rank_leaves_out_alone_is_an_error_on_all(
    rank: int, left_out: int
) -> None:
    """As with a guard against NaN. The warm-up, of 3 steps, would end in different ones."""
    trial = Trial(
        FLAT,
        make_optimizers=lambda m: QAdamOptimizer(m.parameters(), lr=LR, warmup_steps=3),
        timeout_s=20,
    )
    inputs = inputs_of(rank, 8)
    for x in inputs[: left_out - 1]:
        trial.step(x)
    trial.backward(inputs[-1])
    if rank == 0:
        trial.optimizer.step()
    for _ in range(2):
        with pytest.raises(AttachError, match=r"before step \d .* on rank 1 .*attach again"):
            trial.backward(inputs[-1])
    # As the error advises.
    trial.handle.detach(average=False)
    trial.handle = attach(trial.ddp, trial.optimizer, FLAT)
    trial.train(inputs[:4])
    first, other = gather(trial.weights)
    assert torch.equal(first, other)
    trial.handle.detach(average=False)


@on_ranks(2)
def test_ranks_may_update_parameters_of_their_own_in_steps_of_their_own(rank: int) -> None:
    """They are no part of the model, and of no warm-up that ranks have to end together."""
    own = nn.Parameter(torch.ones(2))
    trial = Trial(
        FLAT,
        make_optimizers=lambda m: QAdamOptimizer([*m.parameters(), own], lr=LR, warmup_steps=2),
    )
    for x in inputs_of(rank, 4):
        trial.backward(x)
        own.grad = torch.ones(2) if rank == 0 else None
        trial.optimizer.step()
    first, other = gather(trial.weights)
    assert torch.equal(first, other)
    trial.handle.detach()
    assert bool((own == 1).all()) == (rank == 1)
