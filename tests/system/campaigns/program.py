"""The command line and the loop of a fuzzer: draw by number, run, print failures, count."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.support.ranks import Ranks
from tests.system.campaigns.campaign import Campaign
from tests.system.training.outcomes import EQUAL, EQUAL_TO_UNSPLIT

_SHOWN = 2000  # characters of what is said of a case that did not fail
_CASES_A_START = 100  # then the processes are started anew: Dynamo keeps a little of each
_TOLD_EACH_S = 60

Make = Callable[[Ranks, argparse.Namespace], Campaign[Any]]


def parser_of(program: str, text: str | None, *, num_cases: int | None) -> argparse.ArgumentParser:
    """Return the options that all fuzzers take."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=text)
    parser.add_argument("--cases", type=int, default=num_cases, help="how many to run at most")
    parser.add_argument("--first", type=int, default=0, help="number of the first, its seed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after")
    parser.add_argument("--simplify-minutes", type=float, default=5, help="for each failure")
    parser.add_argument("--replay", default="", help="run this case alone, as it was printed")
    parser.add_argument("--kept", action="store_true", help="run those of kept.py alone")
    parser.add_argument("--plant", default="", help="a fault of planted.py, to test the fuzzer")
    parser.add_argument("--log", help="append failures, progress and counts to a file as well")
    return parser


def run(
    arguments: argparse.Namespace,
    campaign: Campaign[Any],
    workers: Ranks,
    *,
    draw: Callable[[int], Any],
    read: Callable[[str], Any],
    kept: Mapping[str, Any],
) -> int:
    """Run what the arguments ask for; return 1 if a case failed.

    `draw` gives the case of a number, None for one that is not wanted; `read` gives that of a line.
    """
    with contextlib.ExitStack() as stack:
        # Caches are empty at first, so that each case has a cold start.
        caches = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
        files = [sys.stdout]
        if arguments.log:
            files.append(stack.enter_context(open(arguments.log, "a")))
        stack.callback(workers.stop)

        def say(text: object) -> None:
            for file in files:
                print(text, file=file, flush=True)

        if arguments.replay:
            cases: Iterator[tuple[str, Any]] = iter([("the case", read(arguments.replay))])
        elif arguments.kept:
            cases = iter(kept.items())
        else:
            numbers = itertools.islice(itertools.count(arguments.first), arguments.cases)
            cases = ((f"case {number}", draw(number)) for number in numbers)
        began_s = time.monotonic()
        try:
            _run_all(cases, campaign, workers, say, began_s + 60 * arguments.minutes)
        except KeyboardInterrupt:
            say("interrupted")
        say(campaign.tally)
        taken_s = time.monotonic() - began_s
        say(f"{taken_s:.0f} s, {campaign.tally.num_cases / taken_s * 60:.1f} cases a minute")
    return 1 if campaign.tally.num_failures else 0


def _run_all(
    cases: Iterator[tuple[str, Any]],
    campaign: Campaign[Any],
    workers: Ranks,
    say: Callable[[object], None],
    stop_s: float,
) -> None:
    tally, began_s = campaign.tally, time.monotonic()
    told_s = began_s
    for name, case in cases:
        if time.monotonic() > stop_s:
            return
        if case is None:
            continue
        finding, failure = campaign.try_case(name, case)
        if failure is not None:
            say(failure)
        elif finding.outcome not in (EQUAL, EQUAL_TO_UNSPLIT):
            say(f"{name}: {finding.outcome}:\n    {case},\n{finding.brief[:_SHOWN]}")
        if time.monotonic() - told_s > _TOLD_EACH_S:
            told_s = time.monotonic()
            rate = tally.num_cases / (told_s - began_s) * 60
            counts = {**tally.outcomes, "sections": tally.num_codes}
            say(f"up to {name}, {rate:.1f} a minute: {counts}")
        if tally.num_cases % _CASES_A_START == 0:
            workers.stop()


def prepare_process() -> None:
    """Have an ended run print its counts too, and ranks log and compute as in tests."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of the ranks, which inherit it
