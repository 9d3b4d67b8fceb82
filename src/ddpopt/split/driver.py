"""From Dynamo's whole graph to what runs in its place: facts, plan, cut, compile, run.

It holds no algorithm: each step is a module of `forward` or `backward`, the last is `runner.py`.
`backend.py` says for which graphs it is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._events import Label, telling
from ddpopt.errors import (
    CutRefusedError,
    Fallback,
    ForwardInstead,
    SectionCompileError,
    TorchDriftError,
)
from ddpopt.options import Options
from ddpopt.reducer import (
    Bucket,
    Parameter,
    ReducerRules,
    fine_buckets,
    known_buckets,
    predict_buckets,
)
from ddpopt.split import dump, state
from ddpopt.split.backward.compile import compile_gated
from ddpopt.split.backward.cut import SectionGraph
from ddpopt.split.backward.facts import BackwardFacts
from ddpopt.split.backward.plan import final_positions, plan_backward
from ddpopt.split.forward.compile import compile_sections
from ddpopt.split.forward.cut import copy_for_splitting, split_forward
from ddpopt.split.forward.facts import GraphFacts, read_facts
from ddpopt.split.forward.plan import order_arrival, plan_sections
from ddpopt.split.nodes import call_nodes, count_collectives, describe, graph_name
from ddpopt.split.parameters import find_parameters, frame_module, has_twin
from ddpopt.split.plan import BackwardCuts, SplitPlan
from ddpopt.split.runner import GraphRunner, order_first_arrival


def compile_under_ddp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel,
    options: Options,
) -> Callable[..., Any]:
    """Compile a graph split at the bucket boundaries of a DDP module, or whole for a named reason.

    Raises:
        SectionCompileError: the inner compiler raised on a section.
    """
    passing: tuple[type[BaseException], ...] = (
        SectionCompileError,
        *_torch.control_flow_exceptions(),
    )
    try:
        _torch.will_rebuild_buckets(ddp)  # needed at each step; find out now if it has moved
        survey = _survey(gm, example_inputs, ddp, options)
        plan, nodes, compiled = _split(gm, example_inputs, survey, options, passing)
    except passing:
        raise
    except Exception as error:
        reason = (
            Fallback.TORCH_DRIFT if isinstance(error, TorchDriftError) else Fallback.SPLIT_FAILED
        )
        detail = f"{type(error).__name__}: {error}"
        return compile_whole(gm, example_inputs, ddp, options, reason, detail)
    dump.dump_plan(gm, plan)
    if compiled is None:
        compiled = telling(options.inner(gm, list(example_inputs)), Label(plan.graph, 0))
    _announce(ddp, plan, nodes)
    slots = [survey.slots[p.index] for p in plan.arrival if p.index in survey.slots]
    return GraphRunner(plan, nodes, compiled, order_first_arrival(compiled, slots))


def compile_whole(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel | None,
    options: Options,
    reason: Fallback | None,
    detail: str = "",
) -> Callable[..., Any]:
    """Compile a graph as it is, and say why."""
    plan = _blank_plan(gm, options, reason, detail)
    dump.dump_plan(gm, plan)
    nodes = (describe(call_nodes(gm.graph)),) if ddp is not None else ()
    compiled = options.inner(gm, list(example_inputs))
    _announce(ddp, plan, nodes)
    if plan.fallback is Fallback.TORCH_DRIFT:  # the runner needs the names that moved
        state.note_drift()
        return compiled
    if ddp is None:
        return compiled
    return GraphRunner(plan, nodes, telling(compiled, Label(plan.graph, 0)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """What is known of a graph under DDP before it is planned.

    `graph` is a copy that may be cut. `arguments` gives the argument that brings each parameter
    in, `slots` only those that the graph does not write to.
    `is_shared` and `is_last` say whether modules of one class share the graph, and whether no
    other graph can follow it in the DDP module's forward.
    """

    graph: fx.GraphModule
    blank: SplitPlan
    reduced: Sequence[Parameter]
    arguments: Mapping[int, int]
    slots: Mapping[int, int]
    facts: GraphFacts
    later: Sequence[Parameter]
    earlier: Sequence[Parameter]
    rules: ReducerRules
    actual: Sequence[Sequence[int]] | None
    is_shared: bool
    is_last: bool
    is_cut_finely: bool

    def cut_at(self, plan: SplitPlan) -> tuple[Bucket, ...]:
        """Return the buckets to cut at: the plan's, or finer ones while better are looked for."""
        if not self.is_cut_finely:
            return plan.buckets
        if self.is_shared:
            return fine_buckets(plan.arrival)
        return fine_buckets([p for bucket in plan.buckets for p in bucket.parameters])

    def draft(self, place: Mapping[int, int]) -> SplitPlan:
        """Return a plan without sections, for gradients that are final at these places."""
        arrival = order_arrival(self.reduced, place, self.later, self.earlier, self.is_last)
        own = tuple(parameter for parameter in arrival if parameter.index in place)
        if self.actual is not None:
            buckets = known_buckets(arrival, self.actual, self.rules)
            turn = {p.index: bucket.index for bucket in buckets for p in bucket.parameters}
            own = tuple(sorted(own, key=lambda parameter: turn[parameter.index]))
        else:
            buckets = predict_buckets(own if self.is_shared else arrival, self.rules)
        return dataclasses.replace(
            self.blank, buckets=buckets, arrival=own, is_shared=self.is_shared
        )


