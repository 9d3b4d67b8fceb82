"""A rank breaks: the others end with an error that names it, whatever place it broke in.

Real processes on the loopback device. `benchmarks/faults` has links that fail, and times.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt.checks.warmup import warmup
from ddpopt.errors import PeerError
from ddpopt.ranks import faults
from ddpopt.ranks.faults import naming_peers
from ddpopt.ranks.presence import Card, Presence
from ddpopt.split import state
from tests.support.models import MLP, batches
from tests.support.ranks import OwnRanks

CAP_MB = 0.03
FAULT_STEP = 2
NUM_STEPS = 5
TIMEOUT_S = 60.0  # which nobody waits for
SHORT_S = 10.0
GONE_S = 120.0
VICTIM = 1


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _end_in_compile(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    _end()
    return gm


class _DyingMLP(MLP):
    """Ends its process in the middle of a forward, once it was told to."""

    is_to_end = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).relu()
            if index == 2:
                self.reach()
        return x

    @torch.compiler.disable
    def reach(self) -> None:
        if self.is_to_end:
            _end()


def _arm(model: _DyingMLP, optimizer: torch.optim.Optimizer, where: str) -> None:
    """From now on this process ends where it gets to `where`."""
    last = model.layers[-1].weight
    if where == "forward":
        model.is_to_end = True
    elif where == "sections":  # the hook runs after the first section, before the second
        last.register_post_accumulate_grad_hook(lambda _: _end())
    elif where == "optimizer":
        optimizer.register_step_pre_hook(lambda *_: _end())


def _lose_a_rank(rank: int, where: str, split: str) -> tuple[str, tuple[int, ...], str, float]:
    """Train until a rank is killed; return the error, whom it names, its cause, and seconds."""
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    group = dist.new_group(timeout=timeout, backend="gloo")
    model = _DyingMLP() if where == "forward" else MLP()
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB, process_group=group)
    is_victim = rank == VICTIM
    inner = _end_in_compile if is_victim and where == "compile" else "aot_eager"
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": inner, "split": split})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    began_s = time.monotonic()
    try:
        with naming_peers():
            for step, x in enumerate(batches(rank, [(8, 64)] * NUM_STEPS)):
                if is_victim and step == FAULT_STEP:
                    _arm(model, optimizer, where)
                began_s = time.monotonic()
                optimizer.zero_grad()
                compiled(x).square().mean().backward()
                optimizer.step()
    except PeerError as error:
        return str(error), error.ranks, str(error.__cause__), time.monotonic() - began_s
    return "no error", (), "", 0.0


@pytest.mark.parametrize(
    ("where", "split"),
    [
        ("forward", "backward"),
        ("sections", "forward"),
        ("sections", "backward"),
        ("optimizer", "backward"),
        ("compile", "forward"),
    ],
)
def test_a_killed_rank_is_named_by_all_others(where: str, split: str, own_ranks: OwnRanks) -> None:
    """With host and pid, and not the rank that lost it too."""
    workers = own_ranks(3)
    try:
        answers = workers.run_survivors({0, 2}, _lose_a_rank, where, split)
    finally:
        workers.stop()
    for text, named, cause, seconds in answers.values():
        host = re.escape(socket.gethostname())
        assert re.match(rf"training failed: rank 1 \(host {host}, pid \d+\) has ended; ", text)
        assert named == (VICTIM,)
        assert cause in text
        assert seconds < TIMEOUT_S or where == "compile"  # the connection broke at once


# ---- What is not a lost rank ------------------------------------------------------------------


def _train(rank: int, group: dist.ProcessGroup, disturb: Callable[[int], None]) -> str:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB, process_group=group)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    inputs = batches(rank, [(8, 64)] * NUM_STEPS)
    warmup(compiled, inputs[0])  # compiling may take longer than the group's timeout
    try:
        with naming_peers("an epoch"):
            for step, x in enumerate(inputs):
                if rank == VICTIM and step == FAULT_STEP:
                    disturb(os.getpid())
                compiled(x).square().mean().backward()
    except Exception as error:
        return f"{type(error).__name__}{getattr(error, 'ranks', '')}: {error}"
    return str([p.grad.sum().item() for p in ddp.parameters()])


def _short_group() -> dist.ProcessGroup:
    return dist.new_group(timeout=datetime.timedelta(seconds=SHORT_S), backend="gloo")


def _raise(_: int) -> None:
    raise KeyError("no such batch")


def _raise_in_one(rank: int) -> str:
    return _train(rank, _short_group(), _raise)


def test_a_rank_that_raised_is_named_with_its_error(own_ranks: OwnRanks) -> None:
    """It keeps its own error; the others say what it was, though its process is there."""
    workers = own_ranks()
    try:
        other, own = workers.run(_raise_in_one)
    finally:
        workers.stop()
    assert own == "KeyError: 'no such batch'"
    assert re.match(
        r"PeerError\(1,\): an epoch failed: rank 1 \(.*\) raised KeyError: 'no such batch'; ", other
    )


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def _stop_for_good(rank: int) -> str:
    return _train(rank, _short_group(), _stop)


def test_a_stopped_rank_is_named_after_the_timeout(own_ranks: OwnRanks) -> None:
    """Nobody can know before."""
    workers = own_ranks(3)
    try:
        answers = workers.run_survivors({0, 2}, _stop_for_good)
    finally:
        workers.stop()
    for text in answers.values():
        assert re.match(r"PeerError\(1,\): an epoch failed: rank 1 \(.*\) is stopped \(by", text)


def _stop_shortly(pid: int) -> None:
    subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {pid}"])
    _stop(pid)


def _stop_for_two_seconds(rank: int) -> str:
    return _train(rank, _short_group(), _stop_shortly)


def test_a_rank_that_is_stopped_for_a_while_is_waited_for(own_ranks: OwnRanks) -> None:
    """Training goes on with equal gradients."""
    workers = own_ranks()
    try:
        first, second = workers.run(_stop_for_two_seconds)
    finally:
        workers.stop()
    assert first == second
    assert first.startswith("[")


# ---- Without the user's doing -----------------------------------------------------------------

_SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
sys.path.insert(0, {tests!r})
from tests.support.models import MLP
ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
model = torch.compile(ddp, backend="ddpopt", options={{"inner": "aot_eager"}})
for step in range(4):
    if step == 3 and dist.get_rank() == {victim}:
        {fault}
    model(torch.randn(8, 64)).sum().backward()
"""


