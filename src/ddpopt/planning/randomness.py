"""The state of all random number generators that a model's forward may draw from."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def restoring_randomness(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Restore torch's, Python's and numpy's random number state at the end of the block.

    Yields a function that resets it to its initial value, so that each step draws the same numbers.
    The accelerators that hold the model's parameters are included.
    """
    numpy: Any = sys.modules.get("numpy")  # it has drawn nothing if nobody has imported it
    device_states = states_on_devices(model)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None

    def restore() -> None:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        for device, device_state in device_states.items():
            torch.get_device_module(device).set_rng_state(device_state, device)

    try:
        yield restore
    finally:
        restore()


def states_on_devices(model: torch.nn.Module) -> dict[torch.device, torch.Tensor]:
    """The generators' states of the accelerators that hold the model's parameters."""
    without = ("cpu", "meta")  # the CPU's is torch's own, and meta tensors draw nothing
    devices = {p.device: None for p in model.parameters() if p.device.type not in without}
    return {device: torch.get_device_module(device).get_rng_state(device) for device in devices}
