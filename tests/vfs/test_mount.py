"""``scalai mount``: unmodified readers on it, and what happens when anything goes away."""

import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from scalai.core.errors import RefusedError, UsageError
from scalai.store.host import HostStore
from scalai.vfs import mounts
from scalai.vfs.mounts import find_mount
from scalai.vfs.tree import Tree
from support.data_files import lines, write_tokens
from support.odd_names import HUGE, check_slice, names
from support.stopping import stop
from support.store_states import WEIGHT, generation, values_of
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None,
    reason="no /dev/fuse here, or no fuse3",
)
SCALAI = Path(sys.executable).with_name("scalai")


@dataclass
class Place:
    """A mount, and what it was made of."""

    folder: Path

    def __post_init__(self) -> None:
        self.point, self.log = self.folder / "point", self.folder / "log"

    def mount(self, *more: str) -> "subprocess.CompletedProcess[str]":
        paths = {"tokens": "tokens/c", "lines": "lines", "mixed": "mixed"}
        sources = [f"--source={name}={self.folder / path}" for name, path in paths.items()]
        file = self.folder / "elastic.toml"
        file.write_text(
            f'[dataset]\nsources.tokens = "{self.folder}/tokens/c"\n'
            "record_tokens.tokens = 4\nglobal_batch_size = 8\n"
        )
        return scalai(
            "mount", "job", str(self.point), f"--store-dir={self.folder / 'store'}", *sources,
            f"--elastic={file}", "--shuffle=mixed=7", f"--log={self.log}", *more,
        )  # fmt: skip


def scalai(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [SCALAI, *arguments], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("mount"))
    made.point.mkdir()
    with HostStore("job", "a", made.folder / "store") as store:
        generation(store, 1, 3)
        write_tokens(made.folder / "tokens" / "c", [5, 3, 8, 40, 24])
        (made.folder / "mixed").mkdir()
        (made.folder / "mixed" / "x.jsonl").write_bytes(b"".join(lines(101)))
        (made.folder / "lines").mkdir()
        (made.folder / "lines" / "x.jsonl").write_bytes(b"".join(lines(2000)))
        done = made.mount()
        assert done.returncode == 0, done.stderr
        yield made
        scalai("unmount", "--lazy", str(made.point))


def process_of(place: Place, done: "subprocess.CompletedProcess[str]") -> int:
    found = re.search(r"by process (\d+)", done.stdout)
    assert found is not None, (done.stdout, done.stderr)
    return int(found[1])


def test_what_cannot_be_mounted_is_refused_in_words(place: Place, tmp_path: Path) -> None:
    for name in ("full", "point"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "x").touch()
    store = f"--store-dir={place.folder / 'store'}"
    lines = f"--source=lines={place.folder}/lines"
    point = str(tmp_path / "point")
    for arguments, why in (
        (("job", str(place.point), store), "is in use: scalai:job (fuse.scalai) is mounted there"),
        (("job", str(tmp_path / "full"), store), "is not empty"),
        (("job", str(tmp_path / "none"), store), "is no folder"),
        (("other", point, f"--store-dir={tmp_path}"), "no job 'other' has a store here"),
        (("other", point, f"--source=a={tmp_path}/none"), "there is nothing at"),
        (("other", point, lines, "--shuffle=x=1"), "names 'x'"),
        (("other", point, lines, "--shuffle=lines=a"), "a whole number"),
        (("other", point, lines, "--remote-timeout=9"), "fails after 60 s"),
        (("other", point, lines, "--record-tokens=lines=4"), "[dataset] in the file of --elastic"),
    ):
        done = scalai("mount", *arguments)
        assert (done.returncode, why in done.stderr) == (2, True), done.stderr
    done = scalai("unmount", str(tmp_path))
    assert (done.returncode, "no tree of Scalai's" in done.stderr) == (2, True), done.stderr


