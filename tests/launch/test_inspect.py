"""``scalai inspect``: what a generation holds, wherever it lies."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from scalai.core.errors import LayoutError, ProofError, ScalaiError, StoreError, UsageError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import piece_fingerprint
from scalai.core.tensors.region import whole
from scalai.launch.commands import inspect
from scalai.store.files import decode
from scalai.store.host import HostStore
from support.store_states import HALF, WEIGHT, Opener, generation, two_ranks, values_of


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run the command and return what it printed."""
    parser = argparse.ArgumentParser()
    inspect.add_parser(parser.add_subparsers())
    args = parser.parse_args(["inspect", *map(str, arguments)])
    assert args.run(args) == 0
    return capsys.readouterr().out


def halves(open_store: Opener, hosts: Sequence[str] = ("a", "b")) -> list[HostStore]:
    """Let each of two hosts hold a half of the weight, and the rest: generations 1 and 2."""
    stores = [open_store(host=host) for host in hosts]
    for rank, store in enumerate(stores):
        for step in (1, 2):
            generation(store, step, step, {rank: two_ranks()[rank]})
    return stores


def test_every_place_shows_the_generation(
    open_store: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = halves(open_store)
    for store in stores:
        store.copy_to(2, tmp_path / "disk")
    part, job = stores[0].generation_directory(2), stores[0].directory.parent
    hosts = {
        part: ["a"],
        stores[0].directory: ["a"],
        job: ["a", "b"],
        tmp_path / "disk": ["a", "b"],
        tmp_path / "disk" / "generation-2": ["a", "b"],
        tmp_path / "disk" / "generation-2" / "b": ["b"],
    }
    for path, expected in hosts.items():
        report = json.loads(run(capsys, path, "--json"))
        assert (report["generation"], report["step"]) == (2, 2), path
        assert [host["host"] for host in report["hosts"]] == expected, path
        assert report["is_whole"] == (len(expected) == 2), path


def test_fingerprints_are_those_of_whole_tensors(
    open_store: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    job = halves(open_store)[0].directory.parent
    report = json.loads(run(capsys, job, "--json", "--generation", 1))
    found = {tensor["name"]: tensor for tensor in report["tensors"]}
    for tensor in (WEIGHT, HALF):
        expected = piece_fingerprint(values_of(tensor, 1), whole(tensor.shape), tensor.shape)
        assert found[tensor.name]["fingerprint"] == f"{expected:016x}"
    assert len(found[WEIGHT.name]["pieces"]) == len(found[HALF.name]["pieces"]) == 2
    assert report["generations"] == [1, 2]


def test_the_text_names_layout_step_sizes_and_fingerprints(
    open_store: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = halves(open_store)
    text = run(capsys, stores[0].directory.parent, "--verify")
    assert "generation 2  step 2  (also here: 1)" in text
    assert "degrees    tp=2" in text and "consumed_samples 24" in text
    assert "whole" in text and "not whole" not in text and "computed again and equal" in text
    assert "[0:6,4:8]  b/rank-1" in text and "[0:5,0:3]  a/rank-0 b/rank-1" in text
    half = run(capsys, stores[0].directory)
    assert "not whole: 1 boxes are on none of these hosts, first param/w[0:6,4:8]" in half


def test_values_of_one_tensor(
    open_store: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = halves(open_store)
    job = stores[0].directory.parent
    found = json.loads(run(capsys, job, "--tensor", "param/w", "--json"))
    bits = np.array(found["values"], dtype=np.float32).view(np.uint32)
    is_number = ~np.isnan(values_of(WEIGHT, 2).view(np.float32))
    assert np.array_equal(bits[is_number], values_of(WEIGHT, 2)[is_number])
    assert "param/w  F32[6, 8]  step 2" in run(capsys, job, "--tensor", "param/w")
    with pytest.raises(LayoutError, match="Name the directory of all hosts"):
        run(capsys, stores[0].directory, "--tensor", "param/w")
    with pytest.raises(UsageError, match=r"no tensor 'w'.*param/w"):
        run(capsys, job, "--tensor", "w")


def test_damage_is_found(store: HostStore, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = generation(store, 1, step=1)
    path = store.generation_directory(1) / manifest.files[0].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run(capsys, store.directory)
    with pytest.raises(ProofError, match=f"in {path} has fingerprint"):
        run(capsys, store.directory, "--verify")
    path.write_bytes(content[:-1])
    with pytest.raises(StoreError, match=str(path)):
        run(capsys, store.directory)


@pytest.mark.parametrize("arguments", [[], ["--generation", "9"]])
def test_what_is_not_there_is_said(
    store: HostStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    generation(store, 1, step=1)
    place = store.directory if arguments else tmp_path / "store"
    with pytest.raises(ScalaiError, match=r"\[1\]" if arguments else "There are some below: job"):
        run(capsys, place, *arguments)


def test_overlapping_pieces_have_no_common_fingerprint(
    open_store: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    left, both = open_store(host="a"), open_store(host="b")
    generation(left, 1, 1, {0: two_ranks()[0]})
    generation(both, 1, 1, {1: Collection.of([(WEIGHT, whole(WEIGHT.shape))])})
    report = json.loads(run(capsys, left.directory.parent, "--json"))
    found = {tensor["name"]: tensor["fingerprint"] for tensor in report["tensors"]}
    assert report["is_whole"] and found["param/w"] is None and found["param/h"] is not None


def test_small_floats_are_decoded() -> None:
    torch = pytest.importorskip("torch")
    patterns = np.arange(256, dtype=np.uint8)
    for name, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        expected = torch.from_numpy(patterns).view(dtype).float().numpy()
        assert np.array_equal(decode(patterns, name), expected, equal_nan=True)
    half = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(half.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(decode(half, "BF16"), expected, equal_nan=True)
    assert decode(values_of(Tensor("t", (3,), "I64")), "I64").dtype == np.int64
