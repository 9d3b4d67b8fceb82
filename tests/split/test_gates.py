"""Gates: what they keep alive, what hooks between sections do, and backwards that are abandoned.

Inner compiler aot_eager, which computes what eager DDP computes; each test shows that the backward
was cut. Ways to run a backward are in `test_autograd_doors.py`.
"""

from __future__ import annotations

import contextvars
import copy
import gc
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from ddpopt.split import compiler, gates
from tests.support.beside import Beside, compiled
from tests.support.cuts import only_cut
from tests.support.device import DEVICE
from tests.support.models import MLP, batches
from tests.support.on_ranks import on_ranks

SIZE = 16
CAP = {"bucket_cap_mb": 0.0001}  # a bucket for each weight


def _settled(model: nn.Module | None = None) -> Beside:
    """A model beside eager DDP, in whose last steps gradients were released between sections."""
    beside = Beside(model or MLP(4, SIZE), ddp_options=CAP, split="backward")
    beside.train([_input()] * 3)
    for ddp in (beside.ddp, beside.eager):
        ddp.zero_grad()
    assert beside.cut.split == "backward"
    assert len(beside.cut.sections) > 1
    return beside


def _input() -> torch.Tensor:
    (x,) = batches(0, [(4, SIZE)])
    return x.requires_grad_()


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.sin().sum()


def _by_section(ddp: DistributedDataParallel) -> list[list[nn.Parameter]]:
    """Return the parameters of a module's only graph by the section that releases them."""
    sections = only_cut(ddp).sections
    return [[ddp.module.get_parameter(n) for n in s.parameters] for s in sections]


def test_threads_run_backward_at_the_same_time(one_rank: None) -> None:
    """Two models that share compiled code run it in two threads each, which begin together."""
    models = [_settled() for _ in range(2)]
    num_threads, num_rounds = 4, 20
    forward_lock = threading.Lock()  # for DDP's forward, whose active module is global
    all_ready = threading.Barrier(num_threads)

    def work(index: int) -> int:
        model = models[index % 2]
        num_right = 0
        try:
            with forward_lock:
                loss = _loss(model.eager(_input()))
                expected = torch.autograd.grad(loss, list(model.eager.parameters()))
            for _ in range(num_rounds):
                with forward_lock:
                    loss = _loss(model.run(_input()))
                all_ready.wait(timeout=300)
                gradients = torch.autograd.grad(loss, list(model.ddp.parameters()))
                num_right += all(map(torch.allclose, gradients, expected))
        except BaseException:
            all_ready.abort()  # else the others wait for this thread
            raise
        return num_right

    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(work, index) for index in range(num_threads)]
    assert [future.exception() for future in futures] == [None] * num_threads
    assert [future.result() for future in futures] == [num_rounds] * num_threads


# ---- Hooks, which run between sections --------------------------------------------------------


def test_a_gradient_that_the_program_passed_in_keeps_its_history() -> None:
    """Only what the section returns refuses to be differentiated."""
    leaf, handle = (torch.ones(2, requires_grad=True) for _ in range(2))
    passed_in = leaf * 2
    (returned,) = gates.refuse_double_backward(lambda: [passed_in], handle)
    with pytest.raises(RuntimeError, match="double backward"):
        returned.sum().backward()
    passed_in.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2,), 2.0))


def test_parameters_may_be_updated_as_soon_as_their_gradient_is_there(one_rank: None) -> None:
    """An optimizer step in a hook: no later section reads the weight."""

    @torch.no_grad()
    def update(parameter: torch.Tensor) -> None:
        parameter.sub_(parameter.grad)

    def update_in_hooks(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)

    beside = _settled()
    beside.change(update_in_hooks)
    beside.step(_input())


def test_a_model_can_be_copied_between_forward_and_backward(one_rank: None) -> None:
    """The copy trains by itself."""
    beside = _settled()
    loss = _loss(beside.run(_input()))
    copied = copy.deepcopy(beside.ddp.module)
    loss.backward()
    _loss(beside.eager(_input())).backward()
    for ours, expected in zip(beside.ddp.parameters(), beside.eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)
    assert all(parameter.grad is None for parameter in copied.parameters())
    _settled(copied).step(_input())


# ---- Memory, and backwards that are abandoned -------------------------------------------------


class _HookError(Exception):
    pass


def _saved_activations(output: torch.Tensor) -> list[StorageWeakRef]:
    """Refer to the memory that the graph saved and that nobody else holds."""
    saved = output.grad_fn.saved_tensors  # type: ignore[union-attr]
    return [StorageWeakRef(t.untyped_storage()) for t in saved if not t.requires_grad]


def _num_alive(references: Sequence[StorageWeakRef]) -> int:
    return sum(not reference.expired() for reference in references)


def test_saved_tensors_are_freed_after_their_last_section(one_rank: None) -> None:
    """Each section's hooks find fewer of them, and the last one's find none."""
    beside = _settled()
    output = beside.run(_input())
    saved = _saved_activations(output)
    loss = _loss(output)
    del output
    num_alive = []
    for parameters in _by_section(beside.ddp):
        parameters[0].register_hook(lambda _: num_alive.append(_num_alive(saved)))
    assert _num_alive(saved) == len(saved) >= 4
    loss.backward()
    # The loss holds the model's output until backward is done with `sin`, before any section.
    assert len(num_alive) >= 3
    assert all(late < early for early, late in itertools.pairwise(num_alive))
    assert num_alive[0] < len(saved)
    assert num_alive[-1] == 0


