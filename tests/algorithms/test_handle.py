"""`Handle`: what a step is, what it leaves when it goes, and what fails behind a backward."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import ddpopt
from ddpopt import _torch
from ddpopt.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    Handle,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
    attach,
)
from ddpopt.algorithms.handle import BackgroundHandle
from ddpopt.errors import AttachError, OptionError, PeerError
from ddpopt.inspection.metrics import source_of
from ddpopt.planning import tuner
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import OwnRanks, Ranks, error_of
from tests.system.documents import blocks

FLAT = Decentralized(hierarchical=False)


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def _setting(algorithm: Any = FLAT, **ddp_options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2), **ddp_options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return ddp, optimizer, attach(ddp, optimizer, algorithm)


# ---- what a step is ---------------------------------------------------------------------------


def _count(rank: int) -> list[tuple[str, int]]:
    ddp, optimizer, handle = _setting(Decentralized(hierarchical=False))
    x = batches(rank, [(4, WIDTH)])[0]
    seen = []

    def note(what: str) -> None:
        seen.append((what, handle.num_steps))

    def step() -> None:
        ddp(x).sum().backward()
        optimizer.step()

    step()
    note("a step")
    ddp.eval()
    with torch.no_grad():
        ddp(x)
    ddp(x)
    ddp.train()
    with torch.no_grad():
        ddp(x)
    note("evaluation")
    with ddp.no_sync():
        ddp(x).sum().backward()
    note("a micro-batch")
    step()
    note("accumulated")
    (ddp(x).sum() + ddp(x).sum()).backward()
    optimizer.step()
    note("two forwards")
    ddp(x)
    step()
    note("a forward without backward")
    with handle.paused():
        ddp(x)
        with handle.paused():
            ddp(x)
    note("paused")
    ddp(x).sum().backward()  # and no update, as when GradScaler finds inf on this rank
    step()
    note("an update was skipped")
    handle.detach()
    return seen


def test_only_training_forwards_that_are_followed_by_a_backward_count(ranks: Ranks) -> None:
    for seen in ranks.run(_count):
        assert seen == [
            ("a step", 1),
            ("evaluation", 1),
            ("a micro-batch", 1),
            ("accumulated", 2),
            ("two forwards", 3),
            ("a forward without backward", 4),
            ("paused", 4),
            ("an update was skipped", 6),
        ]


def _skip_update(rank: int) -> torch.Tensor:
    """Rank 1's second update is skipped; its averages must go on."""
    ddp, optimizer, handle = _setting(Decentralized(hierarchical=False))
    for k, x in enumerate(batches(rank, [(4, WIDTH)] * 4)):
        optimizer.zero_grad()
        ddp(x).pow(2).sum().backward()
        if (rank, k) != (1, 1):
            optimizer.step()
    assert handle.num_communications == 4
    handle.detach()
    return _flat(ddp)


def test_ranks_whose_updates_are_skipped_go_on_averaging(ranks: Ranks) -> None:
    first, second = ranks.run(_skip_update)
    assert torch.equal(first, second)
    assert first.isfinite().all()


ALL: dict[str, Any] = {
    "Decentralized": FLAT,
    "LowPrecisionDecentralized": LowPrecisionDecentralized(hierarchical=False),
    "ByteGrad": ByteGrad(hierarchical=False),
    "QAdam": QAdam(hierarchical=False),
    "AsyncModelAverage": AsyncModelAverage(sync_interval_ms=1),
}


def _attached(name: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2))
    kind = QAdamOptimizer if name == "QAdam" else torch.optim.SGD
    optimizer = kind(ddp.parameters(), lr=0.1)
    return ddp, optimizer, attach(ddp, optimizer, ALL[name])


def _train_in_eval(rank: int, name: str) -> torch.Tensor:
    """As with a frozen batch norm; and evaluations that forgot `no_grad` do not count."""
    ddp, optimizer, handle = _attached(name)
    ddp.eval()
    for step, x in enumerate(batches(rank, [(4, WIDTH)] * 3), 1):
        ddp(x)
        assert handle.num_steps == step - 1
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        assert handle.num_steps == step
    end_s = time.monotonic() + 60
    while not handle.num_communications and time.monotonic() < end_s:  # in the background
        time.sleep(0.001)
    assert handle.num_communications > 0
    handle.detach()
    return _flat(ddp)


