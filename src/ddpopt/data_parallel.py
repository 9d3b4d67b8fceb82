"""`DataParallel`: one module on several devices of one process, its replicas compiled once.

[Note: new calls]

    model(x)    8 rows    new: replicas run one after another, and compile
    model(x)    8 rows    like the previous call: they run concurrently
    model(y)    6 rows    new
    model(x)    8 rows    like an earlier call only: one after another, though all is compiled

Compiling is not safe while replicas run (Dynamo and FX keep state that all threads share), so
replicas run concurrently only if no compile is to be expected. What graphs are guarded on is
approximated, too finely rather than too coarsely: shapes and types of arguments, plain values
in them and in the attributes of the module's parts, and the modes of torch. A call that differs in
one of these from the previous one costs one forward without concurrency. So does a call like an
earlier one, if another kind of call came in between: Dynamo moves the graph that it finds to the
front of its list, and a thread that searches the list meanwhile may miss its own graph, and
compile. Not seen are globals, closures, and the contents of objects of other classes.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import enum
import itertools
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch, _traced
from ddpopt._text import quote

Hook = Callable[..., Any]
Share = tuple[tuple[Any, ...], dict[str, Any]]  # what one replica is called with

# If equal in all replicas, these are returned as they are.
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)

_function_numbers = itertools.count()


class DataParallel(nn.Module):
    """Like `torch.nn.DataParallel`, but with compiled replicas, on any list of devices.

    Each forward divides the batch, copies the module to the other devices, runs the copies
    concurrently, and joins their outputs. Backward sums the gradients of all replicas on the first
    device. The `grad` of parameters that no replica uses stays None. With one device, the module
    itself is called, compiled.

    Attributes:
        module: The original module, whose parameters are trained.
        devices: The devices; the first one holds the module.
        output_device: Where outputs are joined.
        dim: The batch dimension of arguments and outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | str | int],
        output_device: torch.device | str | int | None = None,
        dim: int = 0,
        **compile_options: Any,
    ) -> None:
        """Wrap a module that is on the first device, or will be before it is called.

        Args:
            module: The module to replicate, not compiled.
            devices: Names (`"cuda:0"`), indices of accelerators, or devices; one may appear twice.
            output_device: Where outputs are joined; by default the first device.
            dim: The dimension along which arguments are divided and outputs are joined.
            **compile_options: Keyword arguments of `torch.compile`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: There is no device, or an unknown one, or a single one that is not
                `output_device`; the module or a part of it is already compiled, scripted or
                parallel; CUDA graphs are requested on several devices.
            Exception: What `torch.compile` raises of its keyword arguments.
        """
        super().__init__()
        _check_module(module)
        if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence):
            raise TypeError(f"devices is {quote(devices)}; give a list, as ['cuda:0', 'cuda:1']")
        if not devices:
            raise ValueError("devices is empty; name at least one, as ['cuda:0', 'cuda:1']")
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"dim is {quote(dim)}; give the number of the batch's dimension")
        self.module = module
        self.devices = tuple(_find_device(device) for device in devices)
        first = self.devices[0]
        self.output_device = first if output_device is None else _find_device(output_device)
        if len(self.devices) == 1 and self.output_device != first:
            raise ValueError(
                f"output_device is {self.output_device} and the only device {first}, where the "
                "module itself is called; leave output_device out"
            )
        self.dim = dim
        self.compile_options = compile_options
        _refuse_cuda_graphs(self.devices, compile_options)
        self._prepare_to_compile()

    def _prepare_to_compile(self) -> None:
        _torch.hide_from_dynamo()
        self._compiled = torch.compile(_call_of_its_own(self.module), **self.compile_options)
        self._previous_kind_of_call: Hashable = None
        self._hooks = _Hooks()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["_compiled"], state["_previous_kind_of_call"], state["_hooks"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare_to_compile()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on the batch, divided along `dim`, and join what the replicas return.

        Raises:
            ValueError: Batch sizes differ or are zero, outputs cannot be joined, or the module is
                not on the first device or has been compiled meanwhile.
            TypeError: An output is of a kind that cannot be joined.
            Exception: What a replica raised; a note names the replica, if there are several.
        """
        _check_module(self.module)
        _check_placement(self.module, self.devices[0])
        shares = _scatter(args, kwargs, self.devices, self.dim)
        if len(self.devices) == 1:
            with _current(self.devices[0], _stream_of(self.devices[0])):
                return self._compiled(self.module, *shares[0])
        return _join(self._run(shares), self.output_device, self.dim)

    def _run(self, shares: Sequence[Share]) -> list[Any]:
        """Run the replicas, one after another if the call is new; see [Note: new calls]."""
        devices = self.devices[: len(shares)]  # a small batch has fewer shares than devices
        modes = _Modes.current(devices)
        signatures = tuple(map(_signature_of, shares))
        kind_of_call = (_state_of(self.module), modes, devices, signatures)
        replicas = _replicate(self.module, devices, self._hooks)
        jobs = []
        for index, (replica, share) in enumerate(zip(replicas, shares, strict=True)):
            jobs.append(self._job(index, modes, replica, share))
        if kind_of_call == self._previous_kind_of_call:
            # All threads share FX's flag that it traces: where one replica traces all the
            # same, compiled functions would raise in the others.
            with _torch.uncompiled_while_tracing():
                return _run_all(jobs, one_by_one=False)
        self._previous_kind_of_call = None  # after an error the next call is new
        # With settings under which each device has its own number of compiles, backward is compiled
        # at once, not by autograd's concurrent threads, and hooks are guarded on.
        with _torch.compiling_replicas(len(set(self.devices))):
            outputs = _run_all(jobs, one_by_one=True)
        self._previous_kind_of_call = kind_of_call
        return outputs

    def _job(
        self, index: int, modes: _Modes, replica: nn.Module, share: Share
    ) -> Callable[[], Any]:
        """A function that calls one replica, in whichever thread, as this thread would."""
        device = self.devices[index]
        stream = _stream_of(device)

        def run() -> Any:
            try:
                with modes.applied(), _current(device, stream):
                    return self._compiled(replica, *share)
            except Exception as error:
                # The user's forward may raise anything. The error is raised on, with the device
                # added.
                _logs.add_note(error, f"in replica {index} on {device}")
                raise

        return run


def _run_all(jobs: Sequence[Callable[[], Any]], *, one_by_one: bool) -> list[Any]:
    """The jobs' results. The first runs in this thread, the others in threads that end with this.

    Jobs that run one by one get threads too: graphs are guarded on modes that belong to a thread.
    """
    first, *others = jobs
    with ThreadPoolExecutor(1 if one_by_one else max(1, len(others)), "ddpopt-replica") as pool:

        def start(job: Callable[[], Any]) -> Future[Any]:
            # The settings of Dynamo and Inductor are context variables.
            return pool.submit(contextvars.copy_context().run, job)

        if one_by_one:
            return [first(), *(start(job).result() for job in others)]
        futures = [start(job) for job in others]
        return [first(), *(future.result() for future in futures)]


def _call_of_its_own(module: nn.Module) -> Callable[..., Any]:
    """A function as `_traced.call`, whose code object belongs to this DataParallel alone.

    Dynamo counts compiles per code object, and learns by its name which sizes change. The code is
    still that of the file `_traced.py`, into which Dynamo may look.
    """
    name = f"call_{type(module).__name__}_{next(_function_numbers)}"
    # `_traced.call` uses no globals, so these may be any.
    return types.FunctionType(_traced.call.__code__.replace(co_name=name), globals(), name)


def _check_module(module: nn.Module) -> None:
    """Refuse a module whose replicas would not run as replicas."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; give an nn.Module")
    for name, part in module.named_modules():
        which = f"module {name!r}" if name else "the module"
        kind = type(part).__name__
        if _torch.is_compiled_module(part):
            raise ValueError(
                f"{which} ({kind}) is compiled already, and its replicas would all run the "
                "original's parameters; give the uncompiled module: DataParallel compiles it"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"{which} ({kind}) is a ScriptModule, which torch.compile leaves as it is; give "
                "the module that it was scripted from"
            )
        if isinstance(part, DistributedDataParallel | nn.DataParallel | DataParallel):
            raise ValueError(f"{which} ({kind}) is parallel already; give the module that it wraps")


