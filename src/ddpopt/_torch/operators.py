"""What a call in a graph does, by the operator or the function of torch's that it calls."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ddpopt._torch import names

_OVERLOAD, _PACKET = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)
RUNNING_AVERAGES = ("running_mean", "running_var")
# Batch norms that do not write to their running averages have names that end so.
_ENDINGS_OF_ONLY_READING = ("_functional", "_no_training", "_no_update", "_backward")


def written_arguments(target: object, name: str) -> set[tuple[int | None, str]]:
    """The positions (None: keyword only) and names of the arguments that an operator writes to.

    `target` is what a call calls. If that is a function or a method instead of an operator, the
    operator is taken to be ATen's that has this `name`; if there is none, nothing is written to.
    All overloads count if it is not known which is called. Running averages count too, although
    schemas do not declare them.
    """
    if isinstance(target, _OVERLOAD):
        overloads = [target]
    else:
        packet: Any = target if isinstance(target, _PACKET) else getattr(torch.ops.aten, name, None)
        is_packet = isinstance(packet, _PACKET)
        overloads = [getattr(packet, o) for o in packet.overloads()] if is_packet else []
    for overload in overloads:
        schema = names.SCHEMA.get(overload)  # which cannot always be hashed, unlike the overload
        if overload not in _writes:
            _writes[overload] = _find_writes(schema)
    return {written for overload in overloads for written in _writes[overload]}


# What each overload of an operator writes to, as `written_arguments` returns it. An operator that a
# program defines anew has other overloads.
_writes: dict[Any, tuple[tuple[int | None, str], ...]] = {}


def _find_writes(schema: Any) -> tuple[tuple[int | None, str], ...]:
    """The arguments to which the overload with this schema writes, as in `written_arguments`."""
    only_reads_averages = schema.name.endswith(_ENDINGS_OF_ONLY_READING)
    return tuple(
        (None if argument.kwarg_only else position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (argument.name in RUNNING_AVERAGES and not only_reads_averages)
    )


def is_higher_order(target: object) -> bool:
    """Whether a call's target is an operator that takes graphs or kernels as arguments."""
    return isinstance(target, names.HIGHER_ORDER.get())


def only_runs_graphs(name: str) -> bool:
    """Whether a higher-order operator does nothing but run the graphs that it is given."""
    return name in names.RUNNING_GRAPHS.text.split()


def applies_function(name: str) -> bool:
    """Whether a higher-order operator is a call of an `autograd.Function`: forward, backward, *."""
    return name == names.FUNCTION_APPLY.text


def is_triton_kernel(target: object) -> bool:
    """Whether a call runs a user's Triton kernel, which may write to what it is given."""
    return target is names.TRITON_KERNEL.get()


def links_effects(target: object) -> bool:
    """Whether a call takes and returns an effect token, which keeps such calls in order."""
    return target is names.WITH_EFFECTS.get()


def is_effect_token(name: str) -> bool:
    """Whether an operator makes the first effect token, or takes the last."""
    return name in names.EFFECT_TOKENS.text.split()


def is_wait(target: object) -> bool:
    """Whether an operator waits for a functional collective, which was issued before."""
    return str(target) == names.WAIT_TENSOR.text


def is_view(target: object) -> bool:
    """Whether an operator returns memory of its first argument, in another shape or dtype."""
    if not isinstance(target, _OVERLOAD):
        return False
    # ATen does not mark these as views: autograd need not know, but they are (splits.md, fault 10).
    unmarked = (
        names.UNSAFE_VIEW.get().default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    )
    return bool(names.IS_VIEW.get(target)) or target in unmarked


# Parts of the names of ATen's operators: of those in the tables of Inductor's pass `reinplace`,
# torch 2.11 to 2.15, and of operators that the pass or a decomposition turns into one of these.
# tests/split/test_facts.py compares.
_PARTS_OF_IN_PLACE_NAMES = ("scatter", "index_put", "_foreach_", "_philox_", "_scaled_addmm")


def may_become_in_place(target: object) -> bool:
    """Whether Inductor may have a call write to an input, if nothing reads that any more."""
    library = namespace_of(target)
    if library == "aten":
        return any(part in str(target) for part in _PARTS_OF_IN_PLACE_NAMES)
    # Triton kernels, which are higher-order, and functional collectives have in-place forms.
    return is_higher_order(target) or (library or "").endswith("c10d_functional")


def without_device(name: str) -> str:
    """The name of an operator for the CPU as that of the same one for all devices."""
    return name.replace(names.FOR_CPU.text, "")


def enters_autocast(name: str) -> bool:
    """Whether a call, by its name, begins a block of autocast."""
    return names.ENTER_AUTOCAST.is_name_of(name)


def exits_autocast(name: str) -> bool:
    """Whether a call, by its name, ends a block of autocast."""
    return names.EXIT_AUTOCAST.is_name_of(name)


def sets_grad_mode(name: str) -> bool:
    """Whether a call, by its name, switches gradients on or off for the calls after it."""
    return names.SET_GRAD_ENABLED.is_name_of(name)


def region_partners() -> dict[str, str]:
    """The names of calls that switch on a global state, with those that switch it off.

    Autocast's are not among them: a section may begin while it is on. Nor are no_grad's and
    sdpa_kernel's, each of which one function switches on and off.
    """
    pairs = (
        (names.ENTER_VMAP, names.EXIT_VMAP),
        (names.ENTER_GRAD, names.EXIT_GRAD),
        (names.ENTER_JVP, names.EXIT_JVP),
        (names.DISABLE_SAVED_HOOKS, names.ENABLE_SAVED_HOOKS),
        (names.ENTER_DUAL_LEVEL, names.EXIT_DUAL_LEVEL),
    )
    for function in itertools.chain.from_iterable(pairs):
        function.get()  # raises if torch has no such function: graphs would call it by another name
    return {enter.name: leave.name for enter, leave in pairs}


# The endings of the names above, by which others like them are told, such as functionalize's.
_STATEFUL = ("_nesting", "_hooks_disable", "_hooks_enable", "_dual_level")


def chooses_attention(name: str) -> bool:
    """Whether a call, by its name, says which kernels attention may use in the calls after it.

    Dynamo writes it at the beginning and at the end of an `sdpa_kernel` block.
    """
    return names.CHOOSE_ATTENTION.is_name_of(name)


def changes_state(name: str) -> bool:
    """Whether a function of torch's, by its name, changes a global state."""
    return name.endswith(_STATEFUL) or chooses_attention(name)


def uses_stream(target: object) -> bool:
    """Whether an operator says on which stream the calls after it run, or waits for one."""
    return namespace_of(target) == names.STREAMS.text


def namespace_of(target: object) -> str | None:
    """The library that an operator belongs to, such as `aten`; None if `target` is no operator."""
    return str(target).partition(".")[0] if isinstance(target, _OVERLOAD | _PACKET) else None