@pytest.mark.parametrize("name", ALL)
def test_a_backward_in_eval_mode_makes_a_step(ranks: Ranks, name: str) -> None:
    assert torch.equal(*ranks.run(_train_in_eval, name))


def _skip_in_eval(rank: int) -> torch.Tensor:
    """An update is skipped in eval mode: the average is taken over between two backwards."""
    ddp, optimizer, handle = _setting()
    ddp.eval()
    for k, x in enumerate(batches(rank, [(4, WIDTH)] * 3)):
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        if k != 1:
            optimizer.step()
    assert handle.num_steps == handle.num_communications == 3
    handle.detach()
    return _flat(ddp)


def test_an_update_may_be_skipped_in_eval_mode(ranks: Ranks) -> None:
    assert torch.equal(*ranks.run(_skip_in_eval))


@pytest.mark.parametrize("name", ALL)
def test_joins_forwards_are_refused(one_rank: None, name: str) -> None:
    """On a rank without inputs an algorithm would not take part."""
    ddp, _, handle = _attached(name)
    with pytest.raises(AttachError, match=rf"{name} cannot work in DDP's join\(\)"), ddp.join():
        ddp(torch.ones(2, WIDTH))
    handle.detach()


def _two_optimizers(rank: int) -> tuple[bool, str]:
    """One optimizer for each layer is as one for both; a closure is refused."""
    results = []
    for is_one in (True, False):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(MLP(2))
        parts = [ddp] if is_one else list(ddp.module.layers)
        groups = [list(part.parameters()) for part in parts]
        optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
        handle = attach(ddp, optimizers, FLAT)
        for x in batches(rank, [(4, WIDTH)] * 3):
            ddp(x).pow(2).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert handle.num_steps == 3
        said = error_of(lambda: optimizers[0].step(lambda: 0.0))  # noqa: B023  # called at once
        handle.detach()
        results.append(_flat(ddp))
    return torch.equal(*results), said


def test_several_optimizers_make_one_step_and_closures_are_refused(ranks: Ranks) -> None:
    for is_equal, said in ranks.run(_two_optimizers):
        assert is_equal
        assert said.startswith("OptionError: Decentralized cannot work with a closure")