def _check_placement(module: nn.Module, device: torch.device) -> None:
    """Raise ValueError unless all parameters and buffers are on the device."""
    parameters = [("parameter", *found) for found in module.named_parameters()]
    buffers = [("buffer", *found) for found in module.named_buffers()]
    for kind, name, tensor in (*parameters, *buffers):
        if tensor.device != device:
            raise ValueError(
                f"{kind} {name!r} is on {tensor.device}, and replicas are made from {device}, the "
                f"first of the devices; call .to({str(device)!r}) first"
            )


def _find_device(device: torch.device | str | int) -> torch.device:
    """A device under the name that its tensors give it."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"device {quote(device)} is not available here ({str(error).splitlines()[0]}); "
            f"there are 'cpu' and {torch.accelerator.device_count()} accelerators"
        ) from error


def _refuse_cuda_graphs(devices: Sequence[torch.device], options: dict[str, Any]) -> None:
    """Raise ValueError if `torch.compile` with these arguments would use CUDA graphs in threads."""
    is_inductor = options.get("backend", "inductor") == "inductor"
    if len(devices) == 1 or not is_inductor or all(device.type == "cpu" for device in devices):
        return
    if _torch.has_cuda_graphs(_torch.inductor(options.get("mode"), options.get("options") or {})):
        raise ValueError(
            "CUDA graphs are kept by each thread, and replicas run in threads that end with the "
            "forward; use a mode without them, such as 'max-autotune-no-cudagraphs'"
        )


# ---- Batches and outputs ------------------------------------------------------------------------
# Both are differentiable. Tuples, lists, dicts, named tuples and dataclasses are containers whose
# tensors are divided and joined; everything else is a leaf.


def _scatter(
    args: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], dim: int
) -> list[Share]:
    """The shares of the first devices, as many as there are chunks.

    Tensors are divided along `dim` as by `torch.chunk`. 0-dimensional tensors go to each device;
    other objects are shared by reference. If there is no tensor to divide, there is one share.

    Raises:
        ValueError: a tensor has no rows, lacks `dim`, or does not have as many rows as the first.
    """
    num_rows = _count_rows([*_tensors(args, "args"), *_tensors(kwargs, "kwargs")], dim)
    chunk_size = -(-num_rows // len(devices))
    used = devices[: -(-num_rows // chunk_size)]
    return _divide((args, kwargs), used, chunk_size, dim)


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`; a copy to the CPU is complete when this returns."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def _count_rows(named: Sequence[tuple[str, torch.Tensor]], dim: int) -> int:
    """Return how many rows there are to divide; 1 if no tensor has rows."""
    first_name, num_rows = "", 1
    for name, tensor in named:
        if not tensor.dim():
            continue
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, so it cannot be divided along dim {dim}; "
                "choose another dim for DataParallel, or give this argument that dimension"
            )
        if not first_name:
            first_name, num_rows = name, tensor.size(dim)
        if tensor.size(dim) != num_rows:
            raise ValueError(
                f"along dim {dim} {first_name} has {num_rows} rows and {name} has "
                f"{tensor.size(dim)}; give both the batch as that dimension (expand what all rows "
                "share), or make it a buffer of the module"
            )
    if not num_rows:
        raise ValueError(
            f"{first_name} has no rows along dim {dim}, so there is nothing to divide; leave "
            "empty batches out"
        )
    return num_rows


def _divide(value: Any, devices: Sequence[torch.device], chunk_size: int, dim: int) -> list[Any]:
    """The share of each device in a value: `value` with its tensors' chunks in place of them."""
    if isinstance(value, torch.Tensor):
        chunks = torch.split(value, chunk_size, dim) if value.dim() else [value] * len(devices)
        return [_move(chunk, device) for chunk, device in zip(chunks, devices, strict=True)]
    children = _children(value)
    if not children:  # an object that is no container, or an empty one
        return [value] * len(devices)
    # By child, then by device; each device's container has its share of every child.
    divided = [_divide(child, devices, chunk_size, dim) for child in children.values()]
    return [_rebuild(value, share) for share in zip(*divided, strict=True)]