def _raise_in_hook(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    """Fail in the middle: after the first section's gradients, before the last ones'."""
    error = _HookError("no")
    reached: list[int] = []

    def fail(_: torch.Tensor) -> None:
        raise error

    first, second, *_, last = _by_section(ddp)
    hooks = [first[0].register_hook(lambda _: reached.append(0)), second[0].register_hook(fail)]
    hooks.append(last[0].register_hook(lambda _: reached.append(1)))
    try:
        loss.backward()
    except _HookError as caught:
        assert caught is error  # noqa: PT017, for pytest.raises would keep the frames
    assert reached == [0], "it must fail between sections for this test to mean anything"
    for hook in hooks:
        hook.remove()


def _ask_for_a_subset(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    for parameters in _by_section(ddp)[:2]:
        torch.autograd.grad(loss, parameters, retain_graph=True)


def _drop(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    pass


@pytest.mark.quick("_raise_in_hook")
@pytest.mark.parametrize("abandon", [_raise_in_hook, _ask_for_a_subset, _drop])
def test_an_abandoned_backward_keeps_nothing_and_the_next_step_is_right(
    one_rank: None, abandon: Callable[[DistributedDataParallel, torch.Tensor], None]
) -> None:
    """An error is the hook's own, unchanged; all that was saved is freed."""
    beside = _settled()

    def step() -> list[StorageWeakRef]:
        output = beside.run(_input())
        saved = _saved_activations(output)
        abandon(beside.ddp, _loss(output))
        return saved

    with beside.ddp.no_sync():
        saved = step()
    # What a failed backward left in its queue, torch keeps until the thread's next backward; the
    # hook's error and the frame that made it refer to each other.
    torch.zeros((), device=DEVICE, requires_grad=True).backward()
    gc.collect()
    assert len(saved) >= 4
    assert _num_alive(saved) == 0
    beside.step(_input())


def test_sections_find_the_context_in_which_backward_began(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AOTAutograd's whole backward does: settings of torch are context variables.

    What a hook sets between sections stands for the settings of another of autograd's threads.
    """
    beside = _settled()
    setting = contextvars.ContextVar("setting", default="default")

    def hook(_: torch.Tensor) -> None:
        setting.set("hook's")

    for parameter in beside.ddp.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    found: list[str] = []
    run_section = gates.CompiledSection.run

    def noting(section: gates.CompiledSection, run: gates.Run) -> Sequence[Any]:
        found.append(setting.get())
        return run_section(section, run)

    monkeypatch.setattr(gates.CompiledSection, "run", noting)
    loss = _loss(beside.run(_input()))
    setting.set("program's")
    loss.backward()
    assert setting.get() == "hook's"
    assert len(found) > 1
    assert set(found) == {"program's"}


def test_the_token_is_a_number_where_new_memory_is_filled_with_nan(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic algorithms fill it so, and Inductor's `nan_asserts` look at each input."""
    tokens: list[torch.Tensor] = []

    class Watched(gates.GatedGraph):
        def __init__(self, graph: Callable[..., Any], *others: Any) -> None:
            def watched(*args: Any) -> Any:
                tokens.append(args[-1].detach().clone())
                return graph(*args)

            super().__init__(watched, *others)

    monkeypatch.setattr(compiler, "GatedGraph", Watched)
    torch.use_deterministic_algorithms(True)
    try:
        _settled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert tokens
    assert all(torch.equal(token, torch.zeros(1, device=DEVICE)) for token in tokens)


class _SparseRows(nn.Module):
    """The gradient of the rows is that of what they are added to, which goes on to `first`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.table = nn.Embedding(5, SIZE, sparse=True)
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        rows = (x[:, 0].detach().abs() * 3).long().clamp(max=4)
        return self.head(torch.tanh(self.last(torch.tanh(x * 0.5 + (x + self.table(rows))))))


@on_ranks(2)
@pytest.mark.quick("aot_eager-True")
@pytest.mark.parametrize(
    ("inner", "has_own_memory"), [("aot_eager", True), ("inductor", True), ("aot_eager", False)]
)
def test_dividing_a_sparse_gradient_does_not_reach_later_sections(
    rank: int, inner: str, has_own_memory: bool
) -> None:
    """DDP divides its rows in place, in eager too; the next section would read them."""
    module = _SparseRows().to(DEVICE)
    alone = copy.deepcopy(module)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0002, find_unused_parameters=True)
    model = compiled(ddp, inner, split="backward")
    (x,) = batches(rank, [(3, SIZE)])
    keep = gates._in_own_memory if has_own_memory else (lambda gradient: gradient)
    with mock.patch.object(gates, "_in_own_memory", keep):
        model(x).square().mean().backward()
    assert len(only_cut(ddp).sections) > 2
    alone(x).square().mean().backward()
    expected = alone.first.weight.grad
    dist.all_reduce(expected.div_(2))
    assert torch.allclose(module.first.weight.grad, expected, atol=1e-6) is has_own_memory
