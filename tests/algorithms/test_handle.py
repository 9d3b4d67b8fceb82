"""`Handle`: what a step is, what it leaves when it goes, and what fails behind a backward."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpopt
from ddpopt import _torch
from ddpopt.algorithms import Algorithm, ByteGrad, Decentralized, Handle, attach
from ddpopt.algorithms.handle import BackgroundHandle
from ddpopt.errors import AttachError
from ddpopt.planning import tuner
from tests.algorithms import step_machine
from tests.support.algorithms import (
    ALGORITHMS,
    FLAT,
    attached_mlp,
    flat_weights,
    lose_rank_1,
    optimizer_for,
)
from tests.support.documents import blocks
from tests.support.groups import first_ranks
from tests.support.logs import logged
from tests.support.models import MLP, WIDTH, batches
from tests.support.ranks import MakeRanks, Ranks, error_of

# ---- what a step is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"communication_interval": 2}, {"peer_selection": "shift_one"}]
)
def test_steps_go_as_in_the_simulator(ranks: Ranks, options: dict[str, Any]) -> None:
    """Weights and counts are those of plain arithmetic, whatever a loop does, after each action."""
    algorithm = Decentralized(hierarchical=False, **options)
    for script in step_machine.draw_scripts(12):
        expected = step_machine.simulate(algorithm, script)
        for rank, states in enumerate(ranks.run(step_machine.run_script, algorithm, script)):
            for action, (weights, *counts) in enumerate(states):
                done = f"rank {rank} after {script[: action + 1]}"
                expected_weights, *expected_counts = expected[action][rank]
                assert counts == expected_counts, done
                assert torch.allclose(weights, expected_weights, rtol=1e-9), done


def _train_in_eval(rank: int, name: str) -> torch.Tensor:
    """Train in eval mode, as with a frozen batch norm, beside evaluations without `no_grad`."""
    ddp, optimizer, handle = attached_mlp(ALGORITHMS[name])
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
    return flat_weights(ddp)


@pytest.mark.quick("Decentralized")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_backward_in_eval_mode_makes_a_step(ranks: Ranks, name: str) -> None:
    """An evaluation that forgot `no_grad` makes none."""
    assert torch.equal(*ranks.run(_train_in_eval, name))


@pytest.mark.quick("Decentralized")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_joins_forwards_are_refused(one_rank: None, name: str) -> None:
    """In it, an algorithm would not take part on a rank without inputs."""
    ddp, _, handle = attached_mlp(ALGORITHMS[name])
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
        error = error_of(lambda: optimizers[0].step(lambda: 0.0))  # noqa: B023  # called at once
        handle.detach()
        results.append(flat_weights(ddp))
    return torch.equal(*results), error


def test_several_optimizers_make_one_step_and_closures_are_refused(ranks: Ranks) -> None:
    for is_equal, error in ranks.run(_two_optimizers):
        assert is_equal
        assert error.startswith("OptionError: Decentralized cannot work with a closure")


class Watching(Handle):
    """Notes how often a backward ended, and the gradients that it then had."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
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

    A layer has another dtype, so that DDP's first backward has two buckets.
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
        assert len(handle.ends[-1]) == len(expected) == 8
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
    make_ranks: MakeRanks, is_static: bool, is_recomputed: bool
) -> None:
    make_ranks().run(_end_backwards, is_static, is_recomputed)


# ---- attach and detach ------------------------------------------------------------------------


