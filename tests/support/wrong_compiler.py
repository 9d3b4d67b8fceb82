"""An inner compiler that is wrong, for tests of what should find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from ddpopt import _torch


def scale_a_gradient(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile so that the first parameter's gradient is one percent too large."""
    compiled = _torch.lookup_backend("aot_eager")(gm, inputs)

    def run(*args: Any) -> Any:
        values = list(args)
        for place, value in enumerate(values):
            if isinstance(value, nn.Parameter):
                values[place] = value.view_as(value)
                values[place].register_hook(lambda gradient: gradient * 1.01)
                break
        return compiled(*values)

    return run
