"""Train an architecture on the ranks, eagerly and compiled, and say what came of it.

`check` runs on each rank, `run_way` in the process that started them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import Ranks
from tests.system.architectures.catalogue import (
    ARCHITECTURES,
    ON_INDUCTOR,
    Architecture,
    Batch,
    build,
    draw_batch,
)
from tests.system.training.comparing import TOLERANCES, within
from tests.system.training.outcomes import NOT_ASKED, Finding
from tests.system.training.running import (
    Attempt,
    Notes,
    anywhere,
    attempt,
    judge,
    quietly,
    worst_of,
)

# DDP had to be told to look for parameters without gradients.
LOOKS_FOR_UNUSED = "looks for unused"
_STEPS = 3
_BUCKETS = 6  # about as many, of equal size


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


def run_way(ranks: Ranks, name: str, way: Way) -> Finding:
    """Run one way on all ranks; return the worst of what they found."""
    return worst_of(ranks, check, name, way)


def check(_rank: int, name: str, way: Way) -> Finding:
    """Train eagerly and compiled, and compare; on all ranks at once."""
    architecture = ARCHITECTURES[name]
    with quietly():
        if way.is_checkpointed and not _has_checkpointing(architecture):
            return Finding(outcome=NOT_ASKED)
        finds_unused = anywhere(_leaves_some_unused(architecture))
        train = functools.partial(_attempt, architecture, way.is_checkpointed, finds_unused)
        eager, ours = train(None), train(way)
        unsplit = functools.partial(train, way.unsplit())
        finding = judge(ours, eager, unsplit, measure=within(TOLERANCES["float32"]))
    remarks = (*finding.remarks, *[LOOKS_FOR_UNUSED] * finds_unused)
    return dataclasses.replace(finding, remarks=remarks)


def _attempt(
    architecture: Architecture, is_checkpointed: bool, finds_unused: bool, way: Way | None
) -> Attempt:
    # The in-tree optimizer refuses caps under its first bucket's; graphs are whole with "none".
    with (
        mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1),
        torch._dynamo.config.patch(optimize_ddp=way is None or way.optimizer != "none"),
    ):
        return attempt(functools.partial(_train, architecture, is_checkpointed, finds_unused, way))


def _train(
    architecture: Architecture,
    is_checkpointed: bool,
    finds_unused: bool,
    way: Way | None,
    group: dist.ProcessGroup,
) -> tuple[Notes, nn.Module]:
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
    notes = Notes()
    torch.manual_seed(dist.get_rank())  # dropout
    for step, batch in enumerate(_batches(architecture)):
        loss = _loss(forward, batch)
        loss.backward()
        notes.value(f"step {step} loss", loss)
        notes.gradients(f"step {step} gradient of", model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    notes.named("state", model.state_dict().items())
    return notes, ddp


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