def _run_script(victim: int, fault: str) -> list[str]:
    """Run two ranks as processes of their own; return what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = _SCRIPT.format(tests=str(Path(__file__).parents[2]), victim=victim, fault=fault)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={
                **os.environ,
                **common,
                "RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                "DDPOPT_NAME_PEERS": "1",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_an_uncaught_error_is_followed_by_the_rank_that_was_lost() -> None:
    """Here the one that holds the store, so that nothing can be read there any more."""
    _, text = _run_script(0, "os.kill(os.getpid(), signal.SIGKILL)")
    assert re.search(
        r"^\[rank1\]: ddpopt: rank 0 \(host .*, pid \d+\), which held the process group's store, "
        r"has ended; ",
        text,
        re.MULTILINE,
    ), text
    assert text.index("Traceback") < text.index("ddpopt: rank 0")


@pytest.mark.slow
def test_an_uncaught_error_of_its_own_is_told_to_the_others() -> None:
    """And explained on the others only."""
    text, own = _run_script(1, "raise ValueError('bad batch')")
    assert re.search(
        r"^\[rank0\]: ddpopt: rank 1 \(.*\) raised ValueError: bad batch; ", text, re.M
    )
    assert "ValueError: bad batch" in own
    assert "ddpopt: " not in own


# ---- Judging ----------------------------------------------------------------------------------


class _RollCall:
    """Four ranks: some told words and some have ended; as `RollCall`, without processes."""

    size = 4
    place = ("node0", 29500)

    def __init__(
        self,
        words: Mapping[int, str] | None,
        presences: Mapping[int, Presence],
        unknown: tuple[int, ...] = (),
    ) -> None:
        self.problem, self.told = "no answer" if words is None else "", ""
        told = {rank: text.partition(" ") for rank, text in (words or {}).items()}
        self.own, *self._cards = (
            Card(
                *(rank, f"node{rank}", str(rank), 100 + rank, "", rank),
                has_store=False,
                word=told.get(rank, ("", "", ""))[0],
                text=told.get(rank, ("", "", ""))[2],
            )
            for rank in range(4)
            if rank not in unknown
        )
        self._presences = presences

    def tell(self, word: str, text: str = "") -> None:
        self.told = text

    def hear(self) -> list[Card]:
        return self._cards

    def ask(self, cards: list[Card]) -> Mapping[int, Presence]:
        return {card.rank: self._presences.get(card.rank, Presence.HERE) for card in cards}


def _judge(
    monkeypatch: pytest.MonkeyPatch,
    words: Mapping[int, str] | None = None,
    presences: Mapping[int, Presence] | None = None,
    unknown: tuple[int, ...] = (),
) -> tuple[str, tuple[int, ...]]:
    monkeypatch.setattr(faults, "_SETTLE_S", 0.05)
    monkeypatch.setattr(faults, "_POLL_S", 0.01)
    roll_call: Any = _RollCall(words, presences or {}, unknown)
    finding = faults._find_fault(roll_call)
    return finding.text, finding.ranks


ENDED, FAR = Presence.ENDED, Presence.UNREACHABLE


def test_victims_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 told that it lost a connection before it ended; rank 2 told nothing."""
    text, ranks = _judge(monkeypatch, {1: "lost"}, {1: ENDED, 2: ENDED})
    assert (text, ranks) == ("rank 2 (host node2, pid 102) has ended", (2,))


