"""Make the module of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.system.fuzzing import subclasses
from tests.system.fuzzing.blocks import WIDTH, Part
from tests.system.fuzzing.effects import Effect
from tests.system.fuzzing.regions import KINDS
from tests.system.fuzzing.spec import Block, Case


@dataclass
class Output:
    """What a model returns whose container is "dataclass"."""

    main: torch.Tensor
    more: dict[str, Any]


class Region(nn.Module):
    """Blocks that are compiled together, and without what is around them."""

    def __init__(self, blocks: list[Part]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(blocks)
        self.dtype = blocks[0].dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x.to(part.dtype))
        return x


class Model(nn.Module):
    """A layer, the blocks of a case, a layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        earlier: list[nn.Linear] = []
        made: list[Any] = [_make(block, earlier) for block in case.blocks]
        if case.regions:
            made = [Region(made[i : i + 2]) for i in range(0, len(made), 2)]
        if case.is_registered_in_reverse:
            self.last, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleDict({str(i): made[i] for i in reversed(range(len(made)))})
        else:
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleDict({str(i): module for i, module in enumerate(made)})
            self.last = nn.Linear(WIDTH, WIDTH)
        for index, module in enumerate(self.modules()):
            if isinstance(module, Effect):
                module.name = f"{index} {module.kind}"
        self.head = 0
        if case.has_heads:
            self.second_last = nn.Linear(WIDTH, WIDTH)
        self.order = [str(i) for i in range(len(made))]
        self.case = case
        self.run = RUNS[case.regions]

    def forward(self, x: Any) -> Any:
        beside = None
        if isinstance(x, dict):
            x, beside = x["x"], x.get("beside")
        elif isinstance(x, list):
            x = x[0]
        given = x
        if self.case.input_writes:
            late = x.clone() if self.case.input_writes == "both" else x
            x.mul_(0.5)
            x = late
        hidden = torch.tanh(self.first(x.float()))
        if beside is not None:
            hidden = hidden + subclasses.used(self.first, beside)
        x = hidden
        for name in self.order:
            block = self.blocks[name]
            x = self.run(block, x.to(block.dtype))
        last = self.second_last if self.head else self.last
        x = last(x.float())
        more = {name: _more(name, x, given, hidden) for name in self.case.outputs}
        if "penalty" in more:
            more["penalty"] = self.first.weight.square().sum() * 0.01
        if "parameter" in more:
            more["parameter"] = self.first.bias
        if "parameter view" in more:
            more["parameter view"] = self.first.weight[:2].t()
        if self.case.input_writes == "both":
            given[0] = 2.0
            x = x + given.float()
        if "beside" in more:
            more["beside"] = None if beside is None else (beside, beside * 2)
        return _contain(self.case.container, x, more)

    def begin_step(self, step: int) -> None:
        if self.case.regions == "later" and step == max(1, self.case.num_steps - 2):
            self.run = _run_in_checkpoint

    def compile_regions(self, compile_: Callable[[Any], Any]) -> None:
        """Compile each region as `region.compile` does, or one function that runs any of them."""
        if self.case.regions == "function":
            compiled = compile_(_run_plainly)
            self.run = lambda block, x: checkpoint(compiled, block, x, use_reentrant=False)
            return
        for region in self.blocks.values():
            region._compiled_call_impl = compile_(region._call_impl)


def _run_plainly(block: nn.Module, x: torch.Tensor) -> Any:
    return block(x)


def _run_in_checkpoint(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block.__call__, x, use_reentrant=False)


def _run_in_unchecked(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block.__call__, x, use_reentrant=False, determinism_check="none")


def _run_in_two(block: nn.Module, x: torch.Tensor) -> Any:
    def run(y: torch.Tensor) -> Any:
        return checkpoint(block.__call__, y.sin(), use_reentrant=False).cos()

    return checkpoint(run, x, use_reentrant=False)


def _run_in_reentrant_checkpoint(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block.__call__, x, use_reentrant=True)


RUNS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "": _run_plainly,
    "plain": _run_plainly,
    "checkpoint": _run_in_checkpoint,
    "unchecked": _run_in_unchecked,
    "nested": _run_in_two,
    "later": _run_plainly,  # in a checkpoint from the last step but one on
    "function": _run_in_checkpoint,  # one compiled function for all
    "reentrant": _run_in_reentrant_checkpoint,
}


def _more(name: str, x: torch.Tensor, given: torch.Tensor, hidden: torch.Tensor) -> Any:
    """Return an output by its name."""
    if name in _OF_RESULT:
        return _OF_RESULT[name](x)
    of_all = {"input": given, "input view": given[:, ::2], "hidden": hidden}
    of_all["pieces"] = hidden.chunk(2, 1)
    return of_all.get(name)


_OF_RESULT: dict[str, Callable[[torch.Tensor], Any]] = {
    "same": lambda x: x,
    "view": lambda x: x[:, ::2],
    "detached": lambda x: x.detach() * 2,
    "detached view": lambda x: x.detach(),
    "index": lambda x: x.argmax(1),
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[:, :1].expand(-1, 4),
    "mask": lambda x: x > 0,
    "constant": lambda x: torch.ones(2, device=x.device),
    "complex": lambda x: torch.complex(x, x * 2),
    "jagged": subclasses.jagged,
    "pair": lambda x: subclasses.pair(x, x * 2),
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


def main_of(output: Any) -> torch.Tensor:
    """Return the main output of what a model returns."""
    while not isinstance(output, torch.Tensor):
        if isinstance(output, Output):
            output = output.main
        else:
            output = output["main"] if isinstance(output, dict) else output[0]
    return output


def _make(block: Block, earlier: list[nn.Linear]) -> Part:
    inner = [_make(part, earlier) for part in block.inner]
    module = KINDS[block.kind](block, inner, earlier)
    for name, parameter in module.named_parameters():
        if block.frozen == "all" or (block.frozen == "weight" and name.endswith("weight")):
            parameter.requires_grad_(False)
    if block.kind == "linear":
        earlier.append(module.layer)
    return module
