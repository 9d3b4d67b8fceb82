"""Dynamo compiles nothing of ddpopt's, and of the user's what it compiles without ddpopt."""

from __future__ import annotations

import contextvars
import copy
import gc
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.testing import CompileCounter
from torch._dynamo.types import FrameAction
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.nn.parallel import DistributedDataParallel

import ddpopt
import ddpopt.backend
from ddpopt import _torch, _traced, algorithms
from ddpopt._torch import hidden, names
from ddpopt.algorithms import attach
from ddpopt.errors import PlanError
from ddpopt.planning import AllreduceCost, rebucket, tuner
from ddpopt.steps import clock as clocks
from tests.support.algorithms import optimizer_for
from tests.support.beside import compiled
from tests.support.fake_clock import FakeClock
from tests.support.fresh import run_fresh
from tests.support.models import MLP, WIDTH, assert_equal_states, batches
from tests.support.on_ranks import on_ranks
from tests.support.registration import uninstall

ROOT = Path(ddpopt.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TRACED = Path(_traced.__file__)
CAP = 0.02  # MB; a bucket a layer
NUM_STEPS = 4


# ---- The rule ---------------------------------------------------------------------------------


def _function_in(path: Path) -> Callable[..., Any]:
    """A function that a file would define, and that Dynamo has not met."""
    text = "def made_up(call, x):\n    return call(x)\n"
    space: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), space)
    function: Callable[..., Any] = space["made_up"]
    return function


