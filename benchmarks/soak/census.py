"""What a process holds: memory, file descriptors, threads, tensors, objects, ddpopt's registries.

It counts, says what grew, and whether that is more than torch's own.
"""

from __future__ import annotations

import collections
import gc
import os
import statistics
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx.graph_module import _loader

PERIODS_COMPARED = 4  # of a long run: from the second quarter to the last
# What malloc gives back late and what fragments: eager DDP, which keeps nothing, was seen to move
# by as much. A float a step would be 40 KiB over 10,000 steps, a set of gradients each 125 MiB.
_SLACK_MIB = 4.0
# torch keeps a compiled graph's guards, of which ours is one more (torch 2.11 to 2.13).
_MORE_OBJECTS = 0.05
_OBJECTS_A_SOURCE = 3
_NOISE_OBJECTS = 10 * PERIODS_COMPARED  # one a step would be thousands

Counts = Mapping[str, float]  # of a census, by measure

_STATUS = Path("/proc/self/status")
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_SIZED = (dict, list, set, *_WEAK)
_LEAST = 8  # counts in a series
MEASURES = ("rss_mib", "num_fds", "num_threads", "num_tensors", "num_objects", "num_sources")


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What one process holds after `step` steps.

    `num_threads` are the kernel's, `num_tensors` the Python objects of class Tensor, `num_objects`
    all that Python's garbage collector tracks, and `types` those by class. `num_sources` are the
    FX graphs whose code torch keeps for tracebacks as long as the process lives. `registries` are
    the lengths of the containers in the globals of ddpopt's modules, by their names, as
    `ddpopt.split.state._states`.
    """

    step: int
    rss_mib: float
    num_fds: int
    num_threads: int
    num_tensors: int
    num_objects: int
    num_sources: int
    types: Mapping[str, int]
    registries: Mapping[str, int]

    def measures(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("step", *MEASURES)}


def take_census(step: int) -> Census:
    """Count, after what is in cycles has been collected."""
    for _ in range(2):  # finalizers make garbage of their own
        gc.collect()
    types: collections.Counter[str] = collections.Counter()
    num_tensors = 0
    for found in gc.get_objects():
        kind = type(found)  # `isinstance` would ask proxies for what they stand for
        num_tensors += issubclass(kind, torch.Tensor)
        types[repr(kind)] += 1
    return Census(
        step=step,
        rss_mib=_status("VmRSS") / 1024,
        num_fds=len(os.listdir("/proc/self/fd")) - 1,  # of which one lists them
        num_threads=_status("Threads"),
        num_tensors=num_tensors,
        num_objects=types.total(),
        num_sources=len(_loader.eval_cache),
        types=types,
        registries=registries(),
    )


def registries() -> dict[str, int]:
    """Return the length of each container that a module of ddpopt's keeps."""
    return {
        f"{name}.{attribute}": len(value)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "ddpopt"
        for attribute, value in list(vars(module).items())
        if isinstance(value, _SIZED) and not attribute.startswith("__")
    }


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise ValueError(f"{_STATUS} has no {field}")


# ---- growth -----------------------------------------------------------------------------------


def growth_of(series: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return how much more there is in the last quarter of a series than in the second.

    `series` has `Census.measures` at equal distances. Medians are compared, so that no single
    count decides; the first quarter is the warm-up.

    Raises:
        ValueError: there are less than eight counts, two a quarter.
    """
    if len(series) < _LEAST:
        raise ValueError(f"{len(series)} counts are no series; take {_LEAST} or more")
    quarter = len(series) // 4
    second, last = series[quarter : 2 * quarter], series[-quarter:]
    medians = [
        {name: statistics.median(counts[name] for counts in part) for name in ("step", *MEASURES)}
        for part in (second, last)
    ]
    return {name: later - medians[0][name] for name, later in medians[1].items()}


def grown_types(before: Census, after: Census) -> dict[str, int]:
    more = {kind: num - before.types.get(kind, 0) for kind, num in after.types.items()}
    ordered = sorted(more.items(), key=lambda item: -item[1])
    return {kind: num for kind, num in ordered if num > 0}


def grown_registries(before: Census, after: Census) -> dict[str, int]:
    """Return which of ddpopt's registries hold more than before, and how much more."""
    more = {name: n - before.registries.get(name, 0) for name, n in after.registries.items()}
    return {name: num for name, num in more.items() if num > 0}


# ---- the verdict ------------------------------------------------------------------------------


def find_growth(own: Sequence[Counts], unsplit: Sequence[Counts] | None) -> list[str]:
    """Say of what a rank of ddpopt held more and more; nothing is good.

    `unsplit` is the same rank's series under torch's own compile; without it, nothing is torch's.
    """
    mine = growth_of(own)
    theirs = growth_of(unsplit) if unsplit else dict.fromkeys(mine, 0.0)
    found = [
        f"{name} by {mine[name]:.0f}"
        for name in ("num_fds", "num_threads", "num_tensors")
        if mine[name] > max(0.0, theirs[name])
    ]
    allowed = max(0.0, _without_sources(theirs)) * (1 + _MORE_OBJECTS)
    if _without_sources(mine) > allowed + _NOISE_OBJECTS:
        found.append(
            f"num_objects by {_without_sources(mine):.0f}, of which torch's own are {allowed:.0f}"
        )
    if mine["rss_mib"] > max(0.0, theirs["rss_mib"]) + _SLACK_MIB:
        found.append(f"rss_mib by {mine['rss_mib']:.1f}")
    return found


def _without_sources(growth: Counts) -> float:
    return growth["num_objects"] - _OBJECTS_A_SOURCE * growth["num_sources"]
