"""The device on which tests of training run: the CPU, or what TEST_DEVICE says, as `cuda`.

`python -m tests.gpu` sets it, and names the tests that take their device from here.
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
# NCCL refuses two ranks on one GPU: there gloo reduces for them, and NCCL for one.
ONE_RANK_BACKEND = "nccl" if DEVICE.type == "cuda" else "gloo"


def compute_exactly() -> None:
    """Have convolutions on a GPU compute the same twice, and float32 with all its bits."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
