"""The parameters that a Reducer reduces, in its order, and their nodes in autograd."""

from __future__ import annotations

import collections
import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt._indices import ParameterIndex, numbered
from ddpopt._torch import names
from ddpopt._torch.reducer import (
    TensorsOfBuckets,
    ask_buckets,
    follows_arrival_order,
    logged_buckets,
)
from ddpopt.errors import TorchDriftError
from ddpopt.reducer import Parameter


class _Reduced(NamedTuple):
    """A parameter of a Reducer, as it was when `reducer_parameters` first found it.

    The module may change afterwards.
    """

    tensor: torch.Tensor
    name: str
    is_sparse: bool


# The parameters of each Reducer, in its order. Plans made at different times have to speak of the
# same parameters, so names stay, whatever the module calls them later. Each ends with its Reducer.
_parameters_of: weakref.WeakKeyDictionary[Any, tuple[_Reduced, ...]]
_parameters_of = weakref.WeakKeyDictionary()


def reducer_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """The parameters that the Reducer reduces, in its order, shared ones once.

    These are the parameters that required gradients when the Reducer was made, even if they are
    frozen now, have another name, or are in the module no more.

    Raises:
        TorchDriftError: it is not known in which order the Reducer has them.
    """
    reducer = names.REDUCER.get(ddp)
    if reducer in _parameters_of:
        return _describe(_parameters_of[reducer])
    buckets = ask_buckets(ddp)
    if buckets is None:
        # Taken to be those that require gradients now. Not kept, so the Reducer is asked next time.
        trained = _tensors_to_reduce_now(ddp)
        return _describe(_with_names(ddp, _order_of_construction(ddp, trained) or trained))
    _parameters_of[reducer] = tuple(_with_names(ddp, _reducers_order(ddp, buckets)))
    return _describe(_parameters_of[reducer])


def trainable_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """The parameters that the Reducer would reduce if it were made now."""
    return _describe(_with_names(ddp, _tensors_to_reduce_now(ddp)))


def trains_any(ddp: DistributedDataParallel) -> bool:
    """Whether a parameter that the Reducer reduces requires a gradient now."""
    return any(tensor.requires_grad for tensor in reducer_parameters(ddp))


def may_hold_gradients(ddp: DistributedDataParallel) -> bool:
    """Whether gradients may lie in the Reducer's buckets, where a new Reducer does not look."""
    return bool(ddp.gradient_as_bucket_view) and has_gradients(ddp)


def has_gradients(ddp: DistributedDataParallel) -> bool:
    """Whether a parameter that is reduced has a gradient."""
    return any(parameter.grad is not None for parameter in reducer_parameters(ddp))


def reduced_or_trainable_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, Parameter]:
    """The parameters of `reducer_parameters` and of `trainable_parameters`, shared ones once.

    They are in the module's order, by which their indices go too; those that left it come last.
    """
    wanted = dict.fromkeys([*reducer_parameters(ddp), *_tensors_to_reduce_now(ddp)])
    ordered = [tensor for tensor in ddp.module.parameters() if tensor in wanted]
    return _describe(_with_names(ddp, dict.fromkeys([*ordered, *wanted])))


def plain_names(names_of_module: Iterable[str]) -> dict[str, str]:
    """What parameters or buffers with these names are called without two wrappers of modules.

    `layers._orig_mod.0.weight` is `layers.0.weight`: a module is the same one in the wrapper of
    `torch.compile`, or in torch's for checkpoints, and ranks or plans may differ in that. Other
    wrappers' names stay. Of several whose names would become equal each keeps its own.
    """
    wrappers = {names.ORIG_MOD.name, names.CHECKPOINT_WRAPPED.text}
    plain = {}
    for name in names_of_module:
        plain[name] = ".".join(part for part in name.split(".") if part not in wrappers)
    num_of = collections.Counter(plain.values())
    return {name: short if num_of[short] == 1 else name for name, short in plain.items()}


