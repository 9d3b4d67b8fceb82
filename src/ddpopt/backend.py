"""The Dynamo backend `ddpopt`: from a whole graph to a callable that releases bucket after bucket.

It holds no algorithm. In order: is splitting on, which DDP module is active, what will its
Reducer do (`buckets.py`), where to cut (`planning`), cut (`splitting`), compile (`sections.py`).
Importing this module, which Dynamo does when it looks the backend up, registers the take-over of
graphs from the in-tree DDPOptimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, logs, records
from ddpopt.buckets import ReducerRules, known_buckets, predict_buckets
from ddpopt.errors import (
    Fallback,
    SectionCompileError,
    TorchDriftError,
    UnsupportedModeError,
)
from ddpopt.options import Options, resolve_options
from ddpopt.plan import Plan
from ddpopt.planning.planner import order_arrival, plan_sections
from ddpopt.runner import GraphRunner, order_first_arrival, warn_if_nothing_compiled
from ddpopt.sections import compile_sections
from ddpopt.splitting.analysis import read_facts
from ddpopt.splitting.forward import copy_for_splitting, split_forward
from ddpopt.splitting.nodes import call_nodes
from ddpopt.splitting.parameters import find_parameters, frame_module, has_twin


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph, split at the bucket boundaries of the active DDP module.

    Called by Dynamo; users write `torch.compile(ddp_model, backend="ddpopt")`.

    Raises:
        OptionError: an option is unknown or has a bad value.
        UnsupportedModeError: a mode that bypasses DDP's Reducer is on.
        SectionCompileError: the inner compiler raised on a section.
    """
    resolved = resolve_options(mode, options)
    ddp, detail = None, ""
    try:
        ddp = _torch.active_ddp()
        _refuse_unsupported_modes(ddp)
        reason = _reason_not_to_split(ddp, resolved)
        if reason in (None, Fallback.NO_DDP):
            _guard_on_rules(records.rules_of(ddp))
    except TorchDriftError as error:
        reason, detail = Fallback.TORCH_DRIFT, str(error)
    if ddp is not None and reason is None:
        return _compile_under_ddp(gm, example_inputs, ddp, resolved)
    plan = _blank_plan(gm, resolved, reason, detail)
    return _compile_whole(gm, example_inputs, ddp, resolved, plan)


def _refuse_unsupported_modes(ddp: DistributedDataParallel | None) -> None:
    mode = _torch.optimize_ddp_mode()
    if mode.startswith("python_reducer"):
        raise UnsupportedModeError(
            f"torch._dynamo.config.optimize_ddp is {mode!r}, with which DDP bypasses its C++ "
            "Reducer and has no buckets to cut at; set it to True before the DDP module is made, "
            "or use backend='inductor'"
        )
    if ddp is not None and _torch.is_compiled_autograd_on():
        raise UnsupportedModeError(
            "compiled autograd is on, which runs all of backward as one graph, so that nothing "
            "can overlap; set torch._dynamo.config.compiled_autograd = False, or use "
            "backend='inductor'"
        )


def _reason_not_to_split(ddp: DistributedDataParallel | None, options: Options) -> Fallback | None:
    if _torch.optimize_ddp_mode() == "no_optimization":
        return Fallback.DYNAMO_DISABLED
    if not options.enabled:
        return Fallback.DISABLED
    if not torch.is_grad_enabled():
        return Fallback.NO_GRAD
    return Fallback.NO_DDP if ddp is None else None


