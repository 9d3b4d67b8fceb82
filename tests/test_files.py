"""Files in folders of others: no link is followed, and nobody else's file is replaced.

Tests may run as root, whom no permission stops: what is looked at is what the code decides.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ddpopt import _files
from ddpopt._files import PrivateFolder, find_obstacle, write_text

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
    assert f"there is no folder {path.parent}" in find_obstacle(path)
    with pytest.raises(FileNotFoundError, match="x is not written: there is no folder"):
        write_text(path, "")
    assert find_obstacle(tmp_path / "x") == ""


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
    with pytest.raises(OSError, match=r"is not the folder|Not a directory|symbolic links"):
        process.make_inside("5_0")
    assert (precious / "4_0" / "plan.json").read_text() == "mine"
    assert [path.name for path in precious.iterdir()] == ["4_0"]


def test_a_link_in_a_private_folder_is_not_followed(tmp_path: Path) -> None:
    folder = PrivateFolder.make(tmp_path, "mine")
    (folder.path / "x").symlink_to(tmp_path / "y")
    with pytest.raises(OSError, match="symbolic links"):
        folder.write_text("x", "")
    assert not (tmp_path / "y").exists()


def test_where_the_system_knows_no_descriptors_of_folders_names_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""
    monkeypatch.setattr(_files, "_HAS_DESCRIPTORS", False)
    folder = PrivateFolder.make(tmp_path, "mine").make_inside("inner")
    folder.write_text("x", "text")
    assert (tmp_path / "mine" / "inner" / "x").read_text() == "text"


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    folder = PrivateFolder.make(tmp_path, "mine")
    before = len(os.listdir("/proc/self/fd"))
    for k in range(20):
        folder.make_inside("inner").write_text("x", "")
        write_text(tmp_path / f"{k}", "")
    assert len(os.listdir("/proc/self/fd")) == before
