"""`ddpopt doctor`: what is missing or wrong here, and whether training can be split."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, config
from ddpopt._torch import names
from ddpopt._torch.names import PrivateName
from ddpopt._traced import TrialModel
from ddpopt.cli.inputs import one_rank_group
from ddpopt.cli.output import Report, Screen, Table
from ddpopt.inspection.explain import explain
from ddpopt.options import NO_COMPILER, SPLITS
from ddpopt.split.cut import Cut

_INSTALL_TORCH = f"install torch {names.tested_range()}, or upgrade ddpopt"
_INSTALL = "install ddpopt by pip; to put its folder on PYTHONPATH is not enough"
_OPTIONS_PAGE = "docs/index.md#which-options"
_REPORT = "see the problems above, or report it with this output"
_BACKENDS = ("gloo", "nccl", "xccl", "ucc", "mpi")
_SHOWN = ("TORCH_LOGS", "TORCH_TRACE", "OMP_NUM_THREADS")
_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # of torch.compile
_WIDTH = 64
_CAP_MB = 0.0316  # two layers of this width fill a bucket, in any order of arrival


class Check(NamedTuple):
    """One check of the environment; if there is a problem, `remedy` says what to do about it."""

    name: str
    detail: str
    remedy: str = ""

    @property
    def is_ok(self) -> bool:
        return not self.remedy


def run(_args: argparse.Namespace, screen: Screen) -> Report:
    """Check; the status is 1 if no model could be trained, or a small one not split."""
    found = find_names(None)
    with contextlib.suppress(Exception), one_rank_group():  # the trials will say what is wrong
        found = find_names(DistributedDataParallel(TrialModel(_WIDTH), static_graph=True))
    trials = [_try(split) for split in screen.track(SPLITS[1:], "checking")]
    compiler = _compiler()
    checks = [*_installed(), compiler, *_environment(), _names(found), *trials]
    needed = trials if torch.accelerator.is_available() else [compiler, *trials]
    missing = [check.name for check in needed if not check.is_ok]
    can_split = not missing
    rows = [
        (check.name, "ok" if check.is_ok else "problem", "; ".join(filter(None, check[1:])))
        for check in checks
    ]
    parts: list[str | Table] = [Table(header=("check", "", "found"), rows=rows)]
    lacking = f"not be split here; see {', '.join(missing)} above" if missing else "be split here"
    parts.append(f"\ntraining can {lacking}")
    parts.append(f"which options to train with: {_OPTIONS_PAGE}")
    data = {
        "format": "ddpopt doctor 1",
        "can_split": can_split,
        "checks": [{**check._asdict(), "is_ok": check.is_ok} for check in checks],
        "missing_names": {
            str(row): row.need.value for row, is_found in found.items() if not is_found
        },
    }
    return Report(data=data, parts=parts, status=0 if can_split else 1)


def _installed() -> Iterator[Check]:
    yield Check("python", platform.python_version())
    release = names.installed_release()
    version = str(torch.__version__)
    problem = f"{version} is {'too old' if release < names.FIRST else 'newer than what was tested'}"
    yield _look(
        "torch", version if names.FIRST <= release <= names.LAST else "", problem, _INSTALL_TORCH
    )
    found = ", ".join(each.version for each in importlib.metadata.distributions(name="ddpopt"))
    yield _look("ddpopt", found, "is imported, but not installed", _INSTALL)
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="ddpopt")
    found = ", ".join(sorted({point.value for point in points}))
    yield _look('backend="ddpopt"', found, "torch.compile does not know it", _INSTALL)
    found = ", ".join(filter(dist.is_backend_available, _BACKENDS))
    yield _look("process groups", found, "none", "install a build of torch that has gloo or nccl")
    try:
        _torch.graph_logger()
        yield Check("TORCH_LOGS names", "dynamo, distributed, ddp, +ddpopt; ddp_graphs")
    except ValueError as error:
        yield Check("TORCH_LOGS names", str(error), _INSTALL_TORCH)


def _compiler() -> Check:
    """Look for what Inductor compiles C++ with, as in its `config.cpp.cxx`."""
    name = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return _look(
        "C++ compiler",
        shutil.which(name),
        f"there is no {name}, which Inductor needs on CPUs",
        NO_COMPILER,
    )


def _look(name: str, found: str | None, problem: str, remedy: str) -> Check:
    return Check(name, found) if found else Check(name, problem, remedy)


def _environment() -> Iterator[Check]:
    for name, value in sorted(os.environ.items()):
        if name in _SWITCHES and value == "1":
            yield Check(name, f"{value} switches torch.compile off", "unset it")
        elif name == "DDPOPT_ENABLED" and not config.enabled:
            yield Check(name, f"{value} switches splitting off", "unset it")
        elif name.startswith("DDPOPT_") and name not in config.VARIABLES:
            known = difflib.get_close_matches(name, config.VARIABLES, n=1) or config.VARIABLES
            yield Check(name, "is not read by ddpopt", f"it reads {', '.join(known)}")
        elif name.startswith("DDPOPT_") or name in _SHOWN:
            yield Check(name, value)


def find_names(ddp: DistributedDataParallel | None) -> dict[PrivateName, bool]:
    """Whether each private name that this torch should have can be read.

    Names of DDP's objects are looked up in `ddp`, and left out without one, as are those of objects
    that exist only while a graph is compiled.
    """
    examples = _examples(ddp)
    found = {}
    for row in sorted((row for row in names.TABLE if row.is_expected), key=str):
        if not row.is_global and row.owner not in examples:
            continue
        found[row] = False
        # Whatever an import or a constructor raises, the name cannot be used.
        with contextlib.suppress(Exception):
            row.get(None if row.is_global else examples[row.owner]())
            found[row] = True
    return found


def _examples(ddp: DistributedDataParallel | None) -> dict[str, Callable[[], Any]]:
    """Return for each kind, by name, what makes such an object; most need other private names."""
    compiled: Any = torch.compile(nn.Identity(), backend="eager")
    mode = names.FAKE_TENSOR_MODE
    examples: dict[str, Callable[[], Any]] = {
        "Module": nn.Module,
        "Tensor": lambda: torch.Tensor,
        "OptimizedModule": lambda: compiled,
        "compiled function": lambda: compiled.forward,
        "OptimizeContext": lambda: names.DYNAMO_CTX.get(compiled),
        "frame callback": lambda: names.CALLBACK.get(names.DYNAMO_CTX.get(compiled)),
        "wrapper of torch.compile": lambda: _torch.compiler_of(names.DYNAMO_CTX.get(compiled)),
        "OpOverload": lambda: torch.ops.aten.add.Tensor,
        "Optimizer": _optimizer,
        "Optimizer.step": lambda: type(_optimizer()).step,  # the first optimizer adds its hooks
        "TracingContext": lambda: names.TRACING_CONTEXT.get()(None),
        "GuardsContext": lambda: names.GUARDS_CONTEXT.get(names.TRACING_CONTEXT.get()(None)),
        "FakeTensorMode": lambda: mode.get()(shape_env=None),
        "boxed function": lambda: names.BOXED_NOP.get()(fx.GraphModule({}, fx.Graph()), []),
        "Inductor wrapper": lambda: _torch.inductor(None, {}),
        "OutputCode": lambda: names.OUTPUT_CODE.get()(),  # noqa: PLW0108  # not before it is called
    }
    if ddp is not None:
        group, device = ddp.process_group, torch.device("cpu")
        examples |= {
            "DistributedDataParallel": lambda: ddp,
            "Reducer": lambda: names.REDUCER.get(ddp),
            "Logger": lambda: names.LOGGER.get(ddp),
            "ProcessGroup": lambda: group,
            "ProcessGroup options": lambda: names.GROUP_BACKEND.get(group)(device).options,
        }
    return examples


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.empty(0)])


def _names(found: Mapping[PrivateName, bool]) -> Check:
    """Look for private names that torch has moved, and say what is lost without each."""
    missing = [f"{row} (lost: {row.need.value})" for row, is_found in found.items() if not is_found]
    all_found = "" if missing else "all found"
    problem = f"{len(missing)} missing: {', '.join(missing)}"
    return _look("private names", all_found, problem, _INSTALL_TORCH)


def _try(split: str) -> Check:
    name = f"split {split}"
    try:
        with one_rank_group():
            cuts = _train(split)
    except Exception as error:  # the purpose is to report what is wrong
        return Check(name, f"{type(error).__name__}: {' '.join(str(error).split())}", _REPORT)
    if not cuts:
        remedy = "TORCH_LOGS=graph_breaks,recompiles says why"
        return Check(name, "torch.compile compiled nothing", remedy)
    cut = cuts[-1]
    reason = cut.fallback or cut.backward_fallback
    if reason is not None:
        detail, _, remedy = reason.value.partition("; ")
        return Check(name, " ".join(filter(None, (detail, cut.detail))), remedy or _REPORT)
    detail = f"{len(cut.sections)} sections for {len(cut.buckets)} buckets of a small model"
    return Check(name, detail, "" if len(cut.sections) > 1 else _REPORT)


def _train(split: str) -> tuple[Cut, ...]:
    ddp = DistributedDataParallel(TrialModel(_WIDTH), bucket_cap_mb=_CAP_MB)
    options: dict[str, Any] = {"inner": "aot_eager", "split": split}
    # Dynamic sizes need more of torch's private names than fixed ones.
    compiled: Any = torch.compile(ddp, backend="ddpopt", dynamic=True, options=options)
    for _ in range(2):
        torch.autograd.backward(compiled(torch.ones(2, _WIDTH)).sum())
    return explain(ddp).cuts
