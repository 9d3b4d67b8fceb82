"""Gates under every way to run a backward: again, nested, in part, in threads, with hooks, failing.

Inner compiler aot_eager, which computes what eager DDP computes; each test shows that the backward
was cut.
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

import ddpopt
from ddpopt.split import compiler, gates, state
from tests.support.cuts import only_cut
from tests.support.device import DEVICE
from tests.support.models import MLP, batches, twins
from tests.support.ranks import Ranks

SIZE = 16
CAP = {"bucket_cap_mb": 0.0001}  # a bucket for each weight
REFUSAL = "does not currently support double backward"


class Sums(MLP):
    """Adds parameters to activations, so that gradients are views of what backward passes on."""

    def __init__(self) -> None:
        super().__init__(3, SIZE)
        self.terms = nn.ParameterList(torch.randn(4, SIZE) for _ in self.layers)
        self.rows = nn.ParameterList(torch.randn(SIZE) for _ in self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, term, row in zip(self.layers, self.terms, self.rows, strict=True):
            x = (layer(x) + term).relu() + row.expand(4, SIZE)
        return x + self.terms[0]


class Broken(MLP):
    """Three graphs of two layers each, the last of which also takes the input of the second."""

    def __init__(self) -> None:
        super().__init__(6, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth, fifth, sixth = self.layers
        x = second(first(x).relu()).relu()
        torch._dynamo.graph_break()
        y = fourth(third(x).relu()).relu()
        torch._dynamo.graph_break()
        return sixth(fifth(y).relu() + x)


MODELS: list[Callable[[], nn.Module]] = [lambda: MLP(4, SIZE), Sums, Broken]
each_model = pytest.mark.parametrize("model", MODELS, ids=["chain", "sums", "graph breaks"])


def _settled_pair(model: nn.Module) -> tuple[Any, Any, Any]:
    """Return eager DDP, and another DDP whose buckets have settled, with its compiled form."""
    eager, ddp = twins(model, **CAP)
    compiled = torch.compile(
        ddp, backend="ddpopt", options={"split": "backward", "inner": "aot_eager"}
    )
    for _ in range(3):  # until then all gradients are accumulated after all sections
        compiled(_input()).sum().backward()
    ddp.zero_grad()
    cuts = ddpopt.explain(ddp).cuts
    assert cuts
    assert all(cut.split == "backward" and len(cut.sections) > 1 for cut in cuts)
    return eager, ddp, compiled


def _input(seed: int = 0) -> torch.Tensor:
    (x,) = batches(seed, [(4, SIZE)])
    return x.requires_grad_()


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.sin().sum()


def _named_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def _by_section(ddp: DistributedDataParallel) -> list[list[nn.Parameter]]:
    """Return the parameters of a module's only graph by the section that releases them."""
    cut = only_cut(ddp)
    return [[ddp.module.get_parameter(n) for n in s.parameters] for s in cut.sections]


def _assert_same(run: Callable[[Any, Any], Any], model: nn.Module) -> None:
    """Compare what `run` returns, and the gradients that it leaves, with eager DDP."""
    eager, ddp, compiled = _settled_pair(model)
    expected = run(eager, eager)
    torch.testing.assert_close(run(ddp, compiled), expected)
    torch.testing.assert_close(_named_gradients(ddp), _named_gradients(eager))


# ---- Backward more than once ------------------------------------------------------------------


@pytest.mark.quick("chain")
@each_model
def test_a_retained_graph_runs_backward_again(
    one_rank: None, model: Callable[[], nn.Module]
) -> None:
    """It runs three times, with the same gradients each time."""

    def run(_: Any, forward: Any) -> None:
        loss = _loss(forward(_input()))
        for is_last in (False, False, True):
            loss.backward(retain_graph=not is_last)

    _assert_same(run, model())


