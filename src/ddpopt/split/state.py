"""What is known about each DDP module: the cuts of its graphs, and the Reducer's buckets.

The compiler, the runner and the modules that change buckets write it. What other packages know
about a module is kept in `_slots.py`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._indices import ParameterIndex
from ddpopt._slots import forget_compiled
from ddpopt.errors import DDPMode, Reason
from ddpopt.reducer import Parameter, ReducerRules, known_buckets
from ddpopt.split.cut import Cut, GraphText, MakeText, frame_of
from ddpopt.split.phases import Answer, Buckets, CutGoal, Goal, Origin, ReducerBuckets
from ddpopt.steps.forwards import are_forwards_reported

# The buckets that a graph was cut for, in any order of their members; None if they were not known
# yet; or ANY_BUCKETS, where the graph was cut finely, or stays whole whatever they are.
CutFor = str | tuple[frozenset[ParameterIndex], ...] | None
ANY_BUCKETS = "any buckets"


class _GraphRun(NamedTuple):
    """A call of a compiled graph in a forward."""

    graph: str
    # Where submodules share the graph's code: the tensors that this call was given for the cut's
    # `arrival`, in that order; the cut itself has the parameters of one submodule. Else None.
    parameters: tuple[torch.Tensor, ...] | None


class DDPState:
    """What is known about one DDP module.

    Most of it depends on compiled code. `forget` clears that part when `torch._dynamo.reset()`
    drops the code. `is_copy` stays: all ranks have to agree on it, and one may call `reset` alone.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp: Callable[[], DistributedDataParallel | None]
        self._ddp = weakref.ref(ddp, self._let_go)
        self.is_copy = False  # whether a check made the module, to run the original's code
        self.forget()

    def forget(self) -> None:
        """Reset everything that depends on compiled code."""
        # By the name of a graph: its cut; what makes its text, for `explain`; its `GraphRunner`,
        # which Dynamo owns; and the parameters that it takes.
        self._cuts: dict[str, Cut] = {}
        self._make_texts: dict[str, MakeText] = {}
        self._runners: dict[str, Callable[[], Any]] = {}
        self._taken_by: dict[str, Sequence[ParameterIndex]] = {}
        # Dynamo's entries for what it compiled for the module. `backend` adds them, with the guard
        # on `rules`; `_forget_code` gives them up.
        self.code: list[Any] = []
        # The graphs that have run in the present forward, each of which has a cut. None between
        # forwards, since the list keeps parameters of shared graphs alive, and in a process where
        # nobody reports forwards. This may be in the midst of one, so it is not None here.
        self._runs: list[_GraphRun] | None = [] if are_forwards_reported() else None
        # The names of the graphs that ran in the last forward with gradients, in that order.
        self._last_runs: tuple[str, ...] = ()
        self._rules: ReducerRules | None = None  # as `rules` returned them last
        self._reducer = ReducerBuckets()  # DDP's own buckets, which the Reducer has yet to tell
        self._cut_goal = CutGoal()  # cut graphs for the Reducer's buckets; nothing is provisional
        # How many graphs have run under no_sync since the last one outside of it; counted until
        # the buckets are final. After many, gradients are no longer put in order.
        self.num_unsynced_runs = 0
        # The runners of graphs whose cuts need not be compared with the buckets until these change.
        self.compared: weakref.WeakSet[Any] = weakref.WeakSet()
        # Whether the module, on its way to other buckets, ran code that was cut for those of some
        # other module. The tuner then has its graphs cut again for each new Reducer. This is no
        # part of the goal, since it outlasts that one.
        self.is_recut = False

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The cuts in force, in the order in which they were made."""
        return tuple(self._cuts.values())

    def make_texts(self) -> dict[str, GraphText]:
        """The text of each graph, by its name."""
        return {graph: make() for graph, make in self._make_texts.items()}

    def is_cut_in_forward(self, graph: str) -> bool:
        """Whether the graph's forward is in sections; False for a graph without a cut."""
        cut = self._cuts.get(graph)
        # A graph that is compiled whole says "forward" too, and has no sections.
        return cut is not None and bool(cut.sections) and cut.split == "forward"

    def keep(
        self,
        cut: Cut,
        make_text: MakeText,
        runner: object = None,
        taken: Sequence[ParameterIndex] = (),
    ) -> None:
        """Note that `cut` is in force, in place of an earlier one for the same graph.

        `runner` is the `GraphRunner` that runs the graph. It is None where torch lacks a name that
        a runner needs: then nobody notices when the graph runs. `taken` are the parameters that the
        graph takes, see `runs_with_gradients`.
        """
        self._make_texts[cut.graph] = make_text
        # Weakly: Dynamo may drop its code, and with it large constants, while the module lives.
        self._runners[cut.graph] = (lambda: None) if runner is None else weakref.ref(runner)
        self._taken_by[cut.graph] = taken
        self._cuts[cut.graph] = self._with_buckets_in_force(cut)

    def _with_buckets_in_force(self, cut: Cut) -> Cut:
        """The cut, with the Reducer's buckets in place of predicted ones if these are out of date.

        `compare_buckets` compares a cut's buckets with those that the Reducer will tell, once, and
        warns where they differ. Already before that the Reducer may have its last buckets: those of
        a plan; those that it formed in steps before the compile; or, with `find_unused_parameters`
        and no static graph, those of its construction.
        """
        if self._reducer.answer is not Answer.AWAITED:
            return cut  # nothing is compared any more; `explain` shows the cut's beside those told
        if cut.is_shared or not cut.buckets:
            return cut  # not compared: a shared cut lists what is predicted of its graph alone
        buckets = self.buckets
        if buckets is None:
            return cut  # the Reducer is yet to form its last ones
        parameters = list(_torch.reducer_parameters(self._module()).values())
        return cut.with_buckets(known_buckets(parameters, buckets, self.rules))

    def is_run_by(self, graph: str, runner: object) -> bool:
        """Whether this runner is the one that `keep` was given last for a graph."""
        return graph in self._runners and self._runners[graph]() is runner

    # ---- What runs in a forward ----------------------------------------------------------------

    def begin_forward(self) -> None:
        """Note that a forward begins, and drop what one before has left that raised."""
        self._runs = []

    def note_run(self, graph: str, parameters: tuple[torch.Tensor, ...] | None = None) -> None:
        """Note that a graph, which has a cut, runs in the present forward, see `_GraphRun`."""
        if self._runs is not None:  # else nobody reports forwards, and none would end the list
            self._runs.append(_GraphRun(graph, parameters))

    def end_forward(self) -> None:
        """Keep what ran in the forward that ends, unless it had no gradients, as in evaluation."""
        graphs = tuple(run.graph for run in self._runs or ())
        self._runs = None
        if any(self._arrival_of(graph) for graph in graphs):
            self._last_runs = graphs

    @property
    def last_cuts(self) -> tuple[Cut, ...]:
        """The cuts of the graphs that ran in the last forward with gradients, in that order.

        A graph that ran several times is there once, at its first run.
        """
        return tuple(self._cuts[graph] for graph in dict.fromkeys(self._last_runs))

    @property
    def runs_with_gradients(self) -> list[tuple[Cut, list[Parameter]]]:
        """The cuts of the graphs that have run in the present forward, with the parameters taken.

        In the order in which they ran, without those that have no backward.
        """
        parameter_of = {p.index: p for p in _torch.reducer_parameters(self._module()).values()}
        runs: list[tuple[Cut, list[Parameter]]] = []
        for run in self._runs or ():
            cut = self._cuts[run.graph]
            if cut.fallback is Reason.NO_GRAD:
                continue
            if run.parameters is not None:
                taken = list(self._parameters_of(run))
            else:
                # All that the graph takes: `arrival` lacks those whose gradients end in an earlier
                # graph's backward. One may have gone: frozen before the Reducer told what it has.
                indices = self._taken_by[run.graph]
                taken = [parameter_of[index] for index in indices if index in parameter_of]
            runs.append((cut, taken))
        return runs

    @property
    def may_have_begun_forward(self) -> bool:
        """Whether a graph has run in the present forward.

        Also True where that is not known: in a checkpoint's recomputation, which runs between
        forwards, and where nobody reports forwards.
        """
        return self._runs is None or bool(self._runs)

    def arrival_around(self, graph: str) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
        """The parameters that arrive before, and those that arrive after a graph's own.

        Backward is forward reversed. So before the graph's own arrive the parameters of graphs that
        run after it, and after its own those of graphs that have run before it.

        The graph is being compiled. Dynamo compiles it when the forward has reached it, so the
        graphs before it are those that have run in this forward. The graphs after it are taken to
        be all that ran in the last forward: `order_arrival`, which gets both, asks first which
        parameters are the graph's own or of graphs before it. Where others run after it, as in
        another branch, buckets are predicted wrongly and cuts are not the best; DDP's own buckets
        replace the prediction as soon as DDP has formed them.
        """
        graphs_after = self._last_runs
        if self._runs is not None:
            runs = self._runs
        else:
            # A checkpoint's recomputation, in backward: the forward has ended, in which another
            # version of this code ran, and what ran before that ran before this one too. All
            # versions of a function's code have its frame in their names. Where submodules share
            # the code, it may be the recomputation of any of them; the first in forward is taken.
            frames = [frame_of(other) for other in self._last_runs]
            frame = frame_of(graph)
            num_before = frames.index(frame) if frame in frames else 0
            # What each of these calls was given is not known any more: the cut's parameters count.
            runs = [_GraphRun(other, None) for other in self._last_runs[:num_before]]
            graphs_after = self._last_runs[num_before:]

        arrives_after: list[Parameter] = []
        for run in reversed(runs):
            arrives_after += self._parameters_of(run)
        arrives_before: list[Parameter] = []
        for other in reversed(graphs_after):
            arrives_before += self._arrival_of(other)
        return tuple(arrives_before), tuple(arrives_after)

    def _arrival_of(self, graph: str) -> tuple[Parameter, ...]:
        """The parameters of a graph in arrival order; none if it was compiled under `no_grad`."""
        return self._cuts[graph].arrival

    def _parameters_of(self, run: _GraphRun) -> tuple[Parameter, ...]:
        """The Reducer's records of the parameters whose gradients a run's backward ends, in order.

        They are the cut's `arrival`, or, where submodules share the graph and the run knows its
        tensors, those of the tensors.
        """
        if run.parameters is None:
            return self._arrival_of(run.graph)
        reduced = _torch.reducer_parameters(self._module())
        # DDP may not reduce the parameter of this submodule: it was frozen, or is to be ignored.
        return tuple(reduced[tensor] for tensor in run.parameters if tensor in reduced)

    @property
    def rules(self) -> ReducerRules:
        """How the Reducer forms buckets now.

        It is the same object until that changes, since a guard compares it at each call.
        """
        ddp, rules = self._module(), self._rules
        now = (_torch.follows_arrival_order(ddp), self.is_provisional)
        if rules is None or (rules.follows_arrival, rules.is_provisional) != now:
            follows_arrival, is_provisional = now
            rules = self._rules = ReducerRules(
                # New limits count once somebody says so, see `recompile_by_new_limits`.
                caps_bytes=_torch.reducer_caps(ddp) if rules is None else rules.caps_bytes,
                follows_arrival=follows_arrival,
                is_provisional=is_provisional,
                arrives_last=_torch.awaiting_delayed(ddp),  # whose hooks reduce the delayed ones
            )
        return rules

    def recompile_by_new_limits(self) -> None:
        """Have graphs compiled anew, and cut by the Reducer's limits of now.

        Called where the Reducer was replaced, and code for the one before would delay allreduces.
        """
        self._rules = None
        self._forget_code()

    # ---- Which buckets there are, and which ones graphs are cut for: see `phases.py` ------------

    @property
    def buckets(self) -> Buckets | None:
        """The Reducer's buckets; None if it has yet to form them, or does not tell."""
        return self._reducer.find(self._module())

    @property
    def reported_buckets(self) -> Buckets | None:
        """The Reducer's final buckets as it told them, None if it has not."""
        return self._reducer.told

    @property
    def answer(self) -> Answer:
        """Whether the Reducer has told its buckets."""
        return self._reducer.answer

    @property
    def has_planned_buckets(self) -> bool:
        """Whether a plan's buckets are in force or about to be."""
        return self._reducer.origin is Origin.PLANNED or self.goal is Goal.EXPECTED

    def ask_buckets(self) -> int:
        """Ask the Reducer for its buckets; return how often it was asked since they changed.

        If it tells them, they are the `reported_buckets` from here on.

        Raises:
            TorchDriftError: this release does not report them, now or later.
        """
        return self._reducer.ask(self._module())

    def give_buckets(self, buckets: Buckets, origin: Origin) -> None:
        """Note that the module has a new Reducer with these buckets, which is asked for them."""
        self._reducer = ReducerBuckets(origin, buckets)
        for graph, cut in self._cuts.items():
            self._cuts[graph] = self._with_buckets_in_force(cut)
        self.compared.clear()

    @property
    def has_forward_sections(self) -> bool:
        """Whether a graph is cut in forward.

        Such a graph is cut again for other buckets. A backward that was cut finely in a search is
        not: many small sections cost little in backward, and serve any buckets.
        """
        return any(map(self.is_cut_in_forward, self._cuts))

    @property
    def goal(self) -> Goal:
        """Which buckets graphs are cut for now."""
        return self._cut_goal.goal

    @property
    def expected_buckets(self) -> Buckets | None:
        """Those of a plan that is about to be applied, None without one."""
        return self._cut_goal.expected

    @property
    def is_provisional(self) -> bool:
        """Whether code that is compiled now is dropped when the goal is reached."""
        return self._cut_goal.is_provisional

    def begin_search(self, *, is_provisional: bool) -> None:
        """Cut graphs finely from here on; if `is_provisional`, they are cut again at the end."""
        self._cut_goal = CutGoal(goal=Goal.SEARCHED, is_provisional=is_provisional)

    def expect_buckets(self, buckets: Buckets) -> None:
        """Cut graphs by buckets that the Reducer will be given soon."""
        # A copy that a check made stays provisional: it runs the original's code.
        self._cut_goal = dataclasses.replace(self._cut_goal, goal=Goal.EXPECTED, expected=buckets)

    @property
    def cut_for(self) -> CutFor:
        """What graphs are cut for now, as `recut_unless` compares it; None if it is not known."""
        if self.goal is Goal.SEARCHED:
            return ANY_BUCKETS
        buckets = self.expected_buckets if self.goal is Goal.EXPECTED else self.buckets
        return None if buckets is None else tuple(map(frozenset, buckets))

    def recut_unless(self, cut_for: CutFor) -> None:
        """Have code of another module compiled anew if it was not cut for the buckets to come.

        `cut_for` is what that code was cut for. A search cannot do with a graph that was cut for
        its module's own buckets. For buckets in force any code is kept: it may delay allreduces.
        """
        if self.goal is not Goal.IN_FORCE and cut_for not in (ANY_BUCKETS, self.cut_for):
            # This changes `rules`, and the guard on them stops that code. What is compiled in its
            # place is dropped at the end of the goal, see `end_search`.
            self._become_provisional(True)
            # The tuner asks for this when the module has other buckets, and the goal is over.
            self.is_recut = True

    def end_search(self) -> None:
        """Cut graphs for the Reducer's buckets again: a search or the wait for a plan is over.

        Provisional code, or code that was cut finely in forward, is compiled anew.
        """
        is_fine_in_forward = self.goal is Goal.SEARCHED and self.has_forward_sections
        if self.is_provisional or is_fine_in_forward:
            self._forget_code()
        self._cut_goal = CutGoal()

    def _become_provisional(self, is_provisional: bool) -> None:
        self._cut_goal = dataclasses.replace(self._cut_goal, is_provisional=is_provisional)

    def _forget_code(self) -> None:
        """Make Dynamo give up what it compiled for the module, and compile anew.

        `code` has Dynamo's cache entries of this module, so other modules of its class keep theirs.
        Where `rules` have changed, the guard on them does that too; but Dynamo would go on to count
        the code that the guard stops, and compile nothing more past its limit.
        """
        _torch.forget_code(self.code)
        self.code.clear()

    def mark_as_copy_of(self, original: DDPState) -> None:
        """Note that a check made the module, which runs the original's code.

        Of the original's state only `is_provisional` is taken over.
        """
        self.is_copy = True
        self._become_provisional(original.is_provisional)

    def _let_go(self, _dead: object) -> None:
        """Clear the state of a module that was freed: compiled code may keep the state longer."""
        self.forget()
        self._ddp = lambda: None  # the weak reference would hold this state, by its callback

    def _module(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None, "this state is used after its module was freed"
        return ddp


# Each ends with its module. A `torch._dynamo.reset()` clears what depends on the code it drops.
_states: weakref.WeakKeyDictionary[DistributedDataParallel, DDPState]
_states = weakref.WeakKeyDictionary()
has_drifted = False  # whether a graph was compiled of which nobody notices when it runs


def get(ddp: DistributedDataParallel) -> DDPState:
    """What is known about a module, made when it is asked for first."""
    state = _states.get(ddp)
    if state is None:  # setdefault would make one at each call, and forwards call this
        state = _states[ddp] = DDPState(ddp)
    return state


def find(ddp: DistributedDataParallel) -> DDPState | None:
    """What is known about a module, None if that is nothing."""
    return _states.get(ddp)


def has_modules() -> bool:
    """Whether anything is known about any DDP module."""
    return bool(_states)


def is_copy(ddp: DistributedDataParallel) -> bool:
    """Whether a check made this module."""
    known = _states.get(ddp)
    return known is not None and known.is_copy


def logs_for_all_ranks(ddp: DistributedDataParallel) -> bool:
    """Whether this rank tells users what is the same on all: the first of several ranks does.

    No rank does where it is alone, and waits for none, or about a copy that a check made.
    """
    group = ddp.process_group
    return group.rank() == 0 and group.size() > 1 and not is_copy(ddp)


def rules_of(ddp: DistributedDataParallel | None) -> ReducerRules | None:
    """How a module's Reducer forms buckets, None without a module."""
    return None if ddp is None else get(ddp).rules


def ddp_of(model: torch.nn.Module) -> DistributedDataParallel:
    """The DDP module at the top of a model.

    Raises:
        TypeError: there is none.
    """
    ddp = _torch.unwrap_compiled(model)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            "this takes a DistributedDataParallel module, or the result of torch.compile on one; "
            f"this is a {type(ddp).__name__}"
        )
    return ddp


