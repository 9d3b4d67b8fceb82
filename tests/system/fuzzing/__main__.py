"""Run random cases for a long time, and print the failing ones.

python -m tests.system.fuzzing --cases 5000 --minutes 120 --log fuzz.log
python -m tests.system.fuzzing --inner inductor --check-code --ranks 1 --minutes 480
"""
# test: skip, it is for a night; tests/system/test_fuzz.py runs a few cases

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from typing import TextIO
from unittest import mock

from tests.support import ranks
from tests.support.ranks import Ranks
from tests.system.fuzzing.campaign import Campaign, Failure
from tests.system.fuzzing.checking import EQUAL, EQUAL_TO_UNSPLIT, FAILURES, Finding, run_case
from tests.system.fuzzing.spec import Case

_ANSWER_LIMIT_S = 600
_SHOWN = 600  # characters of what is said of a case that did not fail
_CASES_A_START = 200  # then the two processes are started anew: Dynamo keeps a little of each case


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system.fuzzing", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many to run")
    parser.add_argument("--first", type=int, default=0, help="number of the first, its seed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after")
    parser.add_argument("--simplify-minutes", type=float, default=5, help="for each failure")
    parser.add_argument("--inner", default="", help="the inner compiler, instead of any")
    parser.add_argument("--feature", default="", help="only cases with it, as the tally names it")
    parser.add_argument("--ranks", type=int, default=2, help="how many processes train")
    parser.add_argument(
        "--check-code", action="store_true", help="compare the code of sections with their graphs"
    )
    parser.add_argument("--plant", default="", help="a bug of planted.py, to test the fuzz")
    parser.add_argument("--log", help="append failures, progress and counts to a file as well")
    return parser.parse_args()


class _Output:
    """Writes lines to standard output, and to a file if one is given."""

    def __init__(self, log: TextIO | None) -> None:
        self._files = [sys.stdout, *([log] if log else [])]

    def say(self, text: object) -> None:
        for file in self._files:
            print(text, file=file, flush=True)


def _run(arguments: argparse.Namespace, output: _Output) -> list[Failure]:
    """Run cases with caches that are empty at first, so that each has a cold start."""
    with tempfile.TemporaryDirectory() as caches:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
        return _run_cases(arguments, output)


def _run_cases(arguments: argparse.Namespace, output: _Output) -> list[Failure]:
    workers = Ranks(arguments.ranks)

    def run(case: Case) -> Finding:
        finding = run_case(workers, case, arguments.plant, checks_code=arguments.check_code)
        if finding.outcome not in (EQUAL, EQUAL_TO_UNSPLIT, *FAILURES):
            output.say(f"{finding.outcome}:\n    {case},\n{finding.detail[-_SHOWN:]}")
        return finding

    campaign = Campaign(
        run,
        simplify_s=arguments.simplify_minutes * 60,
        inner=arguments.inner,
        feature=arguments.feature,
        cuts_finely=arguments.check_code,
    )
    began_s = told_s = time.monotonic()
    failures = []
    try:
        for number in range(arguments.first, arguments.first + arguments.cases):
            if time.monotonic() - began_s > arguments.minutes * 60:
                break
            failure = campaign.try_case(number)
            if failure is not None:
                failures.append(failure)
                output.say(failure)
            if (number + 1) % _CASES_A_START == 0:
                workers.stop()
            if time.monotonic() - told_s > 60:
                told_s = time.monotonic()
                rate = campaign.tally.num_cases / (told_s - began_s) * 60
                counts = dict(campaign.tally.outcomes)
                if arguments.check_code:
                    counts["sections"] = campaign.tally.num_codes
                output.say(f"up to case {number}, {rate:.1f} a minute: {counts}")
    except KeyboardInterrupt:
        output.say("interrupted")
    finally:
        workers.stop()
    output.say(campaign.tally)
    taken_s = time.monotonic() - began_s
    output.say(f"{taken_s:.0f} s, {campaign.tally.num_cases / taken_s * 60:.1f} cases a minute")
    return failures


def main() -> int:
    """Run; return 1 if a case failed."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended counts too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of the ranks, which inherit it
    log = open(arguments.log, "a") if arguments.log else None  # noqa: SIM115  # open to the end
    with mock.patch.object(ranks, "TIMEOUT_S", _ANSWER_LIMIT_S):
        return 1 if _run(arguments, _Output(log)) else 0


if __name__ == "__main__":
    sys.exit(main())
