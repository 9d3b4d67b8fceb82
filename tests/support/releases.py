"""What a release of torch lacks, for tests that need it."""

from __future__ import annotations

import pytest

from ddpopt._torch.names import installed_release

# AOTAutograd's cache stores what ddpopt compiled from torch 2.13 on.
CACHES_OUR_CODE = installed_release() >= (2, 13)

needs_our_code_in_caches = pytest.mark.skipif(
    not CACHES_OUR_CODE, reason="before torch 2.13 AOTAutograd's cache stores no cut backward"
)
needs_delayed_parameters = pytest.mark.skipif(
    installed_release() < (2, 12),
    reason="torch 2.11's DDP takes no fractional bucket_cap_mb where parameters are delayed",
)