def note_drift() -> None:
    """Note that runs of a compiled graph will go unnoticed, since a private name is missing.

    Then nobody can say that nothing was compiled for a module, and so nobody is warned of it.
    """
    global has_drifted  # noqa: PLW0603  # a matter of the process: its torch lacks a name
    has_drifted = True


def forget_all() -> None:
    """Reset all that depends on compiled code, which `torch._dynamo.reset()` drops."""
    global has_drifted  # noqa: PLW0603  # see note_drift
    for state in list(_states.values()):
        state.forget()
    forget_compiled()  # what other packages keep of it, see `_slots.py`
    has_drifted = False  # the graphs that nobody noticed are dropped too


# The modes of a DDP module in which it cannot be given other buckets; nor an algorithm in place of
# its allreduce; nor be copied for a check's steps.
MODES_WITHOUT_REBUCKET = (
    DDPMode.MIXED_PRECISION,
    DDPMode.OPTIMIZER_IN_BACKWARD,
    DDPMode.JOIN,
)
MODES_WITHOUT_ALGORITHM = (*MODES_WITHOUT_REBUCKET, DDPMode.DELAYED_PARAMETERS)
MODES_WITHOUT_REHEARSAL = (DDPMode.FROZEN, *MODES_WITHOUT_ALGORITHM)

_IS_IN: dict[DDPMode, Callable[[DistributedDataParallel], bool]] = {
    DDPMode.MIXED_PRECISION: lambda ddp: ddp.mixed_precision is not None,
    DDPMode.OPTIMIZER_IN_BACKWARD: _torch.has_optimizer_in_backward,
    DDPMode.DELAYED_PARAMETERS: _torch.has_delayed_parameters,
    DDPMode.JOIN: _torch.is_in_join,
    DDPMode.FROZEN: lambda ddp: not any(p.requires_grad for p in ddp.parameters()),
}


def find_mode(ddp: DistributedDataParallel, modes: Sequence[DDPMode]) -> DDPMode | None:
    """The first of these modes that `ddp` is in, None if it is in none of them."""
    for mode in modes:
        if _IS_IN[mode](ddp):
            return mode
    return None
