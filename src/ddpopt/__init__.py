"""ddpopt: overlap DDP's gradient communication with a compiled backward.

`torch.compile(ddp_model, backend="ddpopt")` needs no import of this package; import it to inspect
(`explain`) or to switch it off (`config`).
"""

from ddpopt import config
from ddpopt.errors import (
    DDPOptError,
    Fallback,
    ForwardInstead,
    OptionError,
    SectionCompileError,
    TorchDriftError,
    UnsupportedModeError,
)
from ddpopt.inspection.observe import observe
from ddpopt.inspection.report import Explanation, explain

__all__ = [
    "DDPOptError",
    "Explanation",
    "Fallback",
    "ForwardInstead",
    "OptionError",
    "SectionCompileError",
    "TorchDriftError",
    "UnsupportedModeError",
    "config",
    "explain",
    "observe",
]
