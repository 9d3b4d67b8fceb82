"""Ranks that come, work, fail, fall silent and go on, and a store that is slow or hangs.

Two machines: blocks, and decisions. Each rule is what a rank, its machine or the store does next;
time passes only by `pass_time`. What is checked after each rule are the promises of
`ranks/meetings.py`, from what the machine has done to each rank.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddpopt.errors import PeerError
from ddpopt.ranks import meetings, store
from ddpopt.ranks.meetings import JointDecision, monitored_block, next_key
from tests.support.simulated_ranks import World

SIZE = 3
LIMIT_S = 10.0
CONNECTING_S = 1.5 * LIMIT_S  # the longest that connecting may take, without an answer
GO = "go"  # what a rank is told that goes on
GONE = "store has gone"
# A rank reports ten times in a limit, and is looked at ten times; and a few calls of the store.
_SLACK_S = 0.3 * LIMIT_S

_rank = st.integers(0, SIZE - 1)
_problems = st.sampled_from(["", "", "", "it cannot"])
_seconds = st.sampled_from([0.02, 0.3, 1.0, 0.4 * LIMIT_S, 0.95 * LIMIT_S, 1.5 * LIMIT_S])


@dataclass(slots=True)
class Stay:
    """A rank in a meeting: since when, what it is to do, and what it was told."""

    rank: int
    came_s: float
    is_in: bool = False  # it has begun its work, or has announced itself
    in_s: float = 0.0
    # What it does next: None to work on; "" to end its work, or decide, without a problem.
    ending: str | None = None
    ended_s: float = 0.0
    told: str | None = None
    told_s: float = 0.0


@dataclass(slots=True)
class _Absence:
    """A rank's process does not run."""

    began_s: float
    ended_s: float = float("inf")


