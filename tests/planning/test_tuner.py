"""`buckets="auto"` on two ranks: all switch at the same step or none does, and gradients are right.

The tests choose the network's cost (a slow one), since what it costs here says nothing, and the
clock, since a machine that is busy for a moment would make the best buckets others.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import inspect
import itertools
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import BucketPlan, _torch
from ddpopt.errors import NotCutError, Reason
from ddpopt.planning import AllreduceCost, decision, rebucket
from ddpopt.planning import tuner as tuning
from ddpopt.planning.decision import Decision, Verdict
from ddpopt.ranks import meetings
from ddpopt.split import compiler
from ddpopt.steps import clock as clocks
from tests.planning import bucket_machine
from tests.support.beside import Beside, compiled
from tests.support.buckets import real_buckets
from tests.support.fake_clock import FakeClock
from tests.support.logs import logged
from tests.support.models import MLP, assert_equal_states, batches, train, twins
from tests.support.on_ranks import gather, on_ranks
from tests.support.plans import plan_of
from tests.support.ranks import Ranks

DEPTH = 3  # of the model
SIZES = (1, 3, 2)  # of buckets that DDP does not make of it
SLOW = AllreduceCost(startup_s=1e-5, s_per_byte=8e-8)  # 4 ms for all, as long as computation
TICK_S = 1e-3
FREE = AllreduceCost(startup_s=0.0, s_per_byte=0.0)
DECIDED = 9  # the step in which buckets change
JUDGED = DECIDED + 8
CHANGED = 96  # readings of the clock, of which a step makes nine
PAUSE_S = 100 * TICK_S
SHAPE = (4, 64)


def _clock(tick_s: float = TICK_S, later: float = 1.0) -> FakeClock:
    """Return a clock of which any two readings are `tick_s` apart, `later` times that at last.

    That is between the step in which buckets change and those that are compared with the first.
    """
    return FakeClock(itertools.chain([tick_s] * CHANGED, itertools.repeat(tick_s * later)))


@contextlib.contextmanager
def _simulated(cost: AllreduceCost, clock: FakeClock | None = None) -> Iterator[None]:
    """Have allreduces cost that much in this block, and time go on by a clock of `_clock`."""
    with (
        mock.patch.object(tuning, "calibrate", return_value=cost),
        (clock or _clock()).replacing_time_of(clocks),
    ):
        yield


class _Search(Beside):
    """A search in training, beside eager DDP, on a network and a clock that the test chooses."""

    def __init__(
        self, split: str = "backward", hook: Any = None, depth: int = DEPTH, **ddp_options: Any
    ) -> None:
        torch._dynamo.utils.counters.clear()
        super().__init__(MLP(depth), ddp_options=ddp_options, split=split, buckets="auto")
        if hook is not None:
            for ddp in (self.ddp, self.eager):
                ddp.register_comm_hook(*hook)
        self.buckets: list[list[tuple[int, ...]]] = []  # after each step

    def end(
        self,
        cost: AllreduceCost = SLOW,
        clock: FakeClock | None = None,
        num_steps: int = DECIDED + 4,
    ) -> str:
        """Take steps until it is over; return the outcome, which is the same on all ranks."""
        with _simulated(cost, clock):
            for x in batches(dist.get_rank(), [SHAPE] * num_steps):
                self.step(x)
                self.buckets.append([tuple(bucket) for bucket in real_buckets(self.ddp)])
        outcome: str = tuning.find_tuner(self.ddp).outcome
        assert len(set(gather((outcome, self.plan and self.plan.hash, str(self.buckets))))) == 1
        return outcome

    @property
    def plan(self) -> BucketPlan | None:
        return rebucket.plan_of(self.ddp)

    @property
    def num_graphs(self) -> int:
        """How many graphs were compiled."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def assert_cut_as_ddp_reduces(self) -> None:
        reports = ddpopt.explain(self.ddp).buckets
        assert [report.is_as_planned for report in reports] == [True] * len(self.buckets[-1])


@pytest.mark.quick("3")
@pytest.mark.parametrize("num_scripts", [3, 10])
def test_whatever_a_loop_does_each_step_is_eagers_and_all_ranks_change_buckets_together(
    ranks: Ranks, tmp_path: Path, num_scripts: int
) -> None:
    """Loops drawn by rules: their buckets are those of a file, or of a search, or are taken back.

    They change between two steps that the rules name, unless gradients wait in each.
    """
    for settings, script in bucket_machine.draw_scripts(num_scripts, "file", "auto"):
        ranks.run(bucket_machine.run_script, settings, script, str(tmp_path))


