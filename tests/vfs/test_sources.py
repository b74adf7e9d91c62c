"""Sources that change, vanish, fail or end early: nothing wrong is read."""

import errno
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from scalai.core.errors import UsageError
from scalai.remote import silences
from scalai.remote.files import remote_file
from scalai.remote.patience import Patience
from scalai.vfs import sources
from scalai.vfs.cache import BLOCK_BYTES, BlockCache
from scalai.vfs.dataset import open_files
from scalai.vfs.sources import LocalSource, RemoteSource

PATH = "bucket/corpus.bin"
URL = f"far://{PATH}"


class Far:
    """A file system far away, of one file."""

    protocol = "far"

    def __init__(self, data: bytes, tag: str | None = "1") -> None:
        self.data, self.tag = data, tag
        self.fails: list[Exception] = []
        self.reads = 0
        self.is_short = False

    def info(self, path: str) -> Mapping[str, Any]:
        if self.fails:
            raise self.fails.pop(0)
        return {"name": path, "size": len(self.data), "type": "file", "ETag": self.tag}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.reads += 1
        if self.fails:
            raise self.fails.pop(0)
        return self.data[start : end - 1 if self.is_short else end]

    def invalidate_cache(self, path: str) -> None:
        pass


class Clock:
    """Time that passes only where somebody pauses."""

    def __init__(self) -> None:
        self.now = 0.0

    def pause(self, seconds: float) -> None:
        self.now += seconds


def far(files: Far, cache: BlockCache | None = None) -> RemoteSource:
    clock = Clock()
    patience = Patience(URL, 3.0, clock.pause, lambda: clock.now)
    return RemoteSource(URL, remote_file(files, PATH), cache or BlockCache(), patience)


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