def _is_collected(rank: int) -> tuple[bool, list[str]]:
    ddp, optimizer, handle = attached_mlp(FLAT)
    ddp(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    weak = weakref.ref(ddp)
    del ddp, handle  # the optimizer stays
    for _ in range(10_000):
        gc.collect()  # again: the thread may have been at work in the first
        # Not the thread of the group, which makes meetings and stays as long as that.
        names = [t.name for t in threading.enumerate() if t.name.startswith("ddpopt-")]
        if not names:
            break
        time.sleep(0.01)
    return weak() is None, names


def test_a_model_that_is_dropped_takes_its_algorithm_and_thread_along(ranks: Ranks) -> None:
    assert ranks.run(_is_collected) == [(True, []), (True, [])]


def _save_and_load(rank: int) -> tuple[bool, list[str]]:
    """Training goes on bitwise from checkpoints; a state of something else is refused."""
    algorithm = Decentralized(communication_interval=2, hierarchical=False)
    ddp, optimizer, handle = attached_mlp(algorithm)
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
    expected = flat_weights(ddp)
    handle.detach()

    file.seek(0)
    weights, momenta, state = torch.load(file, weights_only=True)
    resumed, optimizer, handle = attached_mlp(algorithm)
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(momenta)
    handle.load_state_dict(state)
    train(resumed, optimizer, inputs[3:])
    is_equal = torch.equal(flat_weights(resumed), expected)
    errors = [
        error_of(lambda: handle.load_state_dict({**state, "algorithm": "ByteGrad"})),
        error_of(lambda: handle.load_state_dict({**state, "num_steps": -rank})),
        error_of(lambda: handle.load_state_dict({**state, "num_steps": 3 + rank})),
        error_of(lambda: handle.load_state_dict(None)),  # type: ignore[arg-type]
    ]
    handle.detach()
    return is_equal, errors


def test_a_checkpoint_of_each_rank_continues_it_bitwise(ranks: Ranks) -> None:
    for is_equal, errors in ranks.run(_save_and_load):
        assert is_equal
        assert errors[0].startswith("OptionError: on rank 0: the state's 'algorithm' is 'ByteGrad'")
        assert errors[1].startswith("OptionError: on rank 1: the state's 'num_steps' is -1")
        assert errors[2].startswith("AttachError: rank 1 differs from rank 0: num_steps is 4")
        assert errors[3].startswith("TypeError: on rank 0: a state is a dict")


def _load_in_an_open_step(rank: int, name: str) -> bool:
    """After a loss that is NaN a checkpoint is loaded, before the update."""
    ddp, optimizer, handle = attached_mlp(ALGORITHMS[name])
    x = batches(rank, [(4, WIDTH)])[0]
    for _ in range(2):
        ddp(x).sum().backward()
        optimizer.step()
    with handle.paused():
        weights, state = copy.deepcopy(ddp.state_dict()), handle.state_dict()
    ddp(x).sum().backward()
    ddp.load_state_dict(weights)
    handle.load_state_dict(state)
    loaded = torch.cat([values.flatten() for values in weights.values()])
    is_equal = torch.equal(flat_weights(ddp), loaded)
    handle.detach()
    return is_equal


@pytest.mark.quick("Decentralized")
@pytest.mark.parametrize("name", ["Decentralized", "LowPrecisionDecentralized"])
def test_a_checkpoint_that_is_loaded_in_an_open_step_is_not_averaged(
    ranks: Ranks, name: str
) -> None:
    assert ranks.run(_load_in_an_open_step, name) == [True, True]


def _copy(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies and pickles train by themselves, as plain DDP does, and can get an algorithm."""
    ddp, optimizer, handle = attached_mlp()
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


# ---- an algorithm that a user writes ------------------------------------------------------------


def _train_by_the_page(rank: int, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Run the page's algorithm, and go on from a state that it saved between two exchanges."""
    page = next(b for b in blocks("docs/your-algorithm.md") if b.language == "python")
    namespace: dict[str, Any] = {}
    exec(page.text, namespace)
    algorithm = namespace["LocalMomentum"](interval=2, momentum=0.5, lr=0.7)
    ddp, optimizer, handle = attached_mlp(algorithm)
    saved: list[Any] = []
    for k, x in enumerate(inputs[rank]):
        if k == 3:
            saved = copy.deepcopy([ddp.state_dict(), handle.state_dict()])
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    trained = flat_weights(ddp)
    handle.detach()
    resumed, optimizer, handle = attached_mlp(algorithm)
    resumed.load_state_dict(saved[0])
    handle.load_state_dict(saved[1])
    for x in inputs[rank][3:]:
        optimizer.zero_grad()
        resumed(x).square().mean().backward()
        optimizer.step()
    handle.detach(average=False)
    return [trained, flat_weights(resumed)]


def test_the_algorithm_of_the_page_equals_plain_python(ranks: Ranks) -> None:
    """docs/your-algorithm.md has it; it goes on bitwise from what it saved."""
    inputs = [batches(rank, [(4, WIDTH)] * 6) for rank in range(2)]
    torch.manual_seed(0)
    models = [MLP(2)]
    models.append(copy.deepcopy(models[0]))
    start, momentum = flat_weights(models[0]), torch.zeros(2 * (WIDTH + 1) * WIDTH)
    for step in range(6):
        for model, inputs_of_rank in zip(models, inputs, strict=True):
            model.zero_grad()
            model(inputs_of_rank[step]).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        if step % 2:
            momentum = 0.5 * momentum + sum(flat_weights(model) - start for model in models) / 2
            start = start + 0.7 * momentum
            for model in models:
                nn.utils.vector_to_parameters(start.clone(), model.parameters())
    for trained, resumed in ranks.run(_train_by_the_page, inputs):
        torch.testing.assert_close(trained, start)
        assert torch.equal(trained, resumed)


# ---- after detach -------------------------------------------------------------------------------


def _after_detach(rank: int, is_detached: bool) -> tuple[bool, list[Any], str, str]:
    """Whether DDP has a comm hook, its states, the explanation, and why buckets stay."""
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
    has_hook = _torch.has_comm_hook(ddp)
    states = [type(hook_state).__name__ for hook_state in _torch.hook_states(ddp)]
    explained, obstacle = str(ddpopt.explain(ddp)), tuner._find_lasting_obstacle(ddp, "auto")
    handle.detach()
    return has_hook, states, explained, obstacle


def test_after_detach_nothing_says_that_there_is_a_comm_hook(ranks: Ranks) -> None:
    """Better buckets are looked for again, as the hook that stays only runs DDP's allreduce."""
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
        weights.append(flat_weights(ddp))
        if handle is not None:
            handle.detach(average=False)
    return torch.equal(weights[0], weights[1]), graphs[1], graphs[2]


@pytest.mark.quick("decentralized-forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", [FLAT, Watched()], ids=["decentralized", "allreduce"])
def test_compiled_training_equals_eager_and_attaching_makes_no_graphs(
    ranks: Ranks, algorithm: Any, split: str
) -> None:
    """Weights are bitwise equal; what is counted are graphs, and calls of the inner compiler."""
    for is_equal, attached, alone in ranks.run(_compiled, algorithm, split):
        assert is_equal
        assert attached == alone


# ---- a rank that dies -------------------------------------------------------------------------


def _die(rank: int, algorithm: Any) -> str:
    group = first_ranks(2, 20)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(2), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, optimizer, algorithm)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()

    return lose_rank_1(rank, handle, step)


@pytest.mark.parametrize("selection", ["all", "shift_one"])
def test_a_rank_that_dies_makes_the_other_fail_clearly(
    selection: str, make_ranks: MakeRanks
) -> None:
    algorithm = Decentralized(peer_selection=selection, hierarchical=False)
    error = make_ranks().run_survivors([0], _die, algorithm)[0]
    assert error.startswith("averaging weights in step 3 failed: another rank has ")


# ---- in the background -------------------------------------------------------------------------


class _FailingHandle(BackgroundHandle):
    def reduce(self, bucket):  # type: ignore[no-untyped-def]
        def fail(_values: torch.Tensor) -> None:
            raise ArithmeticError(f"bucket {bucket.index()}")

        return self.run_behind_backward(bucket, fail)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failing(Algorithm[_FailingHandle]):
    handle_type = _FailingHandle


@pytest.mark.quick("False")
@pytest.mark.parametrize("static_graph", [False, True])
def test_a_failure_in_the_background_is_raised_by_that_backward(
    one_rank: None, static_graph: bool
) -> None:
    """Each backward raises it, a static graph's first too, whose buckets do not tell the last."""
    ddp = DistributedDataParallel(MLP(2), static_graph=static_graph)
    optimizer = torch.optim.SGD(ddp.parameters())
    handle = attach(ddp, optimizer, _Failing())
    for _ in range(3):
        loss = ddp(torch.ones(2, WIDTH)).sum()
        with pytest.raises(ArithmeticError, match="bucket 0"):
            loss.backward()
    handle.detach()


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
    return flat_weights(ddp)


def test_a_layer_that_is_unfrozen_later_is_averaged_too(ranks: Ranks) -> None:
    assert torch.equal(*ranks.run(_unfreeze))


@pytest.mark.quick("ByteGrad")
@pytest.mark.parametrize("name", ["ByteGrad", "QAdam", "Decentralized"])
def test_a_layer_that_is_unfrozen_before_attach_is_averaged_or_named(
    one_rank: None, name: str
) -> None:
    """DDP does not reduce it, which those that average weights need not."""
    algorithm, module = ALGORITHMS[name], MLP(2)
    module.layers[0].weight.requires_grad_(False)
    ddp = DistributedDataParallel(module)
    module.layers[0].weight.requires_grad_(True)
    handle = attach(ddp, optimizer_for(algorithm, ddp.parameters()), algorithm)
    with logged("warning") as lines:
        ddp(torch.ones(2, WIDTH)).sum().backward()
    handle.detach()
    if name == "Decentralized":
        assert not lines
    else:
        (line,) = lines
        assert line.startswith("layers.0.weight was unfrozen, and each rank trains its own")


class WithEmpty(nn.Module):
    """Has a parameter without elements, of a type of its own, alone in its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.mlp = MLP(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + self.empty.sum().float()


@pytest.mark.quick("Decentralized")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_parameter_without_elements_is_left_alone(one_rank: None, name: str) -> None:
    algorithm, ddp = ALGORITHMS[name], DistributedDataParallel(WithEmpty())
    optimizer = optimizer_for(algorithm, ddp.parameters())
    handle = attach(ddp, optimizer, algorithm)
    before = flat_weights(ddp.module.mlp)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    handle.detach()
    assert not torch.equal(flat_weights(ddp.module.mlp), before)


def _unfreeze_unknown(rank: int) -> list[str]:
    """A layer was frozen when DDP was made."""
    module = MLP(3)
    for layer in (0, 1):
        module.layers[layer].weight.requires_grad_(False)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, optimizer, FLAT)
    with logged("warning") as lines:
        for step in range(3):
            module.layers[0].weight.requires_grad_(step > 0)
            ddp(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
    handle.detach()
    return lines


def test_an_unfrozen_parameter_that_ddp_does_not_reduce_is_named_once(ranks: Ranks) -> None:
    for lines in ranks.run(_unfreeze_unknown):
        (line,) = lines
        assert line.startswith("layers.0.weight was unfrozen, and each rank trains its own")
        assert "make DDP anew" in line