class Meetings(RuleBasedStateMachine):
    """What ranks of all meetings do, and what happens to them."""

    def __init__(self) -> None:
        super().__init__()
        # By meeting, then by rank.
        self.meetings: list[dict[int, Stay]] = []
        self._absences: list[list[_Absence]] = [[] for _ in range(SIZE)]
        self.disturbed_s = 0.0  # when something last happened that may make others wait anew
        self.store_changed_s = 0.0
        self.slowest_s = 1e-3  # of the store's calls
        self._stack = contextlib.ExitStack()

    @initialize(seed=st.integers(0, 1000), connecting_s=st.sampled_from([0.0, 0.0, 0.4]))
    def begin(self, seed: int, connecting_s: float) -> None:
        self.world = World(SIZE, seed)
        self.world.store.connecting_s = connecting_s
        self._stack.enter_context(mock.patch.object(store, "_CONNECTING_S", CONNECTING_S))
        self._stack.enter_context(mock.patch.object(meetings, "_POLL_S", LIMIT_S / 20))
        self._stack.enter_context(self.world.simulated())

    def teardown(self) -> None:
        try:
            self.pass_time(2 * LIMIT_S + self._slack_s() + 1)
            self.promises_hold()
        finally:
            self._stack.close()

    # ---- Rules ---------------------------------------------------------------------------------

    @rule(seconds=_seconds)
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(rank=_rank)
    def stop(self, rank: int) -> None:
        """It ends, or its machine is cut off, or it is held up."""
        process = self.world.processes[rank]
        if not process.is_stopped:
            process.is_stopped = True
            absences = self._absences[rank]
            # Who ran for less than from one report to the next has not reported.
            if absences and self.world.now_s - absences[-1].ended_s < LIMIT_S / 8:
                absences[-1].ended_s = float("inf")
            else:
                absences.append(_Absence(self.world.now_s))
            self.disturb()

    @precondition(lambda self: any(process.is_stopped for process in self.world.processes))
    @rule()
    def go_on(self) -> None:
        """Those that were stopped run again."""
        for process in self.world.processes:
            if process.is_stopped:
                process.is_stopped = False
                self._absences[process.rank][-1].ended_s = self.world.now_s
        self.disturb()

    @rule(share=st.sampled_from([1e-4, 2e-3, 1e-2, 0.1]))
    def slow_store(self, share: float) -> None:
        self.world.store.latency_s = share * LIMIT_S
        self.slowest_s = max(self.slowest_s, share * LIMIT_S)
        self._change_store()

    @precondition(lambda self: len(self.meetings) > 1)
    @rule()
    def hang_store(self) -> None:
        self.world.store.hangs = True
        self._change_store()

    def _change_store(self) -> None:
        self.disturb()
        self.store_changed_s = self.world.now_s

    @precondition(lambda self: self.working())
    @rule(data=st.data(), problem=_problems)
    def end(self, data: st.DataObject, problem: str) -> None:
        """One that works comes to its end, or to its decision, maybe with a problem."""
        index = data.draw(st.integers(0, len(self.working()) - 1))
        self.end_work(self.working()[index], problem)

    @precondition(lambda self: self.working())
    @rule(seconds=_seconds)
    def all_end(self, seconds: float) -> None:
        for stay in self.working():
            self.end_work(stay, "")
        self.pass_time(seconds)

    def end_work(self, stay: Stay, problem: str) -> None:
        stay.ending, stay.ended_s = problem, self.world.now_s
        self.disturb()

    @rule(rank=_rank)
    def come(self, rank: int) -> None:
        """A rank begins its next meeting, if it is in none."""
        if any(rank in meeting and meeting[rank].told is None for meeting in self.meetings):
            return
        number = sum(rank in meeting for meeting in self.meetings)
        if len(self.meetings) == number:
            self.meetings.append({})
        stay = self.meetings[number][rank] = Stay(rank, self.world.now_s)

        def told() -> None:
            try:
                answer = self.meet(stay)
            except PeerError as error:
                answer = str(error)
            stay.told, stay.told_s = answer, self.world.now_s

        self.world.start(self.world.processes[rank], told)
        self.disturb()

    @rule(rank=_rank, num_calls=st.integers(1, 6))
    def come_and_stop(self, rank: int, num_calls: int) -> None:
        """It stops between two calls of the store, or in one."""
        self.come(rank)
        self.pass_time(num_calls * self.world.store.latency_s / 2)
        self.stop(rank)

    @rule(seconds=_seconds)
    def all_come(self, seconds: float) -> None:
        for rank in range(SIZE):
            self.come(rank)
        self.pass_time(seconds)

    # ---- What subclasses use -------------------------------------------------------------------

    def disturb(self) -> None:
        self.disturbed_s = self.world.now_s

    def work(self, stay: Stay) -> str:
        """What a rank does in a meeting until the machine ends it: how it ends."""
        stay.is_in, stay.in_s = True, self.world.now_s
        self.world.wait(lambda: stay.ending is not None)
        assert stay.ending is not None
        return stay.ending

    def stays(self) -> list[Stay]:
        return [stay for meeting in self.meetings for stay in meeting.values()]

    def working(self) -> list[Stay]:
        return [stay for stay in self.stays() if stay.is_in and stay.ending is None]

    def is_running(self, rank: int) -> bool:
        return not self.world.processes[rank].is_stopped

    def longest_absence_s(self, rank: int, since_s: float, until_s: float) -> float:
        """The longest time in which a rank's process did not run."""
        parts = [min(a.ended_s, until_s) - max(a.began_s, since_s) for a in self._absences[rank]]
        return max(0.0, *parts) if parts else 0.0

    # ---- Promises ------------------------------------------------------------------------------

    @invariant()
    def promises_hold(self) -> None:
        for meeting in self.meetings:
            self._all_are_told_the_same(meeting)
            for stay in meeting.values():
                self._does_not_wait_too_long(stay, meeting)
                if stay.told and GONE in stay.told:
                    assert self.world.store.hangs
                elif stay.told:
                    self.check_told(stay, meeting)

    def _all_are_told_the_same(self, meeting: dict[int, Stay]) -> None:
        answers = [stay.told for stay in meeting.values() if stay.told]
        assert len({answer for answer in answers if self.is_answer(answer)}) <= 1, answers

    def _does_not_wait_too_long(self, stay: Stay, meeting: dict[int, Stay]) -> None:
        if not self.is_running(stay.rank) or not self.has_to_be_told(stay, meeting):
            return
        until_s = self.world.now_s if stay.told is None else stay.told_s
        waits_s = until_s - self.waits_since_s(stay)
        limit_s = self.limit_s(stay, meeting) + self._slack_s()
        assert waits_s <= limit_s, f"rank {stay.rank} waits for {waits_s} s"

    def _slack_s(self) -> float:
        """How much longer than the limit a rank may wait."""
        slack_s = _SLACK_S + 10 * self.slowest_s + SIZE * SIZE * self.world.store.connecting_s
        return slack_s + (CONNECTING_S if self.world.store.hangs else 0.0)

    def somebody_did_not_wait(self, meeting: dict[int, Stay]) -> bool:
        """Whether one rank knew the answer after a few calls of the store, if none was held up."""
        if any(self._absences) or self.world.store.connecting_s:
            return True
        waits_s = [stay.told_s - stay.ended_s for stay in meeting.values() if stay.told]
        return min(waits_s) <= (4 + SIZE) * self.slowest_s

    def is_answer(self, told: str) -> bool:
        """Whether this is what a meeting says to all."""
        return GONE not in told

    def meet(self, stay: Stay) -> str:
        """Run a meeting, with `work` in it; return what the rank is told."""
        raise NotImplementedError

    def waits_since_s(self, stay: Stay) -> float:
        """Since when nothing has happened for which a rank may wait anew."""
        raise NotImplementedError

    def limit_s(self, stay: Stay, meeting: dict[int, Stay]) -> float:
        """How long a rank may wait since then."""
        raise NotImplementedError

    def has_to_be_told(self, stay: Stay, meeting: dict[int, Stay]) -> bool:
        """Whether a rank that has not been told may not wait on."""
        raise NotImplementedError

    def check_told(self, stay: Stay, meeting: dict[int, Stay]) -> None:
        """What a rank was told is so."""
        raise NotImplementedError


