"""What Dynamo calls in place of a graph that was compiled under DDP, and what the first calls do.

Once DDP's buckets are final and have been compared with those predicted, a call costs one look at
which DDP module is active, one at what is known of it, and a note that the graph ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._indices import Argument, ParameterIndex
from ddpopt._text import shorten
from ddpopt.errors import TorchDriftError
from ddpopt.reducer import Order, compare_order, find_misplaced, predict_buckets
from ddpopt.split import state
from ddpopt.split.cut import Cut, MakeText
from ddpopt.split.gates import refuse_double_backward
from ddpopt.split.phases import Answer, Buckets

CompiledCall = Callable[..., Any]
# Begins what compiling would have begun, for a DDP module that runs code of another.
StartOnModule = Callable[[DistributedDataParallel], None]

_MOST_QUESTIONS = 20  # DDP's log has its buckets a step after it has formed them
_MOST_UNSYNCED_RUNS = 100  # graphs run under no_sync after which no sum of gradients is expected


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """A graph under DDP in compiled form, with the signature of Dynamo's graph."""

    cut: Cut
    text: MakeText
    call: CompiledCall
    # Which argument of the graph brings in each DDP parameter.
    argument_of: Mapping[ParameterIndex, Argument]


class GraphRunner:
    """Calls a compiled graph; in the first steps, so that gradients arrive in the order predicted.

    Dynamo runs the same code for every DDP module that passes its guards, which need not be the
    one that it was compiled for, so the active module is looked up at each call. What begins with
    a compile (a search for buckets, a plan's file, a hint, a warning) begins with the first call
    for each further module.
    """

    def __init__(
        self,
        compiled: CompiledGraph,
        *,
        arrives_last: Sequence[ParameterIndex],
        cut_for: state.CutFor,
        is_for_copy: bool,
        start: StartOnModule,
        log: Callable[[Cut, DistributedDataParallel], None],
    ) -> None:
        """Make a runner.

        Args:
            compiled: what is run.
            arrives_last: parameters whose gradients have to arrive last in every step, see
                `ReducerRules`; the graph need not use them.
            cut_for: the buckets for which the graph was cut.
            is_for_copy: a check compiled the graph for a copy of a module, and has logged the cut:
                it is not logged again when the original module runs the graph.
            start: called with each further DDP module that runs the graph.
            log: called with the cut and each of these modules.
        """
        argument_of = compiled.argument_of
        last_arguments = [argument_of[index] for index in arrives_last if index in argument_of]
        # Without the parameters that the graph has as attributes: their gradients cannot be held
        # back.
        arrival = [parameter.index for parameter in compiled.cut.arrival]
        arguments_in_arrival = [argument_of[index] for index in arrival if index in argument_of]
        self._compiled = compiled
        self._call = _with_arrival_order(compiled.call, last_arguments)
        # Called until the Reducer has its final buckets, which it forms from the order of arrival.
        self._ordered_call = _with_arrival_order(self._call, arguments_in_arrival)
        # Only if submodules share the graph: then a call's arguments alone tell whose parameters
        # it uses, see `DDPState.note_run`.
        self._arguments_to_note: list[Argument] | None = None
        if compiled.cut.is_shared:
            self._arguments_to_note = arguments_in_arrival
        self._cut_for = cut_for
        self._is_for_copy = is_for_copy
        self._start = start
        self._log = log

    def __call__(self, *args: Any) -> Any:
        """Run the graph for the module whose forward is going on."""
        ddp = _torch.active_ddp()
        if ddp is None:
            # A checkpoint's recomputation, in backward. Whose it is, and so whether that module
            # still needs gradients in an order, is not known here.
            return self._call(*args)
        module_state = state.get(ddp)
        is_compared = self in module_state.compared  # as in all but the first steps
        if not is_compared and not module_state.is_run_by(self._compiled.cut.graph, self):
            self._begin(ddp, module_state, args)
        parameters = None
        if self._arguments_to_note is not None:
            parameters = tuple([args[argument] for argument in self._arguments_to_note])
        module_state.note_run(self._compiled.cut.graph, parameters)
        if is_compared:
            return self._call(*args)
        # DDP will form its buckets from the order in which the gradients of this step arrive, if it
        # sees any, see `_count_unsynced_runs`.
        if _torch.will_rebuild_buckets(ddp):
            num_unsynced_runs = _count_unsynced_runs(ddp, module_state)
            if num_unsynced_runs <= _MOST_UNSYNCED_RUNS:
                return self._ordered_call(*args)
        if compare_buckets(ddp):
            module_state.compared.add(self)
        return self._call(*args)

    def _begin(
        self, ddp: DistributedDataParallel, module_state: state.DDPState, args: Sequence[Any]
    ) -> None:
        """Begin to run for a module that has not run this graph before."""
        # A check's copy has from its original what `start` begins, and has to run the original's
        # code, whatever buckets that was cut for.
        if not module_state.is_copy:
            try:
                self._start(ddp)
            except TorchDriftError as error:
                # A name of torch's is missing. That costs other buckets or a hint, no training.
                _logs.warning("buckets stay as they are: %s", error)
            module_state.recut_unless(self._cut_for)
        # The parameters that the graph takes have other indices in this module, if it reduces them.
        cut, reduced = self._cut_for_module(ddp, args), _torch.reducer_parameters(ddp)
        tensors = [args[argument] for argument in self._compiled.argument_of.values()]
        self.keep_for(ddp, cut, [reduced[tensor].index for tensor in tensors if tensor in reduced])
        if not module_state.is_copy:
            if not self._is_for_copy:
                self._log(cut, ddp)
            # If it was: this is the copy's original. The next module is another.
            self._is_for_copy = False

    def keep_for(
        self, ddp: DistributedDataParallel, cut: Cut, taken: Sequence[ParameterIndex]
    ) -> None:
        """Note that a module runs this graph, which cut it has, and which parameters are taken.

        The cut and the parameters' indices are those of this module, see `DDPState.keep`.
        """
        state.get(ddp).keep(cut, self._compiled.text, self, taken)

    def _cut_for_module(self, ddp: DistributedDataParallel, args: Sequence[Any]) -> Cut:
        """The cut with the parameters of a DDP module that runs code compiled for another module.

        If that module has other parameters around the graph, buckets are predicted as if there were
        none around: the graph was cut at other buckets anyway.
        """
        cut, reduced = self._compiled.cut, _torch.reducer_parameters(ddp)
        cut_parameters = {parameter for bucket in cut.buckets for parameter in bucket.parameters}
        # A cut without buckets names no parameters; one of an equal module, as of a copy, has the
        # same names.
        if not cut_parameters or cut_parameters == set(reduced.values()):
            return cut
        parameter_of = {}
        for parameter in cut.arrival:
            if parameter.index in self._compiled.argument_of:
                tensor = args[self._compiled.argument_of[parameter.index]]
                if tensor in reduced:  # not if this module has it frozen, or has DDP ignore it
                    parameter_of[parameter.name] = reduced[tensor]
        buckets = predict_buckets(list(parameter_of.values()), state.get(ddp).rules)
        return cut.with_parameters(parameter_of).with_buckets(buckets)