@on_ranks(2)
@pytest.mark.quick("auto-1")
@pytest.mark.parametrize(("split", "graphs"), [("auto", 1), ("backward", 1), ("forward", 2)])
def test_all_ranks_switch_at_the_same_step_to_the_same_buckets(
    rank: int, split: str, graphs: int
) -> None:
    """Backward sections are used again as they are; forward ones are compiled once more."""
    search = _Search(split)
    outcome = search.end()
    assert outcome.startswith("buckets change")
    assert outcome in str(ddpopt.explain(search.ddp))
    before, after = search.buckets[: DECIDED - 1], search.buckets[DECIDED - 1 :]
    assert all(len(step) == 1 for step in before)  # DDP's own: all is below its first cap
    assert len(after[-1]) > 1
    planned = [set(bucket) for bucket in rebucket.indices_of(search.ddp, search.plan)]
    for step in after:
        assert [set(bucket) for bucket in step] == planned
    assert search.num_graphs == graphs
    search.assert_cut_as_ddp_reduces()


_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_OPTIONS: list[dict[str, Any]] = [
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"broadcast_buffers": False},
    {"batched_grad_copy": True},
    {"lazy_bucket_allocation": True},  # since torch 2.15
    {"lazy_bucket_allocation": True, "batched_grad_copy": True},
    {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
]


@on_ranks(2)
@pytest.mark.quick("{'static_graph': True}")
@pytest.mark.parametrize(
    "ddp_options", [o for o in _OPTIONS if o.keys() <= _DDP_ARGUMENTS.keys()], ids=str
)
def test_options_of_ddp_stay(rank: int, ddp_options: dict[str, Any]) -> None:
    """The rows are the options that the installed torch has."""
    search = _Search(**ddp_options)
    assert search.end().startswith("buckets change")
    search.assert_cut_as_ddp_reduces()


@on_ranks(2)
def test_a_comm_hook_that_keeps_a_state_keeps_its_buckets(rank: int) -> None:
    """A hook without one goes on with the new buckets."""
    assert _Search(hook=(None, default_hooks.allreduce_hook)).end().startswith("buckets change")
    assert "its comm hook keeps a state" in _Search(hook=([], _reduce_and_count)).end()


def _reduce_and_count(state, bucket):
    state.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


@on_ranks(2)
def test_buckets_stay_where_others_would_gain_nothing(rank: int) -> None:
    search = _Search()
    assert search.end(FREE).startswith("buckets stay as they are, 1: with the best, ")
    assert search.plan is None
    assert search.buckets[2] == search.buckets[-1]


@on_ranks(2)
def test_forward_sections_for_the_search_alone_are_given_up_after_it(rank: int) -> None:
    """DDP's one bucket needs no cut; the graph that was cut is compiled again as a whole."""
    search = _Search("forward")
    search.end(FREE)
    assert search.num_graphs == 2
    assert len(search.cuts[0].sections) > 1
    assert not search.cuts[-1].sections


@on_ranks(2)
@pytest.mark.quick("auto")
@pytest.mark.parametrize(
    ("split", "graphs"), [("auto", 1), ("forward", 3)], ids=["auto", "forward"]
)
def test_a_change_that_made_iterations_no_shorter_is_taken_back(
    rank: int, split: str, graphs: int
) -> None:
    """All ranks take it back in one step, and the same steps follow as before."""
    search = _Search(split)
    outcome = search.end(num_steps=JUDGED + 2)
    assert "the previous buckets are back: iterations, predicted to get " in outcome
    assert search.plan is None
    assert search.num_graphs == graphs
    search.assert_cut_as_ddp_reduces()
    torch._dynamo.reset()
    search.step(batches(rank, [SHAPE])[0])
    assert not search.cuts[-1].sections  # what is compiled anew is for the one bucket that is back
    before, after = search.buckets[2], search.buckets[JUDGED - 1 :]
    assert len(search.buckets[DECIDED]) > 1
    assert after == [before] * len(after)


@on_ranks(2)
def test_a_measured_gain_is_told_where_a_change_is_kept(rank: int) -> None:
    search = _Search("auto")
    outcome = search.end(clock=_clock(later=0.75), num_steps=JUDGED + 2)
    assert "measured: iterations got 25% shorter (" in outcome
    assert search.plan
    assert len(search.buckets[-1]) > 1