def test_nobody_writes_and_names_that_are_none_lead_nowhere(place: Place) -> None:
    for path in ("model/none.npy", "dataset/lines/dp-2-of-2", "generations/9", "model/w[9:].npy"):
        assert not (place.point / path).exists(), path
    with pytest.raises(OSError) as raised:
        (place.point / "model" / "w.npy").write_bytes(b"x")
    assert raised.value.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
    with pytest.raises(OSError):
        (place.point / "dataset" / "new").mkdir()


def test_no_name_is_taken_for_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mfusepy

    from scalai.vfs.fuse import serve

    mounted: dict[str, Any] = {}
    monkeypatch.setattr(mfusepy, "FUSE", lambda *_, **options: mounted.update(options))
    serve(Tree(None), str(tmp_path), "/data/a,allow_other\\,ü \udcff")
    assert mounted["fsname"] == "scalai:/data/a%2Callow_other%5C%2C%C3%BC%20%FF"


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(names())
@example(f"w[0:{HUGE}].npy")
def test_no_name_is_more_than_not_there(store: HostStore, name: str) -> None:
    from scalai.vfs.fuse import TreeOperations

    if 1 not in store.generations():
        generation(store, 1, 3)
    tree = Tree(store.directory.parent)
    served = TreeOperations(tree)
    for path in (f"/generations/1/model/{name}", f"/{name}"):
        with suppress(FileNotFoundError, NotADirectoryError):
            served.getattr(path)
        with suppress(FileNotFoundError, NotADirectoryError):
            list(served.readdir(path, 0))
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            handle = served.open(path, os.O_RDONLY)
            check_slice(name, served.read(path, 1 << 20, 0, handle))
            served.release(path, handle)
    tree.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_no_other_user_looks_into_it(place: Place) -> None:
    done = subprocess.run(
        ["ls", place.point], capture_output=True, text=True, user=65534, timeout=20, check=False,
        cwd="/",
    )  # fmt: skip
    assert done.returncode and "Permission denied" in done.stderr


def test_programs_read_the_sources_unchanged(place: Place, tmp_path: Path) -> None:
    for name in ("dataset/tokens/source/c.bin", "dataset/lines/source/x.jsonl"):
        own = place.folder / name.replace("dataset/", "").replace("source/", "")
        subprocess.run(["cp", place.point / name, tmp_path / "copy"], check=True, timeout=20)
        assert (tmp_path / "copy").read_bytes() == own.read_bytes()
        done = subprocess.run(
            ["md5sum", place.point / name], capture_output=True, text=True, check=True, timeout=20
        )
        assert done.stdout.split()[0] == hashlib.md5(own.read_bytes()).hexdigest()


def test_numpy_maps_a_tensor_and_a_slice_of_it(place: Place) -> None:
    weight = values_of(WEIGHT, 3)
    found = np.load(place.point / "model" / "w.npy", mmap_mode="r")
    assert np.array_equal(found.view(np.uint32), weight)
    part = np.load(place.point / "generations" / "1" / "model" / "w[1:3,:].npy", mmap_mode="r")
    assert np.array_equal(part.view(np.uint32), weight[1:3])


