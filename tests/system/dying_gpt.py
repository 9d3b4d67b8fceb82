"""examples/train_gpt.py, in which a rank is killed in torchrun's first attempt, in no later one.

Run by torchrun with the place (`step` or `write`) before the example's own arguments.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_gpt

KILLED_IN_STEP = 13
KILLED_IN_WRITE = 2

steps = itertools.count(1)
writes = itertools.count(1)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_step(*_: Any) -> None:
    """Leave the other rank in the step's backward or in the next one's."""
    if next(steps) == KILLED_IN_STEP:
        _die()


def _die_in_write(state: object, file: BinaryIO) -> None:
    """As torch.save, but end when half of the file is written."""
    start = file.tell()
    save(state, file)
    if next(writes) == KILLED_IN_WRITE:
        file.truncate((start + file.tell()) // 2)
        file.flush()
        _die()


save = torch.save
place = sys.argv.pop(1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if place == "step" and os.environ["RANK"] == "1":
        register_optimizer_step_pre_hook(_die_in_step)
    if place == "write":
        torch.save = _die_in_write
train_gpt.main()
