"""`verify`: one step compiled and split against one step eagerly, on copies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch, config
from ddpopt._events import Observer, Turn, ignore
from ddpopt.bucketing.batch import Batch, LossFn
from ddpopt.checks.dry_run import (
    DryRun,
    Outcome,
    is_compiled_by_us,
    rehearse,
    same_randomness,
)
from ddpopt.checks.numerics import (
    TF32_TOLERANCE,
    TOLERANCES,
    Errors,
    Precision,
    compare_steps,
    name_of,
    precision_of,
)
from ddpopt.checks.warmup import SILENCE_S, compile_ahead
from ddpopt.errors import (
    DisagreementError,
    OptionError,
    PeerError,
    TorchDriftError,
    VerificationError,
)
from ddpopt.ranks.agreement import gather
from ddpopt.split import state

_NUM_STEPS = 2  # DDP has one bucket in the first, its final ones in the second
_SHOWN = 5

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far a compiled step is from eager; equal on all ranks.

    Errors are the largest over ranks and over two steps, and relative: the largest difference of
    an element over the largest element. Gradients that are small beside the model's largest one
    count relative to a thousandth of that. An error is infinite where only one of the two has a
    gradient, or where shape, dtype or non-finite elements differ. Where an error is above the
    tolerance, eager ran once more; from a model that is not `is_repeatable`, which differs from
    itself by as much, nothing follows.
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
        """All errors by name: gradients, buffers, and the loss, as `gradient of fc.weight`."""
        named = {f"gradient of {name}": error for name, error in self.gradients.items()}
        named |= {f"buffer {name}": error for name, error in self.buffers.items()}
        return {**named, "loss": self.loss}

    @property
    def worst(self) -> str:
        """What has the largest error, as in `errors`."""
        return max(self.errors.items(), key=lambda item: item[1])[0]

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
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
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
    """Compare a step of a compiled DDP model with an eager one, on copies, with the same numbers.

    Both copies are DDP modules with the options of the original, so what is compared are the
    gradients that DDP averaged, as an optimizer would get them. Two steps are compared: DDP has
    one bucket in the first, and its final buckets in the second. Parameters, gradients, buffers,
    random number state, DDP's Reducer and the optimizer stay as they are. Training runs the code
    that was compiled here, unless the model draws random numbers and Inductor compiles it: then
    the copy is compiled for itself, with numbers as eager draws them. A comm hook is not part of
    it: gradients are averaged by DDP's own allreduce. It is a collective call, and takes the memory
    of two more models and up to five sets of gradients.

    Call it as training is done: in the same mode (`train()` or `eval()`), under the same autocast.

    Args:
        ddp_model: A DistributedDataParallel module in whose forward something is compiled with
            `backend="ddpopt"`, by `torch.compile` or in place by `compile()`: the DDP module, its
            module, parts of that, functions. Or what `torch.compile` made of a DDP module.
        batch: A tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        loss_fn: Makes a scalar of the model's output. Default: the output's `loss` (an attribute or
            a key), or else one that depends on all its floating point tensors.
        tolerances: Largest relative error that passes, by dtype, over `TOLERANCES`. The coarsest
            dtype of parameters, outputs and autocast counts.
        silence_s: After how many seconds without a sign of life a rank counts as lost.

    Raises:
        PeerError: another rank raised, ended, hangs, or did not make this call.
        OptionError: nothing is compiled with `backend="ddpopt"`, model or batch cannot be copied,
            all parameters are frozen, or the loss is no scalar.
        TypeError: there is no DistributedDataParallel in `ddp_model`.
    """
    run = DryRun(ddp_model, batch, loss_fn, "verify", silence_s)
    given = {**TOLERANCES, **(tolerances or {})}
    limits = {name_of(dtype): limit for dtype, limit in given.items()}
    with same_randomness(run.ddp) as restore, torch.enable_grad():
        # Each rank alone: an error here would leave the others in an allreduce.
        with torch.compiler.set_stance("force_eager"):
            has_drawn = run.step_locally().has_drawn
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
        precision = precision_of(run.ddp, eager)

        def judge(stance: str) -> Verification:
            errors = _attempt(run, lambda: compare_steps(steps(stance), eager))
            return _gather(run.ddp, _Report(errors, precision, is_apart, limits))

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
    """A rank was lost while ranks communicated; what is left of that may answer another call."""


def _attempt(run: DryRun, compute: Callable[[], T]) -> T:
    """Return what `compute` returns, which communicates; an error of one rank is one of all.

    A rank with an error waits for the others before it goes on: they may wait for it in an
    allreduce, which its next one, of another step, would answer.
    """
    results: list[T] = []
    problem = None
    try:
        with run.stage("steps"):
            try:
                results.append(compute())
            except Exception as error:
                problem = error
    except PeerError as error:
        raise _BrokenOffError(str(error)) from error
    with run.stage("steps"):
        if problem is not None:
            raise problem
    return results[0]


class _Report(NamedTuple):
    """One rank's errors, and how they are to be judged: tolerances by dtype, fine to coarse."""

    errors: Errors
    precision: Precision
    is_apart: bool
    tolerances: dict[str, float]


