"""The functions of ddpopt's that Dynamo may look into: it sees nothing else of this package.

Everything in the package's other files is hidden from it by `_torch/hidden.py`. So a function goes
here if Dynamo is to compile it, and no other function does. It calls no function of ours by name:
that function would be hidden, and break the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a replica of `DataParallel`'s, which compiles this function."""
    return module(*args, **kwargs)


def around_ddp_forward(
    original: Callable[..., Any],
    before: Callable[..., None],
    after: Callable[..., None],
    current_callback: Callable[[], Any],
) -> Callable[..., Any]:
    """A method for DDP in which it calls its module, between calls of `before` and `after`.

    These get the DDP module, the arguments, the keyword arguments and Dynamo's callback, which
    compiles frames in this thread. After a forward that raises, `after` is not called.
    """

    def run_ddp_forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # Dynamo traces through DDP's python_reducer
            return original(self, *inputs, **kwargs)
        # Asked here: while a function that is hidden from Dynamo runs, as `before`, there is none.
        callback = current_callback()
        before(self, inputs, kwargs, callback)
        output = original(self, *inputs, **kwargs)
        after(self, inputs, kwargs, callback)
        return output

    return run_ddp_forward


class TrialModel(nn.Module):
    """The small model that `ddpopt doctor` compiles: layers of equal width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x
