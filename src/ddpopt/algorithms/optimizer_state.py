"""`send_states`: gives all ranks the optimizer states of rank 0, whatever these are made of.

A state is what `optimizer.state` has for a parameter, such as
`{"step": 3, "exp_avg": tensor, "history": [tensor, tensor]}`. Rank 0 describes its states. The
other ranks compare that with their own, and all find out together whether it can be sent:

- a tensor is written to the one in its place, or becomes a new one where there is none;
- a number, bool, text or None takes the other one's place, and so do lists, dicts and tuples;
- any other object stays as it is if it is equal, as far as that can be told (`text_of`), and is
  refused if not.

So ranks of which some were resumed from a checkpoint go on as rank 0 does.
"""

from __future__ import annotations

import operator
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpopt import _logs, _torch
from ddpopt._text import count
from ddpopt.algorithms.training import Training
from ddpopt.algorithms.value_text import text_of
from ddpopt.errors import AttachError
from ddpopt.ranks.agree import communicating, decide_on_rank_0, require_equal

_REMEDY = "load the same checkpoint on all ranks before attach, or on none"
_WHAT = "sending the optimizer states of rank 0"

# Values of these types can be sent: they are immutable, and a copy is as good as the original.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A leaf that is a tensor, or a subclass made of several, which are sent one by one."""

    kind: str  # `text_of` a subclass's tensor; "" for a plain tensor
    parts: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    is_on_cpu: bool


@dataclass(frozen=True, slots=True)
class _Plain:
    """A leaf that is sent as it is."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Object:
    """A leaf that is compared, not sent."""

    text: str


_Leaf = _Tensors | _Plain | _Object


@dataclass(frozen=True, slots=True)
class _State:
    """What one entry of `optimizer.state` is made of."""

    leaves: Mapping[str, _Leaf]  # by path, see `_torch.flatten`
    # The containers, pickled, with numbers in place of leaves; None if they cannot be pickled, such
    # as a defaultdict with a lambda.
    containers: bytes | None
    # The key in `optimizer.state`, if it is no parameter.
    key: Any = None


# By the name of the parameter, or what else is the key of an entry.
_States = Mapping[str, _State]


def send_states(training: Training) -> None:
    """Make optimizer states equal to rank 0's. Collective.

    Raises:
        AttachError: a state of some rank cannot become equal; on all ranks.
    """

    def describe() -> bytes | str:
        # Pickled here: what cannot be would raise in the collective, on this rank alone.
        return pickle.dumps([_describe(training, o) for o in training.optimizers])

    described = decide_on_rank_0(training.ddp, _WHAT, describe, lambda error: f"{error!r}")
    states_by_optimizer: list[_States] = []

    def read_and_compare() -> list[Any]:
        if isinstance(described, str):
            raise AttachError(
                f"the optimizer states of rank 0 cannot be described to other ranks ({described}); "
                "call attach before the first step, or give states keys that can be pickled"
            )
        states_by_optimizer.extend(pickle.loads(described))
        for number, optimizer in enumerate(training.optimizers):
            _check(training, number, optimizer, states_by_optimizer[number])
        return []  # all was compared above

    require_equal(training.ddp, read_and_compare, AttachError, _REMEDY)
    # What went wrong here while values were sent. It is told to all ranks when all have been sent:
    # a rank that raised before would leave the others waiting.
    problems: list[Exception] = []
    with communicating(_WHAT):
        for optimizer, states in zip(training.optimizers, states_by_optimizer, strict=True):
            _receive(training, optimizer, states, problems)

    def raise_problem() -> list[Any]:
        if problems:
            raise AttachError(f"an optimizer state cannot be written: {problems[0]}")
        return []

    require_equal(training.ddp, raise_problem, AttachError, _REMEDY)


# ---- What states are made of ---------------------------------------------------------------------


def _keys(training: Training, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The keys of an optimizer's state, or those that it might have, by names equal on all ranks.

    Entries of parameters that no group has any more are left out.
    """
    if _keeps_a_share(optimizer):  # of its own on each rank, so there is nothing to make equal
        return {}
    keys: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known = training.parameters.get(parameter)
            keys[known.name if known else f"parameter {len(keys)} of the optimizer"] = parameter
    for key in optimizer.state:
        if not isinstance(key, torch.Tensor):
            keys[f"the key {text_of(key)}"] = key
    return keys


