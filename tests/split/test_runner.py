"""The code that runs at every step: arrival order at first, and models that share a graph."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ddpopt
import ddpopt.backend
from ddpopt import _torch
from ddpopt._torch import names
from ddpopt.errors import Reason
from ddpopt.split import runner
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

CAP = 0.03


def _compile(module: nn.Module, split: str = "auto") -> Any:
    return torch.compile(module, backend="ddpopt", options={"inner": "aot_eager", "split": split})


@pytest.mark.quick("False-backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
@pytest.mark.parametrize("static_graph", [False, True])
def test_the_first_gradients_arrive_in_the_planned_order(
    one_rank: None, static_graph: bool, split: str
) -> None:
    """Parameter hooks see the cut's order, until DDP has rebuilt its buckets."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP, static_graph=static_graph)
    arrived: list[str] = []
    for name, parameter in ddp.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    compiled = _compile(ddp, split)
    for x in batches(0, [(2, WIDTH)] * 4):
        was_rebuilt = ddp._has_rebuilt_buckets
        arrived.clear()
        compiled(x).sum().backward()
        cut = only_cut(ddp)
        assert cut.split == split
        if not was_rebuilt and not ddp._has_rebuilt_buckets:
            assert arrived == [p.name for p in cut.arrival]
    assert ddp._has_rebuilt_buckets


@pytest.mark.quick("deepcopy")
@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))])
def test_a_copy_of_a_trained_module_is_at_its_beginning(
    one_rank: None, copy_of: Callable[[DistributedDataParallel], DistributedDataParallel]
) -> None:
    """Its Reducer has formed no buckets yet, whatever the attribute says that was copied."""
    original = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    train(original, batches(0, [(2, WIDTH)] * 4), _compile(original))
    ddp = copy_of(original)
    arrived: list[str] = []
    for name, parameter in ddp.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    compiled = _compile(ddp)
    will_rebuild = []
    for x in batches(0, [(2, WIDTH)] * 4):
        arrived.clear()
        compiled(x).sum().backward()
        will_rebuild.append(_torch.will_rebuild_buckets(ddp))
        cut = only_cut(ddp)
        if len(will_rebuild) == 1:
            assert arrived == [p.name for p in cut.arrival]
    assert will_rebuild[0]
    assert not will_rebuild[-1]
    assert_as_planned(ddp)
    assert not _torch.will_rebuild_buckets(original)


def test_a_model_that_runs_anothers_code_has_its_plan(one_rank: None) -> None:
    """Dynamo does not compile a second model of the same class; explain still tells."""
    first = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    second = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    for ddp in (first, second):
        train(ddp, batches(0, [(2, WIDTH)] * 3), _compile(ddp))
        assert ddp._has_rebuilt_buckets
    assert ddpopt.explain(second).cuts == ddpopt.explain(first).cuts != ()
    assert rebuilt_buckets(first) == rebuilt_buckets(second) != []