@on_ranks(2)
@pytest.mark.quick("auto")
@pytest.mark.parametrize("split", ["auto", "forward"])
def test_where_unused_parameters_are_looked_for_buckets_change_too(rank: int, split: str) -> None:
    """The Reducer keeps those that it is made with, and tells them."""
    search = _Search(split, find_unused_parameters=True)
    assert search.end().startswith("buckets change, 1 to ")
    search.assert_cut_as_ddp_reduces()
    assert len(search.buckets[-1]) > 1


@on_ranks(2)
@pytest.mark.quick("change")
@pytest.mark.parametrize("cost", [SLOW, FREE], ids=["change", "stay"])
def test_graphs_that_turn_out_to_be_cut_in_forward_are_compiled_once_more(
    rank: int, cost: AllreduceCost
) -> None:
    """The option "auto" was to cut the backward; they are cut for the new buckets, or for DDP's."""
    refused = NotCutError(Reason.ATTRIBUTES)
    search = _Search("auto", depth=6)  # so that the best buckets are of several layers
    with mock.patch.object(compiler, "_cut_backward", side_effect=refused):
        outcome = search.end(cost)
    assert outcome.startswith("buckets change" if cost == SLOW else "buckets stay")
    assert search.num_graphs == 2
    assert len(search.cuts[0].sections) > len(search.cuts[-1].sections)
    search.assert_cut_as_ddp_reduces()


@on_ranks(2)
def test_ranks_that_measure_different_times_get_one_plan(rank: int) -> None:
    """Rank 1 measures three times the times."""
    search = _Search()
    search.end(clock=_clock(TICK_S * (3 if rank else 1)))
    assert search.plan


@on_ranks(2)
@pytest.mark.quick("find_obstacle")
@pytest.mark.parametrize("where", ["find_obstacle", "find_misfit"])
def test_a_rank_that_cannot_follow_makes_all_stay(rank: int, where: str) -> None:
    search = _Search()
    with mock.patch.object(rebucket, where, return_value="the test says so" if rank else ""):
        assert "on rank 1: the test says so" in search.end()
    assert search.plan is None
    assert search.buckets[2] == search.buckets[-1]


@on_ranks(2)
@pytest.mark.quick("0")
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_makes_all_stay_and_none_wait(rank: int, absent: int) -> None:
    """It does not look for better buckets. For the next module, an equal one, all meet again."""
    beside = Beside(MLP(DEPTH), split="backward", buckets="ddp" if rank == absent else "auto")
    with (
        FakeClock(on_sleep=mock.Mock(side_effect=AssertionError)).replacing_time_of(meetings),
        _simulated(SLOW),
    ):
        beside.train(batches(rank, [SHAPE] * (DECIDED + 4)))
    if rank != absent:
        outcome = tuning.find_tuner(beside.ddp).outcome
        assert outcome.startswith(f"buckets stay as they are: rank {absent} did not begin it")
    first, second = gather(real_buckets(beside.ddp))
    assert first == second
    torch._dynamo.reset()
    assert _Search().end().startswith("buckets change")


def _send(rank: int) -> None:
    """All other ranks send to rank 0."""
    tensor = torch.zeros(1)
    if rank:
        dist.send(tensor, 0)
    else:
        for other in range(1, dist.get_world_size()):
            dist.recv(tensor, other)


def _barrier(_rank: int) -> None:
    dist.monitored_barrier()


def _train_beside(rank: int, kind: str) -> str:
    """Train where ranks do not only call what all of them call alike."""
    call = _barrier if kind == "barrier" else _send
    call(rank)
    ddp = DistributedDataParallel(MLP(DEPTH))
    run = compiled(ddp, split="backward", buckets="auto")
    with _simulated(SLOW):
        for x in batches(rank, [SHAPE] * (DECIDED + 3)):
            train(ddp, [x], run)
            if kind.endswith("each step"):
                call(rank)
    return tuning.find_tuner(ddp).outcome


@pytest.mark.parametrize("kind", ["messages", "messages in each step", "barrier"])
def test_ranks_meet_though_their_group_has_counted_differently(
    four_ranks: Ranks, kind: str
) -> None:
    """A process group counts messages between ranks and barriers, of which ranks have others."""
    outcomes = four_ranks.run(_train_beside, kind)
    assert outcomes[0].startswith("buckets change")
    assert len(set(outcomes)) == 1


