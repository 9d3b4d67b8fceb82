"""`ddpopt trace merge`: merge all ranks' traces into one, with their clocks aligned."""

from __future__ import annotations

import argparse
import json

from ddpopt._text import write_text
from ddpopt.cli.output import InputError, Report, Screen, Table, explained
from ddpopt.inspection.traces import merge_traces, trace_files


def run(args: argparse.Namespace, _screen: Screen) -> Report:
    """Merge, write, and report by how much each rank's clock was set back."""
    if args.output.resolve() in [path.resolve() for path in trace_files(args.paths)]:
        raise InputError(f"--output is {args.output}, which is one of the traces; name another")
    with explained("a trace cannot be read"):
        merged = merge_traces(args.paths)
    with explained(f"{args.output} cannot be written"):
        write_text(args.output, json.dumps(merged))
    offsets: dict[str, float | None] = merged["otherData"]["clock_offsets_s"]
    rows = [
        (rank, "unknown" if offset is None else f"{offset * 1e3:.3f}")
        for rank, offset in offsets.items()
    ]
    num_events = len(merged["traceEvents"])
    return Report(
        data={"output": str(args.output), "num_events": num_events, "clock_offsets_s": offsets},
        parts=[
            Table(header=("rank", "clock ahead by ms"), rows=rows),
            f"written: {args.output}; open it in https://ui.perfetto.dev or chrome://tracing",
        ],
    )
