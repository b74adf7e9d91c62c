"""Views of replicas: at any degree they are together the order of the samples, each once."""

import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.dataset.order import Places
from scalai.core.dataset.own_order import Shuffled
from scalai.vfs.cache import BlockCache
from scalai.vfs.dataset import DatasetFolder, DatasetSpec, Job
from scalai.vfs.nodes import File, walk
from scalai.vfs.records import sequences
from scalai.vfs.shares import Order, Sequential, Share
from scalai.vfs.sources import LocalSource
from scalai.vfs.token_index import TokenIndex, read_index
from support.data_files import lines, write_tokens


class Backwards:
    """An order that is not the one in which samples lie."""

    def __init__(self, length: int) -> None:
        self.length = length

    def samples_at(self, places: Places) -> Places:
        return np.asarray(self.length - 1 - places % self.length, dtype=np.int64)


def folder(
    url: Path, batch: int | None = 8, tokens: int | None = None, consumed: int = 0, dp: int = 2
) -> DatasetFolder:
    def order(name: str, samples: int) -> Order:
        return Backwards(samples)

    job = Job(batch, order, lambda: dp, lambda: consumed)
    return DatasetFolder(DatasetSpec("corpus", str(url), tokens), BlockCache(), job)


def read(root: DatasetFolder, path: str) -> bytes:
    node = walk(root, path)
    assert isinstance(node, File)
    data = node.open().read(0, node.size_bytes)
    assert len(data) == node.size_bytes
    return data


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(lines(37)))
    return path


@pytest.mark.parametrize(
    "path",
    ["dp-2-of-2", "dp-0-of-0", "dp--1-of-2", "dp-00-of-2", "dp-0-of-02", "dp-0-of-2/pass-0.bin",
     "dp-0-of-2/pass-00.jsonl", "dp-0-of-2/pass-0.idx", "dp-0-of-2/..", "dp-1-of-9999999999",
     "source/..", "source/none"],
)  # fmt: skip
def test_a_name_that_is_none_leads_nowhere(json_file: Path, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        walk(folder(json_file), path)


def test_without_a_batch_or_one_file_of_samples_there_is_no_view(
    tmp_path: Path, json_file: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="give --global-batch-size"):
        walk(folder(json_file, batch=None), "dp-0-of-2")
    (tmp_path / "y.jsonl").write_bytes(b"{}\n")
    root = folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="views need one file of samples"):
        walk(root, "dp-0-of-2")
    assert root.names() == ["source"]


def test_an_index_that_names_bytes_beyond_the_file_is_an_error(tmp_path: Path) -> None:
    write_tokens(tmp_path / "c", [4, 4, 4])
    with open(tmp_path / "c.bin", "r+b") as file:
        file.truncate(20)
    with pytest.raises(OSError, match="sequence 2 has 8 bytes from byte 16 on"):
        walk(folder(tmp_path / "c"), "dp-0-of-2")


@pytest.mark.parametrize(
    ("lengths", "pointers"),
    [([4, -3, 2], [0, 8, 2]), ([4, 3], [0, -8]), ([4, 1], [0, (1 << 63) - 1]), ([4, 3], [0, 8])],
)
def test_an_index_with_impossible_sequences_is_an_error(
    lengths: list[int], pointers: list[int]
) -> None:
    index = TokenIndex(np.dtype("u2"), np.array(lengths, "i4"), np.array(pointers, "i8"))
    with pytest.raises(OSError, match=r"the \.idx says that sequence 1 has .* they do not belong"):
        sequences(index, 12)


def test_an_order_of_no_samples_is_an_error_of_reading(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"")

    def order(name: str, samples: int) -> Order:
        return Shuffled(samples, 1, name)

    spec = DatasetSpec("corpus", str(tmp_path / "x.jsonl"))
    root = DatasetFolder(spec, BlockCache(), Job(8, order, lambda: 2, lambda: 0))
    with pytest.raises(OSError, match="corpus has no order: ") as raised:
        walk(root, "dp-0-of-2/pass-0.jsonl")
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("damage", [b"", b"MMIDIDX", b"no index at all, but as long as one header"])
def test_what_is_no_index_is_an_error(tmp_path: Path, damage: bytes) -> None:
    write_tokens(tmp_path / "c", [4, 4, 4])
    (tmp_path / "c.idx").write_bytes(damage)
    with pytest.raises(OSError, match="does not begin as one of Megatron's"):
        walk(folder(tmp_path / "c", tokens=2), "dp-0-of-2")


def test_an_index_that_was_cut_is_an_error(tmp_path: Path) -> None:
    write_tokens(tmp_path / "c", [4, 4, 4])
    with open(tmp_path / "c.idx", "r+b") as file:
        file.truncate(40)
    with pytest.raises(OSError, match=r"has 3 sequences, .* it was cut"):
        walk(folder(tmp_path / "c"), "dp-0-of-2")


