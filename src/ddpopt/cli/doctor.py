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
    """Check; the status is 1 if a small model could not be split, or nothing be compiled."""
    is_readable = find_names(None)
    # Making a DDP module raises whatever is wrong with process groups here; the trials below report
    # it. Lost are the names of DDP's objects, which then are in no row.
    with contextlib.suppress(Exception), one_rank_group():
        is_readable = find_names(DistributedDataParallel(TrialModel(_WIDTH), static_graph=True))
    trials = [_try(split) for split in screen.track(SPLITS[1:], "checking")]
    compiler = _compiler()
    checks = [*_installed(), compiler, *_environment(), _names(is_readable), *trials]
    # Without a C++ compiler Inductor compiles nothing for CPUs; most models for GPUs need none.
    necessary = trials if torch.accelerator.is_available() else [compiler, *trials]
    failed = [check.name for check in necessary if not check.is_ok]
    rows = []
    for check in checks:
        text = "; ".join(part for part in (check.detail, check.remedy) if part)
        rows.append((check.name, "ok" if check.is_ok else "problem", text))
    verdict = f"not be split here; see {', '.join(failed)} above" if failed else "be split here"
    parts: list[str | Table] = [
        Table(header=("check", "", "found"), rows=rows),
        f"\ntraining can {verdict}",
        f"which options to train with: {_OPTIONS_PAGE}",
    ]
    data = {
        "format": "ddpopt doctor 1",
        "can_split": not failed,
        "checks": [{**check._asdict(), "is_ok": check.is_ok} for check in checks],
        "missing_names": {str(row): row.need.value for row in is_readable if not is_readable[row]},
    }
    return Report(data=data, parts=parts, status=1 if failed else 0)


def _installed() -> Iterator[Check]:
    yield Check("python", platform.python_version())
    release = names.installed_release()
    version = str(torch.__version__)
    if release < names.FIRST:
        yield Check("torch", f"{version} is too old", _INSTALL_TORCH)
    elif release > names.LAST:
        yield Check("torch", f"{version} is newer than what was tested", _INSTALL_TORCH)
    else:
        yield Check("torch", version)
    installed = importlib.metadata.distributions(name="ddpopt")
    versions = ", ".join(distribution.version for distribution in installed)
    yield _look("ddpopt", versions, "is imported, but not installed", _INSTALL)
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="ddpopt")
    targets = ", ".join(sorted({point.value for point in points}))
    yield _look('backend="ddpopt"', targets, "torch.compile does not know it", _INSTALL)
    available = ", ".join(name for name in _BACKENDS if dist.is_backend_available(name))
    remedy = "install a build of torch that has gloo or nccl"
    yield _look("process groups", available, "none", remedy)
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
    """A check that is fine with what was `found`, and a problem if that is nothing."""
    return Check(name, found) if found else Check(name, problem, remedy)


def _environment() -> Iterator[Check]:
    for name, value in sorted(os.environ.items()):
        if name in _SWITCHES and value == "1":
            yield Check(name, f"{value} switches torch.compile off", "unset it")
        elif name == "DDPOPT_ENABLED" and not config.enabled:
            yield Check(name, f"{value} switches splitting off", "unset it")
        elif name.startswith("DDPOPT_") and name not in config.VARIABLES:
            similar = difflib.get_close_matches(name, config.VARIABLES, n=1) or config.VARIABLES
            yield Check(name, "is not read by ddpopt", f"it reads {', '.join(similar)}")
        elif name.startswith("DDPOPT_") or name in _SHOWN:
            yield Check(name, value)


def find_names(ddp: DistributedDataParallel | None) -> dict[PrivateName, bool]:
    """Whether each private name that this torch should have can be read.

    Names of DDP's objects are looked up in `ddp`, and left out without one, as are those of objects
    that exist only while a graph is compiled.
    """
    examples = _examples(ddp)
    is_readable = {}
    for row in sorted((row for row in names.TABLE if row.is_expected), key=str):
        if not row.is_global and row.owner not in examples:
            continue
        is_readable[row] = False
        # Whatever an import or a constructor raises, the name cannot be used.
        with contextlib.suppress(Exception):
            row.get(None if row.is_global else examples[row.owner]())
            is_readable[row] = True
    return is_readable


def _examples(ddp: DistributedDataParallel | None) -> dict[str, Callable[[], Any]]:
    """What makes an object of each kind, by the kind's name; most need other private names."""
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


def _names(is_readable: Mapping[PrivateName, bool]) -> Check:
    """The private names that torch has moved, and what is lost without each."""
    missing = [row for row in is_readable if not is_readable[row]]
    if not missing:
        return Check("private names", "all found")
    losses = ", ".join(f"{row} (lost: {row.need.value})" for row in missing)
    return Check("private names", f"{len(missing)} missing: {losses}", _INSTALL_TORCH)


def _try(split: str) -> Check:
    """Train a small model in this way, in a group of this process alone."""
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