class _Twin(MLP):
    """Has the same parameters, and code of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def _train_twins(rank: int, tuned: tuple[int, ...]) -> list[str]:
    """Train two equal models in one backward, of which each rank tunes some."""
    models = [DistributedDataParallel(model) for model in (MLP(DEPTH), _Twin(DEPTH))]
    calls = []
    for k, ddp in enumerate(models):
        buckets = "auto" if k in tuned else "ddp"
        calls.append(compiled(ddp, split="backward", buckets=buckets))
    with _simulated(SLOW):
        for x in batches(rank, [SHAPE] * (DECIDED + 2)):
            for ddp in models:
                ddp.zero_grad()
            (calls[0](x).sum() + calls[1](x).sum()).backward()
    searches = [tuning.find_tuner(ddp) for ddp in models]
    return [search.outcome if search else "" for search in searches]


@on_ranks(2)
def test_ranks_meet_for_one_and_the_same_of_two_equal_models(rank: int) -> None:
    """They do so though one backward is of both models."""
    outcomes = _train_twins(rank, (0, 1))
    assert all(outcome.startswith("buckets change") for outcome in outcomes)
    first, second = gather(outcomes)
    assert first == second


@on_ranks(2)
def test_ranks_that_look_for_buckets_of_different_twins_do_not_meet(rank: int) -> None:
    assert f"rank {1 - rank} did not begin it" in _train_twins(rank, (rank,))[rank]


@on_ranks(2)
@pytest.mark.quick("1")
@pytest.mark.parametrize("num_eager", [1, 2])
def test_ranks_that_begin_in_different_steps_stay(rank: int, num_eager: int) -> None:
    """The first to meet waits for the limit at most; the other then has its answer."""
    ddp = DistributedDataParallel(MLP(DEPTH))
    run = compiled(ddp, split="backward", buckets="auto")
    clock = FakeClock(on_sleep=lambda _: clock.pass_time(1.0))
    with _simulated(SLOW), clock.replacing_time_of(meetings):
        for step, x in enumerate(batches(rank, [SHAPE] * (DECIDED + 4))):
            train(ddp, [x], ddp if rank and step < num_eager else run)
    first, second = gather(tuning.find_tuner(ddp).outcome)
    assert first == second
    # Rank 1 may have announced itself before the other one looks who is missing.
    assert first.startswith("buckets stay as they are: ")
    assert re.search("(rank 1|another rank) did not (begin it|come within)", first), first


def test_ranks_wait_less_than_their_group_does(one_rank: None) -> None:
    """The others may be in a collective meanwhile, which must not end in its timeout."""
    ddp = DistributedDataParallel(MLP(DEPTH))
    timeout = datetime.timedelta(seconds=8)
    with mock.patch.object(tuning._torch, "group_timeout", return_value=timeout):
        assert tuning._Tuner(ddp, "auto")._longest_meeting_s == 2.0


@on_ranks(2)
def test_meetings_of_several_modules_in_one_step_share_the_limit(rank: int) -> None:
    """A rank that waits in vain for each module's does so one after another."""
    with mock.patch.object(tuning, "JointDecision", side_effect=meetings.JointDecision) as meet:
        _train_twins(rank, (0, 1))
    limits_s = [call.args[3] for call in meet.call_args_list]
    assert len(limits_s) == 2
    assert sum(limits_s) <= tuning._LONGEST_MEETING_S


@on_ranks(2)
def test_in_a_join_context_ranks_stay_without_waiting(rank: int) -> None:
    """Rank 1 has fewer batches."""
    ddp = DistributedDataParallel(MLP(DEPTH))
    run = compiled(ddp, split="backward", buckets="auto")
    with (
        FakeClock(on_sleep=mock.Mock(side_effect=AssertionError)).replacing_time_of(meetings),
        ddp.join(),
    ):
        for x in batches(rank, [SHAPE] * (DECIDED + 1 - 4 * rank)):
            train(ddp, [x], run)
    first, second = gather(tuning.find_tuner(ddp).outcome)
    assert "its join()" in first
    assert second == first.replace("on rank 0: ", "")