def test_a_graph_that_was_not_retained_says_so(one_rank: None) -> None:
    """It does as unsplit, also when only the first section ran."""
    _, ddp, compiled = _settled_pair(MLP(4, SIZE))
    loss = _loss(compiled(_input()))
    torch.autograd.grad(loss, _by_section(ddp)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.quick("(0, 1, 2)")
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_forwards_may_be_outstanding_and_run_backward_in_any_order(
    one_rank: None, order: Sequence[int]
) -> None:
    """Each backward has a run of its own."""

    def run(ddp: Any, forward: Any) -> None:
        with ddp.no_sync():
            losses = [_loss(forward(_input(seed))) for seed in range(3)]
            for i in order:
                losses[i].backward()

    _assert_same(run, MLP(4, SIZE))


def test_one_backward_goes_through_several_forwards(one_rank: None) -> None:
    """They are used beside each other and through each other."""

    def run(ddp: Any, forward: Any) -> torch.Tensor:
        x = _input()
        with ddp.no_sync():
            (_loss(forward(forward(x))) + _loss(forward(x))).backward()
        assert x.grad is not None
        return x.grad

    _assert_same(run, MLP(4, SIZE))


class _Nested(torch.autograd.Function):
    """The identity; its backward adds the gradient of a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.run_forward = forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (inner,) = torch.autograd.grad(_loss(ctx.run_forward(x)), x)
        return gradient + inner, None


def test_a_backward_may_run_inside_a_backward(one_rank: None) -> None:
    """The outer one's gates wait, with their run."""

    def run(ddp: Any, forward: Any) -> None:
        with ddp.no_sync():
            _loss(forward(_Nested.apply(forward(_input()), forward))).backward()

    _assert_same(run, MLP(4, SIZE))


def test_a_hook_between_sections_may_run_the_same_backward(one_rank: None) -> None:
    """It runs to its end, while the outer one has sections to go."""

    def run(ddp: Any, forward: Any) -> list[Any]:
        parameters = list(ddp.parameters())
        inner: list[Any] = []

        def hook(_: torch.Tensor) -> None:
            handle.remove()
            inner.extend(torch.autograd.grad(loss, parameters, retain_graph=True))

        with ddp.no_sync():
            loss = _loss(forward(_input()))
            handle = parameters[-2].register_hook(hook)
            loss.backward(retain_graph=True)
        return inner

    _assert_same(run, MLP(4, SIZE))


def test_threads_run_backward_at_the_same_time(one_rank: None) -> None:
    """Two models that share compiled code run it in two threads each, which begin together."""
    pairs = [_settled_pair(MLP(4, SIZE)) for _ in range(2)]
    num_threads, num_rounds = 4, 20
    forward_lock = threading.Lock()  # for DDP's forward, whose active module is global
    all_ready = threading.Barrier(num_threads)

    def work(index: int) -> int:
        eager, ddp, compiled = pairs[index % 2]
        num_right = 0
        try:
            with forward_lock:
                expected = torch.autograd.grad(_loss(eager(_input())), list(eager.parameters()))
            for _ in range(num_rounds):
                with forward_lock:
                    loss = _loss(compiled(_input()))
                all_ready.wait(timeout=300)
                gradients = torch.autograd.grad(loss, list(ddp.parameters()))
                num_right += all(map(torch.allclose, gradients, expected))
        except BaseException:
            all_ready.abort()  # else the others wait for this thread
            raise
        return num_right

    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(work, index) for index in range(num_threads)]
    assert [future.exception() for future in futures] == [None] * num_threads
    assert [future.result() for future in futures] == [num_rounds] * num_threads


# ---- Backward in part -------------------------------------------------------------------------


@pytest.mark.quick("chain")
@each_model
def test_gradients_can_be_asked_for_in_any_combination(
    one_rank: None, model: Callable[[], nn.Module]
) -> None:
    """Each pair of parameters and the input is asked for; only sections up to the last one run."""

    def run(ddp: Any, forward: Any) -> list[Any]:
        x = _input()
        wanted = [x, *ddp.parameters()]
        with ddp.no_sync():
            loss = _loss(forward(x))
            gradients: list[Any] = []
            for pair in itertools.combinations(wanted, 2):
                gradients += torch.autograd.grad(loss, pair, retain_graph=True)
            loss.backward(inputs=wanted[2:4])
        return gradients

    _assert_same(run, model())


@pytest.mark.quick("False")
@pytest.mark.parametrize("of_parameters", [False, True])
def test_differentiating_any_sections_gradient_is_refused(
    one_rank: None, of_parameters: bool
) -> None:
    """The error has AOTAutograd's words; else the second derivative would be wrong."""
    _, ddp, compiled = _settled_pair(MLP(4, SIZE))
    parameters = list(ddp.parameters())
    with ddp.no_sync():
        loss = _loss(compiled(_input()))
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    inputs = {"inputs": parameters} if of_parameters else {}
    for gradient in gradients:
        assert gradient.requires_grad
        with pytest.raises(RuntimeError, match=REFUSAL):
            gradient.sum().backward(retain_graph=True, **inputs)


