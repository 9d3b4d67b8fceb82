"""The code that runs at every step: arrival order at first, and models that share a graph."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ddpopt
import ddpopt.backend
from ddpopt import _torch
from ddpopt._torch import names
from ddpopt.errors import Reason
from ddpopt.split import runner, state
from tests.support.beside import Beside, compiled
from tests.support.buckets import rebuilt_buckets
from tests.support.cuts import assert_as_planned, only_cut
from tests.support.models import (
    CHANGES,
    MLP,
    WIDTH,
    assert_equal_states,
    batches,
    parametrize_all,
    prune_all,
    reorder,
    tie,
    train,
    twins,
)
from tests.support.registration import uninstall

CAP = {"bucket_cap_mb": 0.03}
each_split = pytest.mark.parametrize("split", ["backward", "forward"])


def _inputs(num_steps: int) -> list[torch.Tensor]:
    return batches(0, [(2, WIDTH)] * num_steps)


def _trained(model: nn.Module, num_steps: int, **options: Any) -> Beside:
    """A model that was trained beside eager DDP."""
    beside = Beside(model, ddp_options=CAP, **options)
    beside.train(_inputs(num_steps))
    return beside


def _note_arrivals(ddp: DistributedDataParallel) -> list[str]:
    """Names of parameters, in the order in which gradients will arrive."""
    arrived: list[str] = []
    for name, parameter in ddp.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    return arrived


def _texts(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    """What was logged so far about something."""
    return [r.getMessage() for r in caplog.records if about in r.getMessage()]


UNCOMPILED = "compiled nothing"
OTHER_BUCKETS = "other buckets than planned"


@pytest.mark.quick("False-backward")
@each_split
@pytest.mark.parametrize("static_graph", [False, True])
def test_the_first_gradients_arrive_in_the_planned_order(
    one_rank: None, static_graph: bool, split: str
) -> None:
    """Parameter hooks see the cut's order, until DDP has rebuilt its buckets."""
    ddp = DistributedDataParallel(MLP(), static_graph=static_graph, **CAP)
    arrived, model = _note_arrivals(ddp), compiled(ddp, split=split)
    for x in _inputs(4):
        was_rebuilt = ddp._has_rebuilt_buckets
        arrived.clear()
        model(x).sum().backward()
        assert only_cut(ddp).split == split
        if not was_rebuilt and not ddp._has_rebuilt_buckets:
            assert arrived == [p.name for p in only_cut(ddp).arrival]
    assert ddp._has_rebuilt_buckets


@pytest.mark.quick("deepcopy")
@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))])
def test_a_copy_of_a_trained_module_is_at_its_beginning(
    one_rank: None, copy_of: Callable[[DistributedDataParallel], DistributedDataParallel]
) -> None:
    """Its Reducer has formed no buckets yet, whatever the attribute says that was copied."""
    original = _trained(MLP(), 4).ddp
    ddp = copy_of(original)
    arrived, model = _note_arrivals(ddp), compiled(ddp)
    will_rebuild = []
    for x in _inputs(4):
        arrived.clear()
        model(x).sum().backward()
        will_rebuild.append(_torch.will_rebuild_buckets(ddp))
        if len(will_rebuild) == 1:
            assert arrived == [p.name for p in only_cut(ddp).arrival]
    assert will_rebuild[0]
    assert not will_rebuild[-1]
    assert_as_planned(ddp)
    assert not _torch.will_rebuild_buckets(original)


def test_a_model_that_runs_anothers_code_has_its_plan(one_rank: None) -> None:
    """Dynamo does not compile a second model of the same class; explain still tells."""
    first, second = (_trained(MLP(), 3) for _ in range(2))
    assert first.ddp._has_rebuilt_buckets
    assert second.ddp._has_rebuilt_buckets
    assert second.cuts == first.cuts != ()
    assert rebuilt_buckets(first.ddp) == rebuilt_buckets(second.ddp) != []


