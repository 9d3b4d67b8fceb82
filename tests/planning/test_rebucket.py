"""`rebucket` and `calibrate` on two ranks: exactly the planned buckets, or an error on all."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import BucketPlan, _torch
from ddpopt.planning import AllreduceCost, Gradient, Profile
from tests.support.buckets import real_buckets
from tests.support.models import MLP, assert_equal_states, batches, train
from tests.support.ranks import Ranks, error_of

COST = AllreduceCost(startup_s=1e-4, s_per_byte=1e-9)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True, "find_unused_parameters": True},
    {"broadcast_buffers": False, "bucket_cap_mb": 0.02},
]


def _plan_for(module: nn.Module, sizes: tuple[int, ...]) -> BucketPlan:
    """Return a plan with gradients in the order in which eager backward makes them."""
    named = list(module.named_parameters())[::-1]
    gradients = tuple(
        Gradient(name=name, num_bytes=p.numel() * 4, ready_s=k * 1e-3)
        for k, (name, p) in enumerate(named)
    )
    profile = Profile(gradients=gradients, backward_s=1.0)
    return BucketPlan(profile=profile, cost=COST, world_size=2, sizes=sizes)


SIZES = (1, 4, 5, 2)


def _train_rebucketed(
    rank: int, options: dict[str, Any], split: str, hook: Any, as_before: bool
) -> None:
    """Rebucket after two steps; every step equals that of a DDP module that keeps its buckets."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = MLP()
    expected = DistributedDataParallel(copy.deepcopy(module), **options)
    ddp = DistributedDataParallel(module, **options)
    if hook is not None:
        for each in (expected, ddp):
            if isinstance(hook, dist.BuiltinCommHookType):
                each._register_builtin_comm_hook(hook)
            else:
                each.register_comm_hook(None, hook)
    run: Any = ddp
    if split:
        chosen = {"inner": "aot_eager", "split": split}
        run = torch.compile(ddp, backend="ddpopt", options=chosen)
    inputs = batches(rank, [(4, 64)] * 3)
    for trained, call in ((ddp, run), (expected, None)):
        train(trained, inputs, call)
    assert_equal_states(train(ddp, inputs, run), train(expected, inputs))
    plan = _plan_for(module, SIZES)
    ddp.zero_grad()  # which some options ask for
    ddpopt.rebucket(ddp, plan)
    index_of = {name: k for k, (name, _) in enumerate(module.named_parameters())}
    planned = [{index_of[name] for name in bucket.parameters} for bucket in plan.buckets]
    assert [set(bucket) for bucket in real_buckets(ddp)] == planned
    for _ in range(2):  # in the second the Reducer has rebuilt its buckets
        assert_equal_states(train(ddp, inputs, run), train(expected, inputs))
        if as_before:
            assert [set(bucket) for bucket in real_buckets(ddp)] == planned
    name = ddp._get_ddp_logging_data().get("comm_hook")
    assert name == expected._get_ddp_logging_data().get("comm_hook")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("split", ["", "backward", "forward"], ids=["eager", "backward", "forward"])
def test_training_goes_on_with_exactly_the_planned_buckets(
    ranks: Ranks, options: dict[str, Any], split: str
) -> None:
    ranks.run(_train_rebucketed, options, split, None, True)


@pytest.mark.parametrize(
    "hook",
    [default_hooks.fp16_compress_hook, dist.BuiltinCommHookType.FP16_COMPRESS],
    ids=["python", "built in"],
)
def test_comm_hooks_stay(ranks: Ranks, hook: Any) -> None:
    ranks.run(_train_rebucketed, {}, "auto", hook, True)


def _refuse(rank: int, case: str) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module: nn.Module = MLP()
    if case == "dtypes":
        module.layers[0].half()  # type: ignore[operator]
    ddp = DistributedDataParallel(module)
    if case == "PowerSGD":
        ddp.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    plan = _plan_for(MLP(), SIZES)
    if case == "differ" and rank == 1:
        plan = _plan_for(MLP(), (12,))
    if case == "other model" and rank == 1:
        plan = _plan_for(MLP(depth=5), (10,))
    if case == "other size":
        plan = _plan_for(MLP(width=32), SIZES)
    before = ddp.reducer
    rebucket = _rebucket_in_backward if case == "in backward" else ddpopt.rebucket
    with pytest.raises(ddpopt.errors.PlanError) as refused:
        rebucket(ddp, plan)
    assert ddp.reducer is before
    if case not in ("in backward", "dtypes", "PowerSGD"):
        train(ddp, batches(rank, [(4, 64)] * 2))
    return str(refused.value)


