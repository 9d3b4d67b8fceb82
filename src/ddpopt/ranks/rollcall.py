"""The ranks of the default process group, as far as this one knows them, and what they told.

It talks through the group's store, each exchange bounded; see `stores.py`. What words mean is the
affair of `faults.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ddpopt import _torch
from ddpopt.ranks import stores
from ddpopt.ranks.presence import Identity, Presence, find_presence, has_gone, introduction
from ddpopt.ranks.stores import StoreGoneError

_STORE_S = 2.0  # for one exchange with the store
_ASK_S = 2.0  # for other ranks' kernels to answer; a lost packet is sent again after 1 s
_FIRST_POLL_S = 0.02
_POLL_S = 0.5
_MEET_S = 600.0  # in which ranks come to tell who they are
_LONGEST_TEXT = 500
# torchrun may keep the store, and in it the ranks of an attempt before.
_KEY = f"ddpopt/faults/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
_WITHDRAWN = "withdrawn"

# Of a store that cannot, or is gone with its group or before it.
_MEET_ERRORS = (RuntimeError, NotImplementedError, AttributeError, KeyError, OSError)

T = TypeVar("T")


class Word(NamedTuple):
    """What a rank told: its `port` says that it is from this process and not from one before."""

    rank: int
    port: int
    kind: str
    text: str


class RollCall:
    """Tells the other ranks who this process is when it is made, and learns who they are.

    `known` has the identity of each rank that has told it and answered, and its own; `place` is
    the host and port of the store, None if it has none. A thread waits for those who have not told
    yet, and ends when all have. No call waits for the store for longer than a limit, and making a
    roll call does not wait for it at all.

    Raises:
        OSError: no socket can be opened.
        TorchDriftError: this release tells no group's store.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.size = dist.get_world_size(group)
        self.place = _torch.place_of_store(_torch.store_of(group))
        self.own, self._listener = introduction(dist.get_rank(group), self.place)
        self.known = {self.own.rank: self.own}
        self._has_told = False
        self._is_noting = True
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._meet, name="ddpopt roll call", daemon=True)
        self._thread.start()

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Whether these are the ranks of `group`."""
        return self._group() is group

    def close(self) -> None:
        """Be no longer there."""
        self._is_closed.set()
        self._thread.join(_STORE_S)
        self._listener.close()

    def tell(self, kind: str, text: str = "") -> None:
        """Tell a word, if the store takes it in time."""
        with contextlib.suppress(StoreGoneError):
            self.tell_and_hear(kind, text)

    def tell_and_hear(self, kind: str, text: str = "") -> dict[int, Word]:
        """Tell a word, then return what `hear` does.

        Raises:
            StoreGoneError: the store does not answer.
        """
        word = Word(self.own.rank, self.own.port, kind, text[:_LONGEST_TEXT])
        self._has_told = kind != _WITHDRAWN

        def put_and_read(store: Any) -> dict[int, Word]:
            index = store.add(f"{_KEY}/words", 1)
            store.set(f"{_KEY}/word/{index}", json.dumps(word))
            return self._read(store)

        return self._exchange(put_and_read)

    def withdraw(self) -> None:
        """Take a word back: training goes on."""
        if self._has_told:
            self.tell(_WITHDRAWN)

    def note(self, doing: str) -> None:
        """Tell what this rank does from now on, "" for nothing of note, if the store takes it."""
        if not self._is_noting:
            return
        text = f"{self.own.port} {doing}"
        try:
            self._exchange(lambda store: store.set(f"{_KEY}/doing/{self.own.rank}", text))
        except StoreGoneError:
            self._is_noting = False  # compiling would be held up each time

    def noted(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return what those of these known ranks do that noted something.

        Raises:
            StoreGoneError: the store does not answer.
        """

        def read(store: Any) -> dict[int, str]:
            found = {}
            for rank in ranks:
                key = f"{_KEY}/doing/{rank}"
                port, _, doing = (store.get(key).decode() if store.check([key]) else "").partition(
                    " "
                )
                if doing and port == str(self.known[rank].port):
                    found[rank] = doing
            return found

        return self._exchange(read)

    def hear(self) -> dict[int, Word]:
        """Return the last word of each rank that told one, in the order in which they did.

        Raises:
            StoreGoneError: the store does not answer.
        """
        return self._exchange(self._read)

    def presence_without(self, words: Mapping[int, Word]) -> Mapping[int, Presence]:
        """Ask for the processes of the known ranks that told nothing."""
        silent = [self.known[rank] for rank in self.silent(words)]
        return find_presence(self.own, silent, _ASK_S)

    def silent(self, words: Mapping[int, Word]) -> list[int]:
        """Return the known ranks that told nothing, without this one."""
        return sorted(self.known.keys() - words.keys() - {self.own.rank})

    def _read(self, store: Any) -> dict[int, Word]:
        self._greet(store)  # who came late
        words: dict[int, Word] = {}
        for index in range(1, store.add(f"{_KEY}/words", 0) + 1):
            key = f"{_KEY}/word/{index}"
            if not store.check([key]):
                continue  # it is just being told
            word = Word(*json.loads(store.get(key)))
            teller = self.known.get(word.rank)
            if teller is not None and teller.port == word.port:
                words.pop(word.rank, None)
                if word.kind != _WITHDRAWN:
                    words[word.rank] = word
        return words

    def _exchange(self, call: Callable[[Any], T]) -> T:
        """Return `call(store)`, or raise StoreGoneError after `_STORE_S` at the latest."""
        group = self._group()
        if group is None:
            raise StoreGoneError("the process group was destroyed")
        return stores.ask(group, call, _STORE_S)

    def _greet(self, store: Any) -> None:
        """Learn who has come since."""
        told = _read_identities(store, set(range(self.size)) - self.known.keys())
        found = find_presence(self.own, told.values(), _ASK_S / 2)
        is_there = (Presence.HERE, Presence.STOPPED)
        for rank, other in told.items():
            if found[rank] in is_there or has_gone(self.own, other):
                self.known[rank] = other

    def _meet(self) -> None:
        """Tell who this is and learn who the others are while the store is there; in a thread.

        Only who answers now counts, since a firewall may answer in the place of a machine; or whose
        process on this machine has ended already.
        """
        end_s = time.monotonic() + _MEET_S
        poll_s = _FIRST_POLL_S
        group = self._group()
        if group is None:
            return
        with contextlib.suppress(*_MEET_ERRORS):
            store = stores.connect_anew(_torch.store_of(group))
            del group  # the store ends with it
            store.set(f"{_KEY}/{self.own.rank}", self.own.to_json())
            while len(self.known) < self.size and time.monotonic() < end_s:
                self._greet(store)
                if self._is_closed.wait(poll_s):
                    return
                poll_s = min(2 * poll_s, _POLL_S)


def _read_identities(store: Any, ranks: Iterable[int]) -> dict[int, Identity]:
    told = [rank for rank in ranks if store.check([f"{_KEY}/{rank}"])]
    return {rank: Identity.from_json(store.get(f"{_KEY}/{rank}")) for rank in told}
