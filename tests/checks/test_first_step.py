"""`config.verify` verifies each module before its first step, and never ends right training."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from ddpopt import config
from ddpopt.checks.verify import verify
from ddpopt.errors import DDPMode, PeerError, VerificationError
from ddpopt.planning.batch import tensors_of
from ddpopt.split import state
from tests.support.beside import Beside, arguments_for, compiled
from tests.support.logs import logged
from tests.support.models import MLP, WAYS, Blocks, assert_equal_states, batches, state_of
from tests.support.on_ranks import gather, on_ranks
from tests.support.releases import needs_delayed_parameters
from tests.support.wrong_compiler import scale_a_gradient

CAPS = {"bucket_cap_mb": 0.03}


def _compiled(module: nn.Module, **options: Any) -> Any:
    return compiled(DistributedDataParallel(module, **CAPS), **options)


class _OwnForward(DistributedDataParallel):
    """A DDP with a forward of its own, as trainers have them."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))


@pytest.mark.quick("False")
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_flag_verifies_where_ddps_forward_is_another(one_rank: None, is_wrapped: bool) -> None:
    """DDP's forward is a subclass's, or a tool has wrapped it."""
    kind = DistributedDataParallel if is_wrapped else _OwnForward
    forward = DistributedDataParallel.forward

    @functools.wraps(forward)
    def wrapped(*inputs: Any, **kwargs: Any) -> Any:
        return forward(*inputs, **kwargs)

    model = compiled(kind(MLP()), inner=scale_a_gradient)
    with (
        mock.patch.object(DistributedDataParallel, "forward", wrapped if is_wrapped else forward),
        config.patch(verify=True),
        pytest.raises(VerificationError),
    ):
        model(torch.ones(8, 64)).sum().backward()


@on_ranks(2)
@pytest.mark.quick("torch.compile(DDP(m))")
@pytest.mark.parametrize("way", list(WAYS)[:2])
def test_the_flag_verifies_before_the_first_step(rank: int, way: str) -> None:
    """Right code trains on; wrong code on one rank stops all with one error, before any step."""
    inputs = batches(rank, [(8, 64)] * 3)
    with config.patch(verify=True), logged("warning") as lines:
        Beside(MLP(), ddp_options=CAPS, way=way).train(inputs)
        assert not lines
        torch._dynamo.reset()
        inner = scale_a_gradient if rank == 0 else "aot_eager"
        wrong = Beside(MLP(), ddp_options=CAPS, way=way, inner=inner)
        with pytest.raises(VerificationError) as caught:
            wrong.train(inputs)
    assert all(p.grad is None for p in wrong.ddp.parameters())
    assert len(set(gather(str(caught.value)))) == 1


def test_the_flag_verifies_a_model_once_and_leaves_others_alone(one_rank: None) -> None:
    """Neither eager DDP nor an evaluation is verified."""
    eager, model = DistributedDataParallel(MLP(), **CAPS), _compiled(MLP())
    x = torch.randn(8, 64)
    with (
        config.patch(verify=True),
        mock.patch("ddpopt.checks.first_step.verify", side_effect=verify) as calls,
    ):
        eager(x).sum().backward()
        with torch.no_grad():
            model(x)
        assert not calls.called
        for _ in range(3):
            model(x).sum().backward()
    assert calls.call_count == 1


AROUND: dict[str, Callable[..., Any]] = {
    "DDP": torch.compile,
    "a function": lambda ddp, **options: torch.compile(lambda x: ddp(x) * 2, **options),
}


@pytest.mark.quick("DDP-None")
@pytest.mark.parametrize(
    ("what", "dynamic"), [("DDP", None), ("DDP", False), ("DDP", True), ("a function", True)]
)
def test_the_flag_verifies_the_code_that_training_runs(
    one_rank: None, what: str, dynamic: bool | None
) -> None:
    """Training compiles nothing after it, whatever is compiled around DDP, as dynamic or not."""
    ddp, x = DistributedDataParallel(MLP(), **CAPS), torch.randn(8, 64)
    num_graphs = []

    def counting(*args: Any) -> Any:
        verdict = verify(*args)
        num_graphs.append(counters["stats"]["unique_graphs"])
        return verdict

    model = AROUND[what](ddp, **arguments_for(dynamic=dynamic))
    with (
        config.patch(verify=True),
        mock.patch("ddpopt.checks.first_step.verify", counting),
        logged("warning") as lines,
    ):
        for _ in range(3):
            model(x).sum().backward()
    assert not lines
    num_of_function = 1 if what == "a function" else 0  # its own graph is compiled after DDP's
    assert counters["stats"]["unique_graphs"] == num_graphs[0] + num_of_function
    assert len(num_graphs) == 1


