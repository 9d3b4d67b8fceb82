"""Copies of what users hand in: modules, batches and losses, to be tried in place of the originals.

A call that promises to change nothing runs the user's code on copies. Gradients may still reach
tensors of the user's: a copy may use an original after all, through a function that holds it
(`shielded` raises then), or a loss may use leaves that are in no copied module (`sparing_others`
keeps gradients from these).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Iterator, Set
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ddpopt import _torch

# Lists and dictionaries with more hold data: they are not searched for modules.
_MOST_SEARCHED_ITEMS = 1000

T = TypeVar("T")


def deep_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    """As `copy.deepcopy`, but takes tensors that autograd computed, which that refuses.

    The copy of such a tensor requires grad and is no leaf, but has none of its history: a backward
    ends at a leaf of the copy's own. `memo` is filled with the copies, by the originals' ids.

    Raises:
        Exception: what is copied may define how, and raise anything.
    """
    with _CopyingResults():
        return copy.deepcopy(value, memo)


class _CopyingResults(torch.overrides.TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors that autograd computed, which it otherwise refuses.

    The copy is computed from a leaf with equal values, so that it may be written to as well.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            with torch.enable_grad():
                return copy.deepcopy(tensor.detach(), memo).requires_grad_().clone()
        return func(*args, **(kwargs or {}))


def copy_batch(batch: T, error: type[Exception]) -> T:
    """A deep copy of a model's arguments.

    Raises:
        error: they cannot be copied.
    """
    try:
        return deep_copy(batch)
    except Exception as cause:  # what it holds may define how it is copied
        raise error(
            f"the batch cannot be copied ({cause}); give what copy.deepcopy takes: lists in place "
            "of generators, no files or locks"
        ) from cause


class Copies(NamedTuple):
    """Copies of a module and a loss, and of the modules that were copied beside that one.

    `beside_model` are those that the loss, or a function in an attribute of the model, holds: the
    topmost ones, without what is in one of them or in the model.
    """

    model: nn.Module
    loss_fn: Any
    beside_model: list[nn.Module]


def copy_model(
    model: nn.Module,
    loss_fn: Any,
    error: type[Exception],
    *,
    shares_tensors: bool = False,
) -> Copies:
    """Copies of a module and of a loss (or None), which may hold modules of the model.

    With `shares_tensors` the copy has the module's own parameters and buffers, for a caller that
    puts other tensors in their place. Functions that were compiled are not compiled in the copy.
    A module of the loss that cannot be copied is used itself.

    Raises:
        error: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    if shares_tensors:
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = tensor
    try:
        copied = deep_copy(model, memo)
    except Exception as cause:  # modules may define how they are copied
        raise error(cannot_be_copied(f"this {type(model).__name__}", cause)) from cause
    for part in model.modules():
        if id(part) in memo:  # not if a `__deepcopy__` shares it, or copies it without the memo
            _copy_functions(part, memo[id(part)], memo)
    copied_loss = None if loss_fn is None else copy_function(loss_fn, memo)
    # A dictionary: memo has a copy twice where a `__deepcopy__` returns that of another object.
    modules = dict.fromkeys(c for c in memo.values() if isinstance(c, nn.Module))
    below = {part for module in modules for part in module.modules() if part is not module}
    below |= set(copied.modules())
    beside_model = [module for module in modules if module not in below]
    return Copies(copied, copied_loss, beside_model)


def _copy_functions(original: nn.Module, copied: nn.Module, memo: dict[int, Any]) -> None:
    """Replace functions in a copied module's attributes by copies if they hold modules.

    `copy.deepcopy` shares functions, such as a forward that was set on the instance. One that
    `torch.compile` returned is replaced by the uncompiled function.
    """
    compiled = _torch.compiled_functions(original)
    for name, value in vars(original).items():
        if name in compiled:
            vars(copied)[name] = _torch.rebound(value, memo)
        elif callable(value) and not isinstance(value, nn.Module):
            vars(copied)[name] = copy_function(value, memo)


def cannot_be_copied(what: str, cause: Exception) -> str:
    """What is wrong with a module for which `copy.deepcopy` raised `cause`."""
    return f"{what} cannot be copied ({cause}); it has to be a module that copy.deepcopy takes"


def foreign_forward(copied: nn.Module, original: nn.Module) -> str:
    """What is wrong if a forward that was set on an instance runs the original in a copy; or ""."""
    # A deep copy of an instance shares the functions in it, with all that they hold.
    cells = getattr(vars(copied).get("forward"), "__closure__", None) or ()
    for value in map(_content, cells):
        if value is original or getattr(value, "__self__", None) is original:
            return (
                f"the forward of this {type(original).__name__} is replaced by a function that "
                "holds the module, so a copy would run the original; call it where the forward is "
                "the module's own"
            )
    return ""


