"""QAdam: Adam in the warm-up, momenta averaged in 8 bits after it, in one process and on ranks."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import QAdam, QAdamOptimizer, attach
from ddpopt.algorithms.bytegrad import compress, decompress
from ddpopt.errors import NonFiniteError, OptionError
from tests.support.algorithms import flat_weights
from tests.support.groups import first_ranks
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import Ranks, error_of

LR = 0.01
WARMUP = 4


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups that differ in everything that may differ."""
    first, *others = model.parameters()
    return [
        {"params": [first], "betas": (0.8, 0.9), "weight_decay": 0.1},
        {"params": others, "lr": 2 * LR, "eps": 1e-6},
    ]


def _update(model: nn.Module, optimizer: Any, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


# ---- the optimizer alone ----------------------------------------------------------------------


def test_the_warmup_is_bitwise_torch_adam() -> None:
    torch.manual_seed(0)
    model = MLP(2)
    twin = copy.deepcopy(model)
    qadam = QAdamOptimizer(_groups(model), lr=LR, warmup_steps=6)
    adam = torch.optim.Adam(_groups(twin), lr=LR)
    for x in batches(0, [(8, WIDTH)] * 6):
        _update(model, qadam, x)
        _update(twin, adam, x)
        assert torch.equal(flat_weights(model), flat_weights(twin))
    _update(model, qadam, x)
    _update(twin, adam, x)
    assert not torch.equal(flat_weights(model), flat_weights(twin))


def test_after_the_warmup_the_variance_stays() -> None:
    """Groups keep to their settings; weight decay goes on, the variance's correction does not."""
    torch.manual_seed(0)
    model = MLP(2).double()  # differences of large gradients are divided by small variances
    optimizer = QAdamOptimizer(_groups(model), lr=LR, warmup_steps=3)
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    variances = [torch.zeros_like(p) for p in model.parameters()]
    for t, x in enumerate(batches(0, [(8, WIDTH)] * 8), start=1):
        before = [p.detach().clone() for p in model.parameters()]
        _update(model, optimizer, x.double())
        for index, parameter in enumerate(model.parameters()):
            group = optimizer.param_groups[min(index, 1)]
            (b1, b2), decay = group["betas"], group["weight_decay"]
            gradient = parameter.grad + decay * before[index]
            momenta[index] = b1 * momenta[index] + (1 - b1) * gradient
            if t <= 3:
                variances[index] = b2 * variances[index] + (1 - b2) * gradient**2
            scaled = variances[index].sqrt() / (1 - b2 ** min(t, 3)) ** 0.5 + group["eps"]
            bound = max(1, (1 - b1) / (1 - b2) ** 0.5) if t > 3 else torch.inf
            update = (momenta[index] / (1 - b1**t) / scaled).clamp(-bound, bound)
            expected = before[index] - group["lr"] * update
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-9, atol=1e-9)


def test_a_weight_without_gradients_in_the_warmup_moves_no_further_than_in_adam() -> None:
    """It has no variance: its first momentum would be divided by eps."""
    moved = []
    for kind, options in ((QAdamOptimizer, {"warmup_steps": 3}), (torch.optim.Adam, {})):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = kind([weight], lr=LR, **options)
        for step in range(4):
            weight.grad = torch.tensor([1.0, float(step == 3)])
            before = weight.detach().clone()
            optimizer.step()
        moved.append(float((weight - before).detach().abs()[1]))
    assert 0 < moved[0] <= LR * 3.17
    assert 0 < moved[1] <= LR * 3.17