class Watching(Handle):
    """Notes how often a backward ended, and the gradients that it then had."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ends: list[list[torch.Tensor]] = []

    def reduce(self, bucket: Any) -> Any:
        return self.allreduce(bucket)

    def end_backward(self) -> None:
        parameters = list(self.training.ddp.module.parameters())
        self.ends.append([p.grad.clone() for p in parameters if p.grad is not None])


@dataclass(frozen=True)
class Watched(Algorithm[Watching]):
    handle_type = Watching


class Nested(MLP):
    """An MLP whose layers but the first may be recomputed, in backwards of their own.

    With a layer of another dtype, so that DDP's first backward has two buckets.
    """

    def __init__(self, is_recomputed: bool) -> None:
        super().__init__(4)
        self.layers[-1].double()
        self.is_recomputed = is_recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = x.to(layer.weight.dtype)
            is_plain = k == 0 or not self.is_recomputed
            x = layer(x) if is_plain else checkpoint(layer, x, use_reentrant=True)
        return x


def _end_backwards(rank: int, is_static: bool, is_recomputed: bool) -> None:
    """Each backward ends once, when all gradients are those of DDP; one that raises never does."""
    torch.manual_seed(0)
    module = Nested(is_recomputed)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.005, static_graph=is_static)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, optimizer, Watched())
    for step, x in enumerate(batches(rank, [(4, WIDTH)] * 3), 1):
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        assert len(handle.ends) == step
        expected = [p.grad for p in ddp.parameters() if p.grad is not None]
        assert len(expected) == 8
        assert all(map(torch.equal, handle.ends[-1], expected))
        optimizer.step()
    loss = ddp(x).square().mean()
    first = ddp.module.layers[0].weight.register_hook(lambda _: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    first.remove()
    assert len(handle.ends) == 3
    handle.detach(average=False)


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_a_backward_ends_once_when_all_gradients_are_final(
    own_ranks: OwnRanks, is_static: bool, is_recomputed: bool
) -> None:
    own_ranks().run(_end_backwards, is_static, is_recomputed)


# ---- attach and detach ------------------------------------------------------------------------


def _detached(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """After `detach` a model trains as DDP does, also when it had other weights before."""
    ddp, optimizer, handle = _setting(Decentralized(communication_interval=100, hierarchical=False))
    for x in batches(rank, [(4, WIDTH)] * 3):
        optimizer.zero_grad()
        ddp(x).pow(2).sum().backward()
        optimizer.step()
    apart = _flat(ddp)
    handle.detach()
    handle.detach()
    start = _flat(ddp)
    again = attach(ddp, optimizer, ByteGrad(hierarchical=False))
    again.detach()
    optimizer.zero_grad()
    ddp(batches(rank, [(4, WIDTH)])[0]).pow(2).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in ddp.parameters()])
    twin = MLP(2)
    torch.nn.utils.vector_to_parameters(start, twin.parameters())
    for k in range(2):
        twin(batches(k, [(4, WIDTH)])[0]).pow(2).sum().div(2).backward()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters()])
    torch.testing.assert_close(gradient, expected)
    return apart, start


def test_detach_averages_and_gives_ddp_its_allreduce_back(ranks: Ranks) -> None:
    (apart, start), (other, second) = ranks.run(_detached)
    assert not torch.equal(apart, other)
    assert torch.equal(start, second)
    torch.testing.assert_close(start, (apart + other) / 2)


def _is_collected(rank: int) -> tuple[bool, list[str]]:
    ddp, optimizer, handle = _setting(FLAT)
    ddp(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    weak = weakref.ref(ddp)
    del ddp, handle  # the optimizer stays
    for _ in range(10_000):
        gc.collect()  # again: the thread may have been at work in the first
        names = [t.name for t in threading.enumerate() if t.name.startswith("ddpopt")]
        if not names:
            break
        time.sleep(0.01)
    return weak() is None, names


def test_a_model_that_is_dropped_takes_its_algorithm_and_thread_along(ranks: Ranks) -> None:
    assert ranks.run(_is_collected) == [(True, []), (True, [])]


def _save_and_load(rank: int) -> tuple[bool, list[str]]:
    """Training goes on bitwise from checkpoints; a state of something else is refused."""
    algorithm = Decentralized(communication_interval=2, hierarchical=False)
    ddp, optimizer, handle = _setting(algorithm)
    inputs = batches(rank, [(4, WIDTH)] * 6)

    def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, xs: list[torch.Tensor]) -> None:
        for x in xs:
            optimizer.zero_grad()
            ddp(x).pow(2).sum().backward()
            optimizer.step()

    train(ddp, optimizer, inputs[:3])
    file = io.BytesIO()
    torch.save([ddp.state_dict(), optimizer.state_dict(), handle.state_dict()], file)
    train(ddp, optimizer, inputs[3:])
    expected = _flat(ddp)
    handle.detach()

    file.seek(0)
    weights, momenta, state = torch.load(file, weights_only=True)
    resumed, optimizer, handle = _setting(algorithm)
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(momenta)
    handle.load_state_dict(state)
    train(resumed, optimizer, inputs[3:])
    is_equal = torch.equal(_flat(resumed), expected)
    said = [
        error_of(lambda: handle.load_state_dict({**state, "algorithm": "ByteGrad"})),
        error_of(lambda: handle.load_state_dict({**state, "num_steps": -rank})),
        error_of(lambda: handle.load_state_dict({**state, "num_steps": 3 + rank})),
        error_of(lambda: handle.load_state_dict(None)),  # type: ignore[arg-type]
    ]
    handle.detach()
    return is_equal, said


def test_a_checkpoint_of_each_rank_continues_it_bitwise(ranks: Ranks) -> None:
    for is_equal, said in ranks.run(_save_and_load):
        assert is_equal
        assert said[0].startswith("OptionError: on rank 0: the state's 'algorithm' is 'ByteGrad'")
        assert said[1].startswith("OptionError: on rank 1: the state's 'num_steps' is -1")
        assert said[2].startswith("AttachError: rank 1 differs from rank 0: num_steps is 4")
        assert said[3].startswith("TypeError: on rank 0: a state is a dict")


def _copy(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies and pickles train by themselves, as plain DDP does, and can get an algorithm."""
    ddp, optimizer, handle = _setting()
    x = batches(rank, [(4, WIDTH)])[0]
    ddp(x).square().mean().backward()
    optimizer.step()
    copy.deepcopy(ddp.module)
    torch.save(ddp.module, io.BytesIO())
    copied, pickled = copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))
    for other in (copied, pickled):
        other.zero_grad()
        other(x).square().mean().backward()
        assert other.module.layers[0].weight.grad is not None
    assert handle.num_steps == 1
    gradient = torch.cat([p.grad.flatten() for p in copied.parameters()])
    again = attach(copied, torch.optim.SGD(copied.parameters(), lr=0.1), FLAT)
    copied(x).square().mean().backward()
    assert (again.num_steps, handle.num_steps) == (1, 1)
    again.detach()
    handle.detach()
    return gradient, torch.cat([p.grad.flatten() for p in pickled.parameters()])


