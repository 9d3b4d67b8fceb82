"""`attach`, and the `Handle` that it returns, an algorithm at work: what all algorithms share.

[Note: steps] A step of an algorithm is a forward with gradients on and outside `no_sync`, together
with the backward and the update that follow it. Evaluation, `no_grad`, the forwards of accumulated
micro-batches and additional forwards before the same backward are not counted. A step begins with
its forward; in eval mode, which may be an evaluation without `no_grad`, only when its backward
reduces the first bucket. It ends with the last optimizer's update; if that is skipped, as
GradScaler may do, it ends with the next forward of this kind, so that all ranks communicate equally
often.

[Note: the end of a backward] A backward may run others, as reentrant checkpoints do, each of which
ends before it. DDP reduces each bucket once in a backward, in order, so all gradients are final
when the backward, outer or inner, in which the last bucket was reduced has ended. In a static
graph's first iteration, DDP reduces all buckets when the outermost backward has ended, gives each
the index 0, and marks none of several as the last: an index 0 that comes again shows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddpopt import _logs, _torch
from ddpopt.algorithms.comm import Communicator, FlatWeights, Groups, Worker, ring_bytes
from ddpopt.config import check_boolean
from ddpopt.errors import AttachError, OptionError, PeerError, TorchDriftError
from ddpopt.inspection import metrics
from ddpopt.ranks.agree import Fact, RankReport, communicating, require_equal
from ddpopt.reducer import Parameter
from ddpopt.split.state import KEEPING_ALLREDUCE, ddp_of, find_mode

Bucket = Any  # torch.distributed.GradBucket
GradientFuture = Any  # torch.futures.Future[torch.Tensor]; DDP refuses other annotations

_COUNTERS = ("num_steps", "num_communications")
# See docs/reading-the-logs.md.
_METRICS = ("steps", "skipped_steps", "skipped_updates", "stale_steps")


def _check_is_free(ddp: DistributedDataParallel) -> None:
    """Raise AttachError if an algorithm or another comm hook reduces the module's buckets."""
    reduction = _torch.bucket_reduction(ddp)
    if reduction is None and _torch.has_comm_hook(ddp):
        raise AttachError(
            "this DDP module has a comm hook, and takes only one; attach the algorithm to a DDP "
            "module without"
        )
    if reduction is not None and not reduction.is_idle:
        raise AttachError("this model has an algorithm already; detach it first")