@on_ranks(2)
def test_code_for_the_search_alone_counts_towards_no_limit_of_dynamos(rank: int) -> None:
    """With fullgraph and a limit of one compile there is a second for the search, and no third."""
    options = {"inner": "aot_eager", "split": "forward", "buckets": "auto"}
    ddp = DistributedDataParallel(
        torch.compile(MLP(DEPTH), backend="ddpopt", options=options, fullgraph=True)
    )
    with torch._dynamo.config.patch(recompile_limit=1), _simulated(SLOW):
        train(ddp, batches(rank, [SHAPE] * (DECIDED + 3)))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            train(ddp, batches(rank, [(3, 64)]))
    assert tuning.find_tuner(ddp).outcome.startswith("buckets change")


@on_ranks(2)
def test_a_failure_to_plan_reaches_all_ranks(rank: int) -> None:
    search = _Search()
    failure = ArithmeticError("the test says so")
    with mock.patch.object(decision, "plan_buckets", side_effect=failure):
        assert "ArithmeticError('the test says so')" in search.end()
    assert search.plan is None


@on_ranks(2)
def test_where_no_step_can_be_measured_buckets_stay(rank: int) -> None:
    """The outcome has the reason, and the option that needs no measured step."""
    ddp = DistributedDataParallel(MLP(DEPTH))
    run = compiled(ddp, split="backward", buckets="auto")
    with _simulated(SLOW):
        for x in batches(rank, [SHAPE] * (DECIDED + 4)):
            (run(x).sum() + run(x + 1).sum()).backward()
    outcome = tuning.find_tuner(ddp).outcome
    assert "5 of 5 had several forwards" in outcome
    assert "plan.json" in outcome


