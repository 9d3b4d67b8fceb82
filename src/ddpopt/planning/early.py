"""A warning where most gradients leave late, once training has settled: how many, and why.

A graph that stays whole for a reason of its own is logged at INFO only, graph by graph. So if graph
breaks leave a model in pieces with parameters of one bucket each, or with nearly all of backward in
one piece, nobody would hear that there is no overlap.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch
from ddpopt._indices import ParameterIndex
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._text import format_bytes, shorten
from ddpopt._torch import Forward
from ddpopt.errors import Reason
from ddpopt.reducer import Parameter
from ddpopt.split import state
from ddpopt.split.cut import Cut
from ddpopt.split.phases import Goal
from ddpopt.steps.forwards import (
    Subscriber,
    find_subscriber,
    subscribe,
    unsubscribe,
    will_communicate,
)

# Training has settled if so many forwards that communicate have compiled nothing.
_NUM_SETTLED = 5
# Gradients leave early if this part of backward is still to come: less hides little.
_STILL_TO_COME = 0.1
# There is a warning unless this share of gradients leaves early, or is in the last section.
_ENOUGH = 0.5

# Whether the warning was given; once for each module.
_are_told: ModuleSlot[bool] = ModuleSlot(bool, Lifetime.MODULE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """How many bytes of gradients leave a backward early, and why the others do not."""

    total_bytes: int
    # Of buckets that are complete while much of backward is still to come.
    early_bytes: int
    # Of gradients of graphs that are cut, which are final only in the last part of backward.
    late_in_cut_bytes: int
    # Of gradients that are final early, but whose bucket, or an earlier bucket, is complete late.
    waiting_bytes: int
    # Of such gradients of graphs that stay whole, by the reason.
    late_in_whole_bytes: dict[Reason, int] = field(default_factory=dict)
    # The names of these graphs, by the reason.
    graphs: dict[Reason, list[str]] = field(default_factory=dict)

    @property
    def is_low(self) -> bool:
        """Whether most gradients leave late, and not just because something has to be last."""
        enough_bytes = _ENOUGH * self.total_bytes
        return self.early_bytes < enough_bytes and self.late_in_cut_bytes < enough_bytes

    def __str__(self) -> str:
        def share(num_bytes: int) -> str:
            return f"{100 * num_bytes / self.total_bytes:.0f} %"

        causes = []
        reasons = sorted(self.late_in_whole_bytes.items(), key=lambda item: -item[1])
        for reason, num_bytes in reasons:
            sentence = reason.value.partition(";")[0]  # behind it stands what could be done
            causes.append(
                f"{share(num_bytes)} in graphs compiled whole ({shorten(self.graphs[reason])}), "
                f"because {sentence}"
            )
        if self.waiting_bytes:
            causes.append(f"{share(self.waiting_bytes)} in buckets that wait for these")
        if self.late_in_cut_bytes:
            causes.append(f"{share(self.late_in_cut_bytes)} in the last section of a backward")
        return (
            f"only {share(self.early_bytes)} of the gradients ({format_bytes(self.early_bytes)} of "
            f"{format_bytes(self.total_bytes)}) leave before the last tenth of a backward, so "
            f"little communication is hidden behind it. The others: {'; '.join(causes)}. "
            "ddpopt.explain(model) shows each graph, TORCH_LOGS=graph_breaks where a forward breaks"
        )


def find_departures(
    runs: Sequence[tuple[Cut, Sequence[Parameter]]], buckets: Sequence[Sequence[Parameter]]
) -> Departures:
    """How many bytes of gradients leave a forward's backward early, and why the others do not.

    No bucket is taken to wait for a parameter that no graph uses: the loss's parameters arrive
    first, and a layer that runs eagerly releases its gradients as early as in eager DDP.

    Args:
        runs: the graphs that ran, in forward order, each with the parameters that it uses.
        buckets: the Reducer's, in launch order.
    """
    # The sections and whole graphs that backward runs, in that order, each with its graph's cut and
    # the number of its calls: a rough measure of its time. A graph that stays whole, or is cut in
    # forward, counts by its forward's calls.
    units: list[tuple[Cut, int]] = []
    # For each parameter, the last unit in which its gradient is computed. Graphs may share it.
    unit_of: dict[ParameterIndex, int] = {}
    for cut, used in reversed(runs):
        sections = cut.sections or (cut.as_one_section(),)
        if cut.split == "forward":
            sections = sections[::-1]  # as backward runs them
        section_of = {name: k for k, section in enumerate(sections) for name in section.parameters}
        for parameter in used:
            # One that no section names is taken to be final at the graph's end.
            section = section_of.get(parameter.name, len(sections) - 1)
            unit_of[parameter.index] = len(units) + section
        units += [(cut, section.num_nodes) for section in sections]
    num_done = list(itertools.accumulate(num_calls for _, num_calls in units))
    num_in_all = num_done[-1] if num_done else 0
    is_early = [num_in_all - done >= _STILL_TO_COME * num_in_all for done in num_done]

    early_bytes = late_in_cut_bytes = waiting_bytes = 0
    late_in_whole_bytes: dict[Reason, int] = defaultdict(int)
    graphs: dict[Reason, list[str]] = defaultdict(list)
    leaves_early = True  # buckets are launched in order
    for bucket in buckets:
        units_of_bucket = [unit_of[p.index] for p in bucket if p.index in unit_of]
        leaves_early = leaves_early and all(is_early[unit] for unit in units_of_bucket)
        for parameter in bucket:
            unit = unit_of.get(parameter.index)
            if leaves_early:
                early_bytes += parameter.num_bytes
            elif unit is None or is_early[unit]:
                waiting_bytes += parameter.num_bytes
            else:
                cut, _ = units[unit]
                if cut.fallback is None:
                    late_in_cut_bytes += parameter.num_bytes
                    continue
                late_in_whole_bytes[cut.fallback] += parameter.num_bytes
                if cut.graph not in graphs[cut.fallback]:
                    graphs[cut.fallback].append(cut.graph)
    return Departures(
        total_bytes=sum(parameter.num_bytes for bucket in buckets for parameter in bucket),
        early_bytes=early_bytes,
        late_in_cut_bytes=late_in_cut_bytes,
        waiting_bytes=waiting_bytes,
        late_in_whole_bytes=dict(late_in_whole_bytes),
        graphs=dict(graphs),
    )


def watch(ddp: DistributedDataParallel) -> None:
    """Warn once, on rank 0, if most gradients leave late when training has settled.

    Called whenever something is compiled for the module, so that it is looked at again then.
    """
    if _are_told.get(ddp) or find_subscriber(ddp, _Watch) is not None:
        return
    if state.logs_for_all_ranks(ddp):
        subscribe(ddp, _Watch())


class _Watch(Subscriber):
    """Waits until training has settled, and then warns if most gradients leave late."""

    def __init__(self) -> None:
        self._num_graphs = 0
        self._num_forwards = 0  # that communicate, since the last compile

    def after_forward(self, ddp: DistributedDataParallel, forward: Forward) -> None:
        """Look at what ran, in the first forward in which training has settled."""
        known = state.get(ddp)
        if not will_communicate(ddp):
            return
        self._num_forwards += 1
        # Count anew when more is compiled. While better buckets are searched for, those that DDP
        # has now are not its last.
        if len(known.cuts) != self._num_graphs or known.goal is Goal.SEARCHED:
            self._num_graphs, self._num_forwards = len(known.cuts), 0
        if self._num_forwards < _NUM_SETTLED:
            return
        unsubscribe(ddp, _Watch)
        try:
            self._warn_of_late_gradients(ddp, known)
        except Exception as error:
            # DDP's log and its Reducer are asked, which may raise anything in a release that nobody
            # has seen. It costs the warning, and nothing else.
            _logs.info("when gradients leave is not known: %r", error)

    def _warn_of_late_gradients(self, ddp: DistributedDataParallel, known: state.DDPState) -> None:
        """Warn if most gradients leave late, though some buckets might leave early."""
        by_index = known.buckets
        if _torch.has_comm_hook(ddp) or by_index is None or len(by_index) < 2:
            # An algorithm communicates when it pleases; one bucket leaves when all is done.
            return
        parameters = {p.index: p for p in _torch.reducer_parameters(ddp).values()}
        # A Reducer that does not tell its parameters may have one more, which was frozen since.
        buckets = [[parameters[i] for i in bucket if i in parameters] for bucket in by_index]
        departures = find_departures(known.runs_with_gradients, buckets)
        if departures.is_low:
            _are_told.set(ddp, True)
            _logs.warning("%s", departures)
