"""What commands work on: the model of a user's factory, in a group of one process or torchrun's.

A factory is given as `package.module:factory` or `path/to/file.py:factory`. It takes no arguments
and returns a model and the inputs of one step.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import importlib
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import errors
from ddpopt._text import quote, quote_text
from ddpopt.cli.output import InputError
from ddpopt.errors import DDPOptError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MOST_DIGITS = 9
# The folders of torch and of ddpopt.
_NOT_OF_USERS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, errors.__file__))
_FILE_MODULE = "__ddpopt_factory__"  # the name of a module given as a file


class Loaded(NamedTuple):
    """What a factory returned; `inputs` are as for `ddpopt.planning.estimate`."""

    model: nn.Module
    inputs: Any


def find_factory(text: str) -> Callable[[], Loaded]:
    """Import the factory that `text` names; return a function that makes a model and its inputs.

    Raises:
        InputError: there is no such module or function, or importing it raises; the returned
            function raises it if the factory raises or returns something else.
    """
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise InputError(
            f"{quote(text)} names no factory; write package.module:factory or "
            "path/to/file.py:factory"
        )
    value: Any
    with blaming(f"importing {module}"):
        value = _import_file(Path(module)) if module.endswith(".py") else _import_module(module)
    for attribute in name.split("."):
        if not hasattr(value, attribute):
            similar = difflib.get_close_matches(attribute, dir(value), n=3)
            hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
            raise InputError(f"{module} has no {quote(name)}{hint}")
        value = getattr(value, attribute)
    if not callable(value):
        raise InputError(f"{text} is a {type(value).__name__}; a factory is a function")
    return functools.partial(_make, text, value)


def _import_module(name: str) -> types.ModuleType:
    """A module of the current folder, or an installed one; raises what it does, or InputError."""
    if os.getcwd() not in sys.path:  # as `python -m` has it
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that it imports is missing
        raise InputError(
            f"there is no module {quote(error.name)} in the current folder or among the installed "
            "packages; for a file write path/to/file.py:factory"
        ) from error


def _import_file(path: Path) -> types.ModuleType:
    """A file imported as a module; raises what its code does, or InputError without a file."""
    spec = importlib.util.spec_from_file_location(_FILE_MODULE, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"there is no file {path}; the path counts from the current folder")
    sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[_FILE_MODULE] = module  # Dynamo looks a frame's module up there
    spec.loader.exec_module(module)
    return module


def _make(text: str, factory: Callable[[], Any]) -> Loaded:
    """Call the factory that `text` names; raises InputError unless it returned what can train."""
    with blaming(text):
        made = factory()
    is_pair = isinstance(made, tuple | list) and len(made) == 2
    if not is_pair or not isinstance(made[0], nn.Module):
        kinds = [type(item).__name__ for item in made] if is_pair else type(made).__name__
        raise InputError(
            f"{text} returned {kinds}; it must return two things: a torch.nn.Module, and its "
            "inputs as a tensor, a tuple or a dict"
        )
    if isinstance(made[0], DistributedDataParallel):
        raise InputError(
            f"{text} returned a DistributedDataParallel; return the module that is inside"
        )
    trained = [parameter for parameter in made[0].parameters() if parameter.requires_grad]
    if not trained:
        raise InputError(f"no parameter of the model of {text} requires grad; unfreeze one")
    if any(parameter.is_meta for parameter in trained):
        raise InputError(f"the model of {text} is on the meta device; give it memory to be run")
    return Loaded(*made)


@contextlib.contextmanager
def blaming(what: str) -> Iterator[None]:
    """Raise what the user's code raises in this block as InputError, which says where."""
    try:
        yield
    except DDPOptError:
        raise
    except Exception as error:
        # Whatever the user's module, factory or model raises. What is to blame is the last frame
        # that is neither torch's nor ours: both only call the user's code, or are called by it.
        frames = traceback.extract_tb(error.__traceback__)
        of_user = [frame for frame in frames if not frame.filename.startswith(_NOT_OF_USERS)]
        frame = (of_user or frames)[-1]
        text = quote_text(str(error))
        source = f"{frame.filename}:{frame.lineno}"
        raise InputError(f"{what} raised {type(error).__name__}: {text} ({source})") from error


# ---- process groups -----------------------------------------------------------------------------


@contextlib.contextmanager
def one_rank_group() -> Iterator[None]:
    """Make a gloo group of this process alone for this block, unless a group exists."""
    if dist.is_initialized():
        yield
        return
    distributed: Any = dist  # its stores have no types
    dist.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with _leaving():
        yield


@contextlib.contextmanager
def torchrun_group(backend: str | None, command: str) -> Iterator[str]:
    """Join the group of the processes that torchrun started; yield its backend's name.

    At the end of the block the group is destroyed: DDP modules have to be gone, see `_leaving`.
    `backend` None means nccl if there are GPUs, and gloo otherwise. `command` is what the error
    tells to start.

    Raises:
        InputError: torchrun did not start this process, or nccl is not built in or lacks a GPU.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise InputError(
            f"{', '.join(missing)} not set: this measures processes that communicate, so it is "
            f"started by torchrun: torchrun --nproc-per-node 2 -m ddpopt {command}"
        )
    has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    name = backend or ("nccl" if has_nccl else "gloo")
    if name == "nccl" and not has_nccl:
        raise InputError(
            "the backend is 'nccl', which needs a GPU and a build of torch that has it; give "
            "--backend gloo"
        )
    if name == "nccl":
        _use_own_gpu()
    dist.init_process_group(name)
    with _leaving():
        yield name


def _use_own_gpu() -> None:
    """Make the GPU of this process's number on its node the current one; raises InputError."""
    local_rank, num_gpus = os.environ.get("LOCAL_RANK", "0"), torch.cuda.device_count()
    if not local_rank.isdecimal() or len(local_rank) > MOST_DIGITS:
        raise InputError(
            f"LOCAL_RANK is {quote(local_rank)}, which is no number of a process; start by torchrun"
        )
    if int(local_rank) >= num_gpus:
        raise InputError(
            f"LOCAL_RANK is {local_rank}, but this machine has {num_gpus} GPUs, and nccl needs one "
            f"for each process; give torchrun --nproc-per-node {num_gpus}, or --backend gloo"
        )
    torch.cuda.set_device(int(local_rank))


_outlived: list[dist.ProcessGroup | None] = []


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Destroy the group after this block, whose DDP modules have to be in functions that it calls.

    gloo's threads need the GIL to release what was reduced last, and a Reducer that is the last to
    hold its group joins them without releasing the GIL: both would wait forever.
    """
    try:
        yield
    except BaseException as error:
        # Variables of the functions in the error's traceback keep DDP modules alive. If one is left
        # all the same, the list keeps the group, so that no Reducer is the last to hold it.
        traceback.clear_frames(error.__traceback__)
        _outlived.append(dist.group.WORLD)
        raise
    finally:
        gc.collect()
        dist.destroy_process_group()
