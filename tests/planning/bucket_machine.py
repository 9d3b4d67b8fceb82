"""Loops in which DDP's buckets change: drawn by rules, run on two ranks beside eager DDP.

The machine writes the script, and with each action what is to come of it, as `rebucket`, `explain`
and [Note: tuning] promise. Ranks are other processes, and hypothesis is not in them.

What is checked after each action, on each rank: gradients, parameters and buffers are eager DDP's;
the Reducer has exactly the buckets that the rules say, which are eager DDP's own or a plan's; and
`explain` says so.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import BucketPlan, _torch
from ddpopt.planning import rebucket
from ddpopt.planning import tuner as tuning
from ddpopt.planning.decision import Decision, Verdict
from ddpopt.split import state
from tests.support.beside import compiled, mean_square, sgd
from tests.support.buckets import real_buckets
from tests.support.machines import choose_scripts, run_machine
from tests.support.models import assert_equal_states, state_of
from tests.support.plans import COST, plan_of
from tests.support.ranks import error_of

WIDTH = 16
BOTH = (0, 1)  # ranks
# Sizes of the first buckets of each plan; the last bucket has the other parameters. Of a file, and
# of a search, it is the first plan.
_PLANS = ((2, 2), (1, 3), ())
_FILE = 0

UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
DDP_OPTIONS: list[dict[str, Any]] = [{}, UNUSED, {**VIEWS, **UNUSED}, STATIC, {**STATIC, **VIEWS}]


class Heads(nn.Module):
    """Two tasks: a step that trains one of them leaves the other's head unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.heads[task](x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a loop's model is, and who changes its buckets beside `rebucket`."""

    ddp_options: dict[str, Any]
    source: str  # of buckets: "ddp", "auto" or "file"
    split: str  # "" if nothing is compiled
    is_worse: bool  # what a search finds is taken back

    @property
    def num_tasks(self) -> int:
        return 2 if self.ddp_options.get("find_unused_parameters") else 1

    def module(self) -> Heads:
        """A model without parameters that no step uses, unless DDP looks for them."""
        torch.manual_seed(0)
        module = Heads()
        module.heads[1].requires_grad_(self.num_tasks == 2)
        return module

    def plan(self, number: int) -> BucketPlan:
        module, sizes = self.module(), _PLANS[number]
        num_trained = sum(p.requires_grad for p in module.parameters())
        return plan_of(module, (*sizes, num_trained - sum(sizes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a loop.

    Some ranks may have a micro-batch under no_sync in it, and then some may act before the last
    forward, as `_ACTS` has it. The optimizer's step is left out as by a GradScaler where gradients
    overflow.
    """

    task: int = 0
    zero: str = "early"  # when, or how, gradients are zeroed
    is_updated: bool = True
    accumulating: tuple[int, ...] = ()
    act: str = ""
    acting: tuple[int, ...] = ()


