"""Steps on a copy of a compiled DDP model: the same code, another Reducer, nothing of the model's.

It copies, calls and restores; `verification.py` and `warming.py` know what the steps are for.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, records, tuning
from ddpopt.errors import OptionError

LossFn = Callable[[Any], torch.Tensor]


class Batch(NamedTuple):
    """The arguments of one forward."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Outcome(NamedTuple):
    """What a step left: copies of its loss and buffers, gradients, and the outputs' dtypes."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    dtypes: frozenset[torch.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A copy: `model` is to be called, `ddp` is the DDP module in it.

    `initial_buffers` are those that each step starts with. One that `is_apart` runs code that was
    compiled for it alone.
    """

    model: torch.nn.Module
    ddp: DistributedDataParallel
    initial_buffers: dict[str, torch.Tensor]
    is_apart: bool

    def forward(self, batch: Batch, loss_fn: LossFn) -> tuple[torch.Tensor, frozenset[torch.dtype]]:
        """Return the loss of a copy of the batch, and the dtypes of the output."""
        args, kwargs = copy.deepcopy(batch)
        output = self.model(*args, **kwargs)
        dtypes = frozenset(t.dtype for t in tensors_of(output) if t.is_floating_point())
        loss = loss_fn(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise OptionError(
                f"the loss is {_describe(loss)}; loss_fn has to make a scalar of the output that "
                "depends on a parameter"
            )
        return loss, dtypes

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Draw, in this block, the random numbers that its code was compiled for."""
        return _torch.drawing_as_eager() if self.is_apart else contextlib.nullcontext()

    def reset(self) -> None:
        """Drop gradients, and give buffers the values that they had in the original."""
        for parameter in self.ddp.parameters():
            parameter.grad = None
        for name, buffer in self.ddp.named_buffers():
            buffer.detach().copy_(self.initial_buffers[name])

    def step(self, batch: Batch, loss_fn: LossFn) -> Outcome:
        """Run forward and backward from the original's buffers and without gradients."""
        self.reset()
        loss, dtypes = self.forward(batch, loss_fn)
        loss.backward()  # type: ignore[no-untyped-call]
        own = self.ddp.module
        return Outcome(
            loss.detach().clone(),
            {n: _detached(p.grad) for n, p in own.named_parameters() if p.requires_grad},
            {name: buffer.detach().clone() for name, buffer in own.named_buffers()},
            dtypes,
        )


def rehearse(model: torch.nn.Module, *, is_apart: bool = False) -> Rehearsal:
    """Return a copy of a compiled DDP model; see `_torch.copy_compiled`.

    Raises:
        OptionError: the model cannot be copied.
    """
    original = records.ddp_of(model)
    try:
        copied, ddp = _torch.copy_compiled(model, is_apart=is_apart)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise OptionError(
            f"the module in DistributedDataParallel cannot be copied ({error}); it has to be a "
            "module that copy.deepcopy takes"
        ) from error
    record, own = records.of(original), records.of(ddp)
    own.is_copy = True
    own.is_trial = record.is_trial
    if record.tuner is not None and record.tuner.is_done:
        own.tuner = record.tuner  # no other is to be started
    buffers = {name: buffer.detach().clone() for name, buffer in ddp.named_buffers()}
    return Rehearsal(model=copied, ddp=ddp, initial_buffers=buffers, is_apart=is_apart)


def run_locally(
    rehearsal: Rehearsal,
    batch: Batch,
    loss_fn: LossFn,
    enter: Callable[[str], None] = lambda _phase: None,
) -> None:
    """Run a step that communicates nothing; `enter` is told before forward and backward."""
    _torch.keep_local(rehearsal.ddp)
    enter("forward")
    loss, _ = rehearsal.forward(batch, loss_fn)
    enter("backward")
    loss.backward()  # type: ignore[no-untyped-call]


def take_after(model: torch.nn.Module, rehearsal: Rehearsal) -> None:
    """Note for a model what compiling its copy made or began: code, the search for buckets."""
    ddp, copied = records.ddp_of(model), records.of(rehearsal.ddp)
    records.of(ddp).code += copied.code
    if copied.tuner is not None and records.of(ddp).tuner is None:
        tuning.start(ddp, "forward" if copied.is_trial else "backward")


def check_model(model: torch.nn.Module) -> DistributedDataParallel:
    """Return the DDP module at the top of a model that can be rehearsed.

    Raises:
        TypeError: there is none.
        OptionError: nothing in it is compiled by us, or DDP is in a mode that cannot be copied.
    """
    ddp = records.ddp_of(model)
    if not is_compiled_by_us(model):
        raise OptionError(
            "nothing in this model is compiled with backend='ddpopt'; give the result of "
            "torch.compile(DistributedDataParallel(module), backend='ddpopt'), or "
            "DistributedDataParallel(torch.compile(module, backend='ddpopt')); what "
            "Module.compile() compiled cannot be copied"
        )
    reason = _torch.cannot_attach(ddp)
    if reason:
        raise OptionError(f"a step of this DDP module cannot be rehearsed: {reason}")
    return ddp


def is_compiled_by_us(model: torch.nn.Module) -> bool:
    """Whether `torch.compile` with our backend made the model or a module in it."""
    ours = _torch.lookup_backend("ddpopt")
    return any(_torch.backend_of(part) is ours for part in _torch.compiled_parts(model))


def as_batch(batch: Any) -> Batch:
    """Return a tensor, a tuple of positional or a mapping of keyword arguments as a Batch."""
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Mapping):
        return Batch((), batch)
    return Batch(tuple(batch), {}) if isinstance(batch, tuple | list) else Batch((batch,), {})


