"""The lock between training and averaging: in order of arrival, and closed for good."""

from __future__ import annotations

import threading

import torch

from ddpopt.algorithms.async_ import Turns

CPU = torch.device("cpu")
HARD_TIMEOUT_S = 300


def _waits(turns: Turns, count: int) -> None:
    """Wait until that many threads stand in line."""
    done = threading.Event()
    for _ in range(HARD_TIMEOUT_S * 100):
        if len(turns._line) == count:
            return
        done.wait(0.01)
    raise AssertionError(f"{len(turns._line)} in line, expected {count}")


def test_who_waits_comes_before_who_gave_it_back() -> None:
    """Training that takes the lock again at once does not keep the other thread from it."""
    turns = Turns(CPU)
    order: list[str] = []
    turns.take()

    def average() -> None:
        turns.take()
        order.append("averaging")
        turns.give()

    thread = threading.Thread(target=average, daemon=True)
    thread.start()
    _waits(turns, 2)
    turns.give()
    turns.take()
    order.append("training")
    turns.give()
    thread.join(HARD_TIMEOUT_S)
    assert order == ["averaging", "training"]


def test_threads_get_it_in_the_order_of_their_arrival_and_one_at_a_time() -> None:
    turns = Turns(CPU)
    turns.take()
    order: list[int] = []
    threads = []

    def work(k: int) -> None:
        turns.take()
        assert len(order) == k
        order.append(k)
        turns.give()

    for k in range(8):
        threads.append(threading.Thread(target=work, args=(k,), daemon=True))
        threads[-1].start()
        _waits(turns, 2 + k)
    turns.give()
    for thread in threads:
        thread.join(HARD_TIMEOUT_S)
    assert order == list(range(8))


def test_closing_sends_who_waits_away_and_leaves_who_has_it() -> None:
    turns = Turns(CPU)
    assert turns.take()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(turns.take()), daemon=True)
    thread.start()
    _waits(turns, 2)
    turns.close()
    thread.join(HARD_TIMEOUT_S)
    assert answers == [False]
    turns.give()
    assert not turns.take()
