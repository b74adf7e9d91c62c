"""Sources in a real S3 server, by s3fs: read by ranges, changed, gone, refused, silent, stopped."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import scalai
from scalai.core.errors import RefusedError, UsageError
from scalai.vfs import remote
from scalai.vfs.filesystem import ScalaiFileSystem
from scalai.vfs.remote import BLOCK_BYTES
from scalai.vfs.sample_sources import open_files
from support.at_last import at_last
from support.data_files import write_tokens
from support.needed import need
from support.ports import free_port

need("s3fs", "fsspec reads s3 by it")
need("flask", "moto[server] serves s3 here")

pytestmark = [pytest.mark.fault, pytest.mark.campaign]

BRIEF_S = 4.0


@dataclass
class Server:
    """moto's server, of which this module has a bucket ``data``."""

    process: "subprocess.Popen[bytes]"
    port: int
    files: Any

    def post(self, what: str, body: bytes) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/moto-api/{what}", body, {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request, timeout=20).close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    port = free_port("127.0.0.1")
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    options = {
        "key": "a", "secret": "b",
        "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"},
    }  # fmt: skip
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    try:
        made = Server(process, port, fsspec.filesystem("s3"))
        at_last(lambda: made.post("reset", b""), OSError)
        made.files.call_s3("create_bucket", Bucket="data")
        yield made
    finally:
        process.kill()
        process.wait(20)
        fsspec.filesystem("s3").clear_instance_cache()
        ScalaiFileSystem.clear_instance_cache()


def test_an_object_is_read_by_ranges_and_never_wrong(server: Server) -> None:
    data = os.urandom(BLOCK_BYTES + 1000)
    server.files.pipe({"data/set/a.bin": data, "data/set/below/b.jsonl": b"{}\n"})
    found = open_files("s3://data/set")
    assert sorted(found) == ["a.bin", "below/b.jsonl"]
    source = found["a.bin"]()
    assert source.read(BLOCK_BYTES - 5, 10) == data[BLOCK_BYTES - 5 : BLOCK_BYTES + 5]
    assert source.read(BLOCK_BYTES + 990, 99) == data[-10:]
    (old,) = (each() for each in open_files("s3://data/set/a.bin").values())
    server.files.pipe("data/set/a.bin", data[::-1])
    with pytest.raises(OSError, match=r"s3://data/set/a\.bin changed since it was opened"):
        old.read(0, 10)
    (gone,) = (each() for each in open_files("s3://data/set/a.bin").values())
    server.files.rm("data/set/a.bin")
    with pytest.raises(OSError, match=r"a\.bin is not there"):
        gone.read(0, 10)
    for url in ("s3://data/set/a.bin", "s3://none/a.bin"):
        with pytest.raises(UsageError, match="there is nothing at"):
            open_files(url)


def test_the_tree_and_slabs_read_objects(server: Server, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "corpus", [5, 3, 8])
    values = np.arange(600, dtype=np.float32).reshape(6, 10, 10)
    np.save(tmp_path / "a.npy", values)
    for path in tmp_path.iterdir():
        server.files.pipe(f"data/set/{path.name}", path.read_bytes())
    files = fsspec.filesystem("scalai", sources={"corpus": "s3://data/set/corpus"})
    assert files.cat_file("job/dataset/corpus/source/corpus.bin") == tokens.tobytes()
    slab = np.s_[1:3, 2:5, :]
    with scalai.SlabFile("s3://data/set/a.npy", None) as file:
        assert np.array_equal(file.read(slab), values[slab])
        server.files.pipe("data/set/a.npy", bytes(100))
        with pytest.raises(RefusedError, match="has changed since it was opened"):
            file.read(slab)


def test_a_refusal_a_silence_and_an_end_are_errors_by_name_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files.pipe("data/a.bin", b"0123456789")

    def opened() -> Any:
        (found,) = open_files("s3://data/a.bin").values()
        return found()

    source, others = opened(), [opened(), opened()]
    monkeypatch.setattr(remote, "WITHIN_S", BRIEF_S)
    os.kill(server.process.pid, signal.SIGSTOP)
    with pytest.raises(OSError, match="no answer within 4 s"):
        source.read(0, 10)
    os.kill(server.process.pid, signal.SIGCONT)
    assert at_last(lambda: source.read(0, 10), OSError) == b"0123456789"

    monkeypatch.setattr(remote, "WITHIN_S", 60.0)
    server.post("reset-auth", b"0")
    with pytest.raises(OSError, match=r"cannot be read: .*(Forbidden|Access Key)"):
        others[0].read(0, 10)
    with pytest.raises(UsageError, match="Forbidden"):
        open_files("s3://data/a.bin")

    monkeypatch.setattr(remote, "WITHIN_S", BRIEF_S)
    server.process.kill()
    server.process.wait(20)
    with pytest.raises(OSError, match=r"s3://data/a\.bin cannot be read"):
        others[1].read(0, 10)
    with pytest.raises(UsageError, match=r"s3://data/a\.bin cannot be (looked at|read)"):
        open_files("s3://data/a.bin")
