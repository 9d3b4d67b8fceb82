"""ddpopt: overlap DDP's gradient communication with a compiled backward.

`torch.compile(ddp_model, backend="ddpopt")` needs no import of this package; import it to inspect
(`explain`, `record`), to check before a long run (`verify`, `warmup`), to find better buckets
(`plan`, `rebucket`, `simulate`), to communicate less (`algorithms`) or to switch it off (`config`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddpopt import algorithms, config
from ddpopt.bucket_plan import BucketPlan, PlannedBucket
from ddpopt.calibration import calibrate
from ddpopt.errors import (
    AttachError,
    DDPOptError,
    DisagreementError,
    Fallback,
    ForwardInstead,
    NonFiniteError,
    OptionError,
    PeerError,
    PlanError,
    SectionCompileError,
    TorchDriftError,
    TraceError,
    UnsupportedModeError,
    VerificationError,
)
from ddpopt.faults import naming_peers
from ddpopt.inspection.recording import record
from ddpopt.inspection.report import Explanation, explain
from ddpopt.inspection.traces import merge_traces
from ddpopt.parallel.data_parallel import DataParallel
from ddpopt.planning.costs import AllreduceCost, Gradient, Network, Profile
from ddpopt.planning.device import Device, measure_device
from ddpopt.planning.timeline import Timeline
from ddpopt.rebucketing import rebucket
from ddpopt.recorded import Recording
from ddpopt.simulator import Simulation, Stragglers, simulate
from ddpopt.verification import Verification, verify
from ddpopt.warming import warmup

if TYPE_CHECKING:
    from ddpopt.estimation import estimate
    from ddpopt.planning_ahead import plan

# What reads graphs imports networkx, and takes half a second: not for those who only compile.
_IMPORTED_WHEN_USED = {"estimate": "ddpopt.estimation", "plan": "ddpopt.planning_ahead"}


def __getattr__(name: str) -> Any:
    """Import what is only imported when it is used."""
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_WHEN_USED[name]), name)


__all__ = [
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
    "Recording",
    "SectionCompileError",
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
    "naming_peers",
    "plan",
    "rebucket",
    "record",
    "simulate",
    "verify",
    "warmup",
]
