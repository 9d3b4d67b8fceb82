"""`ddpopt doctor`: what is missing or wrong here, and whether training can be split."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch, config
from ddpopt._text import count, shorten
from ddpopt._torch import names
from ddpopt._torch.names import PrivateName
from ddpopt._traced import TrialModel
from ddpopt.cli.inputs import one_rank_group
from ddpopt.cli.launched import WAIT_S, find_launch, settle
from ddpopt.cli.output import Report, Screen, Table
from ddpopt.inspection.explain import explain
from ddpopt.options import NO_COMPILER, SPLITS
from ddpopt.split.cut import Cut

_INSTALL_TORCH = f"install torch {names.tested_range()}, or upgrade ddpopt"
_INSTALL = "install ddpopt by pip; to put its folder on PYTHONPATH is not enough"
_WHICH_OPTIONS = "which options to train with: ddpopt help options"
_REPORT = "see the problems above, or report it with this output"
_UNREACHED = (
    "look at rank 0's output, and at MASTER_ADDR and MASTER_PORT, where a firewall may be between"
)
_PRINTING_S = 2.0
_MOST_ROWS = 12  # of ranks that differ from most
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


class Findings(NamedTuple):
    """What one process found; `failed` names the checks without which nothing can be split."""

    host: str
    checks: Sequence[Check]
    failed: Sequence[str]
    # The private names that torch lacks, and what is lost without each.
    missing_names: Mapping[str, str]

    @property
    def is_well(self) -> bool:
        """Whether no check has found a problem; training may still be split if one has."""
        return all(check.is_ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "checks": [list(check) for check in self.checks]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Findings:
        return cls(**{**data, "checks": [Check(*fields) for fields in data["checks"]]})


def run(_args: argparse.Namespace, screen: Screen) -> Report | None:
    """Check; the status is 1 if a small model could not be split, or nothing be compiled.

    Of processes that a launcher has started together, rank 0 reports for all. Another rank returns
    None, or exits with rank 0's status; one that cannot reach the others reports for itself.
    """
    launch = find_launch()
    findings = _examine(screen)
    if launch is None:
        return _report_one(findings)
    reports: list[Report] = []  # of rank 0, where `settle` calls `judge`

    def judge(data_by_rank: Mapping[int, Mapping[str, Any]]) -> int:
        by_rank = {rank: Findings.from_json(data) for rank, data in data_by_rank.items()}
        reports.append(report_all(by_rank, launch.num_ranks))
        return reports[0].status

    try:
        status = settle(launch, findings.to_json(), judge)
    except (dist.DistError, TimeoutError) as error:
        # This rank speaks for itself: its own table may say why.
        text = " ".join(str(error).split())
        lost = Check("other ranks", f"rank {launch.rank} cannot reach them: {text}", _UNREACHED)
        checks = [*findings.checks, lost]
        return _report_one(findings._replace(checks=checks, failed=[*findings.failed, lost.name]))
    if launch.rank:
        if status:
            # torchrun ends rank 0 as soon as another rank has failed: it has to have printed.
            time.sleep(_PRINTING_S)
            sys.exit(status)
        return None
    return reports[0]


def _examine(screen: Screen) -> Findings:
    """Make all checks in this process."""
    is_readable = find_names(None)
    # Making a DDP module raises whatever is wrong with process groups here; the trials below report
    # it. Lost are the names of DDP's objects, which then are in no row. One of them is there only
    # with a static graph.
    with contextlib.suppress(Exception), one_rank_group():
        is_readable = find_names(DistributedDataParallel(TrialModel(_WIDTH), static_graph=True))
    # Each split alone, not "auto", which would do without one that fails.
    trials = [_try(split) for split in screen.track(SPLITS[1:], "checking")]
    compiler = _compiler()
    checks = [*_installed(), compiler, *_environment(), _names(is_readable), *trials]
    # Without a C++ compiler Inductor compiles nothing for CPUs; most models for GPUs need none.
    necessary = trials if torch.accelerator.is_available() else [compiler, *trials]
    return Findings(
        host=socket.gethostname(),
        checks=checks,
        failed=[check.name for check in necessary if not check.is_ok],
        missing_names={str(r): r.need.value for r in is_readable if not is_readable[r]},
    )


# ---- What people read ----------------------------------------------------------------------------


def _report_one(findings: Findings) -> Report:
    """A row for each check, the first of which names the host: Slurm starts one a node."""
    checks = [Check("host", findings.host), *findings.checks]
    failed = findings.failed
    verdict = f"not be split here; see {', '.join(failed)} above" if failed else "be split here"
    parts: list[str | Table] = [
        Table(
            header=("check", "", "found"),
            rows=[(check.name, _state_of(check), _text_of(check)) for check in checks],
        ),
        f"\ntraining can {verdict}",
        _WHICH_OPTIONS,
    ]
    data = {
        "format": "ddpopt doctor 1",
        "can_split": not failed,
        "checks": [{**check._asdict(), "is_ok": check.is_ok} for check in checks],
        "missing_names": findings.missing_names,
    }
    return Report(data=data, parts=parts, status=1 if failed else 0)


def report_all(by_rank: Mapping[int, Findings], num_ranks: int) -> Report:
    """How many ranks are well, and a row for whatever several of them found alike.

    Ranks without findings were not heard of. For each check there is a row for what most ranks
    found, and at most `_MOST_ROWS` rows for what other ranks found instead, problems first.
    """
    hosts = {rank: findings.host for rank, findings in by_rank.items()}
    num_well = sum(findings.is_well for findings in by_rank.values())
    silent = sorted(set(range(num_ranks)) - by_rank.keys())
    # In the order of checks; some ranks have checks that others have not, such as of a variable.
    ranks_of: dict[str, dict[Check, list[int]]] = {}
    failed: dict[str, set[int]] = {}
    for rank, findings in sorted(by_rank.items()):
        for check in findings.checks:
            ranks_of.setdefault(check.name, {}).setdefault(check, []).append(rank)
        for name in findings.failed:
            failed.setdefault(name, set()).add(rank)

    usual: list[Check] = []
    others: list[Check] = []
    for ranks_by_check in ranks_of.values():
        # Of variants that equally many ranks have, the one of the lowest rank.
        most = max(ranks_by_check, key=lambda check: len(ranks_by_check[check]))
        usual.append(most)
        others += [check for check in ranks_by_check if check != most]
    others.sort(key=lambda check: check.is_ok)
    shown = {*usual, *others[:_MOST_ROWS]}

    rows: list[tuple[str, ...]] = []
    data_of_checks: list[dict[str, Any]] = []
    for name, ranks_by_check in ranks_of.items():
        for check, ranks in sorted(ranks_by_check.items(), key=lambda item: item[0] not in usual):
            names = _name_holders(ranks, hosts, num_ranks)
            if check in shown:
                rows.append((name, names, _state_of(check), _text_of(check)))
            data_of_checks.append({**check._asdict(), "is_ok": check.is_ok, "ranks": ranks})

    num_hosts = len(set(hosts.values()))
    lines = [f"{num_well} of {num_ranks} ranks are well, on {count(num_hosts, 'host')}"]
    if silent:
        lines.append(
            f"nothing was heard of {_name_numbers(silent)} within {WAIT_S:.0f} s of rank 0's own "
            "checks: look at what these print"
        )
    parts: list[str | Table] = [
        "\n".join([*lines, ""]),
        Table(header=("check", "ranks", "", "found"), rows=rows),
    ]
    if len(others) > _MOST_ROWS:
        parts.append(f"  and {len(others) - _MOST_ROWS} rows more: --json has all")
    unable = sorted({*silent, *itertools.chain.from_iterable(failed.values())})
    verdict = "be split on all ranks"
    if unable:
        verdict = f"not be split on {len(unable)} of {num_ranks} ranks"
        if failed:
            verdict += f"; see {', '.join(failed)} above"
    parts += [f"\ntraining can {verdict}", _WHICH_OPTIONS]
    missing_names: dict[str, str] = {}
    for findings in by_rank.values():
        missing_names |= findings.missing_names
    data = {
        "format": "ddpopt doctor 1",
        "can_split": not unable,
        "num_ranks": num_ranks,
        "num_well": num_well,
        "silent_ranks": silent,
        "hosts": {str(rank): host for rank, host in sorted(hosts.items())},
        "checks": data_of_checks,
        "missing_names": missing_names,
    }
    return Report(data=data, parts=parts, status=1 if unable else 0)


def _state_of(check: Check) -> str:
    return "ok" if check.is_ok else "problem"


def _text_of(check: Check) -> str:
    return "; ".join(part for part in (check.detail, check.remedy) if part)


def _name_holders(ranks: Sequence[int], hosts: Mapping[int, str], num_ranks: int) -> str:
    """Ranks with their hosts, `ranks 8-15 on node1`; or, of more than half, `498 of 512`."""
    if len(ranks) == num_ranks:
        return f"all {num_ranks}"
    if 2 * len(ranks) > num_ranks:
        return f"{len(ranks)} of {num_ranks}"
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{_name_numbers(ranks)} on {shorten(names)}"


def _name_numbers(ranks: Sequence[int]) -> str:
    """Sorted ranks as `rank 3` or `ranks 0, 8-15`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {shorten(names)}"


