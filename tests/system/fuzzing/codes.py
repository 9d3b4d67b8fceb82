"""Compare the code of backward sections with their graphs, while a model trains.

The proof covers graphs, and what an inner compiler makes of them is not ours. But a section is a
graph that nobody else compiles, so a fault of Inductor's may show in ours alone. In the block of
`checking_code`, each section that was compiled there runs twice: its code, and its graph, call by
call, on copies of the inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx

from ddpopt.split import compiler
from ddpopt.split.backward import SectionGraph, compile_backward_sections
from ddpopt.split.gates import CompiledSection
from ddpopt.split.nodes import call_nodes, is_pure
from tests.system.training.comparing import TOLERANCES, relative_error

_LARGEST_SHOWN = 3  # graphs that differ, of one case


@dataclass(slots=True)
class CodeChecks:
    """What came of it: how many sections ran with other code than another, and what differed."""

    num_sections: int = 0
    differences: list[str] = field(default_factory=list)


@contextlib.contextmanager
def checking_code() -> Iterator[CodeChecks]:
    """Compare what is compiled in this block whenever it runs there.

    What comes from AOTAutograd's cache has no graph, so it is not compared. Neither are sections
    with effects, which would have them twice.
    """
    checks = CodeChecks()
    # By the identity of the compiled callable, which is kept so that no other gets its identity.
    graphs: dict[int, tuple[Any, fx.GraphModule]] = {}

    def compile_sections(sections: Sequence[SectionGraph], *args: Any) -> Any:
        copies = [_copy(section.graph) for section in sections]  # Inductor changes a graph
        compiled, places = compile_backward_sections(sections, *args)
        for graph, place in zip(copies, places, strict=True):
            if all(map(is_pure, call_nodes(graph.graph))):
                graphs.setdefault(id(compiled[place]), (compiled[place], graph))
        return compiled, places

    def make_section(**fields: Any) -> CompiledSection:
        section = CompiledSection(**fields)
        if id(section.call) not in graphs:
            return section
        call, graph = graphs[id(section.call)]
        return dataclasses.replace(section, call=_Compared(call, graph, checks))

    with (
        mock.patch.object(compiler, "compile_backward_sections", compile_sections),
        mock.patch.object(compiler, "CompiledSection", make_section),
    ):
        yield checks


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


class _Compared:
    """Runs a section's code and its graph; returns what the code does."""

    def __init__(
        self, call: Callable[[list[Any]], Any], graph: fx.GraphModule, checks: CodeChecks
    ) -> None:
        self._call, self._graph, self._checks = call, graph, checks
        self._has_run = False
        # Inductor leaves out a rounding to a coarser dtype and back, so those within count too.
        self._dtypes = {a for n in graph.graph.nodes for a in n.args if isinstance(a, torch.dtype)}

    def __call__(self, values: list[Any]) -> Any:
        inputs, copies = list(values), _copies(values)
        with torch.no_grad():
            expected = self._graph(*copies)
        returned = self._call(values)
        if not self._has_run:
            self._has_run = True
            self._checks.num_sections += 1
        pairs = {f"output {k}": pair for k, pair in enumerate(zip(returned, expected, strict=True))}
        # It may write to buffers, and to nothing else.
        pairs |= {f"input {k}": pair for k, pair in enumerate(zip(inputs, copies, strict=True))}
        far = []
        for name, (actual, wanted) in pairs.items():
            if isinstance(wanted, torch.Tensor):
                error = _error(actual.detach(), wanted)
                if error > _tolerance(self._dtypes.union(_dtypes_of([*inputs, *expected]))):
                    far.append(f"{name}: relative error {error:.1e}")
        if far and len(self._checks.differences) < _LARGEST_SHOWN:
            self._checks.differences.append("\n".join([*far, self._graph.code.strip()]))
        return returned


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if expected.layout is not torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    return relative_error(actual, expected)


def _dtypes_of(values: Sequence[Any]) -> set[torch.dtype]:
    return {value.dtype for value in values if isinstance(value, torch.Tensor)}


def _tolerance(dtypes: Collection[torch.dtype]) -> float:
    """Rounding of the coarsest dtype, ten times as much where most of a sum cancels.

    So it is in the gradient of a batch norm of two rows. Wrong code differs by all of a value.
    """
    tolerance = TOLERANCES["float64"]
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        name = {"complex64": "float32", "complex128": "float64"}.get(name, name)
        tolerance = max(tolerance, TOLERANCES.get(name, 0.0))
    return min(10 * tolerance, 0.1)


def _copies(values: Sequence[Any]) -> list[Any]:
    """Tensors with the same strides in memory of their own, of which as much is shared."""
    storages: dict[int, Any] = {}
    copies = []
    for value in values:
        if not isinstance(value, torch.Tensor):
            copies.append(value)
        elif value.layout is not torch.strided or value.is_conj() or value.is_neg():
            copies.append(value.detach().clone())
        else:
            storage = value.untyped_storage()
            address = storage.data_ptr()
            if address not in storages:
                storages[address] = storage.clone()
            place = value.storage_offset(), value.shape, value.stride()
            copies.append(value.detach().new_empty(0).set_(storages[address], *place))
    return copies
