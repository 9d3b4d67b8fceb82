"""ShardedUpdate: trains as plain DDP, in shards, and never hands out a part for the whole."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.algorithms import Decentralized, ShardedUpdate, attach
from ddpopt.algorithms.comm import Exchange
from ddpopt.algorithms.gradients import AbsentGradient, ShardedGradients
from ddpopt.algorithms.shards import Shard
from ddpopt.planning import AllreduceCost, rebucket, timer, tuner
from ddpopt.planning.decision import Verdict
from tests.planning.test_rebucket import _plan_for
from tests.planning.test_tuner import _given
from tests.support.groups import first_ranks
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import OwnRanks, Ranks, error_of, lose_rank_1

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
}


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


DEFAULT, OVERLAP = ShardedUpdate(), ShardedUpdate(overlap_forward=True)


class Training:
    """A model under DDP on the first ranks, by plain DDP or with ShardedUpdate."""

    def __init__(self, is_sharded: bool, model: nn.Module, group: Any = None, **options: Any):
        options = {"bucket_cap_mb": 0.02, **options}
        self.ddp = DistributedDataParallel(model, process_group=group, **options)
        self.is_sharded = is_sharded
        self.forward: Any = self.ddp
        self.optimizer: Any = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.handle: Any = None

    def attach(self, algorithm: ShardedUpdate = DEFAULT) -> None:
        if self.is_sharded:
            self.handle = attach(self.ddp, self.optimizer, algorithm)

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.forward(x).pow(2).mean().backward()
        self.optimizer.step()

    def clip(self, max_norm: float) -> torch.Tensor:
        if self.handle is not None:
            return self.handle.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]
        return nn.utils.clip_grad_norm_(self.ddp.parameters(), max_norm)

    def end(self) -> torch.Tensor:
        if self.handle is not None:
            self.handle.detach()
        return _flat(self.ddp)


# ---- the same result as plain DDP -------------------------------------------------------------


def _optimize(rank: int, name: str) -> Any:
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        training = Training(is_sharded, MLP(3))
        training.optimizer = OPTIMIZERS[name](training.ddp.parameters())
        training.attach()
        for x in batches(rank, [(8, WIDTH)] * 20):
            training.step(x)
        found.append(training.end())
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_train_as_plain_ddp_to_the_bit(ranks: Ranks, name: str) -> None:
    """Twenty steps of each optimizer that updates each element by itself."""
    for plain, sharded in ranks.run(_optimize, name):
        assert torch.equal(plain, sharded)


def _compile_update(rank: int) -> Any:
    found = []
    for is_sharded in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        training = Training(is_sharded, MLP(3))
        training.attach()
        training.optimizer.step = torch.compile(training.optimizer.step, backend="eager")
        for x in batches(rank, [(8, WIDTH)] * 3):
            training.step(x)
        found.append(training.end())
    return found


def test_an_update_that_is_compiled_stays_so(ranks: Ranks) -> None:
    """To the bit, which AdamW as it runs uncompiled is not."""
    for plain, sharded in ranks.run(_compile_update):
        assert torch.equal(plain, sharded)


def _clip(training: Training, inputs: Any) -> None:
    for x in inputs:
        training.optimizer.zero_grad()
        training.forward(x).pow(2).mean().backward()
        training.clip(0.01)
        training.optimizer.step()


def _schedule(training: Training, inputs: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 3, 0.5)
    for x in inputs:
        training.step(x)
        scheduler.step()


def _accumulate(training: Training, inputs: Any) -> None:
    for k, x in enumerate(inputs):
        with training.ddp.no_sync() if k % 3 < 2 else contextlib.nullcontext():
            training.forward(x).pow(2).mean().backward()
        if k % 3 == 2:
            training.optimizer.step()
            training.optimizer.zero_grad()


def _accumulate_averages(training: Training, inputs: Any) -> None:
    """Each second step leaves gradients, to which the next backward adds."""
    for k, x in enumerate(inputs):
        training.forward(x).pow(2).mean().backward()
        if k % 2:
            training.optimizer.step()
        if k % 4 == 1:
            training.optimizer.zero_grad()
        if k % 4 == 3:
            training.ddp.zero_grad()


def _zero_in_place(training: Training, inputs: Any) -> None:
    for k, x in enumerate(inputs):
        loss = training.forward(x).pow(2).mean()
        (training.optimizer if k % 2 else training.ddp).zero_grad(set_to_none=False)
        loss.backward()
        training.optimizer.step()


def _zero_between(training: Training, inputs: Any) -> None:
    """Gradients are dropped after forward, and in the middle of an accumulation."""
    for k, x in enumerate(inputs):
        with training.ddp.no_sync():
            training.forward(x).pow(2).mean().backward()
        if k % 2:
            training.optimizer.zero_grad()
        loss = training.forward(x).pow(2).mean()
        if k % 3:
            training.ddp.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


def _scale(training: Training, inputs: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    for k, x in enumerate(inputs):
        training.optimizer.zero_grad()
        loss = training.forward(x).pow(2).mean()
        if k % 5 == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        training.clip(0.1)
        scaler.step(training.optimizer)
        scaler.update()
    assert scaler.get_scale() not in (8.0, 0.0)


def _evaluate(training: Training, inputs: Any) -> None:
    for x in inputs:
        training.step(x)
        training.ddp.eval()
        with torch.no_grad():
            training.ddp(x)
        training.ddp.module(x)
        training.ddp.train()


def _reattach(training: Training, inputs: Any) -> None:
    """Plain, sharded, plain between backward and update, sharded."""
    algorithm = DEFAULT
    for k, x in enumerate(inputs):
        training.optimizer.zero_grad()
        training.forward(x).pow(2).mean().backward()
        if k == 5 and training.handle is not None:
            training.handle.detach()
            algorithm, training.handle = training.handle.algorithm, None
        training.optimizer.step()
        if k == 8:
            training.attach(algorithm)


def _two_groups(training: Training, inputs: Any) -> None:
    first, *others = training.ddp.parameters()
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    groups = [{"params": [first, frozen], "lr": 0.1, "weight_decay": 0.1}, {"params": others[:3]}]
    optimizers = [
        torch.optim.Adam(groups, lr=0.01),
        torch.optim.SGD(others[3:], lr=0.1, momentum=0.5),
    ]
    if training.handle is not None:
        training.handle.detach()
        training.handle = attach(training.ddp, optimizers, training.handle.algorithm)
    for x in inputs:
        for optimizer in optimizers:
            optimizer.zero_grad()
        training.forward(x).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()


USES = {
    use.__name__[1:]: use
    for use in (
        _clip,
        _schedule,
        _accumulate,
        _accumulate_averages,
        _zero_in_place,
        _zero_between,
        _scale,
        _evaluate,
        _reattach,
        _two_groups,
    )
}


def _use(rank: int, name: str, options: dict[str, Any], algorithm: ShardedUpdate) -> Any:
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        training = Training(is_sharded, MLP(3), **options)
        training.attach(algorithm)
        USES[name](training, batches(rank, [(8, WIDTH)] * 12))
        found.append(training.end())
    return found


@pytest.mark.parametrize(
    ("options", "algorithm"),
    [({}, DEFAULT), ({"gradient_as_bucket_view": True}, OVERLAP)],
    ids=["", "views, behind forward"],
)
@pytest.mark.parametrize("name", USES)
def test_training_loops_of_all_kinds_train_as_plain_ddp(
    ranks: Ranks, name: str, options: dict[str, Any], algorithm: ShardedUpdate
) -> None:
    for plain, sharded in ranks.run(_use, name, options, algorithm):
        torch.testing.assert_close(sharded, plain, rtol=1e-4, atol=1e-5)


class Mixed(nn.Module):
    """Several dtypes; channels-last, scalar, empty, shared and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.low = nn.Linear(5, 7).bfloat16()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.first, self.second = nn.Linear(7, 7).double(), nn.Linear(7, 7).double()
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(7, 7).double().requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(x.view(-1, 3, 4, 4)).amax((2, 3))) + self.empty.sum()
        x = self.low(x.bfloat16()).double() * self.scale
        return self.frozen(self.second(self.first(x)))


