"""Files, which appear whole or not at all, and values as errors quote them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from ddpopt._text import check_can_write, new_folder, quote, write_text


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
    """A link is not followed to a file, nor to where one would be made."""
    precious, path = tmp_path / "precious", tmp_path / "x"
    if has_target:
        precious.write_text("precious")
    path.symlink_to(precious)
    write_text(path, "page")
    assert (path.read_text(), path.is_symlink()) == ("page", False)
    assert precious.exists() == has_target
    assert not has_target or precious.read_text() == "precious"


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
    """The folder gets another name where anything has its name, a dangling link included."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    first, second, third = (new_folder(tmp_path, name) for name in ("new", "new", "link"))
    assert first.name == "new"
    assert second.name.startswith("new-")
    assert third.name.startswith("link-")
    for folder in (first, second, third):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("2", "'2'"),
        (-(10**5000), "a whole number of 16610 bits"),
        ([[[[[1]]]]], "[[[...]]]"),
        ("a\nb", r"'a\nb'"),
        (torch.zeros(2), "tensor([0., 0.])"),
    ],
    ids=range(5),
)
def test_a_value_is_quoted_in_a_line(value: object, text: str) -> None:
    assert quote(value) == text


@pytest.mark.parametrize(
    "value", ["x" * 10_000, b"x" * 10_000, ["x" * 99] * 99, torch.eye(99)], ids=type
)
def test_a_long_value_is_quoted_by_its_ends(value: object) -> None:
    assert len(quote(value)) <= 120
    assert "..." in quote(value)
