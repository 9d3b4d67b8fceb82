"""What a process holds, what of it grew, and whether that is more than torch's own."""

from __future__ import annotations

import collections
import gc
import os
import statistics
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_SIZED = (dict, list, set, *_WEAK)
_LEAST = 8  # counts in a series
MEASURES = ("rss_mib", "num_fds", "num_threads", "num_tensors", "num_objects", "num_sources")

Counts = Mapping[str, float]  # by measure, and of a long run by `step`


class Census(NamedTuple):
    """What one process holds.

    In `counts`, `num_threads` are the kernel's, `num_tensors` the Python objects of class Tensor,
    `num_objects` all that Python's garbage collector tracks, and `num_sources` the FX graphs whose
    code torch keeps for tracebacks as long as the process lives. `types` are the objects by class,
    `registries` the lengths of the containers in the globals of ddpopt's modules, by their names.
    """

    counts: Counts
    types: Counts
    registries: Counts


def take_census() -> Census:
    """Count, after what is in cycles has been collected."""
    for _ in range(2):  # finalizers make garbage of their own
        gc.collect()
    kinds = [type(found) for found in gc.get_objects()]  # `isinstance` would ask proxies
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    registries = {
        f"{name}.{attribute}": len(value)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "ddpopt"
        for attribute, value in list(vars(module).items())
        if isinstance(value, _SIZED) and not attribute.startswith("__")
    }
    values = (
        int(status["VmRSS"].split()[0]) / 1024,
        len(os.listdir("/proc/self/fd")) - 1,  # of which one lists them
        int(status["Threads"]),
        sum(issubclass(kind, torch.Tensor) for kind in kinds),
        len(kinds),
        len(_loader.eval_cache),
    )
    counts = dict(zip(MEASURES, values, strict=True))
    return Census(counts, collections.Counter(map(repr, kinds)), registries)


def grown(before: Counts, after: Counts) -> dict[str, float]:
    """Return of what there is more than before, and how much, the most first."""
    more = {name: value - before.get(name, 0) for name, value in after.items()}
    ordered = sorted(more.items(), key=lambda item: -item[1])
    return {name: value for name, value in ordered if value > 0}


def growth_of(series: Sequence[Counts]) -> dict[str, float]:
    """Return how much more there is in the last quarter of a series than in the second.

    Counts are at equal distances. Medians are compared, so that no single count decides; the first
    quarter is the warm-up.

    Raises:
        ValueError: there are less than eight counts, two a quarter.
    """
    if len(series) < _LEAST:
        raise ValueError(f"{len(series)} counts are no series; take {_LEAST} or more")
    quarter = len(series) // 4

    def median(part: Sequence[Counts], name: str) -> float:
        return statistics.median(counts[name] for counts in part)

    second, last = series[quarter : 2 * quarter], series[-quarter:]
    return {name: median(last, name) - median(second, name) for name in ("step", *MEASURES)}


def find_growth(ddpopts: Sequence[Counts], unsplits: Sequence[Counts] | None) -> list[str]:
    """Return what a rank held more and more of, beyond what torch keeps: none is a pass.

    The series are of one rank, with ddpopt and with torch's own compile. Without the second, all
    growth counts as ddpopt's.
    """
    ours = growth_of(ddpopts)
    torchs = growth_of(unsplits) if unsplits else dict.fromkeys(ours, 0.0)
    growing = [
        f"{name} by {ours[name]:.0f}"
        for name in ("num_fds", "num_threads", "num_tensors")
        if ours[name] > max(0.0, torchs[name])
    ]
    allowed = max(0.0, _without_sources(torchs)) * (1 + _MORE_OBJECTS)
    if _without_sources(ours) > allowed + _NOISE_OBJECTS:
        growing.append(
            f"num_objects by {_without_sources(ours):.0f}, of which torch's own are {allowed:.0f}"
        )
    if ours["rss_mib"] > max(0.0, torchs["rss_mib"]) + _SLACK_MIB:
        growing.append(f"rss_mib by {ours['rss_mib']:.1f}")
    return growing


def _without_sources(growth: Counts) -> float:
    return growth["num_objects"] - _OBJECTS_A_SOURCE * growth["num_sources"]
