"""Lines about overlap: all peers of one model on one emulated network, in turns.

Each peer has a process of its own, and they compile at the same time. Then they take turns, A B C
A B C, so that the machine's drift falls on all; ratios are those of the rounds.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu.findings import Findings, UnavailableError, describe
from benchmarks.harness.cluster import Cluster
from benchmarks.harness.models import MissingPackageError, find_model
from benchmarks.harness.peers import PEERS
from benchmarks.harness.tables import spread
from benchmarks.harness.teams import Setting, Team, TeamError, open_team

# Those that are there are measured; `sharded` is not, as long as there is no such peer.
_PEERS = ("eager", "nosplit", "intree", "forward", "backward", "auto", "sharded")
_BASES = ("eager", "nosplit", "intree")
_NUM_UNTIMED, _NUM_TIMED = 1, 2
_LOSS_TOLERANCE = 0.02  # with bfloat16; the losses are those of the first step
_T = TypeVar("_T")
_Turn = dict[str, float]  # seconds
_ONE_RANK = Cluster(num_ranks=1, local_ranks=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is measured: a model with one compiler, on networks of these rates."""

    model: str
    inner: str
    rates_gbit: Sequence[float]
    num_ranks: int
    rounds: int
    cap_mb: float | None = None
    peers: Sequence[str] = _PEERS


def measure_model(findings: Findings, device: str, **arguments: Any) -> None:
    """Measure all peers of an `Experiment` at all rates, and what each costs."""
    own = Experiment(**arguments)
    known = [peer for peer in own.peers if peer in PEERS]
    if not findings.check("the model's package", lambda: _check_package(own.model)):
        return
    with _teams(device, model=own.model, inner=own.inner, cap_mb=own.cap_mb, peers=known) as teams:
        _compile(findings, teams)
        for gbit in own.rates_gbit:
            title = f"{own.model}, {own.num_ranks} ranks at {gbit:g} Gbit/s"
            findings.check(title, functools.partial(_measure, findings, own, teams, gbit, title))
        findings.check("what each costs", lambda: _measure_costs(findings, own.model, teams))


def see_overlap(
    findings: Findings, device: str, *, gbit: float, num_ranks: int, **arguments: Any
) -> None:
    """Profile real steps: split, products run beside communication, and unsplit none does.

    That is a matter of order, so a busy machine changes nothing. `arguments` are those of `_teams`.
    """
    beside: dict[str, int] = {}
    with _teams(device, **arguments, peers=("nosplit", "backward")) as teams:
        _compile(findings, teams)
        for name, team in teams.items():

            def look(name: str = name, team: Team = team) -> str:
                path = findings.folder.parent / f"profile-{name}-{device}.json"
                team.ask("use_rate", gbit, num_ranks)
                seen = findings.found.figures[name] = team.ask("profile", str(path))
                if not seen["num_products"]:
                    raise AssertionError(f"no matrix product was recognised in {path.name}")
                if device == "cuda" and seen["num_streams"] < 2:
                    raise AssertionError(f"kernels ran on {seen['num_streams']} stream alone")
                beside[name] = seen["num_beside"]
                return (
                    f"{seen['num_beside']} of {seen['num_products']} matrix products began beside "
                    f"communication, of which {seen['hidden_ms']:.1f} of "
                    f"{seen['communication_ms']:.1f} ms were hidden; trace in {path.name}"
                )

            findings.check(f"profile of {name}", look)

    def compare() -> None:
        if not beside.get("backward", 0) > beside.get("nosplit", 0):
            raise AssertionError(f"matrix products that began beside communication: {beside}")

    findings.check("split, more runs beside communication than unsplit", compare)


def _check_package(model: str) -> None:
    try:
        find_model(model).num_parameters()
    except MissingPackageError as error:
        raise UnavailableError(str(error)) from None


