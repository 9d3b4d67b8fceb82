"""Steps on a copy of a compiled DDP model: the same code, another Reducer, none of its tensors.

`warmup` and `verify` want a step without training: nothing that the user has may change. So a step
runs on a copy, which Dynamo gives the same compiled code (`_torch.copy_compiled`). What is left to
guard against is a copy that uses the original after all, through a function that holds it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._values import POSITIVE, check_number
from ddpopt.errors import DDPOptError, OptionError
from ddpopt.planning import tuner
from ddpopt.planning.batch import Batch, LossFn, as_batch, call_model, find_loss, tensors_of
from ddpopt.planning.randomness import same_randomness, states_on_devices
from ddpopt.ranks.store import monitored_block
from ddpopt.split import state
from ddpopt.split.state import KEEPING_FROM_REHEARSAL, find_mode

T = TypeVar("T")


class Outcome(NamedTuple):
    """Copies of what a step produced, by the names of parameters and buffers."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    dtypes: frozenset[torch.dtype]  # of the floating point tensors in the output


class DryRun:
    """A model, a batch and a loss, to be tried in stages that end on all ranks or on none.

    Args:
        model: see `warmup`.
        batch: see `warmup`.
        loss_fn: see `warmup`.
        name: the call that errors and warnings name, such as "verify".
        silence_s: seconds without a sign of life after which a rank counts as lost.

    Raises:
        OptionError: `silence_s` is not a positive number of seconds.
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
        self.batch, self.loss_fn = as_batch(batch), loss_fn
        check_number("silence_s", silence_s, POSITIVE, OptionError)
        # A block under `with run.stage("copying"):` ends when all ranks are at its end. If one
        # rank raises in it, all raise.
        self.stage = functools.partial(
            monitored_block, self.ddp.process_group, name, silence_s=silence_s
        )

    def step_locally(self, *, is_apart: bool = False) -> tuple[Rehearsal, bool]:
        """Run a step of a copy without DDP's communication; copying, forward, backward are stages.

        A forward may communicate by itself, so no rank begins its forward before all have copied
        model and batch successfully.

        Returns:
            The copy, and whether the step drew random numbers.

        Raises:
            OptionError: as `rehearse`; or the batch cannot be copied; or the copy used the model's
                own parameters or buffers, which stay unchanged.
        """
        with self.stage("copying"):
            rehearsal = rehearse(self.model, is_apart=is_apart)
            batch = _copy_batch(self.batch)
        _torch.keep_local(rehearsal.ddp)
        state_before = _randomness(self.ddp)
        with (
            torch.enable_grad(),
            same_randomness(self.ddp),
            rehearsal.drawing(),
            _shielded(self.ddp, rehearsal),
        ):
            with self.stage("forward"):
                loss, _ = rehearsal.forward(batch, self.loss_fn)
            with self.stage("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
                # The steps of `verify`, which communicate, would write to them as well.
                for name in _written_buffers(self.ddp, rehearsal):
                    _refuse_use(name.removeprefix("module."))
            draws_numbers = _randomness(self.ddp) != state_before
        return rehearsal, draws_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A copy of a compiled DDP model, and how to step it."""

    model: torch.nn.Module  # what to call
    ddp: DistributedDataParallel  # the DDP module in it
    initial_buffers: dict[str, torch.Tensor]  # with which each step begins, by name
    is_apart: bool  # whether it runs code that was compiled for it alone

    def forward(
        self, batch: Batch, loss_fn: LossFn | None
    ) -> tuple[torch.Tensor, frozenset[torch.dtype]]:
        """The loss of a batch, and the dtypes of the output."""
        output = call_model(self.model, batch)
        dtypes = frozenset(t.dtype for t in tensors_of(output) if t.is_floating_point())
        return find_loss(output, loss_fn, of_tensor=_distance, error=OptionError), dtypes

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Draw random numbers in this block in the way that its code was compiled for."""
        return _torch.drawing_as_eager() if self.is_apart else contextlib.nullcontext()

    def reset(self) -> None:
        """Drop gradients, and reset buffers to their values in the original."""
        for parameter in self.ddp.parameters():
            parameter.grad = None
        for name, buffer in self.ddp.named_buffers():
            initial = self.initial_buffers.get(name)
            if initial is not None and initial.shape == buffer.shape:  # else forward made it anew
                buffer.detach().copy_(initial)

    def step(self, batch: Batch, loss_fn: LossFn | None) -> Outcome:
        """Run forward and backward on a copy of the batch, from the original's buffers."""
        self.reset()
        loss, dtypes = self.forward(_copy_batch(batch), loss_fn)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients: dict[str, torch.Tensor | None] = {}
        for name, parameter in self.ddp.module.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                gradients[name] = None if gradient is None else gradient.detach().clone()
        buffers = {}
        for name, buffer in self.ddp.module.named_buffers():
            buffers[name] = buffer.detach().clone()
        return Outcome(loss.detach().clone(), gradients, buffers, dtypes)


