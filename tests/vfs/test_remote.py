"""Files behind URLs, on real web servers: a fault is an error by name within the deadline, never
other bytes, and the next read asks again."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

pytest.importorskip("aiohttp", reason="aiohttp, by which fsspec reads http, is not installed")

import scalai
from scalai.core.errors import RefusedError, UsageError
from scalai.vfs import remote
from scalai.vfs.filesystem import ScalaiFileSystem
from scalai.vfs.mounts import find_mount
from scalai.vfs.sample_sources import SourceFile, open_files
from support import web_server
from support.at_last import at_last
from support.data_files import write_tokens
from support.web_server import Page, Site, WebServer

pytestmark = pytest.mark.fault

BIN, NPY = "/set/corpus.bin", "/a.npy"
VALUES = np.arange(600, dtype=np.float32).reshape(6, 10, 10)
SLAB = np.s_[1:3, 2:5, :]
BRIEF_S = 1.0
FAILED = (OSError, RefusedError, UsageError)
Read = Callable[[], bytes]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    write_tokens(tmp_path / "corpus", [5, 3, 3000000])
    np.save(tmp_path / "a.npy", VALUES)
    pages = {f"/set/{path.name}": Page(path.read_bytes()) for path in tmp_path.glob("corpus.*")}
    with WebServer(Site({**pages, NPY: Page((tmp_path / "a.npy").read_bytes())})) as made:
        yield made
    ScalaiFileSystem.clear_instance_cache()


def opened(url: str) -> SourceFile:
    (open_source,) = open_files(url).values()
    return open_source()


def by_tree(server: WebServer, folder: Path) -> Iterator[Read]:
    files = fsspec.filesystem("scalai", sources={"corpus": f"{server.url}/set/corpus"})
    with files.open("job/dataset/corpus/source/corpus.bin", block_size=1) as file:
        yield lambda: (file.seek(0), file.read())[1]


def by_slab(server: WebServer, folder: Path) -> Iterator[Read]:
    with scalai.SlabFile(server.url + NPY, None) as file:
        yield lambda: file.read(SLAB).tobytes()


def by_mount(server: WebServer, folder: Path) -> Iterator[Read]:
    point = folder / "point"
    point.mkdir()
    code = (
        f"from scalai.vfs import remote; remote.WITHIN_S = {BRIEF_S}\n"
        "from scalai.launch.cli import main; main()"
    )
    source = f"--source=corpus={server.url}/set/corpus"
    command = [sys.executable, "-c", code, "mount", "job", str(point), source, "--foreground"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        at_last(lambda: point.is_dir() and find_mount(point).point, AttributeError)  # type: ignore[union-attr]
        yield (point / "dataset" / "corpus" / "source" / "corpus.bin").read_bytes
        told = f"event=read_failed path=/dataset/corpus/source/corpus.bin: {server.url}{BIN} "
        assert told in (folder / "log").read_text()
    finally:
        subprocess.run(["fusermount3", "-uz", point], check=False, timeout=20)
        process.kill()
        process.wait(20)


is_fuse_here = Path("/dev/fuse").exists() and shutil.which("fusermount3") is not None


@pytest.mark.parametrize(
    "way",
    [by_tree, by_slab, pytest.param(by_mount, marks=pytest.mark.skipif(
        not is_fuse_here, reason="no /dev/fuse here, or no fuse3"))],
)  # fmt: skip
def test_a_silent_server_ends_a_read_within_the_deadline_and_the_next_one_asks_again(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any
) -> None:
    monkeypatch.setattr(remote, "WITHIN_S", BRIEF_S)
    wanted = VALUES[SLAB].tobytes() if way is by_slab else server.site.pages[BIN].data
    reads = way(server, tmp_path)
    read = at_last(lambda: next(reads), *FAILED)
    server.site.always = web_server.silent
    with pytest.raises((OSError, RefusedError)) as raised:
        read()
    assert way is by_mount or "no answer within 1 s" in str(raised.value)
    assert way is by_slab or getattr(raised.value, "errno", None) == errno.EIO
    server.site.always = None
    assert at_last(read, *FAILED) == wanted
    next(reads, None)


@pytest.mark.parametrize(
    "other",
    [Page(b"\1" * 6000000, etag='"2"'), Page(b"\1" * 6000000, modified=2000.0), Page(b"\1" * 10),
     Page(b"\1" * 7000000), Page(b""), Page(b"\1" * 6000000, etag=None)],
    ids=["etag", "time", "cut", "longer", "empty", "without etag"],
)  # fmt: skip
def test_a_file_that_changed_gives_none_of_its_new_bytes(server: WebServer, other: Page) -> None:
    source = opened(server.url + BIN)
    assert source.read(0, 10) == server.site.pages[BIN].data[:10]
    server.site.pages[BIN] = other
    for at in (5 << 20, 5 << 20, 0):
        with pytest.raises(OSError, match=r"corpus\.bin changed since it was opened: size and"):
            source.read(at, 10)
    assert opened(server.url + BIN).size_bytes == len(other.data)


def test_a_slab_of_a_file_that_changed_or_is_gone_is_refused(server: WebServer) -> None:
    with (
        scalai.SlabFile(server.url + NPY, None) as file,
        scalai.SlabFile(server.url + NPY, None) as other,
    ):
        server.site.pages[NPY] = Page(server.site.pages[NPY].data[::-1], '"2"')
        with pytest.raises(RefusedError, match="has changed since it was opened"):
            file.read(SLAB)
        del server.site.pages[NPY]
        with pytest.raises(RefusedError, match="is not there"):
            other.read(SLAB)


def test_a_server_that_fails_is_no_missing_data_set(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    from scalai.patches.megatron.indexed_source import _exists

    monkeypatch.setitem(
        fsspec.config.conf, "scalai", {"sources": {"corpus": f"{server.url}/set/corpus"}}
    )
    prefix = "scalai://job/dataset/corpus/source/corpus"
    exists = module.IndexedDataset.exists
    assert _exists(exists, None, (prefix,), {}) and not _exists(exists, None, (prefix + "x",), {})
    source = opened(server.url + BIN)
    ScalaiFileSystem.clear_instance_cache()
    for status in (403, 503):
        server.site.always = web_server.failing(status)
        for call in (
            lambda: _exists(exists, None, (prefix,), {}),
            lambda: open_files(f"{server.url}/set/corpus"),
            lambda: source.read(0, 10),
            lambda: scalai.read_slab(server.url + NPY, None, SLAB),
        ):
            with pytest.raises((OSError, scalai.ScalaiError), match=f"{status}, message="):
                call()
    server.site.always = None
    assert source.read(0, 10) == server.site.pages[BIN].data[:10]


def test_workers_of_a_loader_read_by_connections_of_their_own(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    from scalai.patches.megatron.indexed_source import SourceReader

    conf = {"sources": {"corpus": f"{server.url}/set/corpus"}}
    monkeypatch.setitem(fsspec.config.conf, "scalai", conf)
    reader = SourceReader("scalai://job/dataset/corpus/source/corpus.bin")
    tokens = np.frombuffer(server.site.pages[BIN].data, np.uint16)
    with scalai.SlabFile(server.url + NPY, None) as file:
        assert np.array_equal(reader.read(np.uint16, 3, 10), tokens[5:8])
        child = os.fork()
        if child == 0:
            is_same = np.array_equal(reader.read(np.uint16, 3, 5 << 20), tokens[5 << 19 :][:3])
            os._exit(0 if is_same and np.array_equal(file.read(SLAB), VALUES[SLAB]) else 1)
        assert os.waitpid(child, 0) == (child, 0)


def test_many_readers_of_a_silent_server_all_get_an_error_and_few_threads_hang(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WITHIN_S", BRIEF_S)
    server.site.pages |= {f"/set/{n}.bin": Page(bytes([n])) for n in range(20)}
    links = "".join(f'<a href="{n}.bin">' for n in range(20)).encode()
    server.site.pages["/set/"] = Page(links, kind="text/html")
    files = at_last(lambda: open_files(f"{server.url}/set/"), *FAILED)
    found = {name: at_last(each, *FAILED) for name, each in files.items()}
    server.site.always = web_server.silent
    said = list[str]()

    def read(source: SourceFile) -> None:
        with pytest.raises(OSError) as raised:
            source.read(0, 1)
        said.append(str(raised.value))

    def all_at_once(sources: list[SourceFile]) -> None:
        threads = [threading.Thread(target=read, args=(source,)) for source in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    all_at_once([found["3.bin"]] * 12)
    assert len(said) == 12
    all_at_once(list(found.values()))
    hanging = [each for each in threading.enumerate() if each.name == "remote read"]
    assert len(said) == 32 and len(hanging) <= remote.HANGING
    server.site.always = None
    server.site.over.set()
    assert at_last(lambda: found["3.bin"].read(0, 1), OSError) == b"\3"


def test_without_ranges_a_small_file_is_read_and_a_large_one_is_refused_and_not_read(
    server: WebServer,
) -> None:
    server.site.always = web_server.whole
    data = server.site.pages["/set/corpus.idx"].data
    assert opened(f"{server.url}/set/corpus.idx").read(0, 999) == data
    server.site.pages[BIN] = Page(bytes(64 << 20))
    source = opened(server.url + BIN)
    for read in (
        lambda: source.read(5 << 20, 10),
        lambda: scalai.read_slab(server.url + BIN, None, np.s_[0:1]),
    ):
        with pytest.raises((OSError, RefusedError), match="range requests"):
            read()
    assert server.site.sent_bytes < 32 << 20


def test_a_server_that_compresses_is_asked_not_to(server: WebServer) -> None:
    server.site.always = web_server.compressed
    data = server.site.pages[BIN].data
    assert opened(server.url + BIN).read(5 << 20, 10) == data[5 << 20 :][:10]
    assert np.array_equal(scalai.read_slab(server.url + NPY, None, SLAB).values, VALUES[SLAB])


def test_a_short_answer_is_never_taken_for_the_bytes(server: WebServer) -> None:
    source = opened(server.url + BIN)
    server.site.always = web_server.short
    with pytest.raises(OSError, match=r"4194303 bytes came instead of 4194304"):
        source.read(0, 5)


def test_files_of_a_prefix_a_page_of_links_and_a_query_are_found(server: WebServer) -> None:
    page = Page(b'<a href="corpus.bin">a</a> <a href="b%20c.jsonl">b</a>', kind="text/html")
    server.site.pages |= {"/set/": page, "/set/b%20c.jsonl": Page(b"0123")}
    assert sorted(open_files(f"{server.url}/set/corpus")) == ["corpus.bin", "corpus.idx"]
    assert sorted(open_files(f"{server.url}/set/")) == ["b c.jsonl", "corpus.bin"]
    (found,) = open_files(f"{server.url}/set/b%20c.jsonl?key=a/b").items()
    assert found[0] == "b c.jsonl" and found[1]().read(1, 10) == b"123"
    with pytest.raises(UsageError, match="there is nothing at"):
        open_files(f"{server.url}/none")


class Own(MemoryFileSystem):
    """A file system with errors and answers of its own."""

    protocol = "own"
    size: int | None = 10

    def info(self, path: str, **options: object) -> dict[str, object]:
        if "broken" in path:
            raise RuntimeError("no credentials")
        return {"name": path, "type": "file", "size": self.size}


def test_a_file_system_of_any_kind_is_read_in_blocks_or_refused_in_words(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("own", Own, clobber=True)
    with pytest.raises(UsageError, match=r"own://.*broken cannot be looked at: no credentials"):
        open_files("own://broken")
    opened("own://x")
    assert "event=source_without_tag" in caplog.text
    monkeypatch.setattr(Own, "size", None)
    with pytest.raises(OSError, match="does not say its size"):
        opened("own://x")
    memory, block = fsspec.filesystem("memory"), remote.BLOCK_BYTES
    data = bytes(range(256)) * 40_000
    memory.pipe({"/bucket/a.bin": data, "/bucket/below/b.jsonl": b"{}\n"})
    try:
        found = open_files("memory://bucket")
        assert sorted(found) == ["a.bin", "below/b.jsonl"]
        source = found["a.bin"]()
        assert source.read(block - 5, 10) == data[block - 5 : block + 5]
        assert source.read(len(data) - 5, 10) == data[-5:]
        assert source.read(len(data), 10) == source.read(10**12, 10) == b""
        gone = found["a.bin"]()
        memory.rm("/bucket/a.bin")
        with pytest.raises(OSError, match="is not there") as raised:
            gone.read(0, 1)
        assert raised.value.errno == errno.EIO
    finally:
        with suppress(FileNotFoundError):
            memory.rm("/bucket", recursive=True)
