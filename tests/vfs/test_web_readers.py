"""What reads a data set of a web server: the tree of fsspec, a mount, Megatron's reader and slabs.
A server that falls silent ends a read in a bounded time, and later ones try again."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="aiohttp, by which fsspec reads http, is not installed")

import scalai
from scalai.core.errors import RefusedError
from scalai.vfs import sources
from scalai.vfs.filesystem import ScalaiFileSystem
from support import web_server
from support.at_last import at_last
from support.data_files import write_tokens
from support.web_server import Page, Site, WebServer

BIN = "/set/corpus.bin"
BRIEF_S = 1.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    write_tokens(tmp_path / "corpus", [5, 3, 3000000])
    pages = {f"/set/{path.name}": Page(path.read_bytes()) for path in tmp_path.glob("corpus.*")}
    with WebServer(Site(pages)) as made:
        yield made
    ScalaiFileSystem.clear_instance_cache()


def tree(server: WebServer, within_s: float = BRIEF_S) -> Any:
    named = {"corpus": f"{server.url}/set/corpus"}
    return fsspec.filesystem("scalai", sources=named, remote_timeout_s=within_s)


PATH = "job/dataset/corpus/source/corpus.bin"


def test_the_tree_reads_a_web_server_and_tries_again_behind_a_silence(server: WebServer) -> None:
    files, data = tree(server), server.site.pages[BIN].data
    assert at_last(lambda: files.info(PATH), OSError, RefusedError)["size"] == len(data)
    with files.open(PATH) as file:
        server.site.always = web_server.silent
        with pytest.raises(OSError, match="no answer within") as raised:
            file.read(10)
        assert raised.value.errno == errno.EIO
        server.site.always = None
        file.seek(0)
        assert at_last(file.read, OSError) == data


def test_a_server_that_does_not_answer_is_no_missing_data_set(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    from scalai.patches.megatron.indexed_source import SourceReader, _exists

    conf: dict[str, Any] = {"sources": {"corpus": f"{server.url}/set/corpus"}}
    monkeypatch.setattr(sources, "AHEAD", 0)
    monkeypatch.setitem(fsspec.config.conf, "scalai", conf)
    prefix = "scalai://job/dataset/corpus/source/corpus"
    exists = module.IndexedDataset.exists
    assert _exists(exists, None, (prefix,), {})
    tokens = np.frombuffer(server.site.pages[BIN].data, np.uint16)
    reader = SourceReader(prefix + ".bin")
    server.site.next = [web_server.reset_midway, web_server.status(503)]
    assert np.array_equal(reader.read(np.uint16, 3, 10), tokens[5:8])
    server.site.pages[BIN] = Page(server.site.pages[BIN].data[::-1], '"2"')
    with pytest.raises(OSError, match="changed since it was opened"):
        reader.read(np.uint16, 3, 5 << 20)

    ScalaiFileSystem.clear_instance_cache()
    monkeypatch.setitem(fsspec.config.conf, "scalai", {**conf, "remote_timeout_s": BRIEF_S})
    at_last(lambda: _exists(exists, None, (prefix + "x",), {}), OSError, RefusedError)
    ScalaiFileSystem.clear_instance_cache()
    server.site.next = [web_server.well] * 3
    server.site.always = web_server.status(503)
    with pytest.raises((OSError, scalai.ScalaiError), match="the server says 503"):
        _exists(exists, None, (prefix,), {})


def test_workers_of_a_loader_read_by_connections_of_their_own(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    from scalai.patches.megatron.indexed_source import SourceReader

    conf = {"sources": {"corpus": f"{server.url}/set/corpus"}}
    monkeypatch.setitem(fsspec.config.conf, "scalai", conf)
    reader = SourceReader("scalai://job/dataset/corpus/source/corpus.bin")
    tokens = np.frombuffer(server.site.pages[BIN].data, np.uint16)
    assert np.array_equal(reader.read(np.uint16, 3, 10), tokens[5:8])
    child = os.fork()
    if child == 0:
        os._exit(
            0 if np.array_equal(reader.read(np.uint16, 3, 5 << 20), tokens[5 << 19 :][:3]) else 1
        )
    end, done = time.monotonic() + 60, (0, 0)
    while done[0] == 0 and time.monotonic() < end:
        done = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    assert done == (child, 0)


def test_a_slab_behind_a_web_server_is_whole_or_refused(server: WebServer, tmp_path: Path) -> None:
    values = np.arange(600, dtype=np.float32).reshape(6, 10, 10)
    np.save(tmp_path / "a.npy", values)
    page = server.site.pages["/a.npy"] = Page((tmp_path / "a.npy").read_bytes())
    url, slab = f"{server.url}/a.npy", np.s_[1:3, 2:5, :]
    server.site.next = [web_server.status(503), web_server.reset, web_server.ends_early]
    assert np.array_equal(scalai.read_slab(url, None, slab).values, values[slab])
    opened = at_last(lambda: scalai.SlabFile(url, None, remote_timeout_s=BRIEF_S), RefusedError)
    with opened as file:
        server.site.always = web_server.silent
        with pytest.raises(RefusedError, match="no answer within"):
            file.read(slab)
        server.site.always = None
        assert np.array_equal(at_last(lambda: file.read(slab), RefusedError), values[slab])
    with scalai.SlabFile(url, None) as file:
        server.site.pages["/a.npy"] = Page(page.data[::-1], '"2"')
        with pytest.raises(RefusedError, match="has changed since it was opened"):
            file.read(slab)
        del server.site.pages["/a.npy"]
        with pytest.raises(RefusedError, match="is not there"):
            file.read(slab)
    server.site.pages["/a.npy"], server.site.always = page, web_server.status(503)
    with pytest.raises(RefusedError, match="the server says 503"):
        scalai.read_slab(url, None, slab, remote_timeout_s=BRIEF_S)


@pytest.mark.skipif(
    not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None,
    reason="no /dev/fuse here, or no fuse3",
)
def test_a_mount_of_a_web_server_reads_fails_and_reads_again(
    server: WebServer, tmp_path: Path
) -> None:
    point, log, data = tmp_path / "point", tmp_path / "log", server.site.pages[BIN].data
    point.mkdir()
    command = Path(sys.executable).with_name("scalai")

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=100, check=False
        )

    done = run(
        "mount", "job", str(point), f"--source=corpus={server.url}/set/corpus",
        "--remote-timeout=3", f"--store-dir={tmp_path / 'store'}", f"--log={log}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path = point / "dataset" / "corpus" / "source" / "corpus.bin"
    try:
        assert at_last(lambda: path.stat(), OSError).st_size == len(data)
        server.site.always = web_server.silent
        with pytest.raises(OSError) as raised:
            path.read_bytes()
        assert raised.value.errno == errno.EIO
        assert f"event=read_failed path=/dataset/corpus/source/corpus.bin: {server.url}{BIN} " in (
            log.read_text()
        )
        server.site.always = None
        assert at_last(path.read_bytes, OSError) == data
        done = subprocess.run(
            ["md5sum", path], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.split()[0] == hashlib.md5(data).hexdigest()
    finally:
        run("unmount", "--lazy", str(point))
