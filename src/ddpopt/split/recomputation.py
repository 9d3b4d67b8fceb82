"""Which code may run now: that of the active DDP module, or of a forward that is recomputed.

`torch.utils.checkpoint` around a compiled region runs it once more during backward, where no DDP
module is active, and gives the tensors that it saves then to the nodes of the first run. So the
recomputation has to run exactly the forward's code: another version saves other tensors, or as many
of equal shapes in another order, which nobody would notice.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.errors import RecomputationError
from ddpopt.reducer import ReducerRules
from ddpopt.split import state


@dataclass(frozen=True, eq=False, slots=True)
class Version:
    """One compiled version of a frame, for a DDP module's rules (None: for no DDP).

    `saves_tensors` says that its forward may save tensors for the backward.
    """

    frame: str
    rules: ReducerRules | None
    saves_tensors: bool


class _Forward(NamedTuple):
    """The forward of a checkpoint: its DDP module, and what may have run in it.

    `versions` has, for each frame, those that Dynamo tried until it found the one to run: in the
    recomputation the guards of the others fail as they did then.
    """

    ddp: Callable[[], DistributedDataParallel | None]
    versions: defaultdict[str, set[Version]]


# By an object that torch has for each checkpoint's forward, until it is recomputed; each entry ends
# with that object. See `checkpointed_region`.
_forwards: weakref.WeakKeyDictionary[object, _Forward] = weakref.WeakKeyDictionary()


def ddp_to_compile_for() -> DistributedDataParallel | None:
    """The DDP module to compile for: the active one, or that of the recomputed forward."""
    # Asked although it matters only where no module is active: if torch has moved the private name,
    # that shows here, and not first in a recomputation.
    is_in_backward = _torch.is_in_backward()
    active = _torch.active_ddp()
    if active is not None or not is_in_backward:
        return active
    forward = _checkpointed_forward(active)
    return None if forward is None else forward.ddp()


def may_run(version: Version) -> bool:
    """Whether this is the code to run now, as far as DDP is concerned.

    Dynamo first offers the version that ran last. In a recomputation that need not be the one that
    ran in the forward: a dynamic version and one for the exact sizes may both fit an input. If
    nothing tells which forward is recomputed (reentrant checkpoints, those of other libraries), any
    version will do. This is a guard, which runs at each call of a compiled function.
    """
    active = _torch.active_ddp()
    forward = _checkpointed_forward(active)
    if _is_recomputing(active):
        if forward is None:
            return True
        tried_versions = forward.versions.get(version.frame)
        if tried_versions is None:
            # The forward ran no compiled code of this frame: it ran the code of another frame, of
            # which this one is a part. Code that saves nothing may run. Else Dynamo is to compile a
            # new version, which `note_compiled` refuses. (A guard cannot raise.)
            return not version.saves_tensors
        return version in tried_versions
    is_own = state.rules_of(active) == version.rules  # both None without a module
    if is_own and forward is not None:
        # Another guard may still reject this version. It then does so in the recomputation too.
        forward.versions[version.frame].add(version)
    return is_own


def note_compiled(version: Version) -> None:
    """Note a version that is being compiled; a recomputation in progress may run it too.

    Dynamo compiles in a recomputation if one of the model's own guards fails there.

    Raises:
        RecomputationError: a recomputation reaches a frame that its forward did not, and the frame
            saves tensors.
    """
    active = _torch.active_ddp()
    forward = _checkpointed_forward(active)
    if forward is None:
        return
    is_other_frame = version.frame not in forward.versions
    if is_other_frame and version.saves_tensors and _is_recomputing(active):
        raise RecomputationError(
            "a checkpoint's recomputation does not run the compiled code of its forward: Dynamo "
            "has given up a function since, as another layer that shares it breaks the graph, and "
            "compiles parts of it instead. These save other tensors, so gradients would be wrong; "
            "leave the layer that breaks the graph (TORCH_LOGS=graph_breaks names it) uncompiled"
        )
    forward.versions[version.frame].add(version)


def _is_recomputing(active: DistributedDataParallel | None) -> bool:
    """Whether code that runs now is recomputed: in backward, where no module is `active`."""
    return active is None and _torch.is_in_backward()


def _checkpointed_forward(active: DistributedDataParallel | None) -> _Forward | None:
    """The forward that runs in a checkpoint or is recomputed, None if there is none.

    It is made when a checkpoint's forward first asks. None also for a recomputation whose forward
    never asked: it ran nothing that ddpopt compiled.
    """
    region = _torch.checkpointed_region()  # the same object in a forward and its recomputation
    if region is None:
        return None
    if region not in _forwards and not _is_recomputing(active):
        reference = (lambda: None) if active is None else weakref.ref(active)
        _forwards[region] = _Forward(reference, defaultdict(set))
    return _forwards.get(region)