class Sometimes(nn.Module):
    """Uses some layers in some steps, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        for k, layer in enumerate(self.layers):
            is_left_out = self.num_calls % 4 == k
            if not (is_left_out and (k < 2 or dist.get_rank() == 0)):
                x = layer(x).relu()
        return x


def _model(rank: int, num_ranks: int, kind: str, options: dict[str, Any]) -> Any:
    group = first_ranks(num_ranks)
    if group is None:
        return None
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = {"mixed": Mixed, "sometimes": Sometimes, "mlp": lambda: MLP(3)}[kind]()
        training = Training(is_sharded, model, group, **options)
        training.attach()
        shape = (8, 48) if kind == "mixed" else (8, WIDTH)
        for x in batches(rank, [shape] * 12):
            training.step(x)
        found.append(training.end())
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mixed", {"bucket_cap_mb": 0.0005}),
        ("sometimes", {"find_unused_parameters": True}),
        ("sometimes", {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        ("mlp", {"static_graph": True}),
        ("mlp", {"bucket_cap_mb": 25}),
        ("mlp", {"bucket_cap_mb": 0.0001}),
    ],
)
def test_models_of_all_kinds_train_as_with_plain_ddp(
    ranks: Ranks, kind: str, options: dict[str, Any]
) -> None:
    """Also where parameters have no gradient in a step: optimizers leave them alone."""
    for plain, sharded in ranks.run(_model, 2, kind, options):
        assert torch.equal(plain, sharded)


@pytest.mark.parametrize("kind", ["mlp", "mixed"])
@pytest.mark.parametrize("num_ranks", [1, 3, 4, 8])
def test_any_number_of_ranks_trains_as_plain_ddp(
    eight_ranks: Ranks, num_ranks: int, kind: str
) -> None:
    """Sizes that ranks do not divide; sums of more than two round otherwise."""
    found = eight_ranks.run(_model, num_ranks, kind, {})[:num_ranks]
    for plain, sharded in found:
        assert torch.equal(sharded, found[0][1])
        torch.testing.assert_close(
            sharded, plain, rtol=1e-2, atol=1e-2 if kind == "mixed" else 1e-3
        )


# ---- never silent -----------------------------------------------------------------------------


def _read(rank: int) -> Any:
    torch.manual_seed(0)
    training, plain = Training(True, MLP(2)), Training(False, MLP(2))
    plain.ddp.load_state_dict(training.ddp.state_dict())
    training.attach()
    (x,) = batches(rank, [(8, WIDTH)])
    for each in (training, plain):
        each.forward(x).pow(2).mean().backward()
    parameters = list(training.ddp.parameters())
    said = [
        error_of(lambda: nn.utils.clip_grad_norm_(parameters, 1.0)),
        error_of(lambda: nn.utils.clip_grad_value_(parameters, 1.0)),
        error_of(parameters[0].grad.norm),
        error_of(parameters[0].grad.clone),
        error_of(parameters[0].grad.numpy),
        error_of(lambda: dist.all_reduce(parameters[0].grad)),
        error_of(lambda: torch.save(parameters[0].grad, io.BytesIO())),
        error_of(training.optimizer.state_dict),
        error_of(lambda: training.optimizer.load_state_dict({"state": {}, "param_groups": []})),
    ]
    full = training.handle.full_gradients()
    said.append(error_of(lambda: training.handle.set_gradients({"layers.0.weight": x})))
    expected = {name: p.grad for name, p in plain.ddp.module.named_parameters()}
    norms = training.clip(0.1), plain.clip(0.1)
    clipped = training.handle.full_gradients()
    pieces = [member.piece for member in training.handle.shards.members]
    sizes = [sum(p.numel() for p in pieces), sum(p.numel() for p in parameters)]
    training.handle.detach()
    restored = [torch.equal(p.grad, clipped[n]) for n, p in training.ddp.module.named_parameters()]
    same = [torch.allclose(clipped[name], p) for name, p in expected.items()]
    return (
        said,
        [torch.equal(full[n] * 0 + full[n], full[n]) for n in expected],
        norms,
        sizes,
        (
            restored,
            same,
        ),
    )


def test_gradients_that_are_nowhere_as_a_whole_cannot_be_used(ranks: Ranks) -> None:
    """Reading, clipping or saving them raises, and names what to call in place of that."""
    for said, found, (norm, expected), sizes, (restored, same) in ranks.run(_read):
        for text in said[:-3]:
            assert text.startswith("AbsentGradientError")
            assert "handle.clip_grad_norm_" in text
            assert "handle.full_gradients()" in text
        assert "OptionError: state_dict of this optimizer" in said[-3]
        assert "handle.load_state_dict" in said[-2]
        assert f"OptionError: layers.0.weight with a gradient of [8, {WIDTH}]" in said[-1]
        assert all(found)
        assert all(restored)
        assert all(same)
        torch.testing.assert_close(norm, expected)
        assert sizes[0] < 0.51 * sizes[1]


class Descent(torch.optim.Optimizer):
    """p <- p - lr sign(g); raises on rank 1 in its third step."""

    def __init__(self, parameters: Any, fails: bool = False) -> None:
        self.num_steps, self.fails = 0, fails
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            for k, p in enumerate(group["params"]):
                if self.fails and dist.get_rank() == 1 and (self.num_steps, k) == (3, 1):
                    raise ArithmeticError("in the update")
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


def _refuse(rank: int) -> list[str]:
    ddp = DistributedDataParallel(MLP(2))
    adafactor = torch.optim.Adafactor(ddp.parameters())
    adam = torch.optim.Adam(ddp.parameters())
    gaps = MLP(1, bias=False)
    gaps.layers[0].weight = nn.Parameter(torch.zeros(4, 8)[:, :3])  # type: ignore[assignment]
    shared = MLP(2, bias=False)
    shared.layers[1].weight = nn.Parameter(shared.layers[0].weight.detach()[1:])  # type: ignore[assignment]
    tied = MLP(1, bias=False)
    tied.register_buffer("copied", tied.layers[0].weight.detach()[1:])
    handle = attach(ddp, adam, ShardedUpdate())
    said = [error_of(lambda: attach(ddp, adam, Decentralized(hierarchical=False)))]
    said.append(error_of(lambda: handle.load_state_dict({"optimizers": []})))
    said.append(
        error_of(lambda: handle.load_state_dict(torch.optim.SGD(gaps.parameters()).state_dict()))
    )
    said.append(error_of(lambda: handle.clip_grad_norm_(1.0, -1.0)))
    ddp(torch.ones(2, WIDTH)).sum().backward()
    adam.step()
    said += [error_of(lambda: copy.deepcopy(adam)), error_of(lambda: pickle.dumps(adam))]
    handle.detach()
    said.append(error_of(handle.wait))
    for model in (ddp, *map(DistributedDataParallel, (gaps, shared, tied))):
        optimizer = adafactor if model is ddp else torch.optim.SGD(model.parameters())
        said.append(error_of(lambda m=model, o=optimizer: attach(m, o, ShardedUpdate())))
    said.append(error_of(lambda: attach(ddp, Descent(ddp.parameters()), ShardedUpdate())))
    said.append(error_of(lambda: ShardedUpdate(elementwise=[Descent])))  # type: ignore[arg-type]
    return said


def test_what_cannot_be_sharded_is_refused_with_what_to_do(ranks: Ranks) -> None:
    for said in ranks.run(_refuse):
        for text, expected in zip(
            said,
            [
                "AttachError: on rank 0: this model has an algorithm already",
                "OptionError: on rank 0: the state is not of 1 optimizers",
                "OptionError: on rank 0: the state of optimizer 0 is of groups of [1] parameters",
                "OptionError: norm_type is -1.0",
                *["OptionError: this optimizer's states are in shards"] * 2,
                "AttachError: this ShardedUpdate was detached",
                "OptionError: on rank 0: ShardedUpdate cannot work with Adafactor",
                "OptionError: on rank 0: layers.0.weight has gaps or overlaps in memory",
                "OptionError: on rank 0: layers.0.weight and layers.1.weight share memory",
                "OptionError: on rank 0: layers.0.weight and copied share memory",
                "OptionError: on rank 0: ShardedUpdate cannot work with Descent",
                "TypeError: elementwise is",
            ],
            strict=True,
        ):
            assert expected in text


# ---- checkpoints ------------------------------------------------------------------------------


def _resume(rank: int, saves: bool, loads: bool, name: str) -> Any:
    """Train six steps, save, load into a new model, and train six more; or train twelve."""
    inputs = batches(rank, [(8, WIDTH)] * 12)
    torch.manual_seed(0)
    first = Training(saves, MLP(3))
    first.optimizer = OPTIMIZERS[name](first.ddp.parameters())
    first.attach()
    for x in inputs[:6]:
        first.step(x)
    buffer = io.BytesIO()
    state = (first.handle or first.optimizer).state_dict()
    torch.save((first.ddp.state_dict(), state), buffer)
    buffer.seek(0)
    for x in inputs[6:]:
        first.step(x)
    second = Training(loads, MLP(3))
    second.optimizer = OPTIMIZERS[name](second.ddp.parameters())
    second.attach()
    second.step(inputs[0])
    weights, state = torch.load(buffer)
    second.ddp.load_state_dict(weights)
    if saves and not loads:
        (state,) = state["optimizers"]
    (second.handle or second.optimizer).load_state_dict(state)
    for x in inputs[6:]:
        second.step(x)
    return first.end(), second.end()


@pytest.mark.parametrize("name", ["adamw", "sgd", "nadam", "asgd"])
@pytest.mark.parametrize(("saves", "loads"), [(True, False), (False, True), (True, True)])
def test_checkpoints_are_those_of_plain_ddp(
    ranks: Ranks, saves: bool, loads: bool, name: str
) -> None:
    """Saved with ShardedUpdate and loaded without, the other way round, and both."""
    for whole, resumed in ranks.run(_resume, saves, loads, name):
        assert torch.equal(whole, resumed)


def _resume_on(rank: int, num_ranks: int, saved: Any) -> Any:
    """Train on the first ranks, from the start or from what others saved; return a state."""
    group = first_ranks(num_ranks)
    if group is None:
        return None
    torch.manual_seed(0)
    training = Training(True, MLP(3), group)
    training.attach()
    inputs = batches(0, [(8, WIDTH)] * 6)  # the same on all ranks, however many there are
    if saved is not None:
        weights, state = saved
        training.ddp.load_state_dict(weights)
        training.handle.load_state_dict(state)
    for x in inputs[:3] if saved is None else inputs[3:]:
        training.step(x)
    kept = copy.deepcopy((training.ddp.state_dict(), training.handle.state_dict()))
    return kept, training.end()


@pytest.mark.parametrize(("saves", "loads"), [(2, 3), (4, 2), (3, 1)])
def test_a_checkpoint_is_resumed_with_another_number_of_ranks(
    four_ranks: Ranks, saves: int, loads: int
) -> None:
    """With the same batches as without a change; means of more than two ranks round otherwise."""
    (saved, _), *_ = four_ranks.run(_resume_on, saves, None)
    resumed = [found[1] for found in four_ranks.run(_resume_on, loads, saved)[:loads]]
    expected = [found[1] for found in four_ranks.run(_resume_on, saves, saved)[:saves]]
    for weights in (*resumed, *expected):
        torch.testing.assert_close(weights, expected[0], rtol=1e-4, atol=1e-5)


def _remember(rank: int) -> Any:
    torch.manual_seed(0)
    training = Training(True, MLP(4))
    training.attach()
    plain = Training(False, MLP(4))
    for each in (training, plain):
        for x in batches(rank, [(8, WIDTH)] * 4):
            each.step(x)
    return [
        sum(v.nbytes for s in each.optimizer.state.values() for v in s.values() if v.dim())
        for each in (training, plain)
    ]


def test_optimizer_states_are_divided_among_ranks(four_ranks: Ranks) -> None:
    """Padding of buckets is all that is more."""
    found = four_ranks.run(_remember)
    assert sum(sharded for sharded, _ in found) == found[0][1]
    for sharded, plain in found:
        assert sharded < plain / 4 * 1.1


# ---- when something goes wrong ----------------------------------------------------------------


def _fail(rank: int) -> Any:
    torch.manual_seed(0)
    training = Training(True, MLP(3))
    training.optimizer = Descent(training.ddp.parameters(), fails=True)
    training.attach(ShardedUpdate(elementwise=(Descent,)))
    inputs = batches(rank, [(8, WIDTH)] * 5)
    said = [error_of(lambda x=x: training.step(x)) for x in inputs[:3]]
    said.append(error_of(training.optimizer.zero_grad))
    said += [str([p.grad for p in training.ddp.parameters() if p.grad is not None])]
    said += [error_of(lambda x=x: training.step(x)) for x in inputs[3:]]
    return said, training.end()


def test_an_update_that_fails_on_a_rank_ends_in_an_error_on_all(ranks: Ranks) -> None:
    """In the same step; parameters stay equal on all ranks."""
    (said, weights), (other, others_weights) = ranks.run(_fail)
    assert other[2] == "ArithmeticError: in the update"
    assert said[2].startswith("PeerError: the optimizer's update raised on rank 1 in step 3")
    assert said[3:] == other[3:] == ["nothing", "[]", "nothing", "nothing"]
    assert torch.equal(weights, others_weights)


def _fail_on_the_way(rank: int, algorithm: ShardedUpdate) -> Any:
    """On rank 1 the second bucket's update of the third step raises, when the first one is sent."""
    torch.manual_seed(0)
    training = Training(True, MLP(4))
    training.optimizer = torch.optim.SGD(training.ddp.parameters(), lr=0.1)
    training.attach(algorithm)
    inputs = batches(rank, [(8, WIDTH)] * 5)
    with mock.patch("ddpopt.algorithms.sharded.LEAST_BYTES", 1):
        said = [error_of(lambda x=x: training.step(x)) for x in inputs[:2]]
    module, calls = sys.modules["torch.optim.sgd"], iter(range(9))
    update: Any = module.sgd

    def fail(*arguments: Any, **options: Any) -> None:
        if rank == 1 and next(calls) == 1:
            raise ArithmeticError("in the update")
        update(*arguments, **options)

    with mock.patch.object(module, "sgd", fail):
        said.append(error_of(lambda: training.step(inputs[2])))
        repeated = error_of(training.optimizer.step) if rank == 1 else ""
    said += [error_of(lambda x=x: training.step(x)) for x in inputs[3:]]
    return said, repeated, training.end()


