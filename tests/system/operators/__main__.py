"""Run every differentiable operator and module of torch's own database inside a DDP model.

python -m tests.system.operators --log operators.jsonl

The log gets a line of JSON for each call and split; a call that it has is not run again, so that a
sweep can be continued. Lines are printed of what failed, and counts at the end.
"""
# test: skip, it takes half an hour; tests/system/test_operators.py runs strange ones

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.system.campaigns.sweep import Log
from tests.system.operators.models import NAMES, calls_of
from tests.system.operators.running import check


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system.operators", description=__doc__)
    parser.add_argument("--only", nargs="+", default=NAMES, help="operators by name")
    parser.add_argument("--first", default="", help="begin with this one")
    parser.add_argument("--samples", type=int, default=2, help="calls of each, at most")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after")
    parser.add_argument("--log", type=Path, help="the file of JSON lines")
    return parser.parse_args()


def _sweep(arguments: argparse.Namespace, log: Log) -> None:
    names, began_s = list(arguments.only), time.monotonic()
    for name in names[names.index(arguments.first) if arguments.first else 0 :]:
        for number, sample in itertools.islice(calls_of(name), arguments.samples):
            if time.monotonic() - began_s > arguments.minutes * 60:
                return
            if any((name, number) == key[:2] for key in log.findings):
                continue
            for asked, result in check(sample).items():
                log.add((name, number, asked), result)
                if result.is_failure:
                    print(f"{name}, call {number}, {asked}: {result.headline()}", flush=True)


def _print_counts(log: Log) -> None:
    results = log.findings
    names = {name for name, _, _ in results}
    failing = sorted({name for (name, _, _), result in results.items() if result.is_failure})
    outcomes = collections.Counter(result.outcome for result in results.values())
    is_cut = [result.is_split for result in results.values() if not result.is_discarded]
    print(f"{len(names)} operators, {len(results)} cases, {sum(is_cut)} of {len(is_cut)} split")
    for outcome, count in outcomes.most_common():
        print(f"{count:6} {outcome}")
    for reason, count in collections.Counter(" ".join(r.remarks) for r in results.values()).items():
        print(f"{count:6} {reason or 'cut as asked, or discarded'}")
    print(f"{len(failing)} failing operators: {', '.join(failing)}")


def main() -> int:
    """Run; return 1 if ddpopt failed in a case."""
    arguments = _arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    log = Log(arguments.log)
    try:
        _sweep(arguments, log)
    except KeyboardInterrupt:
        print("interrupted")
    _print_counts(log)
    return 1 if any(result.is_failure for result in log.findings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
