"""JSON from anywhere: what is refused, that it is said where, and that nothing takes long."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpopt import _json
from ddpopt._json import List, MalformedError, Maybe, Number, Record, Row, Text, Whole

LIMIT = 1000
SHAPE = Record(
    {"name": Text(), "sizes": List(Whole(1, 9), 1, 3)},
    optional={"row": Row((Whole(0, 9), Maybe(Number(0, 1)))), "plain": Text(is_plain=True)},
)
GOOD: dict[str, Any] = {"name": "a", "sizes": [1, 2], "row": [3, None], "plain": "b"}


def _refused(text: str) -> str:
    with pytest.raises(MalformedError) as raised:
        _json.parse(text, SHAPE, LIMIT)
    return str(raised.value)


def test_what_has_the_shape_is_returned() -> None:
    """Lists as tuples; what is optional may be missing."""
    assert _json.parse(json.dumps(GOOD), SHAPE, LIMIT) == {
        "name": "a",
        "sizes": (1, 2),
        "row": (3, None),
        "plain": "b",
    }
    text = '{"name": "", "sizes": [1], "row": [0, 1]}'
    assert _json.parse(text, SHAPE, LIMIT)["row"] == (0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name is 3; it must be text of at most 10000 characters"),
        ({"name": "a" * 10_001}, "name is 'aaaa"),
        ({"sizes": 3}, "sizes is 3; it must be a list of 1 to 3"),
        ({"sizes": []}, "sizes is a list of 0; it must be a list of 1 to 3"),
        ({"sizes": [1] * 4}, "sizes is a list of 4; it must be"),
        ({"sizes": [1, True]}, "sizes[1] is true; it must be a whole number from 1 to 9"),
        ({"sizes": [1.0]}, "sizes[0] is 1.0; it must be a whole number from 1 to 9"),
        ({"sizes": [-1]}, "sizes[0] is -1;"),
        ({"sizes": [10**39]}, "sizes[0] is 1000"),
        ({"row": [0]}, "row is a list of 1; it must be a list of 2"),
        ({"row": [0, 2]}, "row[1] is 2; it must be a number from 0 to 1"),
        ({"row": [0, False]}, "row[1] is false; it must be a number"),
        ({"row": [0, {}]}, "row[1] is an object; it must be a number"),
        ({"plain": "a\x1b[2J"}, r"plain is 'a\x1b[2J'; it must be text without control characters"),
        ({"more\n": 1}, r"it has a key 'more\n' that is unknown here"),
    ],
)
def test_another_shape_is_refused_with_place_value_and_limit(
    change: dict[str, Any], message: str
) -> None:
    text = json.dumps({**GOOD, **change})
    with pytest.raises(MalformedError) as raised:
        _json.parse(text, SHAPE, 100_000)
    assert message in str(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is no JSON (Expecting value"),
        ("{", "it is no JSON"),
        ("[]", "it is a list of 0; it must be an object with name, sizes"),
        ('{"name": "a"}', "it has no 'sizes'"),
        ('{"name": "a", "sizes": [1], "name": "b"}', "it has the key 'name' twice in one object"),
        ('{"name": "a", "sizes": [NaN]}', "it has a number that is NaN; all must be finite"),
        ('{"name": "a", "sizes": [-Infinity]}', "it has a number that is -Infinity"),
        ('{"name": "a", "sizes": [1], "row": [0, 1e999]}', "row[1] is Infinity; it must be"),
        ("1" * 41, "it has a number of 41 characters, over the limit of 40"),
        ("0." + "1" * 99, "it has a number of 101 characters"),
        ("[" * LIMIT, "it has over 100 objects and lists in one another"),
        ("[{" + '"a":[' * 99, "it has over 100 objects and lists in one another"),
        ("]" * LIMIT, "it is no JSON"),
        (" " * (LIMIT + 1), "it has 1001 bytes or more, over the limit of 1000"),
        ("\ufeff{}", "it is no JSON"),
    ],
)
def test_what_is_no_sane_json_is_refused(text: str, message: str) -> None:
    assert message in _refused(text)


def test_depth_is_limited_wherever_python_stops() -> None:
    """Up to Python 3.11 its decoder recurses in C as deep as `sys.setrecursionlimit` allows."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        assert "over 100" in _read("[" * 10**6)
    finally:
        sys.setrecursionlimit(before)


def test_brackets_in_strings_are_no_nesting() -> None:
    """Nor are those behind an escaped quote."""
    value = {"name": '["\\' + "[" * 200, "sizes": [1]}
    assert _json.parse(json.dumps(value), SHAPE, LIMIT)["name"] == value["name"]


def test_a_number_of_a_million_digits_takes_no_time() -> None:
    """Python would need minutes for some, and has a limit that programs switch off."""
    for text in ("1" * 10**6, "-" + "9" * 10**6, "0." + "3" * 10**6, "1e" + "9" * 10**6):
        with pytest.raises(MalformedError, match="characters, over the limit of 40"):
            _json.parse(text, SHAPE, 10**7)


@settings(deadline=None)
@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda b: b.decode("latin-1")))
def test_random_text_never_raises_anything_else(text: str) -> None:
    with pytest.raises(MalformedError):
        _json.parse(text, SHAPE, LIMIT)


