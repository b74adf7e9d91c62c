"""Sources that change, vanish, fail or end early: nothing wrong is read."""

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from scalai.core.errors import UsageError
from scalai.vfs import sample_sources
from scalai.vfs.sample_sources import LocalSource, open_files

pytestmark = pytest.mark.fault


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.bin"
    path.write_bytes(bytes(range(200)))
    os.utime(path, (1000, 1000))
    return path


def write(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"other")


def cut(path: Path) -> None:
    os.truncate(path, 100)


def vanish(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(200))
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (write, "its size or time changed. Put it back and mount again"),
        (cut, "its size or time changed"),
        (vanish, "cannot be found any more"),
        (replace, "another file has its name now"),
    ],
)
def test_a_local_source_that_is_not_what_it_was_is_an_error_from_then_on(
    local: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], why: str
) -> None:
    monkeypatch.setattr(sample_sources, "LOOK_S", -1)
    with closing(LocalSource(local)) as source:
        assert source.read(190, 50) == bytes(range(190, 200))
        change(local)
        for _ in range(2):
            with pytest.raises(OSError, match=why) as raised:
                source.read(0, 200)
            assert raised.value.errno == errno.EIO


def test_a_source_that_changed_before_it_was_opened_is_an_error(local: Path) -> None:
    expected = os.stat(local)
    local.write_bytes(bytes(300))
    with pytest.raises(OSError, match="is not what was opened"):
        LocalSource(local, expected)


def test_a_read_beyond_the_end_is_empty(local: Path) -> None:
    with closing(LocalSource(local)) as source:
        assert source.read(200, 10) == source.read(10**12, 10) == b""


@pytest.mark.parametrize("url", ["nowhere", "nothing://x/y", "memory://none"])
def test_a_source_that_is_nowhere_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match=r"nothing at|cannot be opened"):
        open_files(url if "://" in url else str(tmp_path / url))


def files_at(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode())


def test_a_folder_a_file_and_a_prefix_are_sources(tmp_path: Path) -> None:
    files_at(tmp_path, "a.bin", "a.idx", "below/x.jsonl")
    assert sorted(open_files(str(tmp_path))) == ["a.bin", "a.idx", "below/x.jsonl"]
    assert sorted(open_files(str(tmp_path / "a"))) == ["a.bin", "a.idx"]
    assert sorted(open_files(f"file://{tmp_path}/a.bin")) == ["a.bin"]


def test_a_folder_that_a_link_leads_to_is_part_of_a_source(tmp_path: Path) -> None:
    files_at(tmp_path, "set/a.bin", "else/b.bin", "else/below/c.bin")
    (tmp_path / "set" / "link").symlink_to(tmp_path / "else")
    (tmp_path / "else" / "back").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "itself").symlink_to("itself")
    found = open_files(str(tmp_path / "set"))
    assert sorted(found) == ["a.bin", "link/b.bin", "link/below/c.bin"]
