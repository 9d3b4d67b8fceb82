"""Rows of `names.TEXTS`, renamed in turn, as if torch wrote another text than ddpopt reads.

So tests/system/test_drift.py does with names. Training is eager's all the same, and where a graph
without the text could be misread, it is not cut, for a reason that has the text.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ddpopt._torch import names
from ddpopt._torch.names import PrivateText
from ddpopt.errors import Reason
from tests.support.beside import Beside
from tests.support.models import MLP, WIDTH, batches

# Why the graph of a small model is not cut, or its backward, without a text; None if it is.
REASONS: dict[PrivateText, Reason | None] = {
    names.EXAMPLE_VALUE: Reason.TORCH_DRIFT,
    names.COMPILE_ID: Reason.TORCH_DRIFT,
    names.CUDA_GRAPHS_WANTED: None,
    names.SAVED_TENSORS_HOOKS: None,
    names.STREAMS: None,
    names.RUNNING_GRAPHS: None,
    names.EFFECT_TOKENS: None,
    names.FOR_CPU: None,
    names.VALUE: Reason.BACKWARD_DRIFT,
    names.AUTOGRAD_NUMBER: Reason.BACKWARD_DRIFT,
    names.CUSTOM: None,
    names.WAIT_TENSOR: None,
    names.FUNCTION_APPLY: None,
    names.DESCRIPTION: Reason.BACKWARD_DRIFT,
    names.TANGENTS: Reason.BACKWARD_DRIFT,
    names.PRIMALS: None,
    names.HELD_NAME: None,
    names.COMPILED_BACKWARD: None,
    names.HAS_REBUILT: None,
    names.REBUILT_BUCKETS: None,
}
WITH_INDUCTOR: dict[PrivateText, Reason | None] = {
    names.STRIDES_KEPT: Reason.BACKWARD_DRIFT,
    names.IS_BACKWARD: Reason.BACKWARD_FAILED,
    # Before torch 2.13 the inner compiler took any keyword, and looked up the ones it knew.
    names.STATIC_INPUTS: Reason.BACKWARD_FAILED if names.installed_release() >= (2, 13) else None,
}
# Of names and of DDP's log, read where somebody asks what a step took or which hook there is.
NOT_IN_TRAINING = {
    names.CHECKPOINT_WRAPPED,
    names.COMM_HOOK,
    names.ITERATION,
    names.FORWARD_TIME,
    names.BACKWARD_TIME,
    names.COMM_TIME,
    names.OVERLAP_TIME,
    names.NUM_BYTES,
}


def test_each_text_is_renamed_below_or_is_not_read_in_training() -> None:
    """A row that is new fails here until it stands in one of the tables above."""
    assert {*REASONS, *WITH_INDUCTOR, *NOT_IN_TRAINING} == set(names.TEXTS)


def _check_training(
    row: PrivateText, reason: Reason | None, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = (name for name, value in vars(names).items() if value is row)
    renamed = dataclasses.replace(row, text="renamed")
    monkeypatch.setattr(names, name, renamed)
    beside = Beside(MLP(3), ddp_options={"bucket_cap_mb": 0.03}, inner=inner, split="backward")
    beside.train(batches(0, [(4, WIDTH)] * 2))
    cut = beside.cuts[-1]
    assert (cut.fallback or cut.backward_fallback) is reason, cut.detail
    if reason in (Reason.TORCH_DRIFT, Reason.BACKWARD_DRIFT):
        assert f"has no {renamed}, which" in cut.detail
    else:
        assert len(cut.sections) > 1


@pytest.mark.quick("node metadata 'example_value'")
@pytest.mark.parametrize("row", REASONS, ids=str)
def test_training_goes_on_without_a_text(
    one_rank: None, row: PrivateText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is not cut where it could be misread without the text."""
    _check_training(row, REASONS[row], "aot_eager", monkeypatch)


class _Breaking(MLP):
    """Has two breaks under no_grad; the graph between them is a call that ends the region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        with torch.autocast("cpu", torch.bfloat16):
            torch._dynamo.graph_break()
        with torch.no_grad():
            torch._dynamo.graph_break()
            print(end="")
        return y


def test_a_graph_without_inputs_has_no_values_and_is_no_drift(one_rank: None) -> None:
    """No warning says that torch has moved a name; the fuzz found one."""
    beside = Beside(_Breaking(3), ddp_options={"bucket_cap_mb": 0.03})
    beside.train(batches(0, [(4, WIDTH)]))
    assert any(cut.num_nodes == 2 for cut in beside.cuts)
    assert Reason.TORCH_DRIFT not in {cut.fallback for cut in beside.cuts}


@pytest.mark.slow
@pytest.mark.parametrize("row", WITH_INDUCTOR, ids=str)
def test_training_goes_on_without_what_inductor_reads(
    one_rank: None, row: PrivateText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are texts that Inductor alone reads or takes."""
    _check_training(row, WITH_INDUCTOR[row], "inductor", monkeypatch)
