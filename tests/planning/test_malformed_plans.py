"""Whatever a plan's file has in it: it is a plan that says so, or a short `PlanError`."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpopt import BucketPlan
from ddpopt.cli.main import main
from ddpopt.errors import PlanError
from tests.support.models import MLP
from tests.support.plans import plan_of

PLAN = json.loads(plan_of(MLP(2), (1, 2, 1)).to_json())
LONGEST_MESSAGE = 500


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.0, "", "x", "1", [], {}, [0], {"a": 1}),
    *(math.nan, math.inf, -math.inf, 1e-320, 1e300, 2**63, 10**17, 10**400),
    *("x" * 10_000, ["x"] * 10_000, {f"x{k}": k for k in range(1000)}, "\ud800", "\0\n"),
    *(_nested(20), _nested(400), [[]] * 50),
]


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from _places(inner, (*place, key))


def _changed(place: tuple[Any, ...], rng: random.Random) -> Any:
    """The plan with another value at a place, or without it, or with something beside it."""
    plan = copy.deepcopy(PLAN)
    if not place:
        return rng.choice(VALUES)
    owner = plan
    for key in place[:-1]:
        owner = owner[key]
    kind = rng.randrange(4)
    if kind == 0:
        del owner[place[-1]]
    elif kind == 1 and isinstance(owner, dict):
        owner[rng.choice(["", "other", "x" * 5000, "\ud800"])] = owner[place[-1]]
    elif kind == 1:
        owner.append(owner[place[-1]])  # two of one name
    else:
        owner[place[-1]] = copy.deepcopy(rng.choice(VALUES))
    return plan


def _texts() -> Iterator[bytes]:
    """Plans that are changed at every place, and files that are hardly JSON."""
    rng = random.Random(0)
    places = list(_places(PLAN))
    for place in places * (1000 // len(places) + 1):
        yield json.dumps(_changed(place, rng)).encode()
    whole = json.dumps(PLAN).encode()
    yield from (b"", b" ", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"\0" * 100)
    yield from (b"1" * 10_000, b'{"version": ' + b"1" * 5000 + b"}", b'"' + b"x" * 100_000)
    yield whole.replace(b'"sizes"', b'"sizes": [4], "sizes"')
    yield whole.decode().encode("utf-16")  # as JSON may be
    for _ in range(200):
        start = rng.randrange(len(whole))
        cut = whole[:start]
        yield rng.choice(
            [cut, cut + rng.randbytes(3) + whole[start + 3 :], cut + b"\xff", whole[start:]]
        )


def _says_the_same(text: bytes, plan: BucketPlan) -> bool:
    """Whether all that a file says is in the plan; older releases wrote two things more."""
    said, read = json.loads(text), json.loads(plan.to_json())
    for key in ("hash", "communication"):
        said.pop(key, None)
    return all(_is_in(said[key], read[key]) for key in said)


def _is_in(said: Any, read: Any) -> bool:
    if isinstance(said, dict):
        return said.keys() <= read.keys() and all(_is_in(said[key], read[key]) for key in said)
    if isinstance(said, list):
        return len(said) == len(read) and all(map(_is_in, said, read))
    return said == read and isinstance(said, bool) == isinstance(read, bool)


def test_whatever_a_file_says_it_is_read_as_that_or_refused_in_a_few_words(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    num_read = num_refused = 0
    for text in _texts():
        path.write_bytes(text)
        try:
            plan = BucketPlan.load(path)
        except PlanError as error:
            num_refused += 1
            message = str(error).removeprefix(str(path))
            assert 0 < len(message) <= LONGEST_MESSAGE, message[:2000]
            assert len(message.splitlines()) == 1, message
        else:
            num_read += 1
            assert _says_the_same(text, plan), text[:500]
            assert BucketPlan.from_json(plan.to_json()) == plan
            assert len(str(plan)) > 0  # what is predicted of it is finite
            assert math.isfinite(plan.timeline().iteration_s)
    assert num_read + num_refused > 1200
    assert num_read > 50


@pytest.mark.parametrize(
    "text", ["[" * 100_000, json.dumps({**PLAN, "world_size": 10**400}), "1" * 10_000, ""]
)
def test_the_commands_say_in_a_line_what_is_wrong_with_a_plan(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(tmp_path / "plan.json"), "--world-size", "4"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err) < LONGEST_MESSAGE + len(str(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--world-size", "9" * 5000],
        ["--world-size", "x" * 5000],
        ["--world-size", "4", "--bandwidth", "9" * 5000],
        ["--world-size", "4", "--bandwidth", "9" * 5000 + "gbit", "--latency-us", "1e300"],
        ["--world-size", "4", "--latency-us", "x" * 5000],
        ["--world-size", "4", "--bandwidth", "1gbit", "--ranks-per-node", "9" * 5000],
        ["--world-size", "4", "--stragglers", "nan"],
        ["--world-size", "4", "--seed", "9" * 5000],
    ],
)
def test_arguments_beyond_all_limits_are_refused_in_a_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(tmp_path / "plan.json"), *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in error
    assert len(error) < LONGEST_MESSAGE
