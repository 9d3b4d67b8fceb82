"""Who each rank is, what it told, and whether its process is still there.

`faults.py` draws the conclusions.

[Note: presence]
Each rank opens a listening socket that is never read, and tells its address through the process
group's store. The kernel answers there for as long as the process lives, whatever its threads do,
and refuses once it has ended; so no rank sends heartbeats, and steps cost nothing. The time for
asking is bounded.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ddpopt import _torch
from ddpopt.errors import PeerError
from ddpopt.ranks.stores import LONGEST_TEXT, Board

_STORE_S = 2.0  # for one exchange with the store
_ASK_S = 2.0  # for other ranks' kernels to answer; a lost packet is resent after 1 s
_POLL_S = 0.1
_MEET_S = 600.0  # for ranks to tell who they are
_BACKLOG = 4096  # nobody accepts, so each rank that asks takes a place for good
_AT_ONCE = 256  # processes that are asked at the same time
# torchrun may keep the store, and with it the ranks of an earlier attempt.
_KEY = f"ddpopt/faults/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class Presence(enum.Enum):
    """What asking for a rank's process found; values are the words for one rank and for several."""

    HERE = ("is there", "are there")
    STOPPED = ("is stopped (by a signal, as SIGSTOP)", "are stopped (by a signal, as SIGSTOP)")
    ENDED = ("has ended", "have ended")
    UNREACHABLE = (
        "cannot be reached: its machine is down, or the network to it",
        "cannot be reached: their machines are down, or the network to them",
    )
    UNKNOWN = ("cannot be asked", "cannot be asked")


class Card(NamedTuple):
    """A rank, where its process is, and what it told; `machine` differs for hosts with one name.

    `has_store` says that the process holds the group's store, which ends with it. `word` is the
    `turn`-th one that any rank told, or "" for none.
    """

    rank: int
    host: str
    machine: str
    pid: int
    address: str
    port: int
    has_store: bool
    word: str = ""
    text: str = ""
    turn: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class RollCall:
    """Tells the other ranks who this process is, on creation, and learns who they are.

    `known` has this rank's card and those of ranks that have told theirs and answered. A thread
    waits for the other ranks, and ends when all have told. No call waits for the store longer than
    a limit; `problem` says why it did not answer, and then it is not asked before the next word.

    Raises:
        OSError: no socket can be opened.
        TorchDriftError: this release does not expose a group's store.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # its store ends with it
        self.size = dist.get_world_size(group)
        self.place = _torch.place_of_store(_torch.store_of(group))  # host and port, if it has any
        self.own, self._listener = introduce(dist.get_rank(group), self.place)
        self.known = {self.own.rank: self.own}
        self.problem = ""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._meet, name="ddpopt roll call", daemon=True)
        self._thread.start()

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Whether these are the ranks of `group`."""
        return self._group() is group

    def close(self) -> None:
        """Close the socket, and end the thread."""
        self._is_closed.set()
        self._thread.join(_STORE_S)
        self._listener.close()

    def tell(self, word: str, text: str = "") -> None:
        """Tell a word in place of the previous one; "" withdraws it."""
        self.problem = ""
        with self._exchange() as board:
            turn = board.count("turns")
            self.own = self.own._replace(word=word, text=text[:LONGEST_TEXT], turn=turn)
            board.tell(json.dumps(self.own))

    def hear(self) -> list[Card]:
        """Return the other known ranks' cards, as of now or of when the store last answered."""
        if not self.problem:
            with self._exchange() as board:
                self._greet(_read_cards(board, range(self.size)))
        return [card for rank, card in sorted(self.known.items()) if rank != self.own.rank]

    def ask(self, cards: Collection[Card]) -> dict[int, Presence]:
        """Return for each rank whether its process is there."""
        return find_presence(self.own, cards, _ASK_S)

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[Board]:
        board = None
        try:
            board = self._open(_STORE_S)
            yield board
        except PeerError as error:
            self.problem = str(error) if board is None else board.problem

    def _open(self, limit_s: float) -> Board:
        group = self._group()
        if group is None:
            raise PeerError("the process group was destroyed")
        return Board(group, "naming the rank that broke", _KEY, limit_s)

    def _greet(self, cards: Iterable[Card]) -> None:
        """Take what known processes told, and get to know the ranks that answer.

        For those that do not, a firewall may be refusing in their place, unless their process was
        on this machine and has already ended. Another process may have been that rank before.
        """
        new = []
        for card in cards:
            if card.rank in self.known and self.known[card.rank].port == card.port:
                self.known[card.rank] = card
            elif card.rank != self.own.rank:
                new.append(card)
        found = find_presence(self.own, new, _ASK_S / 2)
        for card in new:
            is_there = found[card.rank] in (Presence.HERE, Presence.STOPPED)
            is_seen = card.machine == self.own.machine and _state_of(os.getpid())
            if is_there or (is_seen and _state_of(card.pid) in ("", "Z", "X")):  # Z: a zombie
                self.known[card.rank] = card

    def _meet(self) -> None:
        end_s = time.monotonic() + _MEET_S
        with contextlib.suppress(Exception):
            board, told = self._open(_MEET_S), None
            while told != self.own:  # another thread may tell meanwhile
                told = self.own
                board.tell(json.dumps(told))
            while len(self.known) < self.size and time.monotonic() < end_s:
                self._greet(_read_cards(board, set(range(self.size)) - self.known.keys()))
                if self._is_closed.wait(_POLL_S):
                    return


