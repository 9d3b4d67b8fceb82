"""The exceptions that ddpopt raises, and its reasons for not cutting a graph, or its backward.

A reason's value is the sentence that the user reads: what happened and what to do. It is given by
raising `NotCutError` where it is found, and kept on the graph's cut.
"""

from __future__ import annotations

import enum


class DDPOptError(Exception):
    """Base of every exception that ddpopt raises."""


class OptionError(DDPOptError, ValueError):
    """A flag, an option, an argument or an environment variable has an invalid value.

    Use one of the values that the message names.
    """


class UnsupportedModeError(DDPOptError, RuntimeError):
    """torch or a trainer is in a mode in which ddpopt cannot overlap DDP's communication.

    Change the setting that the message names, or use another backend.
    """


class RecomputationError(DDPOptError, RuntimeError):
    """A checkpoint's recomputation runs different code than its forward: gradients would be wrong.

    Leave the layer that breaks the graph uncompiled.
    """


class HookError(DDPOptError, RuntimeError):
    """A hook, or a pipeline's schedule, did what the sections of a backward cannot follow.

    Gradients would be wrong. Change it, or the split, as the message says.
    """


class PlanError(DDPOptError, ValueError):
    """A cost, a profile or a plan is invalid, or does not fit the model or the other ranks.

    Correct the value that the message names; make a plan on one rank and broadcast it.
    """


class AttachError(DDPOptError, RuntimeError):
    """A communication algorithm cannot be attached or used as requested, on some rank.

    Do what the message says; build the same model, optimizer and algorithm on all ranks.
    """


class PeerError(DDPOptError, RuntimeError):
    """Another rank has exited, hangs, or did not take part within the process group's timeout.

    Look at that rank's log; restart all ranks, as torchrun does with `--max-restarts`.
    """


class VerificationError(DDPOptError, RuntimeError):
    """A compiled step's gradients, loss or buffers differ from eager; the message names the worst.

    Train with `DDPOPT_ENABLED=0` (compiled, not split) or eagerly, and report it with the message.
    If only rounding differs, call `ddpopt.verify` with higher tolerances.
    """


class DisagreementError(DDPOptError, RuntimeError):
    """Ranks have different parameters, bucket limits, options or releases for one DDP module.

    Build the model and DDP identically on all ranks, with the same releases of torch and ddpopt.
    Also raised on a rank that cannot cut a graph with collectives of its own, as others may: they
    would issue these and DDP's in another order. Do what the message says.
    """


class NonFiniteError(DDPOptError, ArithmeticError):
    """Weights or gradients are NaN, infinite or too large to be compressed, on some rank.

    Look for the cause as you would without compression: lower the learning rate, clip gradients,
    use bfloat16 instead of float16. All ranks raise it in the same step, and none has applied
    anything received from the others.
    """


class TorchDriftError(DDPOptError, ImportError):
    """A private name of torch that ddpopt needs is not where the supported releases have it.

    Install a torch release that this ddpopt supports, or upgrade ddpopt.
    """


# Marks that follow a reason's sentence where they apply, see `Reason`.
_LOSES_OVERLAP, _OF_BACKWARD = "overlap is lost", "of backward"
_OF_THIS_RANK = "on this rank, and perhaps on no other"


