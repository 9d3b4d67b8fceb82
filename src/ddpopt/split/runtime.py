"""What runs in a DDP step: the compiled graph, and gates that each release a section's gradients.

It compiles nothing. Its cost per forward is one look at which DDP module is active and at what is
known about it; in the first steps it does a little more.

[Note: tokens, gates and runs]
A *gate* is the autograd node of a backward section; only the first section has none, and runs in
AOTAutograd's own node. A gate takes the arguments of the forward whose gradients its section makes,
so that autograd knows where they go, and returns only a *token*: a tensor of one element that links
gates in a chain that ends in AOTAutograd's node.

    forward:    token -> gate 2 -> gate 1 -> compiled forward -> outputs
                           ^          ^            ^
                         w, b       u, v         s, t, and all other arguments

    backward:   section 0 -> s, t accumulate -> section 1 -> u, v accumulate -> section 2 -> ...

The first section returns a *handle* as the token's gradient: a tensor that carries the *run*, the
list of values on which the other sections of this one backward work. Autograd gives the handle to
gate 1, which passes it on to gate 2, and so on. Accumulation comes before any gate, because
autograd runs AccumulateGrad nodes first; so DDP's hooks launch the allreduce of a bucket before the
next section starts. An abandoned backward drops the handle, which frees the run's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _events, _logs, _torch
from ddpopt._events import Label
from ddpopt.errors import TorchDriftError
from ddpopt.reducer import find_misplaced, predict_buckets
from ddpopt.split import state
from ddpopt.split.plan import SplitPlan

Compiled = Callable[..., Any]
# Begins what compiling would have begun, for a DDP module that runs code of another.
StartOnModule = Callable[[DistributedDataParallel], None]

_MOST_QUESTIONS = 20  # DDP's log has its buckets a step after it has formed them
_MOST_UNSEEN = 100  # graphs run under no_sync after which no sum of gradients is expected


@dataclass(eq=False, kw_only=True)
class GraphRunner:
    """Calls a compiled graph, or `ordered` in its place until the Reducer has its final buckets.

    Dynamo runs the same code for every DDP module that passes its guards, which need not be the
    one that it was compiled for, so the active module is looked up at each call. What begins with
    a compile (a search for buckets, a plan's file, a hint, a warning) begins with the first call
    for each further module.
    """

    _plan: SplitPlan
    _nodes: state.Nodes
    _compiled: Compiled
    _ordered: Compiled
    _arguments: Mapping[int, int]  # by the indices of the parameters that they bring in
    _cut_for: state.CutFor
    _start: StartOnModule
    _log: Callable[[SplitPlan], None]
    _is_for_copy: bool  # made by a check, whose original runs it next, and is no news then

    def __call__(self, *args: Any) -> Any:
        ddp = _torch.active_ddp()
        if ddp is None:
            return self._compiled(*args)
        known = state.get(ddp)
        if self in known.compared:
            return self._compiled(*args)
        if known.nodes.get(self._plan.graph) is not self._nodes:
            self._begin(ddp, known, args)
        if _torch.will_rebuild_buckets(ddp) and _may_be_seen(ddp):
            return self._ordered(*args)
        if compare_buckets(ddp):
            known.compared.add(self)
        return self._compiled(*args)

    def _begin(
        self, ddp: DistributedDataParallel, known: state.DDPState, args: Sequence[Any]
    ) -> None:
        """Begin to run for a module that has not run this graph before.

        A copy that a check made has all that from its original.
        """
        if not known.is_copy:
            try:
                self._start(ddp)
            except TorchDriftError as error:  # compiling would have gone on without it too
                _logs.warning("buckets stay as they are: %s", error)
            known.recut_unless(self._cut_for)
        plan = self._plan_for(ddp, args)
        known.keep(plan, self._nodes)
        if not known.is_copy:
            if not self._is_for_copy:
                self._log(plan)
            self._is_for_copy = False

    def _plan_for(self, ddp: DistributedDataParallel, args: Sequence[Any]) -> SplitPlan:
        """Return the plan with the parameters of a DDP module that runs another one's code.

        If it has others around them, the graph is planned alone: it was cut at other buckets.
        """
        plan, reduced = self._plan, _torch.reducer_parameters(ddp)
        planned = {parameter for bucket in plan.buckets for parameter in bucket.parameters}
        if planned == set(reduced.values()) or not planned:
            return plan
        given = {index: args[argument] for index, argument in self._arguments.items()}
        own = {p.name: reduced[v] for p in plan.arrival if (v := given.get(p.index)) in reduced}
        buckets = predict_buckets([*own.values()], state.get(ddp).rules)
        return plan.with_parameters(own).with_buckets(buckets)


def _may_be_seen(ddp: DistributedDataParallel) -> bool:
    """Whether DDP may see in which order the gradients of this forward arrive.

    It sees every backward from a forward that communicates to the end of its allreduces. One of a
    forward under no_sync may be among them, as where two forwards have one loss, so only a module
    that goes on and on under no_sync is taken for one whose gradients DDP never sees.
    """
    known = state.get(ddp)
    known.num_unseen = 0 if ddp.require_backward_grad_sync else known.num_unseen + 1
    return known.num_unseen <= _MOST_UNSEEN


def compare_buckets(ddp: DistributedDataParallel) -> bool:
    """Compare DDP's final buckets with the plans', once; return False until DDP reports them.

    It warns of the first parameter out of place: from there on allreduces start late.
    """
    known = state.get(ddp)
    if known.reported_buckets is not None:
        return True
    if not ddp.require_backward_grad_sync:
        return False  # DDP writes its log only in steps that communicate
    try:
        num_questions = known.ask_buckets()
    except Exception as error:  # only the comparison is lost
        _logs.warning("DDP's buckets are not compared with those planned: %s", error)
        return True
    if known.reported_buckets is None:
        return num_questions >= _MOST_QUESTIONS
    for plan in known.plans:
        found = find_misplaced(plan.arrival, plan.buckets, known.reported_buckets)
        if found is not None and not plan.is_shared:
            _logs.warning(
                "DDP formed other buckets than planned: %s of graph %s is in bucket %d with others "
                "than planned (bucket %d), so allreduces from there on may start late. Gradients "
                "of the first step arrived in another order, since it ran eagerly or took other "
                "branches: compile before the first step, and let it run the same graphs and "
                "branches as later ones, on rank 0 above all",
                found.parameter.name,
                plan.graph,
                found.actual,
                found.planned,
            )
            break
    return True


def order_arrival_of(compiled: Compiled, slots: Sequence[int]) -> Compiled:
    """Make the gradients of `compiled`'s arguments at `slots` arrive last, in that order.

    A section returns all its gradients at once, and autograd accumulates them in an order of its
    own; the Reducer would rebuild its buckets from that. An alias of each argument puts an
    autograd node in front of its AccumulateGrad. Autograd runs later-made nodes first, so making
    the aliases last to first orders the gradients. They then come after all sections' backward,
    which costs nothing: until buckets are rebuilt there is only one.
    """
    if not slots:
        return compiled
    last_to_first = tuple(reversed(slots))

    def run(*args: Any) -> Any:
        values = list(args)
        for slot in last_to_first:
            if isinstance(values[slot], torch.nn.Parameter):
                values[slot] = _alias(values[slot])
        return compiled(*values)

    return run


class _Alias(torch.autograd.Function):
    """The identity. `view_as` would not do: its backward cannot take a sparse gradient.

    A write to what this returns changes the parameter, and no autograd node: it is no view.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # DDP leaves parameters without a gradient alone
        # Not saved for backward: a checkpoint would count it, and miss it in the recomputation.
        ctx.source = value
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or not torch.is_grad_enabled():
            return gradient
        # AOTAutograd saves no autograd history of the alias, which would let it find out itself.
        return refuse_double_backward(lambda: (gradient.detach(),), gradient, ctx.source)[0]


_alias: Callable[[torch.Tensor], torch.Tensor] = _Alias.apply


TOKEN_DTYPE = torch.float32  # whatever the default is: autograd would convert a handle that differs
Boxed = Callable[[list[Any]], Sequence[Any]]
Run = list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSection:
    """A section as it is run; the numbers are those of `SectionGraph`.

    `call` takes its values as a list, which it empties. Its gradients come in the order of
    `releases`. If autocast was on in forward, `call` runs `without_autocast`: all casts are in the
    graph already. `label` says which section it is.
    """

    call: Boxed
    takes: tuple[int, ...]
    keeps: tuple[int, ...]
    drops: tuple[int, ...]
    releases: tuple[int, ...]
    label: Label
    without_autocast: bool = False

    def run(self, run: Run) -> Sequence[Any]:
        """Run this section of a backward; return its gradients."""
        section = _events.listening()
        if section is None:
            return self._run(run)
        with section(self.label, "backward"):
            return self._run(run)

    def _run(self, run: Run) -> Sequence[Any]:
        values = [run[slot] for slot in self.takes]
        for slot in self.drops:
            run[slot] = None
        if self.without_autocast:
            with _torch.no_autocast():
                made = self.call(values)
        else:
            made = self.call(values)
        num_kept = len(self.keeps)
        for slot, value in zip(self.keeps, made, strict=False):
            run[slot] = value
        return [_in_own_memory(gradient) for gradient in made[num_kept:]]


def _in_own_memory(gradient: Any) -> Any:
    """Return a sparse gradient with rows of its own, and anything else as it is.

    Its rows can be a value that a later section reads, and DDP divides them in place. No graph can
    express the copy: Inductor removes copies of sparse tensors.
    """
    if isinstance(gradient, torch.Tensor) and gradient.layout is not torch.strided:
        return gradient.clone()
    return gradient


def run_first_section(
    section: CompiledSection,
    arguments: Sequence[int | None],
    token_argument: int,
    num_kept: int,
    device: torch.device,
) -> Boxed:
    """Return what AOTAutograd is to run as its backward: one section, and the start of a run.

    `arguments` gives the argument to which each gradient that AOTAutograd expects belongs;
    `num_kept` is how many values all sections keep.
    """
    places = {argument: place for place, argument in enumerate(arguments)}
    released = [places[argument] for argument in section.releases]
    token_place = places[token_argument]

    def backward(inputs: list[Any]) -> list[Any]:
        run: Run = [*inputs, *[None] * num_kept]
        inputs.clear()
        gradients: list[Any] = [None] * len(arguments)
        for place, gradient in zip(released, section.run(run), strict=True):
            gradients[place] = gradient
        gradients[token_place] = handle = torch.zeros(1, device=device, dtype=TOKEN_DTYPE)
        handle.ddpopt_run = run  # type: ignore[attr-defined]
        return gradients

    return _torch.boxed(backward)


class Gate(torch.autograd.Function):
    """See [Note: tokens, gates and runs]."""

    @staticmethod
    def forward(
        ctx: Any, section: CompiledSection, is_last: bool, token: torch.Tensor, *_arguments: Any
    ) -> torch.Tensor:
        """Return the token for the next gate. `is_last` says that no section runs after this."""
        ctx.set_materialize_grads(False)
        ctx.section, ctx.is_last = section, is_last
        return token.detach()  # in the token's memory: no kernel fills another

    @staticmethod
    def backward(ctx: Any, handle: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the section, release its gradients, and pass on the run."""
        section: CompiledSection = ctx.section
        if handle is None:
            return (None, None, None, *[None] * len(section.releases))
        run: Run = handle.ddpopt_run  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            gradients = refuse_double_backward(lambda: section.run(run), handle)
        else:
            gradients = section.run(run)
        return (None, None, None if ctx.is_last else handle, *gradients)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, make: Callable[[], Sequence[Any]], *_sources: torch.Tensor) -> Any:
        return tuple(make())

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        raise RuntimeError(
            "torch.compile with aot_autograd does not currently support double backward"
        )


# Function.apply checks each argument for functorch's wrappers, which never reach a compiled graph,
# and takes a third of a gate's time for that; its base class only applies.
_gate: Callable[..., torch.Tensor] = super(torch.autograd.Function, Gate).apply
# `(make, *sources)`: returns the gradients that `make` returns, so that differentiating them
# raises, as with AOTAutograd's. Autograd finds out when it is asked for gradients of `sources`, or
# of what they were made from.
refuse_double_backward: Callable[..., Sequence[torch.Tensor | None]] = _Once.apply


class GatedGraph:
    """The compiled forward of a graph, with a gate for each backward section after the first.

    It has the signature of Dynamo's graph. `compiled` takes the token as an additional argument and
    returns an additional output.
    """

    def __init__(
        self,
        compiled: Callable[..., Sequence[Any]],
        further: Sequence[CompiledSection],
        device: torch.device,
    ) -> None:
        self._compiled = compiled
        # The last section's gate is made first: autograd runs later-made nodes first.
        self._gates = [(section, section is further[-1]) for section in reversed(further)]
        self._device = device

    def __call__(self, *args: Any) -> Sequence[Any]:
        # Not left uninitialised: `nan_asserts` look at it, and deterministic algorithms fill it.
        token = torch.zeros(1, device=self._device, dtype=TOKEN_DTYPE, requires_grad=True)
        for section, is_last in self._gates:
            token = _gate(section, is_last, token, *[args[i] for i in section.releases])
        *outputs, _token = self._compiled(*args, token)
        return outputs
