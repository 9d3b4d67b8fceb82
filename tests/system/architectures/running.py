"""Train an architecture on the ranks, eagerly and compiled, and say what came of it.

`check` runs on each rank, `run_way` in the process that started them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from tests.support.ranks import Ranks
from tests.system.architectures.catalogue import (
    ARCHITECTURES,
    ON_INDUCTOR,
    Architecture,
    Batch,
    build,
    draw_batch,
)
from tests.system.fuzzing.checking import (
    AS_UNSPLIT,
    DIFFERS,
    EQUAL,
    EQUAL_TO_UNSPLIT,
    NOT_SPLIT,
    OUR_ERRORS,
    OUTCOMES,
    RAISES,
    REFUSED,
    REFUSED_UNSPLIT,
    ROUNDED,
    anywhere,
    quietly,
    relative_error,
    worst_of,
)
from tests.system.fuzzing.training import group_of_trainings, leave_group

NO_CHECKPOINTING = "the model has none"
_STEPS = 3
_BUCKETS = 6  # about as many, of equal size
_TOLERANCE = 1e-4  # as the fuzz's, for float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to compile a model under DDP.

    `optimizer` is one of ddpopt's splits, "default" (ddpopt without options), "in-tree", or "none":
    compiled whole.
    """

    optimizer: str
    is_regional: bool = False
    is_checkpointed: bool = False
    inner: str = "aot_eager"

    def compile_options(self) -> dict[str, Any]:
        """Return what to give to `torch.compile`, or to a module's `compile`."""
        match self.optimizer:
            case "default":
                return {"backend": "ddpopt"}
            case "in-tree" | "none":
                return {"backend": self.inner}
        return {"backend": "ddpopt", "options": {"inner": self.inner, "split": self.optimizer}}

    def __str__(self) -> str:
        words = [self.optimizer, "regional" if self.is_regional else "whole"]
        return " ".join([*words, *["checkpointed"] * self.is_checkpointed, self.inner])

    def unsplit(self) -> Way:
        """Return the way that compiles the same graphs whole."""
        return dataclasses.replace(self, optimizer="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one way, in the words of the fuzz.

    `sections` are those of each graph that ddpopt compiled. `finds_unused` says that DDP had to be
    told to look for parameters without gradients.
    """

    outcome: str
    detail: str = ""
    sections: tuple[int, ...] = ()
    num_buckets: int = 0
    finds_unused: bool = False
    seconds: float = 0.0

    def headline(self) -> str:
        """Return the outcome, the sections, and the end of what is said of it."""
        sections = " + ".join(map(str, self.sections)) or "no"
        last = self.detail.strip().splitlines()[-1:]
        said = [self.outcome, f"{sections} sections for {self.num_buckets} buckets", *last]
        return "; ".join(said)


_WAYS = tuple(
    Way(optimizer=optimizer, is_regional=is_regional, is_checkpointed=is_checkpointed)
    for optimizers in (("forward", "backward"), ("in-tree",))
    for is_checkpointed, is_regional, optimizer in itertools.product(
        (False, True), (False, True), optimizers
    )
)
_ON_INDUCTOR = (
    Way(optimizer="default", inner="inductor"),
    Way(optimizer="backward", inner="inductor"),
)


def ways_of(name: str) -> tuple[Way, ...]:
    """Return the ways in which an architecture is run, the most important first."""
    return (*_WAYS, *_ON_INDUCTOR) if name in ON_INDUCTOR else _WAYS


def run_way(ranks: Ranks, name: str, way: Way) -> Result:
    """Run one way on all ranks; return the worst of what they found."""
    return worst_of(ranks, (NO_CHECKPOINTING, *OUTCOMES), Result, check, name, way)


def check(_rank: int, name: str, way: Way) -> Result:
    """Train eagerly and compiled, and compare; on all ranks at once."""
    with quietly():
        return _check(ARCHITECTURES[name], way)


def _check(architecture: Architecture, way: Way) -> Result:
    if way.is_checkpointed and not _has_checkpointing(architecture):
        return Result(outcome=NO_CHECKPOINTING)
    finds_unused = anywhere(_leaves_some_unused(architecture))
    attempt = functools.partial(_attempt, architecture, way.is_checkpointed, finds_unused)
    eager = attempt(None)
    began_s = time.monotonic()
    compiled = attempt(way)
    seconds = round(time.monotonic() - began_s, 1)
    outcome, detail = _judge(compiled, eager, lambda: attempt(way.unsplit()))
    return Result(
        outcome=outcome,
        detail=detail,
        sections=compiled.sections,
        num_buckets=compiled.num_buckets,
        finds_unused=finds_unused,
        seconds=seconds,
    )


def _judge(
    compiled: _Attempt, eager: _Attempt, train_unsplit: Callable[[], _Attempt]
) -> tuple[str, str]:
    """Return the outcome and what there is to say of it, alike on all ranks but for details."""
    if eager.raised_anywhere:
        return REFUSED, eager.error
    if not compiled.raised_anywhere:
        if anywhere(bool(compiled.trouble)):
            return NOT_SPLIT, compiled.trouble
        if not anywhere(bool(_difference(compiled, eager, 0.0))):
            return EQUAL, ""
    unsplit = train_unsplit()
    if unsplit.raised_anywhere:
        return REFUSED_UNSPLIT, unsplit.error
    if compiled.raised_anywhere:
        return RAISES, compiled.error
    return _compare(compiled, eager, unsplit)


def _compare(compiled: _Attempt, eager: _Attempt, unsplit: _Attempt) -> tuple[str, str]:
    """Find out how far a training that is not equal to eager's in all bits is from it."""
    difference = _difference(compiled, eager, _TOLERANCE)
    if not anywhere(bool(difference)):
        is_rounded = anywhere(bool(_difference(compiled, unsplit, 0.0)))
        return ROUNDED if is_rounded else EQUAL_TO_UNSPLIT, ""
    if not anywhere(bool(_difference(compiled, unsplit, _TOLERANCE))):
        return AS_UNSPLIT, difference
    return DIFFERS, difference


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One training: the values that were noted, or the error, and whether any rank raised."""

    raised_anywhere: bool
    error: str = ""
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    sections: tuple[int, ...] = ()
    num_buckets: int = 0
    trouble: str = ""  # why a graph was not split, where that is a fault of ours


def _attempt(
    architecture: Architecture, is_checkpointed: bool, finds_unused: bool, way: Way | None
) -> _Attempt:
    group = group_of_trainings()
    attempt, error = _Attempt(raised_anywhere=False), ""
    # The in-tree optimizer refuses caps under its first bucket's; graphs are whole with "none".
    with (
        mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1),
        torch._dynamo.config.patch(optimize_ddp=way is None or way.optimizer != "none"),
    ):
        try:
            attempt = _train(architecture, is_checkpointed, finds_unused, way, group)
        except Exception:
            error = traceback.format_exc()
    if not anywhere(bool(error)):
        return attempt
    leave_group()
    return _Attempt(raised_anywhere=True, error=error or "another rank raised")


def _train(
    architecture: Architecture,
    is_checkpointed: bool,
    finds_unused: bool,
    way: Way | None,
    group: dist.ProcessGroup,
) -> _Attempt:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build(architecture)
    if is_checkpointed:
        enable_checkpointing(model)
    if way is not None and way.is_regional:
        for layer in find_layers(model):
            layer.compile(**way.compile_options())
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    ddp = DistributedDataParallel(
        model,
        process_group=group,
        bucket_cap_mb=num_bytes / _BUCKETS / 2**20,
        find_unused_parameters=finds_unused,
    )
    forward: Callable[..., Any] = ddp
    if way is not None and not way.is_regional:
        forward = torch.compile(ddp, **way.compile_options())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    values = {}
    torch.manual_seed(dist.get_rank())  # dropout
    for step, batch in enumerate(_batches(architecture)):
        loss = _loss(forward, batch)
        loss.backward()
        values[f"step {step} loss"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                values[f"step {step} gradient of {name}"] = parameter.grad.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        values[f"state {name}"] = value.detach().clone()
    cuts = ddpopt.explain(ddp).cuts
    troubles = [
        cut.headline()
        for cut in cuts
        for reason in (cut.fallback, cut.backward_fallback)
        if reason is not None and reason.name in OUR_ERRORS
    ]
    return _Attempt(
        raised_anywhere=False,
        values=values,
        sections=tuple(max(1, len(cut.sections)) for cut in cuts),
        num_buckets=_num_buckets(ddp),
        trouble="; ".join(troubles),
    )


def _batches(architecture: Architecture) -> Iterator[Batch]:
    """Give a batch for each step, another on each rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(_STEPS):
        yield draw_batch(architecture, generator)


def _loss(forward: Callable[..., Any], batch: Batch) -> torch.Tensor:
    output = forward(*batch.inputs, **batch.keywords)
    if batch.labels is None:
        loss: torch.Tensor = output.loss
        return loss
    return nn.functional.cross_entropy(output, batch.labels)


def _leaves_some_unused(architecture: Architecture) -> bool:
    """Whether a step leaves a parameter without a gradient, so that DDP has to look for those."""
    model = build(architecture)
    for batch in _batches(architecture):
        model.zero_grad()
        _loss(model, batch).backward()
        if any(p.requires_grad and p.grad is None for p in model.parameters()):
            return True
    return False


def enable_checkpointing(model: nn.Module) -> None:
    """Turn on a model's own checkpointing of activations, as its library does.

    Raises:
        ValueError, AssertionError: it has none.
    """
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable()
    else:
        model.set_grad_checkpointing()


def _has_checkpointing(architecture: Architecture) -> bool:
    try:
        enable_checkpointing(build(architecture))
    except (ValueError, AssertionError):
        return False
    return True


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that a user would compile one by one: those of which there are several.

    They are the members of the outermost lists with classes of their own; Dynamo compiles no
    `nn.Sequential`, so its members count.
    """
    found = list(_find_layers(model))
    counts = [sum(type(other) is type(layer) for other in found) for layer in found]
    repeated = [layer for layer, count in zip(found, counts, strict=True) if count > 1]
    return repeated or found


def _find_layers(module: nn.Module, is_listed: bool = False) -> Iterator[nn.Module]:
    for child in module.children():
        is_own = not type(child).__module__.startswith("torch.nn")
        if is_listed and is_own and next(child.parameters(), None) is not None:
            yield child
        else:
            yield from _find_layers(child, isinstance(child, nn.ModuleList | nn.Sequential))


def _num_buckets(ddp: DistributedDataParallel) -> int:
    data = ddp._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return len(sizes.split(","))


def _difference(actual: _Attempt, expected: _Attempt, tolerance: float) -> str:
    """Say in what two trainings differ by more than a tolerance, "" if they do not."""
    ours, theirs = actual.values, expected.values
    found = []
    for name in dict.fromkeys([*theirs, *ours]):
        if name not in ours or name not in theirs:
            found.append(f"{name}: only in {'eager' if name in theirs else 'the compiled'}")
            continue
        error = relative_error(ours[name], theirs[name])
        if error > tolerance:
            found.append(f"{name}: relative error {error:.1e}")
    return "\n".join(found)
