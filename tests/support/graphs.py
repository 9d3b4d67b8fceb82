"""Graphs for the tests of splits: one that Dynamo traces, and the cut of one written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ddpopt.reducer import Bucket, Parameter
from ddpopt.split.cut import Cut
from ddpopt.split.sections import BackwardSections


class Capture:
    """A backend that keeps the graph and inputs that Dynamo gave it, and runs that graph."""

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.gm, self.example_inputs = gm, list(example_inputs)
        return gm.forward


def forward_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> nn.Module:
    """Make a module with one parameter a shape whose forward is `function(parameters, x)`."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.ParameterList(torch.randn(shape) for shape in shapes)

        def forward(self, x: torch.Tensor) -> Any:
            return function(self.p, x)

    return Module()


def parameters(count: int) -> list[Parameter]:
    """Parameters p0, p1, ... of ten bytes each."""
    return [Parameter(index=i, name=f"p{i}", num_bytes=10, group="f32") for i in range(count)]


def buckets_of(
    arguments: Iterable[int], buckets: Sequence[Sequence[int]]
) -> tuple[dict[int, Parameter], list[Bucket]]:
    """Make a parameter for each argument, with its number, and buckets with these members."""
    parameters = {a: Parameter(index=a, name=f"p{a}", num_bytes=4, group="f32") for a in arguments}
    made = [
        Bucket(index=k, parameters=tuple(parameters[a] for a in members), cap_bytes=4)
        for k, members in enumerate(buckets)
    ]
    return parameters, made


def cut_from_sections(chosen: BackwardSections, arrival: tuple[Parameter, ...] = ()) -> Cut:
    """Return the record of a backward with these sections."""
    return Cut(
        graph="0/0",
        inner="eager",
        num_nodes=len(chosen.order),
        sections=chosen.sections,
        split="backward",
        arrival=arrival,
    )