class ModuleHook:
    """A hook on a module, of which copies and pickles do nothing."""

    def __init__(self, call: Callable[..., Any] = lambda *_: None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What an algorithm is attached to.

    `parameters` are, in the module's order, those that DDP reduces, even if they are frozen now,
    and those that are trainable now, except what DDP ignores.
    """

    ddp: DistributedDataParallel
    optimizers: tuple[torch.optim.Optimizer, ...]
    parameters: dict[torch.Tensor, Parameter]

    @property
    def group(self) -> dist.ProcessGroup:
        """DDP's process group, on which DDP itself may be communicating."""
        group: dist.ProcessGroup = self.ddp.process_group
        return group

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, on which communication is ordered."""
        return next(iter(self.parameters)).device


class _Updates:
    """Finds updates of the model of which its handle was not told by an optimizer's hooks.

    There are two kinds. An optimizer that was not given to `attach` updates the model, such as one
    that was made anew; all optimizers of the process are watched for that. Or the `step` of one
    that was given was replaced by a function that calls no hooks; a load of a checkpoint looks the
    same, so this is only looked for until an optimizer has called its hooks for the first time.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        # Since a backward outside of `paused` began to reduce gradients, to the next forward.
        self._is_expected = False
        self._num_own = 0  # how many updates of given optimizers have begun
        self._num_running = 0  # how many of them have not ended
        # Of each other optimizer whose update is running: how many own ones had begun before.
        self._others: dict[torch.optim.Optimizer, int] = {}
        self._stranger = ""  # the class of an optimizer that should have been given
        # Given optimizers that have called no hook yet, with the versions that their weights had
        # in the last backward, or after the algorithm wrote them; and those of them whose weights
        # somebody else has written since.
        self._silent: dict[torch.optim.Optimizer, list[int]]
        self._silent = {optimizer: [] for optimizer in training.optimizers}
        self._written: set[torch.optim.Optimizer] = set()

    def expect(self, *, is_paused: bool) -> None:
        """Note that a backward begins to reduce gradients, which an update follows."""
        self._is_expected = not is_paused
        self.note_versions()

    def note_versions(self) -> None:
        """Note that what was written to weights up to here is no update."""
        for optimizer in self._silent:
            self._silent[optimizer] = _torch.versions(self._updated_by(optimizer))

    def begin_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer that was given begins an update."""
        self._silent.pop(optimizer, None)
        self.find_written()
        self._num_own += 1
        self._num_running += 1

    def end_own(self) -> None:
        self._num_running -= 1

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at any optimizer of the process that begins an update."""
        # One within an own update is a part of it, as with ZeroRedundancyOptimizer.
        if not self._is_expected or self._num_running:
            return
        if optimizer not in self._training.optimizers and self._updated_by(optimizer):
            self._others[optimizer] = self._num_own

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        # One that has called an own update is a wrapper.
        if self._others.pop(optimizer, None) == self._num_own:
            self._stranger = type(optimizer).__name__

    def check(self, name: str, step: int) -> None:
        """Raise or warn before a forward if the algorithm `name` has missed an update.

        Raises:
            AttachError: another optimizer than those given has updated the model.
        """
        self._num_running = 0  # an update that raised never ended
        self._others.clear()
        if self._stranger:
            raise AttachError(
                f"a {self._stranger} that was not given to attach has updated parameters of this "
                f"model in step {step}, and {name} has to know of all updates; call detach(), and "
                "attach the algorithm again with all optimizers that update the model now"
            )
        self.find_written()
        missed = [optimizer for optimizer in self._silent if optimizer in self._written]
        self._written.clear()
        self._is_expected = False
        for optimizer in missed:
            del self._silent[optimizer]  # say it once
            _logs.warning(
                "weights were written after the backward of step %d, and step() of the %s given to "
                "attach has not called its hooks: unless you wrote them yourself, %s does not know "
                "of its updates; give attach the optimizer whose step() is called, and do not "
                "replace that method by one that does not call it",
                step,
                type(optimizer).__name__,
                name,
            )

    def find_written(self) -> None:
        """Look for weights that were written since the last backward, or `note_versions`."""
        for optimizer, versions in self._silent.items():
            if self._is_expected and versions != _torch.versions(self._updated_by(optimizer)):
                self._written.add(optimizer)

    def _updated_by(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The parameters of the model that an optimizer has."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in parameters if p in self._training.parameters]


# One pair of the process's hooks for all handles, none of which the set keeps alive. They are not
# removed when a handle is collected: torch may be walking over its hooks just then.
_watching: weakref.WeakSet[_Updates] = weakref.WeakSet()
_hooks_of_all: list[Any] = []


def _watch_all_optimizers(updates: _Updates) -> None:
    """Tell `updates` of each update that an optimizer of this process makes."""
    if not _hooks_of_all:
        _hooks_of_all.append(register_optimizer_step_pre_hook(_note_begin))
        _hooks_of_all.append(register_optimizer_step_post_hook(_note_end))
    _watching.add(updates)


def _watch_no_longer(updates: _Updates) -> None:
    _watching.discard(updates)
    if not _watching:
        for hook in _hooks_of_all:
            hook.remove()
        _hooks_of_all.clear()


def _note_begin(optimizer: torch.optim.Optimizer, *_ignored: object) -> None:
    for updates in list(_watching):
        updates.begin(optimizer)


def _note_end(optimizer: torch.optim.Optimizer, *_ignored: object) -> None:
    for updates in list(_watching):
        updates.end(optimizer)


HandleT = TypeVar("HandleT", bound="Handle")


class Algorithm(Generic[HandleT]):
    """What ranks communicate and when; a frozen dataclass that checks its values when created.

    Values out of range raise OptionError, values of another type TypeError. `handle_type` is the
    class that puts it to work.
    """

    __slots__ = ()
    handle_type: type[HandleT]
    agrees_on_cpu: ClassVar[bool] = False  # whether handles need `groups.agreement`

    @property
    def name(self) -> str:
        return type(self).__name__

    def ranks_per_node(self, num_ranks: int) -> int:
        """Return how many ranks average before their node communicates."""
        return 1

    def check(self, training: Training) -> None:
        """Raise the reason if this cannot be attached to `training`, as far as this rank knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalAlgorithm(Algorithm[HandleT]):
    """As `Algorithm`, optionally hierarchical; flags must be bool, and counts at least 1.

    Attributes:
        hierarchical: See [Note: hierarchical] in `algorithms/comm.py`.
        local_world_size: Ranks on each node; None means LOCAL_WORLD_SIZE, which torchrun sets.
    """

    hierarchical: bool = True
    local_world_size: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                check_boolean(field.name, value, TypeError)
            elif isinstance(field.default, int):
                check_count(field.name, value, 1)
        if self.local_world_size is not None:
            check_count("local_world_size", self.local_world_size, 1)

    def ranks_per_node(self, num_ranks: int) -> int:
        """As `Algorithm.ranks_per_node`; raise OptionError if unknown, or no divisor."""
        if not self.hierarchical:
            return 1
        given = str(self.local_world_size or os.environ.get("LOCAL_WORLD_SIZE", ""))
        if not given:
            raise OptionError(
                "hierarchical=True (the default) needs the number of ranks on each node, and "
                "LOCAL_WORLD_SIZE is not set; start with torchrun, give local_world_size, or pass "
                "hierarchical=False"
            )
        if not given.isdecimal() or not int(given):
            raise OptionError(f"LOCAL_WORLD_SIZE is {given!r}; it must be a whole number above 0")
        size = int(given)
        if num_ranks % size:
            raise OptionError(
                f"{num_ranks} ranks cannot be divided into nodes of {size} (local_world_size or "
                "LOCAL_WORLD_SIZE); pass hierarchical=False, or equal numbers of ranks on all nodes"
            )
        return size


def check_count(name: str, value: object, least: int) -> None:
    """Raise TypeError unless `value` is an int, OptionError if it is below `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; give an int")
    if value < least:
        raise OptionError(f"{name} is {value}; the least is {least}")


def agree_on(
    ddp: DistributedDataParallel,
    check: Callable[[], list[Fact]],
    remedy: str,
    group: Communicator | None = None,
) -> None:
    """Raise on all ranks what `check` raises on any, or AttachError if its facts differ.

    An error of another kind than `attach` raises is an AttachError with its text, on the rank that
    it is from with the error as its cause. Only a PeerError is raised at once: the other ranks have
    one too, or are not there to be told.
    """
    cause: Exception | None = None
    try:
        report = RankReport(check())
    except PeerError:
        raise
    except (AttachError, OptionError, TorchDriftError, TypeError, NotImplementedError) as problem:
        report = RankReport([], problem)
    except Exception as problem:  # of an optimizer, or of an algorithm that users wrote
        cause = problem
        report = RankReport([], AttachError(f"{type(problem).__name__}: {problem}"))
    communicator = None if group is None else group.group
    try:
        require_equal(ddp, report, AttachError, remedy, group=communicator)
    except AttachError as error:
        raise error from cause


class Handle:
    """An algorithm at work on a model, from `attach` to `detach`.

    All ranks call collective methods in the same step; PeerError is raised if one does not.
    `num_steps` counts steps, see [Note: steps] in `algorithms/handle.py`, and `num_communications`
    how often ranks exchanged weights or reduced gradients.
    """

    # Made by `set_up` before __init__ runs. That makes no collective call, so that it may fail on
    # one rank without others waiting for it.
    groups: Groups

    def __init__(self, training: Training, algorithm: Algorithm[Any]) -> None:
        self.algorithm, self.training = algorithm, training
        self.weights = FlatWeights(training.parameters)
        self.num_steps = self.num_communications = 0
        self._metrics: dict[str, float] = dict.fromkeys(_METRICS, 0)  # of steps that have ended
        self._seen_communications = 0  # when the last one had ended
        self._is_attached = True
        self._num_pauses = 0
        self._is_open = False  # a step has begun and has not ended
        self._has_run_backward = False
        # The first bucket of a backward was reduced, and it has not ended.
        self._is_reducing = False
        self._failure: Exception | None = None  # of a bucket; DDP would show it without its type
        self._updated: set[torch.optim.Optimizer] = set()  # in the current step
        self._updates = _Updates(training)
        ignored, known = training.ddp.parameters_to_ignore, training.parameters
        named = training.ddp.module.named_parameters()
        # Neither DDP reduces them, nor does this hold them.
        self._frozen = {name: p for name, p in named if p not in known and name not in ignored}
        # The model and its optimizers know nothing of this yet: see `_take_over`.
        self._reduction: _torch.BucketReduction | None = None
        self._removable: list[Any] = []

    def set_up(self, training: Training, algorithm: Algorithm[Any], remedy: str) -> None:
        """Make the groups, run __init__ and take over, on all ranks or on none. Collective.

        It is how `attach` makes a handle, of which only `__new__` has been called. `remedy` is for
        settings that differ between ranks.
        """
        with communicating("making the algorithm's process groups"):
            ranks_per_node = algorithm.ranks_per_node(training.group.size())
            self.groups = Groups(training.group, training.device, ranks_per_node)
            if algorithm.agrees_on_cpu:
                self.groups.make_agreement()

        def make() -> list[Fact]:
            self.__init__(training, algorithm)  # type: ignore[misc]  # as calling the class does
            self._take_over()
            return []

        try:
            agree_on(training.ddp, make, remedy)
        except BaseException as error:
            is_agreed = isinstance(error, Exception) and not isinstance(error, PeerError)
            self._abandon(is_agreed=is_agreed)
            raise

    def _take_over(self) -> None:
        """Have the model and its optimizers call this handle from here on.

        `set_up` does this when the whole handle is made. The comm hook comes last, which cannot be
        taken back.
        """
        ddp = self.training.ddp
        _torch.hide_from_dynamo()
        hook = ModuleHook(self._before_forward)  # the model keeps this alive
        self._removable.append(ddp.register_forward_pre_hook(hook))
        before = weakly(self._before_update)
        after = weakly(self._after_update)
        for optimizer in self.training.optimizers:
            self._removable.append(optimizer.register_step_pre_hook(before))
            self._removable.append(optimizer.register_step_post_hook(after))
        _watch_all_optimizers(self._updates)
        metrics.set_source(ddp, weakref.WeakMethod(self.metrics))
        self._reduction = _torch.bucket_reduction(ddp) or _torch.BucketReduction(ddp)
        self._reduction.find = weakref.WeakMethod(self.on_bucket)

    def _let_go(self) -> None:
        """Undo `_take_over`, as far as that came: DDP has its own allreduce again."""
        for removable in self._removable:
            removable.remove()
        _watch_no_longer(self._updates)
        metrics.set_source(self.training.ddp, lambda: None)
        if self._reduction is not None:
            self._reduction.find = lambda: None

    def _abandon(self, *, is_agreed: bool) -> None:
        """Leave nothing of a handle that could not be made, here or on another rank.

        Unless all ranks know, groups stay on which others may be waiting, as in `detach`.
        """
        # What __init__ has not come to is missing, also for `close` of a class that users wrote.
        # What fails to end here ends when the handle is collected.
        with contextlib.suppress(Exception):
            self._let_go()
        with contextlib.suppress(Exception):
            self.close()
        if is_agreed:
            self.groups.end()

    # ---- what an algorithm does --------------------------------------------------------------

    def reduce(self, bucket: Bucket) -> GradientFuture:
        """The future gradients of a bucket; by default they are left unchanged."""
        return noop_hook(None, bucket)

    def end_backward(self) -> None:
        """Run when all gradients are final; see [Note: the end of a backward]."""

    def begin_step(self) -> None:
        """Run before a step's forward, in eval mode in its backward; `num_steps` counts it."""

    def before_update(self) -> None:
        """Run before each optimizer's update, and if updates are skipped: once or more."""

    def after_update(self) -> None:
        """Run after the last optimizer's update, or when that is skipped."""

    def end_step(self) -> None:
        """Run after `after_update` if a step has ended."""

    def begin_pause(self) -> None:
        """Run when `paused` begins."""

    def end_pause(self) -> None:
        """Run when `paused` ends."""

    def close(self) -> None:
        """End what runs in the background."""

    def check_state(self, state: dict[str, Any]) -> list[Fact]:
        """Return what in `state` has to be equal on all ranks; raise why it cannot be loaded."""
        if not isinstance(state, dict):
            raise TypeError(f"a state is a dict, as state_dict returns it; this is {type(state)}")
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise OptionError(
                    f"the state's {name!r} is {state.get(name)!r}, and {value!r} is attached; "
                    "attach the algorithm that the state was saved from"
                )
        for name in _COUNTERS:
            if not isinstance(state.get(name), int) or state[name] < 0:
                raise OptionError(f"the state's {name!r} is {state.get(name)!r}, not a count")
        return [Fact(name, str(state[name])) for name in _COUNTERS]

    def allreduce(self, bucket: Bucket) -> GradientFuture:
        """The future gradients of a bucket as DDP's own allreduce makes them."""
        self._seen_communications = -1  # so that this step counts as one that communicates
        return self.groups.ddp.mean_bucket(bucket)

    # ---- what users do -----------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return what docs/reading-the-logs.md lists; `ddpopt.metrics` has it too."""
        found = {**self._metrics, "communications": self.num_communications}
        found["sent_bytes"] = sent = self.groups.sent_bytes
        num_bytes = self._metrics["steps"] * sum(p.nbytes for p in self.training.parameters)
        found["saved_bytes"] = ring_bytes(num_bytes, self.training.group.size()) - sent
        return {f"ddpopt.algorithm.{name}": value for name, value in found.items()}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count no forwards and change no weights by communication in this block. Collective.

        Meant for evaluation between two steps. Blocks can be nested.
        """
        self.settle()
        if not self._num_pauses:
            self._updates.find_written()
            self.begin_pause()
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            if not self._num_pauses and self._is_attached:
                self.end_pause()
                self._updates.note_versions()  # what was written in a pause is no update

    def average(self) -> None:
        """Give all ranks the mean of their weights, as after the last step. Collective."""
        with self.paused(), communicating("averaging the weights of all ranks"):
            flat = self.weights.copy()
            for values in flat:
                self.groups.everyone.mean(values)
            self.weights.assign(flat)

    def detach(self, *, average: bool = True) -> None:
        """End the algorithm and its process groups, and give DDP back its allreduce. Collective.

        The current step ends here, and weights, which may differ, are averaged. With
        `average=False`, which is right after a rank has failed, nothing is communicated: it is not
        collective, and process groups that others may be waiting on stay until DDP's ends.

        Raises:
            PeerError: a rank did not take part; the model is detached nevertheless.
        """
        if not self._is_attached:
            return
        try:
            if average:
                self.average()
        finally:
            self._is_attached = False
            self._let_go()
            self.close()
        if average:
            with communicating("waiting for all ranks to detach"):
                self.groups.ddp.barrier()  # else a rank might still be receiving the mean
            self.groups.end()

    def state_dict(self) -> dict[str, Any]:
        """Return what this algorithm needs to continue on this rank; each saves its own."""
        self.settle()
        return self._identity() | {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of this rank; load weights and optimizer as well. Collective.

        Raises:
            OptionError, TypeError: a state is malformed, or not of an algorithm like this one.
            AttachError: the ranks' states are not of the same step.
        """
        self.settle()
        ddp, remedy = self.training.ddp, "load what all ranks saved after the same step"
        agree_on(ddp, lambda: self.check_state(state), remedy, self.groups.everyone)
        self.num_steps, self.num_communications = (state[name] for name in _COUNTERS)
        self._seen_communications = self.num_communications

    def _identity(self) -> dict[str, Any]:
        settings = dataclasses.asdict(self.algorithm)  # type: ignore[call-overload]  # subclasses are dataclasses
        return {"algorithm": self.algorithm.name, "settings": settings}

    # ---- how a step goes ---------------------------------------------------------------------

    def check_attached(self) -> None:
        if not self._is_attached:
            name = self.algorithm.name
            raise AttachError(f"this {name} was detached from its model; attach it again")

    def settle(self) -> None:
        """End the open step, if any, whether or not its update was made."""
        self.check_attached()
        if self._is_open:
            self._metrics["skipped_updates"] += 1
            self._updates.find_written()
            self.before_update()
            self._end_step()
            self._updates.note_versions()

    def _before_forward(self, ddp: object, _inputs: object) -> None:
        if ddp is self.training.ddp:  # copies of `verify` share its hooks
            self.on_forward()

    def on_forward(self) -> None:
        """Begin a step with DDP's forward, or end one whose update was skipped."""
        self._is_reducing = False  # a backward that raised never ended
        ddp = self.training.ddp
        if self._num_pauses or not torch.is_grad_enabled():
            return
        if _torch.is_in_join(ddp):
            raise AttachError(
                f"{self.algorithm.name} cannot work in DDP's join() context, in which a rank "
                "without inputs takes part in DDP's communication only (and goes on to do so after "
                "it); leave it out, and give ranks equally many inputs: with AsyncModelAverage "
                "they may have different numbers"
            )
        if ddp.require_backward_grad_sync and (self._has_run_backward or not self._is_open):
            self._updates.check(self.algorithm.name, self.num_steps)
            self.settle()
            if ddp.training:
                self._open()

    def _open(self) -> None:
        self._is_open, self._has_run_backward = True, False
        self.num_steps += 1
        for name in [name for name, p in self._frozen.items() if p.requires_grad]:
            del self._frozen[name]
            _logs.warning(
                "%s was unfrozen, and each rank trains its own: DDP does not reduce it, since it "
                "was frozen when DDP was made, and %s does not know it; make DDP anew, and attach "
                "the algorithm to that",
                name,
                self.algorithm.name,
            )
        self.begin_step()

    def on_bucket(self, bucket: Bucket) -> GradientFuture:
        """Reduce a complete bucket of DDP's; see [Note: the end of a backward]."""
        is_synced = self.training.ddp.require_backward_grad_sync  # else a forgotten forward did it
        if is_synced and not (self._is_open or self._num_pauses):
            self._open()
        self._has_run_backward = True
        if not self._is_reducing:
            self._updates.expect(is_paused=self._num_pauses > 0)
        if bucket.is_last() or (bucket.index() == 0 and self._is_reducing):
            _torch.at_end_of_backward(self._end_backward)  # often, with many of a static graph's
        self._is_reducing = True
        return self.reduce(bucket)

    def _end_backward(self) -> None:
        if self._is_reducing:
            self._is_reducing = False
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            self.end_backward()

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Prepare for an optimizer's update, `step(*args, **kwargs)`; args begin with it."""
        self._updates.begin_own(optimizer)
        if any(closure is not None for closure in (*args[1:], kwargs.get("closure"))):
            raise OptionError(
                f"{self.algorithm.name} cannot work with a closure given to optimizer.step(), "
                "which runs forward in the middle of an update; call forward and backward before"
            )
        self.before_update()
        self._updates.note_versions()

    def _after_update(self, optimizer: torch.optim.Optimizer, *_ignored: object) -> None:
        """End the step with its last optimizer's update."""
        self._updates.end_own()
        self._updated.add(optimizer)
        if self._updated == set(self.training.optimizers):
            self._end_step()

    def _end_step(self) -> None:
        was_open, self._is_open = self._is_open, False
        self._updated.clear()
        self.after_update()
        if was_open:
            self.end_step()
            is_stale = self.num_communications == self._seen_communications
            self._seen_communications = self.num_communications
            self._metrics["steps"] += 1
            self._metrics["skipped_steps"] += is_stale
            self._metrics["stale_steps"] = (self._metrics["stale_steps"] + 1) * is_stale


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that calls a method while its object lives, which the hook keeps not alive."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        live = weak()
        return None if live is None else live(*arguments)

    return call


class BackgroundHandle(Handle):
    """A handle with a worker; backward raises what went wrong in the background."""

    def __init__(self, training: Training, algorithm: Algorithm[Any]) -> None:
        super().__init__(training, algorithm)
        self.worker = Worker(self, training.device)

    def run_behind_backward(
        self, bucket: Bucket, task: Callable[[torch.Tensor], None]
    ) -> GradientFuture:
        """Let the worker run a task that changes a bucket's flat values in place."""
        self.num_communications += 1
        values, what = bucket.buffer(), f"reducing gradients in step {self.num_steps}"

        def run() -> Any:
            if self._failure is None:  # with a broken connection each task would wait long
                try:
                    with communicating(what):
                        task(values)
                except Exception as error:
                    self._failure = error
            return values

        return self.worker.submit(run)

    def close(self) -> None:
        self.worker.close()


def attach(
    ddp_model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm[HandleT],
) -> HandleT:
    """Let `algorithm` communicate for a DDP model in place of DDP's allreduce. Collective.

    First, weights and optimizer states are made equal to rank 0's. Attach between two steps, after
    loading what all ranks share and before loading what each rank keeps for itself. `ddp_model` is
    compiled or not; `optimizer` is that of its parameters, or all of theirs.

    Raises:
        TypeError: an argument is something else, or a parameter's dtype cannot be averaged.
        NotImplementedError: a parameter has sparse gradients.
        OptionError: the algorithm's values, an optimizer or DDP's options do not fit.
        AttachError: there is no process group, DDP already has a comm hook or an algorithm, another
            DDP module reduces some of its parameters, ranks differ, or something else failed.
        PeerError: a rank did not make this call.

    If `ddp_model` is a DDP module, each of these is raised on all ranks, whichever it concerns, and
    nothing is left behind on any, except after a PeerError.
    """
    ddp = ddp_of(ddp_model)
    if not dist.is_initialized() or dist.get_rank(ddp.process_group) < 0:
        raise AttachError("this rank has no process group any more; init_process_group comes first")
    optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    parameters = _torch.reduced_or_trainable_parameters(ddp)
    training = Training(ddp=ddp, optimizers=optimizers, parameters=parameters)
    remedy = "build model, optimizer and algorithm alike on all ranks"
    agree_on(ddp, lambda: _check(training, algorithm), remedy)
    with communicating("making weights and optimizers equal on all ranks"):
        _start_equal(training)
    handle = algorithm.handle_type.__new__(algorithm.handle_type)
    handle.set_up(training, algorithm, remedy)
    return handle


def _check(training: Training, algorithm: Any) -> list[Fact]:
    """Return what has to be equal on all ranks; raise why `algorithm` cannot be attached here."""
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"the algorithm is {algorithm!r}; give one of ddpopt.algorithms, such as "
            "Decentralized()"
        )
    _check_is_free(training.ddp)
    mode = find_mode(training.ddp, KEEPING_ALLREDUCE)
    if mode is not None:
        raise OptionError(f"no algorithm can be attached to this DDP module: {mode.value}")
    _check_is_alone(training)
    _check_optimizers(training.optimizers)
    for parameter, described in training.parameters.items():
        if described.is_sparse:
            raise NotImplementedError(
                f"{described.name} has sparse gradients, which algorithms do not take; make its "
                "embedding with sparse=False"
            )
        if not parameter.dtype.is_floating_point:
            raise TypeError(
                f"{described.name} is of {parameter.dtype}, which cannot be averaged; freeze it "
                "before DDP is made, or use a real floating point type"
            )
    algorithm.ranks_per_node(training.group.size())
    algorithm.check(training)
    return _facts(training, algorithm)


def _check_optimizers(optimizers: Sequence[Any]) -> None:
    """Raise what keeps an algorithm from being told of the updates of these."""
    if not optimizers:
        raise OptionError("no optimizer is given; give attach all that update the model")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"an optimizer is a {type(optimizer).__name__}, not one of torch.optim")
        if not _torch.calls_step_hooks(optimizer):
            raise OptionError(
                f"step() of the {type(optimizer).__name__} calls none of the hooks of "
                "torch.optim.Optimizer, so that no update would be noticed; if it wraps an "
                "optimizer, give attach that one, or call Optimizer.__init__ in its constructor"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptionError(
                "LBFGS runs forward and backward several times in one step, and communication "
                "would be out of step; use an optimizer without a closure"
            )


def _check_is_alone(training: Training) -> None:
    """Raise AttachError if another DDP module has a parameter of this one's.

    A module from which an algorithm was detached is no such one: whoever wraps its model anew, as
    to go on from a checkpoint, may still hold the old handle, and with it the old wrapper.
    """

    def find_shared() -> tuple[str, str] | None:
        for ddp in _torch.live_ddp_modules():
            if ddp is training.ddp:
                continue
            reduction = _torch.bucket_reduction(ddp)
            if reduction is not None and reduction.is_idle:
                continue
            for parameter in _torch.reducer_parameters(ddp):
                if parameter in training.parameters:
                    return training.parameters[parameter].name, type(ddp.module).__name__
        return None

    if find_shared() is None:
        return
    gc.collect()  # a module that was wrapped before may wait for that
    shared = find_shared()
    if shared is not None:
        name, kind = shared
        raise AttachError(
            f"{name} is also in another DistributedDataParallel({kind}), which would reduce its "
            "gradients too; delete that one, or freeze what they share before they are made"
        )


def _facts(training: Training, algorithm: Algorithm[Any]) -> list[Fact]:
    ranks_per_node = algorithm.ranks_per_node(training.group.size())
    facts = [
        Fact("the algorithm", repr(algorithm)),
        Fact("ranks on each node", str(ranks_per_node)),  # the environment may say how many
    ]
    for t, p in training.parameters.items():
        kind = f"{t.dtype} {list(t.shape)} on {t.device.type}"
        facts.append(Fact(f"parameter {p.name}", kind))
    index_of = {t: k for k, t in enumerate(training.parameters)}
    for number, optimizer in enumerate(training.optimizers):
        facts.append(Fact(f"optimizer {number}", type(optimizer).__name__))
        for place, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number}, group {place}"
            members = {"parameters": [index_of.get(p) for p in group["params"]]}
            settings = {name: group[name] for name in sorted(group.keys() - {"params"})}
            facts += [Fact(f"{where}, {k}", str(v)) for k, v in (members | settings).items()]
        for t, name in _state_of(optimizer):
            facts.append(Fact(f"optimizer {number}, {name}", f"{t.dtype} {list(t.shape)}"))
    return facts


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield value, f"state {name} of parameter {index}"


@torch.no_grad()
def _start_equal(training: Training) -> None:
    tensors = [*training.parameters]
    for optimizer in training.optimizers:
        tensors += [tensor for tensor, _ in _state_of(optimizer)]
    for tensor in tensors:
        # Adam counts steps on the CPU, but NCCL sends GPU tensors only.
        sent = tensor.detach().to(training.device).contiguous()
        dist.broadcast(sent, group=training.group, group_src=0)
        tensor.copy_(sent)
