"""`Algorithm`: the values that it takes, and the size of a node."""

from __future__ import annotations

from typing import Any

import pytest

from ddpopt.algorithms import ByteGrad, Decentralized
from ddpopt.errors import OptionError


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"peer_selection": "ring"}, OptionError, "'ring'"),
        ({"communication_interval": 0}, OptionError, "0; it must be a whole number, 1 or more"),
        ({"communication_interval": 1.0}, TypeError, "float"),
        ({"communication_interval": True}, TypeError, "bool"),
        ({"hierarchical": 1}, TypeError, "hierarchical is 1"),
        ({"local_world_size": 0}, OptionError, "local_world_size is 0"),
        ({"local_world_size": -1}, OptionError, "local_world_size is -1"),
    ],
)
def test_bad_values_are_refused_when_the_algorithm_is_made(
    options: dict[str, Any], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        Decentralized(**options)


@pytest.mark.parametrize(
    ("option", "variable", "size"), [(2, None, 2), (None, "4", 4), (2, "4", 2)]
)
def test_a_nodes_size_is_the_option_or_else_torchruns(
    monkeypatch: pytest.MonkeyPatch, option: int | None, variable: str | None, size: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    assert ByteGrad(local_world_size=option).ranks_per_node(8) == size
    assert ByteGrad(hierarchical=False, local_world_size=option).ranks_per_node(8) == 1


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, "LOCAL_WORLD_SIZE is not set"),
        ("two", "LOCAL_WORLD_SIZE is 'two'; it must be a whole number"),
        ("0", "LOCAL_WORLD_SIZE is '0'"),
        ("3", "8 ranks cannot be divided into nodes of 3"),
    ],
)
def test_a_local_world_size_of_torchruns_that_fits_no_node_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, names: str
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    with pytest.raises(OptionError, match=names):
        ByteGrad().ranks_per_node(8)
