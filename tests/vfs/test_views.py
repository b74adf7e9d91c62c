"""Views of replicas: at any degree they are together the order of the samples, each once."""

import errno
import tracemalloc
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scalai
from scalai.core.dataset.order import GlobalBatches, Places
from scalai.core.degrees.batches import BatchRamp
from scalai.core.errors import RefusedError
from scalai.runtime.session import Session
from scalai.vfs.dataset import (
    DatasetFolder,
    DatasetSpec,
    ReplicaShare,
    SampleOrder,
    Sequential,
    ViewedJob,
    sequences,
)
from scalai.vfs.nodes import File, walk
from scalai.vfs.sample_sources import LocalSource
from scalai.vfs.token_index import TokenIndex, read_index
from support.data_files import lines, write_tokens


@dataclass
class Backwards:
    """An order that is not the one in which samples lie."""

    length: int

    def samples_at(self, places: Places) -> Places:
        return np.asarray(self.length - 1 - places % self.length, dtype=np.int64)


class Reversed(DatasetSpec):
    """A data set whose samples come backwards."""

    def order(self, samples: int) -> SampleOrder:
        return Backwards(samples)


def folder(
    url: Path, batch: int | BatchRamp | None = 8, tokens: int | None = None, consumed: int = 0,
    dp: int = 2,
) -> DatasetFolder:  # fmt: skip
    batches = None if batch is None else GlobalBatches.of(batch)
    job = ViewedJob(batches, lambda: dp, lambda: consumed)
    return DatasetFolder(Reversed("corpus", str(url), tokens), job)


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


@pytest.mark.parametrize(
    ("end", "data", "tokens", "why"),
    [
        (".bin", bytes(20), None, "sequence 2 has 8 bytes from byte 16 on"),
        (".idx", b"MMIDIDX\0\0\1" + bytes(7) + b"\x08\3" + bytes(21), None, "it was cut"),
        (".idx", b"", 2, "does not begin as one of Megatron's"),
        (".idx", b"MMIDIDX", 2, "does not begin as one of Megatron's"),
        (".idx", b"no index at all, but as long as one header", 2, "does not begin as one of"),
    ],
)
def test_a_damaged_index_or_one_of_another_file_is_an_error(
    tmp_path: Path, end: str, data: bytes, tokens: int | None, why: str
) -> None:
    write_tokens(tmp_path / "c", [4, 4, 4])
    (tmp_path / f"c{end}").write_bytes(data)
    with pytest.raises(OSError, match=why):
        walk(folder(tmp_path / "c", tokens=tokens), "dp-0-of-2")


@pytest.mark.fault
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


