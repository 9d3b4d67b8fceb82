"""`Turns`: the lock on a model's weights between the thread that trains and the one that averages.

[Note: turns] Training has the weights from the first forward with gradients to the end of the
update, so that no weight changes between a forward and its backward, and no update is lost to an
average that is added at the same time. Averaging has them while it copies them and while it adds
the ranks' difference, never while it communicates.
"""

from __future__ import annotations

import threading
from collections import deque

import torch


class Turns:
    """A lock that goes to whoever has waited longest.

    A plain lock would starve the thread that averages, since training takes it back right after it
    gave it. On an accelerator it orders streams as well: whoever takes it has its stream wait for
    what was queued before it was given. That part never ran on one here.
    """

    def __init__(self, device: torch.device) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()  # the first has the lock
        self._is_closed = False
        self._queued = None if device.type == "cpu" else torch.Event(device)

    def take(self) -> bool:
        """Wait for the lock; False, without it, if it was closed before."""
        mine = object()
        with self._changed:
            self._line.append(mine)
            try:
                self._changed.wait_for(lambda: self._is_closed or self._line[0] is mine)
            except BaseException:  # KeyboardInterrupt: nobody will give this place back
                self._leave(mine)
                raise
            if self._is_closed:
                self._leave(mine)
                return False
        if self._queued is not None:
            self._queued.wait()
        return True

    def give(self) -> None:
        """Hand the lock to the next in line."""
        if self._queued is not None:
            self._queued.record()
        with self._changed:
            self._leave(self._line[0])

    def close(self) -> None:
        """Send everybody who waits away; called when training does not need the lock any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _leave(self, place: object) -> None:
        self._line.remove(place)
        self._changed.notify_all()
