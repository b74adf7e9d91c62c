"""Which tensor of a checkpoint fills which one of an engine, which elements of a parameter lie
where in its flat buffers, and what a script has said in the checkpoint."""

import _thread
import io
import json
import pickle
import threading
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scalai.converters.checkpoint import (
    REPORT,
    REPORT_VERSION,
    CheckpointFile,
    FilePiece,
    PlacedTensors,
    place,
)
from scalai.converters.checksums import FileStorage
from scalai.core.errors import LayoutError, MemoryShortError, ProofError, RefusedError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.fingerprint import VERSION, piece_fingerprint
from scalai.core.tensors.region import Box, Piece, row_major, whole
from scalai.patches.deepspeed.checkpoint import filling
from scalai.patches.deepspeed.checkpoint.filling import (
    Row,
    check_proofs,
    check_storages,
    proof,
    share,
    touched,
)
from scalai.patches.deepspeed.checkpoint.load_plan import TensorOrigin, fitted, origins, used
from scalai.patches.deepspeed.checkpoint.model_file import (
    client_state_of,
    read_values,
    saved_step,
)
from scalai.patches.deepspeed.masters import cut_pieces, offset_in, partitioned
from scalai.patches.deepspeed.parallel_ranks import TensorParallel
from scalai.runtime.live import Slot, held_rows, host_bits
from scalai.runtime.live_fingerprints import live_fingerprints

SHAPE = (4, 3)
FULL, ROUND, MASTER = (
    Tensor(name, SHAPE, dtype)
    for name, dtype in (("param/w", "F32"), ("param/w", "BF16"), ("main/w", "F32"))
)
MOMENT = Tensor("exp_avg/w", SHAPE, "F32")


def by_name(*tensors: Tensor) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in tensors}


@pytest.mark.parametrize(
    ("saved", "wanted", "found"),
    [
        ((FULL, MOMENT), (FULL, MOMENT), (TensorOrigin(FULL), TensorOrigin(MOMENT))),
        ((ROUND, MASTER), (ROUND, MASTER), (TensorOrigin(ROUND), TensorOrigin(MASTER))),
        ((FULL,), (ROUND, MASTER), (TensorOrigin(FULL, is_rounded=True), TensorOrigin(FULL))),
        ((ROUND, MASTER), (FULL,), (TensorOrigin(MASTER),)),
        (
            (ROUND, MASTER),
            (Tensor("param/w", SHAPE, "F16"),),
            (TensorOrigin(MASTER, is_rounded=True),),
        ),
        ((ROUND,), (MASTER, MOMENT), ()),
    ],
)
def test_weights_of_another_precision_come_from_fp32(
    saved: tuple[Tensor, ...], wanted: tuple[Tensor, ...], found: tuple[TensorOrigin, ...]
) -> None:
    assert tuple(origins(by_name(*saved), by_name(*wanted)).values()) == found


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (ROUND, FULL),
        (FULL, Tensor("param/w", (4, 4), "F32")),
        (MOMENT, Tensor("exp_avg/w", SHAPE, "BF16")),
    ],
)
def test_what_does_not_fit_is_refused_by_name(saved: Tensor, wanted: Tensor) -> None:
    with pytest.raises(RefusedError, match=wanted.name):
        origins(by_name(saved), by_name(wanted))


def test_pieces_keep_their_places_under_other_names() -> None:
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    pieces = [
        FilePiece(tensor, box, "file", 100 * number)
        for number, (tensor, box) in enumerate(
            (tensor, box) for box in halves for tensor in (MOMENT, FULL)
        )
    ]
    source = place(pieces, [CheckpointFile("file", 1000)])
    wanted = by_name(ROUND, MASTER)
    found = origins(by_name(FULL, MOMENT), wanted)
    placed = fitted(source, found, wanted)
    rows = [placed.collection.box(row) for row in range(len(placed.collection))]
    assert rows == [(tensor, box) for tensor in (ROUND, MASTER) for box in halves]
    assert placed.begin.tolist() == [100, 300, 100, 300]
    assert placed.rounded().tolist() == [True, True, False, False]
    assert used(source.collection, found).tolist() == [False, True]


STORAGES = [
    FileStorage("b", "data/0", 64, 40, 1), FileStorage("b", "data/1", 128, 400, 1),
    FileStorage("a", "data/0", 64, 8, 1), FileStorage("a", "data/1", 128, 40, 1),
]  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_storage_is_checked_by_one_rank(world_size: int) -> None:
    shares = [share(STORAGES, rank, world_size) for rank in range(world_size)]
    assert [stored for one in shares for stored in one] == STORAGES
    assert share([], 0, world_size) == []


