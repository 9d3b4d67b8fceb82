"""Ranks that end as scripts do, while an algorithm communicates, and their exit codes.

    python -m tests.support.ends 50 DDP,Decentralized,AsyncModelAverage step,forward,exception

Each pair of ranks is forked from a process that has imported torch, and its interpreter ends as
that of a script does. Rank 1 is late, so that rank 0 ends while it waits for rank 1.
"""
# test: skip, minutes; tests/algorithms/test_background.py runs some

from __future__ import annotations

import collections
import datetime
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import Decentralized, attach, background
from tests.support.algorithms import ALGORITHMS, optimizer_for

LATE_S = 0.3
NO_ALGORITHM = "DDP"
# How a script ends, with its exit code.
ENDINGS = {"step": 0, "forward": 0, "exception": 1, "backward": 1, "destroyed": 0, "alone": 1}


class _UsersError(Exception):
    pass


def _raise(*_ignored: object) -> None:
    raise _UsersError


def _train_and_end(earlier: Sequence[int], store: str, name: str, ending: str) -> None:
    """Train and end, as the rank behind those of the `earlier` processes."""
    rank = len(earlier)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004)
    algorithm = ALGORITHMS.get(name)
    of_qadam = {"warmup_steps": 1} if name == "QAdam" else {}
    optimizer = optimizer_for(algorithm, ddp.parameters(), **of_qadam)
    handle: Any = attach(ddp, optimizer, algorithm) if algorithm else None
    x = torch.ones(4, 64)
    for _ in range(4):
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    dist.barrier()  # else a rank may have gone before the other one's last step
    if ending == "step":
        return
    if rank == 1 and name != NO_ALGORITHM:
        time.sleep(LATE_S)
    if ending == "alone":
        if rank == 1:
            select.select([os.pidfd_open(earlier[0])], [], [])  # it hangs until rank 0 is over
            os._exit(1)  # it was killed
        background.EXIT_S = 1.0
    if ending == "backward":
        model[0].weight.register_hook(_raise)
    loss = ddp(x).square().mean()
    if rank == 1 and isinstance(algorithm, Decentralized) and ending != "backward":
        handle.settle()  # rank 0 has not gone before it has done its part
    if ending == "backward":
        loss.backward()
    if ending in ("exception", "alone"):
        raise _UsersError
    if ending == "destroyed":
        dist.destroy_process_group()


def exit_codes(name: str, ending: str, num_runs: int) -> collections.Counter[int]:
    """How often ranks ended with which code."""
    codes: collections.Counter[int] = collections.Counter()
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory() as folder:
            processes: list[int] = []
            for _ in range(2):
                process = os.fork()
                if not process:
                    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the tracebacks
                    _train_and_end(processes, f"{folder}/store", name, ending)
                    sys.exit()
                processes.append(process)
            codes.update(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in processes)
    return codes


def _import_all() -> None:
    """Import what training would, once and not in each process: Dynamo, for an optimizer's step."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()


def main() -> None:
    torch.set_num_threads(1)
    _import_all()
    num_runs, names, endings = sys.argv[1:]
    for name in names.split(","):
        for ending in endings.split(","):
            codes = exit_codes(name, ending, int(num_runs))
            print(json.dumps([name, ending, codes]), flush=True)


if __name__ == "__main__":
    main()
