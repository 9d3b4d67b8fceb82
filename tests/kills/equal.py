"""Faults that change nothing that anybody could notice, each with the reason."""

from __future__ import annotations

EQUAL: dict[str, str] = {
    "split/sections.py: `_FINE_ENDS = (1 / 64, 1 / 32, *(k / 16 for k in range(1, 16)), 31 / 32, "
    "63 / 64)`: 16 becomes 17 (2)": (
        "the end that is added lies behind all bytes, where no parameter begins"
    ),
    "planning/timeline.py: `beside_s = min(transfer_s, max(0.0, ready_s[-1] - begin_s) / "
    "cost.contention)`: / becomes *": (
        "it differs where a transfer ends behind the last gradient, and asked is what was lost "
        "before each gradient"
    ),
    "planning/simulation.py: `return json.dumps(content, indent=1, allow_nan=False)`: False "
    "becomes True": "all numbers of a simulation are finite: those of which it is made are checked",
    "planning/merging.py: `return buckets_of_caps(profile, caps_bytes or [1])`: 1 becomes 2": (
        "there are no caps where no gradient has elements, and then no cap above 0 closes a bucket"
    ),
    "split/aliases.py: `if not in_arguments:`: not in_arguments becomes False": (
        "where no argument is written the walk finds nothing: it is left out for its time"
    ),
    "planning/calibrate.py: `tiny.add_(1)`: 1 becomes 2": "what is added is never looked at",
    "split/facts.py: `memory = memory_by_maker.setdefault(made_by, Memory(-1 - "
    "len(memory_by_maker)))`: 1 becomes 2": "the numbers are below zero, and each is another",
    "planning/estimates.py: `other_device = torch.accelerator.current_accelerator("
    'check_available=True) or "cpu"`: True becomes False': (
        "it differs where torch was built for GPUs that the machine lacks, and test_estimates fails"
    ),
    "split/backward.py: `if all(source is other for source, other in sources.items()):`: "
    "all(source is other for source, other in sources.items()) becomes False": (
        "a view of memory without a snapshot is made once more, by the same call"
    ),
    "split/arrival.py: `return (5 if index < first_earlier_index else 3, 0, -index)`: "
    "5 becomes 6": ("the other parameters with 5 are those of another rule"),
    "ranks/meetings.py: `if not answer and time.monotonic() >= next_look_s:`: >= becomes >": (
        "the first look comes one poll later"
    ),
}
