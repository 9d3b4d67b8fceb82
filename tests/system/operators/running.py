"""Train a model around an operator eagerly and compiled, and say what came of it, in one process.

[Note: three losses]
Each model makes a step with a loss of all its outputs, of every other one, and of the first. That
reaches all layers, so that DDP's Reducer finishes each step.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.errors import Reason
from tests.system.fuzzing.checking import (
    AS_UNSPLIT,
    DIFFERS,
    EQUAL,
    FAILURES,
    NOT_SPLIT,
    RAISES,
    REFUSED,
    REFUSED_UNSPLIT,
    ROUNDED,
    quietly,
    relative_error,
)
from tests.system.operators.models import WIDTH, Sample, Surrounded, size_of, without_seeds

SPLITS = ("auto", "forward")
BREAKS = "discarded: Dynamo breaks the graph"
UNDETERMINED = "discarded: two runs differ without ddpopt"
_CAP_BYTES = 16  # the smallest parameter of a layer, so that each has a bucket
_TOLERANCE = 1e-4  # as the fuzz's, for float32
_LOSSES = {"all": slice(None), "every other": slice(None, None, 2), "first": slice(1)}
# What an operator with results of unknown sizes, or numbers, needs to be in a graph; and nn.LSTM.
_IN_ONE_GRAPH = {
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
    "allow_rnn": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one split, in the words of the fuzz.

    `reason` is the name of why a graph was compiled whole, or cut in forward instead.
    """

    outcome: str
    detail: str = ""
    num_sections: int = 1
    reason: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether ddpopt is to blame."""
        return self.outcome in FAILURES

    @property
    def is_discarded(self) -> bool:
        """Whether the case says nothing of ddpopt."""
        return self.outcome.startswith("discarded")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One training: what can be compared, or the error."""

    error: Exception | None = None
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    num_sections: int = 1
    reason: str = ""
    trouble: str = ""  # the reason, where that is a fault of ours

    def said(self) -> str:
        """Return the error's traceback, or the trouble."""
        return "".join(traceback.format_exception(self.error)) if self.error else self.trouble


def check(sample: Sample) -> dict[str, Result]:
    """Return what came of each split of a model around a call."""
    with quietly(), without_seeds(), torch._dynamo.config.patch(_IN_ONE_GRAPH):
        eager = _attempt(sample, None)
        if eager.error is not None:
            return {split: Result(outcome=REFUSED, detail=eager.said()) for split in SPLITS}
        unsplit = functools.cache(lambda: _attempt(sample, {"enabled": False}))
        return {split: _judge(sample, split, eager, unsplit) for split in SPLITS}


def _judge(
    sample: Sample, split: str, eager: _Attempt, train_unsplit: Callable[[], _Attempt]
) -> Result:
    ours = _attempt(sample, {"split": split})
    outcome, detail = EQUAL, ""
    if ours.trouble:
        outcome, detail = NOT_SPLIT, ours.trouble
    elif ours.error is not None or _differences(ours, eager, 0.0):
        outcome, detail = _compare(ours, eager, train_unsplit())
    if outcome == DIFFERS and not _is_determined(sample, eager, train_unsplit()):
        outcome = UNDETERMINED
    return Result(
        outcome=outcome, detail=detail, num_sections=ours.num_sections, reason=ours.reason
    )


def _is_determined(sample: Sample, eager: _Attempt, unsplit: _Attempt) -> bool:
    """Whether eager training and the unsplit compile do the same when they are run again."""
    again = _attempt(sample, None), _attempt(sample, {"enabled": False})
    return not (_differences(again[0], eager, 0.0) or _differences(again[1], unsplit, 0.0))


def _compare(ours: _Attempt, eager: _Attempt, unsplit: _Attempt) -> tuple[str, str]:
    """Return the outcome, and why, of what is not equal to eager in all bits."""
    if isinstance(unsplit.error, torch._dynamo.exc.Unsupported):
        return BREAKS, str(unsplit.error)
    if unsplit.error is not None:
        return REFUSED_UNSPLIT, unsplit.said()
    if ours.error is not None:
        return RAISES, ours.said()
    differences = _differences(ours, eager, _TOLERANCE)
    if not differences:
        return ROUNDED, ""
    from_unsplit = _differences(ours, unsplit, _TOLERANCE)
    remaining = {name: text for name, text in from_unsplit.items() if name in differences}
    if remaining:
        return DIFFERS, "\n".join(f"{name}: {text}" for name, text in remaining.items())
    return AS_UNSPLIT, "\n".join(f"{name}: {text}" for name, text in differences.items())


def _attempt(sample: Sample, options: dict[str, Any] | None) -> _Attempt:
    """Train eagerly without options, else with them."""
    torch._dynamo.reset()
    try:
        return _train(sample, options)
    except Exception as error:
        return _Attempt(error=error)


def _train(sample: Sample, options: dict[str, Any] | None) -> _Attempt:
    torch.manual_seed(0)
    model = Surrounded(sample)
    x = torch.randn(3, WIDTH)
    compiled: Any = model
    if options is not None:
        given = {"inner": "aot_eager", **options}
        compiled = torch.compile(model, backend="ddpopt", options=given, fullgraph=True)
    ddp = DistributedDataParallel(
        compiled,
        bucket_cap_mb=_CAP_BYTES / 2**20,
        find_unused_parameters=_leaves_some_unused(sample, x),
    )
    values = {}
    for loss in _LOSSES:
        torch.manual_seed(1)  # random operators
        outputs = ddp(x)
        _backward(outputs, loss)
        for number, output in enumerate(outputs):
            values[f"loss of {loss}: output {number}"] = _comparable(output)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                values[f"loss of {loss}: gradient of {name}"] = _comparable(parameter.grad)
        model.zero_grad()
    for name, buffer in model.named_buffers():
        values[f"buffer {name}"] = _comparable(buffer)
    cuts = ddpopt.explain(ddp).cuts
    reasons = [
        reason for p in cuts for reason in (p.fallback, p.backward_fallback) if reason is not None
    ]
    is_fault = any(not r.is_expected and r is not Reason.NO_LEGAL_CUT for r in reasons)
    return _Attempt(
        values=values,
        num_sections=max((len(cut.sections) for cut in cuts), default=1) or 1,
        reason=" ".join(reason.name for reason in reasons),
        trouble="; ".join(cut.headline() for cut in cuts) if is_fault else "",
    )


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
    """Return the values of a tensor, dense and real, which nothing later changes."""
    value = tensor.detach().clone()
    value = value if value.layout == torch.strided else value.to_dense()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _differences(actual: _Attempt, expected: _Attempt, tolerance: float) -> dict[str, str]:
    """Return what is said of each value by which two trainings differ by more than a tolerance."""
    ours, theirs = actual.values, expected.values
    found = {}
    for name in dict.fromkeys([*theirs, *ours]):
        if name not in ours or name not in theirs:
            found[name] = "only in ours" if name in ours else "not in ours"
        elif (error := relative_error(ours[name], theirs[name])) > tolerance:
            found[name] = f"relative error {error:.1e}"
    return found
