"""Logs each graph's plan: rank 0 logs all of it, another rank only what differs.

Rank 0 leaves its text in the group's store. Another rank looks there in its next forward that will
communicate: rank 0 has compiled by then, or it would not have got through the previous backward.
So nobody waits. If the text is not there, a rank logs all of its own. While logs are off, nothing
is written, and nobody looks.
"""

from __future__ import annotations

import difflib
import weakref

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs
from ddpopt._events import Observer, Turn, ignore, observe, will_communicate
from ddpopt._text import count
from ddpopt.errors import PeerError, TorchDriftError
from ddpopt.ranks.stores import Board, next_key

_TITLE = "comparing plans for the log"
_STORE_S = 10.0  # for one exchange with the store


class _Told(Observer):
    """The texts of those graphs of a DDP module that this rank has yet to compare, by graph."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        name = f"plans/{type(ddp.module).__name__}"
        self.board = Board(ddp.process_group, _TITLE, next_key(ddp.process_group, name), _STORE_S)
        self.texts: dict[str, str] = {}

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        if not will_communicate(ddp):
            return
        ignore(ddp, Turn.LOGS)
        texts, self.texts = self.texts, {}
        try:
            others = self.board.get(*texts)
        except PeerError as error:
            _logs.info("plans are not compared with rank 0's: %s", error)
            others = [""] * len(texts)
        num_equal = 0
        for (graph, text), other in zip(texts.items(), others, strict=True):
            if text == other:
                num_equal += 1
            elif other:
                _logs.info("graph %s is not as on rank 0:\n%s", graph, _difference(other, text))
            else:
                _logs.info("%s", text)
        if num_equal:
            verb = "is" if num_equal == 1 else "are"
            _logs.info("%s %s as on rank 0", count(num_equal, "graph"), verb)


def _difference(other: str, own: str) -> str:
    lines = difflib.unified_diff(other.splitlines(), own.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


_told: weakref.WeakKeyDictionary[DistributedDataParallel, _Told] = weakref.WeakKeyDictionary()


def tell(ddp: DistributedDataParallel, graph: str, plan: object) -> None:
    """Log the plan of a graph of `ddp`; on ranks other than 0, in a later forward."""
    if not _logs.is_on():
        return
    rank, size = dist.get_rank(ddp.process_group), dist.get_world_size(ddp.process_group)
    if rank == 0:
        _logs.info("%s", plan)
    if size == 1:
        return
    try:
        if ddp not in _told:
            _told[ddp] = _Told(ddp)
        told = _told[ddp]
        if rank == 0:
            told.board.put(graph, str(plan))
    except (PeerError, TorchDriftError) as error:
        _logs.info("plans are not compared with rank 0's: %s", error)
        if rank:
            _logs.info("%s", plan)
        return
    if rank:
        told.texts[graph] = str(plan)
        observe(ddp, Turn.LOGS, told)


def take_over(copy: DistributedDataParallel, ddp: DistributedDataParallel) -> None:
    """Make `ddp` compare what was told when its copy was compiled."""
    told = _told.pop(copy, None)
    if told is not None:
        _told[ddp] = told
        if told.texts:
            observe(ddp, Turn.LOGS, told)
