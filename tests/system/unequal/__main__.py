"""Run random scripts for a long time, and print the failing ones.

python -m tests.system.unequal --minutes 120 --log unequal.log
"""
# test: skip, it is for a night; tests/system/test_unequal.py runs a few scripts

from __future__ import annotations

import argparse
import functools
import itertools
import os
import signal
import sys
import time
from typing import TextIO

from tests.support.ranks import Ranks
from tests.system.unequal import judging
from tests.system.unequal.actions import NUM_RANKS
from tests.system.unequal.campaign import Campaign
from tests.system.unequal.judging import EQUAL
from tests.system.unequal.kept import KEPT
from tests.system.unequal.machine import AVOIDABLE
from tests.system.unequal.script import script_of

_SHOWN = 2000  # characters of what is said of a script that did not fail
_SCRIPTS_A_START = 100  # then the processes are started anew: Dynamo keeps a little of each
_TOLD_EACH_S = 120


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system.unequal", description=__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after")
    parser.add_argument("--first", type=int, default=0, help="number of the first, its seed")
    parser.add_argument("--scripts", type=int, help="how many to run at most")
    parser.add_argument("--simplify-minutes", type=float, default=5, help="for each failure")
    parser.add_argument("--replay", default="", help="run this script alone, as it was printed")
    parser.add_argument("--kept", action="store_true", help="run those of kept.py alone")
    parser.add_argument("--without", choices=AVOIDABLE, nargs="*", default=[], help="kinds")
    parser.add_argument("--plant", default="", help="a fault of planted.py, to test the fuzzer")
    parser.add_argument("--log", help="append failures, progress and counts to a file as well")
    return parser.parse_args()


class _Output:
    """Writes lines to standard output, and to a file if one is given."""

    def __init__(self, log: TextIO | None) -> None:
        self._files = [sys.stdout, *([log] if log else [])]

    def say(self, text: object) -> None:
        for file in self._files:
            print(text, file=file, flush=True)


def main() -> int:
    """Run; return 1 if a script failed."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended counts too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of the ranks, which inherit it
    log = open(arguments.log, "a") if arguments.log else None  # noqa: SIM115  # open to the end
    output = _Output(log)
    workers = Ranks(NUM_RANKS, is_forked=True)
    campaign = Campaign(
        functools.partial(judging.judge, workers, plant=arguments.plant),
        functools.partial(judging.run, workers, plant=arguments.plant),
        simplify_s=arguments.simplify_minutes * 60,
        avoided=frozenset(arguments.without),
    )
    if arguments.replay:
        scripts = iter([("the script", script_of(arguments.replay))])
    elif arguments.kept:
        scripts = iter(KEPT.items())
    else:
        numbers = itertools.count(arguments.first)
        scripts = campaign.draw(itertools.islice(numbers, arguments.scripts))
    began_s = told_s = time.monotonic()
    num_failures = 0
    try:
        for name, script in scripts:
            finding, failure = campaign.try_script(name, script)
            if failure is not None:
                num_failures += 1
                output.say(failure)
            elif finding.outcome != EQUAL:
                output.say(f"{name}: {finding.outcome}:\n    {script}\n{finding.brief[:_SHOWN]}")
            now_s = time.monotonic()
            if now_s - told_s > _TOLD_EACH_S:
                told_s = now_s
                rate = campaign.tally.num_scripts / (now_s - began_s) * 60
                counts = dict(campaign.tally.outcomes)
                output.say(f"up to {name}, {rate:.1f} a minute: {counts}")
            if now_s - began_s > arguments.minutes * 60:
                break
            if campaign.tally.num_scripts % _SCRIPTS_A_START == 0:
                workers.stop()
    except KeyboardInterrupt:
        output.say("interrupted")
    finally:
        workers.stop()
    output.say(campaign.tally)
    taken_s = time.monotonic() - began_s
    output.say(f"{taken_s:.0f} s, {campaign.tally.num_scripts / taken_s * 60:.1f} scripts a minute")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
