"""The backend: who gets which graph, the graphs that stay whole, and modes that are refused."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.backends.distributed as in_tree
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddpopt
import ddpopt.backend
from ddpopt import _torch, options
from ddpopt.errors import NotCutError, Reason, TorchDriftError
from ddpopt.options import NO_COMPILER
from ddpopt.split import compiler, state
from tests.support.beside import Beside, compiled
from tests.support.buckets import rebuilt_buckets
from tests.support.cuts import assert_as_planned, only_cut
from tests.support.fresh import run_fresh
from tests.support.logs import logged
from tests.support.models import MLP, WIDTH, batches, train, twins
from tests.support.on_ranks import on_ranks
from tests.support.registration import uninstall

CAP = 0.03  # MiB: two of the MLP's six layers


def _x() -> torch.Tensor:
    return torch.randn(2, WIDTH)


def test_the_backend_is_found_without_an_import() -> None:
    """A fresh process finds it by its entry point."""
    script = (
        "import sys, torch; assert 'ddpopt' in torch.compiler.list_backends();"
        "f = torch.compile(lambda x: x + 1, backend='ddpopt', options={'inner': 'eager'});"
        "print(f(torch.ones(1)).item(), 'ddpopt' in sys.modules)"
    )
    assert run_fresh(script).split() == ["2.0", "True"]


@pytest.mark.quick("0.03")
@pytest.mark.parametrize("cap_mb", [CAP, 25])
def test_without_a_compiler_the_last_line_says_what_to_do(one_rank: None, cap_mb: float) -> None:
    """The line comes for a graph that is cut, and for one that is not.

    Exceptions of Python 3.10 have no notes: it is a warning there.
    """

    def fail(*_: object) -> Any:
        raise InductorError(InvalidCxxCompiler(), None)

    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=cap_mb)
    with logged("warning") as warnings, pytest.raises(InductorError) as caught:
        compiled(ddp, inner=fail)(_x())
    *_, last = getattr(caught.value, "__notes__", warnings)
    assert last == f"ddpopt: Inductor finds no C++ compiler; {NO_COMPILER}"


@pytest.mark.quick("plain")
@pytest.mark.parametrize("kind", ["plain", "fully_shard", "DDP"])
@on_ranks(2)
def test_ranks_that_train_without_ddp_are_warned_once(kind: str) -> None:
    """Such ranks would not notice that their gradients stay apart; an evaluation has none."""
    ddpopt.backend._warn_of_ranks.cache_clear()
    with logged("warning") as warnings:
        for _ in range(2):
            torch._dynamo.reset()
            model: torch.nn.Module = MLP()
            num_before = len(warnings)
            if kind == "fully_shard":
                fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            if kind == "DDP":
                model = DistributedDataParallel(model)
            with mock.patch.object(state, "has_modules", return_value=kind == "DDP"):
                run = compiled(model, inner="eager")
                with torch.no_grad():
                    run(_x())
                assert len(warnings) == num_before
                run(_x()).sum().backward()
    assert len(warnings) == (0 if kind == "DDP" else 1)
    assert all("Wrap the model in DistributedDataParallel" in text for text in warnings)


@pytest.mark.quick("torch.compile(DDP(m))-eager", "DDP(torch.compile(m))-eager")
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["torch.compile(DDP(m))", "DDP(torch.compile(m))"])
def test_both_ways_of_wrapping_split_and_train_like_eager_ddp(
    one_rank: None, way: str, inner: str
) -> None:
    beside = Beside(MLP(), ddp_options={"bucket_cap_mb": CAP}, way=way, inner=inner)
    beside.train(batches(0, [(2, WIDTH)] * 4))
    assert beside.num_sections == 3


def test_buckets_after_the_rebuild_are_the_planned_ones(one_rank: None) -> None:
    """Parameters and launch order are, for a cap that falls between a weight and its bias."""
    ddp = DistributedDataParallel(MLP(depth=7), bucket_cap_mb=0.0157)
    train(ddp, batches(0, [(2, WIDTH)] * 3), compiled(ddp))
    planned = [[p.index for p in bucket.parameters] for bucket in only_cut(ddp).buckets]
    assert planned == rebuilt_buckets(ddp)


def test_a_name_that_an_inner_compiler_needs_and_torch_lacks_leaves_graphs_whole(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = TorchDriftError("torch has no such name")
    monkeypatch.setattr(_torch, "has_cuda_graphs", mock.Mock(side_effect=lacks))
    monkeypatch.setattr(options, "_resolve_inner", lambda *_: lambda gm, _inputs: gm.forward)
    beside = Beside(MLP(), ddp_options={"bucket_cap_mb": CAP}, inner="inductor")
    beside.train(batches(0, [(2, WIDTH)]))
    assert beside.cut.fallback is Reason.TORCH_DRIFT
    assert "no such name" in beside.cut.detail


@pytest.mark.quick("ONE_BUCKET")
@pytest.mark.parametrize(
    ("cap_mb", "options", "reason"),
    [(25, {}, Reason.ONE_BUCKET), (CAP, {"enabled": False}, Reason.DISABLED)],
    ids=["ONE_BUCKET", "DISABLED"],
)
def test_one_bucket_and_a_disabled_split_are_compiled_whole_in_one_call(
    one_rank: None, cap_mb: float, options: dict[str, Any], reason: Reason
) -> None:
    """The whole graph goes in one call, and without a warning."""
    num_inputs_of_calls: list[int] = []

    def inner(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        num_inputs_of_calls.append(len(example_inputs))
        return gm.forward

    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=cap_mb)
    with logged("warning") as warnings:
        train(ddp, batches(0, [(2, WIDTH)] * 2), compiled(ddp, inner=inner, **options))
    num_parameters = len(list(ddp.parameters()))
    assert num_inputs_of_calls == [num_parameters + 1]
    assert only_cut(ddp).fallback is reason
    assert not warnings


def test_without_gradients_the_graph_goes_whole(one_rank: None) -> None:
    """A graph under no_grad has no gradients; the training graph beside it is split."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    run = compiled(ddp)
    with torch.no_grad():
        run(_x())
    run(_x()).sum().backward()
    reasons = [cut.fallback for cut in ddpopt.explain(ddp).cuts]
    assert reasons == [Reason.NO_GRAD, None]


