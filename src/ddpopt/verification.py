"""`verify`: one step compiled and split against one step eagerly, on copies."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, logs, records
from ddpopt.comparison import TF32_TOLERANCE, TOLERANCES, compare_steps, name_of, precision_of
from ddpopt.errors import VerificationError
from ddpopt.rehearsal import (
    Batch,
    LossFn,
    as_batch,
    check_model,
    default_loss,
    is_compiled_by_us,
    randomness,
    rehearse,
    run_locally,
    same_randomness,
)
from ddpopt.warming import SILENCE_S, compile_ahead

_NUM_STEPS = 2  # DDP has one bucket in the first, its final ones in the second
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far a compiled step is from eager; equal on all ranks.

    Errors are the largest over ranks and over two steps, and relative: the largest difference of
    an element over the largest element. Gradients that are small beside the model's largest one
    count relative to a thousandth of that. An error is infinite where only one of the two has a
    gradient, or where shape, dtype or non-finite elements differ.
    """

    gradients: Mapping[str, float]
    buffers: Mapping[str, float]
    loss: float
    tolerance: float
    dtype: str
    num_ranks: int
    worst_rank: int
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
        ddp_model: `torch.compile(DistributedDataParallel(module), backend="ddpopt")`, or
            `DistributedDataParallel(torch.compile(module, backend="ddpopt"))`.
        batch: A tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        loss_fn: Makes a scalar of the model's output. Default: the output's `loss` (an attribute or
            a key), or else one that depends on all its floating point tensors.
        tolerances: Largest relative error that passes, by dtype, over `TOLERANCES`. The coarsest
            dtype of parameters, outputs and autocast counts.
        silence_s: After how many seconds without a sign of life a rank counts as lost.

    Raises:
        PeerError: another rank raised, ended, hangs, or did not make this call.
        OptionError: the model is not compiled with `backend="ddpopt"`, or cannot be copied; or the
            loss is no scalar.
        TypeError: there is no DistributedDataParallel in `ddp_model`.
    """
    ddp = check_model(ddp_model)
    group, device = ddp.process_group, next(ddp.parameters()).device
    own_batch, own_loss = as_batch(batch), loss_fn or default_loss
    find_out = functools.partial(_draws_otherwise, ddp_model, own_batch, own_loss)
    with same_randomness(device) as restore, torch.enable_grad():
        # Compiled on each rank alone: an error here would leave the others in an allreduce.
        first = compile_ahead(ddp_model, own_batch, own_loss, "verify", silence_s, find_out)
        first.reset()
        outcomes = []
        for stance in ("force_eager", "default"):
            rehearsal = rehearse(first.model)
            with torch.compiler.set_stance(stance), first.drawing():
                steps = []
                for _ in range(_NUM_STEPS):
                    restore()
                    steps.append(rehearsal.step(own_batch, own_loss))
            outcomes.append(steps)
            del rehearsal  # its memory, before the next copy is made
    eager, compiled = outcomes
    errors = compare_steps(compiled, eager)
    precision = precision_of(ddp, eager, device)
    limits = {
        name_of(dtype): limit for dtype, limit in {**TOLERANCES, **(tolerances or {})}.items()
    }
    return _gather(group, _Report(*errors, *precision, is_apart=first.is_apart, tolerances=limits))


def before_forward(ddp: DistributedDataParallel) -> None:
    """Verify a model before its first training forward, for `config.verify`.

    Raises:
        VerificationError: it failed; on all ranks.
    """
    if not _is_due(ddp):
        return
    calling = _torch.calling_model(ddp)
    model = ddp if calling is None else calling  # what torch.compile makes has a length
    if not is_compiled_by_us(model):
        return
    _verified.add(ddp)
    outcome = verify(model, Batch(*_torch.forward_arguments(ddp)))
    if not outcome.passed:
        raise VerificationError(
            f"{outcome}\ntraining was stopped before its first step, because DDPOPT_VERIFY or "
            "ddpopt.config.verify is set; train with DDPOPT_ENABLED=0 or without torch.compile, "
            "and report this; if only rounding differs, call ddpopt.verify with higher tolerances"
        )
    logs.progress("%s", outcome)


def after_forward(ddp: DistributedDataParallel) -> None:
    """Say so, once a module, when one ran under our backend without having been verified."""
    if not _is_due(ddp):
        return
    _verified.add(ddp)
    logs.warning(
        "ddpopt.config.verify is set, but this DistributedDataParallel(%s) cannot be verified by "
        "itself: compile it and not a function around it, torch.compile(ddp, backend='ddpopt')",
        type(ddp.module).__name__,
    )


_verified: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _is_due(ddp: DistributedDataParallel) -> bool:
    """Whether this forward trains a model of the user's for which nothing was said yet."""
    return ddp not in _verified and not records.of(ddp).is_copy and torch.is_grad_enabled()


def _draws_otherwise(model: torch.nn.Module, batch: Batch, loss_fn: LossFn) -> bool:
    """Whether a step draws random numbers, and compiled code would draw others."""
    device = next(model.parameters()).device
    options = [
        _torch.compile_options(part).get("options") or {} for part in _torch.compiled_parts(model)
    ]
    if all(given.get("inner", "inductor") != "inductor" for given in options):
        return False
    with same_randomness(device), torch.compiler.set_stance("force_eager"):
        before = randomness(device)
        run_locally(rehearse(model), batch, loss_fn)
        return randomness(device) != before


class _Report(NamedTuple):
    """One rank's errors by kind and name, and how they are to be judged.

    `tolerances` are by the dtype's name, from fine to coarse.
    """

    gradients: dict[str, float]
    buffers: dict[str, float]
    loss: float
    dtype: str
    is_tf32: bool
    is_apart: bool
    tolerances: dict[str, float]


def _gather(group: dist.ProcessGroup, own: _Report) -> Verification:
    """Return the same result on all ranks, by the tolerances of the first."""
    reports = [own] * dist.get_world_size(group)
    dist.all_gather_object(reports, own, group=group)
    limits = reports[0].tolerances
    order = list(limits)
    dtype = max((report.dtype for report in reports), key=order.index)
    is_tf32 = any(report.is_tf32 for report in reports) and dtype == "float32"
    worst = [max([*r.gradients.values(), *r.buffers.values(), r.loss]) for r in reports]
    note = (
        "random numbers were drawn as eager draws them, so training's code is compiled anew"
        if any(report.is_apart for report in reports)
        else ""
    )
    return Verification(
        gradients=_largest([report.gradients for report in reports]),
        buffers=_largest([report.buffers for report in reports]),
        loss=max(report.loss for report in reports),
        tolerance=max(limits[dtype], TF32_TOLERANCE) if is_tf32 else limits[dtype],
        dtype="float32 (TF32)" if is_tf32 else dtype,
        num_ranks=len(reports),
        worst_rank=worst.index(max(worst)),
        note=note,
    )


def _largest(named: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for errors in named for name in errors)
    return {name: max(errors.get(name, math.inf) for errors in named) for name in names}
