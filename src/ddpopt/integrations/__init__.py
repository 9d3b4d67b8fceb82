"""Callbacks for other packages' trainers, and what they share: how they compile and report.

Each package is imported by its own module only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs
from ddpopt._text import quote
from ddpopt.errors import OptionError
from ddpopt.inspection.explain import explain
from ddpopt.inspection.explanation import Explanation
from ddpopt.inspection.metrics import metrics
from ddpopt.options import resolve_options


class Reporter:
    """Base of the callbacks, beside their trainer's: checks options, and reports on rank 0.

    Attributes:
        explanation: What rank 0 printed at the end of the last training run with DDP.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        mode: str | None = None,
        dynamic: bool | None = None,
        explanation: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        # Raise now what compiling would raise later.
        if mode is not None and options is not None:
            raise OptionError(
                f"mode is {quote(mode)} and options are {quote(dict(options))}; torch.compile "
                "takes one of the two"
            )
        resolve_options(mode, options)
        self._compile_args: dict[str, Any] = {"options": options, "mode": mode, "dynamic": dynamic}
        self._path = None if explanation is None else os.fspath(explanation)
        self.explanation: Explanation | None = None

    def _begin_report(self, ddp: DistributedDataParallel) -> None:
        """Start the clock of `metrics` if nothing has, and check that the explanation can be saved.

        Raises:
            OptionError, OSError: As `Explanation.save`.
        """
        metrics(ddp)  # the first call of all for this module starts the clock
        if self._path is not None:
            explain(ddp).save(self._path)  # `_end_report` overwrites it

    def _end_report(self, ddp: DistributedDataParallel) -> None:
        """Print the explanation and save it, while there is a DDP module to explain."""
        self.explanation = explain(ddp)
        print(f"\n{self.explanation}")  # a progress bar may have left its line open
        if self._path is not None:
            self.explanation.save(self._path)


def log_nothing_to_split(situation: str, remedy: str) -> None:
    """Report that a model is compiled without DDP; `situation` says how it is trained."""
    _logs.progress(
        "%s, without DistributedDataParallel: there is nothing to split, and the model is compiled "
        "whole; for several ranks %s",
        situation,
        remedy,
    )