def _import_late(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """Have a function in a module of ours that is imported after ddpopt was hidden."""
    module = types.ModuleType("ddpopt.late")
    module.function = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    _torch.hide_from_dynamo()


def _graphs_around(function: Callable[..., Any]) -> int:
    """The number of graphs of a compiled function that calls `function` with one of the user's."""
    torch._dynamo.reset()  # another counter may get the place in memory of the last one
    counter = CompileCounter()

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.compile(backend=counter)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return function(double, x.sin()).cos()

    x = torch.ones(2)
    assert torch.equal(compiled(x), (x.sin() * 2).cos())
    return counter.frame_count


def test_a_graph_breaks_at_a_function_of_any_file(one_rank: None) -> None:
    """Except of the one that Dynamo may see; what is in the file need not be imported yet."""
    assert len(FILES) > 60
    for path in FILES:
        assert trace_rules.check(_function_in(path)) == (path != TRACED), path


def test_a_function_of_ours_runs_as_it_is_with_what_it_calls(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module may have been imported late, before something else registered hooks."""
    assert _graphs_around(_function_in(ROOT / "backend.py")) == 3  # what it calls is compiled
    function = _function_in(ROOT / "backend.py")
    _import_late(monkeypatch, function)
    assert _graphs_around(function) == 2
    assert _graphs_around(_function_in(TRACED)) == 1


def test_a_function_of_ours_is_hidden_after_a_reset_too(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo forgets it of code that it met before, and tells the backends that it has called."""
    function = _function_in(ROOT / "backend.py")
    assert _graphs_around(function) == 3
    _import_late(monkeypatch, function)
    for _ in range(2):
        torch.compile(torch.neg, backend="ddpopt", options={"inner": "eager"})(torch.ones(2))
        assert _graphs_around(function) == 2  # it begins with a reset


def test_code_is_looked_for_where_a_module_has_got_some(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an import, and one that was under way when code was looked for last."""
    with mock.patch.object(hidden, "_search", wraps=hidden._search) as search:
        _torch.hide_from_dynamo()  # which finds the mock
        search.reset_mock()
        _torch.hide_from_dynamo()
        assert search.call_count == 0
        _import_late(monkeypatch, _function_in(ROOT / "backend.py"))
        assert search.call_count == 1
        function = _function_in(ROOT / "backend.py")
        for name in ("function", "another"):  # one that has the other's name, and one more
            setattr(sys.modules["ddpopt.late"], name, function)
            _torch.hide_from_dynamo()
        assert search.call_count == 3
    assert _graphs_around(function) == 2


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def test_every_function_that_there_is_is_hidden(one_rank: None) -> None:
    """Wherever its module keeps it: in a class, a table, a decorator, a default."""
    marked: dict[int, Any] = {}
    mark = mock.Mock(get=lambda: lambda code, strategy: marked.update({id(code): strategy}))
    with mock.patch.object(names, "SET_STRATEGY", mark):
        _torch.hide_from_dynamo()
    files = {str(path) for path in FILES} - {str(TRACED)}
    gc.unfreeze()  # what is frozen, as conftest.py does, is not listed
    functions = [held for held in gc.get_objects() if type(held) is types.FunctionType]
    gc.freeze()
    codes = [c for f in functions if f.__code__.co_filename in files for c in _nested(f.__code__)]
    assert len(codes) > 1500
    assert [code for code in codes if id(code) not in marked and code.co_name != "made_up"] == []
    default = FrameAction.DEFAULT
    codes = [code for code in codes if id(code) in marked]
    alone = {code.co_name for code in codes if marked[id(code)].recursive_action == default}
    assert alone == {"step"}  # of QAdam's optimizer, which calls a closure of the user's


def _functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """The functions and methods that a module defines, without those that Python generates."""
    for value in vars(module).values():
        holders = [value]
        if inspect.isclass(value):
            holders = list(vars(value).values())
        for held in holders:
            function = inspect.unwrap(getattr(held, "__func__", held))
            if inspect.isfunction(function) and function.__code__.co_filename == module.__file__:
                yield function


def test_dynamo_skips_every_function_but_those_that_it_is_to_see(one_rank: None) -> None:
    """The few that it sees are called by functions of ours alone, or are the user's call."""
    seen, num_skipped = set(), 0
    for path in FILES:
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        try:
            module = importlib.import_module(name.removesuffix(".__init__"))
        except ImportError:  # a callback for a package that is not installed
            assert path.parent.name == "integrations"
            continue
        for function in _functions_of(module):
            if trace_rules.check(function):
                num_skipped += 1
            else:
                seen.add(function.__qualname__)
    assert seen == {"call", "around_ddp_forward", "TrialModel.__init__", "TrialModel.forward"}
    assert num_skipped > 800


def test_a_users_function_that_ours_calls_is_compiled(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's function has a graph between the two around our function."""
    function = _torch.calls_users_code(_function_in(ROOT / "backend.py"))
    _import_late(monkeypatch, function)
    assert _graphs_around(function) == 3


def test_a_function_may_be_marked_after_its_code_was_found(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the method that replaces DDP's is, at the first compile."""
    function = _function_in(ROOT / "backend.py")
    hidden._calling_users.discard(function.__code__)  # it equals what the test above marks
    _import_late(monkeypatch, function)
    assert _graphs_around(function) == 2
    _torch.calls_users_code(function)
    _torch.hide_from_dynamo()
    assert _graphs_around(function) == 3


def test_importing_ddpopt_changes_nothing_in_dynamo() -> None:
    """Only a call that registers hooks hides ddpopt, and replaces nothing of Dynamo's."""
    code = """
import sys, torch
import ddpopt, ddpopt.algorithms, ddpopt.planning
assert "torch._dynamo" not in sys.modules
from torch._dynamo import convert_frame, trace_rules
before = trace_rules.check_file, convert_frame.CatchErrorsWrapper.__call__
assert ddpopt.__file__ not in trace_rules.FORCE_SKIP_FILES
ddpopt.DataParallel(torch.nn.Linear(2, 2), ["cpu"])
assert ddpopt.__file__ in trace_rules.FORCE_SKIP_FILES
assert "ddpopt.backend" not in sys.modules
import ddpopt.backend
assert before == (trace_rules.check_file, convert_frame.CatchErrorsWrapper.__call__)
"""
    run_fresh(code)


def test_a_function_of_the_users_stays_uncompiled_where_they_say_so(one_rank: None) -> None:
    """Torch finds `recursive=False` by a look at the stack, on which nothing of ours is."""
    counter = CompileCounter()

    @torch.compiler.disable(recursive=False)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x + 1)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.compile(lambda x: outer(x) + 0, backend=counter)(torch.ones(2))
    assert counter.op_count == 2  # the last addition, and what `inner` does


def test_ddp_is_traced_as_one_graph_where_torch_can_do_so() -> None:
    """A function of ours stands in DDP's method, also for programs that only import ddpopt.

    In a process of its own: a DDP module for `python_reducer` has Dynamo trace DDP ever after.
    """
    code = """
import torch, torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel
import ddpopt.backend
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
counter = CompileCounter()
with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    torch.compile(ddp, backend=counter, fullgraph=True)(torch.ones(2, 2))
dist.destroy_process_group()
print(counter.frame_count)
"""
    assert run_fresh(code).split()[-1] == "1"


# ---- As many graphs as without ddpopt ---------------------------------------------------------


class Counts:
    """The graphs, graph breaks and frames that Dynamo compiled of a program."""

    def __init__(self) -> None:
        self.graphs: int = counters["stats"]["unique_graphs"]
        self.breaks: dict[str, int] = dict(counters["graph_break"])
        metrics = [m for m in get_compilation_metrics() if m.co_filename is not None]
        # Ours, and sections, which Dynamo would compile once more.
        starts = (f"{ROOT}/", "<eval_with_key>")
        self.hidden = [m.co_name for m in metrics if m.co_filename.startswith(starts)]
        # In the user's code and in torch's optimizers; torch compiles its backward, and parts of
        # Python's libraries for that, later than ddpopt.
        self.compiled = sorted(
            (m.co_name, bool(m.recompile_reason))
            for m in metrics
            if m.has_guarded_code and m.graph_op_count
        )

    def difference_from(self, other: Counts) -> str:
        """The differences from torch's own as text, and all that is ours; "" without any."""
        differences = []
        if self.hidden + other.hidden:
            differences.append(f"compiled: {self.hidden}, {other.hidden}")
        for name in ("compiled", "breaks", "graphs"):
            pair = getattr(self, name), getattr(other, name)
            if pair[0] != pair[1]:
                differences.append(f"{name}: {pair[0]}, not {pair[1]}")
        return "; ".join(differences)


class _Training:
    """A compiled update of a DDP module; `around` wraps its steps."""

    def __init__(self, algorithm: Any = None, cap_mb: float = CAP, **options: Any) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(MLP(3), bucket_cap_mb=cap_mb)
        self.optimizer = optimizer_for(algorithm, self.ddp.parameters(), lr=0.01)
        self.handle = None if algorithm is None else attach(self.ddp, self.optimizer, algorithm)
        self.options = options

    def compile(self, function: Callable[..., Any], is_stock: bool) -> Callable[..., Any]:
        if is_stock:
            return torch.compile(function, backend="aot_eager")
        return compiled(function, **self.options)

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.ddp(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _plain(
    training: _Training,
    inputs: list[torch.Tensor],
    is_stock: bool,
    before_step: Callable[[DistributedDataParallel], object] = id,
) -> None:
    update = training.compile(training.update, is_stock)
    for x in inputs:
        before_step(training.ddp)
        update(x)


def _recorded(training: _Training, inputs: list[torch.Tensor], is_stock: bool) -> None:
    with ddpopt.record(training.ddp):
        _plain(training, inputs, is_stock)


def _measured(training: _Training, inputs: list[torch.Tensor], is_stock: bool) -> None:
    _plain(training, inputs, is_stock, ddpopt.metrics)


def _profiled(training: _Training, inputs: list[torch.Tensor], is_stock: bool) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        _plain(training, inputs, is_stock)


def _in_a_thread(training: _Training, inputs: list[torch.Tensor], is_stock: bool) -> None:
    settings = contextvars.copy_context()  # torch's
    worker = threading.Thread(target=settings.run, args=(_plain, training, inputs, is_stock))
    worker.start()
    worker.join()


def _compiled_apart(training: _Training, inputs: list[torch.Tensor], is_stock: bool) -> None:
    """The model and the optimizer's step, each by itself."""
    model = training.compile(training.ddp, is_stock)
    step = training.compile(training.optimizer.step, is_stock)
    for x in inputs:
        training.optimizer.zero_grad()
        model(x).square().mean().backward()
        step()


def _accumulating(training: _Training, inputs: list[torch.Tensor], is_stock: bool) -> None:
    def accumulate(x: torch.Tensor) -> None:
        training.ddp(x).square().mean().backward()

    compiled = training.compile(accumulate, is_stock)
    update = training.compile(training.update, is_stock)
    for x in inputs:
        with training.ddp.no_sync():
            compiled(x)
        update(x)


def _reset(training: _Training, inputs: list[torch.Tensor], is_stock: bool) -> None:
    """Train anew after a reset, by which Dynamo forgets too which frames it skips."""
    for _ in range(2):
        torch._dynamo.reset()
        _plain(training, inputs, is_stock)


class _Redirected:
    """Lightning's manual optimization under DDP, as its documentation and its code have it.

    The trainer calls DDP, whose module runs the compiled `training_step` in place of its forward;
    that calls `manual_backward`, which tells DDP's Reducer of the backward, and the optimizer.
    """

    def __init__(self, training: _Training, is_stock: bool) -> None:
        self.training, self.ddp = training, training.ddp
        self.training_step = training.compile(self.manual_step, is_stock)

    def manual_step(self, x: torch.Tensor) -> None:
        loss = self.forward(x).square().mean()
        self.training.optimizer.zero_grad()
        self.manual_backward(loss)
        self.training.optimizer.step()

    def manual_backward(self, loss: torch.Tensor) -> None:
        if torch.is_grad_enabled() and self.ddp.require_backward_grad_sync:
            self.ddp.require_forward_param_sync = True
            self.ddp.reducer._rebuild_buckets()
            self.ddp.reducer.prepare_for_backward([])
        loss.backward()

    def __call__(self, x: torch.Tensor) -> None:
        module = self.ddp.module
        self.forward = module.forward

        def run(x: torch.Tensor) -> None:
            del module.forward
            self.training_step(x)
            self.ddp.require_backward_grad_sync = False  # the backward has been

        module.forward = run
        self.ddp(x)
        self.ddp.require_backward_grad_sync = True


def _by_hand(training: _Training, inputs: list[torch.Tensor], is_stock: bool) -> None:
    step = _Redirected(training, is_stock)
    for x in inputs:
        step(x)


def _count(
    rank: int,
    train: Callable[..., None],
    is_stock: bool,
    algorithm: Any = None,
    num_steps: int = NUM_STEPS,
    **options: Any,
) -> tuple[Counts, dict[str, torch.Tensor]]:
    """Train, and return what was compiled and the weights."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    if is_stock and algorithm is None and train not in (_recorded, _measured):
        uninstall()
    try:
        # The in-tree optimizer takes no buckets that small; it would not change what Dynamo does.
        with torch._dynamo.config.patch(optimize_ddp=not is_stock):
            training = _Training(algorithm, **options)
            train(training, batches(rank, [(2, WIDTH)] * num_steps), is_stock)
            if training.handle is not None:
                training.handle.detach()
        counts = Counts()
    finally:
        ddpopt.backend.install()
        torch._dynamo.reset()
    return counts, copy.deepcopy(training.ddp.module.state_dict())


def _compare(rank: int, train: Callable[..., None], *more: Any, **options: Any) -> str:
    """Compare with torch's own backend, without ddpopt where the program does not use it."""
    counts, states = _count(rank, train, False, *more, **options)
    stocks, expected = _count(rank, train, True, *more)
    assert counts.breaks
    assert_equal_states(states, expected)
    return counts.difference_from(stocks)


_PROGRAMS = {
    "plain": _plain,
    "recorded": _recorded,
    "measured": _measured,
    "profiled": _profiled,
    "in a thread": _in_a_thread,
    "compiled apart": _compiled_apart,
    "accumulating": _accumulating,
    "torch._dynamo.reset": _reset,
    "Lightning's manual optimization": _by_hand,
}


_ONLY_NIGHTLY = ("profiled", "accumulating", "torch._dynamo.reset")


@pytest.mark.quick("plain")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in _ONLY_NIGHTLY else ())
        for name in _PROGRAMS
    ],
)
def test_dynamo_compiles_and_breaks_what_it_does_without_ddpopt(one_rank: None, name: str) -> None:
    """Graphs, graph breaks, recompiles and weights are equal."""
    assert _compare(0, _PROGRAMS[name]) == ""


@pytest.mark.quick("plain")
@pytest.mark.parametrize("name", ["plain", "Lightning's manual optimization"])
def test_the_forward_split_adds_no_graph_or_break(one_rank: None, name: str) -> None:
    """Other nodes of ours run in its backward, until DDP has its final buckets."""
    assert _compare(0, _PROGRAMS[name], split="forward") == ""


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        algorithms.ByteGrad(hierarchical=False),
        pytest.param(algorithms.Decentralized(hierarchical=False), marks=pytest.mark.nightly),
        algorithms.QAdam(hierarchical=False),
        pytest.param(algorithms.AsyncModelAverage(), marks=pytest.mark.nightly),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_an_attached_algorithm_adds_no_graph_or_break(rank: int, algorithm: Any) -> None:
    """An algorithm's hooks break the graph where they stand, with any backend, uncompiled."""
    assert _compare(rank, _plain, algorithm) == ""


@on_ranks(2)
@pytest.mark.quick("plain")
@pytest.mark.parametrize("name", ["plain", "Lightning's manual optimization"])
def test_a_search_for_buckets_measures_steps_and_no_compiles(rank: int, name: str) -> None:
    """Backward sections run as they are before and after it, and nothing is compiled anew."""
    train = _PROGRAMS[name]
    slow = AllreduceCost(startup_s=1e-5, s_per_byte=8e-8)
    outcome = "no search"

    def tune(training: _Training, inputs: list[torch.Tensor], is_stock: bool) -> None:
        nonlocal outcome
        train(training, inputs, is_stock)
        if search := tuner.find_tuner(training.ddp):
            outcome = search.outcome

    with (
        mock.patch.object(tuner, "calibrate", return_value=slow),
        FakeClock(tick_s=1e-3).replacing_time_of(clocks),
    ):
        counts, states = _count(rank, tune, False, num_steps=20, cap_mb=1, buckets="auto")
    stocks, expected = _count(rank, train, True, num_steps=20, cap_mb=1)
    assert_equal_states(states, expected)
    assert outcome.startswith("buckets change"), outcome
    assert [name for name, is_anew in counts.compiled if is_anew] == []
    stocks.compiled = [name for name in stocks.compiled if not name[1]]
    assert counts.difference_from(stocks) == ""


# ---- What users give us is compiled as before -------------------------------------------------


def test_an_optimizers_closure_is_compiled_where_its_step_is_called(one_rank: None) -> None:
    """`QAdamOptimizer.step`, which calls it, is not compiled."""
    clear_compilation_metrics()
    model = MLP(1)
    optimizer = algorithms.QAdamOptimizer(model.parameters(), lr=0.01)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, WIDTH)).square().mean()
        loss.backward()
        return loss

    compiled = torch.compile(lambda: optimizer.step(closure), backend="aot_eager")
    for _ in range(2):
        compiled()
    names = [str(m.co_name) for m in get_compilation_metrics() if m.graph_op_count]
    assert [name for name in names if "closure" in name]
    assert "step" not in names


