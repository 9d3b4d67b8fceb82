"""The exceptions that ddpopt raises and the reasons for which it compiles a graph whole.

A reason's value is the sentence that the user reads: what happened and what to do.
"""

from __future__ import annotations

import enum


class DDPOptError(Exception):
    """Base of every exception that ddpopt raises."""


class OptionError(DDPOptError, ValueError):
    """A flag, an option of `torch.compile` or an environment variable has a bad value."""


class UnsupportedModeError(DDPOptError, RuntimeError):
    """A mode of torch that bypasses DDP's C++ Reducer is on, so there is nothing to overlap."""


class SectionCompileError(DDPOptError, RuntimeError):
    """The inner compiler raised on one section; the message names it."""


class TorchDriftError(DDPOptError, ImportError):
    """A private name of torch that ddpopt needs is not where the supported releases have it."""


class Fallback(enum.Enum):
    """Why a graph was compiled whole."""

    NO_DDP = "no DistributedDataParallel forward is active, so there are no buckets to cut at"
    NO_GRAD = "gradients are off (no_grad, as in evaluation), so there is no backward to overlap"
    DISABLED = (
        "splitting is switched off (ddpopt.config.enabled, DDPOPT_ENABLED or the option 'enabled')"
    )
    DYNAMO_DISABLED = "splitting is switched off by torch._dynamo.config.optimize_ddp = False"
    NO_PARAMETERS = (
        "the graph uses no parameter that DDP reduces (all are frozen, ignored or delayed)"
    )
    ONE_BUCKET = (
        "all parameters of this graph fall into one DDP bucket; for overlap give "
        "DistributedDataParallel a smaller bucket_cap_mb"
    )
    COMPLETE_TOGETHER = (
        "DDP's buckets all become complete at one place in backward, so no cut would release one "
        "earlier; register parameters in the order of their use, or leave find_unused_parameters "
        "off"
    )
    NO_LEGAL_CUT = (
        "no place between the buckets can be cut (one region, or a value that cannot be passed "
        "between sections, spans them all); move it into a smaller part of the forward, or "
        "compile the submodules before they are wrapped"
    )
    SPLIT_FAILED = (
        "splitting the graph raised an error; training goes on without overlap; please report "
        "the error below, or set options={'enabled': False} to silence this"
    )
    TORCH_DRIFT = (
        "this torch release moved a private name that splitting needs; training goes on without "
        "overlap; install a torch release that this ddpopt supports, or upgrade ddpopt"
    )

    @property
    def is_expected(self) -> bool:
        """Whether this is how the graph should be compiled, rather than overlap lost."""
        return self not in _OVERLAP_LOST


_OVERLAP_LOST = frozenset({Fallback.NO_LEGAL_CUT, Fallback.SPLIT_FAILED, Fallback.TORCH_DRIFT})
