"""The job scripts of docs/clusters.md start programs that are there, with options that they take.

That training goes on from a checkpoint when a rank is lost is shown by `test_examples.py`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

from tests.support.documents import ROOT, blocks

sys.path.insert(0, str(ROOT / "examples"))

import train_gpt

PAGE = "docs/clusters.md"


def _block(title: str) -> str:
    (text,) = (block.text for block in blocks(PAGE) if block.title == title)
    return text


def _check(command: list[str], num_nodes: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have torchrun and the program read their parts of a command; return what torchrun read."""
    name, *words = command
    assert name == "torchrun"
    read = torchrun.parse_args(words)
    assert read.nnodes == num_nodes
    assert read.rdzv_endpoint.endswith(":29400")
    if read.module:
        name, command = [read.training_script, *read.training_script_args]
        assert name == "ddpopt"
        assert command in ("doctor", "calibrate")
        return read
    assert (ROOT / read.training_script).is_file()
    monkeypatch.setattr(sys, "argv", [read.training_script, *read.training_script_args])
    assert train_gpt.parse_arguments().checkpoint.name == "run.pt"
    assert read.max_restarts == 3
    return read


def _submit(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with programs in place of Slurm's, which print their arguments."""
    for name, line in {
        "scontrol": 'printf "node0\\nnode1\\n"',
        "srun": 'printf "%q " "$@"; echo',
        "venv/bin/activate": "is_active=1",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "7"}
    user = {"PATH": f"{folder}:{os.environ['PATH']}", "USER": "me", "HOME": str(folder)}
    return subprocess.run(
        ["bash", "-euc", _block("train.sbatch") + ': "$is_active"'],
        env={**slurm, "SLURM_JOB_NODELIST": "node[0-1]", **user, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.quick
def test_slurm_starts_torchrun_once_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm starts doctor, calibrate and the training so, in the user's environment."""
    done = _submit(tmp_path, SCRATCH="/scratch")
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert len(commands) == 3
    for command in commands:
        read = _check(command, "2", monkeypatch)
        assert (read.rdzv_endpoint, read.nproc_per_node) == ("node0:29400", "8")


def test_slurms_script_says_what_scratch_is_where_a_cluster_has_none(tmp_path: Path) -> None:
    """A checkpoint that other nodes do not see would be lost with its node."""
    done = _submit(tmp_path)
    assert done.returncode != 0
    assert "SCRATCH: is not set: set it to a folder that all nodes see" in done.stderr
    assert not done.stdout


def test_nodes_that_come_and_go_are_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node that is asked for starts torchrun, with the same command."""
    (command,) = (c for b in blocks(PAGE) if b.language == "console" for c in b.commands)
    assert _check(shlex.split(command), "2", monkeypatch).rdzv_backend == "c10d"


def test_kubernetes_starts_torchrun_in_each_pod_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job has as many pods as nodes; the first is where the others look for it."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra docs")
    service, job = yaml.safe_load_all(_block("train.yaml"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    read = _check([*container["command"], *container["args"]], "2", monkeypatch)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(read.nnodes)
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert read.rdzv_endpoint == f"{first}:29400"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
