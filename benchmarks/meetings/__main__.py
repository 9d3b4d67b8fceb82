"""How long meetings of many ranks take, what they cost their store, and what ranks send.

    python -m benchmarks.meetings --ranks 8,64,256,1024

Three tables. In the first the store is a real TCPStore in a process of its own. Ranks are threads
of a few processes, each with the connection and the thread that a rank has; their group
communicates nothing. Reported are the seconds from the arrival of the last rank to the end of the
meeting on the last one, the requests of a rank (median and largest, with and without looks for the
answer, of which there are more the longer a rank waits), and the processor time of the store's
process. In the second, ranks that are threads compare facts, and what they send is counted. In the
third, ranks that are processes train with DDP and `buckets="auto"` until a search is over.
"""
# test: skip, minutes; tests/ranks/test_meetings.py counts requests of 64 ranks

from __future__ import annotations

import argparse
import statistics

from benchmarks.harness.report import table
from benchmarks.meetings.exchanging import KINDS, count_traffic
from benchmarks.meetings.measuring import measure
from benchmarks.meetings.searching import count_search

_MEETINGS = (
    "| ranks | meeting | s after the last | requests | most | looks | store's CPU s | errors |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.meetings", description=__doc__)
    parser.add_argument("--ranks", default="8,64,256", help="how many, separated by commas")
    parser.add_argument("--late-s", type=float, default=0.0, help="how much later one rank comes")
    parser.add_argument("--search", default="2,4,8", help="how many processes search for buckets")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.ranks.split(",") if size]
    if sizes:
        print(_MEETINGS)
    for size in sizes:
        measure(size, arguments.late_s)
    print("\n" + "\n".join(_tell_traffic(sizes)))
    searching = [int(size) for size in arguments.search.split(",") if size]
    print("\n" + "\n".join(_tell_searches(searching)))


def _tell_traffic(sizes: list[int]) -> list[str]:
    """The table of what ranks send where they compare something, or tell rank 0."""
    rows = []
    for size in sizes:
        for kind in KINDS:
            first, *others = count_traffic(size, kind)
            sent = max(own.sent for own in others)
            received = max(own.received for own in others)
            numbers = map(str, (sent, received, first.sent, first.received))
            rows.append([str(size), kind, *numbers])
    header = ("ranks", "what they do", "bytes sent", "received", "rank 0 sends", "receives")
    return table(header, rows)


def _tell_searches(sizes: list[int]) -> list[str]:
    """The table of what a whole search asks of the store, and sends as objects."""
    rows = []
    for size in sizes:
        first, *others = asked = count_search(size)
        requests = max(own.requests for own in asked)
        looks = statistics.median(own.looks for own in asked)
        sent = max(own.sent_bytes for own in others)
        rows.append([str(size), str(requests), f"{looks:.0f}", str(sent), str(first.sent_bytes)])
    header = ("ranks", "a search's requests", "looks", "bytes sent", "rank 0 sends")
    return table(header, rows)


if __name__ == "__main__":
    main()