def test_frozen_parameters_leave_nothing_to_split(one_rank: None) -> None:
    """DDP itself refuses a module without any gradient, so one parameter is ignored instead."""
    model = MLP()
    model.requires_grad_(False)
    model.layers[0].weight.requires_grad_(True)
    names = [n for n, _ in model.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names[1:])
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP)
    model.layers[0].weight.requires_grad_(False)
    compiled(ddp)(_x())
    assert only_cut(ddp).fallback is Reason.NO_PARAMETERS


def test_without_ddp_the_graph_goes_whole() -> None:
    """The backend is then the inner compiler."""
    x = _x()
    model = MLP()
    assert torch.equal(compiled(model)(x), model(x))


def test_optimize_ddp_false_which_turns_off_the_in_tree_optimizer_makes_no_difference(
    one_rank: None,
) -> None:
    """The flag stands in many programs, as a workaround, and is left as it is."""
    beside = Beside(MLP(), ddp_options={"bucket_cap_mb": CAP})
    with torch._dynamo.config.patch(optimize_ddp=False), logged("warning") as warnings:
        beside.train(_x() for _ in range(4))
        assert torch._dynamo.config.optimize_ddp is False
    assert beside.num_sections > 1
    assert_as_planned(beside.ddp)
    assert not warnings


