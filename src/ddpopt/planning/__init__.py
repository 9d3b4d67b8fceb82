"""Which buckets are best: costs, predictions for any cluster, and the search."""

from ddpopt.planning.costs import AllreduceCost, Gradient, Network, Profile
from ddpopt.planning.device import Device, measure_device
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
