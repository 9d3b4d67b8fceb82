"""`verify`: compare a compiled and split step with an eager one, on copies."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch, config
from ddpopt._text import count
from ddpopt._torch import Forward
from ddpopt.checks.copies import DryRun, Outcome, dtype_name, is_compiled_by_us, rehearse
from ddpopt.checks.warmup import SILENCE_S, compile_ahead
from ddpopt.errors import (
    DisagreementError,
    OptionError,
    PeerError,
    TorchDriftError,
    VerificationError,
)
from ddpopt.planning.batch import Batch, LossFn
from ddpopt.planning.randomness import same_randomness
from ddpopt.ranks.agree import all_gather_object
from ddpopt.split import state
from ddpopt.split.state import KEEPING_FROM_REHEARSAL

_NUM_STEPS = 2  # DDP has one bucket in the first, its final ones in the second
_SHOWN = 5
_FLOOR = 1e-3  # a gradient's errors are relative to at least this part of the largest gradient

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""The largest relative error that passes, by the coarsest dtype that a step computes in."""

_TF32, _TF32_TOLERANCE = "float32 (TF32)", 1e-2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far a compiled step is from eager; the same on all ranks.

    Errors are the largest over ranks and over two steps, and relative: the largest difference of
    an element, divided by the largest element. For gradients that are small compared to the
    model's largest one, the divisor is a thousandth of that. An error is infinite if only one of
    the two has a gradient, or if shape, dtype or non-finite elements differ. If an error is above
    the tolerance, eager ran once more; nothing follows for a model that is not `is_repeatable`:
    it differs from itself by as much.
    """

    gradients: Mapping[str, float]
    buffers: Mapping[str, float]
    loss: float
    tolerance: float
    dtype: str
    num_ranks: int
    worst_rank: int
    is_repeatable: bool = True
    note: str = ""

    @property
    def errors(self) -> dict[str, float]:
        """All errors by name, such as `gradient of fc.weight`: gradients, buffers and the loss."""
        named = {f"gradient of {name}": error for name, error in self.gradients.items()}
        named |= {f"buffer {name}": error for name, error in self.buffers.items()}
        return {**named, "loss": self.loss}

    @property
    def worst(self) -> str:
        """The name of the largest error, as in `errors`."""
        return max(self.errors, key=self.errors.__getitem__)

    @property
    def worst_error(self) -> float:
        """The largest error."""
        return max(self.errors.values())

    @property
    def passed(self) -> bool:
        """Whether no error is above the tolerance."""
        return self.worst_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        ranks = count(self.num_ranks, "rank")
        lines = [
            f"verification {verdict}: compiled against eager on {ranks}, {_NUM_STEPS} steps; "
            f"largest relative error {self.worst_error:.1e} ({self.worst}, rank "
            f"{self.worst_rank}), tolerance {self.tolerance:.0e} for {self.dtype}"
        ]
        above = {name: error for name, error in self.errors.items() if error > self.tolerance}
        ordered = sorted(above.items(), key=lambda item: -item[1])
        lines += [f"  {error:8.1e}  {name}" for name, error in ordered[:_SHOWN]]
        if len(ordered) > _SHOWN:
            lines.append(f"  and {len(ordered) - _SHOWN} more")
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


def verify(
    ddp_model: torch.nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    tolerances: Mapping[torch.dtype, float] | None = None,
    silence_s: float = SILENCE_S,
) -> Verification:
    """Compare two steps of a compiled DDP model with eager ones, on copies with equal randomness.

    It compares the gradients that DDP averaged, as an optimizer would get them, the buffers and the
    loss. The model, its gradients, DDP's Reducer and random number states are left unchanged. Call
    it on all ranks, as training is done: in the same mode (`train()` or `eval()`), with the same
    autocast. It needs memory for two more models and up to five sets of gradients.

    Args:
        ddp_model: As for `warmup`.
        batch: As for `warmup`.
        loss_fn: As for `warmup`.
        tolerances: Largest relative error that passes, by dtype; overrides `TOLERANCES`. What
            counts is the coarsest dtype of parameters, outputs and autocast.
        silence_s: Seconds without a sign of life after which a rank counts as lost.

    Raises:
        PeerError: another rank raised, exited, hangs, or did not make this call.
        OptionError: nothing is compiled with `backend="ddpopt"`, model or batch cannot be copied,
            all parameters are frozen, or the loss is not a scalar.
        TypeError: there is no DistributedDataParallel in `ddp_model`.
    """
    run = DryRun(ddp_model, batch, loss_fn, "verify", silence_s)
    limits = limits_by_name(tolerances or {})
    with same_randomness(run.ddp) as restore, torch.enable_grad():
        # Each rank alone: an error here would leave the others in an allreduce.
        with torch.compiler.set_stance("force_eager"):
            _, has_drawn = run.step_locally()
        with run.stage("copying"):
            is_apart = _draws_otherwise(ddp_model, has_drawn)
        first = compile_ahead(run, is_apart=is_apart)
        first.reset()

        def steps(stance: str) -> list[Outcome]:
            outcomes = []
            rehearsal = rehearse(first.model)
            with torch.compiler.set_stance(stance), first.drawing():
                for _ in range(_NUM_STEPS):
                    restore()
                    outcomes.append(rehearsal.step(run.batch, run.loss_fn))
            return outcomes

        eager = _attempt(run, lambda: steps("force_eager"))
        precision = _precision_of(run.ddp, eager)

        def judge(stance: str) -> Verification:
            errors = _attempt(run, lambda: _compare_steps(steps(stance), eager))
            return _combine(run.ddp, _Report(errors, precision, is_apart, limits))

        verdict = judge("default")
        if verdict.passed:
            return verdict
        again = judge("force_eager")
    if again.passed:
        return verdict
    note = (
        f"eager differs from itself too, by {again.worst_error:.1e} ({again.worst}): it depends on "
        "more than parameters, buffers, the batch and the random numbers of torch, Python and numpy"
    )
    return dataclasses.replace(verdict, is_repeatable=False, note=note)


def _draws_otherwise(model: torch.nn.Module, has_drawn: bool) -> bool:
    """Whether compiled code would draw other random numbers than an eager step that drew some."""
    if has_drawn and not is_compiled_by_us(model):
        raise OptionError(
            "a step draws random numbers, and what compiles it with backend='ddpopt' is not found "
            "in the model, to compile it with eager's; compile a module instead of a function, or "
            "verify the model in eval mode"
        )
    options = [
        _torch.compile_options(part).get("options") or {} for part in _torch.compiled_parts(model)
    ]
    return has_drawn and any(given.get("inner", "inductor") == "inductor" for given in options)


class _BrokenOffError(PeerError):
    """A rank was lost while ranks communicated; leftovers of that may answer another call."""


def _attempt(run: DryRun, compute: Callable[[], T]) -> T:
    """Return what `compute`, which communicates, returns; an error on one rank is one on all.

    A rank with an error waits for the others before it goes on: they may be waiting for it in an
    allreduce, which its next one, of another step, would answer.
    """
    result: T | Exception
    try:
        with run.stage("steps"):
            try:
                result = compute()
            except Exception as error:
                # The model may raise anything. Ranks communicate here, so it is raised below, on
                # all of them.
                result = error
    except PeerError as error:
        raise _BrokenOffError(str(error)) from error
    with run.stage("steps"):
        if isinstance(result, Exception):
            raise result
    return result


class _Errors(NamedTuple):
    """Relative errors of a step, or the largest of several; see `relative_error`."""

    gradients: dict[str, float]
    buffers: dict[str, float]
    loss: float

    @property
    def worst(self) -> float:
        return max([*self.gradients.values(), *self.buffers.values(), self.loss])


class _Report(NamedTuple):
    """One rank's errors, and how to judge them: tolerances by dtype, from fine to coarse."""

    errors: _Errors
    precision: str
    is_apart: bool
    tolerances: dict[str, float]


