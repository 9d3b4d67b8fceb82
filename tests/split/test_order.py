"""A property of all of `split`: a hook that gets a gradient runs after all that stood before it.

So the effects and reads of the uncut backward before that point have been done. Each case trains a
model with hooks that read or write what a backward writes or reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpopt.errors import HookError, Reason
from ddpopt.split import compiler
from ddpopt.split.sections import BackwardSections, choose_backward_sections
from tests.support.backward_functions import NotesOwnSizeOfWeight, NotesSize
from tests.support.beside import compiled
from tests.support.cuts import only_cut
from tests.support.models import assert_equal_states, state_of, twins

SIZE = 16
CAP = {"bucket_cap_mb": 0.0005, "broadcast_buffers": False}  # each layer has a bucket of its own


class Layers(nn.Module):
    """Layers, each with a buffer of one number and one of a vector."""

    trains_input = False
    takes_gradient = False
    # A tensor of the last step that the program has, and a hook may write: the input, unless
    # another is said.
    given: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))
        for k in range(4):
            self.register_buffer(f"size{k}", torch.ones(()))
            self.register_buffer(f"vector{k}", torch.linspace(0.5, 1.5, SIZE))

    def sizes(self, k: int) -> torch.Tensor:
        return getattr(self, f"size{k}")

    def vectors(self, k: int) -> torch.Tensor:
        return getattr(self, f"vector{k}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(self.step(k, layer, x))
        return x

    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return NotesSize.apply(layer(x), self.sizes(k))


class NotesOwnSize(Layers):
    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return NotesOwnSizeOfWeight.apply(x, layer.weight, self.sizes(k)) + layer.bias


class TiedAndScaled(Layers):
    """The first layer's weight is the last one's too, scaled by a buffer that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Parameter(torch.randn(SIZE, SIZE) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.tied
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ (self.tied * self.scale()).t()

    def scale(self) -> torch.Tensor | float:
        return self.vectors(0)


class TiedAndReturned(TiedAndScaled):
    """As `TiedAndScaled`, by a value that the program gets as well, as if it were returned."""

    def scale(self) -> torch.Tensor:
        self.given = torch.exp(self.vectors(0))
        return self.given


class TiedAndWritten(TiedAndScaled):
    """As `TiedAndScaled`, by a buffer of which the forward writes a part.

    A compiled forward saves what the buffer is then, which may be in the buffer's own memory.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.vector0[: SIZE // 2] = x[0, : SIZE // 2].abs()
        return super().forward(x)


class TiedAndAveraged(TiedAndScaled):
    """As `TiedAndWritten`, by operators that write all of several buffers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._foreach_mul_([self.vector0, self.vector1], 0.9)
        return super().forward(x)


class TakesGradient(TiedAndScaled):
    """As `TiedAndScaled`, by a number; the gradient of the output is a tensor of the program's."""

    takes_gradient = True

    def scale(self) -> float:
        return 2.0


class Shifts(Layers):
    """Adds a buffer, which eager does not read in backward; a compiled one may, to add it again."""

    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(layer(x) + self.vectors(k)) * torch.sigmoid(x + self.vectors(k))


class ShiftsSparsely(Shifts):
    """As `Shifts`, with every second element of a tensor, of which no copy has the strides."""

    def __init__(self) -> None:
        super().__init__()
        for k in range(4):
            setattr(self, f"vector{k}", torch.linspace(0.5, 1.5, 2 * SIZE)[::2])


class ShiftsInput(Layers):
    """Eager saves what comes of the sum, not the input, which a compiled graph may read anew."""

    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return layer(torch.relu(x + self.vectors(k)) * torch.sigmoid(x + self.vectors(k)))


class ShiftsTrained(ShiftsInput):
    """Its input gets a gradient too."""

    trains_input = True


class Checkpointed(Layers):
    """Each layer but the last is made again in backward; it reads a buffer beside a parameter."""

    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.relu(F.linear(x, layer.weight, self.vectors(k)) + layer.bias)

        return run(x) if k == 3 else checkpoint(run, x, use_reentrant=False)


class AppendsNothing(Layers):
    """Its buffers are slices without a row, made anew in backward; no copy has their strides."""

    def __init__(self) -> None:
        super().__init__()
        for k in range(4):
            setattr(self, f"vector{k}", torch.ones(4, SIZE + 1)[:0, :SIZE])

    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([layer(x), torch.sigmoid(self.vectors(k))]).square()

        return checkpoint(run, x, use_reentrant=False)


class CheckpointedNorms(Layers):
    """Each layer is made again in backward, where its batch norm is given its running averages."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(SIZE) for _ in range(4))

    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.norms[k](layer(x)))

        return checkpoint(run, x, use_reentrant=False)


class Scales(Layers):
    """Eager saves the buffer, and a section reads it."""

    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return layer(x) * self.vectors(k)


class ScalesByCopies(Layers):
    """Eager saves a copy of each buffer. Inductor leaves the copies out."""

    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return layer(x) * self.vectors(k).clone()


class Normalized(Layers):
    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(layer(x), self.vectors(k), self.vectors((k + 1) % 4), training=True)


def _divide_by_note(model: Layers) -> None:
    for k, layer in enumerate(model.layers):
        layer.weight.register_hook(lambda gradient, k=k: gradient / (model.sizes(k) + 1e-6))


def _divide_accumulated(model: Layers) -> None:
    def divide(k: int, parameter: torch.Tensor) -> None:
        parameter.grad.div_(model.sizes(k) + 1e-6)

    for k, layer in enumerate(model.layers):
        layer.weight.register_post_accumulate_grad_hook(functools.partial(divide, k))


@torch.no_grad()
def _halve(model: Layers, names: tuple[str, ...], gradient: torch.Tensor) -> None:
    for name in names:
        getattr(model, name).mul_(0.5)


def _halve_vectors(model: Layers) -> None:
    """A hook on the last layer changes what backward has read of the tied weight's scale."""
    model.layers[3].weight.register_hook(functools.partial(_halve, model, ("vector0",)))


def _halve_all_vectors(model: Layers) -> None:
    names = tuple(f"vector{k}" for k in range(4))
    model.layers[3].bias.register_hook(functools.partial(_halve, model, names))
    model.layers[3].weight.register_hook(functools.partial(_halve, model, names))


def _halve_given(model: Layers) -> None:
    model.layers[3].weight.register_hook(functools.partial(_halve, model, ("given",)))


CASES: dict[str, tuple[type[Layers], Callable[[Layers], None]]] = {
    "a tensor hook reads what backward notes": (Layers, _divide_by_note),
    "a hook after accumulation reads what backward notes": (Layers, _divide_accumulated),
    "a hook reads a note of its own gradient": (NotesOwnSize, _divide_by_note),
    "a hook writes a buffer that backward has read": (TiedAndScaled, _halve_vectors),
    "a hook writes an output that backward has read": (TiedAndReturned, _halve_given),
    "a hook writes the output's gradient, which backward has read": (TakesGradient, _halve_given),
    "a hook writes a buffer that forward wrote a part of": (TiedAndWritten, _halve_vectors),
    "a hook writes a buffer that forward wrote with others": (TiedAndAveraged, _halve_vectors),
    "a hook writes a buffer that only forward has read": (Shifts, _halve_all_vectors),
    "a hook writes a strided buffer that only forward has read": (
        ShiftsSparsely,
        _halve_all_vectors,
    ),
    "a hook writes an input that only forward has read": (ShiftsInput, _halve_given),
    "a hook writes a trained input that only forward has read": (ShiftsTrained, _halve_given),
    "a call that is made again reads a parameter and a buffer": (Checkpointed, lambda model: None),
    "a call that is made again reads a buffer without elements": (
        AppendsNothing,
        lambda model: None,
    ),
}
# Of these, autograd refuses the backward where sections are graphs of their own.
WRITES_WHAT_FORWARD_READ = {name for name in CASES if "buffer that only forward" in name}


def _train(ddp: DistributedDataParallel, model: Any) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    gradients: dict[str, torch.Tensor] = {}
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(step))
        inputs.requires_grad_(ddp.module.trains_input)
        ddp.module.given = inputs
        output = model(inputs)
        if ddp.module.takes_gradient:
            ddp.module.given = torch.full_like(output, 0.01)
            output.backward(ddp.module.given)
        else:
            output.square().mean().backward()
        for name, parameter in ddp.module.named_parameters():
            if parameter.grad is not None:
                gradients[f"{step} {name}"] = parameter.grad.clone()
        optimizer.step()
    return gradients | {name: buffer.clone() for name, buffer in ddp.module.named_buffers()}