def _read_cards(board: Board, ranks: Iterable[int]) -> list[Card]:
    return [Card(*json.loads(text)) for text in board.get(*map(str, ranks)) if text]


def introduce(rank: int, store_place: tuple[str, int] | None) -> tuple[Card, socket.socket]:
    """Show other ranks that this process lives, until it ends or the returned socket closes.

    `store_place` is the host and port of the group's store, if it has one.

    Raises:
        OSError: no socket can be opened.
    """
    address = _own_address(store_place)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    if hasattr(os, "register_at_fork"):  # a data loader's workers may outlive a killed rank
        os.register_at_fork(after_in_child=listener.close)
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
    card = Card(
        rank=rank,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        address=address,
        port=listener.getsockname()[1],
        has_store=rank == 0 and store_place is not None and not is_agents,
    )
    return card, listener


def find_presence(own: Card, others: Collection[Card], limit_s: float) -> dict[int, Presence]:
    """Return for each rank whether its process is there; wait up to `limit_s` seconds for each."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(lambda other: _ask(own, other, limit_s), others)
        return {other.rank: presence for other, presence in zip(others, found, strict=True)}


def _ask(own: Card, other: Card, limit_s: float) -> Presence:
    is_near = other.machine == own.machine
    is_local = other.address.startswith("127.") or other.address in ("::1", own.address)
    if is_local and not is_near:
        return Presence.UNKNOWN  # from here the address is somebody else's
    try:
        socket.create_connection((other.address, other.port), limit_s).close()
    except ConnectionRefusedError:
        return Presence.ENDED
    except OSError:
        return Presence.UNREACHABLE
    is_stopped = is_near and _state_of(other.pid) in ("T", "t")
    return Presence.STOPPED if is_stopped else Presence.HERE


def _state_of(pid: int) -> str:
    """Return Linux's letter for a process's state, "" if it is gone or this is not Linux."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _own_address(store_place: tuple[str, int] | None) -> str:
    """Return this machine's address towards the store's machine, else that of its own name."""
    with contextlib.suppress(OSError):
        known = store_place or (socket.gethostname(), 9)
        family, _, _, _, place = socket.getaddrinfo(*known, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _machine() -> str:
    """Return an id shared by processes that see each other: on Linux, boot id and pid namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
