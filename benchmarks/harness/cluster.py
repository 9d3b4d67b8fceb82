r"""A cluster on one machine: a network namespace for each rank, joined by links of a given rate.

    rank 0: eth0 ---- port0 \
                             bridge, in a namespace of its own
    rank 1: eth0 ---- port1 /

Both ends of each link are shaped (`tc ... tbf`). Namespaces are called `ddpopt-<pid>-...` and are
removed however this process ends, also by SIGKILL: a second process waits for its end, and does
nothing but remove them. Where namespaces cannot be made, ranks share the loopback device.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

PREFIX = "ddpopt"
FREE = "free"
_ROOT = Path(__file__).parents[2]
_INTERFACE = "eth0"
_SUBNET = "10.77.0"  # seen inside of the namespaces only
_PORT = 29500  # of rank 0
_SHAPE = ("burst", "256kb", "latency", "200ms")
_OWN_NAME = re.compile(rf"{PREFIX}-\d+-[0-9a-f]{{6}}-\w+")
_REMOVE = 'read -r _; for name in "$@"; do ip netns del "$name"; done 2>/dev/null'
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class ClusterError(RuntimeError):
    """A namespace or a link could not be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ranks, of which `local_ranks` are to be started here.

    `namespaces` has one for each rank, or is empty on loopback and on a real network.
    """

    num_ranks: int
    local_ranks: tuple[int, ...]
    namespaces: tuple[str, ...] = ()
    bridge: str = ""
    is_torchrun: bool = False

    @property
    def is_shaped(self) -> bool:
        return bool(self.namespaces)

    @property
    def description(self) -> str:
        if self.is_torchrun:
            return f"{self.num_ranks} ranks under torchrun, on their own network"
        if self.is_shaped:
            return f"{self.num_ranks} ranks in network namespaces, links shaped by tbf at both ends"
        return f"{self.num_ranks} ranks on loopback, UNSHAPED: rates were not applied"

    def set_rate(self, rate: str) -> None:
        """Give all links this rate, as `1gbit`; `free` takes the limit away. Connections stay."""
        for rank in range(len(self.namespaces)):
            self.set_rate_of(rank, rate)

    def set_rate_of(self, rank: int, rate: str) -> None:
        """Give one rank's link this rate, in both directions."""
        _shape(self.namespaces[rank], _INTERFACE, rate)
        _shape(self.bridge, f"port{rank}", rate)

    def set_link(self, rank: int, *, is_up: bool) -> None:
        """Pull a rank's cable out of the bridge, or plug it in again."""
        port, state = f"port{rank}", "up" if is_up else "down"
        _call("ip", "-n", self.bridge, "link", "set", port, state)

    def start(
        self,
        rank: int,
        command: Sequence[str],
        *,
        num_threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a command as one rank, with `options` of Popen; it can import the benchmarks.

        It finds in its environment what `init_process_group("gloo")` reads there. It has as many
        cores as threads, and ranks have different ones; with `num_threads` None it has all.
        """
        import_path = str(_ROOT)
        if os.environ.get("PYTHONPATH"):
            import_path += os.pathsep + os.environ["PYTHONPATH"]
        variables = {**os.environ, "PYTHONPATH": import_path, **self._where_to_meet(rank)}
        if num_threads is not None:
            variables["OMP_NUM_THREADS"] = str(num_threads)
        prefix = ["ip", "netns", "exec", self.namespaces[rank]] if self.is_shaped else []
        with _pinned(rank, num_threads):
            return subprocess.Popen(
                [*prefix, *command], env={**variables, **(environment or {})}, **options
            )

    def _where_to_meet(self, rank: int) -> dict[str, str]:
        if self.is_torchrun:
            return {}
        variables = {
            "MASTER_ADDR": f"{_SUBNET}.1" if self.is_shaped else "127.0.0.1",
            "MASTER_PORT": str(_PORT),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
        }
        if self.is_shaped:
            variables["GLOO_SOCKET_IFNAME"] = _INTERFACE
        elif os.path.exists("/sys/class/net/lo"):
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        return variables


@contextlib.contextmanager
def _pinned(rank: int, num_threads: int | None) -> Iterator[None]:
    """Have what is started here run on a rank's cores alone."""
    if num_threads is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    first, listed = rank * num_threads, sorted(cores)
    os.sched_setaffinity(0, {listed[(first + k) % len(listed)] for k in range(num_threads)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def open_cluster(num_ranks: int, *, is_emulated: bool = True) -> Iterator[Cluster]:
    """Yield a cluster whose links are not limited yet, and remove it.

    Under torchrun it is the one that torchrun has made. Else it is emulated if that was asked for
    and can be had (see `why_not_emulated`), and else there are processes on loopback.

    Raises:
        ClusterError: a namespace or a link could not be made.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        yield Cluster(num_ranks=num_ranks, local_ranks=(rank,), is_torchrun=True)
        return
    ranks = tuple(range(num_ranks))
    if not is_emulated or why_not_emulated():
        yield Cluster(num_ranks=num_ranks, local_ranks=ranks)
        return
    *namespaces, bridge = _names(*(f"rank{rank}" for rank in ranks), "bridge")
    with _ending_by_exception(), _removed_at_the_end([*namespaces, bridge]):
        _connect(namespaces, bridge)
        yield Cluster(
            num_ranks=num_ranks, local_ranks=ranks, namespaces=tuple(namespaces), bridge=bridge
        )


def why_not_emulated() -> str:
    """Return why no network can be emulated here, nothing where one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "this needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} (package iproute2)"
    probe, bridge = _names("probe", "bridge")
    try:
        with _removed_at_the_end([probe, bridge]):
            _connect([probe], bridge)
            _shape(probe, _INTERFACE, "1gbit")
    except ClusterError as error:
        return str(error)
    return ""


def own_namespaces() -> list[str]:
    """Return the names of all namespaces that any run of this benchmark made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    return [name for name in names if _OWN_NAME.fullmatch(name)]


def _names(*roles: str) -> list[str]:
    stem = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
    return [f"{stem}-{role}" for role in roles]


def _connect(namespaces: Sequence[str], bridge: str) -> None:
    for namespace in (*namespaces, bridge):
        _call("ip", "netns", "add", namespace)
        _call("ip", "-n", namespace, "link", "set", "lo", "up")
    _call("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
    _call("ip", "-n", bridge, "link", "set", "bridge", "up")
    for rank, namespace in enumerate(namespaces):
        link, port = ("ip", "-n", namespace), f"port{rank}"
        _call(*link, "link", "add", _INTERFACE, "type", "veth", "peer", port, "netns", bridge)
        _call(*link, "addr", "add", f"{_SUBNET}.{rank + 1}/24", "dev", _INTERFACE)
        _call(*link, "link", "set", _INTERFACE, "up")
        _call("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")


def _shape(namespace: str, interface: str, rate: str) -> None:
    qdisc = ("tc", "-n", namespace, "qdisc")
    if rate == FREE:
        # Without a limit there is nothing to delete, which tc calls an error.
        command = [*qdisc, "del", "dev", interface, "root"]
        subprocess.run(command, capture_output=True, check=False)
    else:
        _call(*qdisc, "replace", "dev", interface, "root", "tbf", "rate", rate, *_SHAPE)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


@contextlib.contextmanager
def _removed_at_the_end(names: Sequence[str]) -> Iterator[None]:
    """Remove these namespaces when this block, or this process, ends.

    The process that does it has a session of its own, so that no Ctrl-C reaches it, and reads from
    a pipe of ours, which the kernel closes when we are gone.
    """
    command = ["sh", "-c", _REMOVE, "sh", *names]
    remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert remover.stdin is not None
        remover.stdin.close()
        remover.wait()


@contextlib.contextmanager
def _ending_by_exception() -> Iterator[None]:
    """Have signals that end a process end this one as an exception does, so that it cleans up."""

    def leave(number: int, _frame: FrameType | None) -> None:
        print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(128 + number)

    # A program that ignores one (nohup) wants it so.
    numbers = [n for n in _ENDING_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
