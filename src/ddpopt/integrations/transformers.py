"""`DDPOptCallback` for Hugging Face's Trainer: compiles the model in place, logs, explains.

Only programs that import this module need `transformers` and `accelerate`. A loop with Accelerate
alone has no callbacks: compile what `prepare` returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from accelerate.state import AcceleratorState
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from ddpopt.checks.copies import is_compiled_by_us
from ddpopt.errors import UnsupportedModeError
from ddpopt.inspection.metrics import metrics
from ddpopt.integrations import Reporter, log_nothing_to_split
from ddpopt.steps.forwards import find_ddp


class DDPOptCallback(Reporter, TrainerCallback):  # type: ignore[misc]  # Any, where it is not installed
    """Compiles a Trainer's model in place (`model.compile`) when training begins, and reports.

    The model keeps its class, so saving and loading do not change. If ddpopt already compiles a
    part of it, the callback only reports. Evaluation runs compiled too.

    Rows of the Trainer's log that have a loss get `ddpopt.metrics`. A callback that sends rows
    elsewhere has to come later in the list, so pass it there rather than through `report_to`. When
    training ends, rank 0 prints the explanation.

    Args:
        options: As for `torch.compile` with ddpopt.
        mode: As for `torch.compile`.
        dynamic: As for `torch.compile`.
        explanation: File in which rank 0 saves the explanation; it ends in .html, .json or .txt.

    Raises:
        OptionError: an option is unknown or has an invalid value.
        UnsupportedModeError: (from `train`) the Trainer trains with something other than DDP, or
            compiles by itself.
    """

    # A weak reference, once there is a module; only on rank 0, which alone reports.
    _find_ddp: Callable[[], DistributedDataParallel | None] = staticmethod(lambda: None)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Compile; the Trainer passes the model, not the DDP module around it."""
        self._find_ddp = lambda: None
        _check_mode(args)
        if not is_compiled_by_us(model):
            model.compile(backend="ddpopt", **self._compile_args)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Find the DDP module after the first step."""
        if self._find_ddp() is None and state.is_world_process_zero:
            ddp = find_ddp(model)
            if ddp is not None:
                self._find_ddp = weakref.ref(ddp)
                self._begin_report(ddp)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **_: Any) -> None:
        """Add to what is logged, and to the copy that the Trainer has already kept."""
        ddp = self._find_ddp()
        if ddp is not None and "loss" in logs:
            numbers = metrics(ddp)
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Explain."""
        ddp = self._find_ddp()
        if ddp is not None:
            self._end_report(ddp)


def _check_mode(args: Any) -> None:
    """Raise UnsupportedModeError unless training uses DDP, or one rank, which is reported."""
    if args.torch_compile:
        raise UnsupportedModeError(
            f"torch_compile is True, so the Trainer compiles by {args.torch_compile_backend!r} "
            "itself; leave torch_compile out of TrainingArguments, or leave DDPOptCallback out"
        )
    kind = AcceleratorState().distributed_type.value
    if args.n_gpu > 1:
        kind = "DataParallel"
    if kind == "NO":
        log_nothing_to_split("the Trainer trains on one rank", "start it with torchrun")
    elif not kind.startswith("MULTI_"):  # MULTI_GPU, MULTI_CPU, ...: Accelerate's names for DDP
        raise UnsupportedModeError(
            f"the Trainer trains with {kind}, in which no DistributedDataParallel has buckets to "
            "cut at; start it with torchrun and without settings for another strategy, or leave "
            "DDPOptCallback out"
        )
