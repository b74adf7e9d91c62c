"""Pickles are read without their classes and written back under the same names."""

import argparse
import os
import pickle
import signal
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest

from scalai.converters import pickles
from scalai.converters.archive_layout import lay_out_archive
from scalai.converters.torch_archive import NewTensor, StoredTensor, read_archive
from scalai.core.errors import RefusedError

PLAIN = {
    "set": {1, 2}, "range": range(3), "complex": 1j, "bytes": b"\x00\xff", "none": None,
    "ordered": OrderedDict(a=1), "default": defaultdict(list, {1: [2]}),
    "namespace": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)), "path": Path("/some/where"),
    "scalar": np.float64(1.5),
}  # fmt: skip


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_what_they_were(protocol: int) -> None:
    value = pickles.loads(pickle.dumps(PLAIN, protocol), "file")
    assert value == PLAIN
    assert pickle.loads(pickles.dumps(value)) == PLAIN


def test_an_enum_stays_a_stand_in_and_is_itself_again_where_it_is_known() -> None:
    data = pickle.dumps({"exit_signal": signal.SIGTERM}, protocol=2)
    value = pickles.loads(data, "file")
    assert isinstance(value["exit_signal"], pickles.Foreign)
    assert pickle.loads(pickles.dumps(value)) == {"exit_signal": signal.SIGTERM}


@pytest.mark.parametrize("name", ["builtins\neval", "builtins\ngetattr", "os\nsystem", "io\nopen"])
def test_what_could_run_something_is_refused(name: str) -> None:
    data = b"c" + name.encode() + b"\n."
    with pytest.raises(RefusedError, match="--trust-pickle"):
        pickles.loads(data, "file")


@pytest.mark.parametrize(
    "name", ["torch.utils.collect_env\nrun", "torch.storage\n_load_from_bytes", "torch.hub\nload"]
)
def test_a_function_of_a_known_package_may_be_named_and_not_called(name: str) -> None:
    """What is written back is called by whoever loads it."""
    value = pickles.loads(b"c" + name.encode() + b"\n.", "file")
    assert issubclass(value, pickles.Foreign)
    with pytest.raises(RefusedError, match=r"file calls torch\..*--trust-pickle"):
        pickles.loads(b"c" + name.encode() + b"\n(S'id'\ntR.", "file")


def test_a_device_may_be_made_and_what_is_trusted_too() -> None:
    assert pickles.loads(b"ctorch\ndevice\n(S'cpu'\ntR.", "file").args == ("cpu",)
    call = b"ctorch.trusted\ncall\n(S'id'\ntR."
    with pytest.raises(RefusedError):
        pickles.loads(call, "file")
    assert pickles.loads(call, "file", trust=True).args == ("id",)


@pytest.mark.parametrize("name", ["torch\nfloat32", "argparse\nNamespace", "pathlib\nPosixPath"])
def test_a_pickle_cannot_change_a_class(name: str) -> None:
    """It could be given the name of a function, under which it would be written back."""
    data = b"c" + name.encode() + b"\n(N}S'path'\n(S'os'\nS'system'\ntstb."
    with pytest.raises(RefusedError, match="damaged pickle"):
        pickles.loads(data, "file")
    assert pickles.foreign("torch", "float32").path == ("torch", "float32")


def test_a_short_deque_of_a_long_range_is_refused() -> None:
    data = b"ccollections\ndeque\n(c__builtin__\nxrange\n(L1000000000000L\ntRI1\ntR."
    with pytest.raises(RefusedError, match="a deque of a range"):
        pickles.loads(data, "file")
    assert pickles.loads(pickle.dumps(deque([1, 2], 3), 2), "file") == deque([1, 2], 3)


def test_sets_are_written_alike_whatever_the_hash_seed() -> None:
    code = (
        "from scalai.converters import pickles\n"
        "print(pickles.dumps({'a': set('some words'), 'b': frozenset('others')}).hex())"
    )
    written = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(written) == 1
    assert pickle.loads(bytes.fromhex(written.pop()))["a"] == set("some words")


TORCH = """
import sys, torch
value = torch.load(sys.argv[1], weights_only=False)
assert value["dtype"] is torch.bfloat16, value
assert torch.equal(value["tensor"], torch.arange(6.0).view(2, 3)), value
assert value["scalar"].shape == () and value["scalar"].item() == 7
torch.save({"view": torch.arange(10.0).view(2, 5)[:, 1:3], "half": torch.ones(3).bfloat16(),
            "parameter": torch.nn.Parameter(torch.zeros(2))}, sys.argv[2])
"""


def test_torch_reads_our_archives_and_we_read_torchs(tmp_path: Path) -> None:
    content = np.arange(6, dtype=np.float32).tobytes()
    archive = lay_out_archive(
        {
            "dtype": pickles.foreign("torch", "bfloat16"),
            "tensor": NewTensor("F32", (2, 3)),
            "scalar": NewTensor("I64", (), np.int64(7).tobytes()),
        }
    )
    data = bytearray(archive.size_bytes)
    for at, part in archive.fixed:
        data[at : at + len(part)] = part
    data[archive.begin[0] : archive.begin[0] + len(content)] = content
    assert archive.begin[0] % 64 == 0
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    ours.write_bytes(data)
    subprocess.run([sys.executable, "-c", TORCH, ours, theirs], check=True, timeout=60)
    value = read_archive(theirs)
    view = value["view"]
    assert (view.dtype, view.shape, view.stride) == ("F32", (2, 2), (5, 1))
    raw = theirs.read_bytes()
    assert np.frombuffer(raw, np.float32, 2, view.begin).tolist() == [1.0, 2.0]
    assert value["half"].dtype == "BF16"
    assert isinstance(value["parameter"], StoredTensor)


def test_archives_beyond_four_gigabytes_are_read_too(tmp_path: Path) -> None:
    archive = lay_out_archive([NewTensor("U8", (5 << 30,)), NewTensor("U8", (3,))])
    path = tmp_path / "sparse.pt"
    with open(path, "wb") as file:
        file.truncate(archive.size_bytes)
        for at, part in archive.fixed:
            file.seek(at)
            file.write(part)
    large, small = read_archive(path)
    assert (large.shape, large.begin) == ((5 << 30,), archive.begin[0])
    assert (small.shape, small.begin) == ((3,), archive.begin[1])
    assert small.begin > 5 << 30
