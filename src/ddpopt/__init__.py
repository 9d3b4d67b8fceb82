"""ddpopt: overlap DDP's gradient communication with a compiled backward.

`torch.compile(ddp_model, backend="ddpopt")` needs no import of this package; import it to inspect
(`explain`) or to switch it off (`config`).
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
from ddpopt.inspection.observe import observe
from ddpopt.inspection.report import Explanation, explain
from ddpopt.planning.costs import AllreduceCost, Gradient, Network, Profile
from ddpopt.planning.timeline import Timeline
from ddpopt.rebucketing import rebucket

__all__ = [
    "AllreduceCost",
    "BucketPlan",
    "DDPOptError",
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
    "Timeline",
    "TorchDriftError",
    "UnsupportedModeError",
    "calibrate",
    "config",
    "explain",
    "observe",
    "rebucket",
]
