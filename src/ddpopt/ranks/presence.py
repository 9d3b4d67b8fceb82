"""Who each rank is, and whether its process is still there.

[Note: presence]
Each rank opens a socket that listens and is never read, and tells its address through the process
group's store. The kernel answers there for as long as the process lives, whatever its threads do,
and refuses when it has ended; so nobody beats, and steps cost nothing. Asking is bounded. What is
made of the answers is the affair of `faults.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_BACKLOG = 4096  # nobody accepts, so each rank that asks takes a place for good
_AT_ONCE = 256  # connections that are tried together
_LISTENS = "0A"  # a socket's state in /proc/net/tcp


class Presence(enum.Enum):
    """What asking a rank's process found. The value is what is said of the rank."""

    HERE = "is there"
    STOPPED = "is stopped (by a signal, as SIGSTOP)"
    ENDED = "has ended"
    UNREACHABLE = "cannot be reached: its machine is down, or the network to it"
    UNKNOWN = "cannot be asked"

    @property
    def of_several(self) -> str:
        """What is said of several ranks."""
        return _OF_SEVERAL[self]


_OF_SEVERAL = {
    Presence.HERE: "are there",
    Presence.STOPPED: "are stopped (by a signal, as SIGSTOP)",
    Presence.ENDED: "have ended",
    Presence.UNREACHABLE: "cannot be reached: their machines are down, or the network to them",
    Presence.UNKNOWN: "cannot be asked",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A rank, and where its process is. `machine` differs for hosts of one name.

    `has_store` says that the process holds the process group's store, so that it ends with it.
    """

    rank: int
    host: str
    machine: str
    pid: int
    address: str
    port: int
    has_store: bool

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Identity:
        """Read what `to_json` made."""
        return Identity(**json.loads(text))


class Listener:
    """The socket that says that this process is there, until `close` or its end."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        if hasattr(os, "register_at_fork"):  # a data loader's workers outlive a killed rank
            os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        """Be no longer there."""
        self._socket.close()


def introduction(rank: int, store_place: tuple[str, int] | None) -> tuple[Identity, Listener]:
    """Begin to be there; `store_place` is the host and port of the group's store, if it has one.

    Raises:
        OSError: no socket can be opened.
    """
    address = _own_address(store_place)
    listener = Listener(address)
    identity = Identity(
        rank=rank,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        address=address,
        port=listener.port,
        has_store=store_place is not None and listens_here(store_place[1]),
    )
    return identity, listener


def find_presence(
    own: Identity, others: Iterable[Identity], limit_s: float
) -> Mapping[int, Presence]:
    """Return of each rank whether its process is there, after `limit_s` seconds at most."""
    asked = [other for other in others if _can_be_asked(own, other)]
    found = {other.rank: Presence.UNKNOWN for other in others}
    end_s = time.monotonic() + limit_s
    for start in range(0, len(asked), _AT_ONCE):
        found |= _connect_to(asked[start : start + _AT_ONCE], end_s)
    for other in asked:
        if found[other.rank] is Presence.HERE and other.machine == own.machine:
            found[other.rank] = _look_at_process(other.pid)
    return found


def _can_be_asked(own: Identity, other: Identity) -> bool:
    """Addresses of one machine, as 127.0.0.1, are somebody else's on another."""
    is_local = other.address.startswith("127.") or other.address in ("::1", own.address)
    return not is_local or other.machine == own.machine


def _connect_to(others: Iterable[Identity], end_s: float) -> dict[int, Presence]:
    found: dict[int, Presence] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for other in others:
            family = socket.AF_INET6 if ":" in other.address else socket.AF_INET
            connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.setblocking(False)
            code = connection.connect_ex((other.address, other.port))
            if code == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, other.rank)
            found[other.rank] = _meaning(code)
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                connection = key.fileobj  # type: ignore[assignment]
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                found[key.data] = _meaning(code)
                selector.unregister(connection)
    return found


def _meaning(code: int) -> Presence:
    if code in (0, errno.EISCONN):
        return Presence.HERE
    return Presence.ENDED if code == errno.ECONNREFUSED else Presence.UNREACHABLE


def _look_at_process(pid: int) -> Presence:
    """Tell a stopped process of this machine from a running one; Linux only."""
    return Presence.STOPPED if _state_of(pid) in ("T", "t") else Presence.HERE


def has_gone(own: Identity, other: Identity) -> bool:
    """Whether a process of this machine is no longer there, by its number; Linux only."""
    if other.machine != own.machine or not _state_of(own.pid):
        return False
    return _state_of(other.pid) in ("", "Z", "X")  # Z: its parent has not asked for it yet


def _state_of(pid: int) -> str:
    """Return Linux' letter for what a process does, "" if there is none or this is no Linux."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _own_address(store_place: tuple[str, int] | None) -> str:
    """Return the address by which this machine talks to the store's, else its name's."""
    with contextlib.suppress(OSError):
        if store_place is None:
            return socket.gethostbyname(socket.gethostname())
        family, _, _, _, place = socket.getaddrinfo(*store_place, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def listens_here(port: int) -> bool:
    """Whether this process has a socket that listens on `port`; False where Linux cannot tell."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            sockets |= {
                f"socket:[{row[9]}]"
                for row in rows
                if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port
            }
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}") in sockets:
                    return True
    return False


def _machine() -> str:
    """Return what processes that see each other have in common, on Linux: boot and pids."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