def test_copies_and_pickles_leave_the_algorithm_behind(ranks: Ranks) -> None:
    (copied, pickled), others = ranks.run(_copy)
    assert torch.equal(copied, pickled)
    assert all(torch.equal(copied, other) for other in others)


# ---- an algorithm of one's own ----------------------------------------------------------------


def _train_own(rank: int, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Run the page's algorithm, and go on from a state that it saved between two exchanges."""
    page = next(b for b in blocks("docs/your-algorithm.md") if b.language == "python")
    found: dict[str, Any] = {}
    exec(page.text, found)
    torch.manual_seed(0)
    weights = []
    algorithm = found["LocalMomentum"](interval=2, momentum=0.5, lr=0.7)
    ddp, optimizer, handle = _setting(algorithm)
    saved: list[Any] = []
    for k, x in enumerate(inputs[rank]):
        if k == 3:
            saved = copy.deepcopy([ddp.state_dict(), handle.state_dict()])
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    weights.append(_flat(ddp))
    handle.detach()
    resumed, optimizer, handle = _setting(algorithm)
    resumed.load_state_dict(saved[0])
    handle.load_state_dict(saved[1])
    for x in inputs[rank][3:]:
        optimizer.zero_grad()
        resumed(x).square().mean().backward()
        optimizer.step()
    handle.detach(average=False)
    return [*weights, _flat(resumed)]


def test_the_pages_own_algorithm_equals_plain_python(ranks: Ranks) -> None:
    """As docs/your-algorithm.md has it; bitwise after it was saved and loaded."""
    inputs = [batches(rank, [(4, WIDTH)] * 6) for rank in range(2)]
    torch.manual_seed(0)
    models = [MLP(2)]
    models.append(copy.deepcopy(models[0]))
    start, momentum = _flat(models[0]), torch.zeros(2 * (WIDTH + 1) * WIDTH)
    for step in range(6):
        for model, x in zip(models, (own[step] for own in inputs), strict=True):
            model.zero_grad()
            model(x).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        if step % 2:
            momentum = 0.5 * momentum + sum(_flat(model) - start for model in models) / 2
            start = start + 0.7 * momentum
            for model in models:
                nn.utils.vector_to_parameters(start.clone(), model.parameters())
    for trained, resumed in ranks.run(_train_own, inputs):
        torch.testing.assert_close(trained, start)
        assert torch.equal(trained, resumed)


# ---- an attach that fails ----------------------------------------------------------------------


class _OddError(Exception):
    """Cannot be pickled, nor made from a text."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(f"odd {second}")
        self.lock = threading.Lock()


class _FailingAtFirst(BackgroundHandle):
    """Fails before its base class has made anything, or after, and again where it is closed."""

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


_HANDLE, _DDP = "ddpopt.algorithms.handle", "torch.nn.parallel.DistributedDataParallel"
FAILURES: list[tuple[str, Any]] = [
    (f"{_HANDLE}.FlatWeights", FLAT),
    (f"{_HANDLE}.Worker", ByteGrad(local_world_size=2)),
    (f"{_HANDLE}.metrics.set_source", FLAT),
    (f"{_HANDLE}.register_optimizer_step_pre_hook", FLAT),
    (f"{_HANDLE}.register_optimizer_step_post_hook", FLAT),
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
    """What an algorithm leaves behind, besides an idle comm hook."""
    from torch.optim import optimizer as every  # its private names are read here

    gc.collect()
    stop_s = time.monotonic() + 60
    while time.monotonic() < stop_s:  # a thread that was told to end may not have
        threads = [t.name for t in threading.enumerate() if t.name.startswith("ddpopt")]
        if not threads:
            break
        time.sleep(0.01)
    hooks = (
        ddp._forward_pre_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        every._global_optimizer_pre_hooks,
        every._global_optimizer_post_hooks,
    )
    return {
        "threads": threads,
        "groups": len(dist.distributed_c10d._world.pg_map),
        "hooks": [len(each) for each in hooks],
        "source": source_of(ddp),
        "comm hook": (_torch.has_comm_hook(ddp), _torch.hook_states(ddp)),
    }


def _fail_to_attach(rank: int, where: str, algorithm: Any) -> str:
    """Rank 1 fails; then both train as with DDP alone, attach again, and train."""
    torch.manual_seed(0)
    ddp, twin = (DistributedDataParallel(MLP(2)) for _ in range(2))
    twin.load_state_dict(ddp.state_dict())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = _traces(ddp, optimizer)
    with contextlib.ExitStack() as stack:
        if where and rank == 1:
            stack.enter_context(mock.patch(where, side_effect=ArithmeticError("no luck")))
        said = error_of(lambda: attach(ddp, optimizer, algorithm))
    assert _traces(ddp, optimizer) == before
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
    return said


@pytest.mark.parametrize(
    ("where", "algorithm"), FAILURES, ids=lambda v: v if isinstance(v, str) else v.name
)
def test_an_attach_that_fails_on_one_rank_leaves_nothing_on_any(
    ranks: Ranks, where: str, algorithm: Any
) -> None:
    """Wherever it fails; the error is raised on all ranks, and says which one it is from."""
    for said in ranks.run(_fail_to_attach, where, algorithm):
        why = "ArithmeticError: no luck" if where else "_OddError: odd "
        assert said.startswith(f"AttachError: on rank 1: {why}")


def test_the_rank_that_failed_has_the_cause(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(1))
    optimizer = torch.optim.SGD(ddp.parameters())
    failing = mock.patch(f"{_HANDLE}.Worker", side_effect=ArithmeticError)
    with failing, pytest.raises(AttachError, match="on rank 0: ArithmeticError") as raised:
        attach(ddp, optimizer, FLAT)
    assert isinstance(raised.value.__cause__, ArithmeticError)


# ---- optimizers whose updates would not be noticed ----------------------------------------------


class Wrapping(torch.optim.Optimizer):
    """Looks like an optimizer, without its constructor: Accelerate's, PostLocalSGDOptimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class WrappingWithHooks(Wrapping):
    """As timm's Lookahead, which has the hooks' dictionaries, and a step that no one wrapped."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}


class Lookahead(torch.optim.Optimizer):
    """An optimizer of its own around another one, of which it has the parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)
        return result


