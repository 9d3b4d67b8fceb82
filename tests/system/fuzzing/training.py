"""Train a case on one rank, with one compiler or none, and note everything that can be compared."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel, distributed

from tests.support.device import DEVICE
from tests.system.fuzzing import effects, loops, subclasses
from tests.system.fuzzing.blocks import WIDTH, Noted
from tests.system.fuzzing.building import Model, main_of
from tests.system.fuzzing.loops import Loop
from tests.system.fuzzing.spec import Case
from tests.system.fuzzing.wrapping import Compile, compile_ddp, module_of, term, wrap
from tests.system.training.running import Notes


class _Training(NamedTuple):
    """A DDP module (or what is replicated), what is called in its place, and the loop's rest.

    `written` is what "writing" hooks write: the buffers, and each micro-batch's outputs and their
    gradients.
    """

    ddp: Any
    forward: Callable[..., Any]
    named: dict[str, nn.Parameter]
    loop: Loop
    written: list[torch.Tensor]


def _reduce_delayed(ddp: DistributedDataParallel, gradient: torch.Tensor) -> torch.Tensor:
    """As DDP's hook, which does not wait: nobody could tell when to read the gradients."""
    ddp._delay_grad_buffer.div_(dist.get_world_size(ddp.process_group))
    dist.all_reduce(ddp._delay_grad_buffer, group=ddp.process_group)
    return gradient


def train(
    case: Case, rank: int, compile_: Compile, group: dist.ProcessGroup
) -> tuple[Notes, nn.Module]:
    """Train for the steps of a case; return what can be compared, and all that DDP reduces."""
    first_bytes = case.cap_bytes or dist._DEFAULT_FIRST_BUCKET_BYTES
    with (
        torch._dynamo.config.patch(dict.fromkeys(case.dynamo_flags, True)),
        # Dynamo's own optimizer of DDP refuses caps under that of its first bucket, 1 MiB. It is at
        # work in eager DDP too, where torch.cond and flex_attention compile themselves.
        mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", first_bytes),
        mock.patch.object(DistributedDataParallel, "_delayed_all_reduce_hook", _reduce_delayed),
    ):
        return _train(case, rank, compile_, group)


def _train(
    case: Case, rank: int, compile_: Compile, group: dist.ProcessGroup
) -> tuple[Notes, nn.Module]:
    if case.fullgraph:
        compile_ = functools.partial(compile_, fullgraph=True)
    torch._dynamo.reset()
    # torch 2.13: of its own accord it refuses them, in the first call of what AOTAutograd made.
    torch._functorch.config.check_custom_op_aliasing = case.feed != "subclass"
    effects.begin(group)
    torch.manual_seed(case.seed)
    training, reduced = _make(case, compile_, group)
    cap_bytes = 2**20 if case.second_has_one_bucket else case.cap_bytes
    of_second = dataclasses.replace(case, cap_bytes=cap_bytes)
    second = _make(of_second, compile_, group)[0] if case.has_second else None
    notes, notes_of_second = Notes(), Notes()
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    torch.manual_seed(1000 * case.seed + rank)
    joins = "join" in case.actions  # rank 0 has two steps less
    with training.ddp.join() if joins else contextlib.nullcontext():
        for step in range(case.num_steps - 2 * (joins and rank == 0)):
            if step == 1 and "reset" in case.actions:
                torch._dynamo.reset()
            if step == 1 and case.copied:
                _freeze(training.named, reduced, "")
                ddp = _copy(case, training.ddp, group)
                training = _training(case, ddp, reduced, compile_, [], group)
            if case.freezes:
                _freeze(training.named, reduced, _item(case.freezes, step))
            if rank == 0 and _item(case.extras, step):
                _run_alone(case, step, training, notes, generator)
            _train_step(case, step, training, notes, generator, rank)
            if second is not None:
                _train_step(case, step, second, notes_of_second, generator, rank)
    if second is not None:
        notes_of_second.named("parameter", second.named.items())
        notes.add("second", notes_of_second)
    notes.named("parameter", training.named.items())
    notes.named("buffer", module_of(training.ddp).named_buffers())
    loops.end(training.loop, notes.value)
    ddps = training.loop.ddps + ([] if second is None else second.loop.ddps)
    return notes, nn.ModuleList(ddps) if len(ddps) > 1 else ddps[0]


def _make(case: Case, compile_: Compile, group: dist.ProcessGroup) -> tuple[_Training, set[str]]:
    """Make a model, and what trains it; return the names of what DDP reduces too."""
    model = Model(case).to(DEVICE)
    written: list[torch.Tensor] = []
    _hook(case, model, written)
    reduced = {name for name, p in model.named_parameters() if p.requires_grad}
    ddp = wrap(case, compile_(model) if case.compiles_inside else model, group)
    return _training(case, ddp, reduced, compile_, written, group), reduced


