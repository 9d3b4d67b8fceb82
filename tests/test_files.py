"""Files of others: no link is followed, nobody's file replaced, and no document is believed.

Tests may run as root, whom no permission stops: what is looked at is what the code decides.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpopt import _files
from ddpopt._files import MalformedError, PrivateFolder, check_can_write, read_text, write_text

OTHER = 12345  # a user


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


def test_modes_are_those_that_the_user_wants(tmp_path: Path) -> None:
    """By the umask for a new file, as before for one that is replaced."""
    path = tmp_path / "x"
    before = os.umask(0o027)
    try:
        write_text(path, "a")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        write_text(path, "b")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("has_target", [True, False])
def test_a_link_that_was_planted_is_not_followed(tmp_path: Path, has_target: bool) -> None:
    """Neither to a file of ours nor to one that would be made."""
    precious, planted = tmp_path / "precious", tmp_path / "x"
    if has_target:
        precious.write_text("mine")
    planted.symlink_to(precious)
    with pytest.raises(FileExistsError, match="links are not followed; name the file"):
        write_text(planted, "theirs")
    assert planted.is_symlink()
    assert precious.exists() == has_target
    assert not has_target or precious.read_text() == "mine"


def test_a_link_that_is_planted_in_the_last_moment_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all checks: the move puts the file where the link is."""
    precious, path = tmp_path / "precious", tmp_path / "x"
    precious.write_text("mine")
    replace = os.replace

    def plant_and_replace(source: Path, target: Path) -> None:
        path.symlink_to(precious)
        replace(source, target)

    monkeypatch.setattr(os, "replace", plant_and_replace)
    write_text(path, "page")
    assert precious.read_text() == "mine"
    assert path.read_text() == "page"
    assert not path.is_symlink()


def test_another_name_of_the_same_file_keeps_its_content(tmp_path: Path) -> None:
    """A hard link may have been planted too."""
    precious, planted = tmp_path / "precious", tmp_path / "x"
    precious.write_text("mine")
    os.link(precious, planted)
    write_text(planted, "page")
    assert (precious.read_text(), planted.read_text()) == ("mine", "page")


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


