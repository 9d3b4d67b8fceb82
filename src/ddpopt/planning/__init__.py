"""Which buckets are best: costs, predictions for any cluster, and the search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpopt._lazy import import_from

if TYPE_CHECKING:
    from ddpopt.planning.calibrate import measure_device
    from ddpopt.planning.costs import AllreduceCost, Device, Gradient, Network, Profile
    from ddpopt.planning.estimates import estimate
    from ddpopt.planning.plan import PlannedBucket
    from ddpopt.planning.simulation import Simulation, Stragglers, simulate
    from ddpopt.planning.timeline import Timeline

__all__ = [
    "AllreduceCost",
    "Device",
    "Gradient",
    "Network",
    "PlannedBucket",
    "Profile",
    "Simulation",
    "Stragglers",
    "Timeline",
    "estimate",
    "measure_device",
    "simulate",
]

_WHERE = {
    "calibrate": "measure_device",
    "costs": "AllreduceCost Device Gradient Network Profile",
    "estimates": "estimate",
    "plan": "PlannedBucket",
    "simulation": "Simulation Stragglers simulate",
    "timeline": "Timeline",
}


def __getattr__(name: str) -> Any:
    return import_from(__name__, _WHERE, name)
