"""A checkpoint that was resharded offline is loaded by megatron-core, and training goes on."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.torch_dist_metadata import read_metadata
from scalai.converters.torch_archive import read_archive
from scalai.core.errors import ProofError, RefusedError
from scalai.core.tensors.plan import plan
from scalai.core.tensors.sources import Holder
from scalai.store.host import HostStore
from scalai.store.manifest import read_manifest
from scalai.store.moves import holders_of, read_orders
from support.rot import ROTS, held, rot
from support.training.jobs import AFTER, OTHER_SEED, Job, mean_losses
from support.training.megatron_layouts import (
    BF16,
    BUCKETS,
    DP2,
    DP3,
    EP2,
    FP16,
    FP32,
    GATED,
    MOE,
    ONE,
    PP2,
    PP2DP2,
    SPLIT,
    TP2,
    TP2DP2,
    TP2PP2,
    TP4,
    VPP2,
)
from support.training.resharded import FLAT, FULL, WHOLE, check, convert, load, save
from support.training.resize_case import train_and_snapshot
from support.training.worker_pool import WorkerPool

CASES = [
    ("rescue-dp2-to-tp2", {**BUCKETS}, FLAT, DP2, TP2, FP32),
    ("rescue-tp2pp2-to-dp3", {**BUCKETS, "global_batch_size": 6}, FLAT, TP2PP2, DP3, FP32),
    ("rescue-bf16-tp2pp2-to-dp2", {**BUCKETS, "precision": "bf16"}, FLAT, TP2PP2, DP2, BF16),
    ("rescue-gated-tp2dp2-to-pp2", {**BUCKETS, **GATED}, FLAT, TP2DP2, PP2, FP32),
    ("rescue-virtual-to-tp2", {**BUCKETS}, FLAT, VPP2, TP2, FP32),
    ("rescue-experts-ep2-to-dp2", {**MOE, **SPLIT}, FLAT, EP2, DP2, FP32),
    ("full-dp2-to-tp2pp2", {**SPLIT}, FULL, DP2, TP2PP2, FP32),
    ("full-untied-tp4-to-pp2dp2", {**SPLIT, "is_tied": False}, FULL, TP4, PP2DP2, FP32),
    ("full-experts-dp2-to-ep2", {**MOE, **SPLIT}, FULL, DP2, EP2, FP32),
    ("full-fp16-tp2-to-pp2", {**SPLIT, "precision": "fp16"}, FULL, TP2, PP2, FP16),
    ("whole-tp2pp2-to-one", {}, WHOLE, TP2PP2, ONE, FP32),
    ("whole-bf16-one-to-tp2", {"precision": "bf16"}, WHOLE, ONE, TP2, BF16),
]


@pytest.mark.turns
@pytest.mark.parametrize(
    ("model", "sharding", "before", "after", "tolerance"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_a_resharded_checkpoint_goes_on_as_the_run_that_never_stopped(
    pool: WorkerPool,
    tmp_path: Path,
    model: dict[str, Any],
    sharding: str,
    before: dict[str, Any],
    after: dict[str, Any],
    tolerance: float,
) -> None:
    old, new = Job(**{**model, **before}), Job(**{**model, **after})
    uninterrupted = save(pool, old, tmp_path / "saved", sharding)
    convert(tmp_path / "saved", tmp_path / "converted", new)
    check(uninterrupted, load(pool, new, tmp_path / "converted"), tolerance)


def test_a_live_job_goes_on_from_a_converted_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    old, new = Job(**{**BUCKETS, **DP2, "precision": "bf16"}), Job(**TP2, precision="bf16")
    uninterrupted = save(pool, old, tmp_path / "saved", FLAT)
    convert(tmp_path / "saved", tmp_path / "converted", new, "scalai")
    directory = tmp_path / "converted" / "generation-1" / "offline"
    manifest = read_manifest(directory)
    wanted = pool.run(
        "resize_worker:build", [(pool.trainer, new, OTHER_SEED, "wanted")] * new.world
    )
    moves = plan(holders_of([manifest]), [Holder("offline", held) for held in wanted])
    orders = read_orders(moves, [manifest], {"offline": directory})
    answers = pool.run(
        "resize_worker:restore",
        [(orders[rank], manifest.scalars, manifest.rank_state) for rank in range(new.world)],
    )
    check(uninterrupted, [run for run, _, _ in answers], BF16)


def test_megatron_goes_on_from_a_live_jobs_generation(pool: WorkerPool, tmp_path: Path) -> None:
    old, new = Job(**{**BUCKETS, **TP2DP2}), Job(**{**SPLIT, **PP2})
    with HostStore("case", "here", tmp_path / "store") as store:
        uninterrupted = train_and_snapshot(pool, old, store)
        generation = store.generation_directory(1)
        save(pool, Job(), tmp_path / "other", WHOLE)
        reference = open_checkpoint(tmp_path / "other").values
        convert(generation, tmp_path / "converted", new, reference=reference)
    answers = load(pool, new, tmp_path / "converted")
    losses = mean_losses([run[0] for run in answers])
    assert losses == pytest.approx(uninterrupted.losses, rel=FP32)
    assert answers[0][1] == uninterrupted.learning_rate


def test_buckets_whose_masters_are_not_the_weights_are_not_converted(
    pool: WorkerPool, tmp_path: Path
) -> None:
    job = Job(**{**BUCKETS, **DP2})
    save(pool, job, tmp_path / "saved", FLAT)
    directory = tmp_path / "saved" / f"iter_{AFTER.start:07d}"
    by_key = {stored.key: stored for stored in read_metadata(directory).tensors}
    extent = by_key["decoder.layers.self_attention.linear_qkv.weight"].chunks[2].extent
    tensor = read_archive(directory / extent.file, extent.begin, extent.size_bytes)
    data = bytearray((directory / extent.file).read_bytes())
    data[tensor.begin + 5] ^= 1
    (directory / extent.file).write_bytes(data)
    with pytest.raises(RefusedError, match=r"masters of decoder\.layers\.\d\.self_attention"):
        convert(tmp_path / "saved", tmp_path / "converted", job)


@pytest.mark.turns
@pytest.mark.parametrize("sharding", [FLAT, WHOLE])
def test_bytes_that_changed_after_the_save_are_found_by_the_conversion(
    pool: WorkerPool, tmp_path: Path, sharding: str
) -> None:
    job = Job(**{**(BUCKETS if sharding == FLAT else {}), **DP2, "precision": "bf16"})
    save(pool, job, tmp_path / "saved", sharding)
    for kind in ("param", "main", "exp_avg", "exp_avg_sq"):
        for name, change in ROTS.items():
            if (kind, name) == ("param", "stale"):
                continue  # its numbers are no fp32
            shutil.copytree(tmp_path / "saved", tmp_path / "rotten")
            piece = held(open_checkpoint(tmp_path / "rotten"), kind)
            rot(piece, change)
            with pytest.raises((ProofError, RefusedError)) as found:
                convert(tmp_path / "rotten", tmp_path / "new", Job(**TP2, precision="bf16"))
            if kind.startswith("exp_avg"):
                assert "are not what their CRC-32 was taken of" in str(found.value), (kind, name)
                assert piece.path.name in str(found.value) and piece.tensor in str(found.value)
            assert {path.name for path in tmp_path.iterdir()} == {"saved", "rotten"}
            shutil.rmtree(tmp_path / "rotten")


def test_what_megatron_saved_wrongly_is_not_converted(pool: WorkerPool, tmp_path: Path) -> None:
    # fully_reshardable with several buckets: megatron-core 0.15.3 to 0.19.0 mix up the masters.
    job = Job(**{**BUCKETS, **DP2})
    save(pool, job, tmp_path / "saved", FULL)
    with pytest.raises(ProofError, match="Masters that are not the weights"):
        convert(tmp_path / "saved", tmp_path / "converted", job)
    assert not (tmp_path / "converted").exists()
