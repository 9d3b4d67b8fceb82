"""torch's logs and its structured trace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ddpopt._torch import names


def graph_logger() -> logging.Logger:
    """The logger that `TORCH_LOGS=ddp_graphs` turns on, or a silent one if it has moved."""
    with names.doing_without(names.Need.LOGS):
        return names.ARTIFACT_LOGGER.get()(names.LOG_NAME, "ddp_graphs")
    return logging.getLogger(f"{names.LOG_NAME}.ddp_graphs")


def trace_structured(name: str, metadata: dict[str, Any], payload: Callable[[], str]) -> None:
    """Write a payload to torch's structured trace, which tlparse reads; do nothing if it is off."""
    with names.doing_without(names.Need.TRACE):
        names.TRACE_STRUCTURED.get()(name, lambda: metadata, payload_fn=payload)