def _count_unsynced_runs(ddp: DistributedDataParallel, module_state: state.DDPState) -> int:
    """Count this run of a graph; return how many have run under no_sync since one that was not.

    DDP sees the gradients of each backward that runs between a forward that communicates and the
    end of its allreduces. This may be a backward of a forward under no_sync, as where two forwards
    have one loss. So DDP is taken not to see in which order a module's gradients arrive only if
    forwards go on and on under no_sync.
    """
    if _torch.syncs_gradients(ddp):
        module_state.num_unsynced_runs = 0
    else:
        module_state.num_unsynced_runs += 1
    return module_state.num_unsynced_runs


def compare_buckets(ddp: DistributedDataParallel) -> bool:
    """Compare the buckets that DDP reports with those of the module's cuts, once for each Reducer.

    It warns of the first parameter in another bucket: from there on allreduces start late. Returns
    False as long as the report is awaited, True once there is nothing to compare any more.
    """
    module_state = state.get(ddp)
    if module_state.answer is not Answer.AWAITED:
        return True
    if not _torch.syncs_gradients(ddp):
        return False  # DDP writes its log only in steps that communicate
    try:
        num_questions = module_state.ask_buckets()
    except Exception as error:
        # A release whose log is another one may raise anything. Only the comparison is lost: the
        # answer is not awaited any more.
        _logs.warning("DDP's buckets are not compared with those planned: %s", error)
        return True
    if module_state.reported_buckets is None:
        return num_questions >= _MOST_QUESTIONS  # it is taken to report none
    for cut in module_state.cuts:
        if cut.is_shared:
            continue  # it lists buckets of its graph alone, which no Reducer has
        misplaced = find_misplaced(cut.arrival, cut.buckets, module_state.reported_buckets)
        if misplaced is not None:
            _logs.warning(
                "DDP formed other buckets than planned: %s of graph %s is in bucket %d with others "
                "than planned (bucket %d), so allreduces from there on may start late. %s",
                misplaced.parameter.name,
                cut.graph,
                misplaced.actual,
                misplaced.planned,
                _find_cause(module_state.cuts, cut, module_state.reported_buckets),
            )
            break  # parameters of other graphs in later buckets have moved with it
    return True