class Reason(enum.Enum):
    """Why a graph is compiled whole.

    The value is the sentence that users read.

    `is_expected`: the reason lies in the settings or the graph. Any other is logged as a warning:
    overlap is lost that should not be. `is_of_backward`: it is why forward is cut, although `split`
    is "backward" or "auto". `is_alike`: it holds on all ranks that run the same program, or on
    none.
    """

    _value_: str
    is_expected: bool
    is_of_backward: bool
    is_alike: bool

    def __new__(cls, sentence: str, *marks: str) -> Reason:
        self = object.__new__(cls)
        self._value_ = sentence
        self.is_expected = _LOSES_OVERLAP not in marks
        self.is_of_backward = _OF_BACKWARD in marks
        self.is_alike = _OF_THIS_RANK not in marks
        return self

    NO_DDP = "no DistributedDataParallel forward is active, so there are no buckets to cut at"
    NO_GRAD = "gradients are off (no_grad, as in evaluation), so there is no backward to overlap"
    DISABLED = (
        "splitting is switched off (ddpopt.config.enabled, DDPOPT_ENABLED or the option 'enabled')"
    )
    NO_PARAMETERS = (
        "the graph uses no parameter that DDP reduces (it has none, or all are frozen, ignored or "
        "delayed)"
    )
    ONE_BUCKET = (
        "all parameters of this graph fall into one DDP bucket; for overlap have ddpopt find "
        "buckets, options={'buckets': 'auto'}, or give DistributedDataParallel a smaller "
        "bucket_cap_mb"
    )
    ONE_PLANNED_BUCKET = "the plan of its buckets has all parameters of this graph in one"
    COMPLETE_TOGETHER = (
        "DDP's buckets all become complete at one place in backward, so no cut would release one "
        "earlier; register parameters in the order of their use, or have ddpopt find buckets, "
        "options={'buckets': 'auto'}"
    )
    NO_LEGAL_CUT = (
        "no place between the buckets can be cut (one region, or a value that cannot be passed "
        "between sections, spans them all); move it into a smaller part of the forward, or "
        "compile the submodules before they are wrapped",
        _LOSES_OVERLAP,
    )
    COLLECTIVES = (
        "it has collectives of its own, or calls that may be some (operators of other libraries "
        "do not say), and no boundaries are possible with which ranks issue them and DDP's "
        "allreduces in one order; move them out of the region that spans several"
    )
    COLLECTIVES_AND_SIZES = (
        "it has collectives of its own, or calls that may be some, and a size that is a symbol on "
        "this rank, and may be a constant on others, forbids a boundary of its forward; compile "
        "with dynamic=True or with dynamic=False on all ranks",
        _LOSES_OVERLAP,
        _OF_THIS_RANK,
    )
    SECTION_FAILED = (
        "the inner compiler raised the error below on one section, and not on the whole graph; "
        "training goes on without overlap; please report it, or set options={'enabled': False} to "
        "silence this",
        _LOSES_OVERLAP,
        _OF_THIS_RANK,
    )
    NOT_PROVEN = (
        "the sections could not be shown to compute what the graph computes; training goes on "
        "without overlap; please report the difference below",
        _LOSES_OVERLAP,
        _OF_THIS_RANK,
    )
    SPLIT_FAILED = (
        "splitting the graph raised an error; training goes on without overlap; please report "
        "the error below, or set options={'enabled': False} to silence this",
        _LOSES_OVERLAP,
        _OF_THIS_RANK,
    )
    TORCH_DRIFT = (
        "this torch release moved a private name that splitting needs; training goes on without "
        "overlap; install a torch release that this ddpopt supports, or upgrade ddpopt",
        _LOSES_OVERLAP,
    )
    INNER = (
        "the inner compiler hands out no backward graph of AOTAutograd's; use the inner compiler "
        "'inductor' or 'aot_eager'",
        _OF_BACKWARD,
    )
    CUDA_GRAPHS = (
        "CUDA graphs are on, whose backward has to run as one graph; use a mode without them, such "
        "as 'max-autotune-no-cudagraphs'",
        _OF_BACKWARD,
    )
    SUBCLASSES = (
        "it has a nested tensor, or an input of another tensor subclass, which AOTAutograd takes "
        "apart or does not take; use split='forward' for the latter",
        _OF_BACKWARD,
    )
    DEVICES = (
        "its gradients are on several devices, whose parts of backward run in threads of their "
        "own; compile the part on each device by itself",
        _OF_BACKWARD,
    )
    ATTRIBUTES = (
        "its parameters are attributes of the graph; set "
        "torch._dynamo.config.inline_inbuilt_nn_modules = True",
        _OF_BACKWARD,
    )
    OTHER_OUTPUTS = (
        "its backward graph returns more than gradients (such as random number state); use "
        "split='forward' for it",
        _OF_BACKWARD,
    )
    EFFECTS = (
        "its backward has operators with effects, as torch.linalg.solve's checks are, whose order "
        "tokens keep in one graph; use split='forward' for it",
        _OF_BACKWARD,
    )
    STREAMS = (
        "its backward says on which stream calls run; compile the part on each by itself",
        _OF_BACKWARD,
    )
    NOT_DESCRIBED = (
        "AOTAutograd's descriptions of the gradients do not match what its backward graph returns; "
        "please report it",
        _OF_BACKWARD,
        _LOSES_OVERLAP,
    )
    BACKWARD_FAILED = (
        "cutting its backward graph raised an error; please report the error below",
        _OF_BACKWARD,
        _LOSES_OVERLAP,
        _OF_THIS_RANK,
    )
    BACKWARD_DRIFT = (
        "this torch release moved a private name that it needs; install a torch release that this "
        "ddpopt supports, or upgrade ddpopt",
        _OF_BACKWARD,
        _LOSES_OVERLAP,
    )


class DDPMode(enum.Enum):
    """A mode of a DDP module in which its Reducer, or its allreduce, cannot be replaced."""

    MIXED_PRECISION = "it has DDP's mixed_precision; use autocast instead"
    OPTIMIZER_IN_BACKWARD = "an optimizer runs in its backward (apply_optimizer_in_backward)"
    DELAYED_PARAMETERS = (
        "it delays the reduction of some parameters (delay_all_reduce_named_params)"
    )
    JOIN = "it is in its join() context, in which ranks make different numbers of steps"
    FROZEN = "all its parameters are frozen now, so it has no gradients"


class NotCutError(Exception):
    """A graph or its backward is not cut, for a reason; raised and caught inside ddpopt."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail

    @classmethod
    def because_of(cls, error: Exception, *, in_backward: bool = False) -> NotCutError:
        """Return `error` if it is a NotCutError, else one with the reason that it amounts to."""
        if isinstance(error, cls):
            return error
        if isinstance(error, TorchDriftError):
            return cls(Reason.BACKWARD_DRIFT if in_backward else Reason.TORCH_DRIFT, str(error))
        reason = Reason.BACKWARD_FAILED if in_backward else Reason.SPLIT_FAILED
        return cls(reason, f"{type(error).__name__}: {error}")
