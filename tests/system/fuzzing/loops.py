"""What a case's training loop does with parameters: its optimizers, and all around their updates.

`training.py` runs forwards and backwards, with what is here before and after them. Loops are those
that people write for plain DDP.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.device import DEVICE
from tests.system.fuzzing.blocks import WIDTH
from tests.system.fuzzing.spec import Case

OPTIMIZERS = (
    *("SGD", "AdamW", "Adam", "Adagrad", "Adadelta", "Adamax"),
    *("ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "ZeRO"),
)
_OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05},
    "Adam": {"amsgrad": True, "foreach": False},
    "Adadelta": {"lr": 0.5},
    "RMSprop": {"momentum": 0.5},
}
_MAX_NORM = 0.5
_BOUND = 0.25  # of what is clamped


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What is updated, by what, and who is told of it.

    `encoder` is a second DDP module before the model, called as `run_encoder`, which may be
    compiled too, and `temperature` a factor of the loss, which
    no DDP module has. `later` are parameters for which there is no optimizer at first, and `saved`
    the state of the model that it goes back to, and `saved_states` those of the optimizers.
    """

    case: Case
    ddp: Any
    group: dist.ProcessGroup
    model: nn.Module
    encoder: DistributedDataParallel | None
    run_encoder: Callable[[torch.Tensor], torch.Tensor]
    temperature: nn.Parameter | None
    optimizers: list[optim.Optimizer]
    later: list[nn.Parameter]
    ema: AveragedModel | None
    scaler: torch.amp.GradScaler | None
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    saved_states: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ddps(self) -> list[Any]:
        return [self.ddp] if self.encoder is None else [self.ddp, self.encoder]

    @property
    def beside(self) -> dict[str, nn.Parameter]:
        """The parameters that are not the model's."""
        found = {} if self.encoder is None else dict(self.encoder.named_parameters())
        return found if self.temperature is None else {"temperature": self.temperature, **found}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.encoder is None else self.run_encoder(x.float()).to(x.dtype)

    def scale(self, loss: torch.Tensor, step: int) -> torch.Tensor:
        """The loss as backward gets it; a scaled one overflows on a rank in the second step."""
        if self.temperature is not None:
            loss = loss * self.temperature.exp()
        if self.scaler is None:
            return loss
        overflow = float("inf") if (step, dist.get_rank()) == (1, 1) else 1.0
        return self.scaler.scale(loss * overflow)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for ddp in self.ddps:
                stack.enter_context(ddp.no_sync())
            yield


Note = Callable[[str, torch.Tensor], None]
Look = Callable[[str, nn.Module], None]  # notes what a module gives under `no_grad`