# ---- Checks --------------------------------------------------------------------------------------


def _installed() -> Iterator[Check]:
    """Checks of versions, and of what ddpopt's installation and torch's build have to bring."""
    yield Check("python", platform.python_version())
    release = names.installed_release()
    version = str(torch.__version__)
    tested = f"tested are {names.tested_range()}"
    if release < names.FIRST:
        yield Check("torch", f"{version} is too old: {tested}", _INSTALL_TORCH)
    elif release > names.LAST:
        yield Check("torch", f"{version} is newer than what was tested: {tested}", _INSTALL_TORCH)
    else:
        yield Check("torch", f"{version}; {tested}")
    installed = importlib.metadata.distributions(name="ddpopt")
    versions = ", ".join(distribution.version for distribution in installed)
    yield _check_there("ddpopt", versions, "is imported, but not installed", _INSTALL)
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="ddpopt")
    targets = ", ".join(sorted({point.value for point in points}))
    yield _check_there('backend="ddpopt"', targets, "torch.compile does not know it", _INSTALL)
    available = ", ".join(name for name in _BACKENDS if dist.is_backend_available(name))
    remedy = "install a build of torch that has gloo or nccl"
    yield _check_there("process groups", available, "none", remedy)
    try:
        _torch.graph_logger()
        yield Check("TORCH_LOGS names", "dynamo, distributed, ddp, +ddpopt; ddp_graphs")
    except ValueError as error:
        yield Check("TORCH_LOGS names", str(error), _INSTALL_TORCH)