class _Skipping(MLP):
    """Leaves out a layer whose place does not change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return x


@on_ranks(2)
def test_parameters_that_no_step_uses_are_named(rank: int) -> None:
    ddp = DistributedDataParallel(_Skipping(DEPTH), static_graph=True)
    run = compiled(ddp, split="backward", buckets="auto")
    with _simulated(SLOW):
        train(ddp, batches(rank, [SHAPE] * (DECIDED + 1)), run)
    text = "layers.0.weight, layers.0.bias had no gradient in 5 of 5"
    assert text in tuning.find_tuner(ddp).outcome


def _train_critic(rank: int, source: str) -> str:
    """A step of the critic, then one of its generator, in which the critic is frozen."""
    critic, generator = MLP(2), MLP(1)
    if rank == 0:
        plan_of(critic, (2, 2)).save(source)
    dist.barrier()
    models = [DistributedDataParallel(copy.deepcopy(critic), static_graph=True) for _ in range(2)]
    options = {"inner": "aot_eager", "split": "backward", "buckets": source}
    calls: list[Any] = [torch.compile(models[0], backend="ddpopt", options=options), models[1]]
    for x in batches(rank, [(4, 64)] * 5):
        for ddp, call in zip(models, calls, strict=True):
            ddp.requires_grad_(True)
            ddp.zero_grad()
            call(x).square().sum().backward()
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.sub_(parameter.grad, alpha=0.01)
            ddp.requires_grad_(False)
            call(generator(x)).sum().backward()
    for trained, expected in zip(*(ddp.parameters() for ddp in models), strict=True):
        torch.testing.assert_close(trained, expected)
    return tuning.find_tuner(models[0]).outcome


def test_a_static_graph_gets_new_buckets_where_it_is_frozen(ranks: Ranks, tmp_path: Path) -> None:
    """DDP would learn from that backward to expect no gradient, if it had yet to learn that."""
    for outcome in ranks.run(_train_critic, str(tmp_path / "plan.json")):
        assert outcome.startswith("buckets are those of")


@on_ranks(2)
def test_a_search_that_another_one_replaces_leaves_no_hooks(rank: int, tmp_path: Path) -> None:
    """After a reset other buckets are asked for while the search is on."""
    ddp = DistributedDataParallel(MLP(2))
    path = tmp_path / f"{rank}.json"
    plan_of(ddp.module, (2, 2)).save(path)
    tuners = []
    for buckets in ("auto", str(path)):
        torch._dynamo.reset()
        run = compiled(ddp, split="backward", buckets=buckets)
        train(ddp, batches(rank, [(4, 64)] * 2), run)
        tuners.append(tuning.find_tuner(ddp))
    assert tuners[0] is not tuners[1]
    assert not tuners[0]._stopwatch._nodes


def _run_without_end(rank: int, kind: str) -> tuple[list[str], str, str]:
    """Run forwards after which no gradients are reduced; return what is warned and explained.

    Then train: the search ends all the same.
    """
    ddp = DistributedDataParallel(MLP(DEPTH))
    run = compiled(ddp, split="backward", buckets="auto")
    inputs = batches(rank, [SHAPE] * (DECIDED + 4))
    with _simulated(SLOW), logged("warning") as warned:
        for step in range(110):
            with ddp.no_sync() if kind == "no_sync" else contextlib.nullcontext():
                output = run(inputs[0][:2])
            if kind != "no backward":
                torch.autograd.grad(output.sum(), list(ddp.parameters()))
            if step == 97:
                assert not warned
        explained = str(ddpopt.explain(ddp))
        if kind == "no_sync":
            for x in inputs:
                with ddp.no_sync():
                    for _ in range(110):
                        run(x[:2])
                train(ddp, [x], run)
    return warned, explained, tuning.find_tuner(ddp).outcome


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no_sync", "no backward", "no accumulation"])
def test_a_search_without_steps_is_warned_of_once(ranks: Ranks, kind: str) -> None:
    """The warning comes after a hundred forwards; the search goes on if gradients are reduced."""
    for warned, explained, outcome in ranks.run(_run_without_end, kind):
        (text,) = warned
        assert "looking for better buckets: 0 of 8 steps" in text
        assert "after none of the last 100 forwards" in text
        assert "outside of no_sync" in text
        assert "after none of the last " in explained
        if kind == "no_sync":
            assert outcome.startswith("buckets change")
            assert "after none" not in outcome


@on_ranks(2)
def test_a_forward_of_an_evaluation_is_no_part_of_a_step(rank: int) -> None:
    """It lies between steps with the pauses around it; forward and backward have ticks alone."""
    ddp = DistributedDataParallel(MLP(DEPTH))
    run = compiled(ddp, split="backward", buckets="auto")
    clock = _clock()
    with _simulated(SLOW, clock):
        for x in batches(rank, [SHAPE] * (DECIDED + 1)):
            train(ddp, [x], run)
            clock.pass_time(PAUSE_S)
            with torch.no_grad():
                run(x)
            clock.pass_time(PAUSE_S)
    profile = tuning.find_tuner(ddp).best.profile
    assert profile.forward_s == pytest.approx(TICK_S)
    assert 0 < profile.backward_s < PAUSE_S
    assert 2 * PAUSE_S < profile.between_s < 3 * PAUSE_S


def test_one_rank_has_nothing_to_tune(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(DEPTH))
    run = compiled(ddp, buckets="auto")
    train(ddp, [torch.ones(4, 64)] * (DECIDED + 1), run)
    assert "one rank communicates nothing" in str(ddpopt.explain(ddp))


def test_where_torch_has_moved_a_name_training_goes_on(
    one_rank: None,
) -> None:
    error = ddpopt.errors.TorchDriftError("torch 9 has no such name")
    ddp = DistributedDataParallel(MLP(DEPTH))
    run = compiled(ddp, buckets="auto")
    with mock.patch.object(tuning._torch, "check_names_for_tuning", side_effect=error):
        train(ddp, [torch.ones(4, 64)] * (DECIDED + 1), run)
    assert "buckets stay as they are: torch 9 has no such name" in str(ddpopt.explain(ddp))


@on_ranks(2)
def test_explain_says_how_far_it_is_and_never_advises_what_is_on(rank: int) -> None:
    ddp = DistributedDataParallel(MLP(DEPTH))
    run = compiled(ddp, buckets="auto")
    texts = []
    with _simulated(SLOW):
        for x in batches(rank, [SHAPE] * (DECIDED + 2)):
            train(ddp, [x], run)
            explained = ddpopt.explain(ddp)
            texts.append("\n".join([explained.tuning, *explained.hints]))
    assert texts[2].startswith("looking for better buckets: 3 of 8 steps\n")
    assert "comparing new buckets with those before: 2 of 8 steps\n" in texts[DECIDED]
    assert not any("buckets='auto'" in text or "predicted: nothing" in text for text in texts)


@on_ranks(2)
def test_all_ranks_know_which_of_them_computes_longest_and_its_host(rank: int) -> None:
    """Rank 1 takes twice as long, which `explain` and `metrics` tell on either rank."""
    search = _Search()
    search.end(clock=_clock(TICK_S * (1 + rank)))
    assert f"more on rank 1 ({socket.gethostname()}), the slowest" in str(
        ddpopt.explain(search.ddp)
    )
    numbers = ddpopt.metrics(search.ddp)
    assert numbers["ddpopt.ranks.slowest"] == 1
    assert numbers["ddpopt.ranks.slowest_behind_ms"] == pytest.approx(
        numbers["ddpopt.ranks.computation_ms"]
    )


@on_ranks(2)
def test_the_choice_is_logged_once(rank: int) -> None:
    """Rank 0 logs it, since all ranks know the same."""
    with logged("info") as lines:
        outcome = _Search().end()
    assert lines.count(outcome.rpartition("\n")[0]) == (rank == 0)


def test_idle_forwards_are_told_once_and_not_before_they_are_twice_those_of_a_step() -> None:
    most = tuning._MOST_IDLE
    idle = tuning._IdleForwards()
    assert [idle.count(0) for _ in range(most + 2)] == [False] * most + [True, False]
    assert idle.are_many
    idle = tuning._IdleForwards()
    accumulated = [idle.count(step) for step in range(3) for _ in range(most)]
    assert not any(accumulated)
    assert not idle.are_many
    without_a_step = [idle.count(3) for _ in range(2 * most)]
    # The first call sees that a step has ended, and counts no forward.
    assert without_a_step.index(True) == 2 * (most - 1)


def _search_twice(rank: int) -> list[tuple[str, int]]:
    """Train on a slow network, on a fast one and on a slow one; return each outcome and buckets."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP(DEPTH))
    run = compiled(ddp, buckets="auto")
    inputs = batches(rank, [SHAPE] * (2 * DECIDED + 4))
    results = []
    for cost in (SLOW, FREE, SLOW):
        tuner = tuning.find_tuner(ddp)
        if tuner is not None:
            assert tuner.is_done
            if rebucket.plan_of(ddp) is not None:
                # In the order in which DDP has them: of each layer, the weight and the bias.
                ddps_buckets = [[i for k in range(2 * DEPTH - 2, -2, -2) for i in (k, k + 1)]]
                rebucket.take_back(ddp, ddps_buckets, [2**20])
                train(ddp, inputs[:2], run)
            tuning.search_again(ddp)
        with _simulated(cost, _clock(later=0.5)):
            train(ddp, inputs, run)
        results.append((tuning.find_tuner(ddp).outcome, len(real_buckets(ddp))))
    return results


