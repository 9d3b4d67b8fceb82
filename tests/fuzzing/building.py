"""Make the module of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuzzing.blocks import WIDTH, Part
from fuzzing.regions import KINDS
from fuzzing.spec import Block, Case


@dataclass
class Output:
    """What a model returns whose container is "dataclass"."""

    main: torch.Tensor
    more: dict[str, Any]


class Model(nn.Module):
    """A layer, the blocks of a case, a layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        earlier: list[nn.Linear] = []
        made = [_make(block, earlier) for block in case.blocks]
        if case.is_registered_in_reverse:
            self.last, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleDict({str(i): made[i] for i in reversed(range(len(made)))})
        else:
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleDict({str(i): module for i, module in enumerate(made)})
            self.last = nn.Linear(WIDTH, WIDTH)
        self.order = [str(i) for i in range(len(made))]
        self.case = case

    def forward(self, x: Any) -> Any:
        if isinstance(x, dict):
            x = x["x"]
        elif isinstance(x, list):
            x = x[0]
        given = x
        if self.case.is_input_mutated:
            x.mul_(0.5)
        x = hidden = torch.tanh(self.first(x.float()))
        for name in self.order:
            block = self.blocks[name]
            x = block(x.to(block.dtype))
        x = self.last(x.float())
        more = {name: _more(name, x, given, hidden) for name in self.case.outputs}
        if "penalty" in more:
            more["penalty"] = self.first.weight.square().sum() * 0.01
        if "parameter" in more:
            more["parameter"] = self.first.bias
        return _contain(self.case.container, x, more)


def _more(name: str, x: torch.Tensor, given: torch.Tensor, hidden: torch.Tensor) -> Any:
    """Return an output by its name."""
    if name in _OF_RESULT:
        return _OF_RESULT[name](x)
    return {"input": given, "hidden": hidden, "pieces": hidden.chunk(2, 1)}.get(name)


_OF_RESULT: dict[str, Callable[[torch.Tensor], Any]] = {
    "same": lambda x: x,
    "view": lambda x: x[:, ::2],
    "detached": lambda x: x.detach() * 2,
    "detached view": lambda x: x.detach(),
    "index": lambda x: x.argmax(1),
    "number": lambda x: (x.shape[0], 1.5, "text"),
}


def _contain(container: str, main: torch.Tensor, more: dict[str, Any]) -> Any:
    values = list(more.values())
    if container == "tuple":
        return (main, *values)
    if container == "list":
        return [main, *values]
    if container == "dict":
        return {"main": main, **more}
    if container == "nested":
        return ([main, (None, more)], {"more": tuple(values)})
    if container == "dataclass":
        return Output(main, more)
    return main


def _make(block: Block, earlier: list[nn.Linear]) -> Part:
    inner = [_make(part, earlier) for part in block.inner]
    module = KINDS[block.kind](block, inner, earlier)
    for name, parameter in module.named_parameters():
        if block.frozen == "all" or (block.frozen == "weight" and name.endswith("weight")):
            parameter.requires_grad_(False)
    if block.kind == "linear":
        earlier.append(module.layer)
    return module