@pytest.mark.parametrize("algorithm", [DEFAULT, OVERLAP], ids=["", "behind forward"])
def test_so_does_one_that_fails_when_a_bucket_was_sent(
    ranks: Ranks, algorithm: ShardedUpdate
) -> None:
    """Others are told at once, or all in the next forward; and it cannot be tried again."""
    (said, _, weights), (other, repeated, others_weights) = ranks.run(_fail_on_the_way, algorithm)
    index = 3 if algorithm.overlap_forward else 2
    assert other[2] == "ArithmeticError: in the update"
    assert "PeerError: the optimizer's update raised on this rank in step 3" in repeated
    assert said[index].startswith("PeerError: the optimizer's update raised on rank 1 in step 3")
    assert other[3] == said[3]
    assert said[4] == other[4] == "nothing"
    assert torch.equal(weights, others_weights)


def _lose(rank: int) -> str:
    training = Training(True, MLP(3))
    training.attach()
    x = torch.ones(2, WIDTH)
    return lose_rank_1(rank, training.handle, lambda: training.step(x))


def test_a_lost_rank_is_an_error_in_the_next_step(own_ranks: OwnRanks) -> None:
    found = own_ranks().run_survivors([0], _lose)
    assert "ing parameters of step 2 failed" in found[0] or "in step 3 failed" in found[0]
    assert "another rank has ended" in found[0]