def _hooked_twins(kind: type[Layers], hook: Callable[[Layers], None]) -> tuple[Any, Any]:
    eager, ddp = twins(kind(), **CAP)
    for model in (eager, ddp):
        hook(model.module)
    return eager, ddp


def _check(name: str, **options: Any) -> None:
    eager, ddp = _hooked_twins(*CASES[name])
    assert_equal_states(_train(ddp, compiled(ddp, **options)), _train(eager, eager))
    cut = only_cut(ddp)
    assert cut.fallback is None
    assert cut.backward_fallback is None
    assert len(cut.sections) >= 3


@pytest.mark.quick("a tensor hook reads what backward notes-auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
@pytest.mark.parametrize("name", CASES)
def test_hooks_find_what_they_find_in_eager(one_rank: None, name: str, split: str) -> None:
    """Gradients, and what was noted, are eager's; graphs are cut nevertheless.

    The sections of a forward are graphs of their own, as after graph breaks: autograd refuses to go
    on where one is to read anew what was written since.
    """
    refuses = name in WRITES_WHAT_FORWARD_READ and split == "forward"
    error = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with error if refuses else contextlib.nullcontext():
        _check(name, split=split)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_hooks_find_what_they_find_in_eager_with_inductor(one_rank: None, name: str) -> None:
    """Inductor's graphs are decomposed, and recompute what is cheap."""
    _check(name, inner="inductor")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[BackwardSections]:
    """The sections of each backward that is cut."""
    sections: list[BackwardSections] = []

    def choose(*arguments: Any) -> BackwardSections:
        sections.append(choose_backward_sections(*arguments))
        return sections[-1]

    monkeypatch.setattr(compiler, "choose_backward_sections", choose)
    return sections


def test_frozen_parameters_have_no_snapshots(
    one_rank: None, chosen: list[BackwardSections]
) -> None:
    """Of a model that is fine-tuned in a few adapters, that would be a second model in memory."""
    model = Checkpointed()
    for layer in model.layers:
        layer.weight.requires_grad_(False)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5, broadcast_buffers=False)
    _train(ddp, compiled(ddp))
    assert len(only_cut(ddp).sections) >= 3
    copied = set[int]().union(*(s for cut in chosen for s in cut.snapshot_reads.values()))
    assert 1 <= len(copied) <= 4  # the buffers that sections after the first read, and the input


