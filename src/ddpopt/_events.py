"""Where forwards of DDP modules and compiled sections report that they run.

Forwards notify the observers of their module, in a fixed order; a module without observers pays one
dictionary lookup. Sections notify the listener, which exists only inside `ddpopt.record`; otherwise
a section pays one look at `current`, and one at whether torch's profiler is on, which then shows it
as a range of the same name.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from ddpopt import _torch

_DEPTH = 4  # of views that may lie between an output and the node of its compiled graph
_WATCHED = "ddpopt: watched"  # in the node's own dictionary, which ends with the step

Context = contextlib.AbstractContextManager[None]


class Priority(enum.IntEnum):
    """The order in which observers are notified; a module has at most one of each kind."""

    REBUCKET = enum.auto()
    TUNER = enum.auto()
    ADVICE = enum.auto()
    RECORDER = enum.auto()
    METRICS = enum.auto()
    COMPILED = enum.auto()
    NUMBERING = enum.auto()
    ACCUMULATION = enum.auto()  # last: others ask what was so before the forward that begins


class Observer:
    """Is notified of a DDP module's forwards; holds the module weakly, if at all."""

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Run before a forward."""

    def after_forward(self, ddp: DistributedDataParallel, is_ours: bool) -> None:
        """Run after a forward; `is_ours` says that it runs in `torch.compile` with our backend."""


_Observers = tuple[tuple[Priority, Observer], ...]
_Interest = Callable[[DistributedDataParallel], Observer | None]
_interests: dict[Priority, _Interest] = {}
_observers: weakref.WeakKeyDictionary[DistributedDataParallel, _Observers]
_observers = weakref.WeakKeyDictionary()


def ask_at_first(priority: Priority, interest: _Interest) -> None:
    """Ask `interest` for an observer of each module whose first forward is yet to come."""
    _interests[priority] = interest
    for ddp in list(_observers):  # `rebucket` observed them before the backend was loaded
        observer = interest(ddp)
        if observer is not None:
            observe(ddp, priority, observer)


def watch_forwards() -> None:
    """Have forwards reported in a process that compiles nothing, too: the loaded backend does."""
    importlib.import_module("ddpopt.backend")


def observe(ddp: DistributedDataParallel, priority: Priority, observer: Observer) -> None:
    """Notify `observer` of a module's forwards; it replaces one with the same priority."""
    others = [item for item in _observers_of(ddp) if item[0] is not priority]
    _observers[ddp] = tuple(sorted([*others, (priority, observer)], key=lambda item: item[0]))


def ignore(ddp: DistributedDataParallel, priority: Priority) -> None:
    """Remove the observer with this priority."""
    _observers[ddp] = tuple(item for item in _observers_of(ddp) if item[0] is not priority)


def find_observer(ddp: DistributedDataParallel, priority: Priority) -> Observer | None:
    """The observer of a module with this priority, None if there is none."""
    return dict(_observers.get(ddp, ())).get(priority)


def will_communicate(ddp: DistributedDataParallel) -> bool:
    """Whether a backward of the current forward would end in allreduces."""
    return torch.is_grad_enabled() and bool(ddp.require_backward_grad_sync)


class StepClock(Observer):
    """Times steps, from one forward that communicates to the next: `step_s` is the last one's."""

    def __init__(self) -> None:
        self.step_s: float | None = None
        self._began_s: float | None = None

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        if will_communicate(ddp):
            now_s = time.perf_counter()
            if self._began_s is not None:
                self.step_s = now_s - self._began_s
            self._began_s = now_s


def before_forward(ddp: DistributedDataParallel) -> None:
    """Notify a module's observers that its forward begins."""
    for _, observer in _observers_of(ddp):
        observer.before_forward(ddp)


def after_forward(ddp: DistributedDataParallel, is_ours: bool) -> None:
    """Notify a module's observers, including those added in this forward, that it has ended."""
    for _, observer in _observers_of(ddp):
        observer.after_forward(ddp, is_ours)


def find_ddp(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DDP module around a module, once its forward has run; the newest of several."""
    found = (ddp for ddp in reversed(list(_observers)) if ddp.module is module)
    return next(found, None)


def _observers_of(ddp: DistributedDataParallel) -> _Observers:
    found = _observers.get(ddp)
    if found is None:
        asked = ((priority, interest(ddp)) for priority, interest in sorted(_interests.items()))
        found = tuple((priority, observer) for priority, observer in asked if observer is not None)
        _observers[ddp] = found
    return found


class Label(NamedTuple):
    """A section, as the listener sees it; a graph that is compiled whole is its section 0."""

    graph: str
    section: int


# Makes the context in which a section runs; the text is "forward" or "backward".
Listener = Callable[[Label, str], Context]

current: Listener | None = None


@contextlib.contextmanager
def show_range(label: Label, kind: str) -> Iterator[None]:
    """Show torch's profiler a section, as in `ddpopt: 4/0 section 2 backward`."""
    with record_function(f"ddpopt: {label.graph} section {label.section} {kind}"):
        yield


def listening() -> Listener | None:
    """The listener, or what shows sections to torch's profiler; None if nobody wants to know."""
    if current is not None:
        return current
    return show_range if _torch.shows_ranges() else None


def notifying(compiled: Callable[..., Any], label: Label) -> Callable[..., Any]:
    """Return `compiled`, notifying the listener of its forward and of its outputs' backward."""

    def run(*args: Any) -> Any:
        section = listening()
        if section is None:
            return compiled(*args)
        with section(label, "forward"):
            outputs = compiled(*args)
        watch_backward(outputs, lambda: section(label, "backward"))
        return outputs

    return run


@contextlib.contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Notify `listener` in this block; RuntimeError if there is a listener already."""
    global current  # noqa: PLW0603  # a section can afford one look at a global
    if current is not None:
        raise RuntimeError(
            "a ddpopt.record block is open already; record one DDP module at a time, and leave "
            "the block before the next"
        )
    current = listener
    try:
        yield
    finally:
        current = None


def watch_backward(outputs: Any, running: Callable[[], Context]) -> None:
    """Make the backward of a compiled section's outputs run in the context that `running` makes.

    Does nothing if no AOTAutograd node made them, or if its backward is watched already.
    """
    node = _find_node(outputs)
    if node is None:
        return
    node.metadata[_WATCHED] = True
    stack = contextlib.ExitStack()
    node.register_prehook(lambda _: stack.enter_context(running()))
    node.register_hook(lambda *_: stack.close())


def _find_node(outputs: Any) -> Any:
    """Return the node of a compiled graph that made these outputs; None without a new one."""
    tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
    level: list[Any] = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor)]
    for _ in range(_DEPTH):
        nodes = [node for node in level if node is not None]
        compiled = [node for node in nodes if _torch.is_compiled_backward(node)]
        for node in compiled:
            if _WATCHED not in node.metadata:
                return node
        others = (node for node in nodes if node not in compiled)
        level = [following for node in others for following, _ in node.next_functions]
    return None
