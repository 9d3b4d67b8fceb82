"""The DDP modules of this process, and their forwards."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _traced
from ddpopt._torch import names
from ddpopt._torch.compiled import innermost_backend
from ddpopt._torch.hidden import calls_users_code


def active_ddp() -> DistributedDataParallel | None:
    """The DDP module whose forward runs; None outside of such forwards."""
    return names.GET_ACTIVE_DDP.get(DistributedDataParallel)()


def live_ddp_modules() -> list[DistributedDataParallel]:
    """Return all DDP modules of this process, also those that wait for the garbage collector.

    One whose constructor has raised has no Reducer, and is left out.
    """
    # Not by `isinstance`: DDP derives from an abstract base class (`Joinable`), whose check takes
    # seconds for the objects of a large program.
    modules = [each for each in gc.get_objects() if DistributedDataParallel in type(each).__mro__]
    return [ddp for ddp in modules if names.REDUCER.find(ddp) is not None]


class Forward(NamedTuple):
    """A forward of a DDP module: its arguments, on DDP's device, and what compiles around it.

    `callback` is Dynamo's in the innermost `torch.compile` around the forward, not callable outside
    of any.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    callback: Any

    @property
    def backend(self) -> Any:
        """The backend of the innermost `torch.compile` around the forward, None outside of any."""
        return innermost_backend(self.callback) if callable(self.callback) else None


def watch_ddp_forward(
    before: Callable[[DistributedDataParallel, Forward], None],
    after: Callable[[DistributedDataParallel, Forward], None],
) -> None:
    """Call `before` and `after` around each DDP forward; no `after` if that raises.

    Only this process's first call counts.

    DDP's own hooks run before it has moved the arguments to its device, and at none of them is it
    known which `torch.compile` is around the forward. So the method in which DDP calls its module
    is replaced.
    """
    original = names.RUN_DDP_FORWARD.get(DistributedDataParallel)
    if hasattr(original, "ddpopt_replaces"):
        return
    # `calls_users_code`: Dynamo compiles what the new method calls as if the method were not there.
    # The lambdas get the DDP module and the three fields of `Forward`, of which `callback` is what
    # the function FRAME_CALLBACK returned.
    run_ddp_forward = calls_users_code(
        _traced.around_ddp_forward(
            original,
            lambda ddp, *forward: before(ddp, Forward(*forward)),
            lambda ddp, *forward: after(ddp, Forward(*forward)),
            names.FRAME_CALLBACK.get(),
        )
    )
    watched: Any = functools.wraps(original)(run_ddp_forward)
    watched.ddpopt_replaces = original
    names.RUN_DDP_FORWARD.set(watched, DistributedDataParallel)
