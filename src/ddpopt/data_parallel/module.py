"""`DataParallel`: one module on several devices of one process, its replicas compiled once.

`scatter.py` divides and joins, `replicas.py` copies the module, and `calls.py` knows when replicas
may run concurrently.
"""

from __future__ import annotations

import contextvars
import itertools
import types
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.data_parallel.calls import signature_of, state_of
from ddpopt.data_parallel.replicas import Hooks, replicate
from ddpopt.data_parallel.scatter import Share, gather, scatter
from ddpopt.data_parallel.thread_modes import Modes, on, stream_of

_numbers = itertools.count()


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
            TypeError: An argument, or one for `torch.compile`, has the wrong type.
            ValueError: There is no device, or an unknown one; the module or a part of it is already
                compiled or parallel; CUDA graphs are requested on several devices.
        """
        super().__init__()
        _check_module(module)
        if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence):
            raise TypeError(f"devices is {devices!r}; give a list, as ['cuda:0', 'cuda:1']")
        if not devices:
            raise ValueError("devices is empty; name at least one, as ['cuda:0', 'cuda:1']")
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"dim is {dim!r}; give the number of the batch's dimension")
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
        self._begin()

    def _begin(self) -> None:
        self._compiled = torch.compile(_call_of_its_own(self.module), **self.compile_options)
        self._last_calls: Hashable = None
        self._hooks = Hooks()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["_compiled"], state["_last_calls"], state["_hooks"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on the batch, divided along `dim`, and join what the replicas return.

        Raises:
            ValueError: Batch sizes differ or are zero, outputs cannot be joined, or the module is
                not on the first device or has been compiled meanwhile.
            Exception: What a replica raised; a note names the replica and its device.
        """
        _check_module(self.module)
        _check_placement(self.module, self.devices[0])
        shares = scatter(args, kwargs, self.devices, self.dim)
        if len(self.devices) == 1:
            with on(self.devices[0], stream_of(self.devices[0])):
                return self._compiled(self.module, *shares[0])
        return gather(self._run(shares), self.output_device, self.dim)

    def _run(self, shares: Sequence[Share]) -> list[Any]:
        """Run the replicas, one after another if the call is new; see [Note: new calls]."""
        used = self.devices[: len(shares)]
        modes = Modes.current(used)
        calls = (state_of(self.module), modes, used, tuple(map(signature_of, shares)))
        modules = replicate(self.module, used, self._hooks)
        pairs = zip(modules, shares, strict=True)
        jobs = [self._job(index, modes, *pair) for index, pair in enumerate(pairs)]
        if calls == self._last_calls:
            with _torch.uncompiled_while_tracing():
                return _run_all(jobs, in_turn=False)
        self._last_calls = None
        with _torch.compiling_replicas(len(set(self.devices))):
            outputs = _run_all(jobs, in_turn=True)
        self._last_calls = calls
        return outputs

    def _job(self, index: int, modes: Modes, module: nn.Module, share: Share) -> Callable[[], Any]:
        device = self.devices[index]
        stream = stream_of(device)

        def run() -> Any:
            try:
                with modes.applied(), on(device, stream):
                    return self._compiled(module, *share)
            except Exception as error:
                _add_note(error, f"in replica {index} on {device}")
                raise

        return run


def _run_all(jobs: Sequence[Callable[[], Any]], *, in_turn: bool) -> list[Any]:
    """Run the first job in this thread, the others in threads that end with this call.

    Jobs that run in turn get threads too: graphs are guarded on modes that belong to a thread.
    """
    first, *others = jobs
    with ThreadPoolExecutor(1 if in_turn else max(1, len(others)), "ddpopt-replica") as pool:

        def start(job: Callable[[], Any]) -> Future[Any]:
            # The settings of Dynamo and Inductor are context variables.
            return pool.submit(contextvars.copy_context().run, job)

        if in_turn:
            return [first(), *(start(job).result() for job in others)]
        futures = [start(job) for job in others]
        return [first(), *(future.result() for future in futures)]


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


def _call_of_its_own(module: nn.Module) -> Callable[..., Any]:
    """Return a function whose code belongs to this DataParallel alone.

    Dynamo counts compiles per code object, and learns by its name which sizes change.
    """
    name = f"call_{type(module).__name__}_{next(_numbers)}"
    return types.FunctionType(_call.__code__.replace(co_name=name), globals(), name)


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
    parameters = [("parameter", *found) for found in module.named_parameters()]
    buffers = [("buffer", *found) for found in module.named_buffers()]
    for kind, name, tensor in (*parameters, *buffers):
        if tensor.device != device:
            raise ValueError(
                f"{kind} {name!r} is on {tensor.device}, and replicas are made from {device}, the "
                f"first of the devices; call .to({str(device)!r}) first"
            )


def _find_device(device: torch.device | str | int) -> torch.device:
    """Return a device under the name that its tensors give it."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"device {device!r} is not available here ({str(error).splitlines()[0]}); "
            f"there are 'cpu' and {torch.accelerator.device_count()} accelerators"
        ) from error


def _refuse_cuda_graphs(devices: Sequence[torch.device], options: dict[str, Any]) -> None:
    is_inductor = options.get("backend", "inductor") == "inductor"
    if len(devices) == 1 or not is_inductor or all(device.type == "cpu" for device in devices):
        return
    if _torch.has_cuda_graphs(_torch.inductor(options.get("mode"), options.get("options") or {})):
        raise ValueError(
            "CUDA graphs are kept by each thread, and replicas run in threads that end with the "
            "forward; use a mode without them, such as 'max-autotune-no-cudagraphs'"
        )


def _add_note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}",)
