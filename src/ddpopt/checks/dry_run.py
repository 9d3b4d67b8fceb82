"""Steps on a copy of a compiled DDP model: the same code, another Reducer, nothing of the model's.

It copies, calls and restores; `verification.py` and `warming.py` know what the steps are for.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.bucketing import tuner
from ddpopt.errors import DDPOptError, OptionError
from ddpopt.split import state as records

LossFn = Callable[[Any], torch.Tensor]
Stage = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Gives what is done in a `with` block a name, and ends it on all ranks or on none."""


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
        """Return the loss of a batch, and the dtypes of the output."""
        output = self.model(*batch.args, **batch.kwargs)
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
            initial = self.initial_buffers.get(name)
            if initial is not None and initial.shape == buffer.shape:  # or forward made it anew
                buffer.detach().copy_(initial)

    def step(self, batch: Batch, loss_fn: LossFn) -> Outcome:
        """Run forward and backward on a copy of the batch, from the original's buffers."""
        self.reset()
        loss, dtypes = self.forward(copy_batch(batch), loss_fn)
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
        OptionError: the model cannot be copied, or DDP is in a mode that cannot be rehearsed.
    """
    original = records.ddp_of(model)
    reason = _torch.cannot_attach(original)
    if not any(parameter.requires_grad for parameter in original.parameters()):
        reason = "all its parameters are frozen now, so it has no gradients"
    if reason:
        raise OptionError(f"a step of this DDP module cannot be rehearsed: {reason}")
    try:
        copied, ddp = _torch.copy_compiled(model, is_apart=is_apart)
    except DDPOptError:
        raise
    except Exception as error:  # modules copy themselves as they like
        raise OptionError(
            f"the module in DistributedDataParallel cannot be copied ({error}); it has to be a "
            "module that copy.deepcopy takes"
        ) from error
    record, own = records.of(original), records.of(ddp)
    own.become_copy_of(record)
    tuner.share(original, ddp)
    buffers = {name: buffer.detach().clone() for name, buffer in ddp.named_buffers()}
    return Rehearsal(model=copied, ddp=ddp, initial_buffers=buffers, is_apart=is_apart)


def copy_batch(batch: Batch) -> Batch:
    """Return a copy of a batch.

    Raises:
        OptionError: it has something that cannot be copied.
    """
    try:
        copied: Batch = _torch.deep_copy(batch)
    except Exception as error:  # what it holds copies itself as it likes
        raise OptionError(
            f"the batch cannot be copied ({error}); give what copy.deepcopy takes: lists in place "
            "of generators, no files or locks"
        ) from error
    return copied


def run_locally(
    model: torch.nn.Module,
    rehearsal: Rehearsal,
    batch: Batch,
    loss_fn: LossFn,
    stage: Stage,
) -> None:
    """Run a step of a model's copy that communicates nothing, forward and backward as stages.

    Raises:
        OptionError: the copy used the model's own parameters; they are as they were.
    """
    _torch.keep_local(rehearsal.ddp)
    with _shielded(records.ddp_of(model), rehearsal):
        with stage("forward"):
            loss, _ = rehearsal.forward(batch, loss_fn)
        with stage("backward"):
            loss.backward()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _shielded(ddp: DistributedDataParallel, rehearsal: Rehearsal) -> Iterator[None]:
    """Let no backward in this block reach `ddp`'s gradients and Reducer; put its buffers back.

    A copy uses the original where a function that both call holds a parameter or a module of it.
    """

    def refuse(name: str) -> Callable[[object], None]:
        def raise_error(_gradients: object) -> None:
            raise OptionError(
                f"a copy of the module in DistributedDataParallel uses the original's {name}: a "
                "function holds it, or a module that it is in (a lambda, a decorated forward); "
                "have it take the module as an argument"
            )

        return raise_error

    trained = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
    nodes = [(name, _torch.accumulate_node(parameter)) for name, parameter in trained]
    hooks = [node.register_prehook(refuse(name)) for name, node in nodes]
    buffers = dict(ddp.named_buffers())
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, buffer in buffers.items():
            initial = rehearsal.initial_buffers[name]
            if buffer.layout != torch.strided or not torch.equal(buffer, initial):
                buffer.detach().copy_(initial)  # batch norm's writes change no version


def take_after(model: torch.nn.Module, rehearsal: Rehearsal) -> None:
    """Note for a model what compiling its copy made or began: code, the search for buckets."""
    ddp, copied = records.ddp_of(model), records.of(rehearsal.ddp)
    records.of(ddp).code += copied.code
    if tuner.of(rehearsal.ddp) is not None and tuner.of(ddp) is None:
        tuner.start(ddp, "forward" if copied.is_trial else "backward")


def is_compiled_by_us(model: torch.nn.Module) -> bool:
    """Whether the model, a module in it or an attribute of one is compiled with our backend.

    Other functions that it calls may be, which only shows when they run.
    """
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
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
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
    """Yield the tensors in nested sequences, mappings and objects with attributes, each once."""
    seen: dict[int, Any] = {}  # objects may refer to each other

    def walk(item: Any) -> Iterator[torch.Tensor]:
        if id(item) in seen:
            return
        seen[id(item)] = item
        parts: Iterable[Any] = ()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, Mapping):
            parts = item.values()
        elif isinstance(item, list | tuple):
            parts = item
        elif hasattr(item, "__dict__") and not isinstance(item, _WITHOUT_VALUES):
            parts = vars(item).values()
        for part in parts:
            yield from walk(part)

    return walk(value)


# Their attributes are code, or state that is no output.
_WITHOUT_VALUES = (torch.nn.Module, type, types.FunctionType, types.ModuleType)


@contextlib.contextmanager
def same_randomness(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Restore torch's, Python's and numpy's random number state at the end of the block.

    Yields a function that sets it to what it was, so that each step draws the same numbers. Of
    accelerators those count that the model's parameters are on.
    """
    numpy: Any = sys.modules.get("numpy")
    on_devices = _states_on_devices(model)
    state, pythons = torch.get_rng_state(), random.getstate()
    numpys = numpy.random.get_state() if numpy else None

    def restore() -> None:
        torch.set_rng_state(state)
        random.setstate(pythons)
        if numpy:
            numpy.random.set_state(numpys)
        for device, own in on_devices.items():
            torch.get_device_module(device).set_rng_state(own, device)

    try:
        yield restore
    finally:
        restore()


def randomness(model: torch.nn.Module) -> bytes:
    """Return torch's random number state, to see whether a step drew numbers."""
    states = [torch.get_rng_state(), *_states_on_devices(model).values()]
    return b"".join(bytes(state.tolist()) for state in states)


def _states_on_devices(model: torch.nn.Module) -> dict[torch.device, torch.Tensor]:
    devices = {p.device: None for p in model.parameters() if p.device.type != "cpu"}
    return {device: torch.get_device_module(device).get_rng_state(device) for device in devices}


def _detached(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