@contextlib.contextmanager
def _teams(
    device: str, *, model: str, inner: str, cap_mb: float | None, peers: Sequence[str]
) -> Iterator[dict[str, Team]]:
    """Start a process for each peer, each with a cache of its own."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddpopt-gpu-")))
        setting = Setting(
            inner=inner,
            num_threads=1 if device == "cpu" else None,
            folder=folder,
            worker="benchmarks.gpu.worker",
            device=device,
        )
        yield {
            peer: stack.enter_context(
                open_team(_ONE_RANK, setting, peer, model, cap_mb, folder / peer)
            )
            for peer in peers
        }


def _compile(findings: Findings, teams: dict[str, Team]) -> None:
    """Have all peers take their first steps at once; those that fail are taken out."""

    def first_steps(team: Team) -> Any:
        team.wait_until_ready()
        return team.first_steps()

    with ThreadPoolExecutor(len(teams)) as pool:
        first = {name: pool.submit(first_steps, team) for name, team in teams.items()}
    losses: dict[str, float] = {}
    for name, future in first.items():

        def note(name: str = name, ask: Callable[[], Any] = future.result) -> str:
            steps = ask()
            losses[name] = steps.loss
            base = next(iter(losses.values()))
            if not abs(steps.loss - base) <= _LOSS_TOLERANCE * abs(base):
                raise AssertionError(f"its first loss is {steps.loss}, {losses}")
            findings.found.figures.setdefault("first steps", {})[name] = {
                "compile_s": steps.compile_s,
                "loss": steps.loss,
            }
            return f"first step {steps.compile_s:.1f} s, beside those of the other peers"

        if not findings.check(f"{name} compiles", note):
            del teams[name]


# ---- overlap ----------------------------------------------------------------------------------


def _measure(
    findings: Findings, own: Experiment, teams: dict[str, Team], gbit: float, title: str
) -> str:
    """Measure the peers in turns, and add their table; one that fails is taken out of `teams`."""
    failures: list[str] = []

    def ask_all(ask: Callable[[Team], _T]) -> dict[str, _T]:
        answers = {}
        for name, team in list(teams.items()):
            try:
                answers[name] = ask(team)
            except TeamError as error:  # noqa: PERF203  # the others go on
                failures.append(f"{name}: {describe(error)}")
                del teams[name]
        return answers

    num_buckets = ask_all(lambda team: team.ask("use_rate", gbit, own.num_ranks))
    communication_s = min(ask_all(lambda team: team.ask("communication_s")).values())
    rounds = [ask_all(_take_turn) for _ in range(own.rounds)]
    turns = {name: [taken[name] for taken in rounds] for name in teams}
    alone = [statistics.median(turn["alone_s"] for turn in taken) for taken in turns.values()]
    bound_s = max(min(alone), communication_s)
    peers = {
        name: {"num_buckets": num_buckets[name], **_figures(turns, name, bound_s)} for name in turns
    }
    findings.found.figures[title] = {
        "computation_s": min(alone),
        "communication_s": communication_s,
        "bound_s": bound_s,
        "peers": peers,
    }
    header = ["peer", "buckets", "iteration ms", "backward ms", "exposed ms", "of bound"]
    header += [f"iteration of {base}'s" for base in _BASES if base in turns]
    rows = [[name, *_cells(figures)] for name, figures in peers.items()]
    findings.table(f"{title}; median (quartiles) of {own.rounds} rounds", header, rows)
    if failures:
        raise AssertionError("; ".join(failures))
    return (
        f"computation alone {min(alone) * 1e3:.1f} ms, communication alone "
        f"{communication_s * 1e3:.1f} ms, bound {bound_s * 1e3:.1f} ms"
    )


def _figures(turns: Mapping[str, Sequence[_Turn]], name: str, bound_s: float) -> dict[str, Any]:
    """Return what was measured of one peer: spreads, and ratios of the same round."""
    own = turns[name]
    figures: dict[str, Any] = {
        column: spread([turn[column] for turn in own])._asdict() for column in own[0]
    }
    figures["over_bound"] = figures["iteration_s"]["median"] / bound_s
    for base in (base for base in _BASES if base in turns):
        for column in ("iteration_s", "backward_s"):
            ratios = [a[column] / b[column] for a, b in zip(own, turns[base], strict=True)]
            figures[f"{column}_of_{base}"] = spread(ratios)._asdict()
    return figures


def _take_turn(team: Team) -> _Turn:
    steps = team.steps(_NUM_UNTIMED, _NUM_TIMED)
    lone = team.steps(_NUM_UNTIMED, _NUM_TIMED, is_alone=True)
    turn = {
        column: statistics.median(getattr(step, column) for step in steps)
        for column in ("iteration_s", "forward_s", "backward_s", "optimizer_s")
    }
    turn["alone_s"] = statistics.median(step.iteration_s for step in lone)
    turn["exposed_s"] = turn["iteration_s"] - turn["alone_s"]
    return turn


def _cells(figures: dict[str, Any]) -> Iterator[str]:
    yield str(figures["num_buckets"])
    for column in ("iteration_s", "backward_s", "exposed_s"):
        low, high = figures[column]["low"] * 1e3, figures[column]["high"] * 1e3
        yield f"{figures[column]['median'] * 1e3:.1f} ({low:.1f} to {high:.1f})"
    yield f"{figures['over_bound']:.3f}"
    for base in _BASES:
        if f"iteration_s_of_{base}" in figures:
            yield f"{figures[f'iteration_s_of_{base}']['median']:.3f}"


# ---- cost -------------------------------------------------------------------------------------


def _measure_costs(findings: Findings, model: str, teams: dict[str, Team]) -> None:
    """Add what each peer costs: launching, gaps, memory."""
    rows, figures = [], {}
    for name, team in teams.items():
        team.forget_peak()
        team.steps(1, 2)
        own = {
            "cpu_ms": team.ask("cpu_s") * 1e3,
            "peak_mb": team.peak_mb(),
            **team.ask("profile", ""),
        }
        figures[name] = own
        columns = ("cpu_ms", "gaps_ms", "communication_ms", "hidden_ms")
        rows.append([name, *(f"{own[c]:.1f}" for c in columns), f"{own['peak_mb']:.0f}"])
    findings.found.figures["costs"] = figures
    header = ["peer", "CPU ms a step", "gaps ms", "communication ms", "of it hidden ms", "peak MB"]
    findings.table(f"{model}: launching, a profile of two steps, memory", header, rows)
