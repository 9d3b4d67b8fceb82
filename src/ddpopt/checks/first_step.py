"""`config.verify`: verify each DDP module by itself, before the first step that trains it.

The backend calls `before_forward` and `after_forward` around forwards of DDP modules.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch, config
from ddpopt._slots import Lifetime, ModuleSlot
from ddpopt._torch import Forward
from ddpopt.checks.copies import BrokenOffError, is_compiled_by_us
from ddpopt.checks.verify import verify
from ddpopt.errors import DisagreementError, TorchDriftError, VerificationError
from ddpopt.planning.batch import Batch
from ddpopt.split import state
from ddpopt.split.state import MODES_WITHOUT_REHEARSAL, find_mode

# Whether a module was verified, or a line in the log said why not; each module is tried once.
_is_settled: ModuleSlot[bool] = ModuleSlot(bool, Lifetime.MODULE)


def before_forward(ddp: DistributedDataParallel, forward: Forward) -> None:
    """Verify a module before its first forward that trains it, if `config.verify` is set.

    Raises:
        VerificationError: compiled code is wrong.
        DisagreementError: as `warmup`.
        PeerError: a rank was lost while ranks communicated.
    """
    if not _is_due(ddp):
        return
    try:
        is_compiled_around = forward.backend is _torch.lookup_backend("ddpopt")
        # Not by `ddp.compile()`, whose compiled function is in the module, and found there.
        if is_compiled_around and not _torch.compiled_functions(ddp):
            # The call of DDP is compiled by torch.compile(ddp), or in a function around it.
            model = _torch.compiled_by(forward.callback, ddp)
        elif is_compiled_by_us(ddp):
            model = ddp
        else:
            return  # nothing of the module is compiled, as far as is known yet: see `after_forward`
    except TorchDriftError as error:
        _decline(ddp, str(error), "use such a release")  # of torch, which the error names
        return
    _verify_once(ddp, model, forward)


def after_forward(ddp: DistributedDataParallel, forward: Forward) -> None:
    """Verify a module whose forward called compiled code that is no part of the module.

    Only after the forward is this known, by the graphs that were compiled for the module.

    Raises:
        VerificationError: compiled code is wrong.
        DisagreementError: as `warmup`.
        PeerError: a rank was lost while ranks communicated.
    """
    if _is_due(ddp) and state.get(ddp).cuts:
        _verify_once(ddp, ddp, forward)


def _is_due(ddp: DistributedDataParallel) -> bool:
    """Whether a forward that trains the module is its first, and `config.verify` is set."""
    if not config.verify or _is_settled.get(ddp) or state.is_copy(ddp):  # `verify` steps on copies
        return False
    return torch.is_grad_enabled() and any(p.requires_grad for p in ddp.parameters())


def _verify_once(ddp: DistributedDataParallel, model: torch.nn.Module, forward: Forward) -> None:
    """Verify a module, and raise if compiled code is wrong, or ranks cannot train on together.

    Whatever else goes wrong in the verification is logged, and training goes on.
    """
    _is_settled.set(ddp, True)  # also if verifying raises: it is not tried again in the next step
    try:
        outcome = verify(model, Batch(forward.arguments, forward.keywords))
    except (BrokenOffError, DisagreementError):
        # A collective of the verification was broken off in its middle, so ranks are out of step:
        # what one sent for it would be taken for part of training's next one. Or ranks have
        # different models or options. After any other PeerError all ranks train on.
        raise
    except Exception as error:
        # The model may raise anything, the batch may be one that cannot be copied, the output may
        # give no loss.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if find_mode(ddp, MODES_WITHOUT_REHEARSAL) is not None:
            remedy = "train without that mode"  # for which the step was refused
        else:
            remedy = "call ddpopt.verify with a batch and a loss_fn for which it works"
        _decline(ddp, reason, remedy)
        return
    if outcome.passed:
        _logs.progress("%s", outcome)
    elif not outcome.is_repeatable:
        _decline(ddp, outcome.note, "call ddpopt.verify where it gives the same twice")
    else:
        raise VerificationError(
            f"{outcome}\ntraining was stopped before its first step, because DDPOPT_VERIFY or "
            "ddpopt.config.verify is set; train with DDPOPT_ENABLED=0 or without torch.compile, "
            "and report this; if only rounding differs, call ddpopt.verify with higher tolerances"
        )


def _decline(ddp: DistributedDataParallel, reason: str, remedy: str) -> None:
    """Warn that a module was not verified; it is not tried again."""
    _is_settled.set(ddp, True)
    _logs.warning(
        "ddpopt.config.verify is set, but this DistributedDataParallel(%s) was not verified, and "
        "training goes on: %s; to verify it, %s",
        type(ddp.module).__name__,
        reason,
        remedy,
    )