def _guard_on_rules(rules: ReducerRules | None) -> None:
    """Keep the graph for DDP modules with equal rules (None: for runs without DDP).

    Dynamo has no guard on DDP being active, and shares code between models of one class.
    """
    _torch.guard_on(lambda: records.rules_of(_torch.active_ddp()) == rules, "DDP's bucket rules")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A graph that may be split: a copy of its own, its plan, and the arguments to order.

    `slots` are the positions of the parameters among the graph's arguments, in arrival order.
    """

    graph: fx.GraphModule
    plan: Plan
    slots: tuple[int, ...]


def _compile_under_ddp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel,
    options: Options,
) -> Callable[..., Any]:
    passing: tuple[type[BaseException], ...] = (
        SectionCompileError,
        *_torch.control_flow_exceptions(),
    )
    try:
        _torch.will_rebuild_buckets(ddp)  # needed at each step; find out now if it has moved
        draft = _make_plan(gm, example_inputs, ddp, options)
        compiled = None
        if draft.plan.fallback is None:
            stitched = split_forward(draft.graph, draft.plan.sections)
            _show_graphs(gm, stitched)
            compiled = compile_sections(stitched, example_inputs, options.inner)
    except passing:
        raise
    except Exception as error:
        reason = (
            Fallback.TORCH_DRIFT if isinstance(error, TorchDriftError) else Fallback.SPLIT_FAILED
        )
        plan = _blank_plan(gm, options, reason, detail=f"{type(error).__name__}: {error}")
        return _compile_whole(gm, example_inputs, ddp, options, plan)
    if compiled is None:
        compiled = options.inner(gm, list(example_inputs))
    _announce(ddp, draft.plan)
    return GraphRunner(draft.plan, compiled, order_first_arrival(compiled, draft.slots))


def _make_plan(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel,
    options: Options,
) -> _Draft:
    reduced = _torch.reducer_parameters(ddp)
    graph = copy_for_splitting(gm)
    owners, slots = find_parameters(graph, example_inputs, reduced)
    rules = records.rules_of(ddp)
    assert rules is not None
    later, earlier = records.arrival_around(ddp, _name_of(gm))
    facts = read_facts(graph, owners, elsewhere={parameter.index for parameter in earlier})
    names = {parameter.index: parameter.name for parameter in reduced.values()}
    frame = frame_module({node: names[index] for node, (index, *_) in owners.items()})
    is_shared = has_twin(ddp.module, frame)
    is_last = _torch.is_whole_forward(frame) and not _torch.ends_in_graph_break(gm)
    arrival = order_arrival(list(reduced.values()), facts.first_use, later, earlier, is_last)
    own = tuple(parameter for parameter in arrival if parameter.index in facts.first_use)
    actual = records.of(ddp).actual_buckets
    if actual is not None and not is_shared:
        buckets = known_buckets(arrival, actual, rules)
    else:
        buckets = predict_buckets(own if is_shared else arrival, rules)
    outcome = plan_sections(facts, buckets)
    fallback = outcome if isinstance(outcome, Fallback) else None
    plan = dataclasses.replace(
        _blank_plan(gm, options, fallback),
        sections=() if isinstance(outcome, Fallback) else outcome,
        buckets=buckets,
        arrival=own,
        is_shared=is_shared,
    )
    ordered = [slots[p.index] for p in plan.arrival if p.index in slots]
    return _Draft(graph=graph, plan=plan, slots=tuple(ordered))


def _name_of(gm: fx.GraphModule) -> str:
    return str(gm.meta.get("dynamo_compile_id", "?"))


def _blank_plan(
    gm: fx.GraphModule, options: Options, fallback: Fallback | None, detail: str = ""
) -> Plan:
    return Plan(
        graph=_name_of(gm),
        inner=options.inner_name,
        num_nodes=len(call_nodes(gm.graph)),
        fallback=fallback,
        detail=detail,
    )


def _compile_whole(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel | None,
    options: Options,
    plan: Plan,
) -> Callable[..., Any]:
    compiled = options.inner(gm, list(example_inputs))
    _announce(ddp, plan)
    has_drifted = plan.fallback is Fallback.TORCH_DRIFT  # the runner needs the names that moved
    return compiled if ddp is None or has_drifted else GraphRunner(plan, compiled)


def _announce(ddp: DistributedDataParallel | None, plan: Plan) -> None:
    if ddp is not None:
        records.keep(ddp, plan)
    if plan.fallback is None or plan.fallback.is_expected:
        logs.info("%s", plan)
    else:
        logs.warning("%s", plan)


def _show_graphs(original: fx.GraphModule, stitched: fx.GraphModule) -> None:
    """Write all graphs to the ddp_graphs log and the structured trace, each only if it is on."""

    def code(gm: torch.nn.Module) -> Callable[[], str]:
        assert isinstance(gm, fx.GraphModule)
        return lambda: str(gm.print_readable(print_output=False))

    logs.graph("original graph", code(original))
    for node in stitched.graph.find_nodes(op="call_module"):
        name = str(node.target)
        section_code = code(stitched.get_submodule(name))
        logs.graph(f"{name} graph", section_code)
        _torch.trace_structured("optimize_ddp_split_child", {"name": name}, section_code)
    logs.graph("stitched graph", code(stitched))
    _torch.trace_structured("optimize_ddp_split_graph", {}, code(stitched))


# ---- registration -----------------------------------------------------------------------------


def install() -> None:
    """Take graphs under DDP over from the in-tree optimizer, for this backend alone. Idempotent."""
    try:
        _torch.take_over(lambda candidate: candidate is backend)
    except TorchDriftError as error:
        logs.warning(
            "ddpopt gets graphs that the in-tree DDPOptimizer has split already, and compiles "
            "each whole: %s",
            error,
        )
    try:
        _torch.watch_ddp_forward(_after_ddp_forward)
    except TorchDriftError as error:
        logs.warning("ddpopt cannot tell when Dynamo compiles nothing of a model: %s", error)


def uninstall() -> None:
    """Undo `install`: the in-tree optimizer splits for every backend again."""
    _torch.give_back()
    _torch.unwatch_ddp_forward()


def _after_ddp_forward(ddp: DistributedDataParallel, ran_under: object) -> None:
    if ran_under is backend:
        warn_if_nothing_compiled(ddp)


backend.reset = records.clear  # type: ignore[attr-defined]  # called by torch._dynamo.reset()
install()