def _combine(ddp: DistributedDataParallel, own: _Report) -> Verification:
    """The same result on all ranks, judged by the first one's tolerances."""
    reports = all_gather_object(ddp, own, "comparing a step with an eager one")
    errors = _largest([report.errors for report in reports])
    worst = [report.errors.worst for report in reports]
    limits = reports[0].tolerances
    dtype = max((report.precision for report in reports), key=list(limits).index)
    note = (
        "random numbers were drawn as eager draws them, so training's code is compiled anew"
        if any(report.is_apart for report in reports)
        else ""
    )
    return Verification(
        **errors._asdict(),
        tolerance=limits[dtype],
        dtype=dtype,
        num_ranks=len(reports),
        worst_rank=worst.index(max(worst)),
        note=note,
    )


# ---- How far apart two steps are, and may be ---------------------------------------------------


def limits_by_name(tolerances: Mapping[torch.dtype, float]) -> dict[str, float]:
    """The tolerance for each name that `precision_of` returns, from fine to coarse."""
    limits = {}
    for dtype, limit in {**TOLERANCES, **tolerances}.items():
        limits[dtype_name(dtype)] = limit
        if dtype is torch.float32:
            limits[_TF32] = max(limit, _TF32_TOLERANCE)
    return limits


def _precision_of(ddp: DistributedDataParallel, steps: list[Outcome]) -> str:
    """The name of the coarsest dtype in which a step computes, as far as can be seen.

    `float32 (TF32)` where a device may compute float32 with fewer bits.
    """
    device = next(ddp.parameters()).device
    seen = {parameter.dtype for parameter in ddp.parameters()}.union(*(s.dtypes for s in steps))
    if torch.is_autocast_enabled(device.type):
        seen.add(torch.get_autocast_dtype(device.type))
    known = [dtype for dtype in TOLERANCES if dtype in seen]
    coarsest = known[-1] if known else torch.bfloat16  # TOLERANCES goes from fine to coarse
    backends = torch.backends
    may_use_tf32 = backends.cudnn.allow_tf32 or backends.cuda.matmul.allow_tf32
    is_tf32 = device.type == "cuda" and coarsest is torch.float32 and may_use_tf32
    return _TF32 if is_tf32 else dtype_name(coarsest)


