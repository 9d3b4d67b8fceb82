"""`ddpopt doctor`: whether training can be split in this environment, and what is in the way."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, config
from ddpopt._torch import names
from ddpopt._torch.names import ModuleName, PrivateName
from ddpopt.cli.output import Report, Screen, Table
from ddpopt.cli.process_groups import one_rank_group
from ddpopt.inspection.explain import explain
from ddpopt.options import SPLITS
from ddpopt.split.plan import SplitPlan

_INSTALL_TORCH = f"install torch {names.tested_range()}, or upgrade ddpopt"
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
        found = _find_names()
        checks.append(_names(found))
        advance()
        trials = []
        for split in SPLITS:
            trials.append(_try(split))
            advance()
    return _report([*checks, *trials], found, trials, is_verbose=args.verbose)


def _report(
    checks: Sequence[Check],
    found: Mapping[PrivateName, bool],
    trials: Sequence[Check],
    *,
    is_verbose: bool,
) -> Report:
    can_split = all(trial.is_ok for trial in trials)
    rows = [(c.name, "ok" if c.is_ok else "problem", _found(c)) for c in checks]
    parts: list[str | Table] = [Table(header=("check", "", "found"), rows=rows)]
    if is_verbose:
        shown = [
            ("found" if is_found else "missing", str(row), row.need.value)
            for row, is_found in found.items()
        ]
        parts += ["", Table(header=("", "private name of torch", "for"), rows=shown)]
    parts.append(f"\ntraining can {'' if can_split else 'not '}be split here")
    data: dict[str, Any] = {
        "format": "ddpopt doctor 1",
        "can_split": can_split,
        "checks": [dataclasses.asdict(check) for check in checks],
        "private_names": {str(row): is_found for row, is_found in found.items()},
    }
    return Report(data=data, parts=parts, status=0 if can_split else 1)


def _found(check: Check) -> str:
    return f"{check.detail}; {check.remedy}" if check.remedy else check.detail


def _python() -> Check:
    return Check("python", sys.version_info >= (3, 10), platform.python_version())


def _torch_release() -> Check:
    version, release = str(torch.__version__), names.installed_release()
    if release < names.FIRST:
        return Check("torch", False, f"{version} is too old", _INSTALL_TORCH)
    if release > names.LAST:
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
        _torch.graph_logger()
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


def _find_names() -> dict[PrivateName, bool]:
    with contextlib.suppress(Exception), one_rank_group():  # the trials will say what is wrong
        return find_names(DistributedDataParallel(_TrialModel(), static_graph=True))
    return find_names(None)


def find_names(ddp: DistributedDataParallel | None) -> dict[PrivateName, bool]:
    """Return which private names torch has, of those that it should have; those of DDP if given.

    Left out are names of objects that exist only while a graph is compiled.
    """
    examples = _examples(ddp)
    rows = [row for row in names.TABLE if row.is_expected]
    rows = [row for row in rows if isinstance(row, ModuleName) or row.owner in examples]
    return {row: _is_found(row, examples) for row in sorted(rows, key=str)}


def _is_found(row: PrivateName, examples: Mapping[str, Callable[[], Any]]) -> bool:
    try:
        if isinstance(row, ModuleName):
            row.get()
        else:
            row.of(examples[row.owner]())
    except Exception:  # whatever an import or a constructor raises, the name cannot be used
        return False
    return True


def _examples(ddp: DistributedDataParallel | None) -> dict[str, Callable[[], Any]]:
    """Return by its name what makes an object of each kind; all but a few climb by other names."""
    compiled: Any = torch.compile(nn.Identity(), backend="eager")
    mode = names.FAKE_TENSOR_MODE
    examples: dict[str, Callable[[], Any]] = {
        "Module": nn.Module,
        "OptimizedModule": lambda: compiled,
        "compiled function": lambda: compiled.forward,
        "OptimizeContext": lambda: names.DYNAMO_CTX.of(compiled),
        "frame callback": lambda: names.CALLBACK.of(names.DYNAMO_CTX.of(compiled)),
        "torch.compile's wrapper": lambda: _torch.compiler_of(names.DYNAMO_CTX.of(compiled)),
        "OpOverload": lambda: torch.ops.aten.add.Tensor,
        "UntypedStorage": lambda: torch.empty(0).untyped_storage(),
        "Variable": lambda: torch.autograd.Variable,
        "ImperativeEngine": lambda: names.EXECUTION_ENGINE.of(torch.autograd.Variable),
        "TracingContext": lambda: names.TRACING_CONTEXT.get()(None),
        "GuardsContext": lambda: names.GUARDS_CONTEXT.of(names.TRACING_CONTEXT.get()(None)),
        "FakeTensorMode": lambda: mode.get()(shape_env=None),
        "FakeTensor": lambda: mode.get()().from_tensor(torch.empty(0)),
        "boxed function": lambda: names.BOXED_NOP.get()(fx.GraphModule({}, fx.Graph()), []),
        "Inductor wrapper": lambda: _torch.inductor(None, {}),
        "Inductor's triton config": names.TRITON.get,
    }
    if ddp is not None:
        group, device = ddp.process_group, torch.device("cpu")
        examples |= {
            "DistributedDataParallel": lambda: ddp,
            "Reducer": lambda: names.REDUCER.of(ddp),
            "Logger": lambda: names.LOGGER.of(ddp),
            "ProcessGroup": lambda: group,
            "ProcessGroup options": lambda: names.GROUP_BACKEND.of(group)(device).options,
        }
    return examples


def _names(found: Mapping[PrivateName, bool]) -> Check:
    missing = [str(row) for row, is_found in found.items() if not is_found]
    if missing:
        detail = f"{len(missing)} of {len(found)} missing: {', '.join(missing)}"
        return Check("private names", False, detail, _INSTALL_TORCH)
    return Check("private names", True, f"{len(found)} of {len(found)} found")


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
