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
from ddpopt.errors import DDPMode, VerificationError
from ddpopt.planning.batch import tensors_of
from ddpopt.split import state
from tests.support.logs import logged
from tests.support.models import (
    MLP,
    WAYS,
    Blocks,
    assert_equal_states,
    batches,
    state_of,
    train,
    twins,
)
from tests.support.ranks import Ranks
from tests.support.releases import needs_delayed_parameters
from tests.support.wrong_compiler import scale_a_gradient

CAP_MB = 0.03


def _compiled(module: nn.Module) -> Any:
    ddp = DistributedDataParallel(module, bucket_cap_mb=CAP_MB)
    options = {"inner": "aot_eager", "split": "backward"}
    return torch.compile(ddp, backend="ddpopt", options=options)


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

    model = torch.compile(kind(MLP()), backend="ddpopt", options={"inner": scale_a_gradient})
    with (
        mock.patch.object(DistributedDataParallel, "forward", wrapped if is_wrapped else forward),
        config.patch(verify=True),
        pytest.raises(VerificationError),
    ):
        model(torch.ones(8, 64)).sum().backward()


def _train_verified(rank: int, is_outer: bool, is_broken: bool) -> str:
    """Train with `config.verify`; return the error, "" if it trains as eager does."""
    torch.manual_seed(0)
    inner = scale_a_gradient if is_broken and rank == 0 else "aot_eager"
    options = {"backend": "ddpopt", "options": {"inner": inner}}
    module = MLP()
    ddp, expected = twins(module, bucket_cap_mb=CAP_MB)
    if is_outer:
        model = torch.compile(ddp, **options)
    else:
        model = ddp = DistributedDataParallel(
            torch.compile(copy.deepcopy(module), **options), bucket_cap_mb=CAP_MB
        )
    inputs = batches(rank, [(8, 64)] * 3)
    with config.patch(verify=True), logged("warning") as lines:
        try:
            compiled = train(ddp, inputs, model)
        except VerificationError as error:
            assert all(p.grad is None for p in ddp.parameters())
            return str(error)
    assert not lines
    compiled = {name.replace("_orig_mod.", ""): value for name, value in compiled.items()}
    assert_equal_states(compiled, train(expected, inputs))
    return ""


@pytest.mark.quick("True")
@pytest.mark.parametrize("is_outer", [True, False])
def test_the_flag_verifies_before_the_first_step(ranks: Ranks, is_outer: bool) -> None:
    """Right code trains on; wrong code on one rank stops all with one error, before any step."""
    assert ranks.run(_train_verified, is_outer, False) == ["", ""]
    first, second = ranks.run(_train_verified, is_outer, True)
    assert first == second
    assert "verification FAILED" in first
    assert "training was stopped before its first step" in first


@pytest.mark.usefixtures("one_rank")
def test_the_flag_verifies_a_model_once_and_leaves_others_alone() -> None:
    """Neither eager DDP nor an evaluation is verified."""
    ddp, other = twins(MLP(), bucket_cap_mb=CAP_MB)
    model = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    x = torch.randn(8, 64)
    with (
        config.patch(verify=True),
        mock.patch("ddpopt.checks.first_step.verify", side_effect=verify) as calls,
    ):
        other(x).sum().backward()
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


@pytest.mark.quick("None-DDP")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("what", AROUND)
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_the_flag_verifies_the_code_that_training_runs(what: str, dynamic: bool | None) -> None:
    """Training compiles nothing after it, whatever is compiled around DDP, as dynamic or not."""
    (ddp, _), x = twins(MLP(), bucket_cap_mb=CAP_MB), torch.randn(8, 64)
    num_graphs = []

    def counting(*args: Any) -> Any:
        verdict = verify(*args)
        num_graphs.append(counters["stats"]["unique_graphs"])
        return verdict

    options = {"backend": "ddpopt", "options": {"inner": "aot_eager"}, "dynamic": dynamic}
    model = AROUND[what](ddp, **options)
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
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("what", AROUND)
def test_the_flag_finds_wrong_code_before_the_first_backward(what: str) -> None:
    """It does so whether DDP or a function around it is compiled."""
    ddp, _ = twins(MLP(), bucket_cap_mb=CAP_MB)
    model = AROUND[what](ddp, backend="ddpopt", options={"inner": scale_a_gradient})
    with config.patch(verify=True), pytest.raises(VerificationError):
        model(torch.ones(8, 64))


