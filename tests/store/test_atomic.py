"""Files that are replaced whole, or not at all."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scalai.store.atomic import make_folder, partial_of, replace_file, write_new


def test_a_write_that_fails_leaves_the_old_content_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    replace_file(path, b"the old content, and longer")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", full)
        replace_file(path, b"the new content, which is the longest of them all")
    assert path.read_bytes() == b"the old content, and longer"
    assert partial_of(path).exists()
    replace_file(path, b"short")
    assert path.read_bytes() == b"short" and os.listdir(tmp_path) == ["state"]


def test_room_that_was_made_beforehand_is_used(tmp_path: Path) -> None:
    path = tmp_path / "state"
    partial_of(path).write_bytes(bytes(4096))
    number = partial_of(path).stat().st_ino
    replace_file(path, b"content", mode=0o600)
    assert path.read_bytes() == b"content" and path.stat().st_ino == number


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_new_file_has_the_mode_that_is_asked_for(tmp_path: Path, mode: int) -> None:
    replace_file(tmp_path / "state", b"", mode=mode)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == mode & ~0o022


def test_what_is_not_durable_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fsync")
    replace_file(tmp_path / "state", b"content", is_durable=False)
    assert (tmp_path / "state").read_bytes() == b"content"


def test_several_writers_of_one_file_leave_the_content_of_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(
            lambda n: replace_file(path, b"%d" % n * 4096, is_shared=True), range(8)
        ))  # fmt: skip
    assert len(set(path.read_bytes())) == 1 and len(path.read_bytes()) == 4096
    assert os.listdir(tmp_path) == ["state"]


def test_a_shared_write_that_fails_leaves_nothing_beside(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "state", b"content", is_shared=True)
    assert os.listdir(tmp_path) == ["state"]


def test_a_new_file_is_never_written_over(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    write_new(tmp_path / "a" / "b" / "c", b"first")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a" / "b" / "c", b"second")
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"first"