def _join(outputs: Sequence[Any], device: torch.device, dim: int, name: str = "output") -> Any:
    """Return one output with the structure of the replicas', its tensors joined on `device`.

    Tensors are concatenated along `dim`; 0-dimensional ones become a vector. None and
    values of `_PLAIN` (numbers, strings, dtypes) are returned if all replicas return the same.

    Raises:
        ValueError: the replicas' outputs differ in structure, or their tensors cannot be joined.
        TypeError: an output is neither a tensor, a container, None nor of `_PLAIN`.
    """
    first = outputs[0]
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return _concatenate([_move(output, device) for output in outputs], dim, name)
    if any(type(output) is not type(first) for output in outputs):
        raise _differ(outputs, name)
    if first is None or isinstance(first, _PLAIN):
        if any(_without_nan(output) != _without_nan(first) for output in outputs):
            raise _differ(outputs, name)
        return first
    # One type of output has children in all replicas, or in none.
    children_of_replicas = [c for c in map(_children, outputs) if c is not None]
    if not children_of_replicas:
        raise TypeError(
            f"{name} of the module is a {type(first).__name__}, which cannot be joined; return "
            "tensors, None, or tuples, lists, dicts and dataclasses of them"
        )
    selectors = children_of_replicas[0].keys()
    if any(children.keys() != selectors for children in children_of_replicas):
        raise _differ(outputs, name)
    joined = []
    for selector in selectors:
        parts = [children[selector] for children in children_of_replicas]
        joined.append(_join(parts, device, dim, name + selector))
    return _rebuild(first, joined)