def _survey(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel,
    options: Options,
) -> _Survey:
    reduced = _torch.reducer_parameters(ddp)
    graph = copy_for_splitting(gm)
    trained = {tensor: p for tensor, p in reduced.items() if tensor.requires_grad}
    owners, slots = find_parameters(graph, example_inputs, trained)
    known = state.of(ddp)
    used = {index for indices in owners.values() for index in indices}
    later, earlier = known.arrival_around(graph_name(gm), used)
    names = {parameter.index: parameter.name for parameter in reduced.values()}
    frame = frame_module({node: names[index] for node, (index, *_) in owners.items()})
    is_shared = has_twin(ddp.module, frame)
    return _Survey(
        graph=graph,
        blank=_blank_plan(gm, options, None),
        reduced=list(reduced.values()),
        arguments={
            index: argument
            for argument, node in enumerate(graph.graph.find_nodes(op="placeholder"))
            for index in owners.get(node, ())
        },
        slots=slots,
        facts=read_facts(graph, owners, elsewhere={parameter.index for parameter in earlier}),
        later=later,
        earlier=earlier,
        rules=known.rules,
        actual=None if is_shared else known.buckets,
        is_shared=is_shared,
        is_last=_torch.is_whole_forward(frame) and not _torch.ends_in_graph_break(gm),
        is_cut_finely=known.is_searched,
    )


# Where a graph releases one bucket or none, no cut of its backward would help.
_NOTHING_TO_RELEASE = (Fallback.NO_PARAMETERS, Fallback.ONE_BUCKET)


class _Split(NamedTuple):
    """The plan, the nodes of its sections, and the compiled graph: None if it is to be whole."""

    plan: SplitPlan
    nodes: state.Nodes
    compiled: Callable[..., Any] | None


def _split(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    survey: _Survey,
    options: Options,
    passing: tuple[type[BaseException], ...],
) -> _Split:
    plan = _plan_forward(survey)
    if options.split == "backward" and plan.fallback not in _NOTHING_TO_RELEASE:
        try:
            return _split_backward(gm, example_inputs, survey, options)
        except passing:
            raise
        except Exception as error:
            instead, detail = _refusal(error)
            plan = dataclasses.replace(plan, instead=instead, detail=detail)
    calls = describe(call_nodes(survey.graph.graph))
    if plan.fallback is not None:
        return _Split(plan, (calls,), None)
    nodes = tuple(calls[s.start : s.stop] for s in plan.sections)
    stitched = split_forward(survey.graph, plan.sections)
    _show_forward(gm, stitched)
    dump.dump_forward(gm, stitched, nodes, plan)
    compiled = compile_sections(stitched, example_inputs, options.inner, plan.graph)
    return _Split(plan, nodes, compiled)


def _plan_forward(survey: _Survey) -> SplitPlan:
    # Backward passes a parameter's first use last.
    plan = survey.draft({index: -use for index, use in survey.facts.first_use.items()})
    outcome = plan_sections(survey.facts, survey.cut_at(plan))
    if isinstance(outcome, Fallback):
        return dataclasses.replace(plan, fallback=outcome)
    return dataclasses.replace(plan, sections=outcome).with_buckets(plan.buckets)


