"""Process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddpopt._torch import names


@contextlib.contextmanager
def making_groups_apart(name: str) -> Iterator[None]:
    """Let some ranks make a process group of this name in a block, with no part for the others.

    If only its members make a group, torch names it by the number of groups that the rank is in.
    This number differs between ranks, which then wait for each other until their timeout. It also
    comes again when groups are destroyed: then ranks look for connections that are gone. And if
    `init_process_group` was given a device, NCCL splits the group off the default group, whose
    ranks all have to call; without the device NCCL makes the group by itself, at its first use.
    """
    named = names.GROUP_NAME.replaced_by(lambda *_args, **_kwargs: name)
    with named, names.GROUP_DEVICE.replaced_by(None, dist.group.WORLD):
        yield


def group_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return what communicates tensors of a device on a group, such as `gloo`.

    `dist.get_backend` gives the name by which the group was made: `cpu:gloo`, or `undefined`.
    """
    return str(names.GROUP_BACKEND.get(group)(device).name())


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The time after which a collective on `group` fails, a `datetime.timedelta`."""
    return names.GROUP_TIMEOUT.get(names.GROUP_BACKEND.get(group)(device).options)


def store_of(group: dist.ProcessGroup) -> Any:
    """The store through which the ranks of a group found each other; None if torch knows of none.

    torch knows no store of a group that it did not make, such as torchft's.
    """
    find = names.GROUP_STORE.get()
    try:
        return find(group)
    except (KeyError, ValueError):  # it is not in torch's table of groups
        return None
