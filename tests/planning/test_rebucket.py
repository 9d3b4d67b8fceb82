"""`rebucket` on two ranks: exactly the planned buckets, or an error on all."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import BucketPlan, _torch
from ddpopt._torch import names, new_reducer
from ddpopt.errors import PlanError
from ddpopt.planning import rebucket
from tests.planning import bucket_machine
from tests.support.beside import compiled
from tests.support.buckets import real_buckets
from tests.support.models import MLP, assert_equal_states, batches, state_of, train, twins
from tests.support.on_ranks import gather, on_ranks
from tests.support.plans import SIZES_OF_MLP, plan_of
from tests.support.ranks import Ranks, error_of


def _assert_sizes(ddp: DistributedDataParallel, sizes: Sequence[int] = SIZES_OF_MLP) -> None:
    """DDP's buckets have these many parameters: so its Reducer is another one."""
    assert [len(bucket) for bucket in real_buckets(ddp)] == [*sizes]


@pytest.mark.quick("3")
@pytest.mark.parametrize("num_scripts", [3, 10])
def test_whatever_a_loop_does_each_step_is_eagers_with_the_buckets_it_was_given(
    ranks: Ranks, tmp_path: Path, num_scripts: int
) -> None:
    """Loops drawn by rules. Where gradients wait to be reduced, `rebucket` raises on all ranks."""
    for settings, script in bucket_machine.draw_scripts(num_scripts, "ddp"):
        ranks.run(bucket_machine.run_script, settings, script, str(tmp_path))


@on_ranks(2)
@pytest.mark.quick("python")
@pytest.mark.parametrize(
    "hook",
    [default_hooks.fp16_compress_hook, dist.BuiltinCommHookType.FP16_COMPRESS],
    ids=["python", "built in"],
)
def test_comm_hooks_stay(rank: int, hook: Any) -> None:
    expected, ddp = twins(MLP())
    for model in (expected, ddp):
        if isinstance(hook, dist.BuiltinCommHookType):
            model._register_builtin_comm_hook(hook)
        else:
            model.register_comm_hook(None, hook)
    run = compiled(ddp)
    inputs = batches(rank, [(4, 64)] * 3)
    assert_equal_states(train(ddp, inputs, run), train(expected, inputs))
    ddpopt.rebucket(ddp, plan_of(ddp.module, SIZES_OF_MLP))
    assert_equal_states(train(ddp, inputs, run), train(expected, inputs))
    _assert_sizes(ddp)
    names_of_hooks = [model._get_ddp_logging_data().get("comm_hook") for model in (ddp, expected)]
    assert names_of_hooks[0] == names_of_hooks[1] is not None


