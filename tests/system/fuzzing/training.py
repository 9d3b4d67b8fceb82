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

from tests.system.fuzzing import effects, loops, subclasses
from tests.system.fuzzing.blocks import WIDTH, Noted
from tests.system.fuzzing.building import Model, main_of
from tests.system.fuzzing.loops import Loop
from tests.system.fuzzing.spec import Case
from tests.system.training.running import Notes

Compile = Callable[[nn.Module], Any]


class _Training(NamedTuple):
    """A DDP module, what is called in its place, its parameters by name, and the loop's rest.

    `written` is what "writing" hooks write: the buffers, and each micro-batch's outputs and their
    gradients.
    """

    ddp: DistributedDataParallel
    forward: Callable[..., Any]
    named: dict[str, nn.Parameter]
    loop: Loop
    written: list[torch.Tensor]


def _reduce_delayed(ddp: DistributedDataParallel, gradient: torch.Tensor) -> torch.Tensor:
    """As DDP's hook, which does not wait: nobody could tell when to read the gradients."""
    ddp._delay_grad_buffer.div_(dist.get_world_size(ddp.process_group))
    dist.all_reduce(ddp._delay_grad_buffer, group=ddp.process_group)
    return gradient


@mock.patch.object(DistributedDataParallel, "_delayed_all_reduce_hook", _reduce_delayed)
def train(
    case: Case, rank: int, compile_: Compile, group: dist.ProcessGroup
) -> tuple[Notes, DistributedDataParallel]:
    """Train for the steps of a case."""
    torch._dynamo.reset()
    # torch 2.13: of its own accord it refuses them, in the first call of what AOTAutograd made.
    torch._functorch.config.check_custom_op_aliasing = case.feed != "subclass"
    effects.begin(group)
    torch.manual_seed(case.seed)
    training, reduced = _make(case, compile_, group)
    second = _make(case, compile_, group)[0] if case.has_second else None
    notes, notes_of_second = Notes(), Notes()
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    torch.manual_seed(1000 * case.seed + rank)
    for step in range(len(case.batches)):
        if step == 1 and case.copied:
            _freeze(training.named, reduced, "")
            ddp = _copy(case, training.ddp, group)
            training = _training(case, ddp, reduced, compile_, [])
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
    notes.named("buffer", _module(training.ddp).named_buffers())
    loops.end(training.loop, notes.value)
    return notes, training.ddp


def _make(case: Case, compile_: Compile, group: dist.ProcessGroup) -> tuple[_Training, set[str]]:
    """Make a model, and what trains it; return the names of what DDP reduces too."""
    model = Model(case)
    written: list[torch.Tensor] = []
    _hook(case, model, written)
    reduced = {name for name, p in model.named_parameters() if p.requires_grad}
    ddp = _wrap(case, compile_(model) if case.compiles_inside else model, group)
    return _training(case, ddp, reduced, compile_, written), reduced


def _training(
    case: Case,
    ddp: DistributedDataParallel,
    reduced: set[str],
    compile_: Compile,
    written: list[torch.Tensor],
) -> _Training:
    named = dict(_module(ddp).named_parameters())
    may_train = [p for name, p in named.items() if name in reduced or "thawed" in case.freezes]
    if case.regions:
        _module(ddp).compile_regions(compile_)
    is_compiled = bool(case.compiles_inside or case.regions)
    loop = loops.begin(case, ddp, _module(ddp), may_train)
    ddp.train("eval" not in case.actions)
    forward: Callable[..., Any] = ddp
    if case.runs_backward_inside:
        forward = compile_(_running_both(ddp))
    elif not is_compiled:
        forward = compile_(ddp)
    return _Training(ddp, forward, named, loop, written)


def _running_both(ddp: DistributedDataParallel) -> Callable[..., Any]:
    """A function that runs forward and, if there are gradients, the backward of its main output."""

    def run(*args: Any, **kwargs: Any) -> Any:
        output = ddp(*args, **kwargs)
        if torch.is_grad_enabled():
            loss = _term(main_of(output))
            if loss.requires_grad:
                loss.backward()
        return output

    return run


def _module(ddp: DistributedDataParallel) -> Any:
    return getattr(ddp.module, "_orig_mod", ddp.module)


def _train_step(
    case: Case,
    step: int,
    training: _Training,
    notes: Notes,
    generator: torch.Generator,
    rank: int,
) -> None:
    ddp, forward, named, loop, written = training
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
        with contextlib.nullcontext() if is_last else loop.no_sync():
            _module(ddp).head = part % 2 if case.has_heads else 0
            fed = loop.encode(x)
            output = forward(x=fed) if case.feed == "keyword" else forward(_feed(case, fed))
            if "writing" in case.hooks:
                _gather_written(ddp, output, written)
            loss = loop.scale(_note_output(notes, where, output))
            if loss.requires_grad and not case.runs_backward_inside:  # unless all is frozen
                loss.backward()
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


def _wrap(case: Case, model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    caps = {} if case.cap_bytes is None else {"bucket_cap_mb": case.cap_bytes / 1024 / 1024}
    delayed = _chosen(model, case.delayed)
    if delayed:
        first = next(p for name, p in model.named_parameters() if name.endswith("first.weight"))
        caps |= {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": first}
    ignored = [name for name, _ in _chosen(model, case.ignored)]
    if ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(
        model,
        process_group=group,
        static_graph=case.static_graph,
        find_unused_parameters=case.find_unused,
        gradient_as_bucket_view=case.bucket_view,
        broadcast_buffers=case.broadcasts_buffers,
        **caps,
    )


def _chosen(model: nn.Module, which: str) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the last layer, or of "most": those of the blocks too."""
    ends = {"": (), "last": ("last.weight", "last.bias"), "most": ("",)}[which]
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if name.endswith(ends) and "first." not in name and parameter.dtype == torch.float32
    ]


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
        if "writing" in case.hooks:
            parameter.register_post_accumulate_grad_hook(write)


def _gather_written(ddp: DistributedDataParallel, output: Any, written: list[torch.Tensor]) -> None:
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


def _count(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:  # compiled code has them run for unused parameters too
        parameter.num_accumulated = getattr(parameter, "num_accumulated", 0) + 1


def _draw(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=generator)


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
            terms += [_term(tensor) * (len(first)) for tensor in parts.values()]
        else:
            said.append(f"{name}: {value!r}")
    notes.texts[where] = "; ".join(said)
    terms = [term for term in terms if term.requires_grad]
    loss = torch.stack(terms).sum() if terms else torch.zeros(())
    notes.values[f"{where} loss"] = loss.detach().clone()
    return loss


def _term(value: torch.Tensor) -> torch.Tensor:
    return value.double().square().sum() / max(1, value.numel())


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