class Twice(torch.optim.SGD):
    """Its step calls that of its base class, which calls hooks as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [Wrapping, WrappingWithHooks])
def test_an_optimizer_whose_step_calls_no_hooks_is_refused(one_rank: None, kind: Any) -> None:
    ddp = DistributedDataParallel(MLP(1))
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=f"step.. of the {kind.__name__} calls none of the hooks"):
        attach(ddp, kind(inner), FLAT)
    with pytest.raises(OptionError, match="no optimizer is given"):
        attach(ddp, [], FLAT)
    handle = attach(ddp, inner, FLAT)  # as the error advises
    for _ in range(3):
        ddp(torch.ones(2, WIDTH)).sum().backward()
        kind(inner).step()
    assert handle.metrics()["ddpopt.algorithm.skipped_updates"] == 0
    handle.detach()


def _scheduled(parameters: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which sets a `step` on it
    return optimizer, optimizer


def _around(kind: Any, is_inner_given: bool) -> Any:
    """Makes an optimizer around another; returns the one for `attach`, and the one to step."""

    def make(parameters: Any) -> tuple[Any, Any]:
        inner = torch.optim.SGD(parameters, lr=0.1)
        outer = kind(inner)
        return (inner if is_inner_given else outer), outer

    return make


def _zero(parameters: Any) -> tuple[Any, Any]:
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    return optimizer, optimizer


def _twice(parameters: Any) -> tuple[Any, Any]:
    optimizer = Twice(parameters, lr=0.1)
    return optimizer, optimizer


@pytest.mark.parametrize(
    "make",
    [_scheduled, _around(Lookahead, True), _around(Lookahead, False), _zero, _twice],
    ids=["scheduler", "inner of a wrapper", "wrapper", "ZeRO", "super"],
)
def test_optimizers_in_and_around_those_given_are_no_strangers(one_rank: None, make: Any) -> None:
    """And others of the process, nor one that has the model's parameters while paused."""
    ddp, other = DistributedDataParallel(MLP(1)), MLP(1)
    given, stepped = make(ddp.parameters())
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    visitor = torch.optim.SGD(ddp.parameters(), lr=0.1)
    said: list[str] = []
    handle = attach(ddp, given, FLAT)
    with mock.patch("ddpopt._logs.warning", lambda text, *given: said.append(text % given)):
        for _ in range(3):
            ddp(torch.ones(2, WIDTH)).sum().backward()
            other(torch.ones(2, WIDTH)).sum().backward()
            others.step()
            stepped.step()
            with handle.paused():
                ddp(torch.ones(2, WIDTH)).sum().backward()
                visitor.step()
    assert handle.metrics()["ddpopt.algorithm.skipped_updates"] == 0
    assert not said
    handle.detach()


