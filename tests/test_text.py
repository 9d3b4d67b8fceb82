"""Files: they appear whole or not at all, and no document is believed."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpopt import _text
from ddpopt._text import MalformedError, check_can_write, new_folder, parse, write_text


def test_a_file_is_written_and_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("a much longer first text", "é\n"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_what_utf8_cannot_express_is_escaped(tmp_path: Path) -> None:
    """A name may hold half of a surrogate pair."""
    write_text(tmp_path / "x", "a\ud800b")
    assert (tmp_path / "x").read_text() == r"a\ud800b"


@pytest.mark.parametrize("has_target", [True, False])
def test_a_link_is_replaced_and_not_followed(tmp_path: Path, has_target: bool) -> None:
    """Neither to a file that there is nor to one that would be made."""
    precious, path = tmp_path / "precious", tmp_path / "x"
    if has_target:
        precious.write_text("mine")
    path.symlink_to(precious)
    write_text(path, "page")
    assert (path.read_text(), path.is_symlink()) == ("page", False)
    assert precious.exists() == has_target
    assert not has_target or precious.read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    """A device must not be replaced by a file, above all not by root."""
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = Path("/dev/null")
    before = path.lstat()
    with pytest.raises(FileExistsError, match="it is a folder, a pipe or a device; name a file"):
        write_text(path, "page")
    assert path.lstat().st_ino == before.st_ino


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    path = tmp_path / "x"
    write_text(path, "old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_text(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("x", "old")]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "x"
    for write in (check_can_write, lambda path: write_text(path, "")):
        with pytest.raises(FileNotFoundError) as raised:
            write(path)
        assert f"x cannot be written: there is no folder {path.parent}" in str(raised.value)
    check_can_write(tmp_path / "x")


def test_a_new_folder_is_its_users_alone_and_nobody_elses(tmp_path: Path) -> None:
    """Whatever has its name, a link that leads nowhere included."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    first, second, third = (new_folder(tmp_path, name) for name in ("mine", "mine", "link"))
    assert first.name == "mine"
    assert second.name.startswith("mine-")
    assert third.name.startswith("link-")
    for folder in (first, second, third):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# ---- reading ----------------------------------------------------------------------------------


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    """Of a terabyte of holes, or of a device that has no end, no more than that."""
    path = tmp_path / "x"
    path.write_text('"' + "é" * 5 + '"')
    assert parse(path, 12) == "é" * 5
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    for source in (path, "x" * 12, tmp_path / "huge", Path("/dev/zero")):
        with pytest.raises(MalformedError, match="it is over the limit of 11 bytes"):
            parse(source, 11)


# ---- documents --------------------------------------------------------------------------------

LIMIT = 10**6


@dataclasses.dataclass(frozen=True)
class Inner:
    """What has a check of its own."""

    most: int = 0

    def __post_init__(self) -> None:
        if self.most > 9:
            raise ValueError(f"most is {self.most}; it must be 9 or less")


@dataclasses.dataclass(frozen=True)
class Document:
    """A value of each kind."""

    name: str
    sizes: tuple[int, ...]
    row: tuple[int, float | None] = (0, None)
    inner: Inner = Inner()  # frozen


GOOD: dict[str, Any] = {"name": "a", "sizes": [1, 2], "row": [3, None], "inner": {"most": 4}}


def _build(text: str) -> Document:
    document: Document = _text.build(Document, parse(text, LIMIT))
    return document


def _refused(text: str) -> str:
    with pytest.raises(MalformedError) as raised:
        _build(text)
    return str(raised.value)


def test_what_is_of_the_type_is_returned() -> None:
    """Lists as tuples; what has a default may be missing."""
    assert _build(json.dumps(GOOD)) == Document("a", (1, 2), (3, None), Inner(4))
    assert _build('{"name": "", "sizes": [], "row": [0, 1.5]}') == Document("", (), (0, 1.5))


def test_where_further_keys_are_open_they_are_left_out() -> None:
    """At any depth."""
    value = {**GOOD, "more": 1, "inner": {"most": 4, "more": 1}}
    assert _text.build(Document, value, is_open=True) == _build(json.dumps(GOOD))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name is 3; it must be text"),
        ({"name": ["a" * 10_001]}, "name is a list of 1 item"),
        ({"sizes": 3}, "sizes is 3; it must be a list"),
        ({"sizes": "a\x1b[2J" + "b" * 10_001}, r"sizes is 'a\x1b[2Jbbb"),
        ({"sizes": [1, True]}, "sizes[1] is true; it must be a whole number below 2**63"),
        ({"sizes": [1.0]}, "sizes[0] is 1.0; it must be a whole number"),
        ({"sizes": [10**39]}, "sizes[0] is 1000"),
        ({"sizes": [-(2**63)]}, "sizes[0] is -9223"),
        ({"row": [0]}, "row is a list of 1 item; it must be a list of 2 items"),
        ({"row": [0, 1e19]}, "row[1] is 1e+19; it must be a number below 2**63"),
        ({"row": [0, False]}, "row[1] is false; it must be a number"),
        ({"row": [0, {}]}, "row[1] is an object; it must be a number"),
        ({"inner": {"most": "4"}}, "inner.most is '4'; it must be a whole number"),
        ({"inner": {"most": 10}}, "inner: most is 10; it must be 9 or less"),
        ({"inner": {"least": 1}}, "inner has a key 'least' that is unknown here"),
        ({"more\n": 1}, r"it has a key 'more\n' that is unknown here"),
    ],
)
def test_another_type_is_refused_with_place_value_and_limit(
    change: dict[str, Any], message: str
) -> None:
    text = json.dumps({**GOOD, **change})
    with pytest.raises(MalformedError) as raised:
        _build(text)
    assert message in str(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not JSON (Expecting value"),
        ("{", "it is not JSON"),
        ("[]", "it is an empty list; it must be an object with name, sizes"),
        ('{"name": "a"}', "it has no 'sizes'"),
        ('{"name": "a", "sizes": [NaN]}', "sizes[0] is NaN; it must be a whole number"),
        ('{"name": "a", "sizes": [-Infinity]}', "sizes[0] is -Infinity; it must be"),
        ('{"name": "a", "sizes": [1], "row": [0, 1e999]}', "row[1] is Infinity; it must be"),
        ('{"name": "a", "sizes": [1], "row": [0, NaN]}', "row[1] is NaN; it must be a number"),
        ("[" * 10**5, "it is not JSON (maximum recursion depth exceeded"),
        ("9" * 10**5, "it is not JSON (Exceeds the limit"),
        ("]" * LIMIT, "it is not JSON"),
        ("\ufeff{}", "it is not JSON"),
    ],
)
def test_what_is_no_such_document_is_refused(text: str, message: str) -> None:
    assert message in _refused(text)


@settings(deadline=None)
@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda b: b.decode("latin-1")))
def test_random_text_never_raises_anything_else(text: str) -> None:
    with pytest.raises(MalformedError):
        _build(text)


def _read(text: str) -> str:
    """Return why it is refused, if it is."""
    try:
        _build(text)
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
    assert _text.show("\x1b]0;evil\x07\u202e\ud800") == r"'\x1b]0;evil\x07\u202e\ud800'"
    assert len(_text.show("a" * 10**6)) < 100
    assert _text.show([1] * 10**6) == "a list of 1000000 items"
