"""ddpopt: overlap DDP's gradient communication with a compiled backward.

`torch.compile(ddp_model, backend="ddpopt")` needs no import of this package; import it to inspect
(`explain`, `record`), to check before a long run (`verify`, `warmup`), to find better buckets
(`plan`, `rebucket`, `planning`), to communicate less (`algorithms`) or to switch it off (`config`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpopt import algorithms, config, errors, planning
from ddpopt._text import installed_version
from ddpopt.checks.verify import verify
from ddpopt.checks.warmup import warmup
from ddpopt.errors import DDPOptError
from ddpopt.inspection.explain import explain
from ddpopt.inspection.metrics import metrics
from ddpopt.inspection.recorder import record
from ddpopt.planning.calibrate import calibrate
from ddpopt.planning.plan import BucketPlan, plan
from ddpopt.planning.rebucket import rebucket

if TYPE_CHECKING:
    from ddpopt.data_parallel import DataParallel

__all__ = [
    "BucketPlan",
    "DDPOptError",
    "DataParallel",
    "algorithms",
    "calibrate",
    "config",
    "errors",
    "explain",
    "metrics",
    "plan",
    "planning",
    "rebucket",
    "record",
    "verify",
    "warmup",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import `DataParallel` on first use: to keep its forward from Dynamo, it imports Dynamo."""
    if name == "__version__":
        return installed_version()
    if name == "DataParallel":
        from ddpopt.data_parallel import DataParallel  # noqa: PLC0415

        return DataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