def _keeps_a_share(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has on each rank the states of a share of the parameters."""
    module = sys.modules.get("torch.distributed.optim")  # else nobody uses it
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _describe(training: Training, optimizer: torch.optim.Optimizer) -> _States:
    """What the states of this rank are made of."""
    states = {}
    for name, key in _keys(training, optimizer).items():
        if key in optimizer.state:
            leaves, structure = _torch.flatten(optimizer.state[key])
            described = {path: _describe_leaf(leaf) for path, leaf in leaves.items()}
            other_key = None if isinstance(key, torch.Tensor) else key
            # None if they do not pickle: then each rank keeps its own containers.
            containers = _pickle_containers(structure, len(leaves))
            states[name] = _State(described, containers, other_key)
    return states


def _pickle_containers(structure: Any, num_leaves: int) -> bytes | None:
    """The containers of a flattened state, with numbers as leaves; None if they do not pickle."""
    try:
        return pickle.dumps(_torch.unflatten(range(num_leaves), structure))
    except Exception:
        return None  # whatever code of users raises


def _describe_leaf(leaf: Any) -> _Leaf:
    """What a leaf of a state is, and whether it can be sent."""
    if isinstance(leaf, torch.Tensor):
        parts = _parts_of(leaf)
        if parts:
            is_plain = len(parts) == 1 and parts[0] is leaf
            kind = "" if is_plain else text_of(leaf)
            dtypes_and_shapes = tuple((part.dtype, tuple(part.shape)) for part in parts)
            return _Tensors(kind, dtypes_and_shapes, leaf.device.type == "cpu")
    elif type(leaf) in _PLAIN:
        return _Plain(leaf)
    return _Object(text_of(leaf))


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of which a tensor consists; none if its values cannot be sent.

    A subclass may consist of several, as torchao's optimizers have codes and their scales.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [_parts_of(getattr(tensor, name)) for name in names]
        # A tensor of which only some parts were rank 0's would have the values of no rank.
        return [plain for part in parts for plain in part] if all(parts) else []
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return []
    return [tensor]


# ---- Whether states can become equal -------------------------------------------------------------


def _check(
    training: Training, number: int, optimizer: torch.optim.Optimizer, of_rank_0: _States
) -> None:
    """Raise AttachError if this rank's states cannot become rank 0's."""
    own_states = _describe(training, optimizer)
    for state in of_rank_0.values():
        if state.containers is not None:
            pickle.loads(state.containers)  # raises here, where other ranks are told
    missing = [name for name in of_rank_0 if name not in own_states]
    extra = [name for name in own_states if name not in of_rank_0]
    if missing and extra:  # `_receive` makes what is missing here, or else drops what is extra
        raise AttachError(
            f"optimizer {number} has a state of {extra[0]}, which rank 0 has not, and none of "
            f"{missing[0]}, which rank 0 has, as if each rank kept those of a share of the "
            "parameters: algorithms need an optimizer that is whole on each rank, or torch's "
            f"ZeroRedundancyOptimizer; or {_REMEDY}"
        )
    for name, state in of_rank_0.items():
        own_leaves = own_states[name].leaves if name in own_states else {}
        if state.containers is None and list(own_leaves) != list(state.leaves):
            raise AttachError(
                f"optimizer {number}: {name} has a state of other parts than on rank 0, where its "
                f"containers cannot be pickled, so that it cannot be sent; {_REMEDY}"
            )
        for path, leaf in state.leaves.items():
            own = own_leaves.get(path)
            can_be_made = isinstance(leaf, _Plain) or (isinstance(leaf, _Tensors) and not leaf.kind)
            if not can_be_made and not _are_alike(leaf, own):
                raise AttachError(
                    f"optimizer {number}: state{path} of {name} is {_shown(own)} instead of "
                    f"{_shown(leaf)}, as on rank 0, and what is neither a tensor nor a number or a "
                    f"text cannot be sent; {_REMEDY}"
                )


def _are_alike(leaf: _Leaf, own: _Leaf | None) -> bool:
    """Whether this rank's leaf can be overwritten with rank 0's, or is equal to it."""
    if isinstance(leaf, _Tensors) and isinstance(own, _Tensors):
        return (leaf.kind, leaf.parts) == (own.kind, own.parts)
    return leaf == own


def _shown(leaf: _Leaf | None) -> str:
    """A leaf as an error message shows it; None is a leaf that a rank lacks."""
    match leaf:
        case None:
            return "missing"
        case _Plain(value):
            return repr(value)
        case _Object(text):
            return text
    return leaf.kind or "a tensor"


# ---- Making them equal ---------------------------------------------------------------------------


@torch.no_grad()
def _receive(
    training: Training,
    optimizer: torch.optim.Optimizer,
    of_rank_0: _States,
    problems: list[Exception],
) -> None:
    """Write what rank 0 sends to an optimizer's states. Collective.

    A failure of this rank is added to `problems`, while it goes on to receive. Tensors and
    containers are kept where they can be: others than the optimizer may refer to them.
    """
    keys = _keys(training, optimizer)
    surplus = [n for n, key in keys.items() if key in optimizer.state and n not in of_rank_0]
    for name in surplus:
        del optimizer.state[keys[name]]
    if surplus:
        _logs.warning(
            "the %s had %s that rank 0 has not, and has lost them, since attach makes all ranks "
            "equal to rank 0: was a checkpoint loaded on this rank alone?",
            type(optimizer).__name__,
            count(len(surplus), "state"),
        )
    for name, state in of_rank_0.items():
        # An entry that only rank 0 has, under a key that is no parameter, is made here.
        key: Any = keys.get(name, state.key)
        leaves_before: dict[str, Any] = {}
        structure_before: Any = None
        if key in optimizer.state:
            leaves_before, structure_before = _torch.flatten(optimizer.state[key])
        leaves = []
        for path, described in state.leaves.items():
            # An `_Object` stays, since `_check` has found it to be equal.
            leaf = leaves_before.get(path)
            if isinstance(described, _Tensors):
                leaf = _receive_tensors(training, described, leaf, problems)
            # By their texts a NaN is equal to itself, and True is not 1.
            elif isinstance(described, _Plain) and text_of(leaf) != text_of(described.value):
                leaf = described.value
            leaves.append(leaf)
        structure = structure_before
        if state.containers is not None:
            _, structure = _torch.flatten(pickle.loads(state.containers))
        is_kept = structure == structure_before and all(
            map(operator.is_, leaves, leaves_before.values())
        )
        if not is_kept:
            optimizer.state[key] = _torch.unflatten(leaves, structure)


def _receive_tensors(
    training: Training, described: _Tensors, leaf: Any, problems: list[Exception]
) -> Any:
    """What has rank 0's values: `leaf`, if it can be written to, or a new tensor. Collective."""
    parts: Sequence[torch.Tensor | None] = [None] * len(described.parts)
    if _are_alike(described, _describe_leaf(leaf)):
        parts = _parts_of(leaf)
    for part, (dtype, shape) in zip(parts, described.parts, strict=True):
        # Adam counts steps on the CPU, but NCCL sends GPU tensors only.
        if part is None:
            sent = torch.empty(shape, dtype=dtype, device=training.device)
        else:
            sent = part.detach().to(training.device).contiguous().resolve_conj().resolve_neg()
            if sent.is_inference():  # which no collective may write to
                sent = sent.clone()
        # As bytes: not each backend knows each dtype.
        dist.broadcast(sent.view(-1).view(torch.uint8), group=training.group, group_src=0)
        if part is None:
            leaf = sent.cpu() if described.is_on_cpu else sent
            continue
        try:
            part.copy_(sent)
        except RuntimeError as error:
            # `part` is an inference tensor, or is expanded: several of its elements share memory.
            if part is leaf:
                leaf = sent.to(leaf.device)
            else:  # a subclass made of several is not made anew
                problems.append(error)
    return leaf