def test_an_error_of_ones_own_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 ended because rank 2 raised."""
    text, ranks = _judge(monkeypatch, {2: "raised OSError: no disk"}, {2: ENDED, 3: ENDED})
    assert (text, ranks) == ("rank 2 (host node2, pid 102) raised OSError: no disk", (2,))


def test_several_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the plural."""
    text, ranks = _judge(monkeypatch, {}, {1: ENDED, 3: ENDED})
    assert text == "rank 1 (host node1, pid 101) and rank 3 (host node3, pid 103) have ended"
    assert ranks == (1, 3)


def test_a_machine_that_is_cut_off_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are out of reach, and so is the store."""
    text, ranks = _judge(monkeypatch, None, {1: FAR, 2: FAR, 3: FAR})
    assert text.startswith("no other rank can be reached from rank 0 (host node0, pid 100): this")
    assert ranks == ()
    text, ranks = _judge(monkeypatch, None, {1: FAR, 2: FAR})
    assert ranks == (1, 2)
    assert "their machines are down" in text


def test_a_store_that_is_gone_while_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when torchrun's agent is killed."""
    text, ranks = _judge(monkeypatch, None)
    assert text.startswith("the process group's store at node0:29500 has gone (no answer): the")
    assert ranks == ()


def test_a_rank_that_compiles_is_named_and_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears it when it is done, and says the same."""
    monkeypatch.setattr(faults, "_SETTLE_S", 0.05)
    roll_call: Any = _RollCall({1: "lost", 2: "compiles"}, {})
    finding = faults._find_fault(roll_call)
    assert finding.ranks == (2,)
    assert finding.text.startswith("rank 2 (host node2, pid 102) compiled for longer than the")
    assert roll_call.told == finding.text
    text, ranks = _judge(monkeypatch, {1: f"lost {finding.text}", 2: "lost", 3: "lost"})
    assert (text, ranks) == (finding.text, ())


def test_who_is_there_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that timed out while all processes live."""
    text, ranks = _judge(monkeypatch, {1: "lost", 2: "lost"})
    assert ranks == ()
    assert "of rank 3 (host node3, pid 103) nothing was heard" in text
    text, ranks = _judge(monkeypatch, {1: "lost", 2: "lost"}, unknown=(3,))
    assert ranks == ()
    assert "rank 3 cannot be asked: ddpopt has compiled nothing there" in text


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (
            RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"),
            True,
        ),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed"), False),
        (KeyError("gloo/"), False),
    ],
)
def test_what_an_error_of_a_connection_is(error: Exception, is_it: bool) -> None:
    """By its text or its type, also as the cause of another."""
    assert faults.is_connection_error(error) == is_it
    outer = OSError("the user's")
    outer.__cause__ = error
    assert faults.is_connection_error(outer) == is_it