def _content(cell: types.CellType) -> Any:
    """What a function's closure has for a name, None if nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


# ---- Functions ---------------------------------------------------------------------------------


def copy_function(function: T, memo: dict[int, Any]) -> T:
    """A copy of a callable that holds copies of the modules in it, or itself if it holds none.

    Modules are found in closures, defaults, attributes of methods' objects and of callable ones,
    `functools.partial`, lists, tuples and dictionaries in these, and in the global names that a
    function uses; not in what has more than `_MOST_SEARCHED_ITEMS` items, nor in torch's own
    functions. A module that cannot be copied is used itself. `memo` is that of `copy.deepcopy`, and
    says which copies exist already.
    """
    copied: T = _Copier(memo).copy(function)
    return copied


class _Copier:
    """Copies values that hold modules, and leaves all others as they are."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo

    def copy(self, value: Any) -> Any:
        """The copy of a value, the same one each time; the value itself if it holds no module."""
        memo = self._memo
        if id(value) not in memo:
            memo.setdefault(id(memo), []).append(value)  # while it lives, its id is nobody else's
            if isinstance(value, nn.Module):
                memo[id(value)] = self._copy_module(value)
            else:
                memo[id(value)] = value  # where it holds itself
                memo[id(value)] = self._copy_parts(value)
        return memo[id(value)]

    def _copy_module(self, module: nn.Module) -> nn.Module:
        memo = dict(self._memo)  # a copy that fails leaves no parts of itself in ours
        try:
            copied = deep_copy(module, memo)
        except Exception:
            # Modules may define how they are copied. This one is used itself, and `sparing_others`
            # keeps gradients from its parameters.
            return module
        # `copy.deepcopy` keeps what was copied alive in a list, under the id of the memo that it
        # was given. That one is freed here, and a value may get its id.
        self._memo.setdefault(id(self._memo), []).extend(memo.pop(id(memo), ()))
        self._memo.update(memo)
        return copied

    def _copy_parts(self, value: Any) -> Any:
        """A value that is no module, with copies of the modules in it; itself if it holds none."""
        kind = type(value)
        if kind is types.FunctionType:
            # torch's own functions lead to all of torch, and to no modules of the user's.
            return value if _is_of_torch(value) else self._copy_function(value)
        if kind is types.MethodType:
            owner = self._copy_owner(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if kind in (list, tuple, dict):
            return self._copy_items(value)
        if kind is functools.partial:
            parts = [value.func, value.args, value.keywords]
            function, args, keywords = copied = self._copy_items(parts)
            return value if copied is parts else functools.partial(function, *args, **keywords)
        return self._copy_owner(value) if callable(value) else value

    def _copy_items(self, values: Any) -> Any:
        """A list, tuple or dictionary with copied values; itself if no value had to be copied."""
        if len(values) > _MOST_SEARCHED_ITEMS:
            return values
        items = values.values() if isinstance(values, dict) else values
        copied = [self.copy(item) for item in items]
        if all(item is value for item, value in zip(copied, items, strict=True)):
            return values
        kind = type(values)
        return kind(zip(values, copied, strict=True)) if kind is dict else kind(copied)

    def _copy_owner(self, owner: Any) -> Any:
        """The object of a method, or one that is called: with copies in its attributes."""
        if isinstance(owner, nn.Module):
            return self.copy(owner)
        if isinstance(owner, type | types.ModuleType) or not hasattr(owner, "__dict__"):
            return owner
        attributes = self._copy_items(vars(owner))
        if attributes is vars(owner):
            return owner
        try:
            copied = copy.copy(owner)
            vars(copied).update(attributes)
        except Exception:  # as in `_copy_module`
            return owner
        return copied

    def _copy_function(self, function: types.FunctionType) -> types.FunctionType:
        """A function with copies in its closure, defaults and globals; itself if it needs none.

        The copy has globals of its own: what either function assigns to one, only that one sees.
        """
        cells = function.__closure__ or ()
        parts = [
            [_content(cell) for cell in cells],
            function.__defaults__,
            function.__kwdefaults__,
            _globals_of(function),
        ]
        contents, defaults, keyword_defaults, used_globals = copied = self._copy_items(parts)
        if copied is parts:
            return function
        made = types.FunctionType(
            function.__code__,
            {**function.__globals__, **used_globals},
            function.__name__,
            defaults,
            tuple(map(_with_content, cells, contents)),
        )
        made.__kwdefaults__ = keyword_defaults
        vars(made).update(vars(function))
        return made


def _with_content(cell: types.CellType, value: Any) -> types.CellType:
    """A closure's cell with this value: the given cell if it has it, or else a new one."""
    return cell if _content(cell) is value else types.CellType(value)


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """The global values whose names a function uses."""
    known = function.__globals__
    return {name: known[name] for name in _names_in(function.__code__) if name in known}


def _names_in(code: types.CodeType) -> set[str]:
    """The names that a function and those that are defined in it use, attributes among them."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _is_of_torch(function: types.FunctionType) -> bool:
    return function.__module__ is not None and function.__module__.partition(".")[0] == "torch"


# ---- Guards ------------------------------------------------------------------------------------


@contextlib.contextmanager
def shielded(
    original: nn.Module,
    initial_buffers: dict[str, torch.Tensor],
    error: type[Exception],
    what: str,
) -> Iterator[None]:
    """Keep this block from a module's gradients and from its Reducer, and restore its buffers.

    `initial_buffers` are what `copy_buffers` returned for the module before the block. A copy uses
    the original if a function that both call holds one of its parameters or modules, or if a
    `__deepcopy__` shares them.

    Raises:
        error: a backward reaches a parameter of the module, before the gradient is accumulated;
            the message begins with "a copy of `what` uses".
    """
    # A node lives, with its hook, while somebody holds it: DDP's Reducer, or for a parameter that
    # the Reducer does not have, this list.
    nodes = []
    hooks = []
    for name, parameter in original.named_parameters():
        if parameter.requires_grad:
            node = _torch.accumulate_node(parameter)
            nodes.append(node)
            refuse = functools.partial(_refuse_gradient, name, error, what)
            hooks.append(node.register_prehook(refuse))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        restore_buffers(original, initial_buffers)


def copy_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a module's buffers, by name."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def restore_buffers(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Give a module's buffers back the values that they had `before`, without other writes.

    Those that are new or of another shape stay: the module's own code, its forward, made them.
    """
    for name in written_buffers(module, before):
        buffer = module.get_buffer(name)
        if name in before and buffer.shape == before[name].shape:
            buffer.detach().copy_(before[name])


def _refuse_gradient(name: str, error: type[Exception], what: str, *_gradients: object) -> None:
    raise error(use_of_original(name, what))


def use_of_original(name: str, what: str) -> str:
    """What is wrong where a copy of `what` used a parameter or buffer of the original."""
    return (
        f"a copy of {what} uses the original's {name}: a function holds it, or a module that it is "
        "in (a lambda, a decorated forward), or a __deepcopy__ shares it; have the function take "
        "the module as an argument, or copy it"
    )


@contextlib.contextmanager
def sparing_others(loss: torch.Tensor, own: Set[torch.Tensor]) -> Iterator[None]:
    """Keep a backward of `loss` from all leaves that are not among `own`, and from their hooks.

    Other leaves are parameters of a loss, or of a module beside DDP that the forward calls. Leaves
    that only a reentrant checkpoint reaches are not seen: its graph is made in backward.
    """
    hooks = []
    # Dictionaries of hooks on leaves, each with its content before this block.
    emptied: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for node in _torch.accumulate_nodes(loss):
        if node.variable not in own:
            hooks.append(node.register_prehook(_drop_gradient))
            # The node's pre-hook runs after a tensor's hooks, and AccumulateGrad's post-hooks run
            # without a gradient too.
            for leaf_hooks in _torch.gradient_hooks(node.variable):
                emptied.append((leaf_hooks, dict(leaf_hooks)))
                leaf_hooks.clear()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for leaf_hooks, before in emptied:
            leaf_hooks.update(before)


def _drop_gradient(_gradients: object) -> tuple[None]:
    return (None,)  # with which AccumulateGrad does nothing


def written_buffers(module: nn.Module, before: dict[str, torch.Tensor]) -> list[str]:
    """The buffers of a module that are new, or not bit for bit what they were `before`."""
    written = []
    for name, buffer in module.named_buffers():
        # Not by their versions, which batch norm's writes leave as they are.
        if name not in before or not _are_same(buffer, before[name]):
            written.append(name)
    return written


def _are_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of one kind and have the same bits."""
    kind = tensor.shape, tensor.dtype, tensor.device
    is_of_kind = kind == (other.shape, other.dtype, other.device)
    return is_of_kind and torch.equal(_bits(tensor), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: a NaN is equal to itself in them."""
    return tensor.detach().to_dense().contiguous().flatten().view(torch.uint8)
