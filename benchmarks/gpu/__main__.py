"""Prove on a device that ddpopt is right, that it overlaps, and what it costs: one page.

    make gpu
    bash benchmarks/gpu/run.sh cpu build/gpu-cpu

Lines are in `lines.py`. The status is 1 if any of them failed, and 2 if there is no such device.
"""
# test: skip, minutes; tests/system/test_gpu.py runs the few lines of the CPU's

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import report
from benchmarks.gpu.lines import lines_for
from benchmarks.gpu.runner import ROOT, Outcome, Setting, run_lines

# Below nine minutes with what comes before and after; the twin of it has slower compilers.
_BUDGET_S = {"cuda": 525.0, "cpu": 7200.0}
_CORES_PER_LINE = 2  # ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lines, and write the page after each."""
    args = _parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch.cuda.is_available() is False; give `cpu` for the twin", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    lines = lines_for(args.device, is_all=args.all)
    if args.lines:
        chosen = [line for line in lines if line.name.startswith(tuple(args.lines))]
        if not chosen:
            names = "\n".join(line.name for line in lines)
            print(f"no line begins with any of {args.lines}; there are\n{names}", file=sys.stderr)
            return 2
        lines = chosen
    outcomes: list[Outcome] = []
    facts, start_s = _facts(args), time.monotonic()

    def say(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(f"{outcome.line.name}: {outcome.result}, {outcome.seconds:.0f} s", flush=True)
        if outcome.why:
            print(f"    {outcome.why}", flush=True)
        order = {line.name: place for place, line in enumerate(lines)}
        shown = sorted(outcomes, key=lambda known: order[known.line.name])
        facts["seconds"] = f"{time.monotonic() - start_s:.0f} of {args.budget_s:.0f}"
        report.write(shown, facts, args.output)

    setting = Setting(
        device=args.device, folder=args.output, budget_s=args.budget_s, num_jobs=args.jobs
    )
    run_lines(lines, setting, say)
    print(f"{report.summary(outcomes)}; written to {args.output}/gpu.md and gpu.json")
    return 1 if any(outcome.result == "failed" for outcome in outcomes) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    jobs = max(1, (os.cpu_count() or 1) // _CORES_PER_LINE)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--output", type=Path, default=Path("build/gpu"), help="a folder")
    add("--all", action="store_true", help="all lines; on the CPU there are else only a few")
    add("--lines", nargs="+", metavar="NAME", help="only those whose names begin so")
    add("--budget-s", type=float, help="for all lines: nine minutes on a GPU, else two hours")
    add("--jobs", type=int, default=jobs, help="lines beside each other")
    args = parser.parse_args(arguments)
    args.budget_s = args.budget_s or _BUDGET_S[args.device]
    args.all = args.all or args.device == "cuda" or bool(args.lines)
    return args


def _facts(args: argparse.Namespace) -> dict[str, str]:
    is_cuda = args.device == "cuda"
    cuda = f", CUDA {torch.version.cuda}" if is_cuda else ""
    return {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu, the twin",
        "command": f"python -m benchmarks.gpu {shlex.join(sys.argv[1:])}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": f"torch {torch.__version__}{cuda}, Python {platform.python_version()}",
        "sources": _sources(),
        "machine": f"{os.cpu_count()} cores, {args.jobs} lines beside each other",
    }


def _sources() -> str:
    """Return the commit, if this is a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
