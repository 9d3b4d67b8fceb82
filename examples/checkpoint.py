"""A checkpoint of a DDP run: written whole or not at all, and enough to go on bitwise.

Used by train_gpt.py. Rank 0 writes for all: with DDP every rank has its weights. What differs
between ranks, which is what their random generators draw and their losses, it asks them for.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MAX_BYTES = 16 * 1024**3  # a GPT that this example could train on CPUs has far less


class Checkpoint:
    """What is saved at `path`: the state of `parts`, and of two random generators a rank."""

    def __init__(self, path: Path, parts: dict[str, Any], generator: torch.Generator):
        self.path, self.parts, self.generator = path, parts, generator

    def save(self, step: int, losses: Tensor) -> None:
        """Save that `step` steps are done, with each step's mean loss. Collective."""
        draws = torch.stack([torch.get_rng_state(), self.generator.get_state()])
        everybodys = gather(draws)
        if dist.get_rank() == 0:
            parts = {name: part.state_dict() for name, part in self.parts.items()}
            state = {"step": step, "losses": losses, "generators": everybodys, "parts": parts}
            write_whole(state, self.path)

    def load(self) -> tuple[int, Tensor]:
        """Restore what was saved, if anything was; return the steps done and their losses.

        The path has to lead all ranks to one file: several machines need a file system in common.
        """
        state = {"step": 0, "losses": torch.empty(0)}
        if self.path.exists():
            if self.path.stat().st_size > MAX_BYTES:
                sys.exit(f"{self.path} is larger than {MAX_BYTES} bytes: no checkpoint of this run")
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        steps = gather(torch.tensor(state["step"]))
        if len(steps.unique()) > 1:
            sys.exit(f"{self.path} has steps {steps.tolist()} on ranks 0, 1, ...: not one file?")
        if state["step"] > 0:
            for name, part in self.parts.items():
                part.load_state_dict(state["parts"][name])
            everywhere, own = state["generators"][dist.get_rank()]
            torch.set_rng_state(everywhere.clone())  # torch crashes on a part of a tensor
            self.generator.set_state(own.clone())
        return state["step"], state["losses"]


def write_whole(state: object, path: Path) -> None:
    """Save so that `path` has the old content or the new, whenever this is interrupted."""
    partial = path.with_name(f".{path.name}.partial")  # on one file system, so that it can move
    partial.unlink(missing_ok=True)  # of a run that was killed here
    with partial.open("xb") as file:  # made anew: a link that somebody plants is not followed
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the move too survives a loss of power
    finally:
        os.close(folder)


def gather(tensor: Tensor) -> Tensor:
    """Return every rank's tensor, one behind the other, on the CPU. Collective."""
    is_on_gpu = dist.get_backend() == "nccl"
    own = tensor.cuda() if is_on_gpu else tensor
    all_of_them = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, own)
    return torch.stack(all_of_them).cpu()
