"""The environment in which torchrun starts a rank, for a rank that a test started."""

from __future__ import annotations

import contextlib
import os
from unittest import mock


def as_torchrun(rank: int) -> contextlib.AbstractContextManager[object]:
    """Set torchrun's variables in this block, for one of two ranks on one node."""
    variables = {
        "GROUP_RANK": "0",
        "LOCAL_RANK": f"{rank}",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",  # nobody meets there, since the tests' ranks have a group
        "RANK": f"{rank}",
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "2",
    }
    return mock.patch.dict(os.environ, variables)
