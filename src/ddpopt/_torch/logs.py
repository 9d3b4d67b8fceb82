"""torch's loggers and its structured trace; what is lost where a name has moved goes there too."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ddpopt._torch import names
from ddpopt.errors import TorchDriftError

# TORCH_LOGS knows loggers by the modules of torch that own them: a child of this one is heard
# under dynamo, distributed and ddp alike.
LOG_NAME = f"{names.DDP_OPTIMIZER.owner}.ddpopt"


@functools.cache
def do_without(missing: str, need: names.Need) -> None:
    """Warn, once a process, of a missing name without which only one thing is lost."""
    logging.getLogger(LOG_NAME).warning("%s; training is split without %s", missing, need.value)


def artifact_logger(module: str, artifact: str) -> logging.Logger:
    """Return the logger that `TORCH_LOGS=<artifact>` turns on, or a silent one where it moved."""
    try:
        logger: logging.Logger = names.ARTIFACT_LOGGER.get()(module, artifact)
    except TorchDriftError as error:
        do_without(str(error), names.Need.LOGS)
        return logging.getLogger(f"{module}.{artifact}")
    return logger


def trace_structured(name: str, metadata: dict[str, Any], payload: Callable[[], str]) -> None:
    """Write a payload to torch's structured trace, which tlparse reads; nothing when it is off."""
    try:
        trace = names.TRACE_STRUCTURED.get()
    except TorchDriftError as error:
        do_without(str(error), names.Need.TRACE)
        return
    trace(name, lambda: metadata, payload_fn=payload)