def begin(
    case: Case,
    ddp: Any,
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    compile_: Callable[[Any], Any],
    group: dist.ProcessGroup,
) -> Loop:
    """Make the optimizers of `parameters` of a model."""
    own, later = list(parameters), []
    if "grow" in case.actions:
        own, later = own[:-2], own[-2:]
    encoder = temperature = None
    if case.arrangement in ("encoder", "compiled encoder"):
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        encoder = DistributedDataParallel(
            layers.to(DEVICE), process_group=group, bucket_cap_mb=1e-4
        )
        own += encoder.parameters()
    if case.arrangement == "temperature":
        temperature = nn.Parameter(torch.tensor(0.1, device=DEVICE))
        own.insert(len(own) // 2, temperature)
    if case.optimizer == "ZeRO":
        sharded = functools.partial(ZeroRedundancyOptimizer, process_group=group)
        kind = functools.partial(sharded, optimizer_class=optim.SGD)
    else:
        kind = getattr(optim, case.optimizer)
    options = {"lr": 0.01, **_OPTIONS.get(case.optimizer, {})}
    if case.optimizer in ("SGD", "ZeRO"):
        options["momentum"] = 0.9 if case.momentum else 0.0
    average = functools.partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    return Loop(
        case=case,
        ddp=ddp,
        group=group,
        model=model,
        encoder=encoder,
        run_encoder=compile_(encoder) if case.arrangement == "compiled encoder" else encoder,
        temperature=temperature,
        optimizers=[kind(groups, **options) for groups in _groups(case, own)],
        later=later,
        ema=average(model) if "ema" in case.actions else None,
        scaler=torch.amp.GradScaler(DEVICE.type) if "scale" in case.actions else None,
    )


def _groups(case: Case, parameters: list[nn.Parameter]) -> list[list[dict[str, Any]]]:
    """Return the groups of each optimizer."""
    even: dict[str, Any] = {"params": parameters[::2]}
    odd: dict[str, Any] = {"params": parameters[1::2], "lr": 0.02, "weight_decay": 0.1}
    if case.arrangement == "groups":
        return [[even, odd]]
    return [[even], [odd]] if case.arrangement == "two optimizers" else [[{"params": parameters}]]


def update(loop: Loop, step: int, note: Note, look: Look) -> None:
    """Do all that comes after backward."""
    case, where = loop.case, f"update {step}"
    if "decay" in case.actions:
        _decay(loop)
    if {"restore", "load"} & {*case.actions}:
        _restore(loop, step)
    if not ("skip" in case.actions and step == 1):
        _update(loop, where, note, look)
    for action in case.actions:
        if action in _AFTER:
            _AFTER[action](loop, where, note, look)
    for optimizer in loop.optimizers:
        optimizer.zero_grad(set_to_none=case.clears_to_none)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 if "rate" in case.actions else 1.0
    if loop.later and step == 0:
        loop.optimizers[0].add_param_group({"params": loop.later, "lr": 0.02})


@torch.no_grad()
def _decay(loop: Loop) -> None:
    """Decay weights by hand, once backward has run."""
    for parameter in loop.model.parameters():
        parameter.mul_(0.9)


def _restore(loop: Loop, step: int) -> None:
    """Go back to the weights of the first step, as a guard against NaN does, or to all of it."""
    first = 1 if "load" in loop.case.actions else 0  # with something in the optimizers' states
    if step == first:
        loop.saved.update(copy.deepcopy(loop.ddp.state_dict()))
        if "load" in loop.case.actions:
            loop.saved_states.extend(copy.deepcopy(o.state_dict()) for o in loop.optimizers)
    elif step == first + 1:
        loop.ddp.load_state_dict(loop.saved)
        if "load" in loop.case.actions:
            for optimizer, state in zip(loop.optimizers, loop.saved_states, strict=True):
                optimizer.load_state_dict(state)


def _update(loop: Loop, where: str, note: Note, look: Look) -> None:
    scaler = loop.scaler
    for optimizer in loop.optimizers if scaler is not None else ():
        scaler.unscale_(optimizer)
    for norm in ("2", "inf"):
        if f"clip {norm}" in loop.case.actions:
            _clip(loop, float(norm), lambda name, value: note(f"{where} {name}", value))
    for number, optimizer in enumerate(loop.optimizers):
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if "look" in loop.case.actions:
            look(f"{where}, forward after {number}", loop.ddp)
    if scaler is not None:
        scaler.update()
        note(f"{where} scale", torch.tensor(scaler.get_scale()))


def _clip(loop: Loop, norm: float, note: Note) -> None:
    """Clip each DDP module's gradients by themselves."""
    for number, ddp in enumerate(loop.ddps):
        parameters = [p for p in ddp.parameters() if p.numel()]  # torch refuses empty ones for inf
        total = clip_grad_norm_(parameters, _MAX_NORM, norm)
        note(f"norm {norm} of {number}", total.double())


def end(loop: Loop, note: Note) -> None:
    """Note what is left at the end."""
    for name, parameter in loop.beside.items():
        note(f"parameter beside: {name}", parameter)
    if loop.ema is not None:
        for name, parameter in loop.ema.module.named_parameters():
            note(f"average {name}", parameter)
    if loop.case.actions and loop.case.optimizer != "ZeRO":  # which gathers them first
        _note_states(note, [optimizer.state_dict() for optimizer in loop.optimizers])


def _note_states(note: Note, states: Sequence[dict[str, Any]]) -> None:
    for number, whole in enumerate(states):
        for index, state in whole["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    note(f"optimizer {number}, {name} of {index}", value)


# ---- after an update --------------------------------------------------------------------------


def _update_average(loop: Loop, _where: str, _note: Note, _look: Look) -> None:
    assert loop.ema is not None
    loop.ema.update_parameters(loop.model)


@torch.no_grad()
def _clamp(loop: Loop, *_: object) -> None:
    for parameter in loop.model.parameters():
        parameter.clamp_(-_BOUND, _BOUND)


def _replace_data(loop: Loop, *_: object) -> None:
    for parameter in loop.model.parameters():
        parameter.data = parameter.data.clamp(-_BOUND, _BOUND)


def _replace_by_vector(loop: Loop, *_: object) -> None:
    own = [p for p in loop.model.parameters() if p.dtype == torch.float32]
    vector_to_parameters(parameters_to_vector(own).detach() * 0.75, own)


def _copy(loop: Loop, where: str, note: Note, look: Look) -> None:
    copied = copy.deepcopy(loop.model)
    for name, parameter in copied.named_parameters():
        note(f"{where} copied {name}", parameter)
    look(f"{where} copy", copied)


def _save(loop: Loop, where: str, note: Note, _look: Look) -> None:
    """Save on rank 0, which the others wait for."""
    if dist.get_rank() == 0:
        for name, value in loop.ddp.state_dict().items():
            note(f"{where} saved {name.replace('_orig_mod.', '')}", value)
    dist.barrier(loop.group)


def _save_states(loop: Loop, where: str, note: Note, _look: Look) -> None:
    saved = [optimizer.state_dict() for optimizer in loop.optimizers]
    _note_states(lambda name, value: note(f"{where} saved {name}", value), saved)


_AFTER: dict[str, Callable[[Loop, str, Note, Look], None]] = {
    "ema": _update_average,
    "clamp": _clamp,
    "data": _replace_data,
    "vector": _replace_by_vector,
    "copy": _copy,
    "save": _save,
    "states": _save_states,
}
ACTIONS = (
    *_AFTER,
    "decay",
    "restore",
    "rate",
    "grow",
    "skip",
    "clip 2",
    "clip inf",
    "look",
    "eval",
    # What `training.py` does around forward and backward.
    "load",
    "scale",
    "autocast",
    "anomaly",
    "reset",
    "write",
    "some first",
    "twice",
    "two forwards",
)
ARRANGEMENTS = (
    *("", "groups", "two optimizers", "temperature"),
    *("encoder", "compiled encoder", "beside"),
)
