"""From Dynamo's graph to what runs in its place: facts, sections, graphs, proof, compiled code.

    graph = read_graph(gm, example_inputs, ddp, options)        graph.py
    buckets = which_buckets(graph, lateness)                    buckets.py
    cutter = BackwardCutter(graph, ...)                         what AOTAutograd calls back
    call = aot(traced, example_inputs, cutter)
    cutter.result                                               the cut, and the compiled sections

`_compile_graph` takes one graph all the way. A step's own file says how it is done: what a graph is
like (`facts.py`), where it stands among others (`arrival.py`), which sections it gets
(`sections.py`), the sections' graphs (`backward.py`, `forward.py`), that these compute what the
graph does (`proof.py`), and what runs (`gates.py`, `runner.py`). `backend.py` decides which graphs
come here.

What comes of it, where the backward is cut: one compiled forward, and compiled sections of the
backward. AOTAutograd's own autograd node runs section 0. Each other section has a *gate*, an
autograd node that the forward makes, and a *token* links them in a chain, so that one runs after
the other. What sections hand on is their *flow*. When a section returns gradients, autograd
accumulates these first, and DDP's hooks launch the allreduces of the buckets that are complete;
then the next gate runs its section. In the first steps, until DDP has formed its buckets from the
order in which gradients arrive, the runner delays them to give them that order.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._indices import (
    Argument,
    Call,
    FunctionNumber,
    ParameterIndex,
    Place,
    SectionIndex,
    Slot,
    numbered,
)
from ddpopt._text import source_digest
from ddpopt.errors import DisagreementError, NotCutError, Reason
from ddpopt.options import Options
from ddpopt.split import state
from ddpopt.split.arrival import final_places
from ddpopt.split.backward import (
    Flow,
    SectionGraph,
    add_token,
    compile_backward_sections,
    drop_token_gradient,
    kept_values,
    make_section_graphs,
    return_token_itself,
)
from ddpopt.split.buckets import GraphBuckets, which_buckets
from ddpopt.split.cut import Cut, GraphText, MakeText, NodeText, digest_of_order, parts_of_buckets
from ddpopt.split.dump import SectionOutputs, find_crossings, is_showing, show, shown_bytes, write
from ddpopt.split.facts import (
    BackwardFacts,
    ForwardFacts,
    ForwardOutput,
    find_reachable,
    forward_outputs,
    gradient_nodes,
    read_backward,
    read_forward,
    refuse_linked_calls,
)
from ddpopt.split.forward import compile_forward_sections, copy_for_cutting, make_stitched_graph
from ddpopt.split.gates import CompiledSection, GatedGraph, first_section_as_backward, new_token
from ddpopt.split.graph import DynamoGraph, new_cut, read_graph
from ddpopt.split.nodes import (
    attribute_of,
    call_nodes,
    describe,
    has_ragged_sizes,
    name_of,
    output_values,
    uses_streams,
)
from ddpopt.split.phases import Buckets
from ddpopt.split.proof import Releases, prove_backward, prove_forward
from ddpopt.split.releases import ReleaseOrder, mark_functions
from ddpopt.split.runner import CompiledCall, CompiledGraph, GraphRunner, StartOnModule
from ddpopt.split.sections import choose_backward_sections, choose_forward_sections
from ddpopt.steps.sections import Label, report_runs


def compile_under_ddp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel,
    options: Options,
    start: StartOnModule,
) -> CompiledCall:
    """Compile a graph split at the bucket boundaries of a DDP module, or whole for a named reason.

    Dynamo may run the result for further modules; `start` is called with each before its first run,
    to begin what compiling for the module would have begun.

    Raises:
        DisagreementError: this rank cannot cut a graph that may communicate, and others may.
        Exception: what compiling the whole graph raises, or Dynamo, to trace a frame again.
    """
    graph: DynamoGraph | None = None
    try:
        # Each step calls this. If torch has moved a name that it needs, it raises now.
        _torch.will_rebuild_buckets(ddp)
        graph = read_graph(gm, example_inputs, ddp, options)
        result = _compile_graph(graph, example_inputs)
    except _torch.control_flow_exceptions():
        raise  # Dynamo traces the frame again
    except Exception as error:
        # A graph that nobody has thought of, or a release of torch, may raise anything here. Only
        # overlap is lost: the reason is logged, and the graph compiled whole.
        refusal = NotCutError.because_of(error)
        # If reading the graph has raised, nobody knows whether it may communicate.
        if graph is not None and not graph.may_fall_back_for(refusal.reason):
            raise _disagreement(_torch.graph_name(gm), refusal) from error
        return compile_whole(gm, example_inputs, ddp, options, refusal, start)
    call = result.call
    if call is None:
        # It stays whole. What compiling it raises is for the user.
        call = options.inner(gm, list(example_inputs))
        call = _report_as_one_section(call, result.cut.graph)
    compiled = CompiledGraph(
        cut=result.cut, text=result.text, call=call, argument_of=graph.argument_of
    )
    # The buckets that it was cut for, and the parameters whose gradients have to arrive last.
    cut_for, arrives_last = graph.ddp_state.cut_for, graph.ddp_state.rules.arrives_last
    return _make_runner(compiled, ddp, options, start, cut_for, arrives_last)


def _disagreement(graph: str, refusal: NotCutError) -> DisagreementError:
    """The error of a rank that cannot cut a graph which others may cut, see [Note: collectives].

    `graph` is the graph's name.
    """
    return DisagreementError(
        f"graph {graph} has collectives of its own, or calls that may be some (operators of other "
        f"libraries do not say), and this rank cannot cut it: {refusal.reason.name}, "
        f"{refusal.detail}; where other ranks cut it, they issue its collectives and DDP's "
        "allreduces in another order, and would wait for this one: remove the cause, or compile "
        "on all ranks without cuts, options={'enabled': False}"
    )


def compile_whole(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel | None,
    options: Options,
    refusal: NotCutError,
    start: StartOnModule = lambda _: None,
) -> CompiledCall:
    """Compile a graph whole, for the reason of `refusal`.

    `start` is called as in `compile_under_ddp`. `ddp` is None where no DDP module is active: then
    nothing is kept of the graph but what is dumped.
    """
    cut = dataclasses.replace(new_cut(gm, options), fallback=refusal.reason, detail=refusal.detail)
    text: MakeText = GraphText  # which makes an empty one
    if ddp is not None:
        text = _text_of_whole(gm)
    write(gm, cut, text, {"original": gm})
    call = options.inner(gm, list(example_inputs))
    is_drift = refusal.reason is Reason.TORCH_DRIFT
    if is_drift:
        # Nobody will know for which modules this graph runs. So from now on no module is said to be
        # one of which nothing was compiled.
        state.note_drift()
    if ddp is None or is_drift:
        # There is no module to run it for; or a runner would need the private names that torch has
        # moved, so nobody is told when the graph runs.
        if ddp is not None:
            state.get(ddp).keep(cut, text)
        _log(options, cut, ddp)
        return call
    reporting = _report_as_one_section(call, cut.graph)
    # Which parameters the graph uses may be just what could not be read. Without their arguments
    # the runner leaves gradients in the order in which autograd has them.
    compiled = CompiledGraph(cut=cut, text=text, call=reporting, argument_of={})
    return _make_runner(compiled, ddp, options, start, state.ANY_BUCKETS)


def _make_runner(
    compiled: CompiledGraph,
    ddp: DistributedDataParallel,
    options: Options,
    start: StartOnModule,
    cut_for: state.CutFor,
    arrives_last: Sequence[ParameterIndex] = (),
) -> GraphRunner:
    """Make the runner of a compiled graph, register it with the module, and log the cut.

    The runner serves each DDP module that runs the graph's code: for those after `ddp` it calls
    `start` and `_log`. `cut_for` says for which buckets the graph was cut, and `arrives_last` which
    gradients have to arrive last in every step, see `GraphRunner`.
    """
    runner = GraphRunner(
        compiled,
        arrives_last=arrives_last,
        cut_for=cut_for,
        is_for_copy=state.is_copy(ddp),
        start=start,
        log=functools.partial(_log, options),
    )
    runner.keep_for(ddp, compiled.cut, list(compiled.argument_of))
    _log(options, compiled.cut, ddp)
    return runner


def _report_as_one_section(call: CompiledCall, graph: str) -> CompiledCall:
    """Show runs of a graph that is compiled whole to `ddpopt.record` and torch's profiler."""
    return report_runs(call, Label(graph, 0))