def _training(
    case: Case,
    ddp: Any,
    reduced: set[str],
    compile_: Compile,
    written: list[torch.Tensor],
    group: dist.ProcessGroup,
) -> _Training:
    named = dict(module_of(ddp).named_parameters())
    may_train = [p for name, p in named.items() if name in reduced or "thawed" in case.freezes]
    loop = loops.begin(case, ddp, module_of(ddp), may_train, compile_, group)
    ddp.train("eval" not in case.actions)
    return _Training(ddp, compile_ddp(case, ddp, compile_), named, loop, written)


def _no_sync_and_anomalies(
    case: Case, loop: Loop, is_last: bool
) -> contextlib.AbstractContextManager[object]:
    stack = contextlib.ExitStack()
    if not is_last:
        stack.enter_context(loop.no_sync())
    if "anomaly" in case.actions:
        stack.enter_context(torch.autograd.set_detect_anomaly(True))
    return stack


def _forward(case: Case, training: _Training, x: torch.Tensor) -> Any:
    is_autocast = "autocast" in case.actions
    autocast = torch.autocast(DEVICE.type, torch.bfloat16) if is_autocast else None
    with autocast or contextlib.nullcontext():
        fed = training.loop.encode(x)
        if case.feed == "keyword":
            output = training.forward(x=fed)
        else:
            output = training.forward(_feed(case, fed))
    if "writing" in case.hooks:
        _gather_written(training.ddp, output, training.written)
    return output


def _backward(
    case: Case, loss: torch.Tensor, named: dict[str, nn.Parameter], notes: Notes, where: str
) -> None:
    """Run backward: once, twice, or after the gradients of some parameters alone."""
    if "some first" in case.actions:  # as for a gradient penalty's weight
        some = [p for p in named.values() if p.requires_grad][1:3]
        gradients = torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True)
        found = {str(i): g.to_dense() for i, g in enumerate(gradients) if g is not None}
        notes.named(f"{where} some gradient", found.items())
    if "twice" in case.actions:  # DDP reduces in the first; the second adds each rank's own
        loss.backward(retain_graph=True)
    loss.backward()


@torch.no_grad()
def _write_outputs(output: Any, notes: Notes, where: str) -> None:
    """Write to what was returned, which may share its memory with the input, or with others."""
    found = {
        name: value
        for name, value in _flatten("output", output)
        if type(value) is torch.Tensor and value.is_floating_point() and 0 not in value.stride()
    }
    for value in found.values():
        value.mul_(0.5)
    notes.named(f"{where} written", found.items())


def _train_step(
    case: Case,
    step: int,
    training: _Training,
    notes: Notes,
    generator: torch.Generator,
    rank: int,
) -> None:
    ddp, forward, named, loop, _ = training
    module_of(ddp).begin_step(step)
    more_rows = rank * case.more_rows[step] if step < len(case.more_rows) else 0
    if step and case.evaluates_between:
        ddp.eval()
        with torch.no_grad():
            _note_output(notes, f"eval {step}", forward(_feed(case, _draw(2, generator))))
        ddp.train("eval" not in case.actions)
    sizes = case.batches[step]
    for part, size in enumerate(sizes):
        where = f"step {step}.{part}"
        is_last = part == len(sizes) - 1
        x = _draw(size + more_rows, generator).to(getattr(torch, case.input_dtype))
        x.requires_grad_(case.is_input_trained)
        with _no_sync_and_anomalies(case, loop, is_last):
            module_of(ddp).head = part % 2 if case.has_heads else 0
            output = _forward(case, training, x)
            loss = _note_output(notes, where, output)
            if "two forwards" in case.actions:
                other = _forward(case, training, _draw(size, generator).to(x.dtype))
                loss = loss + 2 * _note_output(notes, f"{where} other", other)
            if case.arrangement == "beside":  # gradients that come with DDP's
                loss = loss + term(main_of(module_of(ddp)(_feed(case, x.detach() * 2))))
            loss = loop.scale(loss, step)
            if loss.requires_grad and not case.runs_backward_inside:  # unless all is frozen
                _backward(case, loss, named, notes, where)
        if "write" in case.actions:
            _write_outputs(output, notes, where)
        notes.value(f"{where} input", x)
        notes.texts[f"{where} calls"] = ", ".join(effects.calls)
        _note_gradients(notes, where, {"input": x})
        _note_gradients(notes, where, named | loop.beside)
    loops.update(loop, step, notes.value, functools.partial(_look, case, notes, generator))


@torch.no_grad()
def _look(
    case: Case, notes: Notes, generator: torch.Generator, where: str, module: nn.Module
) -> None:
    _note_output(notes, where, module(_feed(case, _draw(3, generator))))


