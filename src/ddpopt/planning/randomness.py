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
    numpy: Any = sys.modules.get("numpy")
    on_devices = states_on_devices(model)
    before, pythons = torch.get_rng_state(), random.getstate()
    numpys = numpy.random.get_state() if numpy else None

    def restore() -> None:
        torch.set_rng_state(before)
        random.setstate(pythons)
        if numpy:
            numpy.random.set_state(numpys)
        for device, own in on_devices.items():
            torch.get_device_module(device).set_rng_state(own, device)

    try:
        yield restore
    finally:
        restore()


def states_on_devices(model: torch.nn.Module) -> dict[torch.device, torch.Tensor]:
    """The generators' states of the accelerators that hold the model's parameters."""
    without = ("cpu", "meta")  # the CPU's is torch's own, and meta tensors draw nothing
    devices = {p.device: None for p in model.parameters() if p.device.type not in without}
    return {device: torch.get_device_module(device).get_rng_state(device) for device in devices}
