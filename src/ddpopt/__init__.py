"""ddpopt: overlap DDP's gradient communication with a compiled backward.

`torch.compile(ddp_model, backend="ddpopt")` needs no import of this package; import it to inspect
(`explain`), to find better buckets (`plan`, `rebucket`, `simulate`) or to switch it off (`config`).
"""

from ddpopt import config
from ddpopt.bucket_plan import BucketPlan, PlannedBucket
from ddpopt.calibration import calibrate
from ddpopt.errors import (
    DDPOptError,
    Fallback,
    ForwardInstead,
    OptionError,
    PlanError,
    SectionCompileError,
    TorchDriftError,
    UnsupportedModeError,
)
from ddpopt.estimate import estimate
from ddpopt.inspection.observe import observe
from ddpopt.inspection.report import Explanation, explain
from ddpopt.planning.costs import AllreduceCost, Gradient, Network, Profile
from ddpopt.planning.device import Device, measure_device
from ddpopt.planning.timeline import Timeline
from ddpopt.planning_ahead import plan
from ddpopt.rebucketing import rebucket
from ddpopt.simulator import Simulation, Stragglers, simulate

__all__ = [
    "AllreduceCost",
    "BucketPlan",
    "DDPOptError",
    "Device",
    "Explanation",
    "Fallback",
    "ForwardInstead",
    "Gradient",
    "Network",
    "OptionError",
    "PlanError",
    "PlannedBucket",
    "Profile",
    "SectionCompileError",
    "Simulation",
    "Stragglers",
    "Timeline",
    "TorchDriftError",
    "UnsupportedModeError",
    "calibrate",
    "config",
    "estimate",
    "explain",
    "measure_device",
    "observe",
    "plan",
    "rebucket",
    "simulate",
]