def _compare_steps(compiled: Sequence[Outcome], eager: Sequence[Outcome]) -> _Errors:
    """The largest errors of the compiled steps, taking the eager ones as correct."""
    return _largest([_compare(*pair) for pair in zip(compiled, eager, strict=True)])


def _compare(ours: Outcome, theirs: Outcome) -> _Errors:
    floor = _FLOOR * max((_magnitude(g) for g in theirs.gradients.values()), default=0.0)
    return _Errors(
        {n: relative_error(ours.gradients[n], g, floor) for n, g in theirs.gradients.items()},
        {n: relative_error(ours.buffers[n], buffer) for n, buffer in theirs.buffers.items()},
        relative_error(ours.loss, theirs.loss),
    )


def _largest(found: Sequence[_Errors]) -> _Errors:
    """The largest error for each name; it is infinite if one of them lacks that name."""

    def of_each(named: Sequence[dict[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for errors in named for name in errors)
        return {name: max(errors.get(name, math.inf) for errors in named) for name in names}

    gradients, buffers, losses = zip(*found, strict=True)
    return _Errors(of_each(gradients), of_each(buffers), max(losses))


def relative_error(
    actual: torch.Tensor | None, expected: torch.Tensor | None, floor: float = 0.0
) -> float:
    """The largest difference over the largest magnitude of `expected`, or over `floor`.

    Infinite if one is missing, or if shape, dtype, layout or non-finite elements differ.
    """
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    kinds = [(t.shape, t.dtype, t.layout) for t in (actual, expected)]
    if kinds[0] != kinds[1]:
        return math.inf
    if actual.is_sparse:
        actual, expected = actual.to_dense(), expected.to_dense()
    if not (actual.is_floating_point() or actual.is_complex()):
        return 0.0 if torch.equal(actual, expected) else math.inf
    are_finite = expected.isfinite()
    # Finite elements become zeros; infinities and NaNs have to be equal.
    rest = [torch.where(t.isfinite(), 0.0, t) for t in (actual, expected)]
    if not torch.allclose(rest[0], rest[1], rtol=0, atol=0, equal_nan=True):
        return math.inf
    difference = _magnitude(torch.where(are_finite, _exact(actual) - _exact(expected), 0.0))
    scale = max(_magnitude(expected), floor)
    return difference / scale if difference else 0.0


def _magnitude(tensor: torch.Tensor | None) -> float:
    """The largest finite magnitude of an element."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    values = _exact(tensor.to_dense() if tensor.is_sparse else tensor).abs()
    return float(torch.where(values.isfinite(), values, 0.0).max())


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """The values in a dtype in which differences of 16-bit numbers do not overflow."""
    return tensor if tensor.dtype is torch.float64 or tensor.is_complex() else tensor.float()


# ---- Before the first training step ------------------------------------------------------------


_answered: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""The modules that were verified, or of which was said why they were not."""


def before_forward(ddp: DistributedDataParallel, forward: Forward) -> None:
    """Verify a module before its first forward that trains it, if `config.verify` is set.

    Raises:
        VerificationError: compiled code is wrong.
        DisagreementError: as `warmup`.
        PeerError: a rank was lost while ranks communicated.
    """
    if not _is_due(ddp):
        return
    try:
        is_compiled_around = forward.backend is _torch.lookup_backend("ddpopt")
        if is_compiled_around and not _torch.compiled_functions(ddp):
            # The call of DDP itself is compiled, by torch.compile(ddp) or in a function around it.
            model = _torch.compiled_by(forward.callback, ddp)
        elif is_compiled_by_us(ddp):
            model = ddp
        else:
            return  # eager, or only `after_forward` will know better
    except TorchDriftError as error:
        _decline(ddp, str(error), "use such a release")
        return
    _verify_once(ddp, model, forward)


def after_forward(ddp: DistributedDataParallel, forward: Forward) -> None:
    """Verify a module that called something compiled which is no part of it.

    Raises:
        Exception: as `before_forward`.
    """
    if _is_due(ddp) and state.get(ddp).cuts:
        _verify_once(ddp, ddp, forward)


def _is_due(ddp: DistributedDataParallel) -> bool:
    return config.verify and ddp not in _answered and _trains(ddp) and not state.is_copy(ddp)


def _trains(ddp: DistributedDataParallel) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in ddp.parameters())


def _verify_once(ddp: DistributedDataParallel, model: torch.nn.Module, forward: Forward) -> None:
    """Raise if compiled code is wrong; nothing else that goes wrong may end training."""
    _answered.add(ddp)
    try:
        outcome = verify(model, Batch(forward.arguments, forward.keywords))
    except (_BrokenOffError, DisagreementError):
        raise
    except Exception as error:
        # The model may raise anything, the batch may not be copied, the loss may be none. That is
        # no reason not to train: it costs the verification, and a line says so.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        names_mode = any(mode.value in reason for mode in KEEPING_FROM_REHEARSAL)
        remedy = "call ddpopt.verify with a batch and a loss_fn for which it works"
        _decline(ddp, reason, "train without that mode" if names_mode else remedy)
        return
    if outcome.passed:
        _logs.progress("%s", outcome)
    elif not outcome.is_repeatable:
        _decline(ddp, outcome.note, "call ddpopt.verify where it gives the same twice")
    else:
        raise VerificationError(
            f"{outcome}\ntraining was stopped before its first step, because DDPOPT_VERIFY or "
            "ddpopt.config.verify is set; train with DDPOPT_ENABLED=0 or without torch.compile, "
            "and report this; if only rounding differs, call ddpopt.verify with higher tolerances"
        )


def _decline(ddp: DistributedDataParallel, reason: str, remedy: str) -> None:
    _answered.add(ddp)
    _logs.warning(
        "ddpopt.config.verify is set, but this DistributedDataParallel(%s) was not verified, and "
        "training goes on: %s; to verify it, %s",
        type(ddp.module).__name__,
        reason,
        remedy,
    )