@pytest.mark.quick("DDP")
@pytest.mark.parametrize("what", AROUND)
def test_the_flag_finds_wrong_code_before_the_first_backward(one_rank: None, what: str) -> None:
    ddp = DistributedDataParallel(MLP(), **CAPS)
    model = AROUND[what](ddp, **arguments_for(inner=scale_a_gradient))
    with config.patch(verify=True), pytest.raises(VerificationError):
        model(torch.ones(8, 64))


@pytest.mark.parametrize("call", ["warmup.gather_distinct", "verify.gather_on_rank_0"])
def test_a_rank_that_is_lost_within_a_collective_ends_training(one_rank: None, call: str) -> None:
    """The others are out of step then: training's next collective could get the leftovers."""
    lost = mock.patch(f"ddpopt.checks.{call}", side_effect=PeerError("rank 1 is lost"))
    with lost, config.patch(verify=True), pytest.raises(PeerError, match="is lost"):
        _compiled(MLP())(torch.randn(8, 64))


def test_the_flag_gets_arguments_by_position_and_by_keyword(one_rank: None) -> None:
    model = _compiled(Scaled())
    seen = []

    def noting(*args: Any) -> Any:
        seen.append(args[1])
        return verify(*args)

    x, scale = torch.randn(8, 64), Scale()
    with (
        config.patch(verify=True),
        mock.patch("ddpopt.checks.first_step.verify", noting),
        logged("warning") as lines,
    ):
        model(x, scale=scale).sum().backward()
    assert not lines
    ((arguments, keywords),) = seen
    assert arguments[0] is x
    assert keywords == {"scale": scale}


def _delayed(module: nn.Module) -> dict[str, Any]:
    named = list(module.named_parameters())
    return {"delay_all_reduce_named_params": named[:2], "param_to_hook_all_reduce": named[-1][1]}


@on_ranks(2)
@pytest.mark.quick("torch.compile(DDP(m))")
@needs_delayed_parameters
@pytest.mark.parametrize("way", WAYS)
def test_the_flag_names_the_mode_in_which_it_cannot_verify(rank: int, way: str) -> None:
    """Each rank is warned once for each module, and trains as without the flag."""
    module = Blocks()
    eager = copy.deepcopy(module)
    model = WAYS[way](module, arguments_for, {**CAPS, **_delayed(module)})
    expected = DistributedDataParallel(eager, **CAPS, **_delayed(eager))
    with config.patch(verify=True), logged("warning") as lines:
        for x in batches(rank, [(8, 64)] * 3):
            model(x).square().mean().backward()
            expected(x).square().mean().backward()
    # Nobody waits for the delayed reduction, that of the first two.
    for p, reference in list(zip(module.parameters(), eager.parameters(), strict=True))[2:]:
        torch.testing.assert_close(p.grad, reference.grad)
    (line,) = [line for line in lines if line.startswith("ddpopt.config.verify")]
    assert DDPMode.DELAYED_PARAMETERS.value in line


# ---- What the flag cannot verify does not end training ----------------------------------------

Make = Callable[..., tuple[DistributedDataParallel, Any]]


class Scale:
    """An input that is no tensor."""

    def __init__(self, value: float = 0.5) -> None:
        self.value = value


class Locked(Scale):
    """One that `copy.deepcopy` does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Forgetful(Scale):
    """One whose copy is of no use."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return Scale(None)  # type: ignore[arg-type]


class Counting(Scale):
    """One whose copies share a state."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.value *= 2
        return self


class Scaled(MLP):
    """Takes a tensor and a scale."""

    def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        return super().forward(x) * scale.value


class Speaking(Scaled):
    """Its forward communicates: the mean of two ranks' inputs is that of both."""

    def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        return super().forward(_mean_over_ranks(x), scale)


@torch.compiler.disable
def _mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x := x.clone())
    return x / dist.get_world_size()


class Summed(MLP):
    """Takes an iterable of tensors."""

    def forward(self, parts: Any) -> torch.Tensor:
        return super().forward(sum(parts))


class Odd(nn.Module):
    """A model with batch statistics, and layers that subclasses use in their ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(self.first(x)).relu())


class WithLock(Odd):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Unique(Odd):
    """Its copy is the model itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class Bound(Odd):
    """A function of it holds it, and would in a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.start = lambda x: self.norm(self.first(x))

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.start(x).relu())


class Sharing(Odd):
    """Its copies have the same `shared` tensors, as those of a large frozen part for EMA."""

    def __init__(self, *shared: str) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.shared = shared

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = object.__new__(Sharing)
        tensors = self.state_dict(keep_vars=True)
        memo[id(self)] = made
        for name in self.shared:
            memo[id(tensors[name])] = tensors[name]
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class BoundStatistics(Odd):
    """A function of it holds a part that has no parameters, but buffers."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(64, affine=False)
        self.norm = norm
        self.start = lambda x: norm(x).relu()

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.start(self.first(x)))


