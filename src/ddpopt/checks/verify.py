"""`verify`: compare a compiled and split step with an eager one, on copies.

`comparison.py` says how far two steps are apart, `first_step.py` makes the call by itself where
`config.verify` asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._text import count
from ddpopt.checks.comparison import (
    StepErrors,
    compare_steps,
    largest,
    limits_by_name,
    precision_of,
)
from ddpopt.checks.copies import (
    ModelCopy,
    Outcome,
    Rehearsal,
    copy_model,
    is_compiled_by_us,
    raising_broken_off,
)
from ddpopt.checks.warmup import SILENCE_S, compile_ahead
from ddpopt.errors import DDPOptError, OptionError
from ddpopt.planning.batch import LossFn
from ddpopt.planning.randomness import restoring_randomness
from ddpopt.ranks.agree import decide_on_rank_0, gather_on_rank_0
from ddpopt.ranks.store import name_ranks
from ddpopt.split import state

_NUM_STEPS = 2  # DDP has one bucket in the first, its final ones in the second
_SHOWN = 5  # of the errors above the tolerance, in the text

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far a compiled step is from eager; the same on all ranks.

    Errors are the largest over ranks and over two steps, and relative: the largest difference of
    an element, divided by the largest element. For gradients that are small compared to the
    model's largest one, the divisor is a thousandth of that. An error is infinite if only one of
    the two has a gradient, or if shape, dtype or non-finite elements differ.
    """

    gradients: Mapping[str, float]  # the errors by the names of parameters
    buffers: Mapping[str, float]  # the errors by the names of buffers
    loss: float
    tolerance: float  # the largest error that passes
    dtype: str  # the coarsest that the steps compute in; the tolerance is for it
    num_ranks: int
    worst_rank: int  # on which the largest error was found
    # If an error is above the tolerance, eager steps are compared with each other as well. Nothing
    # follows for a model whose steps differ from themselves by as much: it is not repeatable.
    is_repeatable: bool = True
    note: str = ""  # what else to know, for people

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
        DisagreementError: as `warmup`.
        OptionError: nothing is compiled with `backend="ddpopt"` on any rank, model or batch cannot
            be copied, all parameters are frozen, or the loss is not a scalar.
        TypeError: there is no DistributedDataParallel in `ddp_model`.
    """
    run = Rehearsal(ddp_model, batch, loss_fn, "verify", silence_s)
    limits = limits_by_name(tolerances or {})
    with (
        restoring_randomness(run.ddp) as restore_randomness,
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        # An eager step first, on each rank alone: an error of the model's would leave the other
        # ranks in an allreduce. It also shows whether a step draws random numbers.
        with torch.compiler.set_stance("force_eager"):
            _, draws_numbers = run.rehearse()
        with run.stage("copying"):  # as it may raise, on all ranks then
            has_own_code = _draws_otherwise(ddp_model, draws_numbers)
        compiled = compile_ahead(run, has_own_code=has_own_code)
        compiled.reset()  # each `step` begins with a copy of this copy

        def step(stance: str) -> list[Outcome]:
            return _step_copy(run, compiled, stance, restore_randomness)

        eager_steps = _attempt(run, lambda: step("force_eager"))
        precision = precision_of(run.ddp, eager_steps)

        def compare(stance: str) -> Verification:
            errors = _attempt(run, lambda: compare_steps(step(stance), eager_steps))
            is_compiled = bool(state.get(compiled.ddp).cuts)
            return _judge(run.ddp, _Report(errors, precision, has_own_code, is_compiled, limits))

        verification = compare("default")
        if verification.passed:
            return verification
        # Is it the compiled code that is wrong, or does the model differ from itself?
        eager_again = compare("force_eager")
    if eager_again.passed:
        return verification
    note = (
        f"eager differs from itself too, by {eager_again.worst_error:.1e} ({eager_again.worst}): "
        "it depends on more than parameters, buffers, the batch and the random numbers of torch, "
        "Python and numpy"
    )
    return dataclasses.replace(verification, is_repeatable=False, note=note)


def _draws_otherwise(model: torch.nn.Module, draws_numbers: bool) -> bool:
    """Whether compiled code would draw other random numbers than an eager step.

    Inductor's code does. To be compared with eager it is compiled once more, for a copy alone, to
    draw as eager does.
    """
    if draws_numbers and not is_compiled_by_us(model):
        raise OptionError(
            "a step draws random numbers, and what compiles it with backend='ddpopt' is not found "
            "in the model, to compile it with eager's; compile a module instead of a function, or "
            "verify the model in eval mode"
        )
    # Read in any case, so that a torch release that moved the options is noticed at once.
    inner_compilers = set()
    for part in _torch.compiled_parts(model):
        options = _torch.compile_options(part).get("options") or {}
        inner_compilers.add(options.get("inner", "inductor"))
    return draws_numbers and "inductor" in inner_compilers


def _step_copy(
    run: Rehearsal, compiled: ModelCopy, stance: str, restore_randomness: Callable[[], None]
) -> list[Outcome]:
    """Two steps of a copy of the compiled copy, with allreduces, each with the same randomness.

    `stance` is of `torch.compiler.set_stance`: "default" runs compiled code, "force_eager" none.
    Each call steps a copy of its own, since DDP forms its buckets once, after the first step.
    """
    outcomes = []
    copied = copy_model(compiled.model, compiled.loss_fn)  # with its code; it communicates
    with torch.compiler.set_stance(stance), compiled.drawing_as_compiled():
        for _ in range(_NUM_STEPS):
            restore_randomness()
            outcomes.append(copied.step(run.batch))
    return outcomes


def _attempt(run: Rehearsal, compute: Callable[[], T]) -> T:
    """Return what `compute` returns, which communicates; if it raises on one rank, raise on all.

    A rank with an error waits for the others before it goes on. They may be waiting for this rank
    in an allreduce, and would take its next allreduce, of another step, for that one.
    """
    result: T | Exception
    with raising_broken_off(), run.stage("steps"):
        try:
            result = compute()
        except Exception as error:
            # The model may raise anything. Other ranks are in the middle of communication, so the
            # error is raised below, on all ranks.
            result = error
    with run.stage("steps"):
        if isinstance(result, Exception):
            raise result
    return result


class _Report(NamedTuple):
    """What a rank tells the others of its steps."""

    errors: StepErrors
    precision: str  # the name of the coarsest dtype; see `precision_of`
    has_own_code: bool  # whether code was compiled for the copy alone
    is_compiled: bool  # whether any was compiled; Dynamo may be past its limits
    limits: dict[str, float]  # the tolerances by the names of dtypes, from fine to coarse


def _judge(ddp: DistributedDataParallel, report: _Report) -> Verification:
    """The same result on all ranks, judged by the first one's tolerances. Collective."""
    what = "comparing a step with an eager one"
    with raising_broken_off():
        reports = gather_on_rank_0(ddp, report, what)

        def judge() -> Verification | str:
            assert reports is not None, "rank 0 has them"
            return _judge_reports(reports)

        judged = decide_on_rank_0(ddp, what, judge, lambda error: f"{what} raised {error!r}")
    if isinstance(judged, str):
        raise DDPOptError(judged)
    return judged


def _judge_reports(reports: Sequence[_Report]) -> Verification:
    """The result for all ranks from their reports, rank 0's first."""
    errors = largest([each.errors for each in reports])
    worst_errors = [each.errors.worst_error for each in reports]
    limits = reports[0].limits
    from_fine_to_coarse = list(limits)
    dtype = max((each.precision for each in reports), key=from_fine_to_coarse.index)
    notes = []
    if any(each.has_own_code for each in reports):
        notes.append(
            "random numbers were drawn as eager draws them, so training's code is compiled anew"
        )
    eager = [rank for rank, each in enumerate(reports) if not each.is_compiled]
    if eager:
        notes.append(f"{name_ranks(eager)} compiled nothing, so these steps were eager there")
    return Verification(
        gradients=errors.gradients,
        buffers=errors.buffers,
        loss=errors.loss,
        tolerance=limits[dtype],
        dtype=dtype,
        num_ranks=len(reports),
        worst_rank=worst_errors.index(max(worst_errors)),
        note="; ".join(notes),
    )
