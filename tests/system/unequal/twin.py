"""One of the two programs that a script is run as on a rank: with DDP eager, or compiled."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import BucketPlan, _torch
from ddpopt.planning import AllreduceCost, Gradient, Profile, tuner
from ddpopt.planning.decision import Decision, Verdict
from tests.system.unequal.actions import NUM_RANKS
from tests.system.unequal.models import DTYPE, WIDTH, Model
from tests.system.unequal.script import Script

EAGER, COMPILED, UNSPLIT = "eager", "ddpopt", "ddpopt with enabled=False"

_COST = AllreduceCost(startup_s=1e-4, s_per_byte=1e-9)
_OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Twin:
    """The DDP modules of a script, what is called in their place, and their optimizer.

    Attributes:
        kind: EAGER, COMPILED or UNSPLIT.
        notes: What can be compared, by name; one dict for each action that has begun.
    """

    def __init__(
        self, script: Script, kind: str, rank: int, group: dist.ProcessGroup, folder: str
    ) -> None:
        self.script, self.kind, self.rank, self.group = script, kind, rank, group
        self.notes: list[dict[str, torch.Tensor]] = []
        torch.manual_seed(0)
        self.models: list[Model] = []
        self.ddps: list[DistributedDataParallel] = []
        self.runs: list[nn.Module] = []
        for number in range(2 if script.second else 1):
            self._add_module(number, folder)
        self.optimizer = _OPTIMIZERS[script.optimizer](self.parameters())

    def _add_module(self, number: int, folder: str) -> None:
        script = self.script
        model = Model(script, self.group)
        plan_path = os.path.join(folder, f"{number}-of-rank-{self.rank}.json")
        options = {
            "inner": "aot_eager",
            "enabled": self.kind == COMPILED,
            "split": script.split,
            "buckets": "ddp",
        }
        if self.kind == COMPILED:
            options["buckets"] = plan_path if script.buckets == "plan" else script.buckets
        is_compiled_inside = script.compiles_inside and self.kind != EAGER
        ddp = DistributedDataParallel(
            _compile(script, model, options) if is_compiled_inside else model,
            process_group=self.group,
            bucket_cap_mb=script.cap_bytes / 2**20,
            static_graph=script.static_graph,
            find_unused_parameters=script.find_unused,
            gradient_as_bucket_view=script.bucket_view,
            broadcast_buffers=script.broadcasts_buffers,
        )
        run: nn.Module = ddp
        if self.kind != EAGER and not is_compiled_inside:
            run = _compile(script, ddp, options)
        if script.buckets == "plan" and self.kind == COMPILED:
            plan_for(ddp, script.num_planned).save(plan_path)
        self.models.append(model)
        self.ddps.append(ddp)
        self.runs.append(run)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for model in self.models for parameter in model.parameters()]

    def draw_batch(self, size: tuple[int, int], place: int) -> torch.Tensor:
        """A batch of this rank's, for this `place` in the present action."""
        seed = (len(self.notes) * 1000 + place) * NUM_RANKS + self.rank
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*size, WIDTH, generator=generator, dtype=DTYPE)

    # ---- Noting what can be compared -----------------------------------------------------------

    def note(self, name: str, value: torch.Tensor) -> None:
        self.notes[-1][name] = value.detach().clone()

    def note_gradients(self, when: str) -> None:
        for name, parameter in self._named_parameters():
            if parameter.grad is not None:
                self.note(f"{when}, gradient of {name}", parameter.grad)

    def note_state(self) -> None:
        """Note parameters and buffers, as an action leaves them."""
        for name, parameter in self._named_parameters():
            self.note(f"parameter {name}", parameter)
        for number, model in enumerate(self.models):
            for name, buffer in model.named_buffers():
                self.note(f"buffer {number}.{name}", buffer)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield f"{number}.{name}", parameter


def _compile(script: Script, module: nn.Module, options: dict[str, Any]) -> Any:
    dynamic = True if script.is_dynamic else None
    return torch.compile(module, backend="ddpopt", options=options, dynamic=dynamic)


def plan_for(ddp: DistributedDataParallel, num_buckets: int) -> BucketPlan:
    """A plan of at most so many buckets, of about equally many parameters each."""
    parameters = list(reversed(_torch.reducer_parameters(ddp).values()))
    gradients = tuple(
        Gradient(name=parameter.name, num_bytes=parameter.num_bytes, ready_s=place * 1e-3)
        for place, parameter in enumerate(parameters)
    )
    size, num_larger = divmod(len(gradients), num_buckets)
    sizes = [size + (bucket < num_larger) for bucket in range(num_buckets)]
    return BucketPlan(
        profile=Profile(gradients=gradients, backward_s=1.0),
        cost=_COST,
        world_size=NUM_RANKS,
        sizes=tuple(size for size in sizes if size),
    )


@contextlib.contextmanager
def choosing(script: Script) -> Iterator[None]:
    """Have `buckets="auto"` decide as the script says, and not by what it measures.

    The network is not measured, which takes a second. Ranks wait for each other as long as the
    group's timeout lets them: on a busy machine one that compiles comes late to a meeting.
    """

    def decide(ddp: DistributedDataParallel, *_: object) -> Decision:
        plan = plan_for(ddp, script.num_planned)
        return Decision("as the script says", plan.to_json(), gain=0.5, is_better=True)

    def judge(*_: object) -> Verdict:
        return Verdict("as the script says", undoes_change=script.takes_back)

    with (
        mock.patch.object(tuner, "calibrate", return_value=_COST),
        mock.patch.object(tuner, "decide", decide),
        mock.patch.object(tuner, "judge", judge),
        mock.patch.object(tuner, "_PART_OF_TIMEOUT", 0.6),
    ):
        yield
