"""One run of a benchmark: its options, its cluster, the teams at work, and what it leaves."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from slow_link import parse_gbit

from benchmarks.harness.cluster import FREE, Cluster, open_cluster, why_not_emulated
from benchmarks.harness.report import write_run
from benchmarks.harness.teams import Setting, Team, TeamError, open_team

_T = TypeVar("_T")


def split_names(text: str) -> list[str]:
    """Return the names in an option, as in `gpt,bert`."""
    return [name for name in text.split(",") if name]


def make_parser(program: str, docstring: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser that has the options which all runs on a cluster have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=(docstring or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rates", type=split_names, help="as tc has them")
    add("--ranks", type=int, help="not under torchrun, which decides it")
    add("--threads", type=int, default=1, help="cores and threads a rank; 0: leave them alone")
    add("--inner", default="inductor", help="the backend that all compiling peers use")
    add("--rounds", type=int, help="at most")
    add("--loopback", action="store_true", help="emulate no network")
    add("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    parser.set_defaults(**defaults)
    return parser


def parse_budgeted(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, quick: Mapping[str, Any]
) -> argparse.Namespace:
    """Parse with two options more: `--budget-s`, and `--quick`, which has defaults of its own."""
    add = parser.add_argument
    add("--budget-s", type=float, help="for the rounds at a rate; a few are made anyway")
    add("--quick", action="store_true", help="two minutes, to see that everything runs")
    args = parser.parse_args(arguments)
    if args.quick:
        parser.set_defaults(**quick)
        args = parser.parse_args(arguments)  # what was asked for by name counts all the same
    return args


@dataclass(slots=True, kw_only=True)
class Session:
    """One run on a cluster. A team that fails is taken out of `teams`, and the others go on.

    Teams go by their peer, as it was asked for with its options. `where` says what is measured
    now, such as the model, for the text of a failure.
    """

    name: str
    args: argparse.Namespace
    facts: dict[str, str]
    cluster: Cluster
    setting: Setting
    teams: dict[str, Team] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    where: str = ""

    @property
    def is_first(self) -> bool:
        return 0 in self.cluster.local_ranks

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    @contextlib.contextmanager
    def failing(self, peer: str) -> Iterator[None]:
        """Note it if a peer's team fails in this block, and go on without it."""
        try:
            yield
        except TeamError as error:
            self.teams.pop(peer, None)
            self.say(f"  {error}")
            what = f"{self.where}, {peer}" if self.where else peer
            self.failures.append({"what": what, "error": str(error).strip()})

    def open(
        self, peer: str, model: str, cap_mb: float | None, caches: Path
    ) -> contextlib.AbstractContextManager[Team]:
        """Start a team; it is not in `teams` before somebody puts it there."""
        return open_team(self.cluster, self.setting, peer, model, cap_mb, caches)

    def shown_rate(self, rate: str) -> str:
        """Return a rate as tables have it: loopback does not have the rates of `set_rate`."""
        is_applied = self.cluster.is_shaped or self.setting.emulated_ranks
        return rate if is_applied else f"{rate} (not applied)"

    def set_rate(self, rate: str) -> None:
        """Give all links a rate."""
        if self.setting.emulated_ranks:
            gbit = None if rate == FREE else parse_gbit(rate)
            for name, team in list(self.teams.items()):
                with self.failing(name):
                    team.ask("use_rate", gbit)
        else:
            self.cluster.set_rate(rate)

    def take_turns(
        self,
        peers: Sequence[str],
        num_rounds: int,
        take: Callable[[str], _T],
        between: Callable[[], object] = lambda: None,
    ) -> dict[str, list[_T]]:
        """Measure peers in turns, A B C A B C, so that the machine's drift falls on all.

        `between` runs after each round. Those that fail are left out of what is returned.
        """
        turns: dict[str, list[_T]] = {name: [] for name in peers}
        for _ in range(num_rounds):
            for name in [name for name in peers if name in self.teams]:
                with self.failing(name):
                    turns[name].append(take(name))
            between()
        return {name: taken for name, taken in turns.items() if name in self.teams}

    def write(self, found: Mapping[str, object], lines: Sequence[str]) -> None:
        """Write what there is so far, as JSON, and as Markdown under a heading."""
        failed = [f"- {f['what']}: `{f['error'].splitlines()[-1].strip()}`" for f in self.failures]
        if failed:
            failed = ["", "## Not measured", "", *failed]
        stem = self.args.output / self.name
        write_run(stem, self.facts, {**found, "failures": self.failures}, [*lines, *failed])

    def end(self, losses: Mapping[str, Mapping[str, float]], tolerance: float = 1e-3) -> int:
        """Say where everything is; return 1 if something failed or computed something else.

        `losses` are losses by what has to have the same one, and by peer.
        """
        differences = []
        for what, by_peer in losses.items():
            base = next(iter(by_peer), "")
            differences += [
                f"{what}: {name}'s loss is {loss}, {base}'s {by_peer[base]}"
                for name, loss in by_peer.items()
                # `not` and `<=`, so that a NaN is a difference.
                if not abs(loss - by_peer[base]) <= tolerance * abs(by_peer[base])
            ]
        stem = self.args.output / self.name
        self.say("\n".join([*differences, f"written to {stem}.md and {self.name}.json"]))
        return 1 if self.failures or differences else 0


@contextlib.contextmanager
def open_session(
    name: str,
    args: argparse.Namespace,
    arguments: Sequence[str] | None,
    worker: str = "benchmarks.harness.worker",
) -> Iterator[Session]:
    """Make the cluster that the options of `make_parser` ask for, without a limit of its rate."""
    shown = shlex.join(sys.argv[1:] if arguments is None else arguments)
    device, emulated_ranks = getattr(args, "device", "cpu"), getattr(args, "emulated_ranks", 0)
    args.output.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="ddpopt-benchmark-") as folder,
        open_cluster(
            1 if emulated_ranks else args.ranks,
            is_emulated=not (args.loopback or emulated_ranks),
        ) as cluster,
    ):
        is_pinned = args.threads and not cluster.is_torchrun and device == "cpu"
        num_threads = args.threads if is_pinned else None
        network = cluster.description
        if emulated_ranks:
            network = f"one rank, and a hook that takes as long as a ring of {emulated_ranks} would"
        session = Session(
            name=name,
            args=args,
            facts={
                "command": f"python -m benchmarks.{name} {shown}",
                "date": today(),
                "versions": versions(),
                "machine": f"{processor(device)}, {os.cpu_count()} cores, "
                f"{num_threads or 'all'} a rank",
                "network": network,
                "inner": args.inner,
            },
            cluster=cluster,
            setting=Setting(
                inner=args.inner,
                num_threads=num_threads,
                folder=Path(folder),
                worker=worker,
                device=device,
                emulated_ranks=emulated_ranks,
            ),
        )
        session.say(network)
        if not (emulated_ranks or cluster.is_shaped or cluster.is_torchrun or args.loopback):
            session.say(f"no network is emulated: {why_not_emulated()}")
        cluster.set_rate(FREE)
        yield session


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def versions() -> str:
    return f"torch {torch.__version__}, Python {platform.python_version()}"


def processor(device: str) -> str:
    """Return the name of what computes; that of a CPU as Linux has it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