@pytest.mark.parametrize("between", ["paused", "state_dict", "average", "nothing"])
@pytest.mark.parametrize("name", ["Decentralized", "AsyncModelAverage"])
def test_what_the_algorithm_writes_after_a_skipped_update_is_no_update(
    one_rank: None, name: str, between: str
) -> None:
    """A GradScaler skips the first update, and then a method of the handle's ends the step."""
    kinds = {"Decentralized": FLAT, "AsyncModelAverage": AsyncModelAverage(sync_interval_ms=1)}
    ddp = DistributedDataParallel(MLP(1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, optimizer, kinds[name])
    said: list[str] = []
    with mock.patch("ddpopt._logs.warning", lambda text, *given: said.append(text % given)):
        for step in range(3):
            ddp(torch.ones(2, WIDTH)).sum().backward()
            if step:
                optimizer.step()
            elif between == "paused":
                with handle.paused(), torch.no_grad():
                    ddp(torch.ones(2, WIDTH))
                    time.sleep(0.05)
            elif between != "nothing":
                getattr(handle, between)()
    assert not said
    handle.detach()


def test_handles_may_be_collected_in_the_middle_of_a_step(one_rank: None) -> None:
    """Torch walks over the process's hooks there, and one of them collects garbage."""

    def collect(*_: object) -> None:
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    own = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    try:
        for _ in range(3):
            ddp = DistributedDataParallel(MLP(1))
            ddp.handle = attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), FLAT)
            del ddp  # with its handle, which nobody detaches
            own.step()
    finally:
        hook.remove()


def test_a_ddp_module_that_was_never_made_is_no_other_one(one_rank: None) -> None:
    """Its constructor raised, and somebody keeps the error, as a notebook does."""
    with pytest.raises(RuntimeError, match="any parameter that requires a gradient") as kept:
        DistributedDataParallel(MLP(1).requires_grad_(False))
    ddp = DistributedDataParallel(MLP(1))
    attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), FLAT).detach()
    assert kept.tb is not None


def _attach_on_nodes_of(rank: int) -> str:
    ddp = DistributedDataParallel(MLP(1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(1 + rank)}):
        return error_of(lambda: attach(ddp, optimizer, ByteGrad()))


def test_ranks_that_are_told_of_other_nodes_find_out(ranks: Ranks) -> None:
    for said in ranks.run(_attach_on_nodes_of):
        assert "ranks on each node is 2 instead of 1" in said


def _make_anew(rank: int, name: str, is_partial: bool) -> list[str]:
    """Update with an optimizer that was made after `attach`, for all layers or the last one."""
    ddp, optimizer, handle = _attached(name)
    x = torch.ones(2, WIDTH)
    ddp(x).sum().backward()
    optimizer.step()
    ddp(x).sum().backward()
    anew = torch.optim.AdamW(ddp.module.layers[-1 if is_partial else 0 :].parameters(), lr=0.1)
    if is_partial:
        optimizer.step()
    anew.step()
    with torch.no_grad():
        ddp(x)  # an evaluation says nothing
    said = [error_of(lambda: ddp(x)), error_of(lambda: ddp(x))]
    handle.detach()
    again = attach(ddp, [optimizer, anew], ByteGrad(hierarchical=False))
    ddp(x).sum().backward()
    optimizer.step()
    anew.step()
    ddp(x)
    again.detach()
    return said