class Opaque(Odd):
    """Its output shows no tensors."""

    def forward(self, x: torch.Tensor) -> Any:
        value = super().forward(x)
        return lambda: value


class TwoHeads(Odd):
    """Its loss does not depend on all parameters; what trains it adds another."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norm(self.first(x)).relu()
        return {"loss": x.square().mean(), "extra": self.last(x)}


class LossOfEach(Odd):
    """Has a loss for each sample."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": super().forward(x).square().mean(1)}


class Linked(Odd):
    """Its output is an object that refers to itself."""

    def forward(self, x: torch.Tensor) -> Any:
        output = Scale()
        output.itself, output.value = output, super().forward(x)
        return output


def _loss_of(output: Any) -> torch.Tensor:
    output = output() if callable(output) else output
    return sum(t.square().mean() for t in tensors_of(output))


def _steps(ddp: DistributedDataParallel, model: Any, inputs: Any) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1)
    for arguments in inputs:
        optimizer.zero_grad()
        _loss_of(model(*arguments)).backward()
        optimizer.step()
    return state_of(ddp)


def _with_inputs(model: type[nn.Module], change: Callable[[int, Any], tuple[Any, ...]]) -> Any:
    def run(rank: int, make: Make) -> dict[str, torch.Tensor]:
        ddp, compiled = make(model())
        return _steps(ddp, compiled, [change(rank, x) for x in batches(rank, [(8, 64)] * 2)])

    return run


def _of(model: Callable[[], nn.Module]) -> Any:
    return _with_inputs(model, lambda rank, x: (x,))  # type: ignore[arg-type]


def _no_leaf(rank: int, x: torch.Tensor) -> tuple[Any, ...]:
    return (x.clone().requires_grad_() * 2,)


def _shared(rank: int, x: torch.Tensor) -> tuple[Any, ...]:
    return ([x, x.flip(0), x[:]],)


def _without_sync(rank: int, make: Make) -> dict[str, torch.Tensor]:
    ddp, compiled = make(Odd())
    with ddp.no_sync():
        compiled(*batches(rank, [(8, 64)])).sum().backward()
    return _steps(ddp, compiled, [batches(rank, [(8, 64)])] * 2)


def _two_forwards(rank: int, make: Make) -> dict[str, torch.Tensor]:
    ddp, compiled = make(MLP())
    one, two = (compiled(x) for x in batches(rank, [(8, 64)] * 2))
    (one.sum() + two.sum()).backward()
    return state_of(ddp)


def _autocast(rank: int, make: Make) -> dict[str, torch.Tensor]:
    ddp, compiled = make(Odd())
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(*batches(rank, [(8, 64)])).float().sum()
    loss.backward()
    return state_of(ddp)


def _frozen_at_first(rank: int, make: Make) -> dict[str, torch.Tensor]:
    """Freeze the model in its first step, as a discriminator that a generator trains through."""
    ddp, compiled = make(Odd())
    ddp.requires_grad_(False)
    with ddp.no_sync():
        compiled(*_no_leaf(rank, *batches(rank, [(8, 64)]))).sum().backward()
    ddp.requires_grad_(True)
    return _steps(ddp, compiled, [batches(rank, [(8, 64)])] * 2)


def _thawed_later(rank: int, make: Make) -> dict[str, torch.Tensor]:
    """Copies share a part that DDP does not reduce: it was frozen when DDP was made."""
    ddp, compiled = make(Sharing("first.weight", "first.bias"))
    ddp.module.first.requires_grad_(True)
    return _steps(ddp, compiled, [batches(rank, [(8, 64)])] * 2)


def _patched(rank: int, make: Make) -> dict[str, torch.Tensor]:
    """Redirect one forward, as Lightning does to `training_step`."""
    module = Odd()
    ddp, compiled = make(module)

    def redirected(x: torch.Tensor) -> torch.Tensor:
        del module.forward
        return module(x) * 2

    module.forward = redirected  # type: ignore[method-assign]
    return _steps(ddp, compiled, [batches(rank, [(8, 64)])])


def _joined(rank: int, make: Make) -> dict[str, torch.Tensor]:
    ddp, compiled = make(MLP())
    with ddp.join():
        return _steps(ddp, compiled, [batches(rank, [(8, 64)])] * (1 + rank))