class Blocks(Meetings):
    """Ranks in blocks, one after another, each of which waits for all."""

    _RAISED = "raised itself"

    def meet(self, stay: Stay) -> str:
        group = self.world.group_of(stay.rank)
        try:
            with monitored_block(group, "work", "thinking", silence_s=LIMIT_S):
                if problem := self.work(stay):
                    raise KeyError(problem) if stay.rank else KeyboardInterrupt(problem)
        except (KeyError, KeyboardInterrupt):
            return self._RAISED
        return GO

    # ---- Promises ------------------------------------------------------------------------------

    def is_answer(self, told: str) -> bool:
        return GONE not in told and told != self._RAISED

    def waits_since_s(self, stay: Stay) -> float:
        return self.disturbed_s

    def limit_s(self, stay: Stay, meeting: dict[int, Stay]) -> float:
        # Who stopped while it came is waited for as one that is absent, and then as a silent one.
        is_coming = any(stay.told is None and not stay.is_in for stay in self.stays())
        return 2 * LIMIT_S if is_coming else LIMIT_S

    def has_to_be_told(self, stay: Stay, meeting: dict[int, Stay]) -> bool:
        """But who waits for a rank that works waits on, however long it does."""
        if stay.is_in and stay.ending is None:
            return False
        if stay.ending:  # it has failed, and waits for nobody
            return True
        return not any(
            other.ending is None and self.is_running(other.rank) for other in meeting.values()
        )

    def check_told(self, stay: Stay, meeting: dict[int, Stay]) -> None:
        assert stay.told is not None
        if stay.told == GO:
            assert len(meeting) == SIZE, "a rank that has not come is not waited for"
            assert all(other.ending == "" for other in meeting.values())
            assert all(other.ended_s <= stay.told_s for other in meeting.values())
            assert self.somebody_did_not_wait(meeting), "the last rank waits, and for nobody"
        elif stay.told == self._RAISED:
            assert stay.ending
        elif match := re.match(r"work: rank (\d) raised in thinking, (\w+)", stay.told):
            assert meeting[int(match[1])].ending
            assert (match[2] == "KeyError") == (match[1] != "0")
        else:
            match = re.match(r"work: rank (\d) has been silent .* last report: (\w+)", stay.told)
            assert match, stay.told
            self._check_silent(int(match[1]), match[2], stay, meeting)

    def _check_silent(self, rank: int, report: str, stay: Stay, meeting: dict[int, Stay]) -> None:
        """A rank that was called silent was so for nearly the limit, counted from its reports."""
        least_s = LIMIT_S - _SLACK_S / 2
        blamed = meeting.get(rank)
        if report == "absent":
            first_s = min(other.came_s for other in meeting.values())
            came_s = blamed.in_s if blamed and blamed.is_in else stay.told_s
            assert came_s - first_s > least_s, f"rank {rank} is called absent"
        else:
            assert blamed is not None
            away_s = self.longest_absence_s(rank, blamed.came_s, stay.told_s)
            assert away_s > least_s, f"rank {rank} was away for {away_s} s only"


