"""What each rank of a launched command found, sent to rank 0, which speaks for all of them.

Ranks meet in the launcher's store alone: no process group is formed, whose network is often what is
wrong. Each rank but rank 0 writes one value, and ends; rank 0 reads them one by one, and names
those that have written none in time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ddpopt.cli.inputs import VARIABLES
from ddpopt.cli.output import InputError

WAIT_S = 300.0  # a cold file system takes minutes to import torch on some nodes
# How much longer than its time limit a call of a store may take: one whose process is stopped never
# confirms a timeout, see ranks/store.py.
_GRACE_S = 5.0


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
        if not text.isdecimal():
            raise InputError(f"{name} is {text!r}, which is no number; start by torchrun")
        numbers[name] = int(text)
    rank, num_ranks, port = numbers.values()
    if num_ranks == 1:
        return None
    return Launch(rank, num_ranks, os.environ["MASTER_ADDR"], port)


def send_to_rank_0(
    launch: Launch, found: Mapping[str, Any], wait_s: float = WAIT_S
) -> dict[int, dict[str, Any]]:
    """On rank 0, what each rank found, without those that were not heard of; nothing on others.

    Args:
        launch: From `find_launch`.
        found: What JSON can hold.
        wait_s: After which ranks, or the store, are given up.

    Raises:
        dist.DistError, TimeoutError: there is no store at the launch's address, or it does not
            answer.
    """
    by_rank = {0: dict(found)} if launch.rank == 0 else {}
    errors: list[Exception] = []

    def run() -> None:
        try:
            _exchange(launch, found, by_rank, wait_s)
        except Exception as error:  # for the caller to see, whatever it is
            errors.append(error)

    thread = threading.Thread(target=run, name="ddpopt launched", daemon=True)
    thread.start()
    thread.join(wait_s + _GRACE_S)
    if errors:
        raise errors[0]
    if thread.is_alive() and len(by_rank) < 2:
        raise TimeoutError(f"the store at {launch.address}:{launch.port} does not answer")
    return dict(by_rank)


def _exchange(
    launch: Launch, found: Mapping[str, Any], by_rank: dict[int, dict[str, Any]], wait_s: float
) -> None:
    deadline_s = time.monotonic() + wait_s
    distributed: Any = dist  # its stores have no types
    store = distributed.TCPStore(
        launch.address,
        launch.port,
        is_master=launch.hosts_store,
        timeout=timedelta(seconds=wait_s),
        wait_for_workers=False,
    )
    # torchrun keeps one store for ranks that it has started again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = [f"ddpopt/launched/{attempt}/{rank}" for rank in range(launch.num_ranks)]
    if launch.rank:
        store.set(keys[launch.rank], json.dumps(found))
        return
    for rank in range(1, launch.num_ranks):
        left_s = deadline_s - time.monotonic()
        try:
            if left_s > 0:
                store.wait([keys[rank]], timedelta(seconds=left_s))
            elif not store.check([keys[rank]]):
                continue
        except dist.DistStoreError:
            continue  # time is up; those after this rank may have written
        by_rank[rank] = json.loads(store.get(keys[rank]))
        # Nobody reads it again, and an agent's store lives as long as the job.
        store.delete_key(keys[rank])
