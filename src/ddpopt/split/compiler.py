"""From Dynamo's graph to what runs in its place: facts, sections, graphs, proof, compiled code.

`GraphCompiler` takes one graph all the way; read `compile` first. A step's own file says how it is
done: what a graph is like (`facts.py`), where it stands among others (`arrival.py`), which sections
it gets (`sections.py`), the sections' graphs (`backward.py`, `forward.py`), that these compute
what the graph does (`proof.py`), and what runs (`gates.py`, `runner.py`).

`backend.py` decides which graphs come here. An *argument* is an input of Dynamo's graph, by its
position.

What comes of it, where the backward is cut: one compiled forward, and compiled sections of the
backward. AOTAutograd's own autograd node runs section 0. Each other section has a *gate*, an
autograd node that the forward makes, and a *token* links them in a chain, so that one runs after
the other. What sections hand on is their *flow*. When a section returns gradients, autograd
accumulates these first, and DDP's hooks launch the allreduces of the buckets that are complete;
then the next gate runs its section. In the first steps, until DDP has formed its buckets from the
order in which gradients arrive, the runner delays them to give them that order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._indices import Argument, Call, ParameterIndex, Place, SectionIndex, Slot, numbered
from ddpopt._text import source_digest
from ddpopt.errors import DisagreementError, NotCutError, Reason, TorchDriftError
from ddpopt.options import Options
from ddpopt.reducer import (
    Bucket,
    in_launch_order,
    known_buckets,
    predict_buckets,
)
from ddpopt.split import state
from ddpopt.split.arrival import (
    Others,
    final_places,
    frame_module,
    may_share_code,
    order_arrival,
)
from ddpopt.split.backward import (
    Flow,
    SectionGraph,
    add_token,
    compile_backward_sections,
    drop_token_gradient,
    make_section_graphs,
    return_token_itself,
)
from ddpopt.split.cut import Cut, GraphText, digest_of_order, parts_of_buckets
from ddpopt.split.dump import find_crossings, is_showing, show, write
from ddpopt.split.facts import (
    BackwardFacts,
    ForwardOutput,
    find_reachable,
    forward_outputs,
    gradient_nodes,
    parameters_of,
    read_backward,
    read_forward,
    refuse_linked_calls,
)
from ddpopt.split.forward import (
    compile_forward_sections,
    copy_for_cutting,
    make_stitched_graph,
)
from ddpopt.split.gates import (
    CompiledSection,
    GatedGraph,
    new_token,
    run_first_section,
)
from ddpopt.split.nodes import (
    attribute_of,
    call_nodes,
    describe,
    has_ragged_sizes,
    may_communicate,
    name_of,
    output_values,
    uses_streams,
)
from ddpopt.split.proof import Releases, prove_backward, prove_forward
from ddpopt.split.releases import ReleaseOrder, mark_functions
from ddpopt.split.runner import CompiledCall, CompiledGraph, GraphRunner, StartOnModule
from ddpopt.split.sections import (
    choose_backward_sections,
    choose_forward_sections,
    fine_buckets,
)
from ddpopt.steps.sections import Label, report_runs


def compile_under_ddp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ddp: DistributedDataParallel,
    options: Options,
    start: StartOnModule,
) -> CompiledCall:
    """Compile a graph split at the bucket boundaries of a DDP module, or whole for a named reason.

    Further modules may run the result; each is given to `start` first. It raises what compiling the
    whole graph raises, and what Dynamo raises to trace a frame again.
    """
    compiler: GraphCompiler | None = None
    try:
        _torch.will_rebuild_buckets(ddp)  # needed in each step; find out now if it has moved
        compiler = GraphCompiler(gm, example_inputs, ddp, options)
        result = compiler.compile(example_inputs)
    except _torch.control_flow_exceptions():
        raise  # Dynamo traces the frame again
    except Exception as error:
        # A graph that nobody has thought of, or a release of torch, may raise anything here. Only
        # overlap is lost: the reason is logged, and the graph compiled whole.
        refusal = NotCutError.because_of(error)
        if compiler is not None and not compiler.may_fall_back_for(refusal.reason):
            raise _disagreement(_torch.graph_name(gm), refusal) from error
        return compile_whole(gm, example_inputs, ddp, options, refusal, start)
    call = result.call
    if call is None:
        # It stays whole. What compiling it raises is for the user.
        call = options.inner(gm, list(example_inputs))
        call = report_runs(call, Label(result.cut.graph, 0))
    compiled = CompiledGraph(
        cut=result.cut, text=result.text, call=call, argument_of=compiler.argument_of
    )
    module_state = state.get(ddp)
    arrives_last, cut_for = module_state.rules.arrives_last, module_state.cut_for
    return _make_runner(compiled, ddp, options, start, cut_for, arrives_last)


def _disagreement(graph: str, refusal: NotCutError) -> DisagreementError:
    """The error of a rank that cannot cut a graph which others may cut, see [Note: collectives]."""
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
    """Compile a graph whole, for a named reason; `start` as for `compile_under_ddp`."""
    cut = dataclasses.replace(_new_cut(gm, options), fallback=refusal.reason, detail=refusal.detail)
    text = GraphText()
    if ddp is not None:
        text = GraphText(nodes=(describe(call_nodes(gm.graph)),))
    write(gm, cut, text, {"original": gm})
    call = options.inner(gm, list(example_inputs))
    is_drift = refusal.reason is Reason.TORCH_DRIFT
    if is_drift:
        state.note_drift()
    if ddp is None or is_drift:
        # A runner would need the names that moved: nobody is told of the graph's calls.
        if ddp is not None:
            state.get(ddp).keep(cut, text)
        _log(options, cut, ddp)
        return call
    reporting = report_runs(call, Label(cut.graph, 0))
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
    """Make the runner of a compiled graph, register it with the module, and log the cut."""
    runner = GraphRunner(
        compiled,
        arrives_last=arrives_last,
        cut_for=cut_for,
        is_for_copy=state.is_copy(ddp),
        start=start,
        log=functools.partial(_log, options),
    )
    runner.keep_for(ddp)
    _log(options, compiled.cut, ddp)
    return runner


def _new_cut(gm: fx.GraphModule, options: Options) -> Cut:
    """The record of a graph of which nothing is known yet: no sections, no buckets, no reason."""
    calls, num_collectives = call_nodes(gm.graph), 0
    with contextlib.suppress(TorchDriftError):  # all that is lost is a comparison of ranks
        num_collectives = sum(map(may_communicate, calls))
    return Cut(
        graph=_torch.graph_name(gm),
        inner=options.inner_name,
        num_nodes=len(calls),
        num_collectives=num_collectives,
    )


def _log(options: Options, cut: Cut, ddp: DistributedDataParallel | None) -> None:
    """Log a cut; as a warning, on each rank, if overlap is lost that should not be."""
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
    text: GraphText
    # For each section, which of the distinct compiled callables it is, and what goes in and out. A
    # backward that stays whole has none.
    sections: Sequence[tuple[int, Flow]]
    # The argument to which each gradient that AOTAutograd expects belongs.
    argument_of_output: Sequence[Argument | None]


class _Result(NamedTuple):
    """What became of a graph; `call` is None if it stays whole, and is yet to be compiled."""

    cut: Cut
    text: GraphText
    call: CompiledCall | None


class GraphCompiler:
    """Compiles one graph under a DDP module.

    If the backward is cut, AOTAutograd traces the graph and calls back, in this order:
    `edit_forward`, `compile_backward`, `make_backward`. If it finds the result of an earlier
    compile in its cache, it calls `make_backward` alone.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        ddp: DistributedDataParallel,
        options: Options,
    ) -> None:
        """Read Dynamo's graph."""
        _torch.check_dynamo_graph(gm)
        self._gm = gm
        # No tensor of the first batch is kept here: AOTAutograd may keep this object.
        self._num_inputs = len(example_inputs)
        # The arguments that are parameters, and whether each is trained.
        self._parameters = {
            argument: value.requires_grad
            for argument, value in numbered(Argument, example_inputs)
            if isinstance(value, nn.Parameter)
        }
        self._options = options
        self._state = state.get(ddp)
        self._name = _torch.graph_name(gm)
        # Dynamo keeps its graph; a cut forward is made of a copy.
        self._copy = copy_for_cutting(gm)

        # The Reducer's parameters, and which of them this graph uses.
        reduced = _torch.reducer_parameters(ddp)
        self._reduced = list(reduced.values())
        trained = {tensor: p for tensor, p in reduced.items() if tensor.requires_grad}
        indices_of = parameters_of(self._copy, example_inputs, trained)
        # Which argument of the graph brings in each parameter.
        self.argument_of: dict[ParameterIndex, Argument] = {}
        placeholders = self._copy.graph.find_nodes(op="placeholder")
        for argument, node in numbered(Argument, placeholders):
            for index in indices_of.get(node, ()):
                self.argument_of[index] = argument

        # Backward is forward reversed: parameters of graphs that run after this one in the module's
        # forward arrive before its own, those of graphs that run before it arrive after.
        self._arrives_before, self._arrives_after = self._state.arrival_around(self._name)
        name_of = _torch.names_now(ddp)
        path_of = {p.index: name_of[tensor] for tensor, p in reduced.items() if tensor in name_of}
        module_path = frame_module(
            {node: path_of[index] for node, (index, *_) in indices_of.items() if index in path_of}
        )
        # Whether anything can run before it, or another graph after it, in the module's forward.
        is_of_root = _torch.is_whole_forward(module_path)
        self._others = Others.around(
            begins=not (self._state.has_begun_forward or _torch.follows_graph_break()),
            ends=is_of_root and not _torch.ends_in_graph_break(gm),
            may_be_unused=ddp.static_graph,
        )
        root = _torch.unwrap_compiled(ddp.module)
        of_root = {
            p.index for tensor in root.parameters(recurse=False) if (p := reduced.get(tensor))
        }
        self._of_root = sorted(of_root)

        self._facts = read_forward(self._copy, indices_of, {p.index for p in self._arrives_after})
        self._empty_cut = dataclasses.replace(
            _new_cut(gm, options), is_shared=may_share_code(ddp.module, module_path)
        )

        self._was_autocast_on = _torch.is_autocast_on()
        # `_cut_backward` sets it: where the token and the gradients are.
        self._device = torch.device("cpu")
        # When AOTAutograd's trace of the backward released each gradient.
        self._release_order = ReleaseOrder(())
        # The arguments that go straight into each `autograd.Function` of the graph, by its number.
        self._function_arguments: Mapping[int, frozenset[Argument]] = {}
        # AOTAutograd's callbacks leave these for each other, and for `_cut_backward`.
        self._forward_outputs: Sequence[ForwardOutput] = ()
        self._stored: _StoredCut | None = None
        self._further_sections: list[CompiledSection] = []

    def compile(self, example_inputs: Sequence[Any]) -> _Result:
        """Compile the graph, its backward cut or else its forward; or leave it whole.

        Raises:
            NotCutError: a section could not be compiled, or not be proven. The other way to cut is
                not tried then: something is wrong that is to be reported.
        """
        # Backward reaches a parameter's first use last.
        cut = self._predict({index: -use for index, use in self._facts.first_use.items()})
        buckets = self._buckets_to_cut_at(cut)
        # Tracing a backward is worth it if the graph has parts of two buckets. One that may
        # communicate, and releases a gradient, is cut whatever the buckets are, see
        # [Note: collectives].
        has_parts = len(parts_of_buckets(buckets, self._facts.first_use)) > 1
        has_an_order = self.communicates and bool(self._facts.first_use)
        if (has_parts or has_an_order) and self._options.split != "forward":
            try:
                return self._cut_backward(example_inputs)
            except _torch.control_flow_exceptions():
                raise
            except Exception as error:
                # Any error costs the cut of backward, as in `compile_under_ddp`; forward may be cut
                # instead.
                refusal = NotCutError.because_of(error, in_backward=True)
                if not refusal.reason.is_of_backward or not self.may_fall_back_for(refusal.reason):
                    raise
                cut = dataclasses.replace(
                    cut, backward_fallback=refusal.reason, detail=refusal.detail
                )
        return self._cut_forward(cut, buckets, example_inputs)

    @property
    def communicates(self) -> bool:
        """Whether the graph, or its backward, may exchange data with other ranks."""
        return any(self._facts.communicates)

    def may_fall_back_for(self, reason: Reason) -> bool:
        """Whether the graph may be cut in another way, or not at all, for this reason.

        Where it may communicate, only for one that holds on all ranks or on none: a rank that does
        not cut the graph as others do issues its collectives and DDP's in another order.
        """
        return reason.is_alike or not self.communicates

    # ---- Which buckets -----------------------------------------------------------------------

    def _predict(self, lateness: Mapping[ParameterIndex, float]) -> Cut:
        """A cut without sections: the Reducer's buckets, and the order in which gradients arrive.

        `lateness` says how late in backward the gradient of each parameter is final.
        """
        rules = self._state.rules
        lateness = dict(lateness)
        for index in rules.arrives_last:
            if index in lateness:
                lateness[index] = math.inf
        arrival = order_arrival(
            self._reduced,
            lateness,
            self._arrives_before,
            self._arrives_after,
            self._others,
            self._of_root,
        )
        # Buckets come from three sources: those that the Reducer will be given soon (expected),
        # those that it has now (actual), and those that it will form by its rules (predicted). The
        # first two are None if they are not known.
        expected = None if self._empty_cut.is_shared else self._state.expected_buckets
        actual = self._state.buckets
        if expected is not None:
            arrival = in_launch_order(arrival, known_buckets(arrival, expected, rules))
        arrival_here = tuple(parameter for parameter in arrival if parameter.index in lateness)
        if self._empty_cut.is_shared:
            # Modules that run the same code have other parameters around it.
            buckets = predict_buckets(arrival_here, rules)
        elif actual is None:
            buckets = predict_buckets(arrival, rules)
        else:
            buckets = known_buckets(arrival, actual, rules)
            arrival_here = in_launch_order(arrival_here, buckets)
        return dataclasses.replace(self._empty_cut, buckets=buckets, arrival=arrival_here)

    def _buckets_to_cut_at(self, cut: Cut) -> tuple[Bucket, ...]:
        """The buckets at whose ends the graph is cut.

        They are not always those that the cut records, which the Reducer has in this step, or is
        predicted to form. If better buckets are searched for, the graph is cut finely, to serve
        any. If others are to come, it is cut for those.
        """
        expected = self._state.expected_buckets
        if expected is None and not self._state.is_searching:
            return cut.buckets
        if cut.is_shared:
            return fine_buckets(cut.arrival)
        if expected is not None:
            return known_buckets(self._reduced, expected, self._state.rules)
        return fine_buckets([p for bucket in cut.buckets for p in bucket.parameters])

    def _left_whole(self, cut: Cut, reason: Reason) -> Cut:
        """The cut of a graph in which no boundary helps, or none is possible."""
        if reason is Reason.ONE_BUCKET and self._state.has_planned_buckets:
            reason = Reason.ONE_PLANNED_BUCKET
        if reason is Reason.NO_PARAMETERS:
            cut = cut.with_buckets(())  # it says nothing of buckets that it has no part in
        return dataclasses.replace(cut, fallback=reason)

    # ---- Backward ----------------------------------------------------------------------------

    def _cut_backward(self, example_inputs: Sequence[Any]) -> _Result:
        """Compile the forward whole, and the backward in sections.

        Raises:
            NotCutError: this graph's backward cannot be cut, or the inner compiler raised on a
                section.
        """
        aot = self._options.aot
        if aot is None:
            cuda_graphs = self._options.has_cuda_graphs
            raise NotCutError(Reason.CUDA_GRAPHS if cuda_graphs else Reason.INNER)
        if self._facts.first_use.keys() - self.argument_of.keys():
            raise NotCutError(Reason.ATTRIBUTES)
        if _torch.wants_cuda_graphs(self._gm):
            raise NotCutError(Reason.CUDA_GRAPHS)
        if uses_streams(self._gm.graph):
            raise NotCutError(Reason.STREAMS)  # what the backward has of it is not seen there
        tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
        are_plain = all(_torch.is_plain(t) and not _torch.is_subclass(t) for t in tensors)
        # The token is one more input and output, by which autograd will call the sections after the
        # first (gates.py). It is added to a copy, since forward may still be cut if this fails.
        traced = copy_for_cutting(self._gm)
        if not are_plain or has_ragged_sizes(traced.graph):
            raise NotCutError(Reason.SUBCLASSES)
        self._device = next(tensor.device for tensor in tensors if tensor.requires_grad)
        differentiated = [
            argument
            for argument, value in numbered(Argument, example_inputs)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        self._function_arguments = mark_functions(traced)
        add_token(traced, differentiated)
        self._release_order = ReleaseOrder(differentiated)
        # AOTAutograd traces, or finds the result in its cache. Meanwhile it calls `edit_forward`,
        # `compile_backward` and `make_backward`.
        with self._release_order.noting():
            call = aot(traced, [*example_inputs, new_token(self._device)], self)
        stored = self._stored
        assert stored is not None, "AOTAutograd returned a forward without its backward"
        cut = dataclasses.replace(stored.cut, graph=self._name)  # the cache knows no names
        if cut.fallback is not None:
            write(self._gm, cut, stored.text, {"original": self._gm})
        return _Result(cut, stored.text, GatedGraph(call, self._further_sections, self._device))

    @functools.cached_property
    def cache_key(self) -> str | None:
        """All that the cut of a backward depends on besides the graph; equal in any process.

        None while graphs are shown: a result from a cache has none.
        """
        if is_showing():
            return None
        depends_on = {
            "what is compiled": dataclasses.replace(self._empty_cut, graph=""),
            "parameters": self._reduced,
            "argument of each parameter": self.argument_of,
            "arguments that are parameters": sorted(self._parameters.items()),
            # The order in which gradients arrive depends on the graphs before and after this one.
            "neighbours": (
                self._arrives_before,
                self._arrives_after,
                self._others,
                self._of_root,
            ),
            "how the Reducer forms buckets": self._state.rules,
            "buckets now": _as_tuples(self._state.buckets),
            # Cuts are finer while better buckets are searched for.
            "is searching": self._state.is_searching,
            "buckets to come": _as_tuples(self._state.expected_buckets),
        }
        digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()
        return f"ddpopt {source_digest()} {digest}"

    def edit_forward(self, forward: fx.GraphModule) -> None:
        """Called by AOTAutograd with the forward that it traced, before that is compiled."""
        self._forward_outputs = forward_outputs(forward)
        return_token_itself(forward)

    def compile_backward(
        self, backward: fx.GraphModule, inputs: list[Any], compile_section: _torch.CompileSection
    ) -> tuple[Sequence[Any], _StoredCut]:
        """Called by AOTAutograd with the backward that it traced, and its fake inputs.

        Returns the distinct compiled sections, and what it takes to run them.
        """
        _torch.check_backward(backward)
        refuse_linked_calls(backward)
        argument_of_output = drop_token_gradient(
            backward, token_argument=Argument(self._num_inputs)
        )
        _torch.restride(backward, inputs)
        devices = {_torch.aten_value(node).device for node in gradient_nodes(backward).values()}
        if devices - {self._device}:
            raise NotCutError(Reason.DEVICES, f"they are on {sorted(map(str, devices))}")

        reachable = find_reachable(self._forward_outputs, backward)
        # Nobody writes to these before their gradients are released here. A parameter that is
        # trained, but not by this graph, is none of them: its gradient may be there while sections
        # are yet to run, and a hook may then update it.
        made_here = gradient_nodes(backward).keys()
        unwritten = {
            argument
            for argument, is_trained in self._parameters.items()
            if argument in made_here or not is_trained
        }
        order = self._release_order
        num_released_before = {argument: order.num_before(argument) for argument in made_here}
        facts = read_backward(backward, reachable, unwritten, num_released_before)
        if any(facts.communicates):
            self._empty_cut = dataclasses.replace(
                self._empty_cut, order=self._order_of_backward(backward, facts)
            )
        final = final_places(facts, self.argument_of, {p.index for p in self._arrives_after})
        cut = dataclasses.replace(self._predict(final), split="backward")
        buckets = self._buckets_to_cut_at(cut)
        try:
            chosen = choose_backward_sections(facts, buckets, self.argument_of, final)
        except NotCutError as refusal:
            stored = _StoredCut(
                cut=self._left_whole(cut, refusal.reason),
                text=GraphText(nodes=(describe(call_nodes(self._copy.graph)),)),
                sections=(),
                argument_of_output=argument_of_output,
            )
            return [compile_section(backward, inputs, list(range(len(inputs))))], stored

        cut = dataclasses.replace(cut, sections=chosen.sections, num_nodes=len(chosen.order))
        cut = cut.with_buckets(cut.buckets)  # which says what each section completes
        sections = make_section_graphs(backward, chosen, reachable)
        releases = Releases(
            num_before=num_released_before, function_arguments=self._function_arguments
        )
        prove_backward(
            backward,
            cut,
            sections,
            reachable,
            self.argument_of,
            unwritten=unwritten,
            releases=releases,
        )
        text = _text_of_backward(sections)
        pieces = {f"backward_section_{k}": s.graph for k, s in enumerate(sections)}
        graphs = {"original": self._gm, "original_backward": backward, **pieces}
        show(self._gm, cut, text, graphs)

        placeholders = backward.graph.find_nodes(op="placeholder")
        saved = {slot for slot, node in numbered(Slot, placeholders) if not _torch.is_tangent(node)}
        compiled, numbers = compile_backward_sections(
            sections, inputs, saved, compile_section, self._name
        )
        flows = [section.flow for section in sections]
        stored = _StoredCut(
            cut=cut,
            text=text,
            sections=list(zip(numbers, flows, strict=True)),
            argument_of_output=argument_of_output,
        )
        return compiled, stored

    def _order_of_backward(self, backward: fx.GraphModule, facts: BackwardFacts) -> str:
        """The digest of the order in which a backward communicates and releases gradients."""
        collectives = {
            call: name_of(node)
            for call, node in numbered(Call, call_nodes(backward.graph))
            if facts.communicates[call]
        }
        releases = {
            parameter.name: facts.release_places[self.argument_of[parameter.index]]
            for parameter in self._reduced
            if self.argument_of.get(parameter.index) in facts.release_places
        }
        return digest_of_order(collectives, releases)

    def make_backward(
        self, compiled: Sequence[Any], stored: _StoredCut
    ) -> Callable[[list[Any]], Any]:
        """What AOTAutograd is to run as its backward.

        Called by it with what `compile_backward` returned, here or in another process.
        """
        self._stored = stored
        if not stored.sections:
            (whole,) = compiled
            return whole  # type: ignore[no-any-return]  # a compiled graph, which has no type
        sections = [
            CompiledSection(
                call=compiled[number],
                flow=flow,
                label=Label(self._name, section),
                # AOTAutograd's own node does this for the first section.
                without_autocast=self._was_autocast_on and section > 0,
            )
            for section, (number, flow) in numbered(SectionIndex, stored.sections)
        ]
        first_section, *self._further_sections = sections
        flows = [flow for _, flow in stored.sections]
        return run_first_section(
            first_section,
            stored.argument_of_output,
            Argument(self._num_inputs),
            num_kept=sum(len(flow.keeps) for flow in flows),
            watched={slot for flow in flows for slot in flow.watches},
            device=self._device,
        )

    # ---- Forward -----------------------------------------------------------------------------

    def _cut_forward(
        self, cut: Cut, buckets: Sequence[Bucket], example_inputs: Sequence[Any]
    ) -> _Result:
        """Compile the graph in sections, unless no boundary helps or is possible.

        A graph with parameters of one bucket alone ends here as well.
        """
        calls = describe(call_nodes(self._copy.graph))
        try:
            sections = choose_forward_sections(self._facts, buckets)
        except NotCutError as refusal:
            if not self.may_fall_back_for(refusal.reason):
                raise
            cut = self._left_whole(cut, refusal.reason)
            text = GraphText(nodes=(calls,))
            write(self._gm, cut, text, {"original": self._gm})
            return _Result(cut, text, None)

        cut = dataclasses.replace(cut, sections=sections, order=self._order_of_forward())
        cut = cut.with_buckets(cut.buckets)
        stitched = make_stitched_graph(self._copy, sections)
        prove_forward(self._gm, cut, stitched, self.argument_of)
        text = GraphText(
            nodes=tuple(calls[section.start : section.stop] for section in sections),
            crossings=_crossings_of_forward(stitched),
        )
        section_calls = stitched.graph.find_nodes(op="call_module")
        pieces = {
            f"section_{k}": attribute_of(stitched, call) for k, call in enumerate(section_calls)
        }
        show(self._gm, cut, text, {"original": self._gm, **pieces, "stitched": stitched})
        inner = _torch.for_sections(self._options.inner)
        call = compile_forward_sections(stitched, example_inputs, inner, self._name)
        return _Result(cut, text, call)

    def _order_of_forward(self) -> str:
        """The digest of the order in which a forward communicates and uses parameters first.

        Empty for one that does not communicate.
        """
        if not self.communicates:
            return ""
        collectives = {
            call: name_of(node)
            for call, node in numbered(Call, call_nodes(self._copy.graph))
            if self._facts.communicates[call]
        }
        name_by_index = {parameter.index: parameter.name for parameter in self._reduced}
        uses = {name_by_index[index]: Place(use) for index, use in self._facts.first_use.items()}
        return digest_of_order(collectives, uses)


def _as_tuples(buckets: state.Buckets | None) -> tuple[tuple[ParameterIndex, ...], ...] | None:
    """Buckets in a form whose text is equal for equal ones."""
    return None if buckets is None else tuple(tuple(bucket) for bucket in buckets)


def _text_of_backward(sections: Sequence[SectionGraph]) -> GraphText:
    # A section returns first the values that it keeps. They are found again by their slots.
    outputs = [dict(zip(s.flow.keeps, output_values(s.graph), strict=False)) for s in sections]
    return GraphText(
        nodes=tuple(describe(call_nodes(section.graph.graph)) for section in sections),
        crossings=find_crossings(outputs, [section.flow.takes for section in sections]),
    )


def _crossings_of_forward(stitched: fx.GraphModule) -> Any:
    # Values go from one section to another as elements of the tuples that sections return.
    calls = list(stitched.graph.find_nodes(op="call_module"))
    outputs = []
    for call in calls:
        returned = output_values(attribute_of(stitched, call))
        outputs.append({element: returned[element.args[1]] for element in call.users})
    return find_crossings(outputs, [call.all_input_nodes for call in calls])