# ---- Hooks, which run between sections --------------------------------------------------------


def test_a_gradient_that_the_program_passed_in_keeps_its_history() -> None:
    """Only what the section returns refuses to be differentiated."""
    leaf, handle = (torch.ones(2, requires_grad=True) for _ in range(2))
    passed_in = leaf * 2
    (returned,) = gates.refuse_double_backward(lambda: [passed_in], handle)
    with pytest.raises(RuntimeError, match=REFUSAL):
        returned.sum().backward()
    passed_in.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2,), 2.0))


@pytest.mark.quick("chain")
@each_model
def test_hooks_may_write_to_gradients(one_rank: None, model: Callable[[], nn.Module]) -> None:
    """They do before and after accumulation; eager DDP's, which may share memory, have to copy."""

    def double(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2

    def double_in_place(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mul_(2)

    def add_one(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(1)

    def run(ddp: Any, forward: Any) -> None:
        for parameter in ddp.parameters():
            parameter.register_hook(double if forward is ddp else double_in_place)
            parameter.register_post_accumulate_grad_hook(add_one)
        for seed in range(2):
            _loss(forward(_input(seed))).backward()

    _assert_same(run, model())


@pytest.mark.quick("chain")
@pytest.mark.parametrize("model", MODELS[:2], ids=["chain", "sums"])
def test_no_section_reads_or_writes_a_gradient_that_was_handed_out(
    one_rank: None, model: Callable[[], nn.Module]
) -> None:
    """A hook's writes to one section's gradients stay, and the other sections' are as ever."""
    eager, ddp, compiled = _settled_pair(model())
    sections = _by_section(ddp)
    with ddp.no_sync(), eager.no_sync():
        _loss(eager(_input())).backward()
        expected = _named_gradients(eager.module)
        for poisoned in sections:
            ddp.zero_grad()
            hooks = [p.register_hook(lambda g: g.fill_(torch.nan)) for p in poisoned]
            _loss(compiled(_input())).backward()
            for name, parameter in ddp.module.named_parameters():
                if any(parameter is p for p in poisoned):
                    assert parameter.grad.isnan().all(), name
                else:
                    torch.testing.assert_close(parameter.grad, expected[name])
            for hook in hooks:
                hook.remove()


def test_parameters_may_be_updated_as_soon_as_their_gradient_is_there(one_rank: None) -> None:
    """An optimizer step in a hook: no later section reads the weight."""

    def run(ddp: Any, forward: Any) -> list[torch.Tensor]:
        def update(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad)

        for parameter in ddp.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        _loss(forward(_input())).backward()
        return list(ddp.parameters())

    _assert_same(run, MLP(4, SIZE))


def test_a_model_can_be_copied_between_forward_and_backward(one_rank: None) -> None:
    """The copy trains by itself."""
    eager, ddp, compiled = _settled_pair(MLP(4, SIZE))
    loss = _loss(compiled(_input()))
    copied = copy.deepcopy(ddp.module)
    loss.backward()
    _loss(eager(_input())).backward()
    torch.testing.assert_close(_named_gradients(ddp), _named_gradients(eager))
    assert not _named_gradients(copied)
    _, copied_ddp, compiled_copy = _settled_pair(copied)
    _loss(compiled_copy(_input())).backward()
    torch.testing.assert_close(_named_gradients(copied_ddp), _named_gradients(eager))


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
    _, ddp, compiled = _settled_pair(MLP(4, SIZE))
    output = compiled(_input())
    saved = _saved_activations(output)
    loss = _loss(output)
    del output
    num_alive = []
    for parameters in _by_section(ddp):
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
    eager, ddp, compiled = _settled_pair(MLP(4, SIZE))

    def step() -> list[StorageWeakRef]:
        output = compiled(_input())
        saved = _saved_activations(output)
        abandon(ddp, _loss(output))
        return saved

    with ddp.no_sync():
        saved = step()
    # What a failed backward left in its queue, torch keeps until the thread's next backward; the
    # hook's error and the frame that made it refer to each other.
    torch.zeros((), device=DEVICE, requires_grad=True).backward()
    gc.collect()
    assert len(saved) >= 4
    assert _num_alive(saved) == 0
    ddp.zero_grad()
    for forward in (eager, compiled):
        _loss(forward(_input())).backward()
    torch.testing.assert_close(_named_gradients(ddp), _named_gradients(eager))


def test_sections_find_the_context_in_which_backward_began(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AOTAutograd's whole backward does: settings of torch are context variables.

    What a hook sets between sections stands for the settings of another of autograd's threads.
    """
    _, ddp, compiled = _settled_pair(MLP(4, SIZE))
    setting = contextvars.ContextVar("setting", default="default")

    def hook(_: torch.Tensor) -> None:
        setting.set("hook's")

    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    found: list[str] = []
    run_section = gates.CompiledSection.run

    def noting(section: gates.CompiledSection, run: gates.Run) -> Sequence[Any]:
        found.append(setting.get())
        return run_section(section, run)

    monkeypatch.setattr(gates.CompiledSection, "run", noting)
    loss = _loss(compiled(_input()))
    setting.set("program's")
    loss.backward()
    assert setting.get() == "hook's"
    assert len(found) > 1
    assert set(found) == {"program's"}


def test_the_default_dtype_may_change_before_backward(one_rank: None) -> None:
    """The tensors that tie gates together do not depend on it."""

    def run(_: Any, forward: Any) -> None:
        loss = _loss(forward(_input()))
        torch.set_default_dtype(torch.float64)
        try:
            loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)

    _assert_same(run, MLP(4, SIZE))


def test_the_token_is_a_number_where_new_memory_is_filled_with_nan(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic algorithms fill it so, and Inductor's `nan_asserts` look at each input."""
    tokens: list[torch.Tensor] = []

    class Watched(gates.GatedGraph):
        def __init__(self, compiled: Callable[..., Any], *others: Any) -> None:
            def watched(*args: Any) -> Any:
                tokens.append(args[-1].detach().clone())
                return compiled(*args)

            super().__init__(watched, *others)

    monkeypatch.setattr(compiler, "GatedGraph", Watched)
    torch.use_deterministic_algorithms(True)
    try:
        _settled_pair(MLP(4, SIZE))
    finally:
        torch.use_deterministic_algorithms(False)
    assert tokens
    assert all(torch.equal(token, torch.zeros(1, device=DEVICE)) for token in tokens)


def test_autocast_around_backward_alone_does_what_it_does_unsplit(one_rank: None) -> None:
    """All sections run with it on, as eager DDP's backward does."""

    def run(_: Any, forward: Any) -> None:
        loss = _loss(forward(_input()))
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss.backward()

    _assert_same(run, MLP(4, SIZE))


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


def _sparse_gradients(rank: int, inner: str, is_mended: bool) -> float:
    """Return how far the first layer's gradients are from the mean of the ranks' own."""
    module = _SparseRows().to(DEVICE)
    alone = copy.deepcopy(module)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0002, find_unused_parameters=True)
    options = {"inner": inner, "split": "backward"}
    model = torch.compile(ddp, backend="ddpopt", options=options)
    (x,) = batches(rank, [(3, SIZE)])
    keep = gates._in_own_memory if is_mended else (lambda gradient: gradient)
    with mock.patch.object(gates, "_in_own_memory", keep):
        model(x).square().mean().backward()
    (cut,) = state.get(ddp).cuts
    assert len(cut.sections) > 2
    alone(x).square().mean().backward()
    expected = alone.first.weight.grad
    assert expected is not None
    dist.all_reduce(expected)
    actual = module.first.weight.grad
    assert actual is not None
    return float((actual - expected / 2).abs().max() / expected.abs().max())


@pytest.mark.quick("aot_eager")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_dividing_a_sparse_gradient_does_not_reach_later_sections(ranks: Ranks, inner: str) -> None:
    """DDP divides its rows in place; without rows of their own the next section would read them."""
    assert max(ranks.run(_sparse_gradients, inner, True)) < 1e-5
    if inner == "aot_eager":
        assert min(ranks.run(_sparse_gradients, inner, False)) > 0.1
