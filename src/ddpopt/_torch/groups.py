"""Process groups: their names, timeouts, counters, and the stores by which ranks meet."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ddpopt._torch import names


def naming_groups(name: str) -> contextlib.AbstractContextManager[None]:
    """Give process groups that are made in a block this name.

    torch names a group that only its members make by the number of groups that the rank is in.
    That differs between ranks, which then wait for each other until their timeout; and it comes
    again when groups are destroyed: then ranks look for connections that are gone.
    """
    return names.GROUP_NAME.replaced_by(lambda *_args, **_kwargs: name)


def group_timeout(group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    """Return the time after which a collective on `group` fails, a `datetime.timedelta`."""
    return names.GROUP_TIMEOUT.of(names.GROUP_BACKEND.of(group)(device).options)


def num_collectives(group: torch.distributed.ProcessGroup) -> int:
    """Return how many collectives `group` has launched, which is the same on all ranks.

    Raises:
        RuntimeError: its backend does not count them.
    """
    return int(names.SEQUENCE_NUMBER.of(group)())


def store_of(group: torch.distributed.ProcessGroup) -> Any:
    """Return the store by which the ranks of a group found each other."""
    return names.GROUP_STORE.get()(group)


def place_of_store(store: Any) -> tuple[str, int] | None:
    """Return the host and port at which a store is reached, None if not by the network."""
    while isinstance(store, names.PREFIX_STORE.get()):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, names.TCP_STORE.get()) else None