@pytest.mark.parametrize("is_partial", [False, True], ids=["all", "a part"])
@pytest.mark.parametrize("name", ALL)
def test_an_optimizer_that_was_made_anew_is_noticed_at_the_next_forward(
    ranks: Ranks, name: str, is_partial: bool
) -> None:
    for said in ranks.run(_make_anew, name, is_partial):
        for text in said:
            assert text.startswith(
                "AttachError: a AdamW that was not given to attach has updated parameters of this "
                f"model in step 2, and {name} has to know"
            )


def _replace_step(how: str) -> tuple[list[str], int]:
    """Train with two optimizers, the first one's `step` replaced before or after `attach`."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in ddp.module.layers)

    def update() -> None:
        with torch.no_grad():
            for parameter in ddp.module.layers[0].parameters():
                parameter.sub_(parameter.grad, alpha=0.1)

    said: list[str] = []
    handle = attach(ddp, [first, second], FLAT)
    with mock.patch("ddpopt._logs.warning", lambda text, *given: said.append(text % given)):
        for step in range(4):
            ddp.zero_grad()
            ddp(torch.ones(2, WIDTH)).square().mean().backward()
            if how == "replaced":
                first.step = update  # type: ignore[method-assign]
            if how in ("clipped", "every second"):
                with torch.no_grad():
                    ddp.module.layers[0].weight.clamp_(-0.01, 0.01)
            if how != "skipped" and (how not in ("every second", "alternate") or step % 2):
                first.step()
            if how != "skipped":
                second.step()
    handle.detach()
    return said, handle.num_communications


@pytest.mark.parametrize(
    "how", ["plain", "replaced", "clipped", "every second", "alternate", "skipped"]
)
def test_a_step_that_was_replaced_is_told_once(one_rank: None, how: str) -> None:
    """And so are weights that somebody wrote, if the step was skipped; all else is no news.

    What the algorithm itself writes is none.
    """
    said, num_communications = _replace_step(how)
    assert num_communications == 4
    assert len(said) == (how in ("replaced", "every second"))
    for text in said:
        assert text.startswith("weights were written after the backward of step 1, and step() of ")
        assert "the SGD given to attach has not called its hooks" in text


# ---- a parameter in two DDP modules --------------------------------------------------------------


def _share(rank: int) -> list[str]:
    """Attach where another module has a layer of the model, on rank 1 only or on both."""
    x = torch.ones(2, WIDTH)
    model = MLP(2)
    others: list[Any] = [DistributedDataParallel(nn.Sequential(MLP(1), model.layers[1]))]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    said = [error_of(lambda: attach(ddp, optimizer, FLAT))]
    others[0].circle = others  # which the garbage collector has to find
    if rank == 0:
        others = []
    said.append(error_of(lambda: attach(ddp, optimizer, FLAT)))
    others = []
    frozen = MLP(1).requires_grad_(False)
    keep = DistributedDataParallel(nn.Sequential(frozen, MLP(1)))
    ddp = DistributedDataParallel(nn.Sequential(frozen, model))  # the first one is not needed
    handle = attach(ddp, optimizer, FLAT)
    ddp(x).sum().backward()
    keep(x).sum().backward()
    optimizer.step()
    handle.detach()
    return said


def test_a_parameter_in_two_ddp_modules_is_refused(ranks: Ranks) -> None:
    """On all ranks; a frozen one may be, and one in a module that is garbage."""
    for first, second in ranks.run(_share):
        assert first.startswith("AttachError: on rank 0: layers.1.weight is also in another Distr")
        assert second.startswith("AttachError: on rank 1: layers.1.weight is also in another Distr")
        assert "DistributedDataParallel(Sequential)" in second


# ---- after detach -------------------------------------------------------------------------------


def _after_detach(rank: int, is_detached: bool) -> tuple[bool, list[Any], str, str]:
    """What is said of a comm hook where an algorithm is attached, and was."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(4), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, optimizer, ByteGrad(hierarchical=False))
    if is_detached:
        handle.detach()
    options = {"inner": "aot_eager", "buckets": "auto"}
    compiled = torch.compile(ddp, backend="ddpopt", options=options)
    for x in batches(rank, [(4, WIDTH)] * 3):
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()
    found = _torch.has_comm_hook(ddp), [type(s).__name__ for s in _torch.hook_states(ddp)]
    texts = str(ddpopt.explain(ddp)), tuner._find_lasting_obstacle(ddp, "auto")
    handle.detach()
    return *found, *texts