def _concatenate(tensors: list[torch.Tensor], dim: int, name: str) -> torch.Tensor:
    """Tensors along `dim`, or 0-dimensional ones as a vector; the error has `name` for them."""
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    try:
        return torch.cat(tensors, dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"{name} has shapes {shapes} in the replicas, which cannot be concatenated along "
            f"dim {dim}; return tensors that have the batch there"
        ) from error


def _differ(outputs: Sequence[Any], name: str) -> ValueError:
    texts = [type(o).__name__ if isinstance(o, torch.Tensor) else repr(o) for o in outputs]
    return ValueError(
        f"{name} differs between replicas ({'; '.join(text[:60] for text in texts)}); return the "
        "same structure from each"
    )


def _children(value: Any) -> dict[str, Any] | None:
    """Return what a container holds, by the text that selects it: `[0]`, `['mask']`, `.mask`.

    None for a leaf. Fields that a dataclass fills in itself are left out.
    """
    if isinstance(value, dict):
        return {f"[{key!r}]": child for key, child in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{i}]": child for i, child in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{field.name}": getattr(value, field.name) for field in _own_fields(value)}
    return None


def _rebuild(value: Any, new: Sequence[Any]) -> Any:
    """A container like `value` with other children, in the order of `_children`."""
    if isinstance(value, dict):
        pairs = dict(zip(value, new, strict=True))
        if not isinstance(value, collections.defaultdict):
            return type(value)(pairs)
        copied = copy.copy(value)  # with its factory, which its class takes before the pairs
        copied.update(pairs)
        return copied
    if not isinstance(value, list | tuple):
        names = [field.name for field in _own_fields(value)]
        return dataclasses.replace(value, **dict(zip(names, new, strict=True)))
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in `value`, each with the expression that leads to it from `name`."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    for selector, child in (_children(value) or {}).items():
        yield from _tensors(child, name + selector)


def _without_nan(value: Any) -> Any:
    """The value, or a text in place of a NaN, which would not equal itself."""
    return repr(value) if value != value else value  # noqa: PLR0124  # only NaN differs from itself


def _own_fields(value: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(value) if field.init]


# ---- Replicas -----------------------------------------------------------------------------------


class _Hooks:
    """The forward hooks of a module as its replicas call them: uncompiled.

    If compiled, a hook that appends to a list would be recompiled in each forward, and replicas
    that run concurrently would overwrite each other's entries. torch's own hooks (`spectral_norm`,
    pruning) only compute, and stay in the graph.
    """

    def __init__(self) -> None:
        # Each hook with its caller, by the hook's id.
        self._known: dict[int, tuple[Hook, Hook]] = {}

    def callers(self, module: nn.Module) -> dict[int, Hook]:
        """Return what replicas call in place of each hook, by the hook's id."""
        # A known hook keeps its caller, on which graphs are guarded; hooks that are gone are
        # forgotten. The hook is held so that no other one gets its id.
        self._known = {
            id(hook): self._known.get(id(hook)) or (hook, _uncompiled(hook))
            for hook in _torch.forward_hooks(module)
        }
        return {hook_id: caller for hook_id, (_, caller) in self._known.items()}


