"""The faults of `benchmarks.faults`, and what their workers are told; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

NUM_RANKS = 3
FAULT_STEP = 3
TIMEOUT_S = 20.0  # of the process group
LONG_TIMEOUT_S = 600.0  # where nothing is to be noticed, but ranks may compile one after the other

FORWARD = "forward"
SECTIONS = "between sections of backward"
ALLREDUCE = "inside an allreduce"
OPTIMIZER = "optimizer step"
COMPILE = "compile"
ANYWHERE = "while training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault: `fault` happens to `rank`, `where` it is in a step or in its first compile.

    `duration_s` is None for good. `rate` is that of the links, as tc wants it.
    """

    fault: str
    where: str
    split: str = "forward"
    rank: int = 2
    duration_s: float | None = None
    rate: str = "1gbit"

    @property
    def is_survived(self) -> bool:
        return self.fault == NO_FAULT or self.duration_s is not None

    @property
    def row(self) -> str:
        """The first cells of its row in the table."""
        duration = "" if self.duration_s is None else f" for {self.duration_s:g} s"
        for_good = " for good" if self.fault in (LINK, STOP) and not duration else ""
        return f"{self.fault}{duration}{for_good}, rank {self.rank} | {self.where} | {self.split}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one rank is to do; `is_slow` has it pause in each step, so that it can be disturbed."""

    rank: int
    split: str
    where: str  # empty in ranks that do nothing to themselves
    num_steps: int
    is_slow: bool
    timeout_s: float


KILL, LINK, STOP, NO_FAULT = "SIGKILL", "link down", "SIGSTOP", "none"

CASES = (
    Case(fault=KILL, where=FORWARD),
    Case(fault=KILL, where=FORWARD, split="backward"),
    Case(fault=KILL, where=FORWARD, rank=0),
    Case(fault=KILL, where=SECTIONS),
    Case(fault=KILL, where=SECTIONS, split="backward"),
    Case(fault=KILL, where=ALLREDUCE, rate="20mbit"),
    Case(fault=KILL, where=ALLREDUCE, split="backward", rate="20mbit"),
    Case(fault=KILL, where=OPTIMIZER),
    Case(fault=KILL, where=COMPILE),
    Case(fault=KILL, where=COMPILE, split="backward"),
    Case(fault=KILL, where=COMPILE, rank=0),  # the others compile without a store
    Case(fault=LINK, where=ANYWHERE, duration_s=2.0),
    Case(fault=LINK, where=ANYWHERE),
    Case(fault=LINK, where=ANYWHERE, rank=0),
    Case(fault=STOP, where=ANYWHERE, duration_s=5.0),
    Case(fault=STOP, where=ANYWHERE),
)
