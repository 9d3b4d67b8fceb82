"""ShardedUpdate in the training loops that people write around their models: as plain DDP.

Each loop trains a few steps on two ranks with plain DDP, with the default, and with parameters
behind forward, where `settle` (which is `handle.wait`) comes before what reads or writes them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from ddpopt.algorithms import ShardedUpdate, attach
from ddpopt.algorithms.comm import Exchange
from tests.algorithms.test_sharded_update import receive_late
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import Ranks, error_of

DEFAULT, OVERLAP = ShardedUpdate(), ShardedUpdate(overlap_forward=True)
Loop = Callable[["Loops", Any], Any]


class Loops:
    """What loops are made of: a way to train, and what it has to be told of."""

    def __init__(self, algorithm: ShardedUpdate | None) -> None:
        self.algorithm = algorithm
        self.handles: list[Any] = []

    def start(self, model: nn.Module, optimizers: Any, **options: Any) -> DistributedDataParallel:
        """Wrap a model, make its optimizers by `optimizers`, and attach."""
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.005, **options)
        self.optimizers = optimizers(ddp)
        self.attach(ddp, self.optimizers)
        return ddp

    def attach(self, ddp: DistributedDataParallel, optimizers: Any) -> None:
        if self.algorithm is not None:
            self.handles.append(attach(ddp, optimizers, self.algorithm))

    def declare(self, *kinds: type[torch.optim.Optimizer]) -> None:
        """Say that these update each element by itself."""
        if self.algorithm is not None:
            self.algorithm = dataclasses.replace(self.algorithm, elementwise=kinds)

    def settle(self) -> None:
        """Do what `overlap_forward=True` asks of a loop before it reads or writes parameters."""
        if self.algorithm is not None and self.algorithm.overlap_forward:
            for handle in self.handles:
                handle.wait()

    def state(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the state of the only optimizer, by the last handle that it has."""
        if self.handles:
            return self.handles[-1].state_dict()["optimizers"][0]
        return optimizer.state_dict()

    def load(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        (self.handles[-1] if self.handles else optimizer).load_state_dict(state)

    def clip(self, ddp: nn.Module, norm: float, kind: float) -> torch.Tensor:
        if self.handles:
            return self.handles[0].clip_grad_norm_(norm, kind)  # type: ignore[no-any-return]
        return nn.utils.clip_grad_norm_(ddp.parameters(), norm, kind)


def _adam(ddp: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ddp.parameters(), lr=0.05)


def _sgd(ddp: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def _step(loss: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def _whole(*modules: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for m in modules for p in m.parameters()])


class Regions(MLP):
    """Two regions that are checkpointed the old way, whose buckets span their border."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for start in (0, 3):
            part = nn.Sequential(*self.layers[start : start + 3])
            x = checkpoint(part, x, use_reentrant=True)  # type: ignore[assignment]
        return x


def reentrant(loops: Loops, inputs: Any) -> Any:
    ddp = loops.start(Regions(6), _sgd)
    for x in inputs:
        _step(ddp(x).pow(2).mean(), loops.optimizers)
        loops.settle()
        yield _whole(ddp)


def temperature(loops: Loops, inputs: Any) -> Any:
    """A parameter of the loss, in a group of the same optimizer and in one of its own."""
    scale, shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def optimizers(ddp: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [*ddp.parameters(), scale]}, {"params": [shift], "lr": 0.5}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.5)

    ddp = loops.start(MLP(4), optimizers)
    for _ in inputs:  # of one rank's, since nobody reduces the loss's parameters
        x = torch.ones(3, WIDTH)
        _step((ddp(x).mean() * scale + shift).pow(2).sum(), loops.optimizers)
        loops.settle()
        yield torch.cat([_whole(ddp), scale.detach(), shift.detach()])


def two_modules(loops: Loops, inputs: Any) -> Any:
    """An encoder and a decoder, each under DDP, in one optimizer."""
    encoder, decoder = (DistributedDataParallel(MLP(3), bucket_cap_mb=0.005) for _ in range(2))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=0.05)
    for module in (encoder, decoder):
        loops.attach(module, optimizer)
    for x in inputs:
        _step(decoder(encoder(x)).pow(2).mean(), optimizer)
        loops.settle()
        yield _whole(encoder, decoder)


def scaled_together(loops: Loops, inputs: Any) -> Any:
    """As above: calls on all gradients of the optimizer at once, and its states."""
    encoder, decoder = (DistributedDataParallel(MLP(d), bucket_cap_mb=0.005) for d in (2, 4))
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, foreach=True)
    for module in (encoder, decoder):
        loops.attach(module, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    for k, x in enumerate(inputs):
        scaler.scale(decoder(encoder(x)).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        loops.settle()
        if k == 3:
            kept = copy.deepcopy(loops.state(optimizer))
    loops.load(optimizer, kept)
    scaler.scale(decoder(encoder(x)).pow(2).mean()).backward()
    scaler.step(optimizer)
    loops.settle()
    yield _whole(encoder, decoder)
    for state in loops.state(optimizer)["state"].values():
        yield torch.cat([state["exp_avg"].flatten(), state["step"].reshape(1)])


def assigned(loops: Loops, inputs: Any) -> Any:
    """Code that assigns `.data`: clamps, and all parameters as views of one vector."""
    ddp = loops.start(MLP(4), _adam)
    for k, x in enumerate(inputs):
        _step(ddp(x).pow(2).mean(), loops.optimizers)
        loops.settle()
        if k % 2:
            for parameter in list(ddp.parameters())[k:]:
                parameter.data = parameter.data.clamp(-0.2, 0.2)
        elif k == 2:
            vector_to_parameters(parameters_to_vector(ddp.parameters()) * 0.9, ddp.parameters())
        yield _whole(ddp)


def between(loops: Loops, inputs: Any) -> Any:
    """Two optimizers of one model, a forward without gradients between them, one rank saving."""

    def optimizers(ddp: nn.Module) -> Any:
        own = list(ddp.parameters())
        return [
            torch.optim.SGD(own[::2], lr=0.1),
            torch.optim.AdamW([{"params": own[1::4]}, {"params": own[3::4], "lr": 0.01}]),
        ]

    ddp = loops.start(MLP(4), optimizers)
    for k, x in enumerate(inputs):
        for optimizer in loops.optimizers:
            optimizer.zero_grad()
        ddp(x).pow(2).mean().backward()
        for optimizer in loops.optimizers:
            optimizer.step()
            with torch.no_grad():
                yield ddp(x) if k % 2 else ddp.module(x)
            if dist.get_rank() == 0:
                ddp.module.state_dict()
            dist.barrier()
        loops.settle()
        yield _whole(ddp)


def thawed(loops: Loops, inputs: Any) -> Any:
    """A layer frozen when the algorithm is attached and trained later, and the reverse."""
    model = MLP(4)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005, find_unused_parameters=True)
    layers: Any = model.layers
    layers[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in ddp.parameters() if p.requires_grad], lr=0.05)
    loops.attach(ddp, optimizer)
    for k, x in enumerate(inputs):
        if k == 2:
            layers[1].requires_grad_(True)
            layers[2].requires_grad_(False)
            optimizer.add_param_group({"params": [*layers[1].parameters()], "lr": 0.01})
        _step(ddp(x).pow(2).mean(), optimizer)
        loops.settle()
        yield _whole(ddp)


def evaluating(loops: Loops, inputs: Any) -> Any:
    """Training in eval mode, as with batch norm's statistics frozen."""
    ddp = loops.start(nn.Sequential(MLP(2), nn.BatchNorm1d(WIDTH), MLP(2)), _adam)
    ddp.eval()
    for x in inputs:
        _step(ddp(x).pow(2).mean(), loops.optimizers)
        loops.settle()
        yield _whole(ddp)


def averages(loops: Loops, inputs: Any) -> Any:
    """An average of the weights after each step, and clamps in place."""
    ddp = loops.start(MLP(4), _adam)
    average = torch.optim.swa_utils.AveragedModel(ddp.module)
    for k, x in enumerate(inputs):
        _step(ddp(x).pow(2).mean(), loops.optimizers)
        loops.settle()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.clamp_(-0.2 + k / 50, 0.2)
            for group in loops.optimizers.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)
        average.update_parameters(ddp.module)
        yield torch.cat([_whole(average.module), _whole(ddp)])


def clipped(loops: Loops, inputs: Any) -> Any:
    """By the largest element; one that is NaN is not lost."""
    ddp = loops.start(MLP(4), _sgd)
    for k, x in enumerate(inputs):
        loops.optimizers.zero_grad()
        ddp(x).pow(2).mean().backward()
        yield loops.clip(ddp, 0.01, float("inf"))
        if k == len(inputs) - 1:
            loops.optimizers.zero_grad()
            (ddp(x)[0, 0] * float("nan")).backward()
            yield loops.clip(ddp, 0.01, float("inf"))
        loops.optimizers.step()
        loops.settle()
    yield _whole(ddp)


class Normed(MLP):
    """Layers whose hooks compute their weights, before any other hook and after none."""

    def __init__(self) -> None:
        super().__init__(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.layers[0])
            nn.utils.spectral_norm(self.layers[1])  # type: ignore[arg-type]
        prune.l1_unstructured(self.layers[2], "weight", 0.3)  # type: ignore[no-untyped-call]


def hooked(loops: Loops, inputs: Any) -> Any:
    """On a network as slow as it can be: parameters are there when they are waited for."""
    ddp = loops.start(Normed(), _sgd)
    with mock.patch.object(Exchange, "all_gather", receive_late):
        for x in inputs:
            _step(ddp(x).pow(2).mean(), loops.optimizers)
        loops.settle()
    yield _whole(ddp)


def accumulated(loops: Loops, inputs: Any) -> Any:
    """Gradients of one rank on top of averaged ones, zeroed in place now and then."""
    ddp = loops.start(MLP(4), _sgd)
    for k, x in enumerate(inputs):
        ddp(x).pow(2).mean().backward()
        with ddp.no_sync():
            ddp(x * 2).mean().backward()
        if k % 3 == 2:
            (ddp if k % 2 else loops.optimizers).zero_grad(set_to_none=k % 2 == 0)
        ddp(x * 3).pow(2).mean().backward()
        loops.optimizers.step()
        if k % 2:
            loops.optimizers.zero_grad(set_to_none=False)
        loops.settle()
        yield _whole(ddp)


def raising(loops: Loops, inputs: Any) -> Any:
    """A batch whose backward raises is left out; gradients are zeroed, or kept."""
    ddp = loops.start(MLP(4), _sgd)
    raises = [False]

    def hook(_gradient: torch.Tensor) -> None:
        if raises[0]:
            raise ValueError

    layers: Any = ddp.module.layers
    layers[1].weight.register_hook(hook)
    for k, x in enumerate([*inputs, *inputs]):
        if k in (3, 6, 9):
            raises[0] = True
            with contextlib.suppress(ValueError), ddp.no_sync():
                ddp(x).pow(2).mean().backward()
            raises[0] = False
        if k != 6:
            loops.optimizers.zero_grad(set_to_none=k != 9)
        ddp(x).pow(2).mean().backward()
        loops.optimizers.step()
        loops.settle()
        yield _whole(ddp)


def adversarial(loops: Loops, inputs: Any) -> Any:
    """Inputs against the model, by a backward that DDP does not reduce; gradients of users' own."""
    ddp = loops.start(MLP(4), _sgd)
    for k, x in enumerate(inputs):
        ddp.module(x.requires_grad_()).pow(2).mean().backward()
        attack = (x + 0.1 * x.grad.sign()).detach()
        if k % 3 == 2:
            for parameter in ddp.parameters():
                parameter.grad = torch.zeros_like(parameter)
        else:
            loops.optimizers.zero_grad(set_to_none=k % 3 == 0)
        ddp(attack).pow(2).mean().backward()
        loops.optimizers.step()
        loops.settle()
        yield _whole(ddp)


def swapped(loops: Loops, inputs: Any) -> Any:
    """Two layers change places by `.data`, and one gets memory of its own."""
    ddp = loops.start(MLP(6), _sgd)
    first, second, third = [p for p in ddp.parameters() if p.dim() == 2][:3]
    for k, x in enumerate(inputs):
        _step(ddp(x).pow(2).mean(), loops.optimizers)
        loops.settle()
        if k == 2:
            first.data, second.data = second.data, first.data
            third.data = third.data * 0.5
        yield _whole(ddp)


def memory_of_processes(loops: Loops, inputs: Any) -> Any:
    """Another process may evaluate: parameters stay where it reads them."""
    model = MLP(4)
    model.share_memory()
    places = [p.data_ptr() for p in model.parameters()]
    ddp = loops.start(model, _adam)
    for x in inputs:
        _step(ddp(x).pow(2).mean(), loops.optimizers)
        loops.settle()
        assert places == [p.data_ptr() for p in model.parameters()]
        yield _whole(ddp)


def surgery(loops: Loops, inputs: Any) -> Any:
    """Gradients that are written by hand, and zeroed as in old programs."""
    ddp = loops.start(MLP(4), _sgd)
    for x in inputs:
        ddp(x).pow(2).mean().backward()
        if loops.handles:
            (handle,) = loops.handles
            handle.set_gradients({n: g.sign() for n, g in handle.full_gradients().items()})
        else:
            for p in ddp.parameters():
                p.grad = p.grad.sign()  # type: ignore[union-attr]
        loops.optimizers.step()
        for p in ddp.parameters():
            p.grad.data.zero_()  # type: ignore[union-attr]
        loops.settle()
        yield _whole(ddp)


def forgotten_momentum(loops: Loops, inputs: Any) -> Any:
    """States that a program writes, of an optimizer whose handle nobody keeps."""
    ddp = loops.start(MLP(4), _sgd)
    settle = loops.handles[0].wait if loops.algorithm == OVERLAP else lambda: None
    loops.handles.clear()
    gc.collect()
    first = next(ddp.parameters())
    for k, x in enumerate(inputs):
        _step(ddp(x).pow(2).mean(), loops.optimizers)
        settle()
        if k == 2:
            loops.optimizers.state[first] = {"momentum_buffer": torch.ones_like(first)}
        yield _whole(ddp)
    del settle


class Decayed(torch.optim.SGD):
    """Calls the update that it overrides, counts, changes its options, and zeroes gradients."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] *= 0.9
        self.zero_grad()


def own_step(loops: Loops, inputs: Any) -> Any:
    """As it is usual: gradients are zeroed nowhere else."""
    loops.declare(Decayed)
    ddp = loops.start(MLP(4), lambda ddp: Decayed(ddp.parameters(), lr=0.1, momentum=0.9))
    assert torch.optim.SGD(ddp.parameters())  # whose step has hooks from now on
    for k, x in enumerate(inputs):
        ddp(x).pow(2).mean().backward()
        loops.optimizers.step()
        assert loops.optimizers.num_steps == k + 1
        loops.settle()
        yield _whole(ddp) * loops.optimizers.param_groups[0]["lr"]


def graphs_across_updates(loops: Loops, inputs: Any) -> Any:
    """What is computed from one optimizer's parameters is differentiated after another's update."""

    def optimizers(ddp: Any) -> Any:
        layers = ddp.module.layers
        return [_sgd(part) for part in (layers[:3], layers[3:])]

    ddp = loops.start(MLP(6), optimizers)
    first, second = loops.optimizers
    weight = next(ddp.parameters())
    for x in inputs:
        _step(ddp(x).pow(2).mean(), second)
        loops.settle()
        penalty = weight.pow(2).sum()
        second.step()
        loops.settle()
        (gradient,) = torch.autograd.grad(penalty, weight)
        first.step()
        first.zero_grad()
        loops.settle()
        yield torch.cat([_whole(ddp), gradient.flatten()])


def attached_between_backwards(loops: Loops, inputs: Any) -> Any:
    """After one of each rank's own, and detached after such a one."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(4), bucket_cap_mb=0.005)
    optimizer = _sgd(ddp)
    with ddp.no_sync():
        ddp(inputs[0]).pow(2).mean().backward()
    loops.attach(ddp, optimizer)
    for x in inputs:
        ddp(x).pow(2).mean().backward()
        optimizer.step()
        loops.settle()
        yield _whole(ddp)
        optimizer.zero_grad()
    ddp(inputs[0]).pow(2).mean().backward()
    with ddp.no_sync():
        ddp(inputs[1]).pow(2).mean().backward()
    for handle in loops.handles:
        handle.detach()
    loops.handles.clear()
    yield torch.cat([p.grad.flatten() for p in ddp.parameters()])  # type: ignore[union-attr]


LOOPS: list[Loop] = [
    reentrant,
    temperature,
    two_modules,
    scaled_together,
    assigned,
    between,
    thawed,
    evaluating,
    averages,
    clipped,
    hooked,
    accumulated,
    raising,
    adversarial,
    swapped,
    memory_of_processes,
    surgery,
    forgotten_momentum,
    own_step,
    graphs_across_updates,
    attached_between_backwards,
]


def _train(rank: int, loop: Loop) -> Any:
    found = []
    for algorithm in (None, DEFAULT, OVERLAP):
        torch.manual_seed(0)
        loops = Loops(algorithm)
        kept: Iterator[torch.Tensor] = loop(loops, batches(rank, [(8, WIDTH)] * 6))
        found.append([value.clone() for value in kept])
        for handle in loops.handles:
            handle.detach()
    return found


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_everyday_loops_train_as_plain_ddp(ranks: Ranks, loop: Loop) -> None:
    """After each step, whatever reads parameters sees plain DDP's; rounding apart."""
    for plain, *others in ranks.run(_train, loop):
        for sharded in others:
            assert len(sharded) == len(plain)
            for actual, expected in zip(sharded, plain, strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def _copy_and_save(rank: int, algorithm: ShardedUpdate) -> Any:
    torch.manual_seed(0)
    loops = Loops(algorithm)
    ddp = loops.start(MLP(6), _adam)
    for x in batches(rank, [(8, WIDTH)] * 4):
        _step(ddp(x).pow(2).mean(), loops.optimizers)
    loops.settle()
    copied = copy.deepcopy(ddp.module)
    file, head = io.BytesIO(), io.BytesIO()
    torch.save(ddp.module, file)
    layers: Any = ddp.module.layers
    torch.save(layers[-1].state_dict(), head)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    whole = _whole(ddp)
    loops.handles[0].detach()
    _step(ddp(x).pow(2).mean(), loops.optimizers)
    states = [m.state_dict() for m in (copied, saved)]
    same = [torch.equal(_whole(m), whole) for m in (copied, saved)]
    return same, len(states), len(head.getvalue()), layers[-1].weight.nbytes


@pytest.mark.parametrize("algorithm", [DEFAULT, OVERLAP], ids=["", "behind forward"])
def test_modules_are_copied_and_saved_while_an_algorithm_is_attached(
    ranks: Ranks, algorithm: ShardedUpdate
) -> None:
    """A copy has nothing to do with the algorithm; a head is saved without its bucket."""
    for same, num_states, saved_bytes, own_bytes in ranks.run(_copy_and_save, algorithm):
        assert same == [True, True]
        assert num_states == 2
        assert saved_bytes < own_bytes + 3000


def _break(rank: int, how: str) -> Any:
    torch.manual_seed(0)
    loops = Loops(OVERLAP if how in ("written", "moved") else DEFAULT)
    ddp = loops.start(MLP(4), _sgd)
    first = next(ddp.parameters())
    said = []
    for k, x in enumerate(batches(rank, [(8, WIDTH)] * 6)):
        if k == 4 and how == "local":
            with ddp.no_sync():
                said.append(error_of(lambda x=x: _step(ddp(x).mean(), loops.optimizers)))
            said.append(error_of(lambda: loops.clip(ddp, 1.0, 2.0)))
            loops.optimizers.zero_grad()
        said.append(error_of(lambda x=x: _step(ddp(x).pow(2).mean(), loops.optimizers)))
        if (k, rank) == (3, 1):
            if how == "written":
                with torch.no_grad():
                    first.clamp_(-0.01, 0.01)
            if how == "moved":
                first.data = first.data.clone()
            if how == "shaped":
                first.data = first.data.t()
            if how == "groups":
                loops.optimizers.param_groups[0]["params"].pop()
    return said


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("written", "OptionError: on rank 1: layers.0.weight was written or moved after"),
        ("moved", "OptionError: on rank 1: layers.0.weight was written or moved after"),
        ("shaped", "OptionError: on rank 1: layers.0.weight was given memory of another shape"),
        ("groups", "AttachError: the optimizer's groups have other parameters"),
        ("local", "OptionError: on rank 0: layers.0.weight has a gradient that is not the average"),
    ],
)
def test_what_cannot_be_ordered_raises_on_all_ranks_before_the_update(
    ranks: Ranks, how: str, expected: str
) -> None:
    """Even if only one rank did it; the parameter and what to do are named."""
    found = ranks.run(_break, how)
    for said in found:
        assert said[:4] == ["nothing"] * 4
        for text in said[4:6] if how == "local" else said[4:5]:
            assert text.startswith(expected)
        assert said == found[0]
