"""Run the tests on each fault, and say which tests find which, and which survive.

    python -m tests.kills                        # all, hours
    python -m tests.kills --only 'split/proof'   # by name
    python -m tests.kills --again --only 'STREAMS' --tests tests/split/test_guesses.py
    python -m tests.kills --found-by test_alike  # again, what a rewritten file found before
    python -m tests.kills --compare before.json  # is anything lost? Runs nothing

A fault's own tests run first, those of its module and those that `planted.py` names; then, if none
finds it, the quick tests of its room. A fault that is in the results already is run again with
`--again` only.
"""
# test: skip, hours; tests/system/test_kills.py plants one

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from pathlib import Path

from tests.kills import mutants, planted, results
from tests.kills.campaign import OWN_LIMIT_S, try_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression for names of faults")
    parser.add_argument(
        "--found-by", default="", help="again, those that tests of such a name found earlier"
    )
    parser.add_argument("--tests", nargs="*", help="run these alone, such as a new one")
    parser.add_argument("--mutants", type=int, default=mutants.NUM_MUTANTS, help="how many")
    parser.add_argument("--own", action="store_true", help="run a fault's own tests alone")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument(
        "--limit", type=float, default=OWN_LIMIT_S, help="seconds for its own tests, which may hang"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after")
    parser.add_argument("--results", type=Path, default=results.FOUND, help="where they are kept")
    parser.add_argument("--compare", type=Path, help="earlier results; nothing is run")
    arguments = parser.parse_args()
    found = results.load(arguments.results)
    if arguments.compare:
        lost = results.lost(results.load(arguments.compare), found)
        print("\n".join(lost) or "nothing is lost")
        return bool(lost)
    faults = [*planted.every(), *mutants.draw(arguments.mutants)]
    found = {fault.name: found[fault.name] for fault in faults if fault.name in found}
    is_wanted = re.compile(arguments.only).search
    chosen = [fault for fault in faults if is_wanted(fault.name)]
    if arguments.found_by:
        is_finder = re.compile(arguments.found_by).search
        chosen = [f for f in chosen if f.name in found and is_finder(found[f.name].found_by)]
    elif not arguments.again:
        chosen = [fault for fault in chosen if fault.name not in found]
    if arguments.tests:
        chosen = [
            dataclasses.replace(fault, tests=tuple(arguments.tests), has_all_tests=True)
            for fault in chosen
        ]
    until_s = time.monotonic() + 60 * arguments.minutes
    for name, outcome in try_all(chosen, arguments.jobs, not arguments.own, arguments.limit):
        found[name] = outcome
        results.save(arguments.results, found)
        print(f"{outcome.seconds:6.1f} s  {outcome.found_by}: {name}", flush=True)
        if time.monotonic() > until_s:
            break
    print("\n".join(["", *results.summarize(found), "", "What survives:"]))
    print("\n".join(results.survivors(found)) or "nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
