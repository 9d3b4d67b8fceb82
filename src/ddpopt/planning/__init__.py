"""Which buckets are best: costs, predictions for any cluster, and the search."""

from ddpopt.planning.calibrate import measure_device
from ddpopt.planning.costs import AllreduceCost, Device, Gradient, Network, PlannedBucket, Profile
from ddpopt.planning.estimates import estimate
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
