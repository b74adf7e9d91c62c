"""Sources that change, vanish, fail or end early: nothing wrong is read."""

import errno
import os
from collections.abc import Callable
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


def test_a_local_source_that_was_written_to_is_an_error_from_then_on(local: Path) -> None:
    source = LocalSource(local)
    assert source.read(190, 50) == bytes(range(190, 200))
    with open(local, "r+b") as file:
        file.write(b"other")
    for _ in range(2):
        with pytest.raises(OSError, match=r"its size or time changed. Put it back and mount again"):
            source.read(0, 10)
    source.close()


def test_a_local_source_that_was_cut_is_an_error(local: Path) -> None:
    source = LocalSource(local)
    os.truncate(local, 100)
    with pytest.raises(OSError, match="changed"):
        source.read(0, 200)
    source.close()


def vanish(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(200))
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [(vanish, "cannot be found any more"), (replace, "another file has its name now")],
)
def test_a_local_source_that_vanished_or_was_replaced_is_an_error(
    local: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], why: str
) -> None:
    monkeypatch.setattr(sample_sources, "LOOK_S", -1)
    source = LocalSource(local)
    change(local)
    with pytest.raises(OSError, match=why) as raised:
        source.read(0, 10)
    assert raised.value.errno == errno.EIO
    source.close()


def test_a_source_that_changed_before_it_was_opened_is_an_error(local: Path) -> None:
    expected = os.stat(local)
    local.write_bytes(bytes(300))
    with pytest.raises(OSError, match="is not what was opened"):
        LocalSource(local, expected)


def test_a_read_beyond_the_end_is_empty(local: Path) -> None:
    source = LocalSource(local)
    assert source.read(200, 10) == source.read(10**12, 10) == b""
    source.close()


@pytest.mark.parametrize("url", ["nowhere", "nothing://x/y", "memory://none"])
def test_a_source_that_is_nowhere_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match=r"nothing at|cannot be opened"):
        open_files(url if "://" in url else str(tmp_path / url))


def test_a_folder_a_file_and_a_prefix_are_sources(tmp_path: Path) -> None:
    for name in ("a.bin", "a.idx", "below/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    assert sorted(open_files(str(tmp_path))) == ["a.bin", "a.idx", "below/x.jsonl"]
    assert sorted(open_files(str(tmp_path / "a"))) == ["a.bin", "a.idx"]
    assert sorted(open_files(f"file://{tmp_path}/a.bin")) == ["a.bin"]


def test_a_folder_that_a_link_leads_to_is_part_of_a_source(tmp_path: Path) -> None:
    for name in ("set/a.bin", "else/b.bin", "else/below/c.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "set" / "link").symlink_to(tmp_path / "else")
    (tmp_path / "else" / "back").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "itself").symlink_to("itself")
    found = open_files(str(tmp_path / "set"))
    assert sorted(found) == ["a.bin", "link/b.bin", "link/below/c.bin"]
