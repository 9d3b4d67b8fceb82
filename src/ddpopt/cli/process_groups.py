"""The process groups that commands run in: one of this process alone, or torchrun's."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddpopt.cli.output import InputError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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

    `backend` None means nccl if there are GPUs, and gloo otherwise. `command` is the one to start.

    Raises:
        InputError: torchrun did not start this process, or torch was built without the backend.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
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
    local_rank, num_gpus = os.environ.get("LOCAL_RANK", "0"), torch.cuda.device_count()
    if not local_rank.isdecimal():
        raise InputError(f"LOCAL_RANK is {local_rank!r}, which is no number; start by torchrun")
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
    except BaseException:  # its traceback may keep DDP modules alive longer
        _outlived.append(dist.group.WORLD)
        raise
    finally:
        gc.collect()
        dist.destroy_process_group()