def default_loss(output: Any) -> torch.Tensor:
    """Return the output's `loss` (attribute or key), or a scalar that depends on all of it.

    No gradient of the second kind vanishes for outputs that are normalized: each element has a
    target of its own. Where a module returns its loss, there is nothing else to depend on.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        scalar: torch.Tensor = loss
        return scalar
    found = [t for t in tensors_of(output) if t.is_floating_point() and t.requires_grad]
    if not found:
        raise OptionError(
            f"the model's output ({_describe(output)}) has no floating point tensor that depends "
            "on a parameter; give loss_fn, which makes a scalar of the output"
        )
    total = _distance(found[0])
    for tensor in found[1:]:
        total = total + _distance(tensor)
    return total


def _distance(tensor: torch.Tensor) -> torch.Tensor:
    exact = tensor if tensor.dtype is torch.float64 else tensor.float()
    places = torch.arange(tensor.numel(), device=tensor.device, dtype=exact.dtype)
    targets = places.cos().view(tensor.shape)
    return (exact - targets).square().sum() / math.sqrt(max(tensor.numel(), 1))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested sequences, mappings and objects with attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
        for item in vars(value).values():
            yield from tensors_of(item)


@contextlib.contextmanager
def same_randomness(device: torch.device) -> Iterator[Callable[[], None]]:
    """Restore torch's, Python's and numpy's random number state at the end of the block.

    Yields a function that sets it to what it was, so that each step draws the same numbers.
    """
    numpy: Any = sys.modules.get("numpy")
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    on_device = accelerator and accelerator.get_rng_state(device)
    state, pythons = torch.get_rng_state(), random.getstate()
    numpys = numpy.random.get_state() if numpy else None

    def restore() -> None:
        torch.set_rng_state(state)
        random.setstate(pythons)
        if numpy:
            numpy.random.set_state(numpys)
        if accelerator is not None:
            accelerator.set_rng_state(on_device, device)

    try:
        yield restore
    finally:
        restore()


def randomness(device: torch.device) -> bytes:
    """Return torch's random number state, to see whether a step drew numbers."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return b"".join(bytes(state.tolist()) for state in states)


def _detached(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
