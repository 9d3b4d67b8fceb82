"""What makes compiling in tests take less time, without a difference that a test could see."""

from __future__ import annotations

import gc
import os

import torch
from torch._dynamo import guards, utils
from torch._inductor import config

_TIMES_RARER = 20
_CONFIGURATION_AS_JSON = [
    f"_{whose}_config_for_logging"
    for whose in ("get_dynamo", "scrubbed_inductor", "compiler", "functorch")
]


def speed_up_compiles() -> None:
    """Have this process, and those it starts, spend no time on what no test is about; for good.

    Dynamo measures each graph's guards after a flush of the CPU's caches, 18 ms, for its log alone,
    for which it also writes all configuration of torch as JSON.
    A tenth of the time goes into looking for cycles among the objects that compiling makes.
    Inductor compiles programs to see what the processor can do, 6 s for each new cache; it may
    believe the processor. And tests have one thread each, as they run beside each other.
    """
    guards.profile_guard_manager = lambda *_: 0.0
    for name in _CONFIGURATION_AS_JSON:
        setattr(utils, name, lambda: None)
    first, *others = gc.get_threshold()
    gc.set_threshold(_TIMES_RARER * first, *others)
    gc.freeze()  # to look through torch takes 150 ms
    config.cpp.vec_isa_ok = True
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