@pytest.mark.parametrize(
    ("file", "begin", "expected"),
    [
        (0, 64, [2]), (0, 167, [3]), (0, 168, []), (0, 100, []), (0, 0, []),
        (1, 103, [0]), (1, 500, [1]), (1, 528, []),
    ],
)  # fmt: skip
def test_the_storage_of_a_piece_is_found(file: int, begin: int, expected: list[int]) -> None:
    box = np.zeros((1, 1), dtype=np.int64)
    collection = Collection((Tensor("x", (1,), "U8"),), np.zeros(1, dtype=np.int64), box, box + 1)
    files = (CheckpointFile("a", 168), CheckpointFile("b", 528))
    placed = PlacedTensors(collection, np.array([file]), np.array([begin]), box + 1, files)
    assert np.flatnonzero(touched(STORAGES, placed)).tolist() == expected


NOTHING = PlacedTensors(
    Collection.of([]), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64),
    np.zeros((0, 0), dtype=np.int64), (),
)  # fmt: skip


def refuse(*_: object) -> int:
    raise RuntimeError("can't start new thread")


@pytest.mark.fault
@pytest.mark.parametrize("start", [refuse, lambda *_: 0], ids=["refused", "never begins"])
def test_all_are_checked_though_no_thread_can_begin(
    start: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[FileStorage, int]] = []

    def is_damaged(directory: Path, stored: FileStorage) -> bool:
        checked.append((stored, threading.get_ident()))
        return stored is STORAGES[2]

    monkeypatch.setattr(filling, "is_damaged", is_damaged)
    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(threading, "_start_new_thread", start)
    with pytest.raises(ProofError, match=r"/d/a: bytes 64 to 72 .*The engine is as it was"):
        check_storages(Path("/d"), STORAGES, NOTHING)
    assert checked == [(stored, threading.get_ident()) for stored in STORAGES]


@pytest.mark.fault
def test_memory_that_runs_out_in_a_check_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(directory: Path, stored: FileStorage) -> bool:
        raise MemoryError

    monkeypatch.setattr(filling, "is_damaged", run_out)
    with pytest.raises(MemoryShortError, match=r"4 storages of /d.*The engine is as it was"):
        check_storages(Path("/d"), STORAGES, NOTHING)


WEIGHT = Tensor("param/w", (6, 4), "F32")
VALUES = torch.arange(24, dtype=torch.float32)


def half(rank: int) -> list[Row]:
    box = Box((3 * rank, 0), (3, 4))
    return held_rows([Slot(WEIGHT, VALUES[12 * rank : 12 * rank + 12], (Piece(box, 0, (4, 1)),))])


def report(directory: Path, change: int) -> None:
    bits = host_bits(VALUES.view(torch.int32).reshape(6, 4))
    value = piece_fingerprint(bits, whole(WEIGHT.shape), WEIGHT.shape) + change
    content = {
        "version": REPORT_VERSION,
        "fingerprint_version": VERSION,
        "fingerprints": {WEIGHT.name: f"{value:016x}"},
    }
    (directory / REPORT).write_text(json.dumps(content))


SOURCE = Collection.of([(WEIGHT, whole(WEIGHT.shape))])


def proofs() -> list[bytes]:
    return [proof(half(n), live_fingerprints(half(n))) for n in (0, 1)]


def test_recorded_fingerprints_are_compared(tmp_path: Path) -> None:
    report(tmp_path, 0)
    check_proofs(tmp_path, SOURCE, proofs())
    report(tmp_path, 1)
    with pytest.raises(ProofError, match=r"1 tensors are not what .*scalai\.json says"):
        check_proofs(tmp_path, SOURCE, proofs())


def test_replicas_that_differ_are_found_where_nothing_is_recorded(tmp_path: Path) -> None:
    other = proof(half(0), live_fingerprints(half(0)) + 1)
    with pytest.raises(ProofError, match=r"replicas of .* differ"):
        check_proofs(tmp_path, SOURCE, [*proofs(), other])


# ------------------------------------------------------------------ elements of a parameter

BOX = (5, 3, 4)
BOX_NUMEL = 60
PARAMETER = torch.empty(0)


