"""Whether a rank's process is there: asked of the kernel, on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ddpopt.ranks import presence
from ddpopt.ranks.presence import Identity, Presence, find_presence, introduction, listens_here

LIMIT_S = 300.0

_INTRODUCED = """
import sys, time
from ddpopt.ranks.presence import introduction
identity, listener = introduction(1, ("127.0.0.1", 1))
print(identity.to_json(), flush=True)
{more}
time.sleep(600)
"""


@contextlib.contextmanager
def _other(more: str = "") -> Iterator[tuple[subprocess.Popen[str], Identity]]:
    """A process that has introduced itself as rank 1."""
    command = [sys.executable, "-c", _INTRODUCED.format(more=more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Identity.from_json(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture
def own() -> Iterator[Identity]:
    """This process as rank 0."""
    identity, listener = introduction(0, ("127.0.0.1", 1))
    yield identity
    listener.close()


def _ask(own: Identity, other: Identity, limit_s: float = 2.0) -> Presence:
    return find_presence(own, [other], limit_s)[other.rank]


def _ask_until(own: Identity, other: Identity, expected: Presence) -> Presence:
    """Ask until the answer is the expected one; a signal takes its time."""
    end_s = time.monotonic() + LIMIT_S
    while (found := _ask(own, other)) is not expected and time.monotonic() < end_s:
        time.sleep(0.01)
    return found


def test_a_process_is_there_until_it_is_killed(own: Identity) -> None:
    """Also while it is stopped, and also if nobody has waited for it."""
    with _other() as (process, other):
        assert other.pid == process.pid
        assert _ask_until(own, other, Presence.HERE) is Presence.HERE
        process.send_signal(signal.SIGSTOP)
        assert _ask_until(own, other, Presence.STOPPED) is Presence.STOPPED
        process.send_signal(signal.SIGCONT)
        assert _ask_until(own, other, Presence.HERE) is Presence.HERE
        process.kill()
        assert _ask_until(own, other, Presence.ENDED) is Presence.ENDED


def test_what_a_process_forked_does_not_stand_for_it(own: Identity) -> None:
    """As workers of a data loader, which outlive a killed rank by seconds."""
    more = "import os\nchild = os.fork()\nprint(child, flush=True) if child else None"
    with _other(more) as (process, other):
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            assert _ask_until(own, other, Presence.ENDED) is Presence.ENDED
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_local_address_of_another_machine_is_not_asked(own: Identity) -> None:
    """It would be this machine that answers, or refuses."""
    for address in ("127.0.0.1", "::1", own.address):
        far = dataclasses.replace(own, rank=1, machine="another", address=address, port=1)
        assert _ask(own, far) is Presence.UNKNOWN


def test_who_does_not_answer_is_given_up(own: Identity) -> None:
    """A full queue drops what comes, as a machine that is down."""
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        silent = dataclasses.replace(own, rank=1, port=full.getsockname()[1])
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        began_s = time.monotonic()
        assert _ask(own, silent, 0.5) is Presence.UNREACHABLE
        assert time.monotonic() - began_s < LIMIT_S


def test_many_are_asked_together(own: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, each with its own answer."""
    monkeypatch.setattr(presence, "_AT_ONCE", 3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but it does not listen
        closed = free.getsockname()[1]
        others = [
            dataclasses.replace(own, rank=rank, port=own.port if rank % 2 else closed)
            for rank in range(8)
        ]
        found = find_presence(own, others, LIMIT_S)
    assert [found[rank] for rank in range(8)] == [Presence.ENDED, Presence.HERE] * 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")
def test_who_holds_a_port_is_known() -> None:
    """The process that listens there, and nobody else."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert not listens_here(port)
        listening.listen()
        assert listens_here(port)
        assert introduction(0, ("127.0.0.1", port))[0].has_store
        with _other() as (_, other):
            assert not other.has_store


def test_an_identity_survives_the_store(own: Identity) -> None:
    """It is text there, and names rank, host and process."""
    assert Identity.from_json(own.to_json().encode()) == own
    assert str(own) == f"rank 0 (host {socket.gethostname()}, pid {os.getpid()})"