def test_after_detach_nothing_says_that_there_is_a_comm_hook(ranks: Ranks) -> None:
    """So better buckets are looked for, as the hook that stays only runs DDP's allreduce."""
    for has_hook, states, explained, obstacle in ranks.run(_after_detach, False):
        assert has_hook
        assert states == ["BucketReduction"]
        assert "comm hook" in explained
        assert "comm hook" in obstacle
    for has_hook, states, explained, obstacle in ranks.run(_after_detach, True):
        assert not has_hook
        assert not states
        assert "hook" not in explained
        assert not obstacle


# ---- compiled ---------------------------------------------------------------------------------


def _compiled(rank: int, algorithm: Any, split: str) -> tuple[bool, int, int]:
    """Return whether it equals eager training, and the graphs with and without the algorithm."""
    weights, graphs = [], []
    for is_compiled, is_attached in ((False, True), (True, True), (True, False)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        count = [0]

        def inner(gm: Any, inputs: Any, count: list[int] = count) -> Any:
            count[0] += 1
            return gm

        ddp = DistributedDataParallel(MLP(4), bucket_cap_mb=0.03)
        options = {"inner": inner if split == "forward" else "aot_eager", "split": split}
        forward = torch.compile(ddp, backend="ddpopt", options=options) if is_compiled else ddp
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        handle = attach(forward, optimizer, algorithm) if is_attached else None
        for x in batches(rank, [(8, WIDTH)] * 4):
            optimizer.zero_grad()
            forward(x).pow(2).mean().backward()
            optimizer.step()
        sections = len(ddpopt.explain(ddp).to_dict()["graphs"]) if is_compiled else 0
        graphs.append(count[0] + sections)
        weights.append(_flat(ddp))
        if handle is not None:
            handle.detach(average=False)
    return torch.equal(weights[0], weights[1]), graphs[1], graphs[2]


@pytest.mark.parametrize("split", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", [FLAT, Watched()], ids=["decentralized", "allreduce"])
def test_compiled_training_equals_eager_and_attaching_makes_no_graphs(
    ranks: Ranks, algorithm: Any, split: str
) -> None:
    for is_equal, attached, alone in ranks.run(_compiled, algorithm, split):
        assert is_equal
        assert attached == alone


# ---- a rank that dies -------------------------------------------------------------------------


def _lose_a_rank(rank: int, algorithm: Any) -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, optimizer, algorithm)
    message = ""
    start_s = time.monotonic()
    for step in range(50):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.zero_grad()
            ddp(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        except RuntimeError as error:
            message = f"{type(error).__name__}: {error}"
            break
    with contextlib.suppress(PeerError):
        handle.detach()
    return message, time.monotonic() - start_s


@pytest.mark.parametrize("selection", ["all", "shift_one"])
def test_a_rank_that_dies_makes_the_other_fail_clearly_within_the_timeout(
    selection: str, own_ranks: OwnRanks
) -> None:
    algorithm = Decentralized(peer_selection=selection, hierarchical=False)
    message, seconds = own_ranks().run_survivors([0], _lose_a_rank, algorithm)[0]
    assert message.startswith("PeerError: averaging weights in step 3 failed: another rank has ")
    assert seconds < 60


# ---- in the background -------------------------------------------------------------------------


class _FailingHandle(BackgroundHandle):
    def reduce(self, bucket):  # type: ignore[no-untyped-def]
        def fail(_values: torch.Tensor) -> None:
            raise ArithmeticError(f"bucket {bucket.index()}")

        return self.run_behind_backward(bucket, fail)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failing(Algorithm[_FailingHandle]):
    handle_type = _FailingHandle


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_failure_in_the_background_is_raised_by_that_backward(
    one_rank: None, static_graph: bool
) -> None:
    """By each one; of a static graph's first no bucket says that it is the last."""
    ddp = DistributedDataParallel(MLP(2), static_graph=static_graph)
    optimizer = torch.optim.SGD(ddp.parameters())
    handle = attach(ddp, optimizer, _Failing())
    for _ in range(3):
        loss = ddp(torch.ones(2, WIDTH)).sum()
        with pytest.raises(ArithmeticError, match="bucket 0"):
            loss.backward()
    handle.detach()


# ---- attach: what it refuses, on all ranks, and that ranks start equal -----------------------


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
