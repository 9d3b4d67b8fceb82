"""Train a model around an operator eagerly and compiled, and say what came of it, in one process.

[Note: three losses]
Each model makes a step with a loss of all its outputs, of every other one, and of the first. That
reaches all layers, so that DDP's Reducer finishes each step.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import Reason
from tests.support.beside import compiled
from tests.system.operators.models import WIDTH, Sample, Surrounded, size_of, without_seeds
from tests.system.training.comparing import TOLERANCES, within
from tests.system.training.outcomes import DIFFERS, NOT_SPLIT, UNDETERMINED, Finding
from tests.system.training.running import (
    Attempt,
    Notes,
    attempt,
    differ_anywhere,
    judge,
    quietly,
)

SPLITS = ("auto", "forward")
_CAP_BYTES = 16  # the smallest parameter of a layer, so that each has a bucket
_LOSSES = {"all": slice(None), "every other": slice(None, None, 2), "first": slice(1)}
# What an operator with results of unknown sizes, or numbers, needs to be in a graph; and nn.LSTM.
_IN_ONE_GRAPH = {
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
    "allow_rnn": True,
}


def check(sample: Sample) -> dict[str, Finding]:
    """Return what came of each split of a model around a call."""
    with quietly(), without_seeds(), torch._dynamo.config.patch(_IN_ONE_GRAPH):
        eager = _attempt(sample, None)
        unsplit = functools.cache(lambda: _attempt(sample, {"enabled": False}))
        return {split: _check(sample, split, eager, unsplit) for split in SPLITS}


def _check(sample: Sample, split: str, eager: Attempt, train_unsplit: Any) -> Finding:
    ours = eager if eager.raised_anywhere else _attempt(sample, {"split": split})
    finding = judge(
        ours,
        eager,
        train_unsplit,
        measure=within(TOLERANCES["float32"]),
        tells_rounding=False,
        is_one_step=True,
    )
    if any(is_fault(name) for name in finding.remarks):
        return dataclasses.replace(finding, outcome=NOT_SPLIT, detail=f"{ours.cuts}")
    if finding.outcome == DIFFERS and not _is_determined(sample, eager, train_unsplit()):
        return dataclasses.replace(finding, outcome=UNDETERMINED)
    return finding


def is_fault(name: str) -> bool:
    """Whether a reason why a graph is whole, or cut in forward, is one that no operator may be."""
    return not Reason[name].is_expected and Reason[name] is not Reason.NO_LEGAL_CUT


def _is_determined(sample: Sample, eager: Attempt, unsplit: Attempt) -> bool:
    """Whether eager training and the unsplit compile do the same when they are run again."""
    again = _attempt(sample, None), _attempt(sample, {"enabled": False})
    return not (differ_anywhere(again[0], eager) or differ_anywhere(again[1], unsplit))


def _attempt(sample: Sample, options: dict[str, Any] | None) -> Attempt:
    """Train eagerly without options, else with them."""
    return attempt(lambda group: _train(sample, options, group))


def _train(
    sample: Sample, options: dict[str, Any] | None, group: dist.ProcessGroup
) -> tuple[Notes, nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Surrounded(sample)
    x = torch.randn(3, WIDTH)
    ddp = DistributedDataParallel(
        model if options is None else compiled(model, fullgraph=True, **options),
        process_group=group,
        bucket_cap_mb=_CAP_BYTES / 2**20,
        find_unused_parameters=_leaves_some_unused(sample, x),
    )
    notes = Notes()
    for loss in _LOSSES:
        torch.manual_seed(1)  # random operators
        outputs = ddp(x)
        _backward(outputs, loss)
        for number, output in enumerate(outputs):
            notes.value(f"loss of {loss}: output {number}", _comparable(output))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                notes.value(f"loss of {loss}: gradient of {name}", _comparable(parameter.grad))
        model.zero_grad()
    for name, buffer in model.named_buffers():
        notes.value(f"buffer {name}", _comparable(buffer))
    return notes, ddp


def _backward(outputs: tuple[torch.Tensor, ...], loss: str) -> None:
    terms = [
        size_of(output) * (number + 1)
        for number, output in enumerate(outputs[_LOSSES[loss]])
        if output.requires_grad
    ]
    torch.stack(terms).sum().backward()


def _leaves_some_unused(sample: Sample, x: torch.Tensor) -> bool:
    """Whether parameters get no gradient though all outputs are used, so that DDP must look."""
    model = Surrounded(sample)
    _backward(model(x), "all")
    return any(parameter.grad is None for parameter in model.parameters())


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor, dense and real."""
    value = tensor.detach()
    value = value if value.layout == torch.strided else value.to_dense()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