def test_state_and_copies_go_on_bitwise() -> None:
    """Here they are from `state_dict` and from `copy.deepcopy`; the state is that of Adam."""
    torch.manual_seed(0)
    model = MLP(2)
    optimizer = QAdamOptimizer(model.parameters(), lr=LR, warmup_steps=2)
    inputs = batches(0, [(8, WIDTH)] * 6)
    for x in inputs[:3]:
        _update(model, optimizer, x)
    twin, optimizer_of_twin = copy.deepcopy((model, optimizer))
    third = copy.deepcopy(model)
    loaded = QAdamOptimizer(third.parameters(), warmup_steps=9)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x in inputs[3:]:
        _update(model, optimizer, x)
        _update(twin, optimizer_of_twin, x)
        _update(third, loaded, x)
    assert torch.equal(flat_weights(model), flat_weights(twin))
    assert torch.equal(flat_weights(model), flat_weights(third))
    assert set(optimizer.state[next(model.parameters())]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_long_warmup_trains_as_adam() -> None:
    """All of a thousand steps are in the warm-up, as in Bagua's test."""
    losses = []
    for kind, options in ((QAdamOptimizer, {"warmup_steps": 2000}), (torch.optim.Adam, {})):
        torch.manual_seed(0)
        model = MLP(1, width=8)
        optimizer = kind(model.parameters(), lr=LR, weight_decay=0.1, **options)
        losses.append([_update(model, optimizer, x) for x in batches(0, [(4, 8)] * 1000)][-1])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        (
            {"warmup_steps": 0},
            OptionError,
            "warmup_steps is 0; it must be a whole number",
        ),
        ({"warmup_steps": 1.5}, TypeError, "it must be a whole number"),
        ({"lr": -1.0}, OptionError, "lr is -1.0"),
        ({"lr": float("nan")}, OptionError, "lr is nan"),
        ({"eps": -1e-8}, OptionError, "eps is -1e-08"),
        ({"weight_decay": -0.1}, OptionError, "weight_decay is -0.1"),
        ({"betas": (0.9, 1.0)}, OptionError, "betas is"),
        ({"betas": (-0.1, 0.9)}, OptionError, "betas is"),
        ({"betas": (0.9,)}, OptionError, "give two numbers"),
    ],
)
def test_bad_values_of_the_optimizer_are_refused(
    options: dict[str, Any], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        QAdamOptimizer([nn.Parameter(torch.zeros(2))], **options)
    optimizer = QAdamOptimizer([nn.Parameter(torch.zeros(2))])
    with pytest.raises(error, match=names):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], **options})
    with pytest.raises(error, match=names):
        QAdamOptimizer([{"params": [nn.Parameter(torch.zeros(2))], **options}])


def test_a_step_through_grad_scaler_is_refused() -> None:
    model = MLP(1)
    optimizer = QAdamOptimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, WIDTH)).sum()).backward()
    with pytest.raises(OptionError, match="GradScaler"):
        scaler.step(optimizer)


def test_gradients_in_a_pause_are_gradients(one_rank: None) -> None:
    """After the warm-up too; then training goes on."""
    ddp = DistributedDataParallel(MLP(1))
    optimizer = QAdamOptimizer(ddp.parameters(), warmup_steps=1)
    handle = attach(ddp, optimizer, QAdam(hierarchical=False))
    x = torch.ones(2, WIDTH)
    for _ in range(3):
        _update(ddp, optimizer, x)
    optimizer.zero_grad()
    with handle.paused():
        ddp(x).pow(2).mean().backward()
    expected = torch.autograd.grad(ddp.module(x).pow(2).mean(), list(ddp.parameters()))
    for parameter, gradient in zip(ddp.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert handle.num_communications == 3
    _update(ddp, optimizer, x)
    handle.detach()


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match="sparse=False"):
        QAdamOptimizer(model.parameters()).step()


# ---- on ranks ---------------------------------------------------------------------------------


def _setting(
    num_ranks: int,
    options: dict[str, Any],
    model: nn.Module | None = None,
    ddp_options: dict[str, Any] | None = None,
) -> tuple[Any, Any, Any] | None:
    """Return DDP on the first ranks with a bucket for each layer, its optimizer and the handle."""
    group = first_ranks(num_ranks)
    if group is None:
        return None
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        model or MLP(3), process_group=group, bucket_cap_mb=0.02, **ddp_options or {}
    )
    optimizer = QAdamOptimizer(ddp.parameters(), lr=LR, warmup_steps=WARMUP, weight_decay=0.01)
    return ddp, optimizer, attach(ddp, optimizer, QAdam(**{"hierarchical": False, **options}))