def test_a_replicas_function_is_compiled_with_the_module_that_it_calls(one_rank: None) -> None:
    """One device is enough, and a compiled function may call `DataParallel`."""
    for devices, num_graphs in ((["cpu"], 1), (["cpu", "cpu"], 1)):
        torch._dynamo.reset()
        counter = CompileCounter()
        parallel = ddpopt.DataParallel(MLP(2), devices, backend=counter)
        outer = CompileCounter()

        @torch.compile(backend=outer)
        def call(x: torch.Tensor, parallel: nn.Module = parallel) -> torch.Tensor:
            return parallel(x.sin()).cos()

        for _ in range(3):
            call(torch.ones(4, WIDTH))
        assert (counter.frame_count, outer.frame_count) == (num_graphs, 2)


def test_a_forward_before_rebucket_is_refused_in_a_compiled_update(one_rank: None) -> None:
    """A hook of ours on each parameter refuses it, whichever backend compiled the update."""
    counter = CompileCounter()
    ddp = DistributedDataParallel(MLP(1))

    def backward(x: torch.Tensor) -> None:
        x.sum().backward()

    compiled = torch.compile(backward, backend=counter)
    for _ in range(2):
        compiled(ddp(torch.ones(2, WIDTH)))
    loss = ddp(torch.ones(2, WIDTH))
    rebucket._forbid_backward(ddp)
    with pytest.raises(PlanError, match=r"from before ddpopt\.rebucket"):
        compiled(loss)
    compiled(ddp(torch.ones(2, WIDTH)))
    assert counter.frame_count == 1