def _as(monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    """Make new files belong to `user`, as far as the code is told."""
    fstat = os.fstat

    def told(descriptor: int) -> Any:
        status = list(fstat(descriptor))
        status[4] = user
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", told)


def test_another_users_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where permissions would allow to replace it; root may."""
    path = tmp_path / "rank0.json"
    path.write_text("theirs")
    _as(monkeypatch, OTHER)
    with pytest.raises(FileExistsError, match=r"belongs to another user \(uid \d+\); name another"):
        write_text(path, "mine")
    assert path.read_text() == "theirs"
    assert [file.name for file in tmp_path.iterdir()] == ["rank0.json"]
    _as(monkeypatch, 0)
    write_text(path, "mine")
    assert path.read_text() == "mine"


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


# ---- folders ----------------------------------------------------------------------------------


def test_a_private_folder_is_new_and_its_users_alone(tmp_path: Path) -> None:
    first, second = (PrivateFolder.make(tmp_path, "mine") for _ in range(2))
    inner = first.make_inside("inner")
    inner.write_text("x", "long text")
    inner.write_text("x", "text")
    assert first.path == tmp_path / "mine"
    assert second.path.name.startswith("mine-")
    assert (tmp_path / "mine" / "inner" / "x").read_text() == "text"
    for folder in (first, second, inner):
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_was_put_in_its_place_is_not_written_to(tmp_path: Path, kind: str) -> None:
    """The owner of the folder above moves ours away, and puts a link to our own files there."""
    precious = tmp_path / "precious"
    (precious / "4_0").mkdir(parents=True)
    (precious / "4_0" / "plan.json").write_text("mine")
    process = PrivateFolder.make(tmp_path, "rank0-pid1")
    folder = process.make_inside("4_0")
    process.path.rename(tmp_path / "away")
    if kind == "link":
        process.path.symlink_to(precious)
    else:
        precious.rename(process.path)
        precious = process.path
    with pytest.raises(OSError, match="is not the folder that was made there"):
        folder.write_text("plan.json", "page")
    with pytest.raises(OSError, match="is not the folder"):
        process.make_inside("5_0")
    assert (precious / "4_0" / "plan.json").read_text() == "mine"
    assert [path.name for path in precious.iterdir()] == ["4_0"]


def test_a_link_in_a_private_folder_is_not_followed(tmp_path: Path) -> None:
    folder = PrivateFolder.make(tmp_path, "mine")
    (folder.path / "x").symlink_to(tmp_path / "y")
    with pytest.raises(OSError, match="symbolic links"):
        folder.write_text("x", "")
    assert not (tmp_path / "y").exists()


def test_writing_leaves_no_descriptor_open(tmp_path: Path) -> None:
    folder = PrivateFolder.make(tmp_path, "mine")
    before = len(os.listdir("/proc/self/fd"))
    for k in range(20):
        folder.make_inside("inner").write_text("x", "")
        write_text(tmp_path / f"{k}", "")
    assert len(os.listdir("/proc/self/fd")) == before


# ---- reading ----------------------------------------------------------------------------------


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("é" * 5)
    assert read_text(path, 10) == "é" * 5
    with pytest.raises(MalformedError, match="it has 10 bytes or more, over the limit of 9"):
        read_text(path, 9)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    """Its size is asked for first: this one has a terabyte, of holes."""
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MalformedError, match="over the limit of 100"):
        read_text(path, 100)


def test_a_file_that_tells_no_size_is_read_up_to_the_limit() -> None:
    """As those in /proc, which say 0 and have more."""
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("there is no /proc")
    assert path.stat().st_size == 0
    with pytest.raises(MalformedError, match="it has 11 bytes or more, over the limit of 10"):
        read_text(path, 10)
    assert read_text(path, 10**6).startswith("Name:")


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
        read_text(path, 100)


def test_a_socket_and_a_missing_file_are_errors_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket may have a hundred characters
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("x")
        with pytest.raises(OSError, match="No such device"):
            read_text(tmp_path / "x", 100)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "y", 100)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(MalformedError, match=r"it is not text in UTF-8 \(byte 7\)"):
        read_text(path, 100)


def test_reading_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """Whatever was refused."""
    (tmp_path / "x").write_text("{}")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, tmp_path / "x", Path("/dev/zero")):
        for _ in range(20):
            with pytest.raises(MalformedError):
                read_text(path, 1)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- documents --------------------------------------------------------------------------------

LIMIT = 1000


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


def _build(text: str, limit: int = LIMIT) -> Document:
    document: Document = _files.build(Document, _files.parse(text, limit))
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
    assert _files.build(Document, value, is_open=True) == _build(json.dumps(GOOD))


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
        _build(text, limit=100_000)
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
        ('{"name": "a", "sizes": [1], "name": "b"}', "it has the key 'name' twice in one object"),
        ('{"name": "a", "sizes": [NaN]}', "it has a number that is NaN; all must be finite"),
        ('{"name": "a", "sizes": [-Infinity]}', "it has a number that is -Infinity"),
        ('{"name": "a", "sizes": [1], "row": [0, 1e999]}', "row[1] is Infinity; it must be"),
        ("1" * 41, "it has a number of 41 characters, over the limit of 40"),
        ("0." + "1" * 99, "it has a number of 101 characters"),
        ("[" * LIMIT, "it has over 100 objects and lists in one another"),
        ("[{" + '"a":[' * 99, "it has over 100 objects and lists in one another"),
        ("]" * LIMIT, "it is not JSON"),
        (" " * (LIMIT + 1), "it has 1001 bytes or more, over the limit of 1000"),
        ("\ufeff{}", "it is not JSON"),
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
    assert _build(json.dumps(value)).name == value["name"]


def test_a_number_of_a_million_digits_takes_no_time() -> None:
    """Python would need minutes for some, and has a limit that programs switch off."""
    for text in ("1" * 10**6, "-" + "9" * 10**6, "0." + "3" * 10**6, "1e" + "9" * 10**6):
        with pytest.raises(MalformedError, match="characters, over the limit of 40"):
            _files.parse(text, 10**7)


@settings(deadline=None)
@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda b: b.decode("latin-1")))
def test_random_text_never_raises_anything_else(text: str) -> None:
    with pytest.raises(MalformedError):
        _build(text)


def _read(text: str) -> str:
    """Return why it is refused, if it is."""
    try:
        _build(text, limit=10**6)
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
    assert _files.show("\x1b]0;evil\x07\u202e\ud800") == r"'\x1b]0;evil\x07\u202e\ud800'"
    assert len(_files.show("a" * 10**6)) < 100
    assert _files.show([1] * 10**6) == "a list of 1000000 items"
