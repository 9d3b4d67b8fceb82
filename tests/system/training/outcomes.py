"""The words for what came of a training beside eager DDP's, for all that trains here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EQUAL = "equal"
EQUAL_TO_UNSPLIT = "equal to the unsplit compile, and to eager within rounding"
ROUNDED = "equal within rounding"
AS_EXACT = "as near as eager to what float64 gives"
AS_UNSPLIT = "as the unsplit compile, which differs from eager"
BOTH_RAISE = "eager DDP raises or hangs, and so do we"
NOT_REPEATED = "failed once, and not the second time"
REFUSED = "discarded: eager DDP raises"
REFUSED_UNSPLIT = "discarded: the unsplit compile raises"
BREAKS = "discarded: Dynamo breaks the graph"
OTHER_FRAMES = "discarded: Dynamo compiles other frames in a recomputation"
UNDETERMINED = "discarded: two runs differ without ddpopt"
NOT_ASKED = "discarded: the model has no such thing"
NOT_SPLIT = "not split, for an error"
DIFFERS = "differs"
CODE_DIFFERS = "a section's code differs from its graph"
RAISES = "raises or hangs"
SILENT = "trains where eager DDP raises or hangs"
STUCK = "stuck or dead"

DISCARDED = (REFUSED, REFUSED_UNSPLIT, BREAKS, OTHER_FRAMES, UNDETERMINED, NOT_ASKED)
FAILURES = (NOT_SPLIT, DIFFERS, CODE_DIFFERS, RAISES, SILENT, STUCK)
# After these a process may be in any state: an error has ended a backward, or a collective.
ENDED_EARLY = (BOTH_RAISE, REFUSED, REFUSED_UNSPLIT, BREAKS, OTHER_FRAMES, RAISES, SILENT)
OUTCOMES = (
    EQUAL,
    EQUAL_TO_UNSPLIT,
    ROUNDED,
    AS_EXACT,
    AS_UNSPLIT,
    BOTH_RAISE,
    NOT_REPEATED,
    *DISCARDED,
    *FAILURES,
)  # from good to bad


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of a training.

    `sections` are those of each graph: 1 for one that is whole. `remarks` are what else is counted
    of it: why graphs are whole, or are cut in forward instead, or that buckets changed. `num_codes`
    counts the backward sections whose code was compared with their graphs.
    """

    outcome: str
    detail: str = ""
    sections: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()
    num_buckets: int = 0
    num_codes: int = 0

    @property
    def is_failure(self) -> bool:
        """Whether ddpopt is to blame."""
        return self.outcome in FAILURES

    @property
    def is_discarded(self) -> bool:
        """Whether it says nothing of ddpopt."""
        return self.outcome in DISCARDED

    @property
    def is_split(self) -> bool:
        """Whether a graph has two sections or more."""
        return max(self.sections, default=1) > 1

    @property
    def kind(self) -> str:
        """The outcome, where gloo's choice to raise or to end the process makes no difference."""
        return RAISES if self.outcome == STUCK else self.outcome

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Finding:
        """Return what was written as JSON, which has no tuples."""
        lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
        return cls(**{**row, **lists})

    def headline(self) -> str:
        """Return the outcome, the sections, and the end of what is said of it."""
        sections = " + ".join(map(str, self.sections)) or "no"
        last = self.detail.strip().splitlines()[-1:]
        said = [self.outcome, f"{sections} sections for {self.num_buckets} buckets", *last]
        return "; ".join(said)

    @property
    def brief(self) -> str:
        """The detail without the lines of tracebacks."""
        lines = self.detail.splitlines()
        return "\n".join(line for line in lines if line and not line.startswith((" ", "Traceback")))