def _log(options: Options, cut: Cut, ddp: DistributedDataParallel | None) -> None:
    """Log a cut on rank 0; as a warning, on each rank, if overlap is lost that should not be.

    Where no DDP module is active there are no ranks: each process logs it.
    """
    is_expected = cut.fallback is None or cut.fallback.is_expected
    if cut.backward_fallback is not None:
        # Who asked for backward alone is told; "auto" promises no more than it gives.
        is_expected &= options.split == "auto" and cut.backward_fallback.is_expected
    if is_expected:
        _logs.info_of_rank(0 if ddp is None else ddp.process_group.rank(), "%s", cut)
    else:
        _logs.warning("%s", cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredCut:
    """What it takes to run compiled backward sections, in this process or in another.

    It is stored with them in torch's cache.
    """

    cut: Cut
    # For each section, which of the distinct compiled callables it is, and what goes in and out. A
    # backward that stays whole has none.
    sections: Sequence[tuple[int, Flow]]
    # The bytes of each value that a section keeps, in the order of `flow.keeps`. They are stored
    # for people alone: neither a flow nor compiled code tells a size.
    kept_bytes: Sequence[Sequence[int]]
    # The argument to which each gradient that AOTAutograd expects belongs; None for what is none.
    argument_of_output: Sequence[Argument | None]


class _Result(NamedTuple):
    """What became of a graph; `call` is None if it stays whole, and is yet to be compiled."""

    cut: Cut
    text: MakeText
    call: CompiledCall | None


def _compile_graph(graph: DynamoGraph, example_inputs: Sequence[Any]) -> _Result:
    """Compile a graph, its backward cut or else its forward; or leave it whole.

    Raises:
        NotCutError: a section could not be compiled, or not be proven. The other way to cut is not
            tried then: something is wrong that is to be reported.
    """
    # No backward is traced yet to tell which gradients are final late: those of parameters that are
    # used early, since backward reaches a parameter's first use last. (`compile_backward` asks for
    # buckets once more, when one is traced.)
    buckets = which_buckets(graph, {index: -use for index, use in graph.first_use.items()})
    cut = _cut_without_sections(graph, buckets)
    # Tracing a backward is worth it if the graph has parts of two buckets. A graph that may
    # communicate and releases a gradient is cut whatever the buckets are, see [Note: collectives].
    has_parts = len(parts_of_buckets(buckets.to_cut_at, graph.first_use)) > 1
    has_an_order = graph.communicates and bool(graph.first_use)
    if (has_parts or has_an_order) and graph.options.split != "forward":
        try:
            return _cut_backward(graph, example_inputs)
        except _torch.control_flow_exceptions():
            raise
        except Exception as error:
            # Any error costs the cut of backward, as in `compile_under_ddp`; forward may be cut
            # instead, also where `split` is "backward", but not for an error that is to be
            # reported, such as a missing proof.
            refusal = NotCutError.because_of(error, in_backward=True)
            if not refusal.reason.is_of_backward or not graph.may_fall_back_for(refusal.reason):
                raise
            cut = dataclasses.replace(cut, backward_fallback=refusal.reason, detail=refusal.detail)
    return _cut_forward(graph, cut, buckets, example_inputs)


def _cut_without_sections(graph: DynamoGraph, buckets: GraphBuckets) -> Cut:
    """A cut without sections: the Reducer's buckets, and the order in which gradients arrive."""
    return dataclasses.replace(graph.empty_cut, buckets=buckets.in_force, arrival=buckets.arrival)


def _left_whole(graph: DynamoGraph, cut: Cut, reason: Reason) -> Cut:
    """The cut of a graph which is compiled whole, since no boundary helps or none is possible."""
    if reason is Reason.ONE_BUCKET and graph.ddp_state.has_planned_buckets:
        reason = Reason.ONE_PLANNED_BUCKET
    if reason is Reason.NO_PARAMETERS:
        cut = cut.with_buckets(())  # it says nothing of buckets that it has no part in
    return dataclasses.replace(cut, fallback=reason)


# ---- Backward --------------------------------------------------------------------------------


def _cut_backward(graph: DynamoGraph, example_inputs: Sequence[Any]) -> _Result:
    """Compile the forward whole, and the backward in sections.

    Raises:
        NotCutError: this graph's backward cannot be cut, or the inner compiler raised on a section.
    """
    aot = graph.options.aot  # runs AOTAutograd, which has a cutter compile the backward
    if aot is None:
        cuda_graphs = graph.options.has_cuda_graphs
        raise NotCutError(Reason.CUDA_GRAPHS if cuda_graphs else Reason.INNER)
    if graph.first_use.keys() - graph.argument_of.keys():
        # A gate takes parameters as the graph's arguments; some are attributes of the graph.
        raise NotCutError(Reason.ATTRIBUTES)
    if _torch.wants_cuda_graphs(graph.gm):  # by an annotation of the program's
        raise NotCutError(Reason.CUDA_GRAPHS)
    if uses_streams(graph.gm.graph):
        # Asked of Dynamo's graph: the traced backward does not show on which stream a call runs.
        raise NotCutError(Reason.STREAMS)
    # A parameter of any class is plain, and so may be a subclass, which AOTAutograd takes apart.
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    are_plain = all(_torch.is_plain(t) and not _torch.is_subclass(t) for t in tensors)
    # The token is one more input and output, by which autograd will call the sections after the
    # first (gates.py). It is added to a copy of its own: if this fails, forward may be cut, which
    # is made of `graph.copy`.
    traced = copy_for_cutting(graph.gm)
    if not are_plain or has_ragged_sizes(traced.graph):  # torch compiles such a graph only once
        raise NotCutError(Reason.SUBCLASSES)
    # The token's device, which that of all gradients has to be. There is a tensor that requires
    # grad: this is called for graphs that use a trained parameter, and it comes in as an argument.
    device = next(tensor.device for tensor in tensors if tensor.requires_grad)
    differentiated = [
        argument
        for argument, value in numbered(Argument, example_inputs)
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    function_arguments = mark_functions(traced)
    add_token(traced, differentiated)  # as the last argument: those before keep their numbers
    cutter = BackwardCutter(graph, device, ReleaseOrder(differentiated), function_arguments)
    with cutter.release_order.noting():  # by operators that `add_token` has added
        call = aot(traced, [*example_inputs, new_token(device)], cutter)
    stored, further_sections = cutter.result
    # A cut from torch's cache has the name that its graph had in another compile.
    cut = dataclasses.replace(stored.cut, graph=graph.name)
    # Where the backward stays whole there is no gate, but the forward takes a token all the same.
    gated = GatedGraph(call, further_sections, device)
    if cut.fallback is None:
        return _Result(cut, cutter.text, gated)
    text = _text_of_whole(graph.copy)  # as `_cut_forward` shows a graph that stays whole
    write(graph.gm, cut, text, {"original": graph.gm})
    return _Result(cut, text, _report_as_one_section(gated, graph.name))


class _CutBackward(NamedTuple):
    """What `BackwardCutter` makes for `_cut_backward`, besides what it gives to AOTAutograd."""

    stored: _StoredCut
    # All sections but the first: that one runs in AOTAutograd's own node.
    further_sections: Sequence[CompiledSection]


class BackwardCutter:
    """What AOTAutograd calls while it compiles one graph; it is used for nothing else.

    In this order: `edit_forward`, `compile_backward`, `make_backward`. If AOTAutograd finds the
    result of an earlier compile in its cache, it calls `make_backward` alone.
    """

    def __init__(
        self,
        graph: DynamoGraph,
        device: torch.device,
        release_order: ReleaseOrder,
        function_arguments: Mapping[FunctionNumber, frozenset[Argument]],
    ) -> None:
        """Make a cutter.

        Args:
            graph: the graph whose backward is cut.
            device: where the token and the gradients are.
            release_order: when AOTAutograd's trace of the backward releases each gradient.
            function_arguments: for each call of an `autograd.Function`, the graph's arguments that
                go straight into it, as `mark_functions` found them; for the proof.
        """
        self.release_order = release_order
        self._graph = graph
        self._device = device
        self._function_arguments = function_arguments
        self._token_argument = Argument(graph.num_inputs)
        # `edit_forward` leaves this for `compile_backward`.
        self._forward_outputs: Sequence[ForwardOutput] = ()
        # The calls of each section as text; none if `make_backward` alone is called.
        self._calls: Sequence[_SectionCalls] = ()
        self._result: _CutBackward | None = None

    @property
    def result(self) -> _CutBackward:
        """What came of the backward, once AOTAutograd has called `make_backward`."""
        assert self._result is not None, "AOTAutograd returned a forward without its backward"
        return self._result

    @property
    def text(self) -> MakeText:
        """What people are shown of the sections, made of plain data when they ask."""
        stored = self.result.stored
        flows = [flow for _, flow in stored.sections]
        return functools.partial(_text_of_backward, flows, stored.kept_bytes, self._calls)

    @functools.cached_property  # it is asked for more than once
    def cache_key(self) -> str | None:
        """A text of all that the cut of a backward depends on besides the graph, for torch's cache.

        Equal in any process. None, for no cache, while graphs are shown: with a result from a cache
        comes no graph to show.
        """
        if is_showing():
            return None
        graph, ddp_state = self._graph, self._graph.ddp_state
        depends_on = {
            # Its size and inner compiler, for example. Another process may give it another name.
            "what is compiled": dataclasses.replace(graph.empty_cut, graph=""),
            "parameters": graph.reduced,
            "argument of each parameter": graph.argument_of,
            "arguments that are parameters": sorted(graph.is_trained.items()),
            # The order in which gradients arrive depends on the graphs before and after this one.
            "neighbours": (graph.arrives_before, graph.arrives_after, graph.others, graph.of_root),
            "how the Reducer forms buckets": ddp_state.rules,
            "buckets now": _as_tuples(ddp_state.buckets),
            # Cuts are finer while better buckets are searched for.
            "which buckets it is cut for": ddp_state.goal.name,
            "buckets to come": _as_tuples(ddp_state.expected_buckets),
        }
        digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()
        return f"ddpopt {source_digest()} {digest}"

    def edit_forward(self, forward: fx.GraphModule) -> None:
        """Note what the forward returns, and spare it the token's copy.

        AOTAutograd calls this with the forward that it traced, before it compiles that.
        """
        self._forward_outputs = forward_outputs(forward)
        return_token_itself(forward)

    def compile_backward(
        self, backward: fx.GraphModule, inputs: list[Any], compile_section: _torch.CompileSection
    ) -> tuple[Sequence[Any], _StoredCut]:
        """Cut a backward, show that the sections are right, and compile them.

        AOTAutograd calls this with the backward that it traced, and its fake `inputs`. Returns the
        distinct compiled sections, and what it takes to run them; of a backward in which no
        boundary helps, itself compiled, and a cut that says why.

        Raises:
            NotCutError: the backward cannot be cut, the sections cannot be shown to be right, or
                `compile_section` raised on one.
        """
        graph = self._graph
        _torch.check_backward(backward)  # for torch's marks, which are read from here on
        refuse_linked_calls(backward)  # by streams or effects, which sections would break
        argument_of_output = drop_token_gradient(backward, self._token_argument)
        # The compiled forward may give what it saves other strides than were traced.
        _torch.restride(backward, inputs)
        devices = {_torch.aten_value(node).device for node in gradient_nodes(backward).values()}
        if devices - {self._device}:
            raise NotCutError(Reason.DEVICES, f"they are on {sorted(map(str, devices))}")

        reachable = find_reachable(self._forward_outputs, backward)
        # Parameters to which nobody writes before this backward releases their gradients. A
        # parameter that only another graph trains is left out: its gradient may arrive while
        # sections of this backward are yet to run, and a hook may then update the parameter
        # (splits.md, fault 9).
        made_here = gradient_nodes(backward).keys()
        unwritten = {
            argument
            for argument, is_trained in graph.is_trained.items()
            if argument in made_here or not is_trained
        }
        # When autograd releases each gradient: how many others it releases before.
        num_released_before = {
            argument: self.release_order.num_released_before(argument) for argument in made_here
        }
        facts = read_backward(backward, reachable, unwritten, num_released_before)
        # Unless this graph communicates, and so is cut as on other ranks, without parameters that
        # an earlier graph uses too: their gradients are final in that one's later backward.
        final = final_places(facts, graph.argument_of, graph.final_elsewhere)
        buckets = which_buckets(graph, final)
        order = _order_of_backward(graph, backward, facts)
        cut = _cut_without_sections(graph, buckets)
        cut = dataclasses.replace(cut, split="backward", order=order)
        try:
            chosen = choose_backward_sections(facts, buckets.to_cut_at, graph.argument_of, final)
        except NotCutError as refusal:
            # Whether the graph may stay whole is asked where a forward is cut. Here it need not be:
            # each of these reasons holds on all ranks or on none.
            stored = _StoredCut(
                cut=_left_whole(graph, cut, refusal.reason),
                sections=(),
                kept_bytes=(),
                argument_of_output=argument_of_output,
            )
            origins = list(range(len(inputs)))  # each input is the whole graph's of that number
            return [compile_section(backward, inputs, origins)], stored

        cut = dataclasses.replace(cut, sections=chosen.sections, num_nodes=len(chosen.order))
        cut = cut.with_buckets(cut.buckets)  # which says what each section completes
        sections = make_section_graphs(backward, chosen, reachable)
        prove_backward(
            backward,
            cut,
            sections,
            reachable,
            graph.argument_of,
            unwritten=unwritten,
            releases=Releases(
                num_released_before=num_released_before,
                function_arguments=self._function_arguments,
            ),
        )
        flows = [section.flow for section in sections]
        kept_bytes = [list(map(shown_bytes, kept_values(section))) for section in sections]
        # Read now, not when somebody asks: until then the nodes would keep their graphs alive, with
        # fake tensors and functions of the user's. It takes a thousandth of a compile.
        self._calls = list(map(_read_section_calls, sections))
        text = functools.partial(_text_of_backward, flows, kept_bytes, self._calls)
        wholes = {"original": graph.gm, "original_backward": backward}
        pieces = {f"backward_section_{k}": s.graph for k, s in enumerate(sections)}
        show(graph.gm, cut, text, wholes, pieces)

        placeholders = backward.graph.find_nodes(op="placeholder")
        saved = {slot for slot, node in numbered(Slot, placeholders) if not _torch.is_tangent(node)}
        compiled, numbers = compile_backward_sections(
            sections, inputs, saved, compile_section, graph.name
        )
        stored = _StoredCut(
            cut=cut,
            sections=list(zip(numbers, flows, strict=True)),
            kept_bytes=kept_bytes,
            argument_of_output=argument_of_output,
        )
        return compiled, stored

    def make_backward(
        self, compiled: Sequence[Any], stored: _StoredCut
    ) -> Callable[[list[Any]], Any]:
        """What AOTAutograd is to run as its backward: the first section, or the whole backward.

        AOTAutograd calls this with what `compile_backward` returned, here or in another process.
        """
        if not stored.sections:  # the backward stays whole
            (whole,) = compiled
            self._result = _CutBackward(stored, ())
            return whole  # type: ignore[no-any-return]  # a compiled graph, which has no type
        sections = [
            CompiledSection(
                call=compiled[number],
                flow=flow,
                label=Label(self._graph.name, section),
                # AOTAutograd's own node does this for the first section.
                without_autocast=self._graph.was_autocast_on and section > 0,
            )
            for section, (number, flow) in numbered(SectionIndex, stored.sections)
        ]
        first_section, *further_sections = sections
        self._result = _CutBackward(stored, further_sections)
        flows = [flow for _, flow in stored.sections]
        return first_section_as_backward(
            first_section,
            stored.argument_of_output,
            self._token_argument,
            num_kept=sum(len(flow.keeps) for flow in flows),
            watched={slot for flow in flows for slot in flow.watches},
            device=self._device,
        )


def _order_of_backward(graph: DynamoGraph, backward: fx.GraphModule, facts: BackwardFacts) -> str:
    """The digest of the order in which a backward communicates and releases gradients.

    Empty for one that does not communicate.
    """
    if not any(facts.communicates):
        return ""
    collectives = {
        call: name_of(node)
        for call, node in numbered(Call, call_nodes(backward.graph))
        if facts.communicates[call]
    }
    releases: dict[str, Place] = {}
    for parameter in graph.reduced:
        argument = graph.argument_of.get(parameter.index)
        if argument is not None and argument in facts.release_places:  # its gradient is made here
            releases[parameter.name] = facts.release_places[argument]
    return digest_of_order(collectives, releases)


# ---- Forward ---------------------------------------------------------------------------------


def _cut_forward(
    graph: DynamoGraph, cut: Cut, buckets: GraphBuckets, example_inputs: Sequence[Any]
) -> _Result:
    """Compile the graph in sections; or, if no boundary helps or is possible, say why it is whole.

    `cut` is the record of the graph without sections, and says why the backward is not cut, if that
    was tried. A graph that has parameters of one bucket, or none, comes here to be told that as the
    reason: nobody has traced its backward.

    Raises:
        NotCutError: the sections are not right, one could not be compiled, or the graph may not
            stay whole for what forbids a boundary.
    """
    calls = describe(call_nodes(graph.copy.graph))
    facts = read_forward(graph.copy, graph.indices_of, graph.final_elsewhere)
    try:
        sections = choose_forward_sections(facts, buckets.to_cut_at)
    except NotCutError as refusal:
        if not graph.may_fall_back_for(refusal.reason):
            raise
        cut = _left_whole(graph, cut, refusal.reason)
        text = functools.partial(GraphText, nodes=(calls,))
        write(graph.gm, cut, text, {"original": graph.gm})
        return _Result(cut, text, None)  # the caller of `_compile_graph` compiles it

    cut = dataclasses.replace(cut, sections=sections, order=_order_of_forward(graph, facts))
    cut = cut.with_buckets(cut.buckets)  # which says what each section completes
    stitched = make_stitched_graph(graph.copy, sections)
    prove_forward(graph.gm, cut, stitched, graph.argument_of)
    calls_of_sections = tuple(calls[section.start : section.stop] for section in sections)
    text = functools.partial(_text_of_forward, calls_of_sections, *_values_of_forward(stitched))
    section_calls = stitched.graph.find_nodes(op="call_module")
    pieces = {f"section_{k}": attribute_of(stitched, call) for k, call in enumerate(section_calls)}
    show(graph.gm, cut, text, {"original": graph.gm}, pieces, stitched)
    # Inductor could order a section's complex values otherwise than the graph's: not this one.
    inner = _torch.for_sections(graph.options.inner)
    call = compile_forward_sections(stitched, example_inputs, inner, graph.name)
    return _Result(cut, text, call)


def _order_of_forward(graph: DynamoGraph, facts: ForwardFacts) -> str:
    """The digest of the order in which a forward communicates and uses parameters first.

    `warmup` and `verify` compare it between ranks (`Cut.order`), since ranks that differ wait for
    each other. A parameter's first use stands for the release of its gradient, to which it leads in
    backward. Empty for a graph that does not communicate.
    """
    if not graph.communicates:
        return ""
    collectives = {
        call: name_of(node)
        for call, node in numbered(Call, call_nodes(graph.copy.graph))
        if facts.communicates[call]
    }
    name_by_index = {parameter.index: parameter.name for parameter in graph.reduced}
    uses = {name_by_index[index]: Place(use) for index, use in facts.first_use.items()}
    return digest_of_order(collectives, uses)


def _as_tuples(buckets: Buckets | None) -> tuple[tuple[ParameterIndex, ...], ...] | None:
    """Buckets in a form whose text is equal for equal ones."""
    return None if buckets is None else tuple(tuple(bucket) for bucket in buckets)


# ---- What people are shown -------------------------------------------------------------------

# The calls of a graph, or of one section.
_Calls = tuple[NodeText, ...]


class _SectionCalls(NamedTuple):
    """The calls of a backward section, read while its graph is there."""

    calls: _Calls
    # Those that make what the section keeps, in the order of `flow.keeps`.
    kept: _Calls


def _text_of_whole(gm: fx.GraphModule) -> MakeText:
    return functools.partial(GraphText, nodes=(describe(call_nodes(gm.graph)),))


def _read_section_calls(section: SectionGraph) -> _SectionCalls:
    calls = describe(call_nodes(section.graph.graph))
    return _SectionCalls(calls=calls, kept=describe(kept_values(section)))


def _text_of_backward(
    flows: Sequence[Flow],
    kept_bytes: Sequence[Sequence[int]],
    sections: Sequence[_SectionCalls],
) -> GraphText:
    """The calls of a cut backward, and what goes from one section to another, for people.

    `sections` is empty if the code came from torch's cache.
    """
    # One dictionary for each section: by its place `find_crossings` tells which section made a
    # value. Its keys are slots, by which later sections take values.
    outputs_of_sections: list[SectionOutputs] = []
    for index, flow in enumerate(flows):
        kept = [NodeText(f"slot {slot}", target="", shape="", source="") for slot in flow.keeps]
        if sections:
            kept = list(sections[index].kept)
        texts_and_bytes = zip(kept, kept_bytes[index], strict=True)
        outputs_of_sections.append(dict(zip(flow.keeps, texts_and_bytes, strict=True)))
    return GraphText(
        nodes=tuple(section.calls for section in sections),
        crossings=find_crossings(outputs_of_sections, [flow.takes for flow in flows]),
    )


def _values_of_forward(
    stitched: fx.GraphModule,
) -> tuple[list[SectionOutputs], list[list[str]]]:
    """Each section's outputs and inputs, for `find_crossings`: by names of values in `stitched`."""
    calls = list(stitched.graph.find_nodes(op="call_module"))  # one for each section
    outputs_of_sections: list[SectionOutputs] = []
    for call in calls:
        returned = output_values(attribute_of(stitched, call))
        outputs: dict[str, tuple[NodeText, int]] = {}
        # A section returns a tuple. Its users are the nodes that take an element each.
        for element in call.users:
            value = returned[element.args[1]]
            (text,) = describe([value])
            outputs[element.name] = text, shown_bytes(value)
        outputs_of_sections.append(outputs)
    return outputs_of_sections, [[node.name for node in call.all_input_nodes] for call in calls]


def _text_of_forward(
    calls: Sequence[_Calls],
    outputs_of_sections: Sequence[SectionOutputs],
    inputs_of_sections: Sequence[Sequence[str]],
) -> GraphText:
    crossings = find_crossings(outputs_of_sections, inputs_of_sections)
    return GraphText(nodes=tuple(calls), crossings=crossings)