@pytest.mark.fault
def test_an_order_of_no_samples_is_an_error_of_reading(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"")

    spec = DatasetSpec("corpus", str(tmp_path / "x.jsonl"), seed=1)
    root = DatasetFolder(spec, ViewedJob(GlobalBatches.of(8), lambda: 2, lambda: 0))
    with pytest.raises(OSError, match="corpus has no order: ") as raised:
        walk(root, "dp-0-of-2/pass-0.jsonl")
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_lines_of_all_replicas_are_the_order_whatever_the_degree(json_file: Path, dp: int) -> None:
    root = folder(json_file)
    views = [
        [read(root, f"dp-{rank}-of-{dp}/pass-{number}.jsonl").splitlines(keepends=True)
         for number in range(3)]
        for rank in range(dp)
    ]  # fmt: skip
    left = [[line for one in of_rank for line in one] for of_rank in views]
    drawn: list[bytes] = []
    while len(drawn) < 3 * 37:
        for of_rank in left:
            drawn += [of_rank.pop(0) for _ in range(min(8 // dp, len(of_rank)))]
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
    for name in ("dp-1-of-4/pass-1.jsonl", "dp-0-of-1/pass-0.jsonl"):
        whole = read(root, name)
        node = walk(root, name)
        assert isinstance(node, File)
        content = node.open()
        for low in range(0, len(whole) + 9, 7):
            for size in (1, 5, 64, 999):
                assert content.read(low, size) == whole[low : low + size]


def test_a_listing_shows_the_present_degree_and_pass(json_file: Path) -> None:
    root = folder(json_file, consumed=80)
    assert list(root.names()) == ["source", "dp-0-of-2", "dp-1-of-2"]
    assert list(root.child("dp-0-of-2").names()) == ["pass-0.jsonl", "pass-2.jsonl"]  # type: ignore[attr-defined]
    assert list(folder(json_file, dp=3).names()) == ["source"], "3 does not divide the batch"


@pytest.mark.parametrize("batch", [1024, BatchRamp(64, 64, 10**8, 1024)])
def test_a_billion_samples_cost_nothing_before_they_are_read(
    tmp_path: Path, batch: int | BatchRamp
) -> None:
    write_tokens(tmp_path / "c", [4])
    with open(tmp_path / "c.bin", "r+b") as file:
        file.truncate(8 * 10**9)
        file.seek(8 * 10**9 - 8)
        file.write(np.array([1, 2, 3, 4], np.uint16).tobytes())
    root = folder(tmp_path / "c", batch=batch, tokens=4)
    tracemalloc.start()
    node = walk(root, "dp-0-of-64/pass-0.bin")
    begin = [start for start, _ in GlobalBatches.of(batch).stages][-1]
    whole, rest = divmod(10**9 - begin, 1024)
    samples = begin // 64 + 16 * whole + min(rest, 16)
    assert isinstance(node, File) and node.size_bytes == 8 * samples
    assert node.open().read(0, 8) == np.array([1, 2, 3, 4], np.uint16).tobytes()
    index = walk(root, "dp-0-of-64/pass-0.idx")
    assert isinstance(index, File)
    content = index.open()
    assert content.read(content.size_bytes - 8, 8) == samples.to_bytes(8, "little")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


RAMPS = st.builds(
    lambda start, increment, times, samples: BatchRamp(
        12 * start, 12 * increment, samples, 12 * (start + times * increment)
    ),
    st.integers(1, 3), st.integers(1, 2), st.integers(0, 5), st.integers(0, 400),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(RAMPS, st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 150), st.integers(1, 4))
def test_each_replica_reads_what_the_order_of_ones_own_draws_by_the_same_ramp(
    ramp: BatchRamp, dp: int, count: int, passes: int
) -> None:
    order, seen = scalai.Shuffled(count, 3), list[list[int]]()
    for rank in range(dp):
        job = Session()
        job.rank, job.world_size, job.dp, job.consumed_samples = rank, dp, dp, 0
        batches = scalai.OrderedBatches(job, order, ramp)
        share = ReplicaShare(rank, dp, GlobalBatches.of(ramp))
        ends = [share.before(number * count) for number in range(passes + 1)]
        found = [order.samples_at(share.places(*ends_of)).tolist() for ends_of in pairwise(ends)]
        mine = list(chain(*found))
        drawn = chain.from_iterable(batches)
        assert mine == list(islice(drawn, len(mine)))
        middle = len(mine) // 2
        assert order.samples_at(share.places(middle, len(mine))).tolist() == mine[middle:]
        seen = [a + b for a, b in zip(seen or [[]] * passes, found, strict=True)]
    assert all(sorted(one) == list(range(count)) for one in seen), "each sample once a pass"


def test_a_ramp_beyond_all_samples_is_evaluated_at_any_place() -> None:
    batches = GlobalBatches.of(BatchRamp(32, 32, 10**17, 4096))
    shares = [ReplicaShare(rank, 32, batches) for rank in range(32)]
    for end in (10**9 + 7, 10**16 + 1, 3 * 10**17 + 5):
        counts = [share.before(end) for share in shares]
        assert sum(counts) == end
        last = [int(s.places(n - 1, n)[0]) for s, n in zip(shares, counts, strict=True)]
        next_ = [int(s.places(n, n + 1)[0]) for s, n in zip(shares, counts, strict=True)]
        assert max(last) == end - 1 and min(next_) == end


@pytest.mark.parametrize(
    ("dp", "batch"), [(3, 8), (3, BatchRamp(6, 2, 100, 12)), (2, BatchRamp(3, 3, 9, 9))]
)
def test_a_degree_that_does_not_divide_each_batch_has_no_view_as_it_has_no_order(
    json_file: Path, dp: int, batch: int | BatchRamp
) -> None:
    root = folder(json_file, batch=batch, dp=dp)
    with pytest.raises(FileNotFoundError, match=f"dp={dp} does not divide global_batch_size="):
        walk(root, f"dp-0-of-{dp}/pass-0.jsonl")
    assert list(root.names()) == ["source"]
    job = Session()
    job.rank, job.world_size, job.dp, job.consumed_samples = 0, dp, dp, 0
    with pytest.raises(RefusedError, match=f"dp={dp} does not divide global_batch_size="):
        list(scalai.OrderedBatches(job, scalai.Shuffled(37), batch, samples=1000))


def test_a_pass_that_nobody_reaches_is_not_there(tmp_path: Path) -> None:
    write_tokens(tmp_path / "c", [4])
    with open(tmp_path / "c.bin", "r+b") as file:
        file.truncate(8 * 10**10)
    with pytest.raises(FileNotFoundError, match="no training comes so far"):
        walk(folder(tmp_path / "c", tokens=4), "dp-0-of-2/pass-999999999.bin")


def test_the_plain_order_begins_again_behind_its_end() -> None:
    assert Sequential(3).samples_at(np.arange(5)).tolist() == [0, 1, 2, 0, 1]
