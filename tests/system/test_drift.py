"""Drift of torch, simulated: each private name of the table is hidden in turn.

It is hidden from those who read it, then from those who write it. A run of each part of ddpopt
tells the names that it uses, so that a new row is tested without a new line here.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ddpopt
from ddpopt import _torch, algorithms, config
from ddpopt._torch import names
from ddpopt._torch.names import TABLE, Need, PrivateName
from ddpopt.checks import verify
from ddpopt.cli import doctor
from ddpopt.planning import AllreduceCost, tuner
from ddpopt.steps import clock as clocks
from tests.support.algorithms import optimizer_for
from tests.support.beside import compiled
from tests.support.fake_clock import FakeClock
from tests.support.models import MLP, WIDTH, batches, train
from tests.support.plans import COST, plan_of
from tests.support.ranks import Ranks
from tests.system.drifting import WHOLE, Trained, Use, looking_up, train_without

FORWARD = {"inner": "aot_eager", "split": "forward"}
BACKWARD = {"inner": "aot_eager", "split": "backward"}
INDUCTOR = {"inner": "inductor", "split": "backward"}
SLOW = AllreduceCost(startup_s=1e-5, s_per_byte=1.6e-7)
SHAPE = (4, WIDTH)


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[Ranks]:
    """Two processes for this module alone: some names are asked for once in a process's life."""
    workers = Ranks()
    yield workers
    workers.stop()


_trained: dict[str, list[Trained]] = {}


def _train_as_it_is(fresh_ranks: Ranks, options: dict[str, Any]) -> Trained:
    """Return rank 0's training with all names, which says what it asks for."""
    key = str(options)
    if key not in _trained:
        _trained[key] = fresh_ranks.run(train_without, None, options)
    for result in _trained[key]:
        assert (result.error, result.difference, result.warnings) == ("", "", ())
        assert result.splits == {options["split"]}
    return _trained[key][0]


# Objects need not have these, so nobody notices that torch has moved them. What is lost:
QUIET: dict[PrivateName, str] = {
    names.ORIG_BACKEND: "graphs come from the in-tree optimizer, as without DDPOptimizer",
    names.COMPILER_FN: "as above",
    names.STOP_REASON: "a graph with nothing behind it is taken for one with a graph behind it",
    names.GRAPH_BREAK: "as above",
    names.DYNAMO_SOURCE: "how deep a parameter lies",
    names.SOURCE_NAME: "as above",
    names.PARAMETER_SOURCES: "Dynamo's own names for parameters",
    names.USER_STACKS: "lines of the user's code in messages",
    names.PROFILER_ENABLED: "names of sections in a profile of torch's",
    names.COMPILED_CALL: "the warning of parts of a model that are not compiled",
    names.OPTIMIZED_MODULE: "as above",
    names.TRACE_RULES_CHECK: "as above",
    names.SYNCS_BUFFERS: "nothing, once a forward was watched",
    names.GET_COMPILER_CONFIG: "finding what is compiled in place; verify says so or cannot copy",
}


def _check_training(fresh_ranks: Ranks, uses: set[Use], options: dict[str, Any]) -> None:
    """Check one warning each, which has the name; and training, which is to be eager DDP's."""
    for use in sorted(uses, key=str):  # one call each: a rank is given up if it answers late
        for result in fresh_ranks.run(train_without, use, options):
            assert result.error == "", f"{use}: {result.error}"
            assert result.difference == "", f"{use}: {result.difference}"
            if use.row in QUIET and not result.warnings:
                continue
            assert len(result.warnings) == 1, f"{use}: {result.warnings}"
            assert f"{use.row}, which ddpopt needs" in result.warnings[0]
            assert torch.__version__ in result.warnings[0]
            if "compiled whole" in result.warnings[0]:
                assert not result.splits
                assert "training goes on without overlap" in result.warnings[0]
            elif use.row not in WHOLE:
                is_lost = (
                    use.row.need is Need.BACKWARD
                    or "cut in forward, not in backward" in result.warnings[0]
                )
                splits = {"forward" if is_lost else options["split"]}
                assert result.splits == splits, f"{use}: {result.warnings}"


# ---- Training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_training_goes_on_with_one_warning_whichever_name_is_missing(
    fresh_ranks: Ranks, share: int
) -> None:
    """The names that the forward split asks for, one by one, on two ranks: a third, or all."""
    asked = sorted(_train_as_it_is(fresh_ranks, FORWARD).asked, key=str)
    assert len(asked) > 50
    _check_training(fresh_ranks, set(asked[::share]), FORWARD)