def _replicate(
    module: nn.Module, devices: Sequence[torch.device], hooks: _Hooks
) -> list[nn.Module]:
    """A replica for each device, through which gradients flow back to the module.

    The first one has views of the parameters and the module's own buffers, so that what it writes
    in place persists; the others have copies. All else is shared by reference.
    """
    has_grad = torch.is_grad_enabled()
    hook_callers = hooks.callers(module)
    tensors = [*module.parameters(), *module.buffers()]
    # `nn.Parameter`s, inference tensors and, without gradients, views get graphs of their own. The
    # replicas' parameters are none of these, so that all replicas share one graph.
    with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
        copies: list[dict[torch.Tensor, torch.Tensor]] = [
            {p: p.view_as(p) if has_grad else p.detach() for p in module.parameters()},
            *({tensor: tensor.to(d, copy=True) for tensor in tensors} for d in devices[1:]),
        ]
        # A buffer that has no copy is shared.
        return [_torch.replica(module, copied, hook_callers) for copied in copies]


def _uncompiled(hook: Hook) -> Hook:
    """A hook that Dynamo does not compile; a hook of torch's own as it is."""
    if str(getattr(hook, "__module__", "")).startswith("torch."):
        return hook

    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    return call  # Dynamo is kept from all functions of this package, but for those of `_traced.py`


# ---- A thread's modes ---------------------------------------------------------------------------


class _Modes(NamedTuple):
    """Modes of torch that each thread has for itself, so that replicas compute as their caller."""

    has_grad: bool
    is_inference: bool
    has_autocast_cache: bool
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]  # of each type of device; is it on?

    @classmethod
    def current(cls, devices: Sequence[torch.device]) -> _Modes:
        """Return those of this thread that matter on these devices and on the CPU."""
        # The meta device has no autocast.
        device_types = sorted({"cpu", *(device.type for device in devices)} - {"meta"})
        return cls(
            has_grad=torch.is_grad_enabled(),
            is_inference=torch.is_inference_mode_enabled(),
            has_autocast_cache=torch.is_autocast_cache_enabled(),
            autocasts=tuple(
                (name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name))
                for name in device_types
            ),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Have these modes in this thread, in a block."""
        with contextlib.ExitStack() as stack:
            # First, since entering it turns gradients off, and the program may have them on in it.
            if self.is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.has_grad))
            for autocast in self.autocasts:
                stack.enter_context(torch.autocast(*autocast, self.has_autocast_cache))
            yield


def _stream_of(device: torch.device) -> torch.Stream | None:
    """Return this thread's current stream on a device, None if it has no streams."""
    return None if device.index is None else torch.accelerator.current_stream(device)


@contextlib.contextmanager
def _current(device: torch.device, stream: torch.Stream | None) -> Iterator[None]:
    """Make a device and its stream the current ones in this block; None changes nothing."""
    if stream is None:
        yield
        return
    with torch.accelerator.device_index(device.index), stream:
        yield


# ---- Is a call like the previous one? See [Note: new calls]. ------------------------------------


def _signature_of(value: Any) -> Hashable:
    """What Dynamo may guard on in an argument, as a hashable value.

    A call with an equal signature runs graphs that exist; see [Note: new calls]. Objects that are
    no containers count by their types alone.
    """
    if isinstance(value, torch.Tensor):
        layout = value.stride() if value.layout is torch.strided else value.layout
        kind = (type(value), value.dtype, value.device)
        return (*kind, tuple(value.shape), layout, value.requires_grad)
    if isinstance(value, _PLAIN):
        return (type(value), _without_nan(value))
    children = _children(value)
    if children is None:
        return (type(value),)
    signatures = ((selector, _signature_of(child)) for selector, child in children.items())
    return (type(value), *signatures)


def _state_of(module: nn.Module) -> Hashable:
    """What Dynamo may guard on in a module: its parts' attributes, and its kinds of tensors."""
    attributes = tuple(
        _attribute(value) for part in module.modules() for value in vars(part).values()
    )
    tensors = (*module.parameters(), *module.buffers())
    return (attributes, tuple((t.dtype, t.shape, t.requires_grad) for t in tensors))


def _attribute(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return (type(value), _without_nan(value))
    if isinstance(value, dict):  # hooks too: by the ids of their handles
        return tuple(value)
    return (type(value), len(value) if isinstance(value, list | tuple) else None)