@pytest.mark.parametrize("offset", [0, 1, 13, 40])
@pytest.mark.parametrize("partition_numel", [7, 20, 50, 200])
def test_partitions_make_up_a_parameter_and_hold_its_elements_in_order(
    offset: int, partition_numel: int
) -> None:
    flat = np.full(1000, -1)
    flat[offset : offset + BOX_NUMEL] = np.arange(BOX_NUMEL)
    rows: list[Piece] = []
    for rank in range(-(-(offset + BOX_NUMEL) // partition_numel)):
        found = partitioned(PARAMETER, BOX_NUMEL, offset, partition_numel, rank)
        own = flat[rank * partition_numel :]
        assert own[found.start : found.start + found.high - found.low].tolist() == list(
            range(found.low, found.high)
        )
        piece = Piece(whole(BOX), 0, row_major(BOX))
        rows += cut_pieces([piece], found.low, found.high, found.start, found.cuts)
    check_coverage(Collection.of((Tensor("param/x", BOX, "F32"), row.box) for row in rows))


@pytest.mark.parametrize("cuts", [(), (5,), (1, 17, 18, 59)])
def test_a_whole_copy_is_cut_into_the_boxes_of_the_partitions(cuts: tuple[int, ...]) -> None:
    piece = Piece(whole(BOX), 0, row_major(BOX))
    ends = (0, *cuts, BOX_NUMEL)
    apart = [
        part.box for low, high in pairwise(ends) for part in cut_pieces([piece], low, high, 0, ())
    ]
    assert [part.box for part in cut_pieces([piece], 0, BOX_NUMEL, 0, cuts)] == apart


def test_memory_outside_of_the_flat_buffer_is_refused_by_name() -> None:
    flat = torch.zeros(10)
    assert offset_in(flat, flat[4:7], "x") == 4
    for part in (torch.zeros(3), flat[4:7].half(), flat[::2]):
        with pytest.raises(LayoutError, match=r"^weight \(\d+ elements"):
            offset_in(flat, part, "weight")


@pytest.mark.parametrize(("dim", "parts"), [(0, 1), (1, 1), (0, 2), (1, 2)])
def test_tensor_parallel_shards_make_up_the_whole(dim: int, parts: int) -> None:
    full = torch.arange(8 * 12).view(8, 12)
    rebuilt = torch.full_like(full, -1)
    for rank in range(2):
        shard = torch.cat([part.chunk(2, dim)[rank] for part in full.chunk(parts, dim)], dim)
        parameter: Any = torch.nn.Parameter(shard.float())
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = dim, parts
        shape, pieces = TensorParallel(rank, 2).pieces("w", parameter, tuple(shard.shape))
        assert shape == (8, 12)
        for piece in pieces:
            values = (
                shard.contiguous().view(-1).as_strided(piece.box.shape, piece.stride, piece.start)
            )
            at = zip(piece.box.offset, piece.box.shape, strict=True)
            rebuilt[tuple(slice(low, low + size) for low, size in at)] = values
    assert torch.equal(rebuilt, full)


def test_a_shard_that_does_not_say_how_it_is_cut_is_refused_by_name() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(4, 2))
    parameter.tensor_model_parallel = True
    with pytest.raises(RefusedError, match=r"up\.weight.*partition_dim"):
        TensorParallel(0, 2).pieces("up.weight", parameter, (4, 2))


# ------------------------------------------------------------------ a script's own values

STATES = "mp_rank_00_model_states.pt"


def save(directory: Path, **content: object) -> Path:
    directory.mkdir()
    torch.save({"module": {"w": torch.ones(2)}, "global_steps": 7, **content}, directory / STATES)
    return directory


def test_a_tag_of_deepspeeds_says_the_step_and_any_other_is_looked_into(tmp_path: Path) -> None:
    assert saved_step(tmp_path / "global_step12") == 12
    assert saved_step(save(tmp_path / "epoch3")) == 7
    (tmp_path / "empty").mkdir()
    assert saved_step(tmp_path / "empty") is None


def test_of_a_scripts_own_values_the_plain_ones_are_told(tmp_path: Path) -> None:
    best = {"best": [1, 2.5, None], "name": "a"}
    directory = save(tmp_path / "epoch3", epoch=3, best=best, rows=torch.ones(2), ds_version="0")
    assert client_state_of(directory) == {"epoch": 3, "best": best}


def test_a_script_is_given_what_it_saved_and_not_what_stood_in_for_it(tmp_path: Path) -> None:
    mine = OrderedDict(scores=np.arange(3.0), best=np.float64(0.5), raw=io.BytesIO(b"ab"))
    values = read_values(save(tmp_path / "epoch3", mine=mine) / STATES)["mine"]
    assert type(values) is OrderedDict and type(values["best"]) is np.float64
    assert values["scores"].tolist() == [0.0, 1.0, 2.0] and values["raw"].getvalue() == b"ab"
    assert list(pickle.loads(pickle.dumps(values))) == list(mine)