def _gather(ddp: DistributedDataParallel, own: _Report) -> Verification:
    """Return the same result on all ranks, by the tolerances of the first."""
    reports = gather(ddp, own, "comparing a step with an eager one")
    errors = [report.errors for report in reports]
    limits = reports[0].tolerances
    dtype = max((report.precision.dtype for report in reports), key=list(limits).index)
    is_tf32 = any(report.precision.is_tf32 for report in reports) and dtype == "float32"
    worst = [max([*e.gradients.values(), *e.buffers.values(), e.loss]) for e in errors]
    note = (
        "random numbers were drawn as eager draws them, so training's code is compiled anew"
        if any(report.is_apart for report in reports)
        else ""
    )
    return Verification(
        gradients=_largest([each.gradients for each in errors]),
        buffers=_largest([each.buffers for each in errors]),
        loss=max(each.loss for each in errors),
        tolerance=max(limits[dtype], TF32_TOLERANCE) if is_tf32 else limits[dtype],
        dtype="float32 (TF32)" if is_tf32 else dtype,
        num_ranks=len(reports),
        worst_rank=worst.index(max(worst)),
        note=note,
    )


def _largest(named: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for errors in named for name in errors)
    return {name: max(errors.get(name, math.inf) for errors in named) for name in names}


# ---- by itself --------------------------------------------------------------------------------


def observe(ddp: DistributedDataParallel) -> Observer | None:
    """Return what verifies a module at its first training forward, if `config.verify` is set."""
    return _FirstStep() if config.verify and not state.is_copy(ddp) else None


class _FirstStep(Observer):
    """Verifies a model, or says why it does not, and is ignored from then on."""

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        if not _trains(ddp):
            return
        try:
            calling = _torch.calling_model(ddp)
            model = ddp if calling is None else calling  # what torch.compile makes has a length
            is_ours = is_compiled_by_us(model)
        except TorchDriftError as error:
            ignore(ddp, Turn.VERIFY)
            _warn(ddp, str(error), "use such a release")
            return
        if is_ours:
            _verify_once(ddp, model)

    def after_forward(self, ddp: DistributedDataParallel, is_ours: bool) -> None:
        """Verify what did not show before that it is compiled by us."""
        if not _trains(ddp):
            return
        if is_ours:  # around the DDP module, and nothing that could be called
            ignore(ddp, Turn.VERIFY)
            _warn(
                ddp,
                "it is compiled with a function around it",
                "compile DDP itself, torch.compile(ddp, backend='ddpopt')",
            )
        elif state.of(ddp).plans:
            _verify_once(ddp, ddp)


def _trains(ddp: DistributedDataParallel) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in ddp.parameters())


def _verify_once(ddp: DistributedDataParallel, model: torch.nn.Module) -> None:
    """Raise where compiled code is wrong; anything else that goes wrong must not end training."""
    ignore(ddp, Turn.VERIFY)
    try:
        outcome = verify(model, Batch(*_torch.forward_arguments(ddp)))
    except (_BrokenOffError, DisagreementError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        _warn(ddp, reason, "call ddpopt.verify with a batch and a loss_fn for which it works")
        return
    if outcome.passed:
        _logs.progress("%s", outcome)
    elif not outcome.is_repeatable:
        _warn(ddp, outcome.note, "call ddpopt.verify where it gives the same twice")
    else:
        raise VerificationError(
            f"{outcome}\ntraining was stopped before its first step, because DDPOPT_VERIFY or "
            "ddpopt.config.verify is set; train with DDPOPT_ENABLED=0 or without torch.compile, "
            "and report this; if only rounding differs, call ddpopt.verify with higher tolerances"
        )


def _warn(ddp: DistributedDataParallel, reason: str, remedy: str) -> None:
    _logs.warning(
        "ddpopt.config.verify is set, but this DistributedDataParallel(%s) was not verified, and "
        "training goes on: %s; to verify it, %s",
        type(ddp.module).__name__,
        reason,
        remedy,
    )
