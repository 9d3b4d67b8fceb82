"""Rehearsals: steps on a copy of a compiled DDP model, which change nothing that the user has.

`warmup` and `verify` want a step without training. Dynamo gives the copy the original's compiled
code (`_torch.copy_compiled`); the copy has a Reducer and tensors of its own. What is left to guard
against is a copy that uses the original after all; see `_copies.py`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _copies, _torch
from ddpopt._values import POSITIVE, check_number
from ddpopt.errors import DDPOptError, OptionError, PeerError
from ddpopt.planning import tuner
from ddpopt.planning.batch import (
    Batch,
    LossFn,
    as_batch,
    call_model,
    check_loss_fn,
    find_loss,
    tensors_of,
)
from ddpopt.planning.randomness import restoring_randomness, states_on_devices
from ddpopt.ranks.meetings import monitored_block
from ddpopt.ranks.store import why_no_meeting
from ddpopt.split import state
from ddpopt.split.state import MODES_WITHOUT_REHEARSAL, find_mode

_NAME_IN_ERRORS = "the module in DistributedDataParallel"  # of what is copied


class BrokenOffError(PeerError):
    """A rank was lost in the middle of a collective: the next collective may get its leftovers."""


@contextlib.contextmanager
def raising_broken_off() -> Iterator[None]:
    """Raise a BrokenOffError for a PeerError of this block, in which ranks run collectives.

    `first_step` raises it, and trains on after any other PeerError.
    """
    try:
        yield
    except PeerError as error:
        raise BrokenOffError(str(error)) from error


class Outcome(NamedTuple):
    """Copies of what a step produced, by the names of parameters and buffers."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    dtypes: frozenset[torch.dtype]  # of the floating point tensors in the output


class Rehearsal:
    """A step on a copy of a model, in stages that end on all ranks or on none.

    Args:
        model: see `warmup`.
        batch: see `warmup`.
        loss_fn: see `warmup`.
        name: the call that errors and warnings name, such as "verify".
        silence_s: seconds without a sign of life after which a rank counts as lost.

    Raises:
        OptionError: `silence_s` is not a positive number of seconds, or there is no batch.
        TypeError: there is no DistributedDataParallel in the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any,
        loss_fn: LossFn | None,
        name: str,
        silence_s: float,
    ) -> None:
        self.model, self.ddp = model, state.ddp_of(model)
        if batch is None:
            raise OptionError(
                "the batch is None; give a tensor, a tuple or a mapping, or () for none"
            )
        check_loss_fn(loss_fn, OptionError)
        self.batch, self.loss_fn = as_batch(batch), loss_fn
        check_number("silence_s", silence_s, POSITIVE, OptionError)
        if why := why_no_meeting(self.ddp.process_group):
            raise OptionError(f"{name} cannot be called on this DDP module: {why}")
        # A block under `with run.stage("copying"):` ends when all ranks are at its end. If one
        # rank raises in it, all raise.
        self.stage = functools.partial(
            monitored_block, self.ddp.process_group, name, silence_s=silence_s
        )

    @torch.inference_mode(False)  # in which the copy's parameters could not be trained
    def rehearse(self, *, has_own_code: bool = False) -> tuple[ModelCopy, bool]:
        """Run a step of a copy without DDP's communication; copying, forward, backward are stages.

        A forward may communicate by itself, so no rank begins its forward before all have copied
        model and batch successfully.

        Args:
            has_own_code: whether the copy compiles code for itself alone, rather than to share it
                with the model.

        Returns:
            The copy, and whether the step drew random numbers.

        Raises:
            OptionError: as `copy_model`; or the batch cannot be copied; or the copy used parameters
                or buffers of the model itself, which stay unchanged.
        """
        with self.stage("copying"):
            copied = copy_model(self.model, self.loss_fn, has_own_code=has_own_code)
            batch = _copies.copy_batch(self.batch, OptionError)
        for ddp in copied.ddp_modules:
            _torch.keep_local(ddp)  # DDP communicates neither buffers nor gradients
        state_before = _randomness(self.ddp)
        with (
            torch.enable_grad(),
            restoring_randomness(self.ddp),
            copied.drawing_as_compiled(),
            _copies.shielded(self.ddp.module, copied.initial_buffers, OptionError, _NAME_IN_ERRORS),
        ):
            with self.stage("forward"):
                loss, _ = copied.forward(batch)
            with self.stage("backward"):
                copied.backward(loss)
                # `shielded` restores buffers of the model that this step wrote to, but the steps
                # of `verify`, which communicate, would write to them as well.
                written = _copies.written_buffers(self.ddp.module, copied.initial_buffers)
                if written:
                    raise OptionError(_copies.use_of_original(written[0], _NAME_IN_ERRORS))
            draws_numbers = _randomness(self.ddp) != state_before
        return copied, draws_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCopy:
    """A copy of a compiled DDP model, and a step of it."""

    model: torch.nn.Module  # what to call
    ddp: DistributedDataParallel  # the DDP module in it
    ddp_modules: Sequence[DistributedDataParallel]  # `ddp`, and DDP modules that the loss calls
    loss_fn: LossFn | None  # with copies of the modules in it
    initial_buffers: dict[str, torch.Tensor]  # with which each step begins, by name
    has_own_code: bool  # whether it runs code that was compiled for the copy alone

    def forward(self, batch: Batch) -> tuple[torch.Tensor, frozenset[torch.dtype]]:
        """The loss of a batch, and the dtypes of the output."""
        output = call_model(self.model, batch)
        dtypes = frozenset(t.dtype for t in tensors_of(output) if t.is_floating_point())
        loss = find_loss(output, self.loss_fn, of_tensor=_distance, error=OptionError)
        return loss, dtypes

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of the copy's parameters, and of no other tensors."""
        own = {*self.ddp.parameters(), *_torch.reducer_parameters(self.ddp)}
        with _copies.sparing_others(loss, own):
            loss.backward()  # type: ignore[no-untyped-call]

    def drawing_as_compiled(self) -> contextlib.AbstractContextManager[None]:
        """Draw random numbers in this block in the way that its code was compiled for."""
        return _torch.drawing_as_eager() if self.has_own_code else contextlib.nullcontext()

    def reset(self) -> None:
        """Drop gradients, and reset buffers to their values in the original."""
        for parameter in self.ddp.parameters():
            parameter.grad = None
        _copies.restore_buffers(self.ddp.module, self.initial_buffers)

    def step(self, batch: Batch) -> Outcome:
        """Run forward and backward on a copy of the batch, from the original's buffers."""
        self.reset()
        loss, dtypes = self.forward(_copies.copy_batch(batch, OptionError))
        self.backward(loss)
        gradients: dict[str, torch.Tensor | None] = {}
        # Plain names lack those of wrappers, such as `_orig_mod`: ranks compare gradients by name,
        # and may have compiled different parts.
        parameters = dict(self.ddp.module.named_parameters())
        for name, plain_name in _torch.plain_names(parameters).items():
            if parameters[name].requires_grad:
                gradient = parameters[name].grad
                gradients[plain_name] = None if gradient is None else gradient.detach().clone()
        copied_buffers = _copies.copy_buffers(self.ddp.module)
        buffers = {}
        for name, plain_name in _torch.plain_names(copied_buffers).items():
            buffers[plain_name] = copied_buffers[name]
        return Outcome(loss.detach().clone(), gradients, buffers, dtypes)