def names_now(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """The names by which the module has its parameters now.

    The names in `reducer_parameters` are `plain_names`, as they were when these were first asked.
    """
    return {tensor: name for name, tensor in ddp.module.named_parameters()}


def _with_names(ddp: DistributedDataParallel, tensors: Iterable[torch.Tensor]) -> list[_Reduced]:
    """The tensors in this order, with their names in the module, or one made if it lacks them."""
    name_of, named = names_now(ddp), []
    plain_of = plain_names(name_of.values())
    for index, tensor in enumerate(tensors):
        name, is_sparse = name_of.get(tensor), False
        if name is not None:
            owner = ddp.module.get_submodule(name.rpartition(".")[0])
            is_sparse = isinstance(owner, nn.Embedding | nn.EmbeddingBag) and bool(owner.sparse)
        called = f"parameter {index}, replaced" if name is None else plain_of[name]
        named.append(_Reduced(tensor, called, is_sparse))
    return named


def _describe(reduced: Iterable[_Reduced]) -> dict[torch.Tensor, Parameter]:
    """A description of each parameter; its index is its number in this order."""
    described: dict[torch.Tensor, Parameter] = {}
    for index, (tensor, name, is_sparse) in numbered(ParameterIndex, reduced):
        described[tensor] = Parameter(
            index=index,
            name=name,
            num_bytes=tensor.nbytes,
            group=f"{tensor.dtype} on {tensor.device}",
            is_sparse=is_sparse,
        )
    return described


def _reducers_order(
    ddp: DistributedDataParallel, buckets: TensorsOfBuckets
) -> Sequence[torch.Tensor]:
    """The tensors in the Reducer's buckets in the order of its own list.

    torch does not show that list. DDP keeps the module's parameters from its construction, but a
    copy of a DDP module keeps the original's, and the module may have changed in between. So a
    list that is taken for the Reducer's is compared with the buckets.
    """
    members = [tensor for bucket in buckets for tensor in bucket]
    logged = logged_buckets(ddp) if follows_arrival_order(ddp) else None
    if logged is not None:  # rebuilt: the log has the buckets too, by numbers of the Reducer's list
        indices = [index for bucket in logged for index in bucket]
        if sorted(indices) == list(range(len(members))):
            numbered_members = zip(indices, members, strict=True)
            by_number = operator.itemgetter(0)  # alone, since tensors have no order
            return [tensor for _, tensor in sorted(numbered_members, key=by_number)]
    # Whether the buckets are those of the construction, see [Note: buckets].
    is_initial = not (follows_arrival_order(ddp) and names.HAS_REBUILT_BUCKETS.get(ddp))
    if is_initial and len({(tensor.dtype, tensor.device) for tensor in members}) == 1:
        # Of one dtype and device they are filled in the list's order, and then reversed.
        return [tensor for bucket in reversed(buckets) for tensor in bucket]
    constructed = _order_of_construction(ddp, members)
    for order in (constructed, _in_order(_tensors_to_reduce_now(ddp), members)):
        if order is not None and _could_be_formed(buckets, order):
            return order
    if not is_initial and constructed is not None:
        # Rebuilt a moment ago, and not logged yet: `final_buckets` compares it with the log.
        return constructed
    raise TorchDriftError(
        "a Reducer has other parameters than the module in DistributedDataParallel, or in another "
        "order: make the DDP module after the last change of its parameters"
    )


def _order_of_construction(
    ddp: DistributedDataParallel, members: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return `members` in the order in which DDP's constructor found them; None if it lacks one."""
    return _in_order(names.MODULE_PARAMETERS.get(ddp), members)


def _in_order(
    order: Iterable[torch.Tensor], members: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return `members` as `order` has them; None if it lacks one."""
    wanted = set(members)
    found = [tensor for tensor in order if tensor in wanted]
    return found if len(found) == len(wanted) else None


def _could_be_formed(buckets: TensorsOfBuckets, order: Sequence[torch.Tensor]) -> bool:
    """Whether DDP may have formed these initial buckets of parameters in this order.

    In an initial bucket parameters are in that order, and the buckets are sorted by their first
    parameter, from the last one to the first.
    """
    index_of = {tensor: index for index, tensor in enumerate(order)}
    indices = [[index_of[tensor] for tensor in bucket] for bucket in buckets]
    firsts = [bucket[0] for bucket in indices]
    return all(bucket == sorted(bucket) for bucket in indices) and firsts == sorted(firsts)[::-1]


def _tensors_to_reduce_now(ddp: DistributedDataParallel) -> Sequence[torch.Tensor]:
    """Return what a Reducer that is made now would reduce, in its order."""
    parameters: Sequence[torch.Tensor] = names.BUILD_PARAMS.get(ddp)()[0]
    return parameters


@contextlib.contextmanager
def requiring_grad(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Unfreeze parameters in this block: a frozen one has no AccumulateGrad node and takes no hook.

    The Reducer keeps the nodes of all that it reduces, so that each parameter's node stays the same
    one as training goes on.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def accumulate_node(parameter: torch.Tensor) -> Any:
    """The autograd node that accumulates a gradient; it lives while somebody holds it."""
    # A program may ask where gradients are off.
    with torch.inference_mode(False), requiring_grad([parameter]):
        return torch.autograd.graph.get_gradient_edge(parameter).node


def accumulate_nodes(result: torch.Tensor) -> list[Any]:
    """The AccumulateGrad nodes that are now in the graph of `result`: one for each leaf.

    Its backward may reach more, by a reentrant checkpoint, whose graph is made then. A node's
    `variable` is the leaf. A pre-hook on the node may keep the gradient from the leaf.
    """
    found = []
    nodes = [result.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # no other kind of node has it
            found.append(node)
        nodes += [before for before, _ in node.next_functions]
    return found


def gradient_hooks(leaf: torch.Tensor) -> list[dict[int, Any]]:
    """The hooks of a leaf that a backward calls, in dictionaries that may be written to."""
    hook_dicts = (names.TENSOR_HOOKS, names.ACCUMULATED_HOOKS)
    return [hooks for hook_dict in hook_dicts if (hooks := hook_dict.get(leaf)) is not None]


def keep_parameters(
    reducer: Any, tensors: Sequence[torch.Tensor], parameters: Sequence[Parameter]
) -> None:
    """Have `reducer_parameters` return these tensors and descriptions for a Reducer made with them.

    Nothing has to be asked of the Reducer then, or to be guessed.
    """
    _parameters_of[reducer] = tuple(
        _Reduced(tensor, parameter.name, parameter.is_sparse)
        for tensor, parameter in zip(tensors, parameters, strict=True)
    )