def _rebucket_in_backward(ddp: DistributedDataParallel, plan: BucketPlan) -> None:
    output = ddp(torch.ones(4, 64)).sum()
    output.register_hook(lambda _: ddpopt.rebucket(ddp, plan))
    output.backward()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "differ",
            r"rank 1 differs from rank 0: the plan is \w+ instead of \w+; make",
        ),
        ("other model", r"on rank 1: 2 parameters are not in the plan \(layers.5"),
        ("other size", r"layers.0.weight has 16384 bytes, and 4096 in the plan"),
        ("dtypes", "several dtypes"),
        ("PowerSGD", "PowerSGD, which keeps errors by bucket"),
        ("in backward", "a backward is running"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(ranks: Ranks, case: str, message: str) -> None:
    for text in ranks.run(_refuse, case):
        assert re.search(message, text), text


def _backward_from_before(rank: int) -> None:
    ddp = DistributedDataParallel(MLP())
    loss = ddp(batches(rank, [(4, 64)])[0]).sum()
    ddpopt.rebucket(ddp, _plan_for(ddp.module, SIZES))
    with pytest.raises(ddpopt.errors.PlanError, match=r"a forward from before ddpopt\.rebucket"):
        loss.backward()
    with ddp.no_sync():
        ddp(batches(rank, [(4, 64)])[0]).sum().backward()
    train(ddp, batches(rank, [(4, 64)] * 3))
    gathered = [torch.empty(64) for _ in range(2)]
    dist.all_gather(gathered, ddp.module.layers[0].bias.detach())
    assert torch.equal(*gathered)


def test_a_backward_from_before_is_an_error_and_not_silently_unreduced(ranks: Ranks) -> None:
    ranks.run(_backward_from_before)


def _pass_by(rank: int) -> None:
    """A backward that is none of DDP's, between rebucket and the next forward of DDP's."""
    ddp = DistributedDataParallel(MLP())
    ddpopt.rebucket(ddp, _plan_for(ddp.module, SIZES))
    with pytest.raises(ddpopt.errors.PlanError, match="let that be one of the DDP module"):
        ddp.module(batches(rank, [(4, 64)])[0]).sum().backward()
    file = io.BytesIO()
    torch.save(ddp, file)  # with a hook that waits for that forward
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    train(copied, batches(rank, [(4, 64)] * 2))
    with pytest.raises(ddpopt.errors.PlanError):
        ddp.module(batches(rank, [(4, 64)])[0]).sum().backward()
    ddp.zero_grad()
    train(ddp, batches(rank, [(4, 64)] * 2))


def test_until_the_next_forward_no_backward_can_run_and_the_module_can_be_saved(
    ranks: Ranks,
) -> None:
    ranks.run(_pass_by)


def _rebucket_noted(rank: int) -> tuple[str, str]:
    """DDP looks for unused parameters: after an evaluation, and after a backward past DDP."""
    x = batches(rank, [(4, 64)])[0]
    evaluated, ddp = (DistributedDataParallel(MLP(), find_unused_parameters=True) for _ in range(2))
    plan = _plan_for(ddp.module, SIZES)
    with torch.no_grad():
        evaluated(x)
    after_evaluation = error_of(lambda: ddpopt.rebucket(evaluated, plan))
    ddp.module.layers[0](x).sum().backward()
    after_backward = error_of(lambda: ddpopt.rebucket(ddp, plan))
    ddp.zero_grad()
    ddpopt.rebucket(ddp, plan)
    train(ddp, [x, x])
    return after_evaluation, after_backward


def test_with_unused_parameters_gradients_have_to_be_gone(ranks: Ranks) -> None:
    """DDP may have noted them for its next reduction, which a new Reducer knows nothing of."""
    for after_evaluation, after_backward in ranks.run(_rebucket_noted):
        assert after_evaluation == "nothing"
        assert "on rank 0: parameters have gradients, and DDP" in after_backward


# DDP refuses hooks whose annotations are strings. None of these is ever run.


def _reduce(kept, bucket):  # type: ignore[no-untyped-def]
    raise NotImplementedError


class _Compressor:
    def reduce(self, _state, bucket):  # type: ignore[no-untyped-def]
        return _reduce(self, bucket)


def _keeping(kept: Any) -> Any:
    def reduce(_state, bucket):  # type: ignore[no-untyped-def]
        return _reduce(kept, bucket)

    return reduce


def _having_each_other() -> Any:
    def reduce(_state, bucket):  # type: ignore[no-untyped-def]
        return again(bucket)

    def again(bucket: Any) -> Any:
        return reduce(None, bucket)

    return reduce


@pytest.mark.parametrize(
    ("hook", "is_stateful"),
    [
        (_Compressor().reduce, True),
        (_keeping({}), True),
        (_keeping(_keeping([])), True),
        (_keeping(_reduce), False),
        (_keeping(torch.float16), False),
        (_having_each_other(), False),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), False),
    ],
    ids=[
        "method",
        "closure",
        "closure in a closure",
        "function",
        "dtype",
        "each other",
        "wrapper of torch's",
    ],
)
def test_what_a_comm_hook_keeps_is_found_where_it_is_bound(
    one_rank: None, hook: Any, is_stateful: bool
) -> None:
    """By name of a bucket, perhaps; so a search leaves buckets alone."""
    ddp = DistributedDataParallel(MLP())
    ddp.register_comm_hook(None, hook)
    assert bool(_torch.hook_states(ddp)) == is_stateful