def _item(steps: tuple[str, ...], step: int) -> str:
    return steps[step] if step < len(steps) else ""


def _freeze(named: dict[str, nn.Parameter], reduced: set[str], how: str) -> None:
    """Freeze what `how` says of what DDP was made to reduce; thaw the rest of it."""
    for index, (name, parameter) in enumerate(named.items()):
        is_frozen = how == "all" or (how == "half" and index % 2 == 1)
        parameter.requires_grad_(how == "thawed" or (name in reduced and not is_frozen))


def _run_alone(
    case: Case, step: int, training: _Training, notes: Notes, generator: torch.Generator
) -> None:
    """Run a forward that other ranks do not run, and no backward."""
    ddp, how = training.ddp, case.extras[step]
    ddp.train(how != "eval")
    with ddp.no_sync() if how == "no_sync" else torch.no_grad():
        output = training.forward(_feed(case, _draw(2, generator)))
    ddp.train("eval" not in case.actions)
    _note_output(notes, f"forward before {step}", output)


def _copy(
    case: Case, ddp: DistributedDataParallel, group: dist.ProcessGroup
) -> DistributedDataParallel:
    # DDP is copied with the default group alone; this one has a limit of its own.
    with mock.patch.object(distributed, "_get_default_group", return_value=group):
        if case.copied == "deepcopy":
            return copy.deepcopy(ddp)
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


def _hook(case: Case, model: nn.Module, written: list[torch.Tensor]) -> None:
    """Put the hooks of a case on every other parameter."""
    write = functools.partial(_write, written)
    for module in model.modules():
        if isinstance(module, Noted):
            module.hook()
    for parameter in [p for p in model.parameters() if p.requires_grad][::2]:
        if "gradient" in case.hooks:
            parameter.register_hook(lambda gradient: gradient * 1.5)
        if "accumulated" in case.hooks:
            parameter.register_post_accumulate_grad_hook(_count)
        if "halving" in case.hooks:
            parameter.register_post_accumulate_grad_hook(_halve)
        if "writing" in case.hooks:
            parameter.register_post_accumulate_grad_hook(write)


def _gather_written(ddp: nn.Module, output: Any, written: list[torch.Tensor]) -> None:
    """Have "writing" hooks write what backward may have yet to read."""
    written[:] = [buffer for buffer in ddp.buffers() if buffer.is_floating_point()]
    for _, value in _flatten("output", output):
        if type(value) is torch.Tensor and value.is_floating_point() and value.grad_fn is not None:
            written.append(value)
            value.register_hook(written.append)


@torch.no_grad()
def _write(written: list[torch.Tensor], _parameter: torch.Tensor) -> None:
    """Write all of it in place. If eager has saved some, it raises, and the case is discarded."""
    for tensor in written:
        tensor.mul_(0.75)


def _halve(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def _count(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:  # compiled code has them run for unused parameters too
        parameter.num_accumulated = getattr(parameter, "num_accumulated", 0) + 1


def _draw(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=generator).to(DEVICE)


def _feed(case: Case, x: torch.Tensor) -> Any:
    if case.feed == "list":
        return [x, None]
    if case.feed == "subclass":
        return x.as_subclass(subclasses.Plain)
    if case.feed in ("dict", "jagged", "pair"):
        return {"x": x, "beside": subclasses.beside(case.feed, x)}
    return x


def _note_output(notes: Notes, where: str, output: Any) -> torch.Tensor:
    """Note all tensors of an output; return a loss of those that have gradients."""
    found = dict(_flatten("output", output))
    first: dict[int, str] = {}
    said, terms = [], []
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            parts = subclasses.parts(value)
            for part, tensor in parts.items():
                notes.values[f"{where} {name}{part}"] = tensor.detach().clone()
            same = first.setdefault(id(value), name)
            needs = ", needs gradient" if value.requires_grad else ""
            said.append(f"{name}: {type(value).__name__}, {value.dtype}{needs}, is {same}")
            terms += [term(tensor) * (len(first)) for tensor in parts.values()]
        else:
            said.append(f"{name}: {value!r}")
    notes.texts[where] = "; ".join(said)
    terms = [of_one for of_one in terms if of_one.requires_grad]
    loss = torch.stack(terms).sum() if terms else torch.zeros(())
    notes.values[f"{where} loss"] = loss.detach().clone()
    return loss


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flatten(f"{name}.{index}", item)
    else:
        yield name, value


def _note_gradients(notes: Notes, where: str, tensors: Mapping[str, torch.Tensor]) -> None:
    notes.gradients(f"{where} gradient", tensors.items())
    for name, tensor in tensors.items():
        notes.texts[f"{where} hooks {name}"] = str(getattr(tensor, "num_accumulated", 0))
