"""Updates of the model that an algorithm would otherwise not see.

A handle learns of an update from the hooks of the optimizers that `attach` was given. Two kinds of
updates call none of these hooks. An optimizer that was not given may update the model, such as one
that was made anew: for that all optimizers of the process are watched. Or a given optimizer's
`step` was replaced by a function that calls no hooks: then weights change without a hook. A load of
a checkpoint looks the same, so an optimizer that has called its hooks once is not checked for this.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddpopt import _logs, _torch
from ddpopt.algorithms.training import Training
from ddpopt.errors import AttachError


class UpdateWatch:
    """Watches for updates that one handle is not told of.

    An update is looked for between a backward that reduces gradients and the next forward; what
    is written to weights at other times is ignored.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        # A backward outside of `paused` has begun to reduce gradients since the last forward.
        self._is_update_expected = False
        # What `_is_update_expected` was before `paused`, in which users may update as they like.
        self._was_expected_before_pause = False

        # ---- Optimizers that were not given ----
        # How many updates of given optimizers have begun, and how many of these have not ended.
        self._num_given_begun = 0
        self._num_given_running = 0
        # Other optimizers whose update is running, with the `_num_given_begun` of when it began.
        self._others_running: dict[torch.optim.Optimizer, int] = {}
        # The class of an optimizer that has updated the model and was not given; "" if none has.
        self._stranger = ""

        # ---- Given optimizers whose `step` was replaced ----
        # Given optimizers that have not called a hook yet, with their baseline: the versions of
        # their parameters when it was last known that nobody had updated them; empty if there is
        # none.
        self._yet_to_call_hooks: dict[torch.optim.Optimizer, list[int]]
        self._yet_to_call_hooks = {optimizer: [] for optimizer in training.optimizers}
        # The ones among `_yet_to_call_hooks` whose parameters were written after their baseline.
        self._written: set[torch.optim.Optimizer] = set()

    # ---- What the handle reports ----

    def note_backward(self, *, is_paused: bool) -> None:
        """A backward begins to reduce gradients; an update follows it, unless in `paused`."""
        self._is_update_expected = not is_paused
        self.take_baseline()

    def take_baseline(self) -> None:
        """Take what was written to weights up to here for no update of an optimizer.

        What is written after it is one, if the optimizer goes on to call no hooks.
        """
        for optimizer in self._yet_to_call_hooks:
            self._yet_to_call_hooks[optimizer] = _torch.versions(self._updated_by(optimizer))

    def forget_baseline(self) -> None:
        """From here to the next backward an algorithm writes to weights at any time."""
        for optimizer in self._yet_to_call_hooks:
            self._yet_to_call_hooks[optimizer] = []

    def begin_pause(self) -> None:
        """Updates from here to `end_pause` are the user's own affair, and none is missed."""
        self.note_written()
        self._was_expected_before_pause = self._is_update_expected
        self._is_update_expected = False

    def end_pause(self) -> None:
        """Expect the update again that was expected before; writes in the pause are no update."""
        self._is_update_expected = self._was_expected_before_pause
        self.take_baseline()

    def note_written(self) -> None:
        """Note whose weights were written after their baseline.

        The handle calls this before it writes to weights itself.
        """
        if not self._is_update_expected:
            return
        for optimizer, versions in self._yet_to_call_hooks.items():
            # Without versions there is no baseline to compare with.
            if versions and versions != _torch.versions(self._updated_by(optimizer)):
                self._written.add(optimizer)

    def begin_given(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that was given begins an update, and its hook was called."""
        self._yet_to_call_hooks.pop(optimizer, None)
        self.note_written()  # by the others, before this one writes
        self._num_given_begun += 1
        self._num_given_running += 1

    def end_given(self) -> None:
        self._num_given_running -= 1

    def check(self, name: str, step: int) -> None:
        """Raise or warn before a forward if the algorithm `name` has missed an update.

        Raises:
            AttachError: another optimizer than those given has updated the model.
        """
        # If a step() raised, its end was not reported.
        self._num_given_running = 0
        self._others_running.clear()
        if self._stranger:
            raise AttachError(
                f"a {self._stranger} that was not given to attach has updated parameters of this "
                f"model in step {step}, and {name} has to know of all updates; call detach(), and "
                "attach the algorithm again with all optimizers that update the model now"
            )
        self.note_written()
        missed = [optimizer for optimizer in self._yet_to_call_hooks if optimizer in self._written]
        self._written.clear()
        self._is_update_expected = False
        for optimizer in missed:
            del self._yet_to_call_hooks[optimizer]  # say it once
            _logs.warning(
                "weights were written after the backward of step %d, and step() of the %s given to "
                "attach has not called its hooks: unless you wrote them yourself, %s does not know "
                "of its updates; give attach the optimizer whose step() is called, and do not "
                "replace that method by one that does not call it",
                step,
                type(optimizer).__name__,
                name,
            )

    # ---- What any optimizer of the process reports ----

    def begin_any(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that begins an update, if it may be one that should have been given."""
        if not self._is_update_expected:
            return
        if self._num_given_running:
            # A given optimizer calls this one in its own update, as ZeroRedundancyOptimizer does.
            return
        if optimizer not in self._training.optimizers and self._updated_by(optimizer):
            # `end_any` looks whether this one has called a given optimizer meanwhile.
            self._others_running[optimizer] = self._num_given_begun

    def end_any(self, optimizer: torch.optim.Optimizer) -> None:
        num_given_begun = self._others_running.pop(optimizer, None)
        # If a given optimizer has begun meanwhile, this one is a wrapper that called it.
        if num_given_begun == self._num_given_begun:
            self._stranger = type(optimizer).__name__

    def _updated_by(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The parameters of the model that an optimizer has."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in parameters if p in self._training.parameters]


# ---- All optimizers of the process ---------------------------------------------------------------

# All handles share one pair of the process's hooks. Neither the set nor the hooks keep a handle
# alive. Hooks are not removed when a handle is collected: torch may be walking over them just then.
# So the hooks may stay without any handle, and do nothing, until the next handle is detached.
# Handles may be of several process groups, so `_watches` may differ between ranks.
_watches: weakref.WeakSet[UpdateWatch] = weakref.WeakSet()
_hooks_of_all: list[Any] = []


def watch_all_optimizers(watch: UpdateWatch) -> None:
    """Tell `watch` of each update that an optimizer of this process makes."""
    if not _hooks_of_all:
        _hooks_of_all.append(register_optimizer_step_pre_hook(_note_begin))
        _hooks_of_all.append(register_optimizer_step_post_hook(_note_end))
    _watches.add(watch)


def watch_no_longer(watch: UpdateWatch) -> None:
    _watches.discard(watch)
    if not _watches:
        for hook in _hooks_of_all:
            hook.remove()
        _hooks_of_all.clear()


def _note_begin(optimizer: torch.optim.Optimizer, *_ignored: object) -> None:
    for watch in list(_watches):
        watch.begin_any(optimizer)


def _note_end(optimizer: torch.optim.Optimizer, *_ignored: object) -> None:
    for watch in list(_watches):
        watch.end_any(optimizer)