@pytest.mark.parametrize("dp", [1, 2, 3, 8, 11])
def test_lines_of_all_replicas_are_the_order_whatever_the_degree(json_file: Path, dp: int) -> None:
    root = folder(json_file)
    views = [
        [read(root, f"dp-{rank}-of-{dp}/pass-{number}.jsonl").splitlines(keepends=True)
         for number in range(3)]
        for rank in range(dp)
    ]  # fmt: skip
    shares = [Share(rank, dp, 8) for rank in range(dp)]
    left = [[line for one in of_rank for line in one] for of_rank in views]
    drawn: list[bytes] = []
    while len(drawn) < 3 * 37:
        for rank, share in enumerate(shares):
            drawn += [left[rank].pop(0) for _ in range(min(share.size, len(left[rank])))]
    assert drawn == lines(37)[::-1] * 3


def test_a_last_line_without_an_end_gets_one_and_empty_ones_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n\n{"b":2}')
    assert read(folder(path), "dp-0-of-1/pass-0.jsonl") == b'{"b":2}\n{"a":1}\n'
    path.write_bytes(b"")
    assert read(folder(path), "dp-0-of-1/pass-0.jsonl") == b""


@pytest.mark.parametrize("tokens", [None, 4])
def test_a_view_of_tokens_has_its_own_index(tmp_path: Path, tokens: int | None) -> None:
    lengths = [4] * 20 if tokens else [n % 5 + 1 for n in range(20)]
    written = write_tokens(tmp_path / "c", lengths)
    root = folder(tmp_path / "c", tokens=tokens)
    ends = np.cumsum(lengths)
    expected = [written[end - size : end] for end, size in zip(ends, lengths, strict=True)][::-1]
    for rank in range(2):
        (tmp_path / "v.idx").write_bytes(read(root, f"dp-{rank}-of-2/pass-0.idx"))
        index = read_index(LocalSource(tmp_path / "v.idx"))
        data = read(root, f"dp-{rank}-of-2/pass-0.bin")
        mine = [expected[place] for place in range(20) if place % 8 // 4 == rank]
        begins = index.pointers.tolist()
        found = [np.frombuffer(data, np.uint16, size, begin)
                 for begin, size in zip(begins, index.lengths.tolist(), strict=True)]  # fmt: skip
        assert all(np.array_equal(a, b) for a, b in zip(found, mine, strict=True))


def test_any_bytes_of_a_view_are_those_of_the_whole(json_file: Path) -> None:
    root = folder(json_file)
    for name in ("dp-1-of-3/pass-1.jsonl", "dp-0-of-1/pass-0.jsonl"):
        whole = read(root, name)
        node = walk(root, name)
        assert isinstance(node, File)
        content = node.open()
        for low in range(0, len(whole) + 9, 7):
            for size in (1, 5, 64, 999):
                assert content.read(low, size) == whole[low : low + size]


def test_a_listing_shows_the_present_degree_and_pass(json_file: Path) -> None:
    root = folder(json_file, consumed=80, dp=3)
    assert list(root.names()) == ["source", "dp-0-of-3", "dp-1-of-3", "dp-2-of-3"]
    assert list(root.child("dp-0-of-3").names()) == ["pass-0.jsonl", "pass-2.jsonl"]  # type: ignore[attr-defined]


def test_a_billion_samples_cost_nothing_before_they_are_read(tmp_path: Path) -> None:
    write_tokens(tmp_path / "c", [4])
    with open(tmp_path / "c.bin", "r+b") as file:
        file.truncate(8 * 10**9)
        file.seek(8 * 10**9 - 8)
        file.write(np.array([1, 2, 3, 4], np.uint16).tobytes())
    root = folder(tmp_path / "c", batch=1024, tokens=4)
    node = walk(root, "dp-0-of-64/pass-0.bin")
    assert isinstance(node, File) and node.size_bytes == 8 * 16 * (10**9 // 1024) + 8 * 16
    assert node.open().read(0, 8) == np.array([1, 2, 3, 4], np.uint16).tobytes()
    index = walk(root, "dp-0-of-64/pass-0.idx")
    assert isinstance(index, File)
    content = index.open()
    assert content.read(content.size_bytes - 8, 8) == (node.size_bytes // 8).to_bytes(8, "little")


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 100))
def test_shares_cut_the_order_without_gap_or_overlap(batch: int, dp: int, end: int) -> None:
    shares = [Share(rank, dp, batch) for rank in range(dp)]
    places = [share.places(0, share.before(end)).tolist() for share in shares]
    assert sorted(place for each in places for place in each) == list(range(end))
    assert all(each == sorted(each) for each in places)


def test_the_plain_order_begins_again_behind_its_end() -> None:
    assert Sequential(3).samples_at(np.arange(5)).tolist() == [0, 1, 2, 0, 1]