class Decisions(Meetings):
    """Ranks that decide, one decision after another, each announced before a collective."""

    def meet(self, stay: Stay) -> str:
        group = self.world.group_of(stay.rank)
        decision = JointDecision(group, "looking", next_key(group, "look"), LIMIT_S)
        problem = self.work(stay)
        is_for_now = bool(stay.rank and problem)  # rank 0's problem is for good
        refusal = decision.decide(problem, **({"is_for_now": True} if is_for_now else {}))
        if refusal is None:
            return GO
        return f"{refusal.reason}{' for now' if refusal.is_for_now else ''}"

    # ---- Promises ------------------------------------------------------------------------------

    def waits_since_s(self, stay: Stay) -> float:
        since_s = max(stay.ended_s, self.store_changed_s)
        for absence in self._absences[stay.rank]:
            if stay.told is None or absence.ended_s < stay.told_s:
                since_s = max(since_s, absence.ended_s)
        return since_s

    def limit_s(self, stay: Stay, meeting: dict[int, Stay]) -> float:
        # Another one that looks up who is late, and may have stopped, is waited for as long again.
        others = [other for other in meeting.values() if other is not stay and other.ending == ""]
        has_stopped = any(
            absence.ended_s > other.ended_s
            for other in others
            for absence in self._absences[other.rank]
        )
        return 2 * LIMIT_S if has_stopped else LIMIT_S

    def has_to_be_told(self, stay: Stay, meeting: dict[int, Stay]) -> bool:
        return stay.ending is not None

    def check_told(self, stay: Stay, meeting: dict[int, Stay]) -> None:
        assert stay.told is not None
        deciding = [other for other in meeting.values() if other.ending is not None]
        first_s = min(other.ended_s for other in deciding)
        if stay.told == GO:
            assert len(deciding) == SIZE
            assert all(other.ending == "" for other in deciding)
            assert self.somebody_did_not_wait(meeting), "the last rank waits, and for nobody"
        elif match := re.match(r"on rank (\d): it cannot( for now)?$", stay.told):
            to_blame = meeting[int(match[1])]
            assert to_blame.ending
            assert bool(match[2]) == (match[1] != "0")
        elif match := re.match(r"(ranks? ([\d, ]+)|another rank) did not begin it", stay.told):
            assert self.somebody_did_not_wait(meeting), "a rank that cannot come is waited for"
            named = {int(rank) for rank in (match[2] or "").split(",") if rank}
            late = {
                rank
                for rank in range(SIZE)
                if rank not in meeting or not meeting[rank].is_in or meeting[rank].in_s >= first_s
            }
            assert late, f"{stay.told}, and all had announced themselves"
            assert named <= late, f"{stay.told}, and only {late} had not"
        else:
            match = re.match(r"ranks? ([\d, ]+) did not come within", stay.told)
            assert match, stay.told
            for rank in map(int, match[1].split(",")):
                blamed = meeting[rank]
                is_late = blamed.ending is None or blamed.ended_s > first_s + LIMIT_S - _SLACK_S
                assert is_late or self.longest_absence_s(rank, first_s, stay.told_s) > 0
