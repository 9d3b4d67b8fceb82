"""When autograd releases gradients, noted while AOTAutograd traces a graph.

A gradient is released where eager autograd would hand it to its argument: behind *all* calls of the
autograd node that makes it. A traced graph does not show where that is:

    class Scaled(torch.autograd.Function):           the traced backward
        def backward(ctx, g):
            gw = g.t() @ x                           0  gw = mm(g.t(), x)
            ctx.amax.copy_(g.abs().amax())           1  a = amax(abs(g)), for a write to `amax`
            return g @ w, gw, None                   2  gx = mm(g, w)
                                                        -> autograd releases gx and gw

Call 0 makes the gradient of `w`, yet a hook on `w` finds the new `amax`. A Function may even return
the gradient that it got, which no call of its own makes. So autograd itself has to tell.
AOTAutograd traces a backward by running it, and runs the hooks of the graph's arguments too. So the
graph that it is given has an operator which hooks each argument while it is traced
(`add_watch_releases`). When autograd releases a gradient, the hook marks the calls that were traced
since the last release with the number of gradients that had been released before. torch carries
such marks from graph to graph. Calls of the forward get no mark, so neither do recomputed calls in
the backward.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from ddpopt import _torch
from ddpopt._indices import Argument, FunctionNumber, numbered
from ddpopt.split.nodes import graphs_of, name_of

_MARK = "ddpopt_num_released"
_FUNCTION_MARK = "ddpopt_function"


def num_released_before_call(call: fx.Node) -> int | None:
    """How many gradients autograd had released before it made a call of a backward.

    None for a recomputed call of the forward, and for a call behind the last release.
    """
    return _torch.mark_of(call, _MARK)


class ReleaseOrder:
    """In which order autograd releases the gradients of a graph's arguments.

    It is complete once AOTAutograd has traced the graph, forward and backward: `_begin_trace`, then
    `_begin_backward`, then `_release` for each gradient.
    """

    def __init__(self, arguments: Sequence[Argument]) -> None:
        """Make an empty order for the arguments that `add_watch_releases` was given."""
        self._arguments = arguments
        # For each argument whose gradient was released, how many were released before it.
        self._num_before: dict[Argument, int] = {}
        # The next release marks the nodes that are traced behind this one: the forward's last, or
        # the last one at the release before. None until the forward has ended.
        self._mark_behind: fx.Node | None = None

    def num_released_before(self, argument: Argument) -> int:
        """How many gradients are released before this argument's.

        All of them, if autograd did not say when it releases this one: later is never wrong.
        """
        return self._num_before.get(argument, len(self._num_before))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the releases of the graph with our operators that is traced in this block."""
        token = _noting.set(self)
        try:
            yield
        finally:
            _noting.reset(token)

    def _begin_trace(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hook the tensors that AOTAutograd's trace has for the arguments."""
        # AOTAutograd may trace a graph more than once; the last time counts.
        self._num_before.clear()
        self._mark_behind = None
        for argument, tensor in zip(self._arguments, tensors, strict=True):
            if tensor.requires_grad:  # else torch refuses a hook
                release = functools.partial(self._release, argument)
                tensor.register_hook(release)  # type: ignore[no-untyped-call]  # torch's

    def _begin_backward(self, graph: fx.Graph) -> None:
        """Note that the forward is traced: what comes behind it in this graph is the backward."""
        self._mark_behind = _last_node(graph)

    def _release(self, argument: Argument, _gradient: torch.Tensor) -> None:
        """Mark the calls traced since the last release; a hook on the argument's tensor."""
        graph = _torch.traced_graph()
        if graph is None or self._mark_behind is None:
            return  # not the backward: the program's forward takes a gradient itself
        num_before = len(self._num_before)
        for node in reversed(graph.nodes):
            if node is self._mark_behind:
                break
            _torch.set_mark(node, _MARK, num_before)
        self._mark_behind = _last_node(graph)
        self._num_before[argument] = num_before


def _last_node(graph: fx.Graph) -> fx.Node:
    last: fx.Node = next(iter(reversed(graph.nodes)))  # torch 2.11's are no iterator by themselves
    return last


# The order to which a trace adds now. An operator takes tensors alone, so it cannot be given it.
_noting: contextvars.ContextVar[ReleaseOrder | None] = contextvars.ContextVar(
    "ddpopt_release_order", default=None
)

# ---- Functions, for the proof ----------------------------------------------------------------


def mark_functions(gm: fx.GraphModule) -> dict[FunctionNumber, frozenset[Argument]]:
    """Number the calls of `autograd.Function`s in Dynamo's graph, and mark their backward's calls.

    Returns the arguments of the graph that go straight into each Function. Their gradients are
    released behind the last call with the Function's mark, which `function_of` reads. So the proof
    can check release places without `ReleaseOrder`, from which sections were chosen.
    """
    arguments_of: dict[FunctionNumber, frozenset[Argument]] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    argument_of = {node: argument for argument, node in numbered(Argument, placeholders)}
    _mark_functions(gm, argument_of, arguments_of)
    return arguments_of


def _mark_functions(
    gm: fx.GraphModule,
    argument_of: Mapping[fx.Node, Argument],
    arguments_of: dict[FunctionNumber, frozenset[Argument]],
) -> None:
    """Mark the Functions of one graph and of those that its operators run.

    `argument_of` has the inputs of `gm` that are arguments of Dynamo's graph. Each Function's
    number and arguments are added to `arguments_of`, which `mark_functions` returns.
    """
    for node in gm.graph.nodes:
        graphs = graphs_of(node)
        if not graphs:
            continue  # neither a Function nor another operator that runs graphs
        if _torch.applies_function(name_of(node)):
            number = FunctionNumber(len(arguments_of))
            sources = [argument_of[n] for n in node.all_input_nodes if n in argument_of]
            arguments_of[number] = frozenset(sources)
            _forward, backward, *_ = graphs
            # With the graphs that the backward's calls run; autograd records none of the forward's.
            for graph in (m.graph for m in backward.modules() if isinstance(m, fx.GraphModule)):
                for call in graph.nodes:
                    _torch.set_mark(call, _FUNCTION_MARK, number)
        else:
            inner_argument_of = _arguments_passed_on(node, graphs, argument_of)
            for inner_gm in graphs:
                _mark_functions(inner_gm, inner_argument_of, arguments_of)


def _arguments_passed_on(
    node: fx.Node, graphs: Sequence[fx.GraphModule], argument_of: Mapping[fx.Node, Argument]
) -> dict[fx.Node, Argument]:
    """The inputs of a graph that an operator runs which are arguments of Dynamo's graph.

        checkpoint(body, x, w)            the inputs of `body` are `x` and `w`
        cond(p, if_true, if_false, (x,))  nothing is known: there are two graphs

    Where nothing is known, a Function in these graphs counts as one that takes no argument: the
    proof finds the Function by the call that makes a gradient, and so misses a Function that
    returns the gradient that it got. `ReleaseOrder` does not.
    """
    placeholders = graphs[0].graph.find_nodes(op="placeholder")
    operands = node.args[1:]
    if len(graphs) > 1 or len(placeholders) != len(operands):
        return {}
    passed_on: dict[fx.Node, Argument] = {}
    for placeholder, operand in zip(placeholders, operands, strict=True):
        if isinstance(operand, fx.Node) and operand in argument_of:
            passed_on[placeholder] = argument_of[operand]
    return passed_on


def function_of(call: fx.Node) -> FunctionNumber | None:
    """The Function in whose backward a call of a traced backward was made; None for other calls."""
    number = _torch.mark_of(call, _FUNCTION_MARK)
    return None if number is None else FunctionNumber(number)


# ---- The operators ---------------------------------------------------------------------------


# AOTAutograd runs a graph several times to compile it: to find out about its outputs, when nothing
# is traced, and to trace it. The operators leave notes in traces alone, and nothing else: in a
# block of `noting`.


def _run_watch_releases(token: torch.Tensor, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
    order = _noting.get()
    if order is not None and _torch.traced_graph() is not None:
        order._begin_trace(arguments)
    return token


def _run_end_forward(token: torch.Tensor) -> torch.Tensor:
    """Copy the token; in a trace whose releases are noted, note that the forward ends here."""
    # A copy, because an output that is an input AOTAutograd returns as that input, past the
    # compiled graph's autograd node: no gradient of it would get there.
    copied = token.clone()
    order, graph = _noting.get(), _torch.traced_graph()
    if order is not None and graph is not None:
        order._begin_backward(graph)
    return copied


# AOTAutograd's cache takes a graph with operators, but none with functions that it does not know.
_OPERATORS: Any = torch.library.Library("ddpopt", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, function: Callable[..., torch.Tensor]) -> None:
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.ddpopt, name):  # else this module is being loaded anew
        _OPERATORS.define(schema)
    # Composite: wherever a graph is traced, the operator is replaced by what the function does.
    _OPERATORS.impl(name, function, "CompositeImplicitAutograd", allow_override=True)


_define("watch_releases(Tensor(a) token, Tensor[] arguments) -> Tensor(a)", _run_watch_releases)
_define("end_forward(Tensor token) -> Tensor", _run_end_forward)


def add_watch_releases(token: fx.Node, arguments: Sequence[fx.Node]) -> fx.Node:
    """Add the operator that notes, in a trace, when gradients of these arguments are released.

        watched = ddpopt.watch_releases(token, [w, b])     in front of all calls: hooks `w` and `b`
        ...                                                the graph's calls
        copied = ddpopt.end_forward(watched)               tells where the backward's trace begins

    `token` is the graph's last placeholder. It goes through both operators; this function returns
    what the first one makes of it, for `add_end_forward`.
    """
    with token.graph.inserting_after(token):
        return token.graph.call_function(
            torch.ops.ddpopt.watch_releases.default, (token, list(arguments))
        )


def add_end_forward(watched: fx.Node) -> fx.Node:
    """Add the operator that notes the forward's end, at the insertion point.

    Calls that are traced before it get no mark. `watched` is what `add_watch_releases` returned.
    Returns the node of a copy of the token.
    """
    return watched.graph.call_function(torch.ops.ddpopt.end_forward.default, (watched,))