# ---- compiled ---------------------------------------------------------------------------------


def _compile(rank: int, options: dict[str, Any], is_outside: bool) -> Any:
    found = []
    for is_sharded in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model: Any = MLP(6, bias=False)
        if not is_outside:
            model.compile(backend="ddpopt", options=options)
        training = Training(is_sharded, model)
        if is_outside:
            training.forward = torch.compile(training.ddp, backend="ddpopt", options=options)
        training.attach(OVERLAP)
        for x in batches(rank, [(8, WIDTH)] * 8):
            training.step(x)
        awaited = None
        if training.handle is not None:
            awaited = [shard.is_awaited for shard in training.handle.shards]
        count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.append((training.end(), count, awaited))
    return found


@pytest.mark.parametrize("is_outside", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("split", ["backward", "auto", "forward"])
def test_compiled_training_is_that_of_plain_ddp_and_waits_where_it_reads(
    ranks: Ranks, split: str, is_outside: bool
) -> None:
    """To the bit, with no more graphs."""
    options = {"inner": "aot_eager", "split": split}
    for (plain, num_plain, _), (sharded, num_graphs, awaited) in ranks.run(
        _compile, options, is_outside
    ):
        assert torch.equal(plain, sharded)
        assert num_graphs == num_plain > 0
        assert all(awaited)


class Wide(nn.Module):
    """Large products that are summed after all of them: in another order they take less memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 512, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        products = [layer(x) for layer in self.layers]
        return torch.stack([product.sum(1) for product in products])


def _order(rank: int, inner: str, kind: type[nn.Module]) -> list[str]:
    """Return the events of a compiled forward, in their order."""
    torch.manual_seed(0)
    model: nn.Module = kind()
    model.compile(backend="ddpopt", options={"inner": inner, "split": "backward"})
    training = Training(True, model)
    training.attach(OVERLAP)
    inputs = batches(rank, [(8, WIDTH)] * 6)
    for x in inputs:
        training.step(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        training.forward(inputs[0])
    training.end()
    kinds = {
        "ddpopt::wait_": "wait",
        "aten::addmm": "product",
        "aten::mm": "product",
        "mkldnn::_linear_pointwise": "product",
    }
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [kinds[event.name] for event in events if event.name in kinds]


@pytest.mark.parametrize(
    ("inner", "kind"), [("aot_eager", MLP), ("inductor", MLP), ("inductor", Wide)]
)
def test_each_layer_waits_for_its_own_parameters(
    ranks: Ranks, inner: str, kind: type[nn.Module]
) -> None:
    """The layers before it have been computed by then; Inductor would move waits to the top."""
    for events in ranks.run(_order, inner, kind):
        assert events == ["wait", "product"] * 6


class Late:
    """Puts what was received where it belongs when it is waited for, and not before."""

    def __init__(self, put: Callable[[], object]) -> None:
        self.wait = put


def receive_late(exchange: Exchange, values: torch.Tensor) -> list[Any]:
    """As `Exchange.all_gather`, with nothing but NaN from other ranks until it is waited for."""
    received = values.clone()
    works = all_gather(exchange, received)
    others = torch.ones(exchange.num_ranks, dtype=torch.bool)
    others[exchange.rank] = False
    values.view(exchange.num_ranks, -1)[others] = float("nan")
    return [*works, Late(lambda: values.copy_(received))]


all_gather = Exchange.all_gather


def _read_late(rank: int, how: str, inner: str) -> Any:
    found = []
    for is_sharded in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = MLP(6)
        options = {"inner": inner, "split": how}
        if how in ("backward", "forward"):
            model.compile(backend="ddpopt", options=options)
        training = Training(is_sharded, model)
        training.attach(OVERLAP)
        with (
            mock.patch.object(Exchange, "all_gather", receive_late),
            torch._dynamo.config.patch(optimize_ddp=how != "torch"),
        ):
            for k, x in enumerate(batches(rank, [(8, WIDTH)] * 8)):
                if (how, k) == ("torch", 4):  # whose code waits nowhere
                    model.compile(backend=inner)
                training.step(x)
                if k % 3 == 1:
                    training.ddp.eval()
                    (training.ddp if k % 2 else training.ddp.module)(x)
                    training.ddp.train()
                if k % 3 == 2:
                    assert all(w.isfinite().all() for w in training.ddp.state_dict().values())
        awaited = is_sharded and all(shard.is_awaited for shard in training.handle.shards)
        found.append((training.end(), awaited))
    return found


@pytest.mark.parametrize(
    ("how", "inner"),
    [
        ("eager", ""),
        ("backward", "aot_eager"),
        ("forward", "aot_eager"),
        ("torch", "aot_eager"),
        ("backward", "inductor"),
    ],
)
def test_nothing_reads_a_parameter_before_it_is_there(ranks: Ranks, how: str, inner: str) -> None:
    """A network that is as slow as it can be: parameters are there when they are waited for."""
    for (plain, _), (sharded, awaited) in ranks.run(_read_late, how, inner):
        torch.testing.assert_close(sharded, plain, rtol=1e-5, atol=1e-6)
        assert awaited == (how != "torch")


def _rebucket(rank: int) -> Any:
    found = []
    for is_sharded in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        training = Training(is_sharded, MLP(6))
        options = {"inner": "aot_eager"}
        training.forward = torch.compile(training.ddp, backend="ddpopt", options=options)
        training.attach()
        for k, x in enumerate(batches(rank, [(8, WIDTH)] * 10)):
            training.step(x)
            if k == 4:
                ddpopt.rebucket(training.ddp, _plan_for(training.ddp.module, (4, 2, 6)))
        sizes = is_sharded and [len(shard.members) for shard in training.handle.shards]
        found.append((training.end(), sizes))
    return found


def test_other_buckets_in_mid_training_are_divided_anew(ranks: Ranks) -> None:
    for (plain, _), (sharded, sizes) in ranks.run(_rebucket):
        assert torch.equal(plain, sharded)
        assert sizes == [4, 2, 6]


def _tune(rank: int, split: str, attached: int, is_kept: bool) -> Any:
    """Train with buckets that are looked for; by a clock by which all steps take equally long."""
    found = []
    verdict = Verdict("kept") if is_kept else Verdict("taken back", is_worse=True)
    for is_sharded in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        training = Training(is_sharded, MLP(6), bucket_cap_mb=25)
        options = {"inner": "aot_eager", "split": split, "buckets": "auto"}
        training.forward = torch.compile(training.ddp, backend="ddpopt", options=options)
        given = _given(AllreduceCost(startup_s=1e-5, s_per_byte=8e-8))
        with (
            given,
            mock.patch.object(timer._waits, "waited_s", return_value=0.0),
            mock.patch.object(tuner, "judge", return_value=verdict),
        ):
            for k, x in enumerate(batches(rank, [(8, WIDTH)] * (attached + 28))):
                if k == attached:
                    training.attach(OVERLAP)
                training.step(x)
        tuned: Any = tuner.of(training.ddp)
        assert tuned.is_done
        plan = rebucket.plan_of(training.ddp)
        sizes = plan and [len(bucket.parameters) for bucket in plan.buckets]
        shards = [len(s.members) for s in training.handle.shards] if is_sharded else []
        found.append((tuned.best.communication, sizes, shards, training.end()))
    return found


@pytest.mark.parametrize(
    ("split", "attached", "planned_for"),
    [
        ("backward", 0, "sharded"),
        ("backward", 5, "sharded"),
        ("backward", 12, "sharded"),
        ("backward", 30, "allreduce"),
        ("forward", 0, "sharded"),
    ],
    ids=["first", "while searching", "while comparing", "after", "forward"],
)
def test_buckets_are_found_for_sharded_updates_and_storage_moves_there(
    ranks: Ranks, split: str, attached: int, planned_for: str
) -> None:
    """Attached before or while they are looked for; later, those that were found stay."""
    for plain, sharded in ranks.run(_tune, split, attached, True):
        communication, sizes, shards, weights = sharded
        assert communication == planned_for
        assert shards == sizes
        assert len(sizes) > 1
        assert plain[0] == "allreduce"
        assert torch.equal(weights, plain[-1])


def test_storage_moves_back_where_a_change_is_taken_back(ranks: Ranks) -> None:
    for plain, (_, sizes, shards, weights) in ranks.run(_tune, "backward", 0, False):
        assert sizes is None
        assert shards == [12]
        assert torch.equal(weights, plain[-1])


def _check(rank: int) -> Any:
    torch.manual_seed(0)
    model = MLP(6)
    training = Training(True, model)
    training.forward = torch.compile(
        training.ddp, backend="ddpopt", options={"inner": "aot_eager", "split": "backward"}
    )
    training.attach(OVERLAP)
    inputs = batches(rank, [(8, WIDTH)] * 4)
    ddpopt.warmup(training.forward, inputs[0])
    for x in inputs:
        training.step(x)
    training.handle.wait()
    verified = ddpopt.verify(training.forward, inputs[0])
    num_steps = training.handle.num_steps
    weights, copied = _flat(training.ddp), _flat(copy.deepcopy(training.ddp.module))
    return num_steps, verified.is_repeatable, torch.equal(weights, copied), training.end()


def test_checks_and_copies_see_whole_parameters(ranks: Ranks) -> None:
    """Between two steps, once `wait` returned."""
    found = ranks.run(_check)
    for num_steps, is_repeatable, is_equal, weights in found:
        assert num_steps == 4
        assert is_repeatable
        assert is_equal
        assert torch.equal(weights, found[0][3])


# ---- memory -----------------------------------------------------------------------------------


def _watch_local_gradients(rank: int) -> Any:
    """Return how many parameters' own gradients are in memory when a bucket's sum begins."""
    training = Training(True, MLP(6), bucket_cap_mb=0.005)
    training.attach()
    first, second, third = batches(rank, [(8, WIDTH)] * 3)
    training.step(first)
    training.step(second)  # has the buckets that stay
    buckets: list[int] = []
    found = []
    begin = ShardedGradients.begin_sum

    def see(gradients: Any, bucket: int, values: torch.Tensor, *rest: Any) -> None:
        buckets.append(values.untyped_storage().data_ptr())
        grads = [p.grad for p in training.ddp.parameters()]
        own = [g for g in grads if g is not None and not isinstance(g, AbsentGradient)]
        found.append(sum(g.untyped_storage().data_ptr() not in buckets for g in own))
        begin(gradients, bucket, values, *rest)

    with mock.patch.object(ShardedGradients, "begin_sum", see):
        training.step(third)
    training.end()
    return found


def test_local_gradients_are_freed_when_their_bucket_is_summed(ranks: Ranks) -> None:
    """At any time a backward holds those of one bucket: a weight and a bias."""
    for found in ranks.run(_watch_local_gradients):
        assert len(found) == 6
        assert max(found) == 2


# ---- by bucket --------------------------------------------------------------------------------


def _watch_sends(rank: int, name: str) -> Any:
    """Return for each bucket that was sent which of them had been updated by then."""
    with mock.patch("ddpopt.algorithms.sharded.LEAST_BYTES", 1):
        return _watch_each_send(rank, name)


def _watch_each_send(rank: int, name: str) -> Any:
    torch.manual_seed(0)
    training = Training(True, MLP(4), bucket_cap_mb=0.005)
    training.optimizer = OPTIMIZERS[name](training.ddp.parameters())
    training.attach()
    x, *rest = batches(rank, [(8, WIDTH)] * 4)
    for _ in range(2):  # the second has the buckets that stay
        training.step(x)
    shards = training.handle.shards.all
    found = []
    send = Shard.send

    def see(shard: Shard, what: str, *given: Any) -> None:
        now = [torch.cat([m.piece for m in s.members]) for s in shards]
        changed = [not torch.equal(old, new) for old, new in zip(before, now, strict=True)]
        found.append((shard.index, changed))
        send(shard, what, *given)

    with mock.patch.object(Shard, "send", see):
        for x in rest:
            before = [torch.cat([m.piece for m in s.members]).clone() for s in shards]
            training.step(x)
            training.handle.wait()
    training.end()
    return len(shards), found


@pytest.mark.parametrize("name", ["adamw", "sgd", "asgd"])
def test_a_bucket_is_sent_when_it_is_updated_and_before_the_next_one_is(
    ranks: Ranks, name: str
) -> None:
    for num_shards, found in ranks.run(_watch_sends, name):
        assert num_shards > 2
        in_turn = [
            (index, [other >= index for other in range(num_shards)])
            for index in reversed(range(num_shards))
        ]
        assert found == in_turn * 3


def _hook(rank: int, when: str) -> Any:
    """Change an option in hooks of the optimizer's, from before `attach` or after it."""
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        training = Training(is_sharded, MLP(3))
        counts = [0, 0]

        def before(optimizer: Any, *_: Any, counts: list[int] = counts) -> None:
            counts[0] += 1
            for group in optimizer.param_groups:
                group["lr"] *= 0.9

        def after(*_: Any, counts: list[int] = counts) -> None:
            counts[1] += 1

        training.optimizer = torch.optim.SGD(training.ddp.parameters(), lr=0.1, momentum=0.9)
        if when == "after":
            training.attach()
        training.optimizer.register_step_pre_hook(before)
        training.optimizer.register_step_post_hook(after)
        if when == "before":
            training.attach()
        for x in batches(rank, [(8, WIDTH)] * 4):
            training.step(x)
        parameters, weights = list(training.ddp.parameters()), _flat(training.ddp).clone()
        seen = list(counts)

        def clip(*_: Any, parameters: Any = parameters) -> None:
            nn.utils.clip_grad_norm_(parameters, 1.0)

        training.optimizer.register_step_pre_hook(clip)
        said = error_of(lambda x=x, training=training: training.step(x))
        rate = training.optimizer.param_groups[0]["lr"]
        same = [*map(id, parameters)] == [*map(id, training.optimizer.param_groups[0]["params"])]
        training.end()
        found.append((weights, seen, rate, same, said))
    return found


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_optimizers_see_parameters_and_run_once_a_step(ranks: Ranks, when: str) -> None:
    """What they do to options counts; gradients that no rank has cannot be clipped in them."""
    for plain, sharded in ranks.run(_hook, when):
        assert torch.equal(plain[0], sharded[0])
        assert plain[1:4] == sharded[1:4] == ([4, 4], plain[2], True)
        assert plain[4] == "nothing"
        assert sharded[4].startswith("AbsentGradientError")
