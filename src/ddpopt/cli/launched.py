"""What each rank of a launched command found, sent to rank 0, which speaks for all of them.

Ranks meet in the launcher's store alone. No process group is formed: its network is often what is
wrong. Each rank but rank 0 writes one value. Rank 0 reads the values one by one, does without those
that do not come in time, and writes the exit status of all ranks.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ddpopt._text import quote
from ddpopt.cli.inputs import MOST_DIGITS, VARIABLES
from ddpopt.cli.output import InputError

WAIT_S = 300.0  # a cold file system takes minutes to import torch on some nodes
_GRACE_S = 5.0  # how much longer than its time limit a call of a store may take


class Launch(NamedTuple):
    """This process among those that a launcher has started."""

    rank: int
    num_ranks: int
    address: str
    port: int

    @property
    def hosts_store(self) -> bool:
        """Whether this process keeps the store: torchrun's agent does unless it was told not to."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def find_launch() -> Launch | None:
    """Who this process is by the variables that torchrun sets; None for one that runs alone.

    Raises:
        InputError: one of the variables is no number.
    """
    if not all(os.environ.get(name) for name in VARIABLES):
        return None
    numbers: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = os.environ[name]
        if not text.isdecimal() or len(text) > MOST_DIGITS:
            raise InputError(f"{name} is {quote(text)}, which is no number; start by torchrun")
        numbers[name] = int(text)
    rank, num_ranks, port = numbers.values()
    if num_ranks == 1:
        return None
    return Launch(rank, num_ranks, os.environ["MASTER_ADDR"], port)


def settle(
    launch: Launch,
    found: Mapping[str, Any],
    judge: Callable[[dict[int, dict[str, Any]]], int],
    wait_s: float = WAIT_S,
) -> int:
    """The exit status of all ranks, which `judge` makes on rank 0 of what each rank found.

    Ranks that were not heard of in time are not in what `judge` gets. All ranks end alike, since
    an agent of torchrun whose ranks have succeeded waits for minutes for one whose rank has failed.

    Args:
        launch: From `find_launch`.
        found: What JSON can hold.
        judge: Called on rank 0 alone, with what was found, by rank.
        wait_s: After which ranks, or the store, are given up.

    Raises:
        dist.DistError, TimeoutError: there is no store at the launch's address, it does not answer,
            or rank 0 does not.
    """
    statuses: list[int] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            statuses.append(_exchange(launch, found, judge, wait_s))
        except Exception as error:  # for the caller to see, whatever it is
            errors.append(error)

    # In a thread, which is given up if a call does not return: a store whose process is stopped
    # never confirms a timeout, see ranks/store.py. A rank waits up to `wait_s` for the store, and
    # then for twice as long for the status.
    thread = threading.Thread(target=run, name="ddpopt launched", daemon=True)
    thread.start()
    thread.join(3 * wait_s + _GRACE_S)
    if errors:
        raise errors[0]
    if not statuses:
        raise TimeoutError(f"the store at {launch.address}:{launch.port} does not answer")
    return statuses[0]


def _exchange(
    launch: Launch,
    found: Mapping[str, Any],
    judge: Callable[[dict[int, dict[str, Any]]], int],
    wait_s: float,
) -> int:
    """The exit status of all ranks, by way of the store; see `settle`."""
    deadline_s = time.monotonic() + wait_s
    distributed: Any = dist  # its stores have no types
    store = distributed.TCPStore(
        launch.address,
        launch.port,
        is_master=launch.hosts_store,
        timeout=timedelta(seconds=wait_s),
        wait_for_workers=False,
    )
    # torchrun keeps one store for ranks that it has started again: keys of before do not count.
    prefix = f"ddpopt/launched/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    status_key, heard_key = f"{prefix}/status", f"{prefix}/heard"
    if launch.rank:
        store.set(f"{prefix}/{launch.rank}", json.dumps(found))
        # Rank 0 may be as late as it lets others be, and then waits for these.
        store.wait([status_key], timedelta(seconds=2 * wait_s))
        status = int(store.get(status_key))
        store.add(heard_key, 1)
        return status

    by_rank = {0: dict(found)}
    for rank in range(1, launch.num_ranks):
        key = f"{prefix}/{rank}"
        left_s = deadline_s - time.monotonic()
        try:
            if left_s > 0:
                store.wait([key], timedelta(seconds=left_s))
            elif not store.check([key]):
                continue
        except dist.DistStoreError:
            continue  # time is up; those after this rank may have written
        by_rank[rank] = json.loads(store.get(key))
    status = judge(by_rank)
    store.set(status_key, str(status))
    # The store may be this process's, and end with it: first the others read the status, those
    # that were heard of.
    leave_s = time.monotonic() + _GRACE_S
    while store.add(heard_key, 0) < len(by_rank) - 1 and time.monotonic() < leave_s:
        time.sleep(0.05)
    return status