def test_a_hook_that_runs_an_optimizer_keeps_its_buckets(one_rank: None) -> None:
    """Torch's overlapped ZeRO, which numbers parameters by the Reducer's buckets."""
    ddp = DistributedDataParallel(MLP())
    hook = types.FunctionType(_reduce.__code__, globals())
    hook.__module__ = ddp_zero_hook.__name__
    ddp.register_comm_hook(None, hook)
    with pytest.raises(ddpopt.errors.PlanError, match="comm hook runs an optimizer"):
        ddpopt.rebucket(ddp, _plan_for(ddp.module, SIZES))


def _rebucket_frozen(rank: int) -> None:
    """Part is frozen and part unfrozen after DDP was made; buckets change while all is frozen."""
    module = MLP()
    module.layers[0].requires_grad_(False)
    expected = DistributedDataParallel(copy.deepcopy(module))
    ddp = DistributedDataParallel(module)
    run = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    inputs = batches(rank, [(4, 64)] * 3)
    for each, call in ((ddp, run), (expected, expected)):
        train(each, inputs, call)
        each.requires_grad_(False)
    plan = _plan_for(nn.ModuleDict({"layers": nn.ModuleList(module.layers)}), SIZES)
    reduced = [g for g in plan.profile.gradients if not g.name.startswith("layers.0")]
    profile = dataclasses.replace(plan.profile, gradients=tuple(reduced))
    plan = dataclasses.replace(plan, profile=profile, sizes=(1, 4, 5))
    ddpopt.rebucket(ddp, plan)
    with pytest.raises(ddpopt.errors.PlanError, match="2 parameters are not reduced"):
        ddpopt.rebucket(ddp, _plan_for(module, SIZES))
    for each in (ddp, expected):
        each.requires_grad_(True)  # the first layer too, which DDP does not reduce
    for _ in range(2):
        assert_equal_states(train(ddp, inputs, run), train(expected, inputs))
    assert [len(bucket.parameters()) for bucket in ddp.reducer._get_zeros_like_grad_buckets()] == [
        1,
        4,
        5,
    ]


def test_what_is_reduced_is_what_required_gradients_when_ddp_was_made(ranks: Ranks) -> None:
    ranks.run(_rebucket_frozen)


def _rebucket_at_the_limit(rank: int) -> None:
    options = {"inner": "aot_eager", "split": "forward"}
    compiled = torch.compile(MLP(), backend="ddpopt", options=options, fullgraph=True)
    ddp = DistributedDataParallel(compiled)
    plan = _plan_for(compiled, SIZES)
    with torch._dynamo.config.patch(recompile_limit=1):
        for sizes in (SIZES, (6, 6), (2, 4, 6)):
            train(ddp, batches(rank, [(4, 64)] * 2))
            ddpopt.rebucket(ddp, dataclasses.replace(plan, sizes=sizes))
        train(ddp, batches(rank, [(4, 64)] * 2))


def test_code_for_buckets_of_before_counts_towards_no_limit_of_dynamos(ranks: Ranks) -> None:
    ranks.run(_rebucket_at_the_limit)


_MEASURE = """
import sys, tempfile
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddpopt
from tests.support.models import MLP
from tests.planning.test_rebucket import _plan_for

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
ddpopt.rebucket(ddp, _plan_for(ddp.module, (4,) * 8 + (2,)))
print(before, max(step() for _ in range(3)), "ddpopt.backend" in sys.modules)
del run, ddp
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="it reads Linux's /proc")
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_change_takes_the_memory_of_one_bucket_at_most(how: str) -> None:
    """68 MiB of gradients; DDP's buckets are of 24, the plan's of 8. Eager, nobody but us helps."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, how],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after, has_backend = done.stdout.split()
    assert float(after) < float(before) + 24
    assert has_backend == str(how == "compiled")


def test_what_is_no_ddp_module_is_refused() -> None:
    with pytest.raises(TypeError, match="this is a MLP"):
        ddpopt.rebucket(MLP(), _plan_for(MLP(), SIZES))


def _calibrate(rank: int) -> AllreduceCost:
    if rank:
        torch.randn(200, 200) @ torch.randn(200, 200)  # ranks need not do the same before
    return ddpopt.calibrate()


def test_all_ranks_measure_the_same_cost(ranks: Ranks) -> None:
    first, second = ranks.run(_calibrate)
    assert first == second
    assert first.s_per_byte > 0
    assert first.contention >= 1
    assert 0 <= first.launch_s < 1


def test_a_group_of_one_rank_has_no_cost(one_rank: None) -> None:
    with pytest.raises(ddpopt.errors.PlanError, match="one rank"):
        ddpopt.calibrate()


def test_it_takes_the_path_of_a_plan_and_nothing_else(one_rank: None, tmp_path: Path) -> None:
    ddp = DistributedDataParallel(MLP())
    plan = _plan_for(ddp.module, SIZES)
    plan.save(tmp_path / "plan.json")
    for path in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        ddpopt.rebucket(ddp, path)
        assert len(real_buckets(ddp)) == len(SIZES)
    with pytest.raises(TypeError, match="a BucketPlan or the path of a saved one; this is a dict"):
        ddpopt.rebucket(ddp, {})  # type: ignore[arg-type]
