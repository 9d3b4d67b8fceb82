"""`ddpopt doctor`: whether training can be split in this environment, and what is in the way."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, config
from ddpopt.cli.output import Report, Screen, Table
from ddpopt.cli.private_names import PrivateName, private_names
from ddpopt.cli.process_groups import one_rank_group
from ddpopt.inspection.explain import explain
from ddpopt.options import SPLITS
from ddpopt.split.plan import SplitPlan

_TESTED = ((2, 11), (2, 15))  # releases of torch, the first and the last
_INSTALL_TORCH = "install torch 2.11 to 2.15, or upgrade ddpopt"
_INSTALL = "install ddpopt by pip; to put its folder on PYTHONPATH is not enough"
_BACKENDS = ("gloo", "nccl", "xccl", "ucc", "mpi")
_SHOWN = ("TORCH_LOGS", "TORCH_TRACE", "OMP_NUM_THREADS")
_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # of torch.compile
_WIDTH = 64
_CAP_MB = 0.0316  # two layers of this width fill a bucket, in whichever order they arrive


@dataclass(frozen=True, slots=True)
class Check:
    """One look at the environment; `remedy` says what to do about a problem."""

    name: str
    is_ok: bool
    detail: str
    remedy: str = ""


def run(args: argparse.Namespace, screen: Screen) -> Report:
    """Check; the status is 1 if a small model could not be split as asked."""
    with screen.progress("checking", 2 + len(SPLITS)) as advance:
        checks = [_python(), _torch_release(), _package(), _entry_point(), _process_groups()]
        checks += [_compiler(), _log_names(), *_environment()]
        advance()
        names = _find_names()
        checks.append(_names(names))
        advance()
        trials = []
        for split in SPLITS:
            trials.append(_try(split))
            advance()
    return _report([*checks, *trials], names, trials, is_verbose=args.verbose)


def _report(
    checks: Sequence[Check],
    names: Sequence[PrivateName],
    trials: Sequence[Check],
    *,
    is_verbose: bool,
) -> Report:
    can_split = all(trial.is_ok for trial in trials)
    rows = [(c.name, "ok" if c.is_ok else "problem", _found(c)) for c in checks]
    parts: list[str | Table] = [Table(header=("check", "", "found"), rows=rows)]
    if is_verbose:
        shown = [("found" if name.is_found else "missing", name.name) for name in names]
        parts += ["", Table(header=("", "private name of torch"), rows=shown)]
    parts.append(f"\ntraining can {'' if can_split else 'not '}be split here")
    data: dict[str, Any] = {
        "format": "ddpopt doctor 1",
        "can_split": can_split,
        "checks": [dataclasses.asdict(check) for check in checks],
        "private_names": {name.name: name.is_found for name in names},
    }
    return Report(data=data, parts=parts, status=0 if can_split else 1)


def _found(check: Check) -> str:
    return f"{check.detail}; {check.remedy}" if check.remedy else check.detail


def _python() -> Check:
    return Check("python", sys.version_info >= (3, 10), platform.python_version())


def _torch_release() -> Check:
    version = str(torch.__version__)
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if release < _TESTED[0]:
        return Check("torch", False, f"{version} is too old", _INSTALL_TORCH)
    if release > _TESTED[1]:
        return Check("torch", False, f"{version} is newer than what was tested", _INSTALL_TORCH)
    return Check("torch", True, version)


def _package() -> Check:
    try:
        return Check("ddpopt", True, importlib.metadata.version("ddpopt"))
    except importlib.metadata.PackageNotFoundError:
        return Check("ddpopt", False, "is imported, but not installed", _INSTALL)


def _entry_point() -> Check:
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="ddpopt")
    name = 'backend="ddpopt"'
    if not found:
        return Check(name, False, "torch.compile does not know it", _INSTALL)
    return Check(name, True, ", ".join(sorted({point.value for point in found})))


def _process_groups() -> Check:
    found = [name for name in _BACKENDS if dist.is_backend_available(name)]
    remedy = "" if found else "install a build of torch that has gloo or nccl"
    return Check("process groups", bool(found), ", ".join(found) or "none", remedy)


def _compiler() -> Check:
    """Look for what Inductor compiles C++ with, as its `config.cpp.cxx` names it."""
    name = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    found = shutil.which(name)
    if found is None:
        return Check(
            "C++ compiler",
            False,
            f"there is no {name}, which Inductor needs on CPUs",
            "install it (Debian: apt-get install g++), set CXX, or use inner='aot_eager'",
        )
    return Check("C++ compiler", True, found)


def _log_names() -> Check:
    try:
        _torch.artifact_logger(_torch.LOG_NAME, "ddp_graphs")
    except ValueError as error:
        return Check("TORCH_LOGS names", False, str(error), _INSTALL_TORCH)
    return Check("TORCH_LOGS names", True, "dynamo, distributed, ddp, +ddpopt; ddp_graphs")


def _environment() -> Iterator[Check]:
    for name, value in sorted(os.environ.items()):
        if name in _SWITCHES and value == "1":
            yield Check(name, False, f"{value} switches torch.compile off", "unset it")
        elif name == "DDPOPT_ENABLED" and not config.enabled:
            yield Check(name, False, f"{value} switches splitting off", "unset it")
        elif name.startswith("DDPOPT_") and name not in config.VARIABLES:
            known = difflib.get_close_matches(name, config.VARIABLES, n=1) or config.VARIABLES
            yield Check(name, False, "is not read by ddpopt", f"it reads {', '.join(known)}")
        elif name.startswith("DDPOPT_") or name in _SHOWN:
            yield Check(name, True, value)


def _find_names() -> list[PrivateName]:
    with contextlib.suppress(Exception), one_rank_group():  # the trials will say what is wrong
        return private_names(DistributedDataParallel(_TrialModel()))
    return private_names()


def _names(names: Sequence[PrivateName]) -> Check:
    missing = [name.name for name in names if not name.is_found]
    if missing:
        detail = f"{len(missing)} of {len(names)} missing: {', '.join(missing)}"
        return Check("private names", False, detail, _INSTALL_TORCH)
    return Check("private names", True, f"{len(names)} of {len(names)} found")


class _TrialModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make of `x`."""
        for layer in self.layers:
            x = layer(x).relu()
        return x


def _try(split: str) -> Check:
    """Train a small model, and see whether it is split."""
    name = f"split {split}"
    try:
        with one_rank_group():
            plans = _train(split)
    except Exception as error:  # to tell what is in the way is the purpose
        detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Check(name, False, detail, "see the problems above, or report it with this output")
    if not plans:
        remedy = "TORCH_LOGS=graph_breaks,recompiles says why"
        return Check(name, False, "torch.compile compiled nothing", remedy)
    plan = plans[-1]
    reason = plan.fallback or plan.instead
    if reason is not None:
        detail, _, remedy = reason.value.partition("; ")
        return Check(name, False, " ".join(filter(None, (detail, plan.detail))), remedy)
    detail = f"{len(plan.sections)} sections for {len(plan.buckets)} buckets of a small model"
    return Check(name, len(plan.sections) > 1, detail)


def _train(split: str) -> tuple[SplitPlan, ...]:
    ddp = DistributedDataParallel(_TrialModel(), bucket_cap_mb=_CAP_MB)
    options: dict[str, Any] = {"inner": "aot_eager", "split": split}
    # Sizes that vary need more of torch's private names than fixed ones.
    compiled: Any = torch.compile(ddp, backend="ddpopt", dynamic=True, options=options)
    for _ in range(2):
        torch.autograd.backward(compiled(torch.ones(2, _WIDTH)).sum())
    return explain(ddp).plans