def test_running_statistics_have_no_snapshots(
    one_rank: None, chosen: list[BackwardSections]
) -> None:
    """A batch norm's backward is given them and does not read them; no compiler moves them."""
    ddp = DistributedDataParallel(Normalized(), bucket_cap_mb=1e-5)
    compiled(ddp)(torch.randn(4, SIZE)).sum().backward()
    (sections,) = chosen
    assert len(sections.sections) >= 3
    assert not sections.snapshot_reads


class _Reduces(Checkpointed):
    """What backward makes again of each buffer is one number."""

    def vectors(self, k: int) -> torch.Tensor:
        return super().vectors(k).sum()


def test_what_is_smaller_than_a_snapshot_is_computed_before_hooks(
    one_rank: None, chosen: list[BackwardSections]
) -> None:
    """The first section hands one number on, and copies no buffer."""
    ddp = DistributedDataParallel(_Reduces(), **CAP)
    _train(ddp, compiled(ddp))
    (sections,) = chosen
    assert len(sections.sections) >= 3
    copied = set[int]().union(*sections.snapshot_reads.values())
    assert len(copied) <= 1  # the input


@pytest.mark.quick("auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_checkpointed_batch_norms_are_cut(one_rank: None, split: str) -> None:
    """A recomputed norm leaves its averages alone. Eager's updates them: compare with unsplit."""
    unsplit, ddp = twins(CheckpointedNorms(), **CAP)
    expected = _train(unsplit, compiled(unsplit, enabled=False))
    assert_equal_states(_train(ddp, compiled(ddp, split=split)), expected)
    cut = only_cut(ddp)
    assert cut.split == ("forward" if split == "forward" else "backward")
    assert len(cut.sections) >= 3


def test_a_cut_without_snapshots_is_not_accepted(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof finds that a call of the forward would read what a hook may have written."""

    def plan_without(*arguments: Any) -> BackwardSections:
        cuts = choose_backward_sections(*arguments)
        assert cuts.snapshot_reads
        return dataclasses.replace(cuts, snapshot_reads={})

    monkeypatch.setattr(compiler, "choose_backward_sections", plan_without)
    ddp = DistributedDataParallel(Checkpointed(), **CAP)
    _train(ddp, compiled(ddp))
    cut = only_cut(ddp)
    assert cut.fallback is Reason.NOT_PROVEN
    assert "stands before the release" in cut.detail


@pytest.mark.quick("auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_a_comm_hook_finds_what_backward_noted_before(one_rank: None, split: str) -> None:
    """It skips the bucket if the layer's own backward has not noted anything yet."""
    results = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Layers(), **CAP)

        def hook(state: Any, bucket: Any, ddp: DistributedDataParallel = ddp) -> Any:
            values = bucket.buffer()
            if ddp.module.size3.item() == 1.0:
                values.zero_()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(values)
            return done

        hook.__annotations__.clear()  # DDP compares types with its own, and they are strings here
        ddp.register_comm_hook(None, hook)
        results.append(_train(ddp, compiled(ddp, split=split) if is_compiled else ddp))
    assert_equal_states(*results)


@pytest.mark.quick("auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_a_backward_of_a_part_notes_what_stands_before_it(one_rank: None, split: str) -> None:
    """`torch.autograd.grad` of the last layer alone runs no further sections."""
    sizes = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Layers(), **CAP)
        model = compiled(ddp, split=split) if is_compiled else ddp
        with ddp.no_sync():
            loss = model(torch.ones(4, SIZE)).square().mean()
            torch.autograd.grad(loss, ddp.module.layers[3].weight)
        sizes.append(ddp.module.size3.clone())
    assert torch.equal(*sizes)
    assert sizes[0] != 1


def _halve_input(model: Layers) -> None:
    model.layers[3].weight.register_post_accumulate_grad_hook(
        functools.partial(_halve, model, ("given",))
    )


@pytest.mark.quick("a buffer")
@pytest.mark.parametrize(
    ("kind", "hook"),
    [(Scales, _halve_all_vectors), (Layers, _halve_input)],
    ids=["a buffer", "the input"],
)
def test_a_write_to_what_a_section_is_yet_to_read_raises(
    one_rank: None, kind: type[Layers], hook: Callable[[Layers], None]
) -> None:
    """As autograd does in eager. It would be silently wrong: all is unpacked before any hook."""
    eager, ddp = _hooked_twins(kind, hook)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _train(eager, eager)
    with pytest.raises(HookError, match=r"shape \[.*16\]"):
        _train(ddp, compiled(ddp))


@pytest.mark.slow
def test_a_write_to_what_was_copied_raises_where_inductor_left_the_copy_out(
    one_rank: None,
) -> None:
    """Eager is right, as it reads the copy; what would be wrong here is refused."""
    eager, ddp = _hooked_twins(ScalesByCopies, _halve_all_vectors)
    _train(eager, eager)
    with pytest.raises(HookError, match="copy"):
        _train(ddp, compiled(ddp, "inductor"))


def _halve_gradient(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


def _compare_with_a_hook(
    model: Layers,
    name: str,
    hook: Callable[[torch.Tensor], None],
    loss_of: Callable[[Any, Layers], torch.Tensor],
    split: str = "auto",
) -> None:
    """Train with a hook on one parameter; compare gradients and parameters with eager's.

    `loss_of` takes what the model returns, and the model. Some steps arrive in the Reducer's final
    buckets, where gradients are released between sections.
    """
    eager, ddp = twins(model, **CAP)
    for trained in (eager, ddp):
        trained.module.get_parameter(name).register_post_accumulate_grad_hook(hook)
    run = compiled(ddp, split=split)
    inputs = torch.linspace(-1, 1, 4 * SIZE).view(4, SIZE)
    for _ in range(6):
        for trained, forward in ((eager, eager), (ddp, run)):
            trained.zero_grad()
            loss_of(forward(inputs), trained.module).backward()
        assert_equal_states(state_of(ddp), state_of(eager))
    cut = only_cut(ddp)
    assert cut.split == ("forward" if split == "forward" else "backward")
    assert len(cut.sections) >= 3


class ReturnsTwo(Layers):
    """Its outputs may get gradients in one memory. That of the first is that of `added` too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIZE, SIZE, bias=False)
        self.added = nn.Parameter(torch.randn(4, SIZE))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(x) + self.added, super().forward(x)


class ScalesByTrained(Layers):
    """Scales by a parameter that it does not train, and of which eager saves what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(SIZE, SIZE))

    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        weight = layer.weight * torch.sigmoid(self.scale.detach()) if k == 1 else layer.weight
        return F.linear(x, weight, layer.bias)


@torch.no_grad()
def _update_by_data(parameter: torch.Tensor) -> None:
    parameter.data.sub_(parameter.grad)  # not counted as a write


@torch.no_grad()
def _update(parameter: torch.Tensor) -> None:
    parameter.sub_(parameter.grad)


@pytest.mark.quick("_update_by_data")
@pytest.mark.parametrize("hook", [_update_by_data, _update])
def test_a_hook_may_update_a_parameter_that_something_else_trains(
    one_rank: None, hook: Callable[[torch.Tensor], None]
) -> None:
    """No section makes its gradient, so it may be there before sections that read it have run."""

    def loss_of(output: torch.Tensor, model: Layers) -> torch.Tensor:
        return output.square().mean() + model.scale.square().sum()

    _compare_with_a_hook(ScalesByTrained(), "scale", hook, loss_of)


class AddsRows(torch.autograd.Function):
    """`x @ weight + rows.sum(0)`, with a gradient of `rows` that no schema calls a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight + rows.sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        product = gradient @ weight.t()
        half, _ = torch.unsafe_chunk(product, 2)
        return torch.tanh(product), half, x.t() @ gradient


class HasRows(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2, SIZE) / 4)
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 4)

    def step(self, k: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        return AddsRows.apply(torch.tanh(y), self.rows, self.weight) if k == 2 else y


def test_a_hook_may_write_a_gradient_that_an_operator_made_in_anothers_memory(
    one_rank: None,
) -> None:
    """`unsafe_chunk` returns views, and its schema does not say so."""
    _compare_with_a_hook(
        HasRows(), "rows", _halve_gradient, lambda output, _: output.square().sum()
    )


@pytest.mark.quick("auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_a_hook_may_write_a_gradient_that_shares_memory_with_an_outputs(
    one_rank: None, split: str
) -> None:
    """Autograd gives both outputs views of one tensor, and `added` the first of them."""

    def loss_of(outputs: tuple[torch.Tensor, torch.Tensor], _: Layers) -> torch.Tensor:
        one, two = outputs
        return (one.view(-1) + two.view(-1)).square().sum()

    _compare_with_a_hook(ReturnsTwo(), "added", _halve_gradient, loss_of, split)


def _settled_output() -> torch.Tensor:
    """What a model returns whose buckets have settled, and whose backward is cut."""
    ddp = DistributedDataParallel(Layers(), **CAP)
    model = compiled(ddp)
    for _ in range(3):
        model(torch.ones(4, SIZE)).sum().backward()
    assert len(only_cut(ddp).sections) > 1
    return model(torch.ones(4, SIZE))


def test_hooks_on_the_graphs_own_node_see_its_first_section_alone(one_rank: None) -> None:
    """One before it gets one gradient more than there are outputs: None, for the token."""
    output = _settled_output()
    arrived: list[int] = []
    before: list[bool] = []
    output.grad_fn.register_prehook(lambda gradients: before.extend(g is None for g in gradients))
    output.grad_fn.register_hook(
        lambda gradients, _: arrived.extend(g.numel() for g in gradients if g is not None)
    )
    output.sum().backward()
    assert before == [False, True]
    assert sorted(arrived) == [1, SIZE * SIZE]  # the handle, and the last layer's weight


def test_a_hook_that_replaces_the_values_of_a_run_is_named(one_rank: None) -> None:
    """Hooks on the graph's own autograd node get, and may replace, what leads to the sections."""
    output = _settled_output()
    output.grad_fn.register_hook(
        lambda gradients, _: tuple(None if g is None else g * 2 for g in gradients)
    )
    with pytest.raises(HookError, match=r"Tensor\.register_hook"):
        output.sum().backward()