def rehearse(model: torch.nn.Module, *, is_apart: bool = False) -> Rehearsal:
    """A copy of a compiled DDP model; see `_torch.copy_compiled`.

    Raises:
        OptionError: the model cannot be copied, a copy would run its forward, or DDP is in a mode
            that cannot be rehearsed.
    """
    original = state.ddp_of(model)
    mode = find_mode(original, KEEPING_FROM_REHEARSAL)
    if mode is not None:
        raise OptionError(f"a step of this DDP module cannot be rehearsed: {mode.value}")
    try:
        made = _torch.copy_compiled(model, _deep_copy, is_apart=is_apart)
    except DDPOptError:
        raise
    except Exception as error:  # modules may define how they are copied
        raise OptionError(
            f"the module in DistributedDataParallel cannot be copied ({error}); it has to be a "
            "module that copy.deepcopy takes"
        ) from error
    for part, copied in made.copies.items():
        _refuse_foreign_forward(part, copied)
    state.get(made.ddp).become_copy_of(state.get(original))
    tuner.share(original, made.ddp)
    buffers = {name: buffer.detach().clone() for name, buffer in made.ddp.named_buffers()}
    return Rehearsal(model=made.model, ddp=made.ddp, initial_buffers=buffers, is_apart=is_apart)


def _copy_batch(batch: Batch) -> Batch:
    try:
        return _deep_copy(batch)
    except Exception as error:  # what it holds may define how it is copied
        raise OptionError(
            f"the batch cannot be copied ({error}); give what copy.deepcopy takes: lists in place "
            "of generators, no files or locks"
        ) from error


class _CopyingResults(torch.overrides.TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors that autograd computed, which it otherwise refuses.

    The copy is computed from a leaf with equal values, so that it may be written to as well.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            with torch.enable_grad():
                return copy.deepcopy(tensor.detach(), memo).requires_grad_().clone()
        return func(*args, **(kwargs or {}))


def _deep_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    with _CopyingResults():
        return copy.deepcopy(value, memo)


def _refuse_foreign_forward(module: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Raise if a forward that was set on the instance would run the original module.

    `_shielded` would find out too, but only once it ran, which changes the model: Lightning's sets
    the module's forward back, so that the first training forward would be another.
    """
    # A deep copy of an instance shares the functions in it, with all that they hold.
    cells = getattr(vars(copied).get("forward"), "__closure__", None) or ()
    for cell in cells:
        try:
            value = cell.cell_contents
        except ValueError:  # it is empty
            continue
        if value is module or getattr(value, "__self__", None) is module:
            raise OptionError(
                f"the forward of this {type(module).__name__} is replaced by a function that holds "
                "the module, so a copy would run the original; call it where the forward is the "
                "module's own"
            )


@contextlib.contextmanager
def _shielded(ddp: DistributedDataParallel, rehearsal: Rehearsal) -> Iterator[None]:
    """Keep backwards in this block from `ddp`'s gradients and Reducer; restore its buffers.

    A copy uses the original if a function that both call holds one of its parameters or modules, or
    if a `__deepcopy__` shares them. A backward that reaches an original parameter raises before
    the gradient is accumulated.
    """
    # A node lives, with its hook, while somebody holds it: DDP's Reducer, or for a parameter that
    # the Reducer does not have, this list.
    nodes = []
    hooks = []
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad:
            node = _torch.accumulate_node(parameter)
            nodes.append(node)
            hooks.append(node.register_prehook(functools.partial(_refuse_use, name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name in _written_buffers(ddp, rehearsal):
            ddp.get_buffer(name).detach().copy_(rehearsal.initial_buffers[name])


def _refuse_use(name: str, *_gradients: object) -> None:
    raise OptionError(
        f"a copy of the module in DistributedDataParallel uses the original's {name}: a function "
        "holds it, or a module that it is in (a lambda, a decorated forward), or a __deepcopy__ "
        "shares it; have the function take the module as an argument, or copy it"
    )


def _written_buffers(ddp: DistributedDataParallel, rehearsal: Rehearsal) -> list[str]:
    """The buffers of the original that are not, bit for bit, what they were when it was copied."""
    written = []
    for name, buffer in ddp.named_buffers():
        # Not by their versions, which batch norm's writes leave as they are.
        if not torch.equal(_bits(buffer), _bits(rehearsal.initial_buffers[name])):
            written.append(name)
    return written


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: a NaN is equal to itself in them."""
    return tensor.detach().to_dense().contiguous().flatten().view(torch.uint8)


def is_compiled_by_us(model: torch.nn.Module) -> bool:
    """Whether the model, a module in it or an attribute of one is compiled with our backend.

    Other functions that it calls may be too, but that only shows when they run.
    """
    ours = _torch.lookup_backend("ddpopt")
    return any(_torch.backend_of(part) is ours for part in _torch.compiled_parts(model))


def _distance(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar loss in which each element has a target of its own.

    So gradients of normalized outputs do not vanish, as they would for a sum.
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