def test_a_search_can_be_made_once_more(ranks: Ranks) -> None:
    """The benchmarks do so for each rate of a network."""
    first, second = ranks.run(_search_twice)
    assert [num_buckets for _, num_buckets in first] == [num for _, num in second]
    outcomes = [outcome.partition(",")[0] for outcome, _ in first]
    assert outcomes[0] == outcomes[2] == "buckets change"
    assert outcomes[1] == "buckets stay as they are"
    (_, slow), (_, free), (_, again) = first
    assert slow == again > free == 1


@on_ranks(2)
@pytest.mark.quick("the plan's")
@pytest.mark.parametrize(
    ("failing_change", "has_plan"), [(1, False), (2, True)], ids=["the plan's", "the way back"]
)
def test_a_change_that_one_rank_cannot_make_is_made_by_none_and_training_goes_on(
    rank: int, failing_change: int, has_plan: bool
) -> None:
    """Rank 1 has no memory for a new Reducer: that of the plan, or that of the way back."""
    make, num_made = _torch.new_reducer.Change.make, 0

    def make_or_fail(change: Any, formation: Any) -> Any:
        nonlocal num_made
        num_made += 1
        if rank == 1 and num_made == failing_change:
            raise MemoryError("no memory")
        return make(change, formation)

    plan = plan_of(MLP(DEPTH), SIZES).to_json()
    with (
        _simulated(SLOW),
        mock.patch.object(tuning, "decide", return_value=Decision("taken", plan, 0.5, True)),
        mock.patch.object(tuning, "judge", return_value=Verdict("worse", undoes_change=True)),
        mock.patch.object(_torch.new_reducer.Change, "make", make_or_fail),
    ):
        expected, ddp = twins(MLP(DEPTH), bucket_cap_mb=0.02)
        run = compiled(ddp, buckets="auto")
        inputs = batches(rank, [(4, 64)] * (JUDGED + 3))
        assert_equal_states(train(ddp, inputs, run), train(expected, inputs))
    assert "on rank 1: MemoryError: no memory" in tuning.find_tuner(ddp).outcome
    assert (tuple(map(len, real_buckets(ddp))) == SIZES) == has_plan
