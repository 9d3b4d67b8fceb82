"""How a DDP module's graph was cut."""

from __future__ import annotations

from typing import Any

import ddpopt
from ddpopt.split.cut import Cut


def only_cut(module: Any) -> Cut:
    """Return the cut of a module with one graph; of several, this fails."""
    (cut,) = ddpopt.explain(module).cuts
    return cut