def test_training_goes_on_without_what_the_backward_split_reads(fresh_ranks: Ranks) -> None:
    """Without a name that the backward split alone reads, the graph is split in forward."""
    asked = (
        _train_as_it_is(fresh_ranks, BACKWARD).asked - _train_as_it_is(fresh_ranks, FORWARD).asked
    )
    assert asked
    _check_training(fresh_ranks, set(asked), BACKWARD)


def test_training_goes_on_without_what_inductor_reads(fresh_ranks: Ranks) -> None:
    """The other inner compiler does not ask for these names."""
    asked = (
        _train_as_it_is(fresh_ranks, INDUCTOR).asked - _train_as_it_is(fresh_ranks, BACKWARD).asked
    )
    assert asked
    _check_training(fresh_ranks, set(asked), INDUCTOR)


# ---- Importing --------------------------------------------------------------------------------

_IMPORT_WITHOUT_EACH = """
import importlib.machinery, sys
from tests.support.registration import uninstall

class Hiding(importlib.machinery.PathFinder):
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if name == "ddpopt._torch.names" and spec is not None:
            execute = spec.loader.exec_module
            def run(module):
                execute(module)
                module._read = look_up
            spec.loader.exec_module = run
        return spec

def look_up(row, owner):
    asked.add(str(row))
    if str(row) == missing:
        raise AttributeError(row.name)
    return getattr(owner, row.name)

def import_anew():
    for name in [name for name in sys.modules if name.partition(".")[0] == "ddpopt"]:
        del sys.modules[name]
    import ddpopt.backend

asked, missing = set(), ""
sys.meta_path.insert(0, Hiding)
import_anew()
uninstall()
for missing in sorted(asked):
    import_anew()
    uninstall()
    print(missing)
"""


def test_import_works_whichever_name_is_missing() -> None:
    """A process imports the package and the backend anew without each name that they ask for."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_WITHOUT_EACH],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    asked = done.stdout.splitlines()
    assert str(names.ARTIFACT_LOGGER) in asked
    assert str(names.DDP_OPTIMIZER) in asked
    for name in asked:
        warnings = [
            line for line in done.stderr.splitlines() if f" no {name}, which ddpopt nee" in line
        ]
        assert len(warnings) == 1, (name, done.stderr)


# ---- What users call by name ------------------------------------------------------------------


def _compile(
    model: torch.nn.Module | None = None, **options: Any
) -> tuple[DistributedDataParallel, Any]:
    ddp = DistributedDataParallel(model or MLP(3), bucket_cap_mb=0.03)
    return ddp, compiled(ddp, **{**FORWARD, **options})


def _verify(rank: int) -> None:
    _, run = _compile()
    assert ddpopt.verify(run, batches(rank, [SHAPE])[0]).passed


def _verify_in_place(rank: int) -> None:
    ddp = _compile()[0]
    ddp.compile(backend="ddpopt", options=dict(FORWARD))
    assert ddpopt.verify(ddp, batches(rank, [SHAPE])[0]).passed


def _verify_a_layer(rank: int) -> None:
    """One of `torch.nn`'s, around whose method `torch.compile` puts a function of its own."""
    ddp = DistributedDataParallel(MLP(3), bucket_cap_mb=0.03)
    layer = next(part for part in ddp.modules() if isinstance(part, torch.nn.Linear))
    layer.forward = torch.compile(layer.forward, backend="ddpopt", options=dict(FORWARD))
    assert ddpopt.verify(ddp, batches(rank, [SHAPE])[0]).passed


def _verify_first(rank: int) -> None:
    ddp, run = _compile()
    with mock.patch.object(config, "verify", True):
        train(ddp, batches(rank, [SHAPE]), run)


def _warm_up(rank: int) -> None:
    ddpopt.warmup(_compile()[1], batches(rank, [SHAPE])[0])


def _warm_up_static(rank: int) -> None:
    run = compiled(DistributedDataParallel(MLP(2), static_graph=True), **FORWARD)
    ddpopt.warmup(run, batches(rank, [SHAPE])[0])


