"""In which order gradients arrive, as `split/arrival.py` assumes it."""

from __future__ import annotations

from ddpopt.reducer import Parameter
from ddpopt.split.arrival import order_arrival


def _parameters(count: int) -> list[Parameter]:
    return [Parameter(index=i, name=f"p{i}", num_bytes=10, group="f32") for i in range(count)]


def test_gradients_arrive_in_reverse_order_of_first_use() -> None:
    """A parameter used at 0 and again later arrives last; ties go to the last registered."""
    first_use = {0: 0, 1: 3, 2: 3, 3: 7}
    arrival = order_arrival(_parameters(4), {index: -use for index, use in first_use.items()})
    assert [p.index for p in arrival] == [3, 2, 1, 0]


def test_parameters_of_other_graphs_arrive_around_this_graphs() -> None:
    """First those of graphs not seen yet, then of later graphs, this graph's, and earlier graphs'.

    Those of later and of earlier graphs keep the order that they are listed in.
    """
    p = _parameters(8)
    arrival = order_arrival(p, {1: 0, 2: -5}, later=(p[4], p[5]), earlier=(p[0], p[3]))
    assert [p.index for p in arrival] == [7, 6, 4, 5, 2, 1, 0, 3]


def test_parameters_of_no_known_graph_arrive_last_where_no_graph_can_follow() -> None:
    """They are unused then, and the Reducer of a static graph puts those last."""
    arrival = order_arrival(_parameters(4), {1: 0, 2: -5}, ends_forward=True)
    assert [p.index for p in arrival] == [2, 1, 0, 3]
