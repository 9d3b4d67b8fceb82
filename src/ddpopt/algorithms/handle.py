"""`Handle`, an algorithm at work on a model: what all algorithms share.

[Note: steps] A step of an algorithm is a forward with gradients on and outside `no_sync`, together
with the backward and the update that follow it.

    with ddp.no_sync(): loss(ddp(a)).backward()     accumulates: no step
    with torch.no_grad(): ddp(b)                    evaluation: no step
    loss(ddp(c)).backward(); optimizer.step()       step 1, which ends with the update
    loss(ddp(d)).backward()                         step 2; GradScaler skips its update
    loss(ddp(e)).backward(); optimizer.step()       step 3: its forward ends step 2

Evaluation, `no_grad`, the forwards of accumulated micro-batches and additional forwards before the
same backward are not counted. A step begins with its forward; in eval mode, which may be an
evaluation without `no_grad`, only when its backward reduces the first bucket. It ends with the last
optimizer's update; if that is skipped, it ends with the next forward that begins a step, so that
all ranks communicate equally often. What needs all steps to be over (`paused`, `state_dict`,
`detach` unless `average=False`) ends an open one too.

[Note: the end of a backward] A backward may run others, as reentrant checkpoints do, each of which
ends before it. DDP reduces each bucket once in a backward, in order, so all gradients are final
when the backward, outer or inner, in which the last bucket was reduced has ended. In a static
graph's first iteration, DDP reduces all buckets when the outermost backward has ended, gives each
the index 0, and marks none of several as the last: an index 0 that comes again shows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from ddpopt import _logs, _torch
from ddpopt._text import quote
from ddpopt._values import WHOLE, check_number
from ddpopt.algorithms.algorithm import Algorithm
from ddpopt.algorithms.comm import FlatWeights, Worker, ring_bytes
from ddpopt.algorithms.training import Training
from ddpopt.algorithms.updates import UpdateWatch, watch_all_optimizers, watch_no_longer
from ddpopt.errors import AttachError, OptionError
from ddpopt.inspection import metrics
from ddpopt.ranks.agree import Fact, communicating, require_equal

Bucket = Any  # torch.distributed.GradBucket
GradientFuture = Any  # torch.futures.Future[torch.Tensor]; DDP refuses other annotations

# The counters in a saved state.
_COUNTERS = ("num_steps", "num_communications")
# See docs/reading-the-logs.md.
_METRICS = ("steps", "skipped_steps", "skipped_updates", "stale_steps")


class Life(enum.Enum):
    """Where a handle is in its life: what is called of it, by users or `attach`, changes that.

    ATTACHED and PAUSED in turn, and from either of them to DETACHED, for good.
    """

    ATTACHED = "forwards, backwards and updates of the model make steps"
    PAUSED = "in a block of `paused`: no step is open, and none begins"
    DETACHED = "the model and its optimizers do not call it any more"


class Step(enum.Enum):
    """Where a handle is in a step, see [Note: steps]: the model and its optimizers change that.

    From NONE to FORWARD, to BACKWARD, to NONE; a step that is ended early leaves BACKWARD out.
    """

    NONE = "no step is open"
    FORWARD = "a step has begun, and none of its buckets was reduced: more forwards belong to it"
    BACKWARD = "a bucket of it was reduced: it ends with the update, or before the next forward"


class Handle:
    """An algorithm at work on a model, from `attach` to `detach`.

    All ranks call collective methods in the same step; PeerError is raised if one does not.
    `num_steps` counts steps, see [Note: steps] in `algorithms/handle.py`, and `num_communications`
    how often ranks exchanged weights, or reduced a bucket of gradients in the algorithm's own way.
    """

    # Whether it averages weights, so that a parameter which DDP does not reduce may be trained.
    averages_weights = True

    def __init__(self, training: Training, algorithm: Algorithm[Any]) -> None:
        """Make no collective call, and start nothing: what fails here is not closed."""
        assert training.groups is not None, "attach makes them first"
        self.algorithm, self.training, self.groups = algorithm, training, training.groups
        self.weights = FlatWeights(training.parameters)
        self.num_steps = self.num_communications = 0
        # Counts of steps that have ended.
        self._metrics: dict[str, float] = dict.fromkeys(_METRICS, 0)
        # `num_communications` when the last step had ended; -1 if this step has communicated
        # without being counted.
        self._seen_communications = 0
        self._updates = UpdateWatch(training)
        self._unknown_parameters = self._find_unknown_parameters()

        # ---- Where the handle is ----
        self._life = Life.ATTACHED
        self._num_pauses = 0  # how many blocks of `paused` have begun and not ended
        self._step = Step.NONE
        self._updated: set[torch.optim.Optimizer] = set()  # those that made the step's update
        # A backward has reduced its first bucket and has not ended. It need not be of a step: one
        # may run in a pause, or go on after an optimizer's hook has made the update in it.
        self._is_reducing = False
        # The error of a bucket. It is raised at the end of backward, because DDP would show it
        # without its type.
        self._failure: Exception | None = None

        # ---- What the model and its optimizers hold of this, see `take_over` ----
        self._reduction: _torch.BucketReduction | None = None
        self._removable_hooks: list[Any] = []

    def _find_unknown_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that neither DDP reduces nor this handle averages, by name.

        They were frozen when DDP was made, and `_open` warns if one no longer is. Those that DDP
        was told to ignore are left out.
        """
        ddp = self.training.ddp
        known = self.training.parameters
        if not self.averages_weights:
            known = _torch.reducer_parameters(ddp)
        return {
            name: parameter
            for name, parameter in ddp.module.named_parameters()
            if parameter not in known and name not in ddp.parameters_to_ignore
        }

    # ---- Its life: it takes over, may be paused, and is detached ------------------------------

    def take_over(self) -> None:
        """Have the model and its optimizers call this handle from here on.

        The comm hook comes last, since it cannot be taken back.
        """
        ddp = self.training.ddp
        _torch.hide_from_dynamo()  # or it would compile what the hooks below do
        # The model keeps the handle alive by this one; the optimizers do not.
        self._removable_hooks.append(
            ddp.register_forward_pre_hook(ModuleHook(self._before_forward))
        )
        before, after = weakly(self._optimizer_begins), weakly(self._optimizer_ended)
        for optimizer in self.training.optimizers:
            self._removable_hooks.append(optimizer.register_step_pre_hook(before))
            self._removable_hooks.append(optimizer.register_step_post_hook(after))
        watch_all_optimizers(self._updates)
        metrics.set_algorithm_metrics(ddp, weakref.WeakMethod(self.metrics))
        # One is there if an algorithm was attached to this module before.
        self._reduction = _torch.bucket_reduction(ddp) or _torch.BucketReduction(ddp)
        # Called for what reduces a bucket; where it gives None, DDP's own allreduce does.
        self._reduction.find_algorithm = weakref.WeakMethod(self.on_bucket)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count no forwards and change no weights by communication in this block. Collective.

        Meant for evaluation between two steps. Blocks can be nested.
        """
        self.settle()
        if self._life is Life.ATTACHED:
            self._updates.begin_pause()
            self.begin_pause()
            self._life = Life.PAUSED
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            # Unless the handle was detached in the block.
            if self._life is Life.PAUSED and not self._num_pauses:
                self._life = Life.ATTACHED
                self.end_pause()
                self._updates.end_pause()

    @property
    def is_paused(self) -> bool:
        """Whether it is in a block of `paused`, in which nothing belongs to a step."""
        return self._life is Life.PAUSED

    def detach(self, *, average: bool = True) -> None:
        """End the algorithm and its process groups, and give DDP back its allreduce. Collective.

        The current step ends here, and weights, which may differ, are averaged. Once a rank has
        failed, give `average=False`: then the step is left open and nothing is communicated, so it
        is not collective, and process groups that others may be waiting on stay until DDP's ends.

        Raises:
            PeerError: a rank did not take part; the model is detached nevertheless.
        """
        if self._life is Life.DETACHED:
            return
        try:
            if average:
                self.average()
        finally:
            self._let_go()
            self.close()
        if average:
            with communicating("waiting for all ranks to detach"):
                self.groups.ddp.barrier()  # else a rank might still be receiving the mean
            self.groups.end()

    def abandon(self) -> None:
        """Leave nothing of this handle: here or on another rank `attach` has failed.

        It raises nothing, so that the reason is shown.
        """
        with contextlib.suppress(Exception):
            self._let_go()  # lacks attributes if a user's __init__ did not call this class's
        with contextlib.suppress(Exception):
            self.close()  # may be a user's

    def _let_go(self) -> None:
        """Undo `take_over`, as far as that came: DDP has its own allreduce again."""
        self._life = Life.DETACHED
        for hook in self._removable_hooks:
            hook.remove()
        watch_no_longer(self._updates)
        metrics.set_algorithm_metrics(self.training.ddp, lambda: None)
        if self._reduction is not None:
            self._reduction.find_algorithm = lambda: None

    def check_attached(self) -> None:
        """Raise AttachError if the handle was detached."""
        if self._life is Life.DETACHED:
            name = self.algorithm.name
            raise AttachError(f"this {name} was detached from its model; attach it again")

    # ---- What an algorithm does: subclasses override these -----------------------------------

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
        """What in `state` has to be equal on all ranks; raise why it cannot be loaded."""
        if not isinstance(state, dict):
            raise TypeError(f"a state is a dict, as state_dict returns it; this is {type(state)}")
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise OptionError(
                    f"the state's {name!r} is {quote(state.get(name))}, and {value!r} is attached; "
                    "attach the algorithm that the state was saved from"
                )
        for name in _COUNTERS:
            check_number(f"the state's {name!r}", state.get(name), WHOLE, OptionError)
        return [Fact(name, str(state[name])) for name in _COUNTERS]

    # ---- What an algorithm may call ----------------------------------------------------------

    def allreduce(self, bucket: Bucket) -> GradientFuture:
        """The future gradients of a bucket as DDP's own allreduce makes them."""
        self._seen_communications = -1  # so that this step counts as one that communicates
        return self.groups.ddp.mean_bucket(bucket)

    # ---- What users do -----------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """The numbers that docs/reading-the-logs.md lists; `ddpopt.metrics` has them too.

        A loaded state brings its `num_steps` and `num_communications`. Bytes, and the steps that
        are counted beside them, are since `attach`: the two have to be of the same steps.
        """
        sent_bytes = self.groups.sent_bytes
        # The bytes that DDP would have reduced in these steps.
        reduced_bytes = self._metrics["steps"] * sum(p.nbytes for p in self.training.parameters)
        saved_bytes = ring_bytes(reduced_bytes, self.training.group.size()) - sent_bytes
        values = {
            **self._metrics,
            "communications": self.num_communications,
            "sent_bytes": sent_bytes,
            "saved_bytes": saved_bytes,
        }
        return {f"ddpopt.algorithm.{name}": value for name, value in values.items()}

    def average(self) -> None:
        """Give all ranks the mean of their weights, as after the last step. Collective."""
        with self.paused(), communicating("averaging the weights of all ranks"):
            flat = self.weights.copy()
            for values in flat:
                self.groups.everyone.mean(values)
            self.weights.assign(flat)

    def state_dict(self) -> dict[str, Any]:
        """What this algorithm needs to continue on this rank; each rank saves its own.

        Collective if a step is open, which ends here.
        """
        self.settle()
        return self._identity() | {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of this rank; load weights and optimizer as well. Collective.

        Raises:
            OptionError, TypeError: a state is malformed, or not of an algorithm like this one.
            AttachError: the ranks' states are not of the same step.
        """
        self.check_attached()
        if self._step is not Step.NONE:
            # What a step communicates when it ends must not move weights that were just loaded.
            loaded = self.weights.copy()
            self.settle()
            self.weights.assign(loaded)
            # Or the writes above would be taken for an update that no optimizer has told of.
            self._updates.take_baseline()
        require_equal(
            self.training.ddp,
            lambda: self.check_state(state),
            AttachError,
            "load what all ranks saved after the same step",
            group=self.groups.everyone.group,  # on which nobody but this algorithm communicates
        )
        self.num_steps, self.num_communications = (state[name] for name in _COUNTERS)
        self._seen_communications = self.num_communications

    def _identity(self) -> dict[str, Any]:
        """What a state must have in common with this handle to be loaded."""
        settings = dataclasses.asdict(self.algorithm)  # type: ignore[call-overload]  # subclasses are dataclasses
        return {"algorithm": self.algorithm.name, "settings": settings}

    # ---- How a step goes: forward, buckets, the end of backward, updates --------------------

    def _before_forward(self, ddp: object, _inputs: object) -> None:
        if ddp is self.training.ddp:  # copies of `verify` share its hooks
            self.on_forward()

    def on_forward(self) -> None:
        """End a step whose update was skipped, and begin one, if this forward of DDP's does so."""
        self._is_reducing = False  # a backward that raised never ended
        ddp = self.training.ddp
        if self.is_paused or not torch.is_grad_enabled():
            return
        if _torch.is_in_join(ddp):
            raise AttachError(
                f"{self.algorithm.name} cannot work in DDP's join() context, in which a rank "
                "without inputs takes part in DDP's communication only (and goes on to do so after "
                "it); leave it out, and give ranks equally many inputs: with AsyncModelAverage "
                "they may have different numbers"
            )
        if not _torch.syncs_gradients(ddp):
            return  # a micro-batch under no_sync
        if self._step is Step.FORWARD:
            return  # one more forward before the same backward
        # A new step begins. Has the last one's update gone unnoticed, or has there been none?
        self._updates.check(self.algorithm.name, self.num_steps)
        self.settle()
        if ddp.training:
            self._open()

    def _open(self) -> None:
        """Begin a step."""
        self._step = Step.FORWARD
        self.num_steps += 1
        unfrozen = [name for name, p in self._unknown_parameters.items() if p.requires_grad]
        for name in unfrozen:
            del self._unknown_parameters[name]  # say it once
            _logs.warning(
                "%s was unfrozen, and each rank trains its own: DDP does not reduce it, since it "
                "was frozen when DDP was made, and %s does not know it; make DDP anew, and attach "
                "the algorithm to that",
                name,
                self.algorithm.name,
            )
        self.begin_step()

    def on_bucket(self, bucket: Bucket) -> GradientFuture:
        """Reduce a bucket whose gradients are complete, as DDP's comm hook."""
        # After a forward in eval mode the step has yet to be opened. Under `no_sync` no step is
        # opened, although DDP reduces there too: in the backward of a forward from before.
        is_step = _torch.syncs_gradients(self.training.ddp) and not self.is_paused
        if is_step and self._step is Step.NONE:
            self._open()
        if self._step is Step.FORWARD:
            self._step = Step.BACKWARD
        if not self._is_reducing:  # it is the first bucket of this backward
            self._updates.note_backward(is_paused=self.is_paused)
        # See [Note: the end of a backward].
        if bucket.is_last() or (bucket.index() == 0 and self._is_reducing):
            # Several times in a static graph's first iteration.
            _torch.at_end_of_backward(self._backward_ended)
        self._is_reducing = True
        return self.reduce(bucket)

    def _backward_ended(self) -> None:
        """Run when a backward has reduced its last bucket and ended, once for each backward."""
        if not self._is_reducing:
            return  # another bucket of the same backward had this called
        self._is_reducing = False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.end_backward()

    def _optimizer_begins(
        self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Prepare for an update, `step(*args, **kwargs)`; `args` begins with the optimizer."""
        self._updates.begin_given(optimizer)
        if any(closure is not None for closure in (*args[1:], kwargs.get("closure"))):
            raise OptionError(
                f"{self.algorithm.name} cannot work with a closure given to optimizer.step(), "
                "which runs forward in the middle of an update; call forward and backward before"
            )
        self.before_update()
        self._updates.take_baseline()  # what this handle wrote is no update

    def _optimizer_ended(self, optimizer: torch.optim.Optimizer, *_ignored: object) -> None:
        """End the step with its last optimizer's update."""
        self._updates.end_given()
        self._updated.add(optimizer)
        if self._updated == set(self.training.optimizers):
            self._finish_step()

    def settle(self) -> None:
        """End the open step, if there is one: at least one optimizer has left out its update."""
        self.check_attached()
        if self._step is not Step.NONE:
            self._metrics["skipped_updates"] += 1
            self._updates.note_written()  # by others, before this handle writes to weights
            self.before_update()
            self._finish_step()
            self._updates.take_baseline()  # what this handle wrote is no update

    def _finish_step(self) -> None:
        """End a step after its updates, and count whether ranks communicated in it."""
        step, self._step = self._step, Step.NONE
        self._updated.clear()
        self.after_update()
        if step is Step.NONE:
            return  # an update without a forward before, which is no step
        self.end_step()
        is_stale = self.num_communications == self._seen_communications
        self._seen_communications = self.num_communications
        self._metrics["steps"] += 1
        if is_stale:
            self._metrics["skipped_steps"] += 1
            self._metrics["stale_steps"] += 1
        else:
            self._metrics["stale_steps"] = 0


class BackgroundHandle(Handle):
    """A handle with a worker, which communicates while backward, or forward, runs."""

    def __init__(self, training: Training, algorithm: Algorithm[Any]) -> None:
        super().__init__(training, algorithm)
        self.worker = Worker(self, training.device)

    def take_over(self) -> None:
        self.worker.start()
        super().take_over()

    def run_behind_backward(
        self, bucket: Bucket, task: Callable[[torch.Tensor], None]
    ) -> GradientFuture:
        """Let the worker run a task that changes a bucket's flat values in place.

        Backward raises what the task raises, when it has ended.
        """
        self.num_communications += 1
        values, what = bucket.buffer(), f"reducing gradients in step {self.num_steps}"

        def run() -> Any:
            if self._failure is None:  # with a broken connection each task would wait long
                try:
                    with communicating(what):
                        task(values)
                except Exception as error:
                    # Whatever it is, `_backward_ended` raises it in the thread that trains.
                    self._failure = error
            return values

        return self.worker.submit(run)

    def close(self) -> None:
        self.worker.close()


class ModuleHook:
    """A hook on a module, of which copies and pickles do nothing."""

    def __init__(self, call: Callable[..., Any] = lambda *_: None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, ()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that calls a method as long as its object lives, without keeping that alive."""
    weak_method = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        live_method = weak_method()
        return None if live_method is None else live_method(*arguments)

    return call
