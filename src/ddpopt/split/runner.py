"""What runs in a DDP forward: the compiled graph, and in the first steps a little more.

It compiles nothing. Its cost per step is one look at which DDP module is active.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch, _waits
from ddpopt.reducer import find_misplaced, predict_buckets
from ddpopt.split import state
from ddpopt.split.backward.gates import refuse_double_backward
from ddpopt.split.plan import SplitPlan

Compiled = Callable[..., Any]

_MOST_QUESTIONS = 20  # DDP's log has its buckets a step after it has formed them
_MOST_UNSEEN = 100  # graphs run under no_sync after which no sum of gradients is expected


@dataclass(eq=False)
class GraphRunner:
    """Calls a compiled graph, or `ordered` in its place until the Reducer has its final buckets.

    Dynamo runs the same code for every DDP module that passes its guards, which need not be the
    one that it was compiled for, so the active module is looked up at each call.
    """

    _plan: SplitPlan
    _nodes: state.Nodes
    _compiled: Compiled
    _ordered: Compiled
    _arguments: Mapping[int, int]  # by the indices of the parameters that they bring in
    _settled_ddp: Callable[[], DistributedDataParallel | None] = lambda: None

    def __call__(self, *args: Any) -> Any:
        ddp = _torch.active_ddp()
        if ddp is None or ddp is self._settled_ddp():
            return self._compiled(*args)
        known = state.of(ddp)
        if known.nodes.get(self._plan.graph) is not self._nodes:
            known.keep(self._plan_for(ddp, args), self._nodes)
        if _torch.will_rebuild_buckets(ddp) and _may_be_seen(ddp):
            return self._ordered(*args)
        if compare_buckets(ddp):
            self._settled_ddp = weakref.ref(ddp)
            known.settle(self)
        return self._compiled(*args)

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
        buckets = predict_buckets([*own.values()], state.of(ddp).rules)
        return plan.with_parameters(own).with_buckets(buckets)

    def unsettle(self) -> None:
        """Look at the next DDP module again: its buckets have changed."""
        self._settled_ddp = lambda: None


def _may_be_seen(ddp: DistributedDataParallel) -> bool:
    """Whether DDP may see in which order the gradients of this forward arrive.

    It sees every backward from a forward that communicates to the end of its allreduces. One of a
    forward under no_sync may be among them, as where two forwards have one loss, so only a module
    that goes on and on under no_sync is taken for one whose gradients DDP never sees.
    """
    known = state.of(ddp)
    known.num_unseen = 0 if ddp.require_backward_grad_sync else known.num_unseen + 1
    return known.num_unseen <= _MOST_UNSEEN


def waiting_first(compiled: Compiled) -> Compiled:
    """Make `compiled` wait for all of its parameters first; [Note: waits] has the better way."""

    def run(*args: Any) -> Any:
        _waits.wait_for(value for value in args if isinstance(value, torch.nn.Parameter))
        return compiled(*args)

    return run


def compare_buckets(ddp: DistributedDataParallel) -> bool:
    """Compare DDP's final buckets with the plans', once; return False until DDP reports them.

    It warns of the first parameter out of place: from there on allreduces start late.
    """
    known = state.of(ddp)
    if known.told_buckets is not None:
        return True
    if not ddp.require_backward_grad_sync:
        return False  # DDP writes its log only in steps that communicate
    try:
        num_questions = known.ask_buckets()
    except Exception as error:  # only the comparison is lost
        _logs.warning("DDP's buckets are not compared with those planned: %s", error)
        return True
    if known.told_buckets is None:
        return num_questions >= _MOST_QUESTIONS
    for plan in known.plans:
        found = find_misplaced(plan.arrival, plan.buckets, known.told_buckets)
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
