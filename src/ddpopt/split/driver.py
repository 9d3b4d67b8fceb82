"""From Dynamo's whole graph to what runs in its place: facts, plan, cut, compile, run.

It holds no algorithm: each split has a module that plans and one that cuts and compiles, and what
runs is in `runtime.py`. `backend.py` decides for which graphs it is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._events import Label, notifying
from ddpopt._text import source_digest
from ddpopt.errors import NotCutError, Reason, TorchDriftError
from ddpopt.options import Options
from ddpopt.reducer import (
    Bucket,
    Parameter,
    fine_buckets,
    in_launch_order,
    known_buckets,
    predict_buckets,
)
from ddpopt.split import state
from ddpopt.split.backward_cut import BackwardCut, compile_gated, cut_backward
from ddpopt.split.backward_plan import final_positions, plan_backward, read_backward
from ddpopt.split.dump import find_crossings, is_showing, show, write
from ddpopt.split.forward_cut import compile_sections, copy_for_splitting, split_forward
from ddpopt.split.forward_plan import (
    GraphFacts,
    frame_module,
    has_twin,
    order_arrival,
    parameters_of,
    plan_sections,
    read_facts,
)
from ddpopt.split.nodes import (
    attribute_of,
    call_nodes,
    describe,
    is_pure,
    output_values,
)
from ddpopt.split.plan import SplitPlan, parts_of_buckets
from ddpopt.split.runtime import GraphRunner, StartOnModule, order_arrival_of
from ddpopt.split.validate import validate_backward, validate_forward


def compile_under_ddp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel,
    options: Options,
    start: StartOnModule,
) -> Callable[..., Any]:
    """Compile a graph split at the bucket boundaries of a DDP module, or whole for a named reason.

    Further modules may run the result; each is given to `start` first. It raises what compiling the
    whole graph raises, and nothing else.
    """
    try:
        _torch.will_rebuild_buckets(ddp)  # needed in each step; find out now if it has moved
        survey = _survey(gm, example_inputs, ddp, options)
        plan, nodes, compiled = _split(gm, example_inputs, survey, options)
    except _torch.control_flow_exceptions():
        raise
    except Exception as error:
        refusal = NotCutError.because_of(error)
        return compile_whole(gm, example_inputs, ddp, options, refusal, start)
    if plan.fallback is not None:
        write(gm, plan, {"original": gm})
    if compiled is None:
        compiled = notifying(options.inner(gm, list(example_inputs)), Label(plan.graph, 0))
    _announce(ddp, plan, nodes, options)
    arguments, last = survey.arguments, survey.known.rules.arrives_last
    compiled = order_arrival_of(compiled, [arguments[i] for i in last if i in arguments])
    slots = [arguments[p.index] for p in plan.arrival if p.index in arguments]
    ordered = order_arrival_of(compiled, slots)
    return GraphRunner(
        _plan=plan,
        _nodes=nodes,
        _compiled=compiled,
        _ordered=ordered,
        _arguments=arguments,
        _cut_for=survey.known.cut_for,
        _start=start,
        _log=functools.partial(_log, options),
        _is_for_copy=survey.known.is_copy,
    )


def compile_whole(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel | None,
    options: Options,
    refusal: NotCutError,
    start: StartOnModule = lambda _: None,
) -> Callable[..., Any]:
    """Compile a graph whole, for a named reason; `start` as for `compile_under_ddp`."""
    plan = dataclasses.replace(
        _blank_plan(gm, options), fallback=refusal.reason, detail=refusal.detail
    )
    write(gm, plan, {"original": gm})
    nodes = (describe(call_nodes(gm.graph)),) if ddp is not None else ()
    compiled = options.inner(gm, list(example_inputs))
    _announce(ddp, plan, nodes, options)
    if refusal.reason is Reason.TORCH_DRIFT:
        state.note_drift()  # the runner needs the names that moved
    elif ddp is not None:
        compiled = notifying(compiled, Label(plan.graph, 0))
        return GraphRunner(
            _plan=plan,
            _nodes=nodes,
            _compiled=compiled,
            _ordered=compiled,
            _arguments={},
            _cut_for=state.ANY_BUCKETS,
            _start=start,
            _log=functools.partial(_log, options),
            _is_for_copy=state.is_copy(ddp),
        )
    return compiled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """What is known about a graph under DDP before it is planned.

    `graph` is a copy that may be cut. `arguments` gives the argument that brings in each parameter.
    If `is_last`, no other graph can follow it in the DDP module's forward.
    """

    graph: fx.GraphModule
    blank: SplitPlan
    known: state.DDPState
    reduced: Sequence[Parameter]
    arguments: Mapping[int, int]
    facts: GraphFacts
    later: Sequence[Parameter]
    earlier: Sequence[Parameter]
    is_last: bool

    def key(self) -> str:
        """Return a key, valid in any process, for all that a cut depends on besides the graph."""
        known = self.known
        blank = dataclasses.replace(self.blank, graph="")
        parts = [blank, self.reduced, self.arguments, self.later, self.earlier, self.is_last]
        parts += [known.rules, known.is_searching]
        parts += [b and [*map(tuple, b)] for b in (known.buckets, known.expected_buckets)]
        return f"ddpopt {source_digest()} {hashlib.sha256(repr(parts).encode()).hexdigest()}"

    def cut_at(self, plan: SplitPlan) -> tuple[Bucket, ...]:
        """Return the buckets to cut at: those to come if they are known, or the plan's.

        During a search for better buckets they are finer.
        """
        expected = self.known.expected_buckets
        if expected is None and not self.known.is_searching:
            return plan.buckets
        if expected is not None and not plan.is_shared:
            return known_buckets(self.reduced, expected, self.known.rules)
        if plan.is_shared:
            return fine_buckets(plan.arrival)
        return fine_buckets([p for bucket in plan.buckets for p in bucket.parameters])

    def left_whole(self, plan: SplitPlan, reason: Reason) -> SplitPlan:
        """Return the plan of a graph in which no cut helps, or none is possible."""
        if reason is Reason.ONE_BUCKET and self.known.has_planned_buckets:
            reason = Reason.ONE_PLANNED_BUCKET
        if reason is Reason.NO_PARAMETERS:
            plan = plan.with_buckets(())  # it says nothing of buckets that it has no part in
        return dataclasses.replace(plan, fallback=reason)

    def predict(self, place: Mapping[int, float]) -> SplitPlan:
        """Return a plan without sections: buckets, for gradients that are final at these places."""
        last = dict.fromkeys(self.known.rules.arrives_last, math.inf)
        place = {index: last.get(index, at) for index, at in place.items()}
        arrival = order_arrival(self.reduced, place, self.later, self.earlier, self.is_last)
        expected = None if self.blank.is_shared else self.known.expected_buckets
        if expected is not None:
            arrival = in_launch_order(arrival, known_buckets(arrival, expected, self.known.rules))
        own = tuple(parameter for parameter in arrival if parameter.index in place)
        actual, rules = self.known.buckets, self.known.rules
        if self.blank.is_shared:
            buckets = predict_buckets(own, rules)
        elif actual is None:
            buckets = predict_buckets(arrival, rules)
        else:
            buckets = known_buckets(arrival, actual, rules)
            own = in_launch_order(own, buckets)
        return dataclasses.replace(self.blank, buckets=buckets, arrival=own)


def _survey(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel,
    options: Options,
) -> _Survey:
    _torch.check_dynamo_graph(gm)
    reduced = _torch.reducer_parameters(ddp)
    graph = copy_for_splitting(gm)
    trained = {tensor: p for tensor, p in reduced.items() if tensor.requires_grad}
    owners = parameters_of(graph, example_inputs, trained)
    known = state.get(ddp)
    used = {index for indices in owners.values() for index in indices}
    later, earlier = known.arrival_around(_torch.graph_name(gm), used)
    name_of = _torch.names_now(ddp)
    names = {p.index: name_of[tensor] for tensor, p in reduced.items() if tensor in name_of}
    frame = frame_module(
        {node: names[index] for node, (index, *_) in owners.items() if index in names}
    )
    return _Survey(
        graph=graph,
        blank=dataclasses.replace(_blank_plan(gm, options), is_shared=has_twin(ddp.module, frame)),
        known=known,
        reduced=list(reduced.values()),
        arguments={
            index: argument
            for argument, node in enumerate(graph.graph.find_nodes(op="placeholder"))
            for index in owners.get(node, ())
        },
        facts=read_facts(graph, owners, elsewhere={parameter.index for parameter in earlier}),
        later=later,
        earlier=earlier,
        is_last=_torch.is_whole_forward(frame) and not _torch.ends_in_graph_break(gm),
    )


def _blank_plan(gm: fx.GraphModule, options: Options) -> SplitPlan:
    calls, num_fixed = call_nodes(gm.graph), 0
    with contextlib.suppress(TorchDriftError):  # all that is lost is a comparison of ranks
        num_fixed = sum(not is_pure(node) for node in calls)
    return SplitPlan(
        graph=_torch.graph_name(gm),
        inner=options.inner_name,
        num_nodes=len(calls),
        num_fixed=num_fixed,
    )


class _Split(NamedTuple):
    """The plan, the nodes of its sections, and the compiled graph, None if it is to stay whole."""

    plan: SplitPlan
    nodes: state.Nodes
    compiled: Callable[..., Any] | None


def _split(
    gm: fx.GraphModule, example_inputs: Sequence[Any], survey: _Survey, options: Options
) -> _Split:
    # Backward reaches a parameter's first use last.
    plan = survey.predict({index: -use for index, use in survey.facts.first_use.items()})
    buckets = survey.cut_at(plan)
    calls = describe(call_nodes(survey.graph.graph))
    # If a graph releases at most one bucket, no cut of its backward would help either.
    if options.split != "forward" and len(parts_of_buckets(buckets, survey.facts.first_use)) > 1:
        try:
            return _split_backward(gm, example_inputs, survey, options)
        except _torch.control_flow_exceptions():
            raise
        except Exception as error:
            refusal = NotCutError.because_of(error, in_backward=True)
            if not refusal.reason.is_of_backward:
                raise
            plan = dataclasses.replace(
                plan, backward_fallback=refusal.reason, detail=refusal.detail
            )
    try:
        sections = plan_sections(survey.facts, buckets)
    except NotCutError as refusal:
        return _Split(survey.left_whole(plan, refusal.reason), (calls,), None)
    plan = dataclasses.replace(plan, sections=sections).with_buckets(plan.buckets)
    nodes = tuple(calls[section.start : section.stop] for section in sections)
    stitched = split_forward(survey.graph, sections)
    validate_forward(gm, plan, stitched, survey.arguments)
    calls_of_sections = list(stitched.graph.find_nodes(op="call_module"))
    pieces = {
        f"section_{k}": attribute_of(stitched, node) for k, node in enumerate(calls_of_sections)
    }
    outputs = [
        {element: output_values(piece)[element.args[1]] for element in call.users}
        for call, piece in zip(calls_of_sections, pieces.values(), strict=True)
    ]
    crossings = find_crossings(outputs, [call.all_input_nodes for call in calls_of_sections])
    plan = dataclasses.replace(plan, crossings=crossings)
    show(gm, plan, {"original": gm, **pieces, "stitched": stitched})
    compiled = compile_sections(stitched, example_inputs, options.inner, plan.graph)
    return _Split(plan, nodes, compiled)


def _split_backward(
    gm: fx.GraphModule, example_inputs: Sequence[Any], survey: _Survey, options: Options
) -> _Split:
    """Compile a graph whole and its backward in sections, or raise a NotCutError."""
    if options.aot is None:
        raise NotCutError(Reason.CUDA_GRAPHS if options.has_cuda_graphs else Reason.INNER)
    arguments = survey.arguments
    if survey.facts.first_use.keys() - arguments.keys():
        raise NotCutError(Reason.ATTRIBUTES)
    elsewhere = {parameter.index for parameter in survey.earlier}

    def cut(backward: fx.GraphModule, saved: Mapping[str, int]) -> BackwardCut:
        facts = read_backward(backward, saved)
        final = final_positions(facts, arguments, elsewhere)
        plan = dataclasses.replace(survey.predict(final), split="backward")
        try:
            cuts = plan_backward(facts, survey.cut_at(plan), arguments, final)
        except NotCutError as refusal:
            calls = describe(call_nodes(survey.graph.graph))
            return BackwardCut(survey.left_whole(plan, refusal.reason), (calls,), ())
        plan = dataclasses.replace(plan, sections=cuts.sections, num_nodes=len(cuts.order))
        plan = plan.with_buckets(plan.buckets)
        sections = cut_backward(backward, cuts, saved)
        validate_backward(backward, plan, sections, saved, arguments)
        outputs = [dict(zip(s.keeps, output_values(s.graph), strict=False)) for s in sections]
        crossings = find_crossings(outputs, [section.takes for section in sections])
        plan = dataclasses.replace(plan, crossings=crossings)
        nodes = tuple(describe(call_nodes(section.graph.graph)) for section in sections)
        pieces = {f"backward_section_{k}": s.graph for k, s in enumerate(sections)}
        show(gm, plan, {"original": gm, "original_backward": backward, **pieces})
        return BackwardCut(plan, nodes, sections)

    # A result from a cache has no graphs to show.
    key = None if is_showing() else survey.key()
    copied = copy_for_splitting(gm)
    return _Split(*compile_gated(copied, example_inputs, options.aot, cut, key))


def _announce(
    ddp: DistributedDataParallel | None, plan: SplitPlan, nodes: state.Nodes, options: Options
) -> None:
    if ddp is not None:
        state.get(ddp).keep(plan, nodes)
    _log(options, plan)


def _log(options: Options, plan: SplitPlan) -> None:
    """Log a plan; as a warning if overlap is lost that should not be."""
    is_expected = plan.fallback is None or plan.fallback.is_expected
    if plan.backward_fallback is not None:  # nobody requested more than "auto" gives
        is_expected &= options.split == "auto" and plan.backward_fallback.is_expected
    log = _logs.info if is_expected else _logs.warning
    log("%s", plan)