def _record(rank: int) -> None:
    ddp = DistributedDataParallel(MLP(3), bucket_cap_mb=0.03)
    with ddpopt.record(ddp):
        train(ddp, batches(rank, [SHAPE] * 2))
    ddpopt.explain(ddp)


def _rebucket(rank: int, hook: Any, **ddp_options: Any) -> None:
    ddp = DistributedDataParallel(MLP(2), **ddp_options)
    if isinstance(hook, dist.BuiltinCommHookType):
        ddp._register_builtin_comm_hook(hook)
    elif hook is not None:
        ddp.register_comm_hook(None, hook)
    train(ddp, batches(rank, [SHAPE] * 2))
    ddpopt.rebucket(ddp, plan_of(ddp.module, (1, 3)))
    train(ddp, batches(rank, [SHAPE]))


def _attach(rank: int, make: Callable[[], Any]) -> None:
    algorithm = make()
    ddp = DistributedDataParallel(MLP(2))
    optimizer = optimizer_for(algorithm, ddp.parameters(), lr=0.01, warmup_steps=1)
    handle = algorithms.attach(ddp, optimizer, algorithm)
    try:
        for x in batches(rank, [SHAPE] * 3):
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    finally:
        handle.detach()


def _attach_with_a_state(rank: int) -> None:
    """As after a checkpoint was loaded, or some steps of DDP's own."""
    ddp = DistributedDataParallel(MLP(2))
    optimizer = torch.optim.Adam(ddp.parameters())
    ddp(batches(rank, [SHAPE])[0]).square().mean().backward()
    optimizer.step()
    algorithms.attach(ddp, optimizer, _grouped()).detach()


