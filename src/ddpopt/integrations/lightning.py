"""`DDPOptCallback` for Lightning's Trainer: compiles training steps, logs metrics, explains.

It works with `lightning` or `pytorch_lightning`, whichever is installed; only programs that import
this module need one of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.checks.copies import is_compiled_by_us
from ddpopt.errors import UnsupportedModeError
from ddpopt.inspection.metrics import metrics
from ddpopt.integrations import Reporter, log_nothing_to_split

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# Methods of a LightningModule that Dynamo cannot trace; it breaks the graph at them instead.
_EAGER = ("log", "log_dict")


def _callback_classes() -> tuple[Any, ...]:
    """Return `Callback` of the package that the program has imported, else of those installed.

    Both packages have one, and a Trainer accepts only that of its own package.
    """
    imported = [name for name in _PACKAGES if name in sys.modules]
    # `find_spec` of a submodule would import the package before the dot.
    installed = [name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0])]
    if not installed:
        raise ImportError("this callback needs Lightning: pip install lightning")
    return tuple(importlib.import_module(name).Callback for name in imported or installed)


class DDPOptCallback(Reporter, *_callback_classes()):  # type: ignore[misc]  # whichever is there
    """Compiles a LightningModule's `training_step` under DDP in `fit`, and reports.

    It compiles once Lightning has wrapped the module, and undoes that when `fit` ends.
    `self.log` and `self.log_dict` run uncompiled. If ddpopt already compiles a part of the module,
    the callback only reports. Validation is not compiled.

    Whenever the Trainer logs (`log_every_n_steps`), its loggers get `ddpopt.metrics` of rank 0.
    When training ends, rank 0 prints the explanation: afterwards Lightning removes DDP.

    Args:
        options: As for `torch.compile` with ddpopt.
        mode: As for `torch.compile`.
        dynamic: As for `torch.compile`.
        explanation: File in which rank 0 saves the explanation; it ends in .html, .json or .txt.

    Raises:
        ImportError: neither package is installed.
        OptionError: an option is unknown or has an invalid value.
        UnsupportedModeError: (from `fit`) the Trainer's strategy is not DDP.
    """

    _last_step = 0
    # What the instance had under these names; None if only its class had something.
    _replaced: Mapping[str, Any] = MappingProxyType({})

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compile; the module is wrapped in DDP by now."""
        ddp = trainer.model
        strategy = type(trainer.strategy).__name__
        if isinstance(ddp, DistributedDataParallel):
            if trainer.is_global_zero:
                self._begin_report(ddp)
        elif trainer.world_size > 1 or ddp is not pl_module:
            raise UnsupportedModeError(
                f"the Trainer's strategy is {strategy}, in which no DistributedDataParallel has "
                "buckets to cut at; give Trainer(strategy='ddp'), or leave DDPOptCallback out"
            )
        else:
            log_nothing_to_split(f"{strategy} trains on one rank", "give Trainer(strategy='ddp')")
        if not is_compiled_by_us(pl_module):
            for name in _EAGER:  # `log` and `log_dict`, which Dynamo cannot trace
                self._replace(pl_module, name, _torch.uncompiled(getattr(pl_module, name)))
            step = torch.compile(pl_module.training_step, backend="ddpopt", **self._compile_args)
            self._replace(pl_module, "training_step", step)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the step at which a checkpoint, which is loaded by now, continues."""
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log when the Trainer does, under its own number of the step."""
        step, every, ddp = trainer.global_step, trainer.log_every_n_steps, trainer.model
        is_due = step != self._last_step and every > 0 and step % every == 0
        self._last_step = step  # unchanged while gradients are accumulated
        if is_due and trainer.is_global_zero and isinstance(ddp, DistributedDataParallel):
            for logger in trainer.loggers:
                # Lightning has counted this step already, and its loggers count from 0.
                logger.log_metrics(metrics(ddp), step=step - 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Explain; this is the last hook in which there is a DDP module."""
        if trainer.is_global_zero and isinstance(trainer.model, DistributedDataParallel):
            self._end_report(trainer.model)
        self._restore(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the module."""
        self._restore(pl_module)

    def _replace(self, module: Any, name: str, value: Any) -> None:
        self._replaced = {**self._replaced, name: vars(module).get(name)}
        setattr(module, name, value)

    def _restore(self, module: Any) -> None:
        """Undo `_replace`, so that the class's own methods show again."""
        for name, value in self._replaced.items():
            if value is None:  # the instance had nothing of this name
                delattr(module, name)
            else:
                setattr(module, name, value)
        self._replaced = {}