def _find_cause(cuts: Iterable[Cut], cut: Cut, reported: Buckets) -> str:
    """Say why buckets are not as planned, as far as that is known, and what to do.

    `cut`, of all `cuts` of the module, plans other buckets than those that DDP has reported.
    """
    compiled = {p.index for other in cuts for p in other.arrival}
    uncompiled = [p for bucket in cut.buckets for p in bucket.parameters if p.index not in compiled]
    order = compare_order(cut.buckets, reported, {p.index for p in uncompiled})
    if order is Order.OTHERS_MOVED:
        names = shorten([parameter.name for parameter in uncompiled])
        return (
            f"No compiled graph uses {names}, whose gradients did not arrive when they were "
            "expected: let the compiled forward use them, and not the loss, or layers that are "
            "not compiled; unused ones can be frozen before DDP is made"
        )
    if order is Order.EQUAL:
        return "The order of gradients is as planned; please report this, with ddpopt.explain(ddp)"
    # All ranks have the buckets that rank 0's Reducer forms.
    return (
        "On rank 0, gradients of the first step arrived in another order. If that step ran "
        "eagerly, or took other branches than this rank's: compile before the first step, and let "
        "it run the same graphs and branches as later ones"
    )


def _with_arrival_order(call: CompiledCall, arguments: Sequence[Argument]) -> CompiledCall:
    """Make the gradients of these arguments arrive last, in the order given.

    The arguments are parameters. Returns a function that calls `call` with an alias of each.

    A section returns all its gradients at once, and autograd accumulates them in an order of its
    own; the Reducer would rebuild its buckets from that order. An alias of each argument puts an
    autograd node in front of the argument's AccumulateGrad. Autograd runs later-made nodes first,
    so making the aliases last to first orders the gradients, and delays them to the end of the
    sections' backward. The delay costs little in the first steps: until DDP has rebuilt its
    buckets, it has one for each dtype. With `arrives_last` the delay is the purpose.
    """
    if not arguments:
        return call
    last_to_first = tuple(reversed(arguments))

    def run(*args: Any) -> Any:
        values = list(args)
        for argument in last_to_first:
            # Else the caller has made the alias: a call in the first steps' order makes one of each
            # parameter, and delays all of them, before it calls what delays `arrives_last`.
            if isinstance(values[argument], torch.nn.Parameter):
                values[argument] = _alias(values[argument])
        return call(*values)

    return run


class _Alias(torch.autograd.Function):
    """The identity. `view_as` would not do: its backward cannot take a sparse gradient.

    A write to what this returns changes the parameter, and no autograd node: it is no view.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # DDP leaves parameters without a gradient alone
        # Not by `save_for_backward`: a checkpoint would count it, and miss it in the recomputation,
        # which makes no aliases.
        ctx.source = value
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or not torch.is_grad_enabled():
            return gradient
        # With create_graph=True. AOTAutograd refuses a double backward by itself, but not one that
        # goes by the alias: it saves that without autograd history.
        return refuse_double_backward(lambda: (gradient.detach(),), gradient, ctx.source)[0]


_alias: Callable[[torch.Tensor], torch.Tensor] = _Alias.apply
