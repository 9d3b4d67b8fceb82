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

    torch names a group that only its members make by the number of groups that the rank is in.
    That differs between ranks, which then wait for each other until their timeout; and it recurs
    when groups are destroyed: then ranks look for connections that are gone. And if
    `init_process_group` was given a device, NCCL splits a group off the default one, for which all
    of its ranks have to call; without the device it makes a group by itself, when it is first used.
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

    So it is with a group that somebody else made, as torchft's is.
    """
    find = names.GROUP_STORE.get()
    try:
        return find(group)
    except (KeyError, ValueError):  # it is not in torch's table of groups
        return None
