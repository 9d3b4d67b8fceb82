"""How long meetings of many ranks take, and what they cost their store.

    python -m benchmarks.meetings --ranks 8,64,256,1024

The store is a real TCPStore in a process of its own. Ranks are threads of a few processes, each
with the connection and the thread that a rank has; their group communicates nothing. Reported are
the seconds from the arrival of the last rank to the end of the meeting on the last one, the
requests of a rank (median and largest, with and without looks for the answer, of which there are
more the longer a rank waits), and the processor time of the store's process.
"""
# test: skip, minutes; tests/ranks/test_meetings.py counts requests of 64 ranks

from __future__ import annotations

import argparse

from benchmarks.meetings.measuring import measure

_HEADER = (
    "| ranks | meeting | s after the last | requests | most | looks | store's CPU s | errors |"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.meetings", description=__doc__)
    parser.add_argument("--ranks", default="8,64,256", help="how many, separated by commas")
    parser.add_argument("--late-s", type=float, default=0.0, help="how much later one rank comes")
    arguments = parser.parse_args()
    print(
        "| ranks | meeting | s after the last | requests | most | looks | store's CPU s | errors |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for size in map(int, arguments.ranks.split(",")):
        measure(size, arguments.late_s)


if __name__ == "__main__":
    main()