@pytest.mark.quick("flags0-set it to True")
@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ({"optimize_ddp": "python_reducer"}, "set it to True"),
        ({"compiled_autograd": True}, "compiled_autograd = False"),
    ],
)
def test_python_reducer_and_compiled_autograd_are_refused(
    one_rank: None, flags: dict[str, Any], remedy: str
) -> None:
    """The error says which flag to set."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    with (
        torch._dynamo.config.patch(**flags),
        pytest.raises(BackendCompilerFailed, match=remedy),
    ):
        compiled(ddp)(_x())


@pytest.mark.quick("ours, all of a step")
@pytest.mark.parametrize(
    ("backend", "way", "outcome"),
    [
        ("ddpopt", "step", "refused"),
        ("ddpopt", "compiled DDP in a step", "refused"),
        ("ddpopt", "compiled in DDP in a step", "refused"),
        ("ddpopt", "compiled DDP", "averaged"),
        ("aot_eager", "step", "no gradient"),
    ],
    ids=[
        "ours, all of a step",
        "ours, DDP in a step",
        "ours, in DDP in a step",
        "ours, DDP",
        "another, all of a step",
    ],
)
@on_ranks(2)
def test_trace_autograd_ops_is_refused_where_a_compiled_function_calls_ddp(
    rank: int, backend: str, way: str, outcome: str
) -> None:
    """Dynamo traces it where a compiled function calls DDP; other backends drop it silently."""
    is_ours = backend == "ddpopt"
    options = {"backend": backend, **({"options": {"inner": "aot_eager"}} if is_ours else {})}
    eager, ddp = twins(MLP(), **({"bucket_cap_mb": CAP} if is_ours else {}))
    if way == "compiled in DDP in a step":
        ddp = DistributedDataParallel(torch.compile(ddp.module, **options))
    model = torch.compile(ddp, **options) if way.startswith("compiled DDP") else ddp

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    (x,) = batches(rank, [(4, WIDTH)])
    eager(x).pow(2).mean().backward()
    run = torch.compile(step, **options) if way.endswith("step") else step
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        if outcome == "refused":
            with pytest.raises(BackendCompilerFailed, match="trace_autograd_ops is on, and"):
                run(x)
            return
        run(x)
    pairs = [(p.grad, q.grad) for p, q in zip(ddp.parameters(), eager.parameters(), strict=True)]
    if outcome == "no gradient":
        assert all(gradient is None for gradient, _ in pairs)
    else:
        assert all(torch.allclose(*pair) for pair in pairs)


def test_gradients_that_a_forward_computes_are_no_reason_to_refuse(one_rank: None) -> None:
    """Forces in models of energies are such; trace_autograd_ops is meant for them."""

    class Forces(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            energy = super().forward(x).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    beside = Beside(Forces(), ddp_options={"bucket_cap_mb": CAP})
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        beside.train(x.requires_grad_() for x in batches(0, [(2, WIDTH)] * 3))


def _in_tree_sections(model: MLP) -> int:
    """Count the pieces that a backend other than ours gets of six layers of 1 MiB."""
    pieces: list[int] = []

    def count(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        pieces.append(len(example_inputs))
        return gm.forward

    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    torch.compile(ddp, backend=count)(torch.randn(2, 512)).sum().backward()
    return len(pieces)


def test_other_backends_keep_the_in_tree_optimizer(one_rank: None) -> None:
    """The optimizer is there before and after ddpopt was used, and no flag of torch changes."""
    flags = torch._dynamo.config.get_config_copy()
    uninstall()
    untouched = _in_tree_sections(MLP(width=512))
    ddpopt.backend.install()
    torch._dynamo.reset()
    before = _in_tree_sections(MLP(width=512))
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    compiled(ddp)(_x()).sum().backward()
    torch._dynamo.reset()
    after = _in_tree_sections(MLP(width=512))
    assert untouched == before == after > 1
    assert torch._dynamo.config.get_config_copy() == flags


def test_the_class_in_place_of_torchs_optimizer_is_transparent() -> None:
    """Other code can construct, subclass and read that class."""
    replaced = in_tree.DDPOptimizer
    assert replaced.__module__ == in_tree.__name__
    assert "DDP" in replaced.__doc__

    class Derived(replaced):
        pass

    for cls in (replaced, Derived):
        made = cls(bucket_bytes_cap=2**21, backend_compile_fn=lambda gm, _: gm.forward)
        assert type(made) is cls
        assert made.bucket_bytes_cap == 2**21


def test_a_partial_of_the_backend_gets_the_whole_graph(one_rank: None) -> None:
    bound = functools.partial(ddpopt.backend.backend, options={"inner": "aot_eager"})
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    torch.compile(ddp, backend=bound)(_x()).sum().backward()
    assert len(only_cut(ddp).sections) == 3


def test_the_backend_replaces_torchs_optimizer_once_and_can_give_it_back() -> None:
    """Installed twice it is there once; removed, torch's own class is back."""
    uninstall()
    original = in_tree.DDPOptimizer
    ddpopt.backend.install()
    once = in_tree.DDPOptimizer
    ddpopt.backend.install()
    assert in_tree.DDPOptimizer is once is not original
    assert issubclass(once, original)
    uninstall()
    assert in_tree.DDPOptimizer is original
    ddpopt.backend.install()


@pytest.mark.quick("cap_options0")
@pytest.mark.parametrize(
    "cap_options", [{"bucket_cap_mb": 0.001}, {"bucket_cap_mb_list": [0.02, 0.05]}]
)
def test_bucket_caps_below_one_mib_and_lists_of_caps_are_kept(
    one_rank: None, cap_options: dict[str, Any]
) -> None:
    """The in-tree optimizer stops with an AssertionError at a cap below one MiB."""
    beside = Beside(MLP(), ddp_options=cap_options)
    beside.train(batches(0, [(2, WIDTH)] * 3))
    assert beside.num_sections > 1