def _split_backward(
    gm: fx.GraphModule, example_inputs: Sequence[Any], survey: _Survey, options: Options
) -> _Split:
    """Compile a graph whole and its backward in sections.

    Raises:
        CutRefusedError: the graph's backward cannot be cut, or was not made.
    """
    if isinstance(options.aot, ForwardInstead):
        raise CutRefusedError(options.aot)
    arguments = survey.arguments
    if survey.facts.first_use.keys() - arguments.keys():
        raise CutRefusedError(ForwardInstead.ATTRIBUTES)
    elsewhere = {parameter.index for parameter in survey.earlier}
    plans: list[SplitPlan] = []
    cuts: list[BackwardCuts] = []
    nodes: state.Nodes = ()  # none unless backward is cut

    def plan_cuts(facts: BackwardFacts) -> BackwardCuts | None:
        final = final_positions(facts, arguments, elsewhere)
        plan = dataclasses.replace(survey.draft(final), split="backward")
        outcome = plan_backward(facts, survey.cut_at(plan), arguments, final)
        if isinstance(outcome, Fallback):
            plans.append(dataclasses.replace(plan, fallback=outcome))
            return None
        plan = dataclasses.replace(plan, sections=outcome.sections, num_nodes=len(outcome.order))
        plans.append(plan.with_buckets(plan.buckets))
        cuts.append(outcome)
        return outcome

    def show(original: fx.GraphModule, sections: Sequence[SectionGraph]) -> None:
        nonlocal nodes
        nodes = tuple(describe(call_nodes(section.graph.graph)) for section in sections)
        _show_backward(original, sections)
        dump.dump_backward(gm, original, cuts[-1], sections, plans[-1])

    compiled = compile_gated(copy_for_splitting(gm), example_inputs, options.aot, plan_cuts, show)
    return _Split(plans[-1], nodes or (describe(call_nodes(survey.graph.graph)),), compiled)


def _refusal(error: Exception) -> tuple[ForwardInstead, str]:
    """Say why a backward was not cut."""
    if isinstance(error, CutRefusedError):
        return error.reason, error.detail
    drifted = isinstance(error, TorchDriftError)
    reason = ForwardInstead.TORCH_DRIFT if drifted else ForwardInstead.FAILED
    return reason, f"{type(error).__name__}: {error}"


def _blank_plan(
    gm: fx.GraphModule, options: Options, fallback: Fallback | None, detail: str = ""
) -> SplitPlan:
    return SplitPlan(
        graph=graph_name(gm),
        inner=options.inner_name,
        num_nodes=len(call_nodes(gm.graph)),
        fallback=fallback,
        detail=detail,
        num_collectives=count_collectives(gm),
    )


def _announce(ddp: DistributedDataParallel | None, plan: SplitPlan, nodes: state.Nodes) -> None:
    if ddp is not None:
        state.of(ddp).keep(plan, nodes)
    is_as_asked = plan.fallback is None or plan.fallback.is_expected
    if is_as_asked and plan.instead is None:
        _logs.info("%s", plan)
    else:
        _logs.warning("%s", plan)


# Graphs go to the ddp_graphs log and the structured trace, each only if it is on.


def _show_forward(original: fx.GraphModule, stitched: fx.GraphModule) -> None:
    _logs.graph("original graph", _code(original))
    for node in stitched.graph.find_nodes(op="call_module"):
        name = str(node.target)
        _show_section(name, stitched.get_submodule(name))
    _logs.graph("stitched graph", _code(stitched))
    _torch.trace_structured("optimize_ddp_split_graph", {}, _code(stitched))


def _show_backward(original: fx.GraphModule, sections: Sequence[SectionGraph]) -> None:
    _logs.graph("original backward graph", _code(original))
    for index, section in enumerate(sections):
        _show_section(f"backward_{index}", section.graph)


def _show_section(name: str, section: torch.nn.Module) -> None:
    _logs.graph(f"{name} graph", _code(section))
    _torch.trace_structured("optimize_ddp_split_child", {"name": name}, _code(section))


def _code(gm: torch.nn.Module) -> Callable[[], str]:
    assert isinstance(gm, fx.GraphModule)
    return lambda: str(gm.print_readable(print_output=False))