def _replicate(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    parallel = ddpopt.DataParallel(model, ["cpu", "cpu"], backend="aot_eager")
    model.register_forward_hook(lambda *_: None)
    parallel(torch.ones(4, 4)).sum().backward()
    ddpopt.DataParallel(MLP(1), ["cpu"])


def _estimate(rank: int) -> None:
    ddpopt.planning.estimate(MLP(2), torch.ones(SHAPE))


def _plan(rank: int) -> None:
    ddpopt.plan(MLP(2), torch.ones(SHAPE), network=COST, world_size=2, backend=None)


def _tune(rank: int) -> None:
    """Train until buckets are changed, as they are where the network is slow."""
    ddp, run = _compile(buckets="auto")
    with (
        mock.patch.object(tuner, "calibrate", return_value=SLOW),
        FakeClock(tick_s=1e-3).replacing_time_of(clocks),
    ):
        train(ddp, batches(rank, [SHAPE] * 10), run)


def _verify_apart(rank: int) -> None:
    """Verify as where Inductor draws other random numbers than eager."""
    with mock.patch.object(verify, "_draws_otherwise", return_value=True):
        _verify(rank)


def _train_under_autocast(rank: int) -> None:
    _, run = _compile(split="backward")
    with torch.autocast("cpu"):
        loss = run(batches(rank, [SHAPE])[0]).sum()
    loss.backward()


class _Mapping(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.vmap(torch.sin)(x))


def _train_with_vmap(rank: int) -> None:
    _compile(_Mapping(3))[1](batches(rank, [SHAPE])[0]).sum().backward()


class _Checkpointing(MLP):
    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.block = torch.compile(super().forward, backend="ddpopt", options=FORWARD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def _train_checkpointed(rank: int) -> None:
    ddp = DistributedDataParallel(_Checkpointing(3), bucket_cap_mb=0.03)
    train(ddp, batches(rank, [SHAPE] * 2))


def _compile_nothing(rank: int) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
    compiled(DistributedDataParallel(layer), **FORWARD)(torch.ones(2, 4)).sum().backward()


class _AnyMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        return function(*arguments, **(keywords or {}))


def _compile_nothing_in_a_mode(rank: int) -> None:
    with _AnyMode():
        _compile()[1](torch.ones(SHAPE))


def _compile_nothing_with_hooks(rank: int) -> None:
    module = MLP(3)
    module.layers[1].register_full_backward_hook(lambda *_: None)
    compiled(DistributedDataParallel(module), **FORWARD)(torch.ones(SHAPE))


def _refuse(gm: fx.GraphModule, inputs: list[Any]) -> Any:
    raise RuntimeError("this compiler refuses all graphs")


def _fail_to_compile(rank: int) -> None:
    _, run = _compile(inner=_refuse)
    with pytest.raises(Exception, match="this compiler refuses all graphs"):
        run(batches(rank, [SHAPE])[0])


def _restride(rank: int) -> None:
    """Give a graph other strides than were traced, as where Inductor chose them."""
    mode = _torch.fake_mode_of(())
    graph = fx.Graph()
    placeholder = graph.placeholder("x")
    graph.output((placeholder,))
    placeholder.meta["val"] = torch.empty(2, 3).t()
    _torch.restride(fx.GraphModule({}, graph), [mode.from_tensor(torch.empty(3, 2))])


def _pass_options_on(rank: int) -> None:
    _compile(inner="inductor", max_autotune=False)[1](batches(rank, [SHAPE])[0])


def _search_settings(rank: int) -> None:
    with _torch.dynamo_settings(optimize_ddp=True, recompile_limit=8):
        pass


_flat = functools.partial(functools.partial, hierarchical=False)
_grouped = functools.partial(algorithms.Decentralized, local_world_size=1)
_HOOKS = dist.BuiltinCommHookType.ALLREDUCE
DOORS: dict[str, Callable[[int], None]] = {
    "verify": _verify,
    "verify, compiled in place": _verify_in_place,
    "verify, a layer in place": _verify_a_layer,
    "config.verify": _verify_first,
    "warmup": _warm_up,
    "warmup, static graph": _warm_up_static,
    "record": _record,
    "rebucket": functools.partial(_rebucket, hook=default_hooks.allreduce_hook),
    "rebucket, built-in hook": functools.partial(_rebucket, hook=_HOOKS, static_graph=True),
    "decentralized": functools.partial(_attach, make=_grouped),
    "decentralized, with a state": _attach_with_a_state,
    "low_precision": functools.partial(_attach, make=_flat(algorithms.LowPrecisionDecentralized)),
    "byte_grad": functools.partial(_attach, make=_flat(algorithms.ByteGrad)),
    "qadam": functools.partial(_attach, make=_flat(algorithms.QAdam)),
    "async_average": functools.partial(_attach, make=algorithms.AsyncModelAverage),
    "DataParallel": _replicate,
    "estimate": _estimate,
    "plan": _plan,
    "buckets='auto'": _tune,
    "bench": _search_settings,
    "verify, compiled apart": _verify_apart,
    "autocast": _train_under_autocast,
    "vmap": _train_with_vmap,
    "checkpoint": _train_checkpointed,
    "nothing compiled": _compile_nothing,
    "nothing compiled in a mode": _compile_nothing_in_a_mode,
    "nothing compiled, by hooks": _compile_nothing_with_hooks,
    "a compiler that fails": _fail_to_compile,
    "other strides": _restride,
    "options of Inductor": _pass_options_on,
}
# Compiling takes most of the time, and its names are tested above.
COMPILING = {"verify", "config.verify", "warmup", "warmup, static graph", "buckets='auto'"}
COMPILING |= {
    "verify, compiled in place",
    "verify, a layer in place",
    "verify, compiled apart",
    "autocast",
    "vmap",
    "checkpoint",
    "a compiler that fails",
    "options of Inductor",
}


def _open(rank: int, door: str, use: Use | None) -> tuple[str, set[Use]]:
    """Return the error, "" if there is none, and the names that were used."""
    error = ""
    with looking_up(use) as asked:
        try:
            DOORS[door](rank)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    return error, asked


_asked: dict[str, set[Use]] = {}


def _asked_by(fresh_ranks: Ranks, door: str) -> set[Use]:
    if door not in _asked:
        results = fresh_ranks.run(_open, door, None)
        assert [error for error, _ in results] == ["", ""]
        _asked[door] = results[0][1]
    return _asked[door]


# What verify says where it does not find what is compiled in place. A layer's method, if it is not
# known to be compiled, is one that holds the layer.
NOTHING_COMPILED = "OptionError: nothing in this model"
CANNOT_COPY = "OptionError: a copy of the module in DistributedDataParallel uses the original's"

# These take a minute each, and reach few names that no other door does.
_EACH_NIGHT = ("config.verify", "low_precision", "qadam", "async_average", "options of Inductor")


@pytest.mark.parametrize(
    "door",
    [pytest.param(door, marks=[pytest.mark.nightly] * (door in _EACH_NIGHT)) for door in DOORS],
)
def test_whatever_else_is_called_works_or_says_what_is_missing(
    fresh_ranks: Ranks, door: str
) -> None:
    """Ranks get what they asked for, or an error with the name: TorchDriftError, mostly."""
    asked = _asked_by(fresh_ranks, door)
    if door in COMPILING:
        for options in (FORWARD, BACKWARD, INDUCTOR):
            asked = asked - _train_as_it_is(fresh_ranks, options).asked
    for use in sorted(asked, key=str):
        for error, _ in fresh_ranks.run(_open, door, use):
            is_clear = "TorchDriftError" in error and f" no {use.row}, which" in error
            said = CANNOT_COPY if door == "verify, a layer in place" else NOTHING_COMPILED
            is_quiet = use.row in QUIET and error.startswith(said)
            assert error == "" or is_clear or is_quiet, f"{use}: {error}"


# ---- `ddpopt doctor` --------------------------------------------------------------------------

# Names of objects that exist only while a graph is compiled: doctor's small models find these.
IN_TRIALS = {
    names.VALUES: "forward",
    names.SYM_NODE: "forward",
    names.DONATED_IDXS: "forward",
    names.HINT: "backward",
    names.GRADIENT_OF: "backward",
    names.INPUT_INDEX: "backward",
    names.TRACER: "backward",
}
_OF_GUARDS = "of what Dynamo makes with the guards of a graph, which is split without"
NOT_NAMED = {
    **dict.fromkeys((names.BUILT_GUARDS, names.GUARD_ROOT, names.CHECK_FN_MANAGER), _OF_GUARDS),
    **dict.fromkeys((names.GUARD_MANAGER, names.ID_MATCHED_OBJS, names.INVALIDATE), _OF_GUARDS),
    names.OPTIMIZERS_IN_BACKWARD: "of parameters that have such optimizers",
    names.TOKENS: "of what AOTAutograd makes with a graph",
}


def test_doctor_names_whichever_name_is_missing(one_rank: None) -> None:
    """The name is in its table; or it is named as one that a small model lacks."""
    ddp = DistributedDataParallel(MLP(1), static_graph=True)
    assert all(doctor.find_names(ddp).values())
    assert len(doctor.find_names(ddp)) > 120
    for row in TABLE:
        with looking_up(Use(row)):
            is_found = doctor.find_names(ddp)
        if row in is_found:
            assert not is_found[row]
            check = doctor._names(is_found)
            assert not check.is_ok
            assert str(row) in check.detail
        else:
            assert row in IN_TRIALS or row in NOT_NAMED or row in QUIET or not row.is_expected, row


@pytest.mark.parametrize("row", IN_TRIALS, ids=str)
def test_doctor_names_what_a_small_model_lacks(row: PrivateName) -> None:
    """Training cannot be split then, which is doctor's status 1."""
    torch._dynamo.reset()
    ddpopt.backend.install()
    with looking_up(Use(row)):
        check = doctor._try(IN_TRIALS[row])
    assert not check.is_ok
    assert f"{row}, which ddpopt needs" in check.detail
    assert "install a torch release that this ddpopt supports" in check.remedy


# ---- The list ---------------------------------------------------------------------------------

UNASKED: dict[PrivateName, str] = {
    names.BOXED_CALL: "written on functions of ours alone",
    names.DELAYED_HOOK: "read where DDP delays parameters; the graph is left whole without it",
    names.TENSOR_HOOKS: "as above",
    names.ACCUMULATED_HOOKS: "read where a loss has parameters of its own",
    names.TRITON_KERNEL: "read where a graph has operators of higher order that run no graphs",
    names.REORDER_FOR_MEMORY: "set where a graph has complex values",
    names.DISABLED_PASSES: "as above",
    names.REINPLACE_PASS: "as above",
}


def test_every_name_is_tested_above_or_has_a_reason_not_to_be(fresh_ranks: Ranks) -> None:
    """A training or a call above reads or writes each; so it has to be with a new row, too."""
    asked = {Use(names.ARTIFACT_LOGGER)}  # when the package is imported
    for options in (FORWARD, BACKWARD, INDUCTOR):
        asked |= _train_as_it_is(fresh_ranks, options).asked
    for door in DOORS:
        asked |= _asked_by(fresh_ranks, door)
    assert {row for row in TABLE if row.is_expected} - {use.row for use in asked} == set(UNASKED)
    assert len([use for use in asked if use.is_write]) > 20
