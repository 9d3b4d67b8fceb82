"""Graphs that AOTAutograd made: marks they must have, and complex values for Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import compile_fx, config
from torch.fx.experimental.proxy_tensor import make_fx

from ddpopt import _torch
from ddpopt.errors import NotCutError, TorchDriftError

PASS = "reinplace_inplaceable_ops"


def _transform(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * 2, n=8)


def _decompose(x: torch.Tensor) -> torch.Tensor:
    values, _vectors = torch.linalg.eig(x)  # which returns a tuple
    return x + len(values)


def _branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, _transform, torch.clone, (x,))


def _graph(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


GRAPHS = {
    "real": (_graph(torch.tanh, torch.ones(8, 8)), False),
    "an input": (_graph(torch.view_as_real, torch.ones(8, dtype=torch.complex128)), True),
    "a value": (_graph(_transform, torch.ones(8, 8)), True),
    "of several values": (_graph(_decompose, torch.ones(8, 8)), True),
    "in a branch": (_graph(_branch, torch.ones(8, 8)), True),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_complex_values_are_found_wherever_they_are(name: str) -> None:
    graph, is_complex = GRAPHS[name]
    assert _torch.has_complex_values(graph) is is_complex


@pytest.mark.parametrize("name", GRAPHS)
def test_inductor_neither_writes_in_place_nor_reorders_where_values_are_complex(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag that the user has set is so again afterwards; one that is off stays off."""
    settings = []

    def compile_nothing(_graph: Any, _inputs: Any, **_options: Any) -> None:
        settings.append((config.reorder_for_peak_memory, config.disabled_passes))

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_nothing)
    graph, is_complex = GRAPHS[name]
    for disabled in ("", "overlap_scheduling"):
        with config.patch(disabled_passes=disabled):
            _torch.compile_part(graph, [])
            settings.append((config.reorder_for_peak_memory, config.disabled_passes))
    in_order = [(False, PASS), (False, f"overlap_scheduling,{PASS}")]
    as_set = [(True, ""), (True, "overlap_scheduling")]
    assert settings[::2] == (in_order if is_complex else as_set)
    assert settings[1::2] == as_set


def test_other_compilers_compile_sections_as_they_do_graphs() -> None:
    compiler = _torch.lookup_backend("aot_eager")
    assert _torch.for_sections(compiler) is compiler


# ---- Marks that AOTAutograd gives every graph, without which one could be misread ----------------


def _marked_graph(without: str) -> fx.GraphModule:
    """A backward with one call, which lacks one of the texts."""
    marks = dict.fromkeys(("val", "seq_nr", "custom", "desc"), 1)
    marks.pop(without, None)
    graph = fx.Graph()
    tangent = graph.placeholder("saved_1" if without == "tangents_" else "tangents_1")
    call = graph.call_function(torch.relu, (tangent,))
    graph.output((call,))
    for node in graph.nodes:
        node.meta.update(marks)
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("text", ["tangents_", "val", "seq_nr", "custom"])
def test_a_backward_in_which_all_marks_of_a_kind_are_missing_is_drift(text: str) -> None:
    _torch.check_backward(_marked_graph(""))
    with pytest.raises(TorchDriftError, match=f"'{text}'"):
        _torch.check_backward(_marked_graph(text))


def test_a_forward_in_which_no_input_is_described_is_drift() -> None:
    assert _torch.argument_placeholders(_marked_graph("")) == {}
    with pytest.raises(TorchDriftError, match="'desc'"):
        _torch.argument_placeholders(_marked_graph("desc"))


def test_outputs_that_are_not_described_one_by_one_are_no_gradients_of_known_arguments() -> None:
    graph = _marked_graph("")
    (output,) = graph.graph.find_nodes(op="output")
    output.meta["desc"] = [None]
    assert _torch.gradient_arguments(graph) == [None]
    output.meta["desc"] = [None, None]
    with pytest.raises(NotCutError):
        _torch.gradient_arguments(graph)