@pytest.mark.usefixtures("one_rank")
def test_one_rank_has_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is opened or hooked; the error is still a clear one."""
    monkeypatch.setattr(_torch, "store_of", None)
    hook = sys.excepthook
    with pytest.raises(PeerError, match="another rank has ended"), naming_peers():
        raise dist.DistBackendError("x")
    assert sys.excepthook is hook


# ---- Only where it was asked for --------------------------------------------------------------


def _sockets() -> int:
    return sum(
        os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    )


def _compile_unasked(rank: int) -> dict[str, Any]:
    """Compile and train as most do; return what that took beside."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=CAP_MB)
    compiled = torch.compile(ddp, backend="ddpopt", options={"inner": "aot_eager"})
    hook, num_sockets = sys.excepthook, _sockets()
    with (
        mock.patch.object(_torch, "store_of", wraps=_torch.store_of) as store_of,
        mock.patch.object(threading, "Thread", wraps=threading.Thread) as thread,
    ):
        for x in batches(rank, [(8, 64)] * 3):
            compiled(x).sum().backward()
    (plan,) = state.of(ddp).plans
    return {
        "sections": len(plan.sections),
        "sockets": _sockets() - num_sockets,
        "threads": thread.call_count,
        "calls of the store": store_of.call_count,
        "is hook": sys.excepthook is not hook,
    }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")
def test_compiling_takes_no_socket_no_thread_and_no_store(own_ranks: OwnRanks) -> None:
    """By default; nor does it put a hook in front of uncaught errors."""
    workers = own_ranks()
    try:
        for found in workers.run(_compile_unasked):
            assert found.pop("sections") > 1
            assert not any(found.values()), found
    finally:
        workers.stop()


_STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

_WITHOUT_STORE = """
import datetime, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddpopt
sys.path.insert(0, {tests!r})
from tests.support.models import MLP
store = dist.TCPStore(
    "127.0.0.1", {port}, is_master=False, timeout=datetime.timedelta(seconds=240)
)
dist.init_process_group("gloo", store=store, rank={rank}, world_size=2)
ddps = [DistributedDataParallel(MLP(), bucket_cap_mb=0.03) for _ in range(2)]

def train(ddp):
    print("ready", flush=True)
    sys.stdin.readline()
    began_s = time.monotonic()
    torch._dynamo.reset()
    model = torch.compile(ddp, backend="ddpopt", options={{"inner": "aot_eager"}})
    for _ in range(3):
        model(torch.randn(8, 64)).sum().backward()
    print(time.monotonic() - began_s, flush=True)

train(ddps[0])
with ddpopt.config.patch(disagreement="error"), ddpopt.naming_peers():
    train(ddps[1])
os._exit(0)  # a thread still waits for the store
"""


@pytest.mark.slow
def test_a_store_that_is_gone_before_the_first_compile_holds_nobody_up() -> None:
    """By default where its process is stopped, nor, where ranks are named, if it was killed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:

        def start(script: str) -> subprocess.Popen[str]:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            started = subprocess.Popen([sys.executable, "-c", script], env=environment, **pipes)
            stack.callback(started.wait)
            stack.callback(started.kill)
            return started

        store = start(_STORE)
        port, tests = store.stdout.readline().strip(), str(Path(__file__).parents[2])
        ranks = [
            start(_WITHOUT_STORE.format(tests=tests, port=port, rank=rank)) for rank in range(2)
        ]
        watchdog = threading.Timer(2 * GONE_S, lambda: [rank.kill() for rank in ranks])
        watchdog.start()
        stack.callback(watchdog.cancel)
        for what in (signal.SIGSTOP, signal.SIGKILL):
            assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 2
            store.send_signal(what)
            for rank in ranks:
                print(file=rank.stdin, flush=True)
            assert all(float(rank.stdout.readline() or "inf") < GONE_S for rank in ranks)


@pytest.mark.usefixtures("one_rank")
def test_a_hook_that_another_library_wrapped_is_called_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when a group was made again since."""
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: printed.append(error))
    monkeypatch.setattr(faults, "_here", faults._Here())
    monkeypatch.setattr(
        faults, "_explain_uncaught", functools.cache(faults._explain_uncaught.__wrapped__)
    )
    monkeypatch.setattr(faults, "RollCall", mock.Mock())
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    faults.introduce()
    monkeypatch.setattr(sys, "excepthook", functools.partial(sys.excepthook))
    assert faults._here.roll_call is not None
    faults._here.roll_call.is_of.return_value = False
    faults.introduce()
    error = PeerError("x")
    sys.excepthook(PeerError, error, None)
    assert printed == [error]
