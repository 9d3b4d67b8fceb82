"""Train tiny models of many architectures in every way, and write what came of it.

python -m tests.system.architectures --log architectures.jsonl --document

The log gets a line of JSON for each run. What it has is not run again, so that a sweep can be
continued; of two lines for one run the later counts. --document writes build/architectures.md.
"""
# test: skip, it takes hours; tests/system/test_architectures.py runs a handful

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from tests.support import ranks
from tests.support.ranks import Ranks
from tests.system.architectures.catalogue import ARCHITECTURES
from tests.system.architectures.document import write_document
from tests.system.architectures.running import Way, run_way, ways_of
from tests.system.campaigns.program import prepare_process
from tests.system.campaigns.sweep import Log

_ANSWER_LIMIT_S = 1200  # Inductor, on a busy machine
_RUNS_A_START = 60  # then the two processes are started anew: Dynamo keeps a little of each


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.system.architectures", description=__doc__
    )
    parser.add_argument("--only", nargs="+", default=list(ARCHITECTURES), help="architectures")
    parser.add_argument("--log", type=Path, required=True, help="the file of JSON lines")
    parser.add_argument("--again", action="store_true", help="run also what the log has")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after")
    parser.add_argument("--document", action="store_true", help="write build/architectures.md")
    return parser.parse_args()


def _in_turn(names: Sequence[str]) -> list[tuple[str, Way]]:
    """Return all runs. Each architecture begins with another way: a sweep may be stopped early."""
    turns = [
        ((number + turn) % len(ways_of(name)), name, way)
        for number, name in enumerate(names)
        for turn, way in enumerate(ways_of(name))
    ]
    return [(name, way) for _, name, way in sorted(turns, key=lambda turn: turn[0])]


def _sweep(arguments: argparse.Namespace, log: Log) -> int:
    """Run what is missing; return how many runs failed."""
    runs = _in_turn(arguments.only)
    if not arguments.again:
        runs = [(name, way) for name, way in runs if (name, str(way)) not in log.findings]
    workers, num_failures, began_s = Ranks(), 0, time.monotonic()
    try:
        for number, (name, way) in enumerate(runs, start=1):
            if time.monotonic() - began_s > arguments.minutes * 60:
                break
            result = run_way(workers, name, way)
            log.add((name, str(way)), result)
            is_ours = way.optimizer != "in-tree"
            num_failures += is_ours and result.is_failure
            print(f"{number}/{len(runs)} {name}, {way}: {result.headline()}", flush=True)
            if number % _RUNS_A_START == 0:
                workers.stop()
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        workers.stop()
    return num_failures


def main() -> int:
    """Run; return 1 if ddpopt failed in a run."""
    arguments = _arguments()
    prepare_process()
    log = Log(arguments.log)
    with mock.patch.object(ranks, "TIMEOUT_S", _ANSWER_LIMIT_S):
        num_failures = _sweep(arguments, log)
    if arguments.document:
        write_document(log)
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