def _scale(factor, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    return default_hooks.allreduce_hook(None, bucket).then(lambda done: done.value() * factor)


FP16 = dist.BuiltinCommHookType.FP16_COMPRESS


@on_ranks(2)
@pytest.mark.quick("inference_mode")
@pytest.mark.parametrize(
    "gradients_off", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
def test_buckets_can_change_where_gradients_are_off(rank: int, gradients_off: Any) -> None:
    """Between steps a loop may be in the block of an evaluation; training goes on as eager's."""
    expected, ddp = twins(MLP())
    run = compiled(ddp)
    inputs = batches(rank, [(4, 64)] * 3)
    assert_equal_states(train(ddp, inputs, run), train(expected, inputs))
    with gradients_off():
        ddpopt.rebucket(ddp, plan_of(ddp.module, SIZES_OF_MLP))
    assert_equal_states(train(ddp, inputs, run), train(expected, inputs))
    _assert_sizes(ddp)


@on_ranks(2)
@pytest.mark.quick("[2, 3]-_scale")
@pytest.mark.parametrize(
    ("kinds", "name"), [([2, 3], "_scale"), ([2, FP16], "_scale"), ([FP16], str(FP16))], ids=str
)
def test_a_hook_that_ddp_refused_is_not_the_one_that_stays(
    rank: int, kinds: list[Any], name: str
) -> None:
    """Hooks that scale by a number, or are one of DDP's own; DDP refuses all but the first."""
    expected, ddp = twins(MLP())
    for model in (expected, ddp):
        for place, kind in enumerate(kinds if model is ddp else kinds[:1]):
            with pytest.raises(RuntimeError) if place else contextlib.nullcontext():
                if isinstance(kind, dist.BuiltinCommHookType):
                    model._register_builtin_comm_hook(kind)
                else:
                    model.register_comm_hook(kind, _scale)
    inputs = batches(rank, [(4, 64)] * 3)
    assert_equal_states(train(ddp, inputs), train(expected, inputs))
    ddpopt.rebucket(ddp, plan_of(ddp.module, SIZES_OF_MLP))
    assert_equal_states(train(ddp, inputs), train(expected, inputs))
    _assert_sizes(ddp)
    assert len(ddp._comm_hooks) == len(expected._comm_hooks)
    assert ddp._get_ddp_logging_data()["comm_hook"] == name
    ddpopt.rebucket(ddp, plan_of(ddp.module, (12,)))


def test_a_copy_of_a_module_with_a_hook_has_new_buckets_unless_it_was_given_another(
    one_rank: None,
) -> None:
    """The first in its list is the original's, which its Reducer does not have."""
    ddp = DistributedDataParallel(MLP())
    ddp.register_comm_hook(2, _scale)
    copied = copy.deepcopy(ddp)
    plan = plan_of(ddp.module, SIZES_OF_MLP)
    ddpopt.rebucket(copied, plan)
    assert "comm_hook" not in copied._get_ddp_logging_data()
    copied = copy.deepcopy(ddp)
    copied.register_comm_hook(3, _scale)
    before = copied.reducer
    with pytest.raises(PlanError, match="of its 2 comm hooks one is in force"):
        ddpopt.rebucket(copied, plan)
    assert copied.reducer is before


# ---- A Reducer that cannot be made -----------------------------------------------------------

# A row of torch's names that a rebuild calls at each of its steps, by rank alone where True: in its
# first steps a rank that raises leaves the others in an allreduce.
STEPS_OF_A_REBUILD = {
    names.HAS_REBUILT_BUCKETS: True,
    names.REMOVE_AUTOGRAD_HOOKS: True,
    names.ASSIGN_BUCKETS: True,
    names.DDP_INIT_HELPER: True,
    names.PREPARE_FOR_BACKWARD: False,
    names.AUTOGRAD_HOOK: False,
    names.REBUILD_BUCKETS: False,
    names.COMM_HOOKS: True,
}


@contextlib.contextmanager
def _failing_once(row: names.PrivateName) -> Iterator[None]:
    """Let the next rebuild fail where it gets or sets this row once its preparations are over."""
    is_prepared, is_over = False, False
    make = new_reducer.Change.make

    def note(*args: Any) -> Any:
        nonlocal is_prepared
        is_prepared = True
        return make(*args)

    def fail(method: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            nonlocal is_over
            if self is row and is_prepared and not is_over:
                is_over = True
                raise MemoryError("no memory")
            return method(self, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_reducer.Change, "make", note)
        for method in ("get", "set", "replaced_by"):
            patch.setattr(names.PrivateName, method, fail(getattr(names.PrivateName, method)))
        yield
    assert is_over


@on_ranks(2)
@pytest.mark.quick("{}-by turns")
@pytest.mark.parametrize(
    ("options", "steps_before"),
    [
        ({}, "by turns"),
        ({}, "both"),
        ({"find_unused_parameters": True}, "both"),
        ({"static_graph": True}, "both"),
    ],
    ids=str,
)
def test_a_rebuild_that_fails_at_any_step_leaves_all_ranks_with_the_buckets_of_before(
    rank: int, options: dict[str, Any], steps_before: str
) -> None:
    """It may fail before the first step of training, and after some."""
    inputs, sizes = batches(rank, [(4, 64)] * 3), (1, 3, 2)
    for place, (row, is_one_enough) in enumerate(STEPS_OF_A_REBUILD.items()):
        if options and not is_one_enough:
            continue  # such a Reducer takes no first steps
        for num_before in (0, 3) if steps_before == "both" else (3 * (place % 2),):
            expected, ddp = twins(MLP(3), **options)
            plan = plan_of(ddp.module, sizes)
            for model in (expected, ddp):
                model.register_comm_hook(2, _scale)
                if num_before:
                    train(model, inputs)
                model.zero_grad()
            before = real_buckets(ddp)
            fails = rank == 1 or not is_one_enough
            with _failing_once(row) if fails else contextlib.nullcontext():
                assert "no memory" in error_of(functools.partial(ddpopt.rebucket, ddp, plan))
            assert real_buckets(ddp) == before, str(row)
            assert_equal_states(train(ddp, inputs), train(expected, inputs))
            ddp.zero_grad()
            ddpopt.rebucket(ddp, plan)
            _assert_sizes(ddp, sizes)
            expected.zero_grad()
            assert_equal_states(train(ddp, inputs), train(expected, inputs))


class _OwnState(PowerSGDState):
    """A state as somebody extends it."""


@on_ranks(2)
@pytest.mark.quick("differ")
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("differ", r"rank 1 differs from rank 0: the plan"),
        ("other model", r"on rank 1: 2 parameters .*layers.5"),
        ("other size", r"layers.0.weight has 16384 bytes, and 4096"),
        ("dtypes", "several dtypes"),
        ("sparse", "of several dtypes or devices, or sparse"),
        ("PowerSGD", "PowerSGD"),
        ("in backward", "a backward is running"),
        ("changed setting", "find_unused_parameters was changed"),
    ],
    ids=[
        *("differ", "other model", "other size", "dtypes", "sparse"),
        *("PowerSGD", "in backward", "setting"),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused_on_all_ranks(
    rank: int, case: str, message: str
) -> None:
    module: nn.Module = MLP()
    if case == "dtypes":
        module.layers[0].half()  # type: ignore[operator]
    if case == "sparse":
        module = nn.Sequential(nn.Embedding(8, 64, sparse=True), module)
    ddp = DistributedDataParallel(module)
    if case == "PowerSGD":
        ddp.register_comm_hook(_OwnState(None), powerSGD_hook)
    if case == "changed setting":
        ddp.find_unused_parameters = True
    plan = plan_of(MLP(), SIZES_OF_MLP)
    if case == "differ" and rank == 1:
        plan = plan_of(MLP(), (12,))
    if case == "other model" and rank == 1:
        plan = plan_of(MLP(depth=5), (10,))
    if case == "other size":
        plan = plan_of(MLP(width=32), SIZES_OF_MLP)
    before = ddp.reducer
    rebucket = _rebucket_in_backward if case == "in backward" else ddpopt.rebucket
    with pytest.raises(PlanError, match=message):
        rebucket(ddp, plan)
    assert ddp.reducer is before
    if case in ("differ", "other model", "other size"):
        train(ddp, batches(rank, [(4, 64)] * 2))


def _rebucket_in_backward(ddp: DistributedDataParallel, plan: BucketPlan) -> None:
    output = ddp(torch.ones(4, 64)).sum()
    output.register_hook(lambda _: ddpopt.rebucket(ddp, plan))
    output.backward()


@on_ranks(2)
def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(rank: int, tmp_path: Path) -> None:
    ddp = DistributedDataParallel(MLP())
    path = tmp_path / "plan.json"
    if rank == 0:
        plan_of(ddp.module, SIZES_OF_MLP).save(path)
    with pytest.raises(PlanError, match=r"on rank 1: FileNotFoundError"):
        ddpopt.rebucket(ddp, path if rank == 0 else tmp_path / "other.json")
    train(ddp, batches(rank, [(4, 64)] * 2))


@on_ranks(2)
@pytest.mark.quick("")
@pytest.mark.parametrize("is_evaluated", [False, True], ids=["", "after an evaluation"])
def test_a_backward_from_before_is_an_error_and_not_silently_unreduced(
    rank: int, is_evaluated: bool
) -> None:
    ddp = DistributedDataParallel(MLP())
    loss = ddp(batches(rank, [(4, 64)])[0]).sum()
    ddpopt.rebucket(ddp, plan_of(ddp.module, SIZES_OF_MLP))
    if is_evaluated:
        with torch.no_grad():
            ddp(batches(rank, [(4, 64)])[0])
    with pytest.raises(PlanError, match=r"a forward from before ddpopt\.rebucket"):
        loss.backward()
    with ddp.no_sync():
        ddp(batches(rank, [(4, 64)])[0]).sum().backward()
    train(ddp, batches(rank, [(4, 64)] * 3))
    _assert_sizes(ddp)
    first, second = gather(ddp.module.layers[0].bias.detach())
    assert torch.equal(first, second)


@on_ranks(2)
def test_a_static_graph_begins_with_a_backward_that_has_all_gradients(rank: int) -> None:
    """DDP learns in it which to expect. The forward of an evaluation changes nothing."""
    ddp = DistributedDataParallel(MLP(), static_graph=True)
    x = batches(rank, [(4, 64)])[0]
    train(ddp, [x] * 2)
    ddp.zero_grad()
    ddpopt.rebucket(ddp, plan_of(ddp.module, SIZES_OF_MLP))
    with torch.no_grad():
        ddp(x)
    with ddp.no_sync(), pytest.raises(PlanError, match="static_graph"):
        ddp(x)
    ddp.requires_grad_(False)
    with pytest.raises(PlanError, match="static_graph"):
        ddp(x)
    ddp.requires_grad_(True)
    train(ddp, [x] * 3)
    _assert_sizes(ddp)


@on_ranks(2)
def test_a_static_graph_of_which_ddp_would_learn_nothing_is_an_error(rank: int) -> None:
    """At once, since DDP would allreduce, which one rank may do alone; the step goes on.

    Nothing is compiled, so DDP has to learn in the next backward which gradients to expect.
    """
    ddp, expected = twins(MLP(), static_graph=True)
    x = batches(rank, [(4, 64)])[0].requires_grad_()
    train(ddp, [x] * 2)
    train(expected, [x] * 2)
    ddp.zero_grad()
    ddpopt.rebucket(ddp, plan_of(ddp.module, SIZES_OF_MLP))
    loss = ddp(x).sum()
    if rank == 1:
        with pytest.raises(PlanError, match="static_graph"):
            torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    expected.zero_grad()
    expected(x).sum().backward()
    assert_equal_states(state_of(ddp), state_of(expected))


def test_the_forward_after_a_backward_of_which_ddp_learned_nothing_raises(one_rank: None) -> None:
    """If autograd's word, by which that backward is refused at once, should be wrong."""
    ddp = DistributedDataParallel(MLP(), static_graph=True)
    x = torch.ones(4, 64, requires_grad=True)
    ddpopt.rebucket(ddp, plan_of(ddp.module, SIZES_OF_MLP))
    with mock.patch.object(_torch, "will_accumulate", return_value=True):
        torch.autograd.grad(ddp(x).sum(), x)
    with pytest.raises(PlanError, match="static_graph"):
        ddp(x)


@on_ranks(2)
def test_until_the_next_forward_no_backward_can_run_and_the_module_can_be_saved(
    rank: int,
) -> None:
    """A backward that is none of DDP's, between rebucket and the next forward of DDP's."""
    ddp = DistributedDataParallel(MLP())
    ddpopt.rebucket(ddp, plan_of(ddp.module, SIZES_OF_MLP))
    with pytest.raises(PlanError, match="let that be one of the DDP module"):
        ddp.module(batches(rank, [(4, 64)])[0]).sum().backward()
    file = io.BytesIO()
    torch.save(ddp, file)  # with a hook that waits for that forward
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    train(copied, batches(rank, [(4, 64)] * 2))
    with pytest.raises(PlanError):
        ddp.module(batches(rank, [(4, 64)])[0]).sum().backward()
    ddp.zero_grad()
    train(ddp, batches(rank, [(4, 64)] * 2))
    _assert_sizes(ddp)


def test_a_hook_that_runs_an_optimizer_keeps_its_buckets(one_rank: None) -> None:
    """A hook of torch's overlapped ZeRO, which numbers parameters by the Reducer's buckets."""
    ddp = DistributedDataParallel(MLP())

    def hook(_state, bucket):  # DDP refuses annotations that are strings
        raise NotImplementedError

    hook.__module__ = ddp_zero_hook.__name__
    ddp.register_comm_hook(None, hook)
    with pytest.raises(PlanError, match="comm hook runs an optimizer"):
        ddpopt.rebucket(ddp, plan_of(ddp.module, SIZES_OF_MLP))


@on_ranks(2)
def test_parameters_are_reduced_that_required_gradients_when_ddp_was_made(rank: int) -> None:
    """The first layer is frozen when DDP is made, and unfrozen after buckets have changed."""
    module = MLP()
    module.layers[0].requires_grad_(False)
    expected = DistributedDataParallel(copy.deepcopy(module))
    ddp = DistributedDataParallel(module)
    run = compiled(ddp)
    plan = plan_of(module, (1, 4, 5))  # of the layers but the first
    inputs = batches(rank, [(4, 64)] * 3)
    for model, call in ((ddp, run), (expected, expected)):
        train(model, inputs, call)
        model.requires_grad_(False)
    ddpopt.rebucket(ddp, plan)
    with pytest.raises(PlanError, match="2 parameters are not reduced"):
        ddpopt.rebucket(ddp, plan_of(MLP(), SIZES_OF_MLP))
    for model in (ddp, expected):
        model.requires_grad_(True)  # the first layer too, which DDP does not reduce
    for _ in range(2):
        assert_equal_states(train(ddp, inputs, run), train(expected, inputs))
    assert [len(bucket) for bucket in real_buckets(ddp)] == [1, 4, 5]


@on_ranks(2)
def test_code_for_buckets_of_before_counts_towards_no_limit_of_dynamos(rank: int) -> None:
    """Each change compiles the forward anew, here with a limit of one compile."""
    options = {"inner": "eager", "split": "forward"}
    compiled = torch.compile(MLP(3), backend="ddpopt", options=options, fullgraph=True)
    ddp = DistributedDataParallel(compiled)
    plan = plan_of(compiled, (1, 3, 2))
    with torch._dynamo.config.patch(recompile_limit=1):
        for sizes in ((1, 3, 2), (3, 3)):
            train(ddp, batches(rank, [(4, 64)] * 2))
            ddpopt.rebucket(ddp, dataclasses.replace(plan, sizes=sizes))
            _assert_sizes(ddp, sizes)
        train(ddp, batches(rank, [(4, 64)] * 2))


_MEASURE = """
import sys, tempfile
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddpopt
from tests.support.models import MLP
from tests.support.on_ranks import gather, on_ranks
from tests.support.plans import plan_of

def resident_mb(kind):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(kind)]
    return int(line.split()[1]) / 1024

def step():
    open("/proc/self/clear_refs", "w").write("5")
    run(torch.ones(8, 1024)).sum().backward()
    ddp.zero_grad()
    return resident_mb("VmHWM")

store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
ddp = DistributedDataParallel(MLP(depth=17, width=1024))
run = ddp
if sys.argv[1] == "compiled":
    options = {"inner": "aot_eager", "split": "backward"}
    run = torch.compile(ddp, backend="ddpopt", options=options)
before = max(step() for _ in range(4))
ddpopt.rebucket(ddp, plan_of(ddp.module, (4,) * 8 + (2,)))
print(before, max(step() for _ in range(3)), "ddpopt.backend" in sys.modules)
del run, ddp
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="it reads Linux's /proc")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_change_takes_the_memory_of_one_bucket_at_most(mode: str) -> None:
    """Of 68 MiB of gradients DDP's buckets have 24 each, the plan's 8.

    Uncompiled, the backend is not loaded, and the buckets of before are freed all the same.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, mode],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after, has_backend = done.stdout.split()
    assert float(after) < float(before) + 24
    assert has_backend == str(mode == "compiled")


def _logged_iterations(ddp: DistributedDataParallel) -> list[int]:
    """Of 14 steps, those that DDP has timed: its log has the last one."""
    logged = []
    for _ in range(14):
        ddp(torch.ones(1, 64)).sum().backward()
        logged.append(ddp._get_ddp_logging_data()["iteration"])
    return logged


def test_a_new_reducer_times_as_many_steps_as_by_default(one_rank: None) -> None:
    """The rate at which DDP times steps cannot be read; by default it is every hundredth."""
    ddp = DistributedDataParallel(MLP(1))
    ddp._set_ddp_runtime_logging_sample_rate(1)
    assert _logged_iterations(ddp) == list(range(14))
    ddp.zero_grad()
    ddpopt.rebucket(ddp, plan_of(ddp.module, (1, 1)))
    assert _logged_iterations(ddp) == [*range(10), 10, 10, 10, 10]


@on_ranks(2)
def test_predictions_are_of_the_ranks_of_ddp_unless_it_is_alone(rank: int) -> None:
    """A process that is alone asks about the ranks that the plan is for."""
    plan = dataclasses.replace(plan_of(MLP(1), (2,)), world_size=8)
    alone = [dist.new_group([other]) for other in range(2)][rank]
    assert rebucket.for_ranks_of(DistributedDataParallel(MLP(1)), plan) == plan.for_ranks(2)
    assert rebucket.for_ranks_of(DistributedDataParallel(MLP(1), process_group=alone), plan) is plan


def test_what_is_no_ddp_module_is_refused() -> None:
    with pytest.raises(TypeError, match="this is a MLP"):
        ddpopt.rebucket(MLP(), plan_of(MLP(), SIZES_OF_MLP))


def test_rebucket_takes_a_plan_or_its_path_and_nothing_else(one_rank: None, tmp_path: Path) -> None:
    ddp = DistributedDataParallel(MLP())
    plan = plan_of(ddp.module, SIZES_OF_MLP)
    plan.save(tmp_path / "plan.json")
    for path in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        ddpopt.rebucket(ddp, path)
        assert len(real_buckets(ddp)) == len(SIZES_OF_MLP)
    with pytest.raises(TypeError, match="a dict; rebucket takes a BucketPlan or the path"):
        ddpopt.rebucket(ddp, {})  # type: ignore[arg-type]