@pytest.mark.quick("backward-tie-at first")
@pytest.mark.parametrize("num_before", [0, 2], ids=["at first", "after two steps"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@each_split
def test_a_module_that_changes_once_ddp_was_made_keeps_its_buckets(
    one_rank: None,
    caplog: pytest.LogCaptureFixture,
    split: str,
    change: Callable[[MLP], None],
    num_before: int,
) -> None:
    """Weights that are tied, pruned, registered anew or replaced: the Reducer has its own list.

    Graphs are cut, buckets are DDP's, and nothing is warned of. The last shape is compiled anew.
    """
    # Not all that the Reducer has is in the module any more.
    is_lossy = change in (tie, parametrize_all)
    ddp_options = {**CAP, "find_unused_parameters": is_lossy}
    beside = Beside(MLP(), ddp_options=ddp_options, split=split)
    beside.train(_inputs(num_before))
    beside.change(change)
    beside.train(batches(0, [(2, WIDTH)] * 4 + [(3, WIDTH)] * 2))
    cut = beside.cuts[-1]
    assert cut.split == split
    assert len(cut.sections) > 1
    if change in (prune_all, reorder):
        assert_as_planned(beside.ddp)
        completed = sorted(k for section in cut.sections for k in section.completes)
        assert completed == [bucket.index for bucket in cut.buckets]
    planned = [[p.index for p in bucket.parameters] for bucket in cut.buckets]
    assert [sorted(b) for b in planned] == [sorted(b) for b in _torch.final_buckets(beside.ddp)]
    assert [r for r in caplog.records if "ddpopt" in r.name and r.levelname == "WARNING"] == []


class Bigger(nn.Module):
    """Has a module that is compiled, whose parameters have other indices in it, and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.head, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


@pytest.mark.quick("backward")
@each_split
def test_a_bigger_model_that_runs_anothers_code_has_a_plan_of_its_own_parameters(
    one_rank: None, caplog: pytest.LogCaptureFixture, split: str
) -> None:
    """Names and indices are those in the bigger model; it is not told of the other's buckets."""
    first = DistributedDataParallel(_compile_forward(MLP(), split), **CAP)
    train(first, _inputs(4))
    graphs = counters["stats"]["unique_graphs"]
    eager, second = twins(Bigger(MLP()), **CAP)
    _compile_forward(second.module.inner, split)
    used: list[list[str]] = []
    second.module.register_forward_hook(lambda *_: used.append(_used_so_far(second)))
    assert_equal_states(train(second, _inputs(4)), train(eager, _inputs(4)))
    assert counters["stats"]["unique_graphs"] == graphs
    bigger, inner = only_cut(second), only_cut(first)
    arrival = [p.name for p in bigger.arrival]
    assert arrival == [f"inner.{p.name}" for p in inner.arrival]
    assert list(map(sorted, used)) == [sorted(arrival)] * 4
    assert set(bigger.arrival) <= set(_torch.reducer_parameters(second).values())
    assert [p.name for b in bigger.buckets for p in b.parameters] == arrival
    for ours, others in zip(bigger.sections, inner.sections, strict=True):
        assert ours.parameters == tuple(f"inner.{name}" for name in others.parameters)
        assert ours.completes == others.completes
    assert not _texts(caplog, OTHER_BUCKETS)
    assert not _texts(caplog, UNCOMPILED)


def _used_so_far(ddp: DistributedDataParallel) -> list[str]:
    """The parameters that graphs have used in the present forward."""
    return [p.name for _, used in state.get(ddp).runs_with_gradients for p in used]


def _compile_forward(module: nn.Module, split: str) -> nn.Module:
    module.forward = compiled(module.forward, split=split)  # type: ignore[method-assign]
    return module


# ---- Steps in which nothing that uses a parameter was compiled -----------------------------------


def _sequential(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *between, nn.Linear(WIDTH, WIDTH))


class _Mask(nn.Module):
    """A module of the user's own, without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x > -9).all(dim=1, keepdim=True)


class _AllBroken(MLP):
    """A model whose layers Dynamo is told not to compile."""

    @torch._dynamo.disable
    def _run_layers(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run_layers(x * 2) * 2


class _Noting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Warned(NamedTuple):
    make: Callable[[], nn.Module]
    # What the warning names; there is none where this is empty.
    words: tuple[str, ...]
    around: Callable[[], Any] = contextlib.nullcontext
    # Else a part of it is.
    is_compiled: bool = True


def _hooked(kind: str, name: str) -> nn.Module:
    model = MLP()
    getattr(model.get_submodule(name), kind)(lambda *_: None)
    return model


def _compiled_in_place() -> nn.Module:
    model = MLP(3)
    for layer in model.layers:
        layer.compile(backend="ddpopt", options={"inner": "aot_eager"})
    return model


# Before torch 2.15 `Module.compile` of torch.nn's own classes compiles nothing.
IN_VAIN = ("torch.compile(part)",) if names.installed_release() < (2, 15) else ()
REMEDY = "DDP(torch.compile(model, backend='ddpopt'))"
WARNED = {
    "a bare sequential": Warned(lambda: _sequential(nn.ReLU()), (REMEDY,)),
    "a sequential in which a part without parameters is compiled": Warned(
        lambda: _sequential(_Mask()), ("4 parameters of 0, 2 in", REMEDY)
    ),
    "what is around blocks of one class": Warned(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), MLP(2), MLP(2), nn.Sequential(nn.LayerNorm(WIDTH))
        ),
        ("4 parameters of 0, 3.0 in",),
    ),
    "blocks alone": Warned(lambda: nn.Sequential(MLP(2), MLP(2)), ()),
    "a part that somebody chose": Warned(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), compiled(MLP(2))), (), is_compiled=False
    ),
    "frozen parameters around": Warned(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), MLP(2)), ()
    ),
    "graphs without a parameter": Warned(
        _AllBroken, ("12 parameters in", "TORCH_LOGS=graph_breaks,recompiles")
    ),
    "a dispatch mode": Warned(MLP, ("_Noting, a TorchDispatchMode",), _Noting),
    "a hook on the root, which is outside of what Dynamo traces": Warned(
        lambda: _hooked("register_full_backward_hook", ""), ()
    ),
    "a full backward hook": Warned(
        lambda: _hooked("register_full_backward_hook", "layers.2"), ("(here layers.2)",)
    ),
    "a full backward prehook": Warned(
        lambda: _hooked("register_full_backward_pre_hook", "layers.2"), ("(here layers.2)",)
    ),
    "parts that are compiled in place": Warned(_compiled_in_place, IN_VAIN, is_compiled=False),
}


@pytest.mark.parametrize("name", WARNED)
def test_who_trains_uncompiled_is_warned_once_with_the_cause(
    one_rank: None, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Dynamo does not look into `nn.Sequential` and its like, and compiles nothing under a mode."""
    case = WARNED[name]
    ddp = DistributedDataParallel(case.make(), **CAP)
    with case.around():
        train(ddp, _inputs(3), compiled(ddp) if case.is_compiled else ddp)
    texts = _texts(caplog, UNCOMPILED)
    assert len(texts) == bool(case.words)
    for word in case.words:
        assert word in texts[0]


def test_a_bare_sequential_under_ddp_is_cut_as_the_warning_advises(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    ddp = DistributedDataParallel(compiled(_sequential(nn.ReLU())), bucket_cap_mb=0.01)
    train(ddp, _inputs(3))
    assert not _texts(caplog, UNCOMPILED)
    assert len(only_cut(ddp).sections) == 2


@pytest.mark.quick("False")
@pytest.mark.parametrize("is_evaluated_first", [False, True])
def test_a_compiled_part_without_parameters_is_not_said_to_be_frozen_or_planned(
    one_rank: None, caplog: pytest.LogCaptureFixture, is_evaluated_first: bool
) -> None:
    ddp = DistributedDataParallel(_sequential(_Mask()), bucket_cap_mb=0.01)
    model = compiled(ddp)
    if is_evaluated_first:
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
    train(ddp, _inputs(4), model)
    assert len(_texts(caplog, UNCOMPILED)) == 1
    explained = ddpopt.explain(ddp)
    assert [bucket.is_as_planned for bucket in explained.buckets] == [None] * 2
    assert [bucket.planned for bucket in explained.buckets] == [()] * 2
    assert explained.cuts[-1].fallback is Reason.NO_PARAMETERS
    assert "it has none, or" in str(explained)


@pytest.mark.quick("False-recompile_limit")
@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_dynamos_limit_is_named_where_it_is_why_nothing_was_compiled(
    one_rank: None, caplog: pytest.LogCaptureFixture, limit: str, is_inside: bool
) -> None:
    """Each model of the class is told from there on, with its value and what to do; that works."""

    def run(depth: int) -> DistributedDataParallel:
        module = compiled(MLP(depth)) if is_inside else MLP(depth)
        ddp = DistributedDataParallel(module, **CAP)
        train(ddp, _inputs(2), ddp if is_inside else compiled(ddp))
        return ddp

    with torch._dynamo.config.patch({limit: 2}):
        for depth in (3, 4, 5, 6):
            run(depth)
        texts = _texts(caplog, UNCOMPILED)
        assert len(texts) == 2
        for text in texts:
            assert "MLP.forward" in text
            assert f"torch._dynamo.config.{limit} allows (2)" in text
            assert "torch._dynamo.reset()" in text
        torch._dynamo.reset()
        assert ddpopt.explain(run(5)).cuts
    assert len(_texts(caplog, UNCOMPILED)) == 2


def test_evaluating_first_is_not_warned_about_as_uncompiled(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The evaluation goes through DDP, by a method that is not compiled."""

    class Module(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.step(x) if self.training else super().forward(x)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    module = Module()
    module.step = compiled(module.step)
    ddp = DistributedDataParallel(module, **CAP)
    with torch.no_grad():
        ddp.eval()(torch.randn(2, WIDTH))
    train(ddp.train(), _inputs(2))
    assert not _texts(caplog, UNCOMPILED)
    assert ddpopt.explain(ddp).cuts


def test_models_without_ddpopt_are_not_warned_about(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """These are eager DDP and another backend."""
    for backend in (None, "eager"):
        ddp = DistributedDataParallel(_sequential())
        train(ddp, _inputs(2), torch.compile(ddp, backend=backend) if backend else ddp)
    assert not _texts(caplog, UNCOMPILED)


# ---- Code that other models run too --------------------------------------------------------------


def test_models_of_one_class_with_other_caps_do_not_share_code(one_rank: None) -> None:
    """Dynamo would share it; a guard on DDP's rules makes it compile again."""
    for cap, num_sections in ((0.03, 3), (25, 0), (0.0157, 6), (0.03, 3)):
        ddp = DistributedDataParallel(MLP(), bucket_cap_mb=cap)
        train(ddp, _inputs(3), compiled(ddp))
        assert len(only_cut(ddp).sections) == num_sections


def test_a_model_that_ran_before_it_was_wrapped_is_compiled_anew(one_rank: None) -> None:
    """Its first code is kept for runs outside of DDP."""
    model = compiled(MLP())
    model(torch.randn(2, WIDTH)).sum().backward()
    ddp = DistributedDataParallel(model, **CAP)
    train(ddp, _inputs(3))
    assert len(only_cut(ddp).sections) == 3
    graphs = counters["stats"]["unique_graphs"]
    model(torch.randn(2, WIDTH)).sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.quick("auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_a_parameter_written_to_in_forward_keeps_its_meaning(one_rank: None, split: str) -> None:
    """It gets no alias: a write under no_grad would go through that. Embeddings may write too."""

    class Clamped(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(2, WIDTH, max_norm=1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.layers[3].weight.clamp_(-0.05, 0.05)
            rows = self.embedding((x[:, 0] > 0).long())
            return super().forward(x + rows) * self.embedding.weight.mean()

    _trained(Clamped(), 4, split=split)


def test_buckets_other_than_planned_are_warned_about_with_the_first_parameter(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The first backward is another graph's, which uses the layers the other way round."""
    ddp = DistributedDataParallel(MLP(), **CAP)
    model = compiled(ddp)
    _step_with_layers_again(ddp, model, (5, 4, 3, 2, 1, 0))
    for x in _inputs(3):
        model(x).sum().backward()
    (text,) = _texts(caplog, OTHER_BUCKETS)
    assert "layers.5.weight of graph 4/0 is in bucket 2" in text
    explanation = ddpopt.explain(ddp)
    assert not all(bucket.is_as_planned for bucket in explanation.buckets)
    assert "DIFFERS" in str(explanation)


def _step_with_layers_again(ddp: Any, model: Any, order: tuple[int, ...]) -> None:
    """Take a step whose gradients all come of an eager use of the layers, in another order."""
    x = model(torch.randn(2, WIDTH)).detach()
    for k in order:
        x = ddp.module.layers[k](x).relu()
    x.sum().backward()


class _LoopedBlocks(nn.Module):
    """Blocks of one class, which Dynamo compiles as one graph when the loop is not compiled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP(2, width) for _ in range(3))

    @torch.compiler.disable(recursive=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.quick("0.03-0-auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
@pytest.mark.parametrize(("cap", "num_sections"), [(0.03, 0), (0.0157, 2)])
def test_a_graph_shared_by_blocks_is_planned_for_one_block(
    one_rank: None, caplog: pytest.LogCaptureFixture, cap: float, num_sections: int, split: str
) -> None:
    """A small block is not cut, whatever bucket boundary of the whole model falls into it."""
    beside = Beside(_LoopedBlocks(WIDTH), ddp_options={"bucket_cap_mb": cap}, split=split)
    beside.train(_inputs(4))
    assert beside.cuts
    assert all(cut.is_shared for cut in beside.cuts)
    assert {len(cut.sections) for cut in beside.cuts} == {num_sections}
    assert not _texts(caplog, OTHER_BUCKETS)


def test_nothing_is_compiled_anew_in_later_steps(one_rank: None) -> None:
    """Frames of ddpopt's code are not either, under ddpopt or under another backend."""
    for backend in ("ddpopt", "eager"):
        ddp = DistributedDataParallel(MLP())
        model = compiled(ddp) if backend == "ddpopt" else torch.compile(ddp, backend=backend)
        train(ddp, _inputs(3), model)
        frames = counters["frames"]["total"]
        train(ddp, _inputs(3), model)
        assert counters["frames"]["total"] == frames


def test_dynamo_looks_at_no_more_frames_than_without_ddpopt(one_rank: None) -> None:
    """Once ddpopt is loaded it has a context around all DDP forwards."""
    counts = []
    for install in (uninstall, ddpopt.backend.install):
        torch._dynamo.reset()
        install()
        ddp = DistributedDataParallel(MLP())
        frames = counters["frames"]["total"]
        train(ddp, _inputs(3), torch.compile(ddp, backend="eager"))
        counts.append(counters["frames"]["total"] - frames)
    assert counts[0] == counts[1] > 0


# ---- When DDP forms its buckets ------------------------------------------------------------------


def test_buckets_are_compared_after_a_long_accumulation(one_rank: None) -> None:
    """DDP writes its log in steps that communicate only."""
    ddp = DistributedDataParallel(MLP(), **CAP)
    model = compiled(ddp)
    for _ in range(4):
        with ddp.no_sync():
            for x in _inputs(15):
                model(x).sum().backward()
        model(torch.randn(2, WIDTH)).sum().backward()
    assert_as_planned(ddp)


def _has_aliases(output: torch.Tensor) -> bool:
    """Return whether gradients are held back to put them in order."""
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [source for source, _ in node.next_functions]
    return any(node.name() == "_AliasBackward" for node in seen)


def test_who_never_leaves_no_sync_runs_the_compiled_graph(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP sees the planned order in the first step that communicates, and only there."""
    monkeypatch.setattr(runner, "_MOST_UNSYNCED_RUNS", 5)
    ddp = DistributedDataParallel(MLP(), **CAP)
    model = compiled(ddp)
    ordered = []
    for is_synced in [False] * 8 + [True, False, True, False]:
        with contextlib.nullcontext() if is_synced else ddp.no_sync():
            output = model(torch.randn(2, WIDTH))
            ordered.append(_has_aliases(output))
            output.sum().backward()
    assert ordered == [True] * 5 + [False] * 3 + [True] + [False] * 3
    assert_as_planned(ddp)


@pytest.mark.quick("True-backward")
@each_split
@pytest.mark.parametrize("is_first", [True, False])
def test_gradients_of_a_forward_under_no_sync_may_be_seen(
    one_rank: None, split: str, is_first: bool
) -> None:
    """Two forwards with one backward, of which one ran under no_sync: DDP sees the sums arrive."""
    ddp = DistributedDataParallel(MLP(), **CAP)
    model = compiled(ddp, split=split)
    for x in _inputs(4):
        with ddp.no_sync() if is_first else contextlib.nullcontext():
            first = model(x)
        with contextlib.nullcontext() if is_first else ddp.no_sync():
            second = model(x + 1)
        (first * second).sum().backward()
    assert_as_planned(ddp)


class Normed(MLP):
    """Eager autograd gives the gradients of its layers in another order than compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x)).relu()
        return x


@pytest.mark.quick("2-backward")
@each_split
@pytest.mark.parametrize("num_eager", [2, 3, 12])
def test_what_trained_eagerly_before_is_cut_where_ddps_buckets_are(
    one_rank: None, caplog: pytest.LogCaptureFixture, num_eager: int, split: str
) -> None:
    """DDP's buckets are final when it is compiled, and formed from the order of eager steps."""
    ddp = DistributedDataParallel(Normed(), **CAP)
    train(ddp, _inputs(num_eager))
    train(ddp, _inputs(4), compiled(ddp, split=split))
    assert_as_planned(ddp)
    assert len(only_cut(ddp).sections) > 1
    assert not _texts(caplog, OTHER_BUCKETS)


def test_one_eager_step_before_is_named_as_the_cause(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """DDP has formed its buckets from it, and does not tell them before the step after next."""
    ddp = DistributedDataParallel(Normed(), **CAP)
    train(ddp, _inputs(1))
    train(ddp, _inputs(4), compiled(ddp))
    (text,) = _texts(caplog, OTHER_BUCKETS)
    assert "ran eagerly" in text
    found, planned = re.findall(r"bucket (\d+)", text)[:2]
    assert found != planned


@pytest.mark.quick("backward")
@each_split
def test_a_recompile_is_cut_where_ddps_buckets_are(one_rank: None, split: str) -> None:
    """Even if DDP formed other buckets than planned: they are final and known at a recompile."""
    ddp = DistributedDataParallel(MLP(), **CAP)
    model = compiled(ddp, split=split)
    _step_with_layers_again(ddp, model, (5, 0, 4, 1, 3, 2))
    for x in batches(0, [(2, WIDTH)] * 3 + [(3, WIDTH)]):
        model(x).sum().backward()
    first, second = ddpopt.explain(ddp).cuts
    assert first.split == second.split == split
    actual = [bucket.actual for bucket in ddpopt.explain(ddp).buckets]
    assert [tuple(p.name for p in bucket.parameters) for bucket in second.buckets] == actual
    assert first.buckets != second.buckets
