"""Sources on a real web server, by fsspec's own ``http``: what it does wrong costs time, or is an
error in a bounded time, and never other bytes."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp, by which fsspec reads http, is not installed")

from scalai.core.errors import UsageError
from scalai.remote import http_file, silences
from scalai.vfs import read_ahead, sources
from scalai.vfs.cache import BlockCache
from scalai.vfs.dataset import open_files
from scalai.vfs.sources import Source
from support import web_server
from support.at_last import at_last
from support.web_server import Behave, Page, Site, WebServer

DATA = bytes(range(256)) * 20
BLOCK = 1000
BRIEF_S = 0.6
FAILED = (OSError, UsageError)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few bytes, and a failure that nobody shares."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(http_file, "WHOLE_BYTES", BLOCK)
    monkeypatch.setattr(silences, "SHARED_S", 0.0)


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer(Site({"/a.bin": Page(DATA)})) as made:
        yield made


def opened(url: str, within_s: float = 60.0, cache: BlockCache | None = None) -> Source:
    (open_source,) = open_files(url, cache or BlockCache(), within_s).values()
    return open_source()


def whole(source: Source) -> bytes:
    return b"".join(source.read(at, 700) for at in range(0, source.size_bytes, 700))


def test_a_file_is_read_by_ranges_and_each_byte_once(server: WebServer) -> None:
    source = opened(f"{server.url}/a.bin")
    assert (source.size_bytes, source.mtime) == (len(DATA), 1000.0)
    assert whole(source) == DATA and source.read(4990, 200) == DATA[4990:]
    ranges = [asked for _, _, asked in server.site.asked if asked != "bytes=0-0"]
    assert len(ranges) == len(set(ranges)) == 6, "a block is asked for once, and nothing else"


FAULTS: dict[str, Behave] = {
    "500": web_server.status(500),
    "503": web_server.status(503),
    "429": web_server.status(429),
    "silent": web_server.silent,
    "silent midway": web_server.silent_midway,
    "slow drip": web_server.drip,
    "reset": web_server.reset,
    "reset midway": web_server.reset_midway,
    "ends early": web_server.ends_early,
    "says less": web_server.says_less,
    "whole": web_server.whole,
    "another range": web_server.another_range,
    "unsaid range": web_server.unsaid,
    "416": web_server.status(416),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_time_and_no_bytes(server: WebServer, fault: str) -> None:
    is_silent = FAULTS[fault] in (web_server.silent, web_server.silent_midway, web_server.drip)
    source = opened(f"{server.url}/a.bin", 5.0 if is_silent else 60.0)
    server.site.next = [FAULTS[fault]]
    assert source.read(BLOCK, 10) == DATA[BLOCK : BLOCK + 10]
    assert not server.site.next


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_is_an_error_until_it_goes(server: WebServer, fault: str) -> None:
    source = at_last(lambda: opened(f"{server.url}/a.bin", BRIEF_S), *FAILED)
    server.site.always = FAULTS[fault]
    with pytest.raises(OSError, match=r"a\.bin cannot be read within 0\.6 s") as raised:
        source.read(BLOCK, 10)
    assert raised.value.errno == errno.EIO and raised.value.strerror
    server.site.always = None
    assert at_last(lambda: source.read(BLOCK, 10), *FAILED) == DATA[BLOCK : BLOCK + 10]


def test_what_is_known_to_stay_is_said_at_once(server: WebServer) -> None:
    source = opened(f"{server.url}/a.bin", 1000.0)
    for number in (401, 403, 405):
        server.site.always = web_server.status(number)
        with pytest.raises(OSError, match=f"cannot be read: the server says {number}"):
            source.read(BLOCK, 10)
        with pytest.raises(UsageError, match=f"the server says {number}"):
            opened(f"{server.url}/a.bin", 1000.0)
    server.site.always, page = None, server.site.pages.pop("/a.bin")
    with pytest.raises(OSError, match="is not there") as raised:
        source.read(BLOCK, 10)
    assert raised.value.errno == errno.EIO
    server.site.pages["/a.bin"] = page
    assert source.read(BLOCK, 10) == DATA[BLOCK : BLOCK + 10]


@pytest.mark.parametrize(
    "other",
    [
        Page(DATA[::-1], etag='"2"'),
        Page(DATA[::-1], modified=2000.0),
        Page(DATA + b"more"),
        Page(DATA[:BLOCK]),
        Page(b""),
        Page(DATA[::-1], etag=None),
    ],
    ids=["etag", "time", "longer", "cut", "empty", "without etag"],
)
def test_a_file_that_changed_gives_none_of_its_new_bytes(server: WebServer, other: Page) -> None:
    source = opened(f"{server.url}/a.bin", 1000.0)
    assert source.read(0, 10) == DATA[:10]
    server.site.pages["/a.bin"] = other
    for _ in range(2):
        with pytest.raises(OSError, match=r"a\.bin changed since it was opened"):
            source.read(3 * BLOCK, 10)
    with pytest.raises(OSError, match="changed since it was opened"):
        source.read(0, 10)
    assert opened(f"{server.url}/a.bin").size_bytes == len(other.data)


def test_a_file_of_which_only_the_size_is_known_is_told(
    server: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.site.pages["/a.bin"] = Page(DATA, None, None)
    assert whole(opened(f"{server.url}/a.bin")) == DATA
    assert "event=source_without_tag" in caplog.text


def test_a_large_file_without_ranges_is_refused_and_not_read(server: WebServer) -> None:
    server.site.always = web_server.whole
    server.site.pages["/a.bin"] = Page(bytes(32 << 20))
    with pytest.raises(UsageError, match="its server sends no ranges, and the whole has 33554432"):
        opened(f"{server.url}/a.bin")
    assert server.site.sent_bytes < 16 << 20


def test_a_small_file_without_ranges_is_read_whole(server: WebServer) -> None:
    server.site.always = web_server.whole
    server.site.pages["/a.bin"] = Page(DATA[:BLOCK])
    assert whole(opened(f"{server.url}/a.bin")) == DATA[:BLOCK]


def test_a_server_that_compresses_is_asked_not_to(server: WebServer) -> None:
    server.site.always = web_server.compressed
    assert whole(opened(f"{server.url}/a.bin")) == DATA


def test_a_redirect_is_followed_and_a_ring_of_them_is_an_error(server: WebServer) -> None:
    server.site.pages["/b.bin"] = server.site.pages["/a.bin"]
    server.site.always = web_server.moved("/b.bin")
    assert whole(opened(f"{server.url}/a.bin")) == DATA
    server.site.always = web_server.moved("/none")
    server.site.pages["/none"] = replace(server.site.pages["/a.bin"], data=b"")
    assert opened(f"{server.url}/a.bin").read(0, 9) == b""
    server.site.next = [web_server.moved("elsewhere")] * 1000
    with pytest.raises(UsageError, match="cannot be looked at within"):
        opened(f"{server.url}/a.bin", 0.5)


def test_files_of_a_prefix_a_page_of_links_and_a_query_are_found(server: WebServer) -> None:
    page = server.site.pages["/a.bin"]
    server.site.pages = {
        "/set/a.bin": page, "/set/a.idx": page, "/set/b%20c.jsonl": page,
        "/set/": Page(b'<a href="a.bin">a</a> <a href="b%20c.jsonl">b</a>', kind="text/html"),
    }  # fmt: skip
    cache = BlockCache()
    assert sorted(open_files(f"{server.url}/set/a", cache)) == ["a.bin", "a.idx"]
    assert sorted(open_files(f"{server.url}/set/", cache)) == ["a.bin", "b c.jsonl"]
    (found,) = open_files(f"{server.url}/set/b%20c.jsonl?key=a/b", cache).items()
    assert found[0] == "b c.jsonl" and found[1]().read(0, 10) == DATA[:10]
    with pytest.raises(UsageError, match="there is nothing at"):
        open_files(f"{server.url}/none", cache)


def test_an_index_that_does_not_answer_is_not_taken_for_none(server: WebServer) -> None:
    server.site.pages["/a.idx"] = server.site.pages["/a.bin"]
    server.site.next = [web_server.well, web_server.well, *[web_server.status(503)] * 99]
    with pytest.raises(UsageError, match=r"looked at within 0\.5 s .*says 503"):
        open_files(f"{server.url}/a", BlockCache(), 0.5)


def test_a_silent_server_keeps_few_threads_waiting_and_no_process(server: WebServer) -> None:
    cache = BlockCache()
    source = opened(f"{server.url}/a.bin", 30.0, cache)
    server.site.next = [web_server.well]
    server.site.always = web_server.silent
    before = threading.active_count() + len(server.site.asked)
    for at in range(200):
        assert source.read(at, 1) == DATA[at : at + 1]
    more = threading.active_count() + len(server.site.asked) - before
    # A thread here and one there for each request that waits, and the request itself.
    assert more <= 1 + 3 * read_ahead.THREADS
    cache.close()


def test_those_who_wait_for_the_same_silence_share_its_end(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = at_last(lambda: opened(f"{server.url}/a.bin", 1.0), *FAILED)
    monkeypatch.setattr(silences, "SHARED_S", 60.0)
    server.site.asked.clear()
    server.site.always = web_server.silent
    said: list[str] = []

    def read(at: int) -> None:
        with pytest.raises(OSError) as raised:
            source.read(at, 10)
        said.append(str(raised.value))

    threads = [threading.Thread(target=read, args=(BLOCK * (at % 2),)) for at in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    asked = len(server.site.asked)
    read(3 * BLOCK)
    assert len(said) == 13 and len(server.site.asked) == asked <= 2 * 3


def test_a_silent_server_is_waited_for_once_and_one_that_answers_others_is_not_silent(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "AHEAD", 0)
    cache = BlockCache(0)
    server.site.pages["/b.bin"] = server.site.pages["/a.bin"]
    a, b = (
        at_last(partial(opened, f"{server.url}{path}", 4.0, cache), *FAILED)
        for path in ("/a.bin", "/b.bin")
    )

    def only_b(handler: web_server.Handler, page: Page, path: str) -> bool:
        return path == "/b.bin" and web_server.silent(handler, page, path)

    def read_b() -> None:
        with pytest.raises(OSError, match=r"b\.bin cannot be read within"):
            b.read(0, 10)

    monkeypatch.setattr(silences, "SHARED_S", 60.0)
    server.site.asked.clear()
    server.site.always = only_b
    reader = threading.Thread(target=read_b)
    reader.start()
    end = time.monotonic() + 60
    while not server.site.asked and time.monotonic() < end:
        time.sleep(0.01)
    assert a.read(0, 10) == DATA[:10]
    reader.join(60)
    assert a.read(0, 10) == DATA[:10], "the server has answered meanwhile"
    monkeypatch.setattr(silences, "SHARED_S", 0.0)
    server.site.always = web_server.silent
    with pytest.raises(OSError, match=r"b\.bin cannot be read within"):
        b.read(0, 10)
    monkeypatch.setattr(silences, "SHARED_S", 60.0)
    asked = len(server.site.asked)
    with pytest.raises(OSError, match=r"b\.bin cannot be read within"):
        a.read(0, 10)
    assert len(server.site.asked) == asked


def serve(folder: Path, port: int = 0) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "support.web_server", str(port), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_server_that_is_stopped_killed_and_started_again_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    first = serve(tmp_path)
    second = None
    try:
        assert first.stdout is not None
        port = int(first.stdout.readline())
        source = opened(f"http://127.0.0.1:{port}/a.bin")
        brief = at_last(lambda: opened(f"http://127.0.0.1:{port}/a.bin", 1.0), *FAILED)
        assert source.read(0, 10) == DATA[:10]
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(OSError, match="no answer within"):
            brief.read(BLOCK, 10)
        os.kill(first.pid, signal.SIGCONT)
        assert at_last(lambda: brief.read(BLOCK, 10), *FAILED) == DATA[BLOCK : BLOCK + 10]
        first.kill()
        first.wait(20)
        with pytest.raises(OSError, match="cannot be read within 1 s"):
            brief.read(2 * BLOCK, 10)
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(source.read(3 * BLOCK, 10)))
        reader.start()
        second = serve(tmp_path, port)
        reader.join(40)
        assert got == [DATA[3 * BLOCK : 3 * BLOCK + 10]], "a restart costs time, and no error"
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate(timeout=20)