def copy_model(
    model: torch.nn.Module, loss_fn: LossFn | None = None, *, has_own_code: bool = False
) -> ModelCopy:
    """A copy of a compiled DDP model and its loss; see `_torch.copy_compiled`.

    Raises:
        OptionError: the model cannot be copied, a copy would run its forward, or DDP is in a mode
            that cannot be rehearsed.
    """
    original = state.ddp_of(model)
    mode = find_mode(original, MODES_WITHOUT_REHEARSAL)
    if mode is not None:
        raise OptionError(f"a step of this DDP module cannot be rehearsed: {mode.value}")
    try:
        made = _torch.copy_compiled(model, _copies.deep_copy, has_own_code=has_own_code)
    except DDPOptError:
        raise
    except Exception as error:  # modules may define how they are copied
        raise OptionError(_copies.cannot_be_copied(_NAME_IN_ERRORS, error)) from error
    for part, copied in made.copies.items():
        if problem := _copies.foreign_forward(copied, part):
            raise OptionError(problem)
    # Buckets are not taken over: the copy has a new Reducer.
    state.get(made.ddp).mark_as_copy_of(state.get(original))
    # If the original's search for buckets is over, the copy begins none. Else compiling for the
    # copy may begin one, which `warmup` hands on to the original.
    tuner.share_if_done(original, made.ddp)
    # The memo has each copy by its original's id, `made.ddp` among them. Copying the loss adds
    # DDP modules that only the loss holds, such as a discriminator.
    if loss_fn is not None:
        loss_fn = _copies.copy_function(loss_fn, made.memo)
    copied_ddp_modules = [c for c in made.memo.values() if isinstance(c, DistributedDataParallel)]
    return ModelCopy(
        model=made.model,
        ddp=made.ddp,
        ddp_modules=copied_ddp_modules,
        loss_fn=loss_fn,
        initial_buffers=_copies.copy_buffers(made.ddp.module),
        has_own_code=has_own_code,
    )


def is_compiled_by_us(model: torch.nn.Module) -> bool:
    """Whether the model, a module in it or an attribute of one is compiled with our backend.

    Other functions that it calls may be too, but that only shows when they run.
    """
    ours = _torch.lookup_backend("ddpopt")
    return any(_torch.backend_of(part) is ours for part in _torch.compiled_parts(model))


def _distance(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar loss in which each element has a target of its own.

    So gradients of normalized outputs do not vanish, as they would for a sum. Divided by the
    root of the number of elements, the loss has a gradient as long for many elements as for few.
    """
    exact = tensor if tensor.dtype is torch.float64 else tensor.float()
    positions = torch.arange(tensor.numel(), device=tensor.device, dtype=exact.dtype)
    targets = positions.cos().view(tensor.shape)
    return (exact - targets).square().sum() / math.sqrt(max(tensor.numel(), 1))


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _randomness(model: torch.nn.Module) -> bytes:
    """The state of torch's random numbers, on the CPU and on the model's devices.

    It is another one after a step that drew numbers.
    """
    states = [torch.get_rng_state(), *states_on_devices(model).values()]
    return b"".join(bytes(each.tolist()) for each in states)