class Distance(nn.Module):
    """One parameter, and so one bucket; the loss is its distance to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 101))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight - x


def _descend(rank: int, num_ranks: int, options: dict[str, Any]) -> Any:
    setting = _setting(num_ranks, options, Distance())
    if setting is None:
        return None
    ddp, optimizer, handle = setting
    weights = []
    for x in batches(rank, [(101,)] * 10):
        _update(ddp, optimizer, x)
        weights.append(flat_weights(ddp))
    handle.detach(average=False)
    return weights


def _simulate(num_ranks: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """All ranks in one process: the slow reference. All have equal weights and states."""
    node = options.get("local_world_size", 1)
    p = torch.linspace(-1, 1, 101)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    inputs = [batches(rank, [(101,)] * 10) for rank in range(num_ranks)]
    weights = []
    for t in range(1, 11):
        gradients = [2 * (p - x[t - 1]) / 101 + 0.01 * p for x in inputs]
        if t <= WARMUP:
            g = sum(gradients) / num_ranks
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        else:
            momenta = [0.9 * m + 0.1 * g for g in gradients]
            nodes = [sum(momenta[k : k + node]) / node for k in range(0, num_ranks, node)]
            m = _mean_in_8_bits(nodes)
        denominator = v.sqrt() / (1 - 0.999 ** min(t, WARMUP)) ** 0.5 + 1e-8
        p = p - LR * (m / (1 - 0.9**t) / denominator).clamp(-3.1623, 3.1623)
        weights.append(p)
    return weights


def _mean_in_8_bits(nodes: list[torch.Tensor]) -> torch.Tensor:
    chunk = -(-101 // len(nodes))
    padded = [torch.cat([m, torch.zeros(chunk * len(nodes) - 101)]) for m in nodes]
    means = []
    for index in range(len(nodes)):
        pieces = [m[index * chunk : (index + 1) * chunk].view(1, -1) for m in padded]
        means.append(torch.cat([decompress(compress(piece)) for piece in pieces]).mean(0))
    return torch.cat([decompress(compress(mean.view(1, -1))).view(-1) for mean in means])[:101]


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(2, {}), (3, {}), (4, {}), (4, {"hierarchical": True, "local_world_size": 2})],
)
def test_momenta_are_averaged_as_the_simulator_does(
    four_ranks: Ranks, num_ranks: int, options: dict[str, Any]
) -> None:
    """Few values may fall on the other side of a rounding; ranks are bitwise equal."""
    results = four_ranks.run(_descend, num_ranks, options)[:num_ranks]
    expected = _simulate(num_ranks, options)
    for weights in results:
        for value, first, reference in zip(weights, results[0], expected, strict=True):
            assert torch.equal(value, first)
            assert (value - reference).abs().median() < 1e-5
            assert (value - reference).abs().max() < 0.02


def _train(rank: int, num_ranks: int, kind: str, num_steps: int) -> Any:
    group = first_ranks(num_ranks)
    if group is None:
        return None
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(3), process_group=group, bucket_cap_mb=0.02)
    handle = None
    if kind == "qadam":
        optimizer: Any = QAdamOptimizer(ddp.parameters(), lr=1e-3, warmup_steps=WARMUP)
        handle = attach(ddp, optimizer, QAdam(hierarchical=False))
    else:
        optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    inputs, steps = batches(rank, [(16, WIDTH)] * 2), []
    for step in range(num_steps):
        x = inputs[step % 2]
        optimizer.zero_grad()
        loss = (ddp(x) - x.relu()).pow(2).mean()
        loss.backward()
        optimizer.step()
        steps.append((loss.item(), flat_weights(ddp)))
    if handle is not None:
        handle.detach()
    return steps


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_warmup_on_ranks_is_that_of_adam_with_ddp(four_ranks: Ranks, num_ranks: int) -> None:
    by_qadam = four_ranks.run(_train, num_ranks, "qadam", WARMUP + 1)[0]
    by_adam = four_ranks.run(_train, num_ranks, "adam", WARMUP + 1)[0]
    for step in range(WARMUP):
        assert torch.equal(by_qadam[step][1], by_adam[step][1])
    assert not torch.equal(by_qadam[WARMUP][1], by_adam[WARMUP][1])


def test_the_loss_falls_as_with_adam(four_ranks: Ranks) -> None:
    by_qadam = four_ranks.run(_train, 3, "qadam", 40)[:3]
    by_adam = four_ranks.run(_train, 3, "adam", 40)[:3]
    for steps in by_qadam:
        assert torch.equal(steps[-1][1], by_qadam[0][-1][1])
    first_loss = sum(steps[0][0] for steps in by_qadam)
    loss = sum(steps[-1][0] for steps in by_qadam)
    loss_of_adam = sum(steps[-1][0] for steps in by_adam)
    assert loss_of_adam < first_loss
    assert loss < loss_of_adam + 0.1 * (first_loss - loss_of_adam)


def _accumulate(rank: int, is_accumulated: bool, ddp_options: dict[str, Any]) -> Any:
    setting = _setting(2, {}, ddp_options=ddp_options)
    assert setting is not None
    ddp, optimizer, handle = setting
    inputs = batches(rank, [(8, WIDTH)] * 16)
    for first, second in zip(inputs[::2], inputs[1::2], strict=True):
        optimizer.zero_grad()
        if is_accumulated:
            with ddp.no_sync():
                ddp(first).pow(2).mean().backward()
            ddp(second).pow(2).mean().backward()
        else:
            outputs = ddp(torch.cat([first, second]))
            outputs.pow(2).mean().mul(2).backward()
        optimizer.step()
    handle.detach(average=False)
    return flat_weights(ddp)


@pytest.mark.quick("ddp_options0")
@pytest.mark.parametrize("ddp_options", [{}, {"gradient_as_bucket_view": True}])
def test_accumulated_micro_batches_are_one_batch(ranks: Ranks, ddp_options: dict[str, Any]) -> None:
    accumulated = ranks.run(_accumulate, True, ddp_options)
    whole = ranks.run(_accumulate, False, ddp_options)
    assert torch.equal(accumulated[0], accumulated[1])
    assert (accumulated[0] - whole[0]).abs().mean() < 1e-3
    start = flat_weights(_seeded())
    assert (accumulated[0] - start).abs().mean() > 1e-2


def _seeded() -> nn.Module:
    torch.manual_seed(0)
    return MLP(3)


def _resume(rank: int, at_step: int) -> Any:
    results = []
    saved: dict[str, Any] = {}
    inputs = batches(rank, [(8, WIDTH)] * 9)
    for is_resumed in (False, True):
        setting = _setting(2, {})
        assert setting is not None
        ddp, optimizer, handle = setting
        parts = {"model": ddp, "optimizer": optimizer, "handle": handle}
        for name, state in saved.items():
            parts[name].load_state_dict(state)
        for step in range(at_step if is_resumed else 0, 9):
            if step == at_step and not is_resumed:
                buffer = io.BytesIO()
                torch.save({name: part.state_dict() for name, part in parts.items()}, buffer)
                buffer.seek(0)
                saved = torch.load(buffer)
            if step == at_step:  # DDP forms its buckets anew in the second step of a process
                handle.detach(average=False)
                ddp = DistributedDataParallel(ddp.module, bucket_cap_mb=100)
                handle = attach(ddp, optimizer, QAdam(hierarchical=False))
            _update(ddp, optimizer, inputs[step])
        results.append(flat_weights(ddp))
        handle.detach(average=False)
    return results


@pytest.mark.quick("2")
@pytest.mark.parametrize("at_step", [2, WARMUP, 6])
def test_a_run_goes_on_bitwise_from_a_checkpoint(ranks: Ranks, at_step: int) -> None:
    """Checkpoints are of a step in the warm-up, of its end, and of a later step."""
    for weights, resumed in ranks.run(_resume, at_step):
        assert torch.equal(weights, resumed)


def _refuse(rank: int) -> list[str]:
    model = MLP(2)
    ddp = DistributedDataParallel(model)
    algorithm = QAdam(hierarchical=False)
    adam, adamw = torch.optim.Adam(ddp.parameters()), torch.optim.AdamW(ddp.parameters())
    errors = [error_of(lambda: attach(ddp, adam, algorithm))]
    errors.append(error_of(lambda: attach(ddp, adamw, algorithm)))
    unused = DistributedDataParallel(MLP(2), find_unused_parameters=True)
    optimizer = QAdamOptimizer(unused.parameters())
    errors.append(error_of(lambda: attach(unused, optimizer, algorithm)))
    return errors


def test_other_optimizers_and_unused_parameters_are_refused(ranks: Ranks) -> None:
    for errors in ranks.run(_refuse):
        assert all(error.startswith("OptionError: ") for error in errors)
        adam, adamw, unused = errors
        assert "QAdam cannot work with Adam; give attach a ddpopt.algorithms.QAdamOpt" in adam
        assert "cannot work with AdamW" in adamw
        assert "find_unused_parameters=True" in unused


def _go_on(rank: int) -> Any:
    """Train with NaN once after the warm-up, and once with a second backward without zero_grad."""
    setting = _setting(4, {"hierarchical": True, "local_world_size": 2})
    assert setting is not None
    ddp, optimizer, handle = setting
    errors = []
    for step, x in enumerate(batches(rank, [(8, WIDTH)] * 10)):
        bad = x.fill_(float("nan")) if (rank, step) == (3, 6) else x
        optimizer.zero_grad()
        try:
            ddp(bad).pow(2).mean().backward()
            if step == 8:
                ddp(bad).pow(2).mean().backward()
        except (NonFiniteError, OptionError) as error:
            errors.append(f"{type(error).__name__} in step {step}")
        else:
            optimizer.step()
    handle.detach(average=False)
    return errors, flat_weights(ddp)


def test_training_goes_on_after_a_step_that_failed(four_ranks: Ranks) -> None:
    results = four_ranks.run(_go_on)
    for errors, weights in results:
        assert errors == ["NonFiniteError in step 6", "OptionError in step 8"]
        assert weights.isfinite().all()
        assert torch.equal(weights, results[0][1])


def _compile(rank: int, split: str) -> Any:
    results = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        setting = _setting(2, {}, MLP(3, bias=False))
        assert setting is not None
        ddp, optimizer, handle = setting
        options = {"inner": "aot_eager", "split": split}
        forward = torch.compile(ddp, backend="ddpopt", options=options) if is_compiled else ddp
        for x in batches(rank, [(8, WIDTH)] * 8):
            _update(forward, optimizer, x)
        results.append((flat_weights(ddp), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
        handle.detach(average=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = DistributedDataParallel(MLP(3, bias=False), bucket_cap_mb=0.02)
    forward = torch.compile(plain, backend="ddpopt", options=options)
    adam = torch.optim.Adam(plain.parameters())
    for x in batches(rank, [(8, WIDTH)] * 8):
        _update(forward, adam, x)
    return *results, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
def test_compiled_training_equals_eager_and_adds_no_graphs(ranks: Ranks, split: str) -> None:
    for (eager, _), (compiled, num_graphs), num_plain in ranks.run(_compile, split):
        assert (compiled - eager).abs().mean() < 1e-4
        assert num_graphs == num_plain > 0