@pytest.mark.quick("backward-tie-at first")
@pytest.mark.parametrize("num_before", [0, 2], ids=["at first", "after two steps"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("split", ["backward", "forward"])
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
    options: dict[str, Any] = {"bucket_cap_mb": CAP}
    if change in (tie, parametrize_all):  # not all that the Reducer has is in the module any more
        options["find_unused_parameters"] = True
    eager, ddp = twins(MLP(), **options)
    compiled = _compile(ddp, split)
    if num_before:
        inputs = batches(0, [(2, WIDTH)] * num_before)
        assert_equal_states(train(ddp, inputs, compiled), train(eager, inputs))
    for model in (eager, ddp):
        change(model.module)
    inputs = batches(0, [(2, WIDTH)] * 4 + [(3, WIDTH)] * 2)
    assert_equal_states(train(ddp, inputs, compiled), train(eager, inputs))
    *_, cut = ddpopt.explain(ddp).cuts
    assert cut.split == split
    assert len(cut.sections) > 1
    if change in (prune_all, reorder):
        assert_as_planned(ddp)
        assert sorted(k for s in cut.sections for k in s.completes) == [
            bucket.index for bucket in cut.buckets
        ]
    planned = [[p.index for p in bucket.parameters] for bucket in cut.buckets]
    assert [sorted(b) for b in planned] == [sorted(b) for b in _torch.final_buckets(ddp)]
    assert [r for r in caplog.records if "ddpopt" in r.name and r.levelname == "WARNING"] == []


class Bigger(nn.Module):
    """Has a module that is compiled, whose parameters have other indices in it, and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.head, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


@pytest.mark.quick("backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
def test_a_bigger_model_that_runs_anothers_code_has_a_plan_of_its_own_parameters(
    one_rank: None, caplog: pytest.LogCaptureFixture, split: str
) -> None:
    """Names and indices are those in the bigger model; it is not told of the other's buckets."""
    first = DistributedDataParallel(_compile_forward(MLP(), split), bucket_cap_mb=CAP)
    train(first, batches(0, [(2, WIDTH)] * 4))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    eager, second = twins(Bigger(MLP()), bucket_cap_mb=CAP)
    _compile_forward(second.module.inner, split)
    inputs = batches(0, [(2, WIDTH)] * 4)
    assert_equal_states(train(second, inputs), train(eager, inputs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    bigger, inner = only_cut(second), only_cut(first)
    assert [p.name for p in bigger.arrival] == [f"inner.{p.name}" for p in inner.arrival]
    assert set(bigger.arrival) <= set(_torch.reducer_parameters(second).values())
    assert [p.name for b in bigger.buckets for p in b.parameters] == [
        p.name for p in bigger.arrival
    ]
    assert [s.parameters for s in bigger.sections] == [
        tuple(f"inner.{name}" for name in s.parameters) for s in inner.sections
    ]
    assert [s.completes for s in bigger.sections] == [s.completes for s in inner.sections]
    assert not _warnings_of_buckets(caplog)
    assert not _warnings_of_uncompiled(caplog)


def _compile_forward(module: nn.Module, split: str) -> nn.Module:
    module.forward = _compile(module.forward, split)  # type: ignore[method-assign]
    return module


def _warnings_of_uncompiled(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "compiled nothing" in r.getMessage()]


def _sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def test_a_bare_sequential_under_ddp_is_warned_about_once(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamo compiles nothing there; the warning names the remedy, and the remedy works."""
    ddp = DistributedDataParallel(_sequential(), bucket_cap_mb=0.01)
    train(ddp, batches(0, [(2, WIDTH)] * 3), _compile(ddp))
    assert len(_warnings_of_uncompiled(caplog)) == 1
    assert "DDP(torch.compile(model, backend='ddpopt'))" in _warnings_of_uncompiled(caplog)[0]
    assert not ddpopt.explain(ddp).cuts

    remedied = DistributedDataParallel(_compile(_sequential()), bucket_cap_mb=0.01)
    train(remedied, batches(0, [(2, WIDTH)] * 3))
    assert len(_warnings_of_uncompiled(caplog)) == 1
    assert len(ddpopt.explain(remedied).cuts[0].sections) == 2


class _Mask(nn.Module):
    """A module of the user's own, without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x > -9).all(dim=1, keepdim=True)


@pytest.mark.quick("False")
@pytest.mark.parametrize("is_evaluated_first", [False, True])
def test_a_sequential_in_which_only_a_part_is_compiled_is_warned_about(
    one_rank: None, caplog: pytest.LogCaptureFixture, is_evaluated_first: bool
) -> None:
    """The compiled part uses no parameter, and none is said to be frozen or planned."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Mask(), nn.Linear(WIDTH, WIDTH))
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.01)
    compiled = _compile(ddp)
    if is_evaluated_first:
        with torch.no_grad():
            compiled(torch.ones(2, WIDTH))
    train(ddp, batches(0, [(2, WIDTH)] * 4), compiled)
    (text,) = _warnings_of_uncompiled(caplog)
    assert "compiled nothing of what uses the 4 parameters of 0, 2 in this " in text
    assert "DDP(torch.compile(model, backend='ddpopt'))" in text
    explained = ddpopt.explain(ddp)
    assert [bucket.is_as_planned for bucket in explained.buckets] == [None] * 2
    assert [bucket.planned for bucket in explained.buckets] == [()] * 2
    assert explained.cuts[-1].fallback is Reason.NO_PARAMETERS
    assert "it has none, or" in str(explained)


def test_of_a_sequential_with_blocks_the_warning_names_what_is_around_them(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks of one class share a graph; of blocks alone there is nothing to say."""
    parts = [nn.Linear(WIDTH, WIDTH), MLP(2), MLP(2), nn.Sequential(nn.LayerNorm(WIDTH))]
    ddp = DistributedDataParallel(nn.Sequential(*parts), bucket_cap_mb=CAP)
    train(ddp, batches(0, [(2, WIDTH)] * 3), _compile(ddp))
    (text,) = _warnings_of_uncompiled(caplog)
    assert "compiled nothing of what uses the 4 parameters of 0, 3.0 in this " in text
    blocks = DistributedDataParallel(nn.Sequential(MLP(2), MLP(2)), bucket_cap_mb=CAP)
    train(blocks, batches(0, [(2, WIDTH)] * 3), _compile(blocks))
    assert len(_warnings_of_uncompiled(caplog)) == 1


def test_parts_that_somebody_chose_to_compile_are_not_warned_about(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen parameters around compiled parts are not warned about, either."""
    chosen = nn.Sequential(nn.Linear(WIDTH, WIDTH), _compile(MLP(2)))
    train(DistributedDataParallel(chosen), batches(0, [(2, WIDTH)] * 2))
    frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), MLP(2))
    ddp = DistributedDataParallel(frozen)
    train(ddp, batches(0, [(2, WIDTH)] * 2), _compile(ddp))
    assert not _warnings_of_uncompiled(caplog)


class _AllBroken(MLP):
    """A model whose layers Dynamo is told not to compile."""

    @torch._dynamo.disable
    def _run_layers(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run_layers(x * 2) * 2


def test_a_model_whose_graphs_use_no_parameter_is_warned_about(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    ddp = DistributedDataParallel(_AllBroken())
    train(ddp, batches(0, [(2, WIDTH)] * 3), _compile(ddp))
    (text,) = _warnings_of_uncompiled(caplog)
    assert "compiled nothing of what uses the 12 parameters in this " in text
    assert "TORCH_LOGS=graph_breaks,recompiles" in text


class _Noting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_is_named_as_the_cause(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamo compiles nothing under one."""
    ddp = DistributedDataParallel(MLP())
    with _Noting():
        train(ddp, batches(0, [(2, WIDTH)] * 2), _compile(ddp))
    (text,) = _warnings_of_uncompiled(caplog)
    assert "_Noting, a TorchDispatchMode, is on" in text


@pytest.mark.quick("register_full_backward_hook")
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_full_backward_hooks_are_named_as_the_cause(
    one_rank: None, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """They stand in the way if Dynamo traces a call of their module; the root's does not."""
    root, inner = (DistributedDataParallel(MLP(), bucket_cap_mb=CAP) for _ in range(2))
    getattr(root.module, kind)(lambda *_: None)
    getattr(inner.module.layers[2], kind)(lambda *_: None)
    train(root, batches(0, [(2, WIDTH)] * 2), _compile(root))
    assert ddpopt.explain(root).cuts[0].sections
    torch._dynamo.reset()  # it has no guards on hooks
    train(inner, batches(0, [(2, WIDTH)] * 2), _compile(inner))
    (text,) = _warnings_of_uncompiled(caplog)
    assert "full backward hooks (here layers.2)" in text


def test_parts_that_are_compiled_in_place_in_vain_are_warned_about(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """`Module.compile` of torch.nn's own classes compiles nothing before torch 2.15."""
    module = MLP(3)
    for layer in module.layers:
        layer.compile(backend="ddpopt", options={"inner": "aot_eager"})
    ddp = DistributedDataParallel(module)
    train(ddp, batches(0, [(2, WIDTH)] * 2))
    if names.installed_release() >= (2, 15):
        assert ddpopt.explain(ddp).cuts
        assert not _warnings_of_uncompiled(caplog)
    else:
        (text,) = _warnings_of_uncompiled(caplog)
        assert "torch.compile(part) does" in text


@pytest.mark.quick("False-recompile_limit")
@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_dynamos_limit_is_named_where_it_is_why_nothing_was_compiled(
    one_rank: None, caplog: pytest.LogCaptureFixture, limit: str, is_inside: bool
) -> None:
    """Each model of the class is told from there on, with its value and what to do; that works."""

    def run(depth: int) -> DistributedDataParallel:
        module = _compile(MLP(depth)) if is_inside else MLP(depth)
        ddp = DistributedDataParallel(module, bucket_cap_mb=CAP)
        train(ddp, batches(0, [(2, WIDTH)] * 2), ddp if is_inside else _compile(ddp))
        return ddp

    with torch._dynamo.config.patch({limit: 2}):
        for depth in (3, 4, 5, 6):
            run(depth)
        texts = _warnings_of_uncompiled(caplog)
        assert len(texts) == 2
        for text in texts:
            assert f"MLP.forward as often as torch._dynamo.config.{limit} allows (2)" in text
            assert "torch._dynamo.reset()" in text
        torch._dynamo.reset()
        assert ddpopt.explain(run(5)).cuts
    assert len(_warnings_of_uncompiled(caplog)) == 2


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
    module.step = _compile(module.step)
    ddp = DistributedDataParallel(module, bucket_cap_mb=CAP)
    with torch.no_grad():
        ddp.eval()(torch.randn(2, WIDTH))
    train(ddp.train(), batches(0, [(2, WIDTH)] * 2))
    assert not _warnings_of_uncompiled(caplog)
    assert ddpopt.explain(ddp).cuts


def test_models_without_ddpopt_are_not_warned_about(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """These are eager DDP and another backend."""
    for backend in (None, "eager"):
        ddp = DistributedDataParallel(_sequential())
        compiled = torch.compile(ddp, backend=backend) if backend else ddp
        train(ddp, batches(0, [(2, WIDTH)] * 2), compiled)
    assert not _warnings_of_uncompiled(caplog)


def test_models_of_one_class_with_other_caps_do_not_share_code(one_rank: None) -> None:
    """Dynamo would share it; a guard on DDP's rules makes it compile again."""
    for cap, sections in ((CAP, 3), (25, 0), (0.0157, 6), (CAP, 3)):
        ddp = DistributedDataParallel(MLP(), bucket_cap_mb=cap)
        train(ddp, batches(0, [(2, WIDTH)] * 3), _compile(ddp))
        cut = only_cut(ddp)
        assert len(cut.sections) == sections


def test_a_model_that_ran_before_it_was_wrapped_is_compiled_anew(one_rank: None) -> None:
    """Its first code is kept for runs outside of DDP."""
    model = _compile(MLP())
    model(torch.randn(2, WIDTH)).sum().backward()
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP)
    train(ddp, batches(0, [(2, WIDTH)] * 3))
    assert [len(cut.sections) for cut in ddpopt.explain(ddp).cuts] == [3]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model(torch.randn(2, WIDTH)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


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

    eager, ddp = twins(Clamped(), bucket_cap_mb=CAP)
    inputs = batches(0, [(2, WIDTH)] * 4)
    assert_equal_states(train(ddp, inputs, _compile(ddp, split)), train(eager, inputs))


def test_buckets_other_than_planned_are_warned_about_with_the_first_parameter(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The first backward is another graph's, which uses the layers the other way round."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    compiled = _compile(ddp)
    x = compiled(torch.randn(2, WIDTH)).detach()
    for layer in reversed(ddp.module.layers):
        x = layer(x).relu()
    x.sum().backward()
    for _ in range(3):
        compiled(torch.randn(2, WIDTH)).sum().backward()
    (text,) = _warnings_of_buckets(caplog)
    assert "layers.5.weight of graph 4/0 is in bucket 2" in text
    explanation = ddpopt.explain(ddp)
    assert not all(bucket.is_as_planned for bucket in explanation.buckets)
    assert "DIFFERS" in str(explanation)


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
@pytest.mark.parametrize(("cap", "sections"), [(CAP, 0), (0.0157, 2)])
def test_a_graph_shared_by_blocks_is_planned_for_one_block(
    one_rank: None, caplog: pytest.LogCaptureFixture, cap: float, sections: int, split: str
) -> None:
    """A small block is not cut, whatever bucket boundary of the whole model falls into it."""
    eager, ddp = twins(_LoopedBlocks(WIDTH), bucket_cap_mb=cap)
    inputs = batches(0, [(2, WIDTH)] * 4)
    assert_equal_states(train(ddp, inputs, _compile(ddp, split)), train(eager, inputs))
    cuts = ddpopt.explain(ddp).cuts
    assert cuts
    assert all(cut.is_shared for cut in cuts)
    assert {len(cut.sections) for cut in cuts} == {sections}
    assert not [r for r in caplog.records if "other buckets" in r.getMessage()]


def test_nothing_is_compiled_anew_in_later_steps(one_rank: None) -> None:
    """Frames of ddpopt's code are not either, under ddpopt or under another backend."""
    for backend in ("ddpopt", "eager"):
        ddp = DistributedDataParallel(MLP())
        compiled = torch.compile(ddp, backend=backend)
        train(ddp, batches(0, [(2, WIDTH)] * 3), compiled)
        frames = torch._dynamo.utils.counters["frames"]["total"]
        train(ddp, batches(0, [(2, WIDTH)] * 3), compiled)
        assert torch._dynamo.utils.counters["frames"]["total"] == frames


def test_dynamo_looks_at_no_more_frames_than_without_ddpopt(one_rank: None) -> None:
    """Once ddpopt is loaded it has a context around all DDP forwards."""
    counts = []
    for install in (uninstall, ddpopt.backend.install):
        torch._dynamo.reset()
        install()
        ddp = DistributedDataParallel(MLP())
        frames = torch._dynamo.utils.counters["frames"]["total"]
        train(ddp, batches(0, [(2, WIDTH)] * 3), torch.compile(ddp, backend="eager"))
        counts.append(torch._dynamo.utils.counters["frames"]["total"] - frames)
    assert counts[0] == counts[1] > 0


def test_buckets_are_compared_after_a_long_accumulation(one_rank: None) -> None:
    """DDP writes its log in steps that communicate only."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    compiled = _compile(ddp)
    for _ in range(4):
        with ddp.no_sync():
            for x in batches(0, [(2, WIDTH)] * 15):
                compiled(x).sum().backward()
        compiled(torch.randn(2, WIDTH)).sum().backward()
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
    monkeypatch.setattr(runner, "_MOST_UNSEEN", 5)
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    compiled = _compile(ddp)
    ordered = []
    for is_synced in [False] * 8 + [True, False, True, False]:
        with contextlib.nullcontext() if is_synced else ddp.no_sync():
            output = compiled(torch.randn(2, WIDTH))
            ordered.append(_has_aliases(output))
            output.sum().backward()
    assert ordered == [True] * 5 + [False] * 3 + [True] + [False] * 3
    assert_as_planned(ddp)


@pytest.mark.quick("True-backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
@pytest.mark.parametrize("is_first", [True, False])
def test_gradients_of_a_forward_under_no_sync_may_be_seen(
    one_rank: None, split: str, is_first: bool
) -> None:
    """Two forwards with one backward, of which one ran under no_sync: DDP sees the sums arrive."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    compiled = _compile(ddp, split)
    inputs = batches(0, [(2, WIDTH)] * 8)
    for x, y in zip(inputs[::2], inputs[1::2], strict=True):
        with ddp.no_sync() if is_first else contextlib.nullcontext():
            first = compiled(x)
        with contextlib.nullcontext() if is_first else ddp.no_sync():
            second = compiled(y)
        (first * second).sum().backward()
    assert_as_planned(ddp)


def _warnings_of_buckets(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "other buckets than planned" in text]


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
@pytest.mark.parametrize("split", ["backward", "forward"])
@pytest.mark.parametrize("num_eager", [2, 3, 12])
def test_what_trained_eagerly_before_is_cut_where_ddps_buckets_are(
    one_rank: None, caplog: pytest.LogCaptureFixture, num_eager: int, split: str
) -> None:
    """They are final by then, and formed from the order of eager steps."""
    ddp = DistributedDataParallel(Normed(), bucket_cap_mb=CAP)
    train(ddp, batches(0, [(2, WIDTH)] * num_eager))
    train(ddp, batches(0, [(2, WIDTH)] * 4), _compile(ddp, split))
    assert_as_planned(ddp)
    assert len(ddpopt.explain(ddp).cuts[0].sections) > 1
    assert not _warnings_of_buckets(caplog)


def test_one_eager_step_before_is_named_as_the_cause(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """DDP has formed its buckets from it, and does not tell them before the step after next."""
    ddp = DistributedDataParallel(Normed(), bucket_cap_mb=CAP)
    train(ddp, batches(0, [(2, WIDTH)]))
    train(ddp, batches(0, [(2, WIDTH)] * 4), _compile(ddp))
    (text,) = _warnings_of_buckets(caplog)
    assert "ran eagerly" in text
    numbers = re.search(r"is in bucket (\d+) with others than planned \(bucket (\d+)\)", text)
    assert numbers is not None
    assert numbers[1] != numbers[2]


@pytest.mark.quick("backward")
@pytest.mark.parametrize("split", ["backward", "forward"])
def test_a_recompile_is_cut_where_ddps_buckets_are(one_rank: None, split: str) -> None:
    """It is even when DDP formed other buckets than planned: they are final, and known by then."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    compiled = _compile(ddp, split)
    x = compiled(torch.randn(2, WIDTH)).detach()
    for i in (5, 0, 4, 1, 3, 2):
        x = ddp.module.layers[i](x).relu()
    x.sum().backward()
    for _ in range(3):
        compiled(torch.randn(2, WIDTH)).sum().backward()
    compiled(torch.randn(3, WIDTH)).sum().backward()
    first, second = ddpopt.explain(ddp).cuts
    assert first.split == second.split == split
    actual = [bucket.actual for bucket in ddpopt.explain(ddp).buckets]
    assert [tuple(p.name for p in bucket.parameters) for bucket in second.buckets] == actual
    assert first.buckets != second.buckets
