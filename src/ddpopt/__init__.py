"""ddpopt: overlap DDP's gradient communication with a compiled backward.

`torch.compile(ddp_model, backend="ddpopt")` needs no import of this package; import it to inspect
(`explain`, `record`), to check before a long run (`verify`, `warmup`), to find better buckets
(`plan`, `rebucket`, `simulate`), to communicate less (`algorithms`) or to switch it off (`config`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpopt import algorithms, config
from ddpopt._files import installed_version
from ddpopt.bucketing.ahead import plan
from ddpopt.bucketing.calibrate import calibrate
from ddpopt.bucketing.costs import AllreduceCost, Gradient, Network, Profile
from ddpopt.bucketing.device import Device, measure_device
from ddpopt.bucketing.estimate import estimate
from ddpopt.bucketing.plan import BucketPlan, PlannedBucket
from ddpopt.bucketing.rebucket import rebucket
from ddpopt.bucketing.simulate import Simulation, Stragglers, simulate
from ddpopt.bucketing.timeline import Timeline
from ddpopt.checks.verify import Verification, verify
from ddpopt.checks.warmup import warmup
from ddpopt.errors import (
    AbsentGradientError,
    AttachError,
    DDPOptError,
    DisagreementError,
    Fallback,
    ForwardInstead,
    NonFiniteError,
    OptionError,
    PeerError,
    PlanError,
    RecomputationError,
    TorchDriftError,
    TraceError,
    UnsupportedModeError,
    VerificationError,
)
from ddpopt.inspection.explain import Explanation, explain
from ddpopt.inspection.metrics import metrics
from ddpopt.inspection.recorder import record
from ddpopt.inspection.recording import Recording
from ddpopt.inspection.traces import merge_traces

if TYPE_CHECKING:
    from ddpopt.data_parallel.module import DataParallel

__all__ = [
    "AbsentGradientError",
    "AllreduceCost",
    "AttachError",
    "BucketPlan",
    "DDPOptError",
    "DataParallel",
    "Device",
    "DisagreementError",
    "Explanation",
    "Fallback",
    "ForwardInstead",
    "Gradient",
    "Network",
    "NonFiniteError",
    "OptionError",
    "PeerError",
    "PlanError",
    "PlannedBucket",
    "Profile",
    "RecomputationError",
    "Recording",
    "Simulation",
    "Stragglers",
    "Timeline",
    "TorchDriftError",
    "TraceError",
    "UnsupportedModeError",
    "Verification",
    "VerificationError",
    "algorithms",
    "calibrate",
    "config",
    "estimate",
    "explain",
    "measure_device",
    "merge_traces",
    "metrics",
    "plan",
    "rebucket",
    "record",
    "simulate",
    "verify",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """Import `DataParallel` on first use: to keep its forward from Dynamo, it imports Dynamo."""
    if name == "__version__":
        return installed_version()
    if name == "DataParallel":
        from ddpopt.data_parallel.module import DataParallel  # noqa: PLC0415

        return DataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