def _compiler() -> Check:
    """Look for what Inductor compiles C++ with, as in its `config.cpp.cxx`."""
    name = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return _check_there(
        "C++ compiler",
        shutil.which(name),
        f"there is no {name}, which Inductor needs on CPUs",
        NO_COMPILER,
    )


def _check_there(name: str, found: str | None, problem: str, remedy: str) -> Check:
    """A check of something that has to be there: fine if it was `found`, otherwise a `problem`."""
    return Check(name, found) if found else Check(name, problem, remedy)


def _environment() -> Iterator[Check]:
    """A check of each variable that is set and matters; fine unless unread or a switch-off."""
    for name, value in sorted(os.environ.items()):
        if name in _SWITCHES and value == "1":
            yield Check(name, f"{value} switches torch.compile off", "unset it")
        elif name == "DDPOPT_ENABLED" and not config.enabled:
            yield Check(name, f"{value} switches splitting off", "unset it")
        elif name.startswith("DDPOPT_") and name not in config.VARIABLES:
            detail, _, remedy = config.describe_unread(name).partition("; ")
            yield Check(name, detail, remedy)
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
    """Train a small model with this split, in a group of this process alone."""
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
    """The cuts of a small model that trains; the DDP module ends with this function."""
    ddp = DistributedDataParallel(TrialModel(_WIDTH), bucket_cap_mb=_CAP_MB)
    options: dict[str, Any] = {"inner": "aot_eager", "split": split}
    # Dynamic sizes need more of torch's private names than fixed ones.
    compiled: Any = torch.compile(ddp, backend="ddpopt", dynamic=True, options=options)
    for _ in range(2):  # DDP rebuilds its buckets between the two
        torch.autograd.backward(compiled(torch.ones(2, _WIDTH)).sum())
    return explain(ddp).cuts