def test_megatron_and_a_loader_of_torch_read_the_mount(place: Place) -> None:
    pytest.importorskip("megatron.core")
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    own = IndexedDataset(str(place.folder / "tokens" / "c"))
    data = IndexedDataset(str(place.point / "dataset" / "tokens" / "source" / "c"))
    assert len(data) == 5 and all(np.array_equal(own[n], data[n]) for n in range(5))
    view = IndexedDataset(str(place.point / "dataset" / "tokens" / "dp-1-of-2" / "pass-0"))
    tokens = np.concatenate([own[n] for n in range(5)])
    mine = [place for place in range(20) if place % 8 // 4 == 1]
    assert [view[n].tolist() for n in range(len(view))] == [
        tokens[4 * n : 4 * n + 4].tolist() for n in mine
    ]
    loader = torch.utils.data.DataLoader(view, batch_size=4, num_workers=1)
    assert torch.cat([batch.int() for batch in loader]).flatten().tolist() == [
        token for n in mine for token in tokens[4 * n : 4 * n + 4].tolist()
    ]


def test_the_model_is_that_of_the_newest_generation_and_an_open_file_stays(place: Place) -> None:
    with open(place.point / "model" / "w.npy", "rb") as opened:
        part = place.folder / "store" / "job" / "a"
        with HostStore("other", "a", place.folder / "store") as store:
            generation(store, 2, 7)
            shutil.copytree(store.generation_directory(2), part / "generation-2")
        shutil.rmtree(part / "generation-1")
        newest = np.load(place.point / "model" / "w.npy")
        assert np.array_equal(newest.view(np.uint32), values_of(WEIGHT, 7))
        assert os.readlink(place.point / "model") == "generations/2/model"
        assert np.array_equal(np.load(opened).view(np.uint32), values_of(WEIGHT, 3))


@pytest.mark.fault
def test_a_source_that_changes_gives_an_error_and_its_reason_is_in_the_log(place: Place) -> None:
    path = place.point / "dataset" / "lines" / "source" / "x.jsonl"
    own = place.folder / "lines" / "x.jsonl"
    whole = own.read_bytes()
    with open(path, "rb", buffering=0) as file:
        assert file.read(10) == whole[:10]
        own.write_bytes(b"other" * len(whole))
        with pytest.raises(OSError) as raised:
            os.pread(file.fileno(), 10, len(whole) - 10)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.pread(file.fileno(), 10, len(whole) - 10)
        assert raised.value.errno == errno.EIO
    with pytest.raises(OSError):
        path.read_bytes()
    assert "x.jsonl is not what was opened" in place.log.read_text()


@pytest.mark.fault
def test_a_killed_mount_hangs_nobody_and_is_mounted_anew(place: Place) -> None:
    scalai("unmount", "--lazy", str(place.point))
    done = place.mount()
    path = place.point / "dataset" / "tokens" / "source" / "c.bin"
    with open(path, "rb", buffering=0) as file:
        done_too = scalai("unmount", str(place.point))
        assert done_too.returncode == 3 and "add --lazy" in done_too.stderr
        os.kill(process_of(place, done), signal.SIGKILL)
        wait_until(lambda: not os.path.exists(path), "the mount is dead")
        begin = time.monotonic()
        with pytest.raises(OSError) as raised:
            path.stat()
        assert raised.value.errno == errno.ENOTCONN
        with pytest.raises(OSError) as raised:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.read(100)
        assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        assert time.monotonic() - begin < 5
    assert place.mount().returncode == 0
    assert path.read_bytes() == (place.folder / "tokens" / "c.bin").read_bytes()
    assert scalai("unmount", str(place.point)).returncode == 0
    assert find_mount(place.point) is None


@pytest.mark.fault
def test_a_stopped_mount_is_told_of_in_words_and_frees_its_name(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "ANSWER_S", 1.0)
    if find_mount(place.point) is not None:
        mounts.unmount(place.point, is_lazy=True)
    process = process_of(place, place.mount())
    stop(process)
    try:
        with pytest.raises(UsageError, match="does not answer: its process is stopped or hangs"):
            mounts.prepare(place.point)
        with pytest.raises(RefusedError, match="Or free its name: add --lazy") as raised:
            mounts.unmount(place.point, is_lazy=False)
        told = re.search(r"pgrep -f '(.*)' finds it", str(raised.value))
        assert told is not None
        found = subprocess.run(["pgrep", "-f", told[1]], stdout=subprocess.PIPE, timeout=20)
        assert str(process).encode() in found.stdout.split()
        mounts.unmount(place.point, is_lazy=True)
        assert find_mount(place.point) is None
    finally:
        os.kill(process, signal.SIGKILL)