@torch.compile(**arguments_for())
def _compiled_elsewhere(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


class CallingElsewhere(nn.Module):
    """A model of whose compiled function nothing is seen before it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _compiled_elsewhere(self.inner, x)


def _elsewhere(rank: int, make: Make) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(CallingElsewhere(), **CAPS)
    return _steps(ddp, ddp, [batches(rank, [(8, 64)])] * 2)


def _known(rank: int, make: Make) -> dict[str, torch.Tensor]:
    """A module that refers to the DDP module around it."""
    ddp, compiled = make(Odd())
    ddp.module.wrappers = [ddp]
    return _steps(ddp, compiled, [batches(rank, [(8, 64)])] * 2)


def _weight_norm() -> nn.Module:
    model = Odd()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.first)
    return model


VERIFIED = {
    "inputs are no leaves": _with_inputs(MLP, _no_leaf),
    "inputs share memory": _with_inputs(Summed, _shared),
    "weight norm": _of(_weight_norm),
    "no_sync": _without_sync,
    "two forwards": _two_forwards,
    "autocast": _autocast,
    "frozen at first": _frozen_at_first,
    "a loss for each sample": _of(LossOfEach),
    "an output that refers to itself": _of(Linked),
    "a function elsewhere": _elsewhere,
    "a reference to DDP": _known,
    "copies that share what is frozen": _of(lambda: Sharing("first.weight", "first.bias")),
}
WARNED = {
    "a generator": (_with_inputs(Summed, lambda _, x: ((t for t in (x, x)),)), "generator"),
    "a lock in a batch": (_with_inputs(Scaled, lambda _, x: (x, Locked())), "lock"),
    "a lock on rank 1": (
        _with_inputs(Speaking, lambda rank, x: (x, Locked() if rank else Scale())),
        "the batch cannot be copied",
    ),
    "a forward that raises": (_with_inputs(Scaled, lambda _, x: (x, Forgetful())), "TypeError"),
    "a lock in the module": (_of(WithLock), "lock"),
    "a copy that is the module": (_of(Unique), "uses the original's"),
    "copies that share a buffer": (
        _of(lambda: Sharing("norm.running_mean")),
        "uses the original's norm.running_mean",
    ),
    "copies that share what was thawed": (_thawed_later, "uses the original's first."),
    "a function that holds it": (_of(Bound), "uses the original's"),
    "a function that holds buffers": (
        _of(BoundStatistics),
        "uses the original's norm.running_mean",
    ),
    "a forward that is patched": (_patched, "is replaced by a function that holds the module"),
    "no tensors": (_of(Opaque), "give a loss function"),
    "a part of the loss": (_of(TwoHeads), "Expected to have finished reduction"),
    "nothing compiled": (_of(lambda: nn.Sequential(nn.Linear(64, 64))), "compiled nothing"),
    "join": (_joined, "join() context"),
}


def _train_twice(rank: int, case: Any) -> tuple[int, list[str]]:
    """Train with the flag and without; return how often it verified, and what it warned of."""
    states, rng = [], []
    num_verified = 0

    def make(module: nn.Module) -> tuple[DistributedDataParallel, Any]:
        model = _compiled(module, split="backward")
        return state.ddp_of(model), model

    def counting(*args: Any) -> Any:
        nonlocal num_verified
        verdict = verify(*args)
        num_verified += 1
        return verdict

    for flag in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with (
            config.patch(verify=flag),
            logged("warning") as lines,
            mock.patch("ddpopt.checks.first_step.verify", counting),
        ):
            states.append(case(rank, make))
        rng.append(torch.get_rng_state())
    assert_equal_states(*states, bitwise=True)
    assert torch.equal(*rng)
    return num_verified, [line for line in lines if line.startswith("ddpopt.config.verify")]


@on_ranks(2)
@pytest.mark.quick("inputs are no leaves")
@pytest.mark.parametrize("name", VERIFIED)
def test_the_flag_verifies_and_changes_nothing(rank: int, name: str) -> None:
    """Training with the flag is bitwise the one without it, and no warning is given."""
    assert _train_twice(rank, VERIFIED[name]) == (1, [])


@on_ranks(2)
@pytest.mark.quick("a generator")
@pytest.mark.parametrize("name", WARNED)
def test_what_the_flag_cannot_verify_is_trained(rank: int, name: str) -> None:
    """Training is bitwise as without the flag; one warning on each rank says why, in a line."""
    case, why = WARNED[name]
    _, (line,) = _train_twice(rank, case)
    assert "\n" not in line
    assert any(why in text for text in gather(line))


@on_ranks(2)
def test_a_model_that_differs_from_itself_is_not_blamed_on_us(rank: int) -> None:
    """Where eager gives something else the second time, compiled code may as well."""
    model = _compiled(Scaled(), inner="eager", dynamic=True)
    with config.patch(verify=True), logged("warning") as lines:
        model(*batches(rank, [(8, 64)]), Counting()).sum().backward()
    assert any("eager differs from itself" in line for line in lines), lines