def test_a_local_source_that_vanished_is_an_error(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOOK_S", -1)
    source = LocalSource(local)
    local.unlink()
    with pytest.raises(OSError, match="cannot be found any more") as raised:
        source.read(0, 10)
    assert raised.value.errno == errno.EIO
    source.close()


def test_a_local_source_whose_name_is_another_files_is_an_error(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOOK_S", -1)
    source = LocalSource(local)
    other = local.with_name("other")
    other.write_bytes(bytes(200))
    other.replace(local)
    with pytest.raises(OSError, match="another file has its name now"):
        source.read(0, 10)
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
    remote = far(Far(b"abc"))
    assert remote.read(3, 1) == b"" and remote.read(2, 9) == b"c"


def test_a_remote_source_that_changed_gives_none_of_its_new_bytes() -> None:
    files = Far(bytes(6 * BLOCK_BYTES))
    source = far(files)
    assert source.read(0, 4) == bytes(4)
    files.data, files.tag = b"\1" * 6 * BLOCK_BYTES, "2"
    with pytest.raises(OSError, match=f"{URL} changed since it was opened"):
        source.read(5 * BLOCK_BYTES, 4)
    reads = files.reads
    with pytest.raises(OSError, match="changed since"):
        source.read(0, 4)
    assert files.reads == reads, "it is not tried again"


def test_errors_that_pass_are_tried_again_and_others_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = Far(b"0123456789")
    source = far(files)
    files.fails = [OSError("reset"), TimeoutError("slow"), RuntimeError("503")]
    assert source.read(2, 3) == b"234"
    other = far(files)
    files.fails = [OSError("reset")] * 99
    with pytest.raises(OSError, match=r"cannot be read within 3 s \(4 tries\): reset") as raised:
        other.read(0, 1)
    assert raised.value.errno == errno.EIO
    files.fails, reads = [], files.reads
    with pytest.raises(OSError, match="reset"):
        other.read(0, 1)
    assert files.reads == reads, "who waited for the same failure does not wait once more"
    monkeypatch.setattr(silences, "SHARED_S", 0)
    assert other.read(0, 1) == b"0", "a source that comes back is read"


def test_a_remote_source_that_vanished_is_said_at_once() -> None:
    files = Far(b"0123456789")
    source = far(files)
    files.fails = [FileNotFoundError(PATH)]
    with pytest.raises(OSError, match="is not there") as raised:
        source.read(0, 1)
    assert raised.value.errno == errno.EIO and files.reads == 1


def test_a_short_answer_is_never_taken_for_the_bytes() -> None:
    files = Far(b"0123456789")
    source = far(files)
    files.is_short = True
    with pytest.raises(OSError, match="9 bytes came instead of 10"):
        source.read(0, 5)


def test_a_source_that_says_no_size_is_refused() -> None:
    files = Far(b"")
    files.info = lambda path: {"size": None}  # type: ignore[method-assign]
    with pytest.raises(OSError, match="does not say its size"):
        far(files)


def test_blocks_are_fetched_once_and_ahead_of_who_reads_in_order() -> None:
    files = Far(bytes(4 * BLOCK_BYTES))
    cache = BlockCache()
    source = far(files, cache)
    done = threading.Event()
    for offset in range(0, 100, 10):
        source.read(offset, 10)
    cache.beside(("other", 0), done.set)
    assert done.wait(20)
    source.read(BLOCK_BYTES - 1, 2)
    assert files.reads <= 4
    cache.close()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_the_cache_keeps_its_limit_and_what_was_used_last(tmp_path: Path, is_on_disk: bool) -> None:
    cache = BlockCache(100, tmp_path if is_on_disk else None)
    for number in range(4):
        cache.put(("a", number), bytes([number]) * 30)
        assert cache.get(("a", 0)) is not None
    assert [cache.has(("a", number)) for number in range(4)] == [True, False, True, True]
    cache.put(("a", 9), bytes(101))
    assert not cache.has(("a", 9)), "one that is larger than all the room is not kept"
    held = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert held <= 100 and bool(held) is is_on_disk
    cache.close()
    assert not list(tmp_path.iterdir())


def test_a_full_or_damaged_cache_disk_costs_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BlockCache(1000, tmp_path)
    cache.put(("a", 0), b"whole")
    held = next(path for path in tmp_path.rglob("*") if path.is_file())
    os.truncate(held, 2)
    assert cache.get(("a", 0)) is None

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    source = far(Far(b"0123456789"), cache)
    assert source.read(0, 5) == source.read(0, 5) == b"01234"
    assert caplog.text.count("event=cache_full") == 1
    cache.close()


def test_what_a_killed_process_left_on_the_cache_disk_goes(tmp_path: Path) -> None:
    left = tmp_path / "scalai-blocks-left"
    left.mkdir()
    (left / "1").write_bytes(b"x")
    first = BlockCache(1000, tmp_path)
    second = BlockCache(1000, tmp_path)
    assert not left.exists()
    second.put(("a", 0), b"x")
    first.put(("a", 0), b"y")
    assert (first.get(("a", 0)), second.get(("a", 0))) == (b"y", b"x")
    first.close()
    second.close()


@pytest.mark.parametrize("url", ["nowhere", "nothing://x/y", "memory://none"])
def test_a_source_that_is_nowhere_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match=r"nothing at|cannot be opened"):
        open_files(url if "://" in url else str(tmp_path / url), BlockCache())


def test_a_folder_a_file_and_a_prefix_are_sources(tmp_path: Path) -> None:
    for name in ("a.bin", "a.idx", "below/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    cache = BlockCache()
    assert sorted(open_files(str(tmp_path), cache)) == ["a.bin", "a.idx", "below/x.jsonl"]
    assert sorted(open_files(str(tmp_path / "a"), cache)) == ["a.bin", "a.idx"]
    assert sorted(open_files(f"file://{tmp_path}/a.bin", cache)) == ["a.bin"]


def test_a_folder_that_a_link_leads_to_is_part_of_a_source(tmp_path: Path) -> None:
    for name in ("set/a.bin", "else/b.bin", "else/below/c.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "set" / "link").symlink_to(tmp_path / "else")
    (tmp_path / "else" / "back").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "itself").symlink_to("itself")
    found = open_files(str(tmp_path / "set"), BlockCache())
    assert sorted(found) == ["a.bin", "link/b.bin", "link/below/c.bin"]


class Broken(MemoryFileSystem):
    """A file system whose library has errors of its own."""

    protocol = "broken"

    def info(self, path: str, **options: object) -> dict[str, object]:
        raise RuntimeError("no credentials")


def test_a_file_system_with_errors_of_its_own_is_refused_in_words() -> None:
    fsspec.register_implementation("broken", Broken, clobber=True)
    with pytest.raises(UsageError, match=r"broken://x cannot be looked at .* no credentials"):
        open_files("broken://x", BlockCache(), 0.5)


def test_a_file_system_that_is_no_disk_is_read_in_blocks(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    data = bytes(range(256)) * 40_000
    memory.pipe({"/bucket/a.bin": data, "/bucket/below/b.jsonl": b"{}\n"})
    try:
        found = open_files("memory://bucket", BlockCache(directory=tmp_path))
        assert sorted(found) == ["a.bin", "below/b.jsonl"]
        source = found["a.bin"]()
        assert source.read(BLOCK_BYTES - 5, 10) == data[BLOCK_BYTES - 5 : BLOCK_BYTES + 5]
        assert source.read(len(data) - 5, 10) == data[-5:]
        memory.pipe("/bucket/below/b.jsonl", b"{}\n")
        assert found["below/b.jsonl"]().read(0, 9) == b"{}\n"
        memory.rm("/bucket/a.bin")
        with pytest.raises(OSError, match="is not there"):
            RemoteSource(
                "memory://bucket/a.bin", remote_file(memory, "/bucket/a.bin"), BlockCache()
            )
    finally:
        memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_blocks_make_way_and_no_reader_waits_for_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_disk: bool
) -> None:
    cache = BlockCache(100, tmp_path if is_on_disk else None)
    touched = list[bool]()
    for name in ("write_bytes", "unlink"):
        real = getattr(Path, name)

        def touch(self: Path, *given: Any, real: Any = real, **named: Any) -> Any:
            touched.append(cache._mutex.locked())
            return real(self, *given, **named)

        monkeypatch.setattr(Path, name, touch)
    for number in range(30):
        cache.put(("f", number % 12), bytes([number]) * 20)
    held = {n: cache.get(("f", n)) for n in range(12)}
    assert {n: data for n, data in held.items() if data is not None} == {
        n: bytes([number]) * 20 for n, number in ((n % 12, n) for n in range(25, 30))
    }
    cache.forget("f")
    assert not any(cache.has(("f", n)) for n in range(12)) and cache._total == 0
    assert not any(touched) and bool(touched) == is_on_disk
    cache.close()
