r"""A machine that is lost under torchrun and replaced: training goes on from the checkpoint.

    sudo python -m benchmarks.faults.nodes [--kill cable]

The commands of docs/clusters.md, on three network namespaces in place of machines that share a
folder. Two nodes train; once there is a checkpoint, the second is killed, torchrun and its rank at
once, or loses its cable; then the third starts with the same command. It has gone well if the run
ends with the checkpoint of an undisturbed one, to the bit.
"""
# test: skip, it needs root, and takes two minutes

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cluster import Cluster, open_cluster, why_not_emulated

_ROOT = Path(__file__).parents[2]
_PORT = 29400
_NUM_STEPS, _EVERY, _STRIKE_AT = 120, 8, 16
_TRAIN = (
    f"examples/train_gpt.py --steps {_NUM_STEPS} --checkpoint-every {_EVERY} --layers 2 "
    "--width 128 --heads 2 --context 64 --bucket-cap-mb 0.5 --sample 0 --checkpoint"
).split()
_RATE = "50mbit"  # so that there is time to strike
_LIMIT_S = 300.0
_POLL_S = 0.1


def _node(cluster: Cluster, place: int, job: str, checkpoint: Path) -> subprocess.Popen[str]:
    """Start torchrun as on a machine of its own."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{cluster.address(0)}:{_PORT}"),
        *("--rdzv-id", job, "--max-restarts", "3", "--local-addr", cluster.address(place)),
        # What torchrun would find out by the host's name, which namespaces share.
        *("--rdzv-conf", f"is_host={place == 0}"),
    ]
    own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        [*cluster.command_prefix(place), *command, *_TRAIN, str(checkpoint)],
        cwd=_ROOT,
        env={**os.environ, **cluster.environment(), **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def _ended(nodes: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            _end_all_of(node.pid)
            node.wait()


def _end_all_of(session: int) -> None:
    """Kill a session: torchrun gives each rank a process group of its own."""
    subprocess.run(["pkill", "--signal", "KILL", "--session", str(session)], check=False)


def _num_steps_in(checkpoint: Path) -> int:
    return len(torch.load(checkpoint, weights_only=True)["losses"]) if checkpoint.exists() else 0


def _train(cluster: Cluster, folder: Path, kind: str) -> tuple[Path, list[str]]:
    """Return the last checkpoint of a run, and what its nodes printed."""
    checkpoint = folder / f"{kind or 'undisturbed'}.pt"
    nodes = [_node(cluster, place, kind or "undisturbed", checkpoint) for place in (0, 1)]
    with _ended(nodes):
        if kind:
            deadline_s = time.monotonic() + _LIMIT_S
            while _num_steps_in(checkpoint) < _STRIKE_AT:
                if time.monotonic() > deadline_s:
                    raise SystemExit(f"no checkpoint of step {_STRIKE_AT} in {_LIMIT_S:.0f} s")
                time.sleep(_POLL_S)
            began_s = time.monotonic()
            if kind == "cable":
                cluster.set_link(1, is_up=False)
            else:
                _end_all_of(nodes[1].pid)
            nodes.append(_node(cluster, 2, kind, checkpoint))
        ended = [node for place, node in enumerate(nodes) if not (kind and place == 1)]
        printed = [node.communicate(timeout=_LIMIT_S)[0] for node in ended]
        for node, text in zip(ended, printed, strict=True):
            if node.returncode:
                raise SystemExit(f"a node ended with {node.returncode}:\n{text}")
        if kind:
            print(f"{kind}: the run had ended {time.monotonic() - began_s:.0f} s later")
    return checkpoint, printed


def _is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_is_equal(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(_is_equal, ours, theirs))
    return bool(ours == theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kill", choices=["node", "cable"], default="node", help="what the second node loses")
    kind = parser.parse_args().kill
    if why_not_emulated():
        parser.error(f"this needs an emulated network: {why_not_emulated()}")
    with open_cluster(3) as cluster, tempfile.TemporaryDirectory() as folder:
        cluster.set_rate(_RATE)
        calm, _ = _train(cluster, Path(folder), "")
        disturbed, printed = _train(cluster, Path(folder), kind)
        if "going on after step" not in "".join(printed):
            raise SystemExit("the run did not go on from its checkpoint")
        for line in "".join(printed).splitlines():
            if "going on" in line or "bitwise" in line:
                print(line)
        one, other = (torch.load(path, weights_only=True) for path in (calm, disturbed))
        if not _is_equal(one, other):
            raise SystemExit("the checkpoint at the end is not that of an undisturbed run")
        print(f"{_NUM_STEPS} steps; the last checkpoint is an undisturbed run's, to the bit")


if __name__ == "__main__":
    main()
