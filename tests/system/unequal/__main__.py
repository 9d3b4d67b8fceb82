"""Run random scripts for a long time, and print the failing ones.

python -m tests.system.unequal --minutes 120 --log unequal.log
"""
# test: skip, it is for a night; tests/system/test_unequal.py runs a few scripts

from __future__ import annotations

import functools
import sys

from tests.support.ranks import Ranks
from tests.system.campaigns import program
from tests.system.campaigns.campaign import Campaign
from tests.system.unequal import judging
from tests.system.unequal.actions import NUM_RANKS
from tests.system.unequal.kept import KEPT
from tests.system.unequal.machine import AVOIDABLE, draw_script
from tests.system.unequal.script import script_of
from tests.system.unequal.simplifying import simpler_scripts

PROGRAM = "tests.system.unequal"


def main() -> int:
    """Run; return 1 if a script failed."""
    parser = program.parser_of(PROGRAM, __doc__, num_cases=None)
    parser.add_argument("--without", choices=AVOIDABLE, nargs="*", default=[], help="kinds")
    arguments = parser.parse_args()
    program.prepare_process()
    workers = Ranks(NUM_RANKS, is_forked=True)
    campaign = Campaign(
        PROGRAM,
        functools.partial(judging.run, workers, plant=arguments.plant),
        simpler_scripts,
        simplify_s=arguments.simplify_minutes * 60,
        judge=functools.partial(judging.judge, workers, plant=arguments.plant),
    )
    return program.run(
        arguments,
        campaign,
        workers,
        draw=functools.partial(draw_script, avoided=frozenset(arguments.without)),
        read=script_of,
        kept=KEPT,
    )


if __name__ == "__main__":
    sys.exit(main())