def _read(text: str) -> str:
    """Return why it is refused, if it is."""
    try:
        _json.parse(text, SHAPE, 10**6)
    except MalformedError as error:
        return str(error)
    return ""


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(VALUES)
def test_random_json_never_raises_anything_else(value: Any) -> None:
    """At any place of a document that is right but for it."""
    for change in (value, *({**GOOD, key: value} for key in GOOD), {**GOOD, "sizes": [1, value]}):
        assert _read(json.dumps(change)).isprintable()


def test_a_value_is_shown_short_and_without_control_characters() -> None:
    assert _json.show("\x1b]0;evil\x07\u202e\ud800") == r"'\x1b]0;evil\x07\u202e\ud800'"
    assert len(_json.show("a" * 10**6)) < 100
    assert _json.show([1] * 10**6) == "a list of 1000000"


# ---- files ------------------------------------------------------------------------------------


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("é" * 5)
    assert _json.read_text(path, 10) == "é" * 5
    with pytest.raises(MalformedError, match="it has 10 bytes or more, over the limit of 9"):
        _json.read_text(path, 9)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    """Its size is asked for first: this one has a terabyte, of holes."""
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MalformedError, match="over the limit of 100"):
        _json.read_text(path, 100)


def test_a_file_that_tells_no_size_is_read_up_to_the_limit() -> None:
    """As those in /proc, which say 0 and have more."""
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("there is no /proc")
    assert path.stat().st_size == 0
    with pytest.raises(MalformedError, match="it has 11 bytes or more, over the limit of 10"):
        _json.read_text(path, 10)
    assert _json.read_text(path, 10**6).startswith("Name:")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A pipe that nobody writes to, and a device without end."""
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(MalformedError, match="not a regular file"):
        _json.read_text(path, 100)


def test_a_socket_and_a_missing_file_are_errors_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket may have a hundred characters
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("x")
        with pytest.raises(OSError, match="No such device"):
            _json.read_text(tmp_path / "x", 100)
    with pytest.raises(FileNotFoundError):
        _json.read_text(tmp_path / "y", 100)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(MalformedError, match=r"it is no text in UTF-8 \(byte 7\)"):
        _json.read_text(path, 100)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    """Whatever was refused."""
    (tmp_path / "x").write_text("{}")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, tmp_path / "x", Path("/dev/zero")):
        for _ in range(20):
            with pytest.raises(MalformedError):
                _json.read_text(path, 1)
    assert len(os.listdir("/proc/self/fd")) == before