_STEPS = st.builds(
    Step,
    task=st.integers(0, 1),
    zero=st.sampled_from(["early", "early", "late", "never", "in place"]),
    is_updated=st.booleans(),
    accumulating=st.sampled_from([(), (), (1,), BOTH]),
    act=st.sampled_from(
        ["", "", "", "forward", "evaluate", "differentiate", "fail", "freeze"],
    ),
    acting=st.sampled_from([(0,), BOTH]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What a loop does: a method of `OnRank`, and what there is after it."""

    name: str
    arguments: dict[str, Any]
    error: str  # a word of the error that it raises
    plan: int | None  # whose buckets DDP has; None for its own
    tuning: tuple[str, str]  # how the account of the search begins, by rank
    is_due: bool  # ranks meet in the next forward with gradients


# ---- The rules -----------------------------------------------------------------------------------

_TAKING, _LOOKING, _COMPARING = "taking buckets from", "looking for", "comparing new"
_STAY, _CHANGED = "buckets stay as they are", "buckets change"
# After so many steps ranks meet to end a stage, and for the last time after so many more.
_STAGES = {_TAKING: 2, _LOOKING: 8, _COMPARING: 8}
_MOST_POSTPONED = 7


class Loop(RuleBasedStateMachine):
    """A training loop that is being written. Its attributes are what DDP and ddpopt know of it."""

    sources: Sequence[str] = ("ddp", "file", "auto")

    def __init__(self) -> None:
        super().__init__()
        self.script: list[Action] = []

    @initialize(data=st.data(), options=st.sampled_from(DDP_OPTIONS), is_worse=st.booleans())
    def begin(self, data: st.DataObject, options: dict[str, Any], is_worse: bool) -> None:
        source = data.draw(st.sampled_from(self.sources))
        # A static graph that is not compiled has no accumulation next: nobody has watched it.
        may_be_eager = source == "ddp" and "static_graph" not in options
        split = data.draw(st.sampled_from(["auto", "forward", *([""] if may_be_eager else [])]))
        self.settings = Settings(ddp_options=options, source=source, split=split, is_worse=is_worse)
        self.limits: int | None = None  # the plan whose limits DDP has; None for its own
        self._make_ddp()

    def _make_ddp(self) -> None:
        """There is a new DDP module."""
        self.num_steps = 0  # backwards that DDP has reduced
        self.has_gradients = False
        self.noted_heads: set[int] = set()  # that were used since the last reduction
        self.last_forward = "reduced"  # or "accumulated", or "evaluated"
        self.is_accumulating = False  # as of the last forward with gradients
        self.has_accumulated = False  # what DDP has noted, and has not reduced since
        self.has_passed_by = False  # a backward has, since the last that was reduced
        self.is_frozen = False  # the first layer
        self.is_forbidden = False  # backward, until the next forward
        self.plan: int | None = None
        # Of the search.
        self.stage = {"file": _TAKING, "auto": _LOOKING}.get(self.settings.source, "")
        self.num_counted = self.num_postponed = 0
        self.outcome = ""
        self.limits_before: int | None = None
        self.asleep = set(BOTH)  # ranks that have compiled nothing (since a reset)
        self.is_watched = False  # for accumulations, from the first code on

    def _has(self, option: str) -> bool:
        return option in self.settings.ddp_options

    @property
    def is_static(self) -> bool:
        return self._has("static_graph")

    # ---- Steps -----------------------------------------------------------------------------------

    @rule(num=st.sampled_from([1, 1, 2, 4]), step=_STEPS)
    def step(self, num: int, step: Step) -> None:
        """The first may be an odd one."""
        if self.num_steps < 2:  # ranks communicate in the forwards of a young Reducer
            step = dataclasses.replace(step, act="", accumulating=())
        plain = dataclasses.replace(step, act="", accumulating=())
        for number in range(num):
            self._add_step(plain if number else step)

    @precondition(lambda self: self.stage and self.num_counted < _STAGES[self.stage])
    @rule(num=st.sampled_from([1, 9, 9]), evaluates=st.booleans())
    def train(self, num: int, evaluates: bool) -> None:
        """Steps, most often until ranks are about to meet; and maybe an evaluation."""
        left = _STAGES[self.stage] - self.num_counted
        for _ in range(min(num, left)):
            self._add_step(Step())
        if evaluates:
            self.evaluate()

    def _add_step(self, step: Step) -> None:
        task = step.task % self.settings.num_tasks
        # Eager DDP raises where a head was used, and its gradient is dropped before it reduces.
        zero = "never" if self.noted_heads - {task} else step.zero
        if zero == "early":
            self.has_gradients = False
        self._begin_forward("reduced")
        self.num_steps += 1
        self.has_gradients = True
        self.noted_heads.clear()
        self.is_accumulating = self.has_accumulated = self.has_passed_by = False
        self.num_counted += bool(self.stage)
        self._add("step", step=dataclasses.replace(step, task=task, zero=zero))

    def _begin_forward(self, kind: str) -> None:
        """A forward with gradients begins on both ranks, and maybe some more before it on one."""
        self._meet()
        self.is_forbidden = False
        if self.settings.split:
            self.asleep.clear()
            self.is_watched = True
        self.last_forward = kind
        self.is_accumulating = kind == "accumulated"

    @precondition(lambda self: self.num_steps > 1 or not self.is_static)
    @rule(task=st.integers(0, 1))
    def accumulate(self, task: int) -> None:
        task %= self.settings.num_tasks
        self._begin_forward("accumulated")
        self.has_gradients = True
        if self._has("find_unused_parameters"):
            self.has_accumulated = True
            self.noted_heads.add(task)
        self._add("accumulate", task=task)

    @precondition(lambda self: self.last_forward != "evaluated")
    @rule()
    def evaluate(self) -> None:
        self.last_forward = "evaluated"
        self._add("evaluate")

    @precondition(lambda self: self.has_gradients and not self.noted_heads)
    @rule()
    def zero(self) -> None:
        self.has_gradients = False
        self._add("zero")

    @precondition(lambda self: self.num_steps > 1 and self._has("find_unused_parameters"))
    @rule()
    def freeze(self) -> None:
        """Freeze a layer, or unfreeze it; DDP takes it for an unused one."""
        self.is_frozen = not self.is_frozen
        self._add("freeze", is_frozen=self.is_frozen)

    # A static graph of eager DDP counts such a backward as its own.
    @precondition(lambda self: self.num_steps and not (self.is_static or self.asleep))
    @rule()
    def pass_by(self) -> None:
        """A backward of the module in DDP."""
        if self.is_forbidden:
            self._add("pass_by", error="PlanError")
            return
        self.has_gradients = self.has_passed_by = True
        if self._has("find_unused_parameters"):
            self.noted_heads.add(0)
        self._add("pass_by")

    # ---- What changes buckets, or forgets --------------------------------------------------------

    @precondition(lambda self: self.num_steps > 1 or not self.is_static)
    @rule(number=st.integers(0, len(_PLANS) - 1), is_zeroed=st.booleans())
    def rebucket(self, number: int, is_zeroed: bool) -> None:
        if is_zeroed and not self.noted_heads:
            self.zero()
        if obstacle := self._find_obstacle():
            self._add("rebucket", error=obstacle, number=number)
            return
        self.plan = self.limits = number
        self.is_forbidden = True
        self._add("rebucket", number=number)

    def _find_obstacle(self) -> str:
        """A word of why buckets cannot change now."""
        if self._has("gradient_as_bucket_view") and self.has_gradients:
            return "gradient_as_bucket_view"
        if self.is_watched:
            is_accumulating = self.is_accumulating or self.has_accumulated
        else:  # DDP does not tell an accumulation from an evaluation
            is_accumulating = self.last_forward != "reduced" and self.has_gradients
        if is_accumulating:
            return "no_sync"
        if self._has("find_unused_parameters") and not self.is_static and self.has_gradients:
            return "have gradients"
        return ""

    @precondition(lambda self: self.settings.split)
    @rule(forgetting=st.sampled_from([(0,), BOTH]))
    def reset(self, forgetting: tuple[int, ...]) -> None:
        """torch._dynamo.reset(), which one rank may call alone.

        But not where the other may have a reason for now to keep its buckets: the first that is
        told counts, and either may be.
        """
        if self._is_due and (self.has_passed_by or self._has("gradient_as_bucket_view")):
            forgetting = BOTH
        self.asleep.update(forgetting)
        self._add("reset", forgetting=forgetting)

    # A copy of a static graph that has trained is never reduced: DDP takes its steps for its own.
    @precondition(lambda self: self.num_steps and not (self.is_static or self.is_frozen))
    @rule()
    def copy(self) -> None:
        """Go on with a deep copy, which has a Reducer as DDP makes one with such limits."""
        self._make_ddp()
        self._add("copy", limits=self.limits)

    @property
    def _is_due(self) -> bool:
        last = _STAGES.get(self.stage, 0) + self.num_postponed
        return bool(self.stage) and self.num_counted >= last

    def _meet(self) -> None:
        """Ranks meet in the first forward with gradients after a stage's last step."""
        stage = self.stage
        if not self._is_due:
            return
        of_search = _FILE if stage is _COMPARING else None
        if self.asleep or self.plan not in (None, of_search):
            self._give_up(stage)
        elif self.has_passed_by or (self._has("gradient_as_bucket_view") and self.has_gradients):
            self.num_postponed += 1
            if self.num_postponed > _MOST_POSTPONED:
                self._give_up(stage)
        elif stage is _COMPARING:
            self._end_stage("")
            self.outcome = f"{_CHANGED}\njudged"
            if self.settings.is_worse:
                self.plan, self.limits = None, self.limits_before
        else:
            self.limits_before = self.limits
            self.plan = self.limits = _FILE
            self.outcome = "buckets are those of" if stage is _TAKING else f"{_CHANGED}\n"
            self._end_stage(_COMPARING if stage is _LOOKING else "")

    def _give_up(self, stage: str) -> None:
        self._end_stage("")
        if stage is _COMPARING:
            self.outcome = f"{_CHANGED}\nwhat came of it is not known"
        else:
            self.outcome = _STAY

    def _end_stage(self, following: str) -> None:
        self.stage, self.num_counted, self.num_postponed = following, 0, 0

    def _add(self, name: str, error: str = "", **arguments: Any) -> None:
        tuning = ["" if rank in self.asleep else self.outcome or self.stage for rank in BOTH]
        self.script.append(
            Action(
                name=name,
                arguments=arguments,
                error=error,
                plan=self.plan,
                tuning=(tuning[0], tuning[1]),
                is_due=self._is_due,
            )
        )


Script = tuple[Settings, list[Action]]
_TIMES_AS_MANY = 30  # are drawn as are chosen


def draw_scripts(num_scripts: int, *sources: str, num_rules: int = 12) -> list[Script]:
    """Loops of up to so many rules each, in which buckets are of one of these sources."""
    drawn: list[Script] = []

    class Drawn(Loop):
        def teardown(self) -> None:
            if self.script:
                drawn.append((self.settings, self.script))

    Drawn.sources = sources
    run_machine(Drawn, _TIMES_AS_MANY * num_scripts, num_rules)
    return choose_scripts(drawn, num_scripts, _deeds)


def _deeds(script: Script) -> set[Any]:
    """What is done in a script: each action, with the one before it and whose buckets these are."""
    settings, actions = script
    kind = (*settings.ddp_options, settings.split, settings.source)
    deeds: set[Any] = set()
    before: Any = ""
    for action in actions:
        step = action.arguments.get("step", Step())
        name = f"{action.name} {action.error} {step.act} {step.acting} {step.accumulating}"
        deeds.add((before, name, action.plan is None))
        deeds.add((kind, name, action.plan is None, action.tuning))
        before = action.name, action.is_due
    return deeds


# ---- The run -------------------------------------------------------------------------------------


class _Way:
    """One of the two ways in which a loop runs: what it calls, DDP, and its optimizer."""

    def __init__(self, ddp: DistributedDataParallel, call: Any) -> None:
        self.ddp, self.call = ddp, call
        self.optimizer = sgd(ddp.parameters())


class OnRank:
    """A rank's run of a script."""

    def __init__(self, rank: int, settings: Settings, path: str) -> None:
        self.rank, self.settings, self.path = rank, settings, path
        self.generator = torch.Generator().manual_seed(rank)
        self._begin(
            *(DistributedDataParallel(settings.module(), **settings.ddp_options) for _ in range(2))
        )

    def _begin(self, ddp: DistributedDataParallel, eager: DistributedDataParallel) -> None:
        call: Any = ddp
        if self.settings.split:
            buckets = self.path if self.settings.source == "file" else self.settings.source
            # Forwards are cut before the inner compiler is asked, and eager takes least.
            inner = "eager" if self.settings.split == "forward" else "aot_eager"
            call = compiled(ddp, inner, split=self.settings.split, buckets=buckets)
        self.ways = (_Way(ddp, call), _Way(eager, eager))
        self.ddp = ddp

    def do(self, action: Action) -> None:
        run = getattr(self, action.name)
        if action.error:
            assert action.error in error_of(lambda: run(**action.arguments))
        else:
            run(**action.arguments)

    # ---- Actions ---------------------------------------------------------------------------------

    def _input(self) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=self.generator)

    def step(self, step: Step) -> None:
        x = self._input()
        for way in self.ways:
            if step.zero in ("early", "in place"):
                way.optimizer.zero_grad(set_to_none=step.zero == "early")
            if self.rank in step.accumulating:
                with way.ddp.no_sync():
                    mean_square(way.call(x + 1, step.task)).backward()
            if step.act and self.rank in step.acting:
                _ACTS[step.act](way, x, step.task)
            loss = mean_square(way.call(x, step.task))
            if step.zero == "late":
                way.optimizer.zero_grad()
            loss.backward()
            if step.is_updated:
                way.optimizer.step()

    def accumulate(self, task: int) -> None:
        x = self._input()
        for way in self.ways:
            with way.ddp.no_sync():
                mean_square(way.call(x, task)).backward()

    def evaluate(self) -> None:
        x = self._input()
        with torch.no_grad():
            assert torch.allclose(*(way.call(x, 0) for way in self.ways))

    def zero(self) -> None:
        for way in self.ways:
            way.optimizer.zero_grad()

    def pass_by(self) -> None:
        x = self._input()
        for way in self.ways:
            mean_square(way.ddp.module(x, 0)).backward()

    def freeze(self, is_frozen: bool) -> None:
        for way in self.ways:
            way.ddp.module.layers[0].requires_grad_(not is_frozen)

    def rebucket(self, number: int) -> None:
        ddpopt.rebucket(self.ways[0].call, self.settings.plan(number))

    def reset(self, forgetting: Sequence[int]) -> None:
        if self.rank in forgetting:
            torch._dynamo.reset()

    def copy(self, limits: int | None) -> None:
        ddp, eager = (copy.deepcopy(way.ddp) for way in self.ways)
        if limits is not None:
            caps = self.settings.plan(limits).ddp_kwargs()
            options = self.settings.ddp_options
            eager = DistributedDataParallel(eager.module, **options, **caps)
        self._begin(ddp, eager)

    # ---- What is to be ---------------------------------------------------------------------------

    def check(self, action: Action) -> None:
        assert_equal_states(*(state_of(way.ddp) for way in self.ways))
        ddp = self.ddp
        buckets, own = (_buckets(way.ddp) for way in self.ways)
        plan = None if action.plan is None else self.settings.plan(action.plan)
        planned = own if plan is None else list(map(set, rebucket.indices_of(ddp, plan)))
        assert buckets == planned
        assert rebucket.plan_of(ddp) == plan
        self._check_explanation(action, buckets)

    def _check_explanation(self, action: Action, buckets: list[set[int]]) -> None:
        explained = ddpopt.explain(self.ddp)
        assert explained.tuning.startswith(action.tuning[self.rank]), explained.tuning
        known = state.get(self.ddp).buckets
        if known:
            assert [set(bucket) for bucket in known] == buckets
        names = [name for name, _ in self.ddp.module.named_parameters()]
        told = [set(bucket.actual) for bucket in explained.buckets if bucket.actual]
        if told:
            assert told == [{names[index] for index in bucket} for bucket in buckets]
        assert (explained.bucket_plan is None) == (action.plan is None)
        if action.plan is not None:
            assert not any(bucket.is_as_planned is False for bucket in explained.buckets)


def _buckets(ddp: DistributedDataParallel) -> list[set[int]]:
    """DDP's buckets; a layer that is frozen is in them still."""
    with _torch.requiring_grad(_torch.reducer_parameters(ddp)):
        return [set(bucket) for bucket in real_buckets(ddp)]


def _forward(way: _Way, x: torch.Tensor, task: int) -> None:
    way.call(x, task)


def _evaluate(way: _Way, x: torch.Tensor, task: int) -> None:
    """With gradients enabled, as where `torch.no_grad` was forgotten."""
    way.ddp.eval()
    way.call(x, task)
    way.ddp.train()


def _differentiate(way: _Way, x: torch.Tensor, task: int) -> None:
    """A saliency map."""
    x = x.clone().requires_grad_()
    torch.autograd.grad(mean_square(way.call(x, task)), x)


def _fail(way: _Way, x: torch.Tensor, task: int) -> None:
    output = way.call(x, task)

    def fail(_gradient: torch.Tensor) -> None:
        raise ArithmeticError

    output.register_hook(fail)
    assert "ArithmeticError" in error_of(mean_square(output).backward)


def _freeze(way: _Way, x: torch.Tensor, task: int) -> None:
    """As a GAN's discriminator in its generator's step."""
    trained = [parameter for parameter in way.ddp.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad = False
    way.call(x, task)
    for parameter in trained:
        parameter.requires_grad = True


_ACTS: dict[str, Callable[[_Way, torch.Tensor, int], None]] = {
    "forward": _forward,
    "evaluate": _evaluate,
    "differentiate": _differentiate,
    "fail": _fail,
    "freeze": _freeze,
}


@contextlib.contextmanager
def _deciding(settings: Settings) -> Iterator[None]:
    """Have a search find the plan of a file, and what comes of it be as the settings say."""
    plan = settings.plan(_FILE).to_json()
    decided = Decision(_CHANGED, plan=plan, gain=0.5, is_better=True)
    with (
        mock.patch.object(tuning, "calibrate", return_value=COST),
        mock.patch.object(tuning, "decide", return_value=decided),
        mock.patch.object(tuning, "judge", return_value=Verdict("judged", settings.is_worse)),
    ):
        yield


def run_script(rank: int, settings: Settings, script: Sequence[Action], folder: str) -> None:
    """Do what a script says, and look after each action."""
    path = f"{folder}/{rank}.json"
    settings.plan(_FILE).save(path)
    with _deciding(settings):
        loop = OnRank(rank, settings, path)
        for number, action in enumerate(script):
            with _naming(settings, script[: number + 1]):
                loop.do(action)
                loop.check(action)


@contextlib.contextmanager
def _naming(settings: Settings, script: Sequence[Action]) -> Iterator[None]:
    """Say in an error what had been done."""
    try:
        yield
    except Exception as error:
        done = [f"{action.name} {action.arguments}" for action in script]
        raise AssertionError("\n".join([str(settings), *done, str(script[-1])])) from error
