"""``scalai://…`` by fsspec: the tree of a job without a mount."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from scalai.core.errors import UsageError
from scalai.store.host import HostStore
from scalai.vfs import tree
from scalai.vfs.filesystem import ScalaiFileSystem
from scalai.vfs.pins import Pins
from support.data_files import lines, write_tokens
from support.odd_names import HUGE, check_slice, names
from support.store_states import WEIGHT, generation, values_of


@pytest.fixture
def files(store: HostStore, tmp_path: Path) -> Iterator[Any]:
    """The file system of a job with a generation and two data sets, found by its entry point."""
    generation(store, 1, 3)
    write_tokens(tmp_path / "data" / "corpus", [5, 3, 8])
    (tmp_path / "x.jsonl").write_bytes(b"".join(lines(20)))
    yield fsspec.filesystem(
        "scalai", store_dir=str(store.directory.parent.parent), global_batch_size=4,
        sources={"corpus": str(tmp_path / "data"), "lines": str(tmp_path / "x.jsonl")},
    )  # fmt: skip
    ScalaiFileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    "path",
    ["job/none", "job/model/../../etc/passwd", "job/dataset/lines/source/x.jsonl/y",
     "job/dataset/lines/dp-4-of-4/pass-0.jsonl"],
)  # fmt: skip
def test_what_is_not_there_is_an_error_of_the_kind_that_readers_expect(
    files: Any, path: str
) -> None:
    assert not files.exists(path)
    with pytest.raises((FileNotFoundError, NotADirectoryError)):
        files.open(path)


def test_it_is_for_reading_and_of_jobs_that_there_are(files: Any, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="only for reading"):
        files.open("job/dataset/lines/source/x.jsonl", "wb")
    with pytest.raises(IsADirectoryError):
        files.cat_file("job/model")
    with pytest.raises(UsageError, match="cannot name a directory"):
        files.ls("..")
    with pytest.raises(UsageError, match="no job 'other' has a store here"):
        ScalaiFileSystem(store_dir=str(tmp_path)).ls("other")


def test_every_way_to_read_gives_the_same(files: Any) -> None:
    path = "job/dataset/lines/source/x.jsonl"
    whole = b"".join(lines(20))
    assert files.cat_file(path) == whole
    assert files.cat_file(path, 5, 50) == whole[5:50]
    assert files.cat_file(path, -9) == whole[-9:]
    with files.open(path) as file:
        file.seek(100)
        assert file.read(20) == whole[100:120] and file.read() == whole[120:]
    with fsspec.open(f"scalai://{path}", "rt", **files.storage_options) as file:
        assert [line.encode() for line in file] == lines(20)
    weight = values_of(WEIGHT, 3)
    with files.open("job/model/w.npy") as file:
        assert np.array_equal(np.load(file).view(np.uint32), weight)
    assert files.info("job/model/w.npy")["size"] == 128 + weight.nbytes


def test_a_slice_is_no_pattern(files: Any, tmp_path: Path) -> None:
    path = "job/model/w[0:2,:].npy"
    data = files.cat_file(path)
    assert files.cat(path) == files.cat(f"scalai://{path}") == data
    assert files.cat([path, "job/model/h.*"]).keys() == {
        path, "job/model/h.npy", "job/model/h.safetensors",
    }  # fmt: skip
    (tmp_path / "folder").mkdir()
    for target in ("w.npy", "folder", "new/"):
        files.get(path, f"{tmp_path}/{target}")
    for target in ("w.npy", "folder/w[0:2,:].npy", "new/w[0:2,:].npy"):
        assert (tmp_path / target).read_bytes() == data
    assert files.expand_path("job/model/[h].npy") == ["job/model/h.npy"]
    with pytest.raises(FileNotFoundError):
        files.cat("job/model/w[0:99,:].npy")


@pytest.mark.parametrize("end", [".npy", ".safetensors"])
def test_a_slice_by_query_is_the_one_by_name(files: Any, end: str, tmp_path: Path) -> None:
    path, name = f"job/model/w{end}?slice=1:3,2:5", f"job/model/w[1:3,2:5]{end}"
    data = files.cat_file(name)
    assert files.cat_file(path) == files.cat(path) == files.cat(f"scalai://{path}") == data
    assert files.isfile(path) and files.info(path) == files.info(name)
    for url in (f"scalai://{path}", f"scalai://{name}"):
        with fsspec.open(url, **files.storage_options) as file:
            assert file.read() == data
    files.get(path, f"{tmp_path}/x")
    assert (tmp_path / "x").read_bytes() == data
    for wrong in ("?slice=9:", "?slice=::2", "?slice=1:3]", "?part=0:1", "?slice=a/b", "?"):
        assert not files.exists(f"job/model/w{end}{wrong}"), wrong
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            files.cat(f"job/model/w{end}{wrong}")
    assert not files.exists("job/model?slice=0:1")


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(names())
@example(f"w[0:{HUGE}].npy")
@example(f"generations/{HUGE}")
def test_no_name_is_more_than_not_there(files: Any, name: str) -> None:
    for path in (f"job/model/{name}", f"job/{name}", f"job/dataset/lines/{name}"):
        try:
            data = files.cat_file(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            assert not files.isfile(path)
        else:
            check_slice(name, data)


def test_what_a_job_says_of_its_data_sets_is_taken_once_it_has_a_state(
    store: HostStore, tmp_path: Path
) -> None:
    root = str(store.directory.parent.parent)
    (tmp_path / "x.jsonl").write_bytes(b"".join(lines(20)))
    files = ScalaiFileSystem(store_dir=root, skip_instance_cache=True)
    assert files.ls("job/dataset") == []
    told = {"sources": {"lines": str(tmp_path / "x.jsonl")}, "global_batch_size": 4}
    generation(store, 1, 3, dataset=told)
    assert files.cat_file("job/dataset/lines/dp-1-of-2/pass-0.jsonl").splitlines(True) == [
        line for place, line in enumerate(lines(20)) if place % 4 > 1
    ]
    given = ScalaiFileSystem(
        store_dir=root, global_batch_size=4, rampup_batch_size=[2, 2, 4], skip_instance_cache=True
    )
    drawn = given.cat_file("job/dataset/lines/dp-1-of-2/pass-0.jsonl").splitlines(True)
    assert drawn == [lines(20)[n] for n in (1, 3, 6, 7, 10, 11, 14, 15, 18, 19)]


@pytest.mark.parametrize(
    "options",
    [{"sources": ["x"]}, {"record_tokens": {"c": "4"}}, {"global_batch_size": "8"},
     {"rampup_batch_size": [1, 1]}, {"sources": {"..": "/x"}}, {"shuffle": {"c": None}}],
)  # fmt: skip
def test_what_is_no_table_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="data sets cannot be named so: "):
        ScalaiFileSystem(**options)


@pytest.mark.fault
def test_pins_expire_without_a_mount_too(
    files: Any, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "Pins", partial(Pins, keep_s=0.0))
    file = files.open("job/model/w.npy")
    store.drop(1)
    for _ in range(2):
        files.exists("job")
    assert not list(store.directory.glob("pinned-*/generation-*"))
    with pytest.raises(OSError, match="its pin has expired"):
        file.read()
    file.close()


READER = """
import fsspec, os, sys
files = fsspec.filesystem("scalai", store_dir=sys.argv[1])
file = files.open("job/model/w.npy")
pid = os.fork()
if not pid:
    with files.open("job/model/w.npy") as other:
        assert len(other.read()) == len(file.read())
    sys.exit()
assert os.waitpid(pid, 0)[1] == 0
print(len(file.read()))
"""


@pytest.mark.fault
def test_a_reader_that_ends_leaves_no_pin(files: Any, store: HostStore) -> None:
    root = store.directory.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", READER, root], capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert int(done.stdout) == files.info("job/model/w.npy")["size"]
    assert not list(store.directory.glob("pinned-*"))


def test_the_whole_tree_is_found(files: Any) -> None:
    found = files.find("job")
    assert "job/dataset/corpus/source/corpus.bin" in found
    assert "job/generations/1/model/w.safetensors" in found
    assert files.isdir("job/dataset") and files.isfile("job/model/w.npy")
    assert files.ls("job/dataset/lines", detail=False) == [
        "job/dataset/lines/source", "job/dataset/lines/dp-0-of-1",
    ]  # fmt: skip
    assert files.glob("job/dataset/*/source/*.idx") == ["job/dataset/corpus/source/corpus.idx"]