def test_a_graph_that_cannot_be_cut_is_compiled_whole_with_one_warning(one_rank: None) -> None:
    """In this one a value and a view of it are made at the start, and written to at the end.

    AOTAutograd makes no writes of those, so what can be cut of its graphs is cut without a warning.
    """

    class Uncuttable(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = x.clone()
            view = made[:, :1]
            for layer in self.layers:
                x = layer(x).relu()
            made.add_(1)
            return x + made + view

    ddp = DistributedDataParallel(Uncuttable(), bucket_cap_mb=CAP)
    with logged("warning") as warnings:
        compiled(ddp)(_x()).sum().backward()
        assert len(only_cut(ddp).sections) == 3
        assert not warnings
        torch._dynamo.reset()
        compiled(ddp, split="forward")(_x()).sum().backward()
    assert only_cut(ddp).fallback is Reason.NO_LEGAL_CUT
    assert len([text for text in warnings if Reason.NO_LEGAL_CUT.value in text]) == 1


@pytest.mark.quick("make_section_graphs-options0-Reason.BACKWARD_FAILED")
@pytest.mark.parametrize(
    ("failing", "options", "reason"),
    [
        ("make_section_graphs", {}, Reason.BACKWARD_FAILED),
        ("add_token", {}, Reason.BACKWARD_DRIFT),
        ("make_stitched_graph", {"split": "forward"}, Reason.SPLIT_FAILED),
        ("compile_forward_sections", {"split": "forward"}, Reason.TORCH_DRIFT),
        ("read_graph", {}, Reason.TORCH_DRIFT),
    ],
)
def test_an_error_while_splitting_costs_overlap_not_training(
    one_rank: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: str,
    options: dict[str, str],
    reason: Reason,
) -> None:
    """One warning says why, with the error's text; the result is right."""
    error = ddpopt.errors.TorchDriftError if "DRIFT" in reason.name else KeyError

    def broken(*_: Any, **__: Any) -> Any:
        raise error("u0")

    monkeypatch.setattr(compiler, failing, broken)
    beside = Beside(MLP(), ddp_options={"bucket_cap_mb": CAP}, **options)
    beside.train(batches(0, [(2, WIDTH)] * 2))
    (record,) = [r for r in caplog.records if reason.value in r.getMessage()]
    assert record.levelname == "WARNING"
    assert "u0" in record.getMessage()


class _PreparedOnce(MLP):
    """Breaks its graph in its first forward, as models do that choose something then."""

    def __init__(self, computes_before: bool) -> None:
        super().__init__()
        self.is_prepared, self.computes_before = False, computes_before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.computes_before:
            x = x * 2
        if not self.is_prepared:
            torch._dynamo.graph_break()
            self.is_prepared = True
        return super().forward(x)


@pytest.mark.quick("True")
@pytest.mark.parametrize("computes_before", [True, False])
def test_a_graph_that_takes_the_place_of_several_is_split(
    one_rank: None, computes_before: bool
) -> None:
    """Graphs that only the first forward ran are no reason to leave it whole."""
    beside = Beside(_PreparedOnce(computes_before), ddp_options={"bucket_cap_mb": CAP})
    beside.train(batches(0, [(2, WIDTH)] * 3))
    *_, later = beside.cuts
    assert later.graph.endswith("/1")
    assert len(later.sections) == 3, later.headline()


def test_a_float_argument_does_not_recompile_at_each_value(one_rank: None) -> None:
    """A graph is compiled as often as unsplit: with the first value, and once for all others."""

    class Scaled(MLP):
        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return super().forward(x * scale) * scale

    ddp = DistributedDataParallel(Scaled(), bucket_cap_mb=CAP)
    for enabled in (False, True):
        torch._dynamo.reset()
        run = compiled(ddp, enabled=enabled)
        for scale in (0.5, 0.25, 1.5, 2.5, 3.5):
            run(_x(), scale).sum().backward()
        assert len(ddpopt.explain(ddp).cuts) == 2


def test_loading_the_backend_leaves_the_python_reducer_alone() -> None:
    """Other backends use it with fullgraph=True, through DDP's forward.

    In a process of its own, because torch 2.13 breaks later static-graph DDP modules after that.
    """
    script = (
        "import torch, torch.distributed as dist, ddpopt.backend;"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1);"
        "torch._dynamo.config.optimize_ddp = 'python_reducer';"
        "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4));"
        "torch.compile(ddp, backend='aot_eager', fullgraph=True)(torch.ones(1, 4))"
    )
    run_fresh(script)


def test_each_reset_forgets_the_cuts(one_rank: None) -> None:
    """Dynamo forgets the code of graphs then, and whom it has told of the last reset."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP)
    run = compiled(ddp)
    for _ in range(2):
        run(_x()).sum().backward()
        assert len(only_cut(ddp).sections) == 3
        torch._dynamo.reset()
        assert not ddpopt.explain(ddp).cuts


def test_what_compiling_a_whole_graph_raises_is_raised_as_it_is(one_rank: None) -> None:
    """The error is raised once, with none of ddpopt's behind it."""
    calls = []

    def failing(gm: Any, _inputs: Any) -> Any:
        calls.append(gm)
        raise ZeroDivisionError("of the user's compiler")

    ddp = DistributedDataParallel(MLP())
    with pytest.raises(Exception, match="of the user's compiler") as caught:
        compiled(ddp, inner=failing)(torch.ones(2, WIDTH))
    assert len(calls) == 1
    causes: list[BaseException | None] = [caught.value]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__ or causes[-1].__context__)
    assert not any(isinstance(cause, NotCutError) for cause in causes)
