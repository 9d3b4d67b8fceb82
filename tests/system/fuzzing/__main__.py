"""Run random cases for a long time, and print the failing ones.

python -m tests.system.fuzzing --cases 5000 --minutes 120 --log fuzz.log
python -m tests.system.fuzzing --inner inductor --check-code --ranks 1 --minutes 480
"""
# test: skip, it is for a night; tests/system/test_fuzz.py runs a few cases

from __future__ import annotations

import dataclasses
import functools
import sys

from tests.support.ranks import Ranks
from tests.system.campaigns import program
from tests.system.campaigns.campaign import Campaign
from tests.system.campaigns.source import value_of
from tests.system.fuzzing.checking import run_case
from tests.system.fuzzing.kept import KEPT
from tests.system.fuzzing.simplifying import simpler_cases
from tests.system.fuzzing.spec import Block, Case
from tests.system.fuzzing.strategies import draw_case, with_inner

PROGRAM = "tests.system.fuzzing"


def main() -> int:
    """Run; return 1 if a case failed."""
    parser = program.parser_of(PROGRAM, __doc__, num_cases=1000)
    parser.add_argument("--inner", default="", help="the inner compiler, instead of any")
    parser.add_argument("--feature", default="", help="only cases with it, as the tally names it")
    parser.add_argument("--ranks", type=int, default=2, help="how many processes train")
    parser.add_argument(
        "--check-code", action="store_true", help="compare the code of sections with their graphs"
    )
    arguments = parser.parse_args()
    program.prepare_process()
    workers = Ranks(arguments.ranks)

    def draw(number: int) -> Case | None:
        case = draw_case(number)
        if arguments.inner:
            case = with_inner(case, arguments.inner)
        if arguments.check_code:
            # As many sections as can be, and each graph once.
            case = dataclasses.replace(
                case, split="backward", cap_bytes=200, copied="", has_second=False
            )
        return case if not arguments.feature or arguments.feature in case.features() else None

    run = functools.partial(
        run_case, workers, plant=arguments.plant, checks_code=arguments.check_code
    )
    simplify_s = arguments.simplify_minutes * 60
    return program.run(
        arguments,
        Campaign(PROGRAM, run, simpler_cases, simplify_s=simplify_s),
        workers,
        draw=draw,
        read=lambda line: value_of(line, Case, {"Block": Block, "Case": Case}),
        kept=KEPT,
    )


if __name__ == "__main__":
    sys.exit(main())