@pytest.mark.usefixtures("one_rank")
def test_the_flag_gets_all_arguments() -> None:
    """It gets those that are given by position, and those by keyword."""
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


@pytest.mark.quick("torch.compile(DDP(m))")
@needs_delayed_parameters
@pytest.mark.parametrize("way", WAYS)
def test_the_flag_names_the_mode_in_which_it_cannot_verify(ranks: Ranks, way: str) -> None:
    """Each rank is warned once for each module, and trains as without the flag."""
    for lines, is_right in ranks.run(_train_delayed, way):
        assert is_right
        assert len(lines) == 1, lines
        assert f"cannot be rehearsed: {DDPMode.DELAYED_PARAMETERS.value}" in lines[0]
        assert "to verify it, train without that mode" in lines[0]


def _train_delayed(rank: int, way: str) -> tuple[list[str], bool]:
    module = Blocks()
    eager = copy.deepcopy(module)
    options = {"backend": "ddpopt", "options": {"inner": "aot_eager"}}
    caps = {"bucket_cap_mb": CAP_MB}
    model = WAYS[way](module, lambda: options, {**caps, **_delayed(module)})
    expected = DistributedDataParallel(eager, **caps, **_delayed(eager))
    with config.patch(verify=True), logged("warning") as lines:
        for x in batches(rank, [(8, 64)] * 3):
            model(x).square().mean().backward()
            expected(x).square().mean().backward()
    # Nobody waits for the delayed reduction, that of the first two.
    pairs = list(zip(module.parameters(), eager.parameters(), strict=True))[2:]
    is_right = all(torch.allclose(p.grad, reference.grad) for p, reference in pairs)
    return [line for line in lines if line.startswith("ddpopt.config.verify")], is_right


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


@torch.compile(backend="ddpopt", options={"inner": "aot_eager"})
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
    ddp = DistributedDataParallel(CallingElsewhere(), bucket_cap_mb=CAP_MB)
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


def _train_twice(rank: int, name: str) -> tuple[int, list[str]]:
    """Train with the flag and without; return how often it verified, and what it warned of."""
    case = VERIFIED.get(name) or WARNED[name][0]
    states, rng = [], []
    num_verified = 0

    def make(module: nn.Module) -> tuple[DistributedDataParallel, Any]:
        model = _compiled(module)
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


@pytest.mark.quick("inputs are no leaves")
@pytest.mark.parametrize("name", VERIFIED)
def test_the_flag_verifies_and_changes_nothing(ranks: Ranks, name: str) -> None:
    """Training with the flag is bitwise the one without it, and no warning is given."""
    assert ranks.run(_train_twice, name) == [(1, []), (1, [])]


@pytest.mark.quick("a generator")
@pytest.mark.parametrize("name", WARNED)
def test_what_the_flag_cannot_verify_is_trained(ranks: Ranks, name: str) -> None:
    """It is trained bitwise as without the flag; one warning on each rank says why, in a line."""
    lines = [line for _, [line] in ranks.run(_train_twice, name)]
    assert any(WARNED[name][1] in line for line in lines), lines
    for line in lines:
        assert "training goes on" in line
        assert "\n" not in line


def _train_unrepeatably(rank: int) -> list[str]:
    ddp = DistributedDataParallel(Scaled(), bucket_cap_mb=CAP_MB)
    model = torch.compile(ddp, backend="ddpopt", options={"inner": "eager"}, dynamic=True)
    with config.patch(verify=True), logged("warning") as lines:
        model(*batches(rank, [(8, 64)]), Counting()).sum().backward()
    return lines


def test_a_model_that_differs_from_itself_is_not_blamed_on_us(ranks: Ranks) -> None:
    """Where eager gives something else the second time, compiled code may as well."""
    for lines in ranks.run(_train_unrepeatably):
        assert any("eager differs from itself" in line for line in lines), lines
