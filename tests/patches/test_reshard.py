"""A checkpoint that was resharded offline is loaded by megatron-core, and training goes on."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.consistency import compare, verify
from scalai.converters.dcp_metadata import read_metadata
from scalai.converters.describe import describe
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.common_state import COMMON_OBJECT, FORM
from scalai.converters.megatron.dp_reshardable import is_bucket
from scalai.converters.megatron.modules import Naming, in_order, leading_axes, name_at
from scalai.converters.torch_archive import read_archive
from scalai.core.errors import ProofError, RefusedError
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import plan
from scalai.store.host import HostStore
from scalai.store.manifest import read_manifest
from scalai.store.moves import holders_of, read_orders
from support.command import run
from support.rot import ROTS, held, rot
from support.training.jobs import AFTER, OTHER_SEED, Job, mean_losses
from support.training.megatron_layouts import (
    BF16,
    BUCKETS,
    DP2,
    DP3,
    EP2,
    EP2DP2,
    EP4,
    FP16,
    FP32,
    GATED,
    MOE,
    ONE,
    PP2,
    PP2DP2,
    PP2EP2,
    SIX,
    SPLIT,
    TEXT,
    TP2,
    TP2DP2,
    TP2PP2,
    TP4,
    VPP2,
)
from support.training.resharded import FLAT, FULL, LEGACY, WHOLE, check, convert, load, save
from support.training.resize_case import train_and_snapshot
from support.training.worker_pool import WorkerPool

QK_NORM = {**BUCKETS, **GATED, "has_qk_norm": True, "precision": "bf16"}
SPARSE = {**SPLIT, "experts": 4, "is_gated": True, "is_rotary": True}
DENSE_FIRST = {**SPARSE, "has_expert_bias": True, "expert_layers": (0, 1, 1, 1)}
LATENT = {**SPLIT, "is_latent": True, "has_qk_norm": True, "is_gated": True, "is_rotary": True}
PREDICTING = {**SPLIT, "predicted": 1, "is_tied": False, "is_rotary": True}
T5 = {**SPLIT, "is_translator": True, "layers": 2}
FROZEN = r"embedding|layers\.[01]\.(mlp|self_attention)|linear_fc1\.bias"
PARTLY = r"input_layernorm|linear_fc1\.weight"
LORA = {**SPLIT, "lora": 4, "frozen": r"^(?!.*\.adapter\.)"}
MUON: dict[str, Any] = {"optimizer": "muon"}
"""Plain Muon: for matrices, beside Adam for the rest; neither is split over ranks."""
HALF = {"precision": "bf16"}
FP16_ = {"precision": "fp16"}

Fields = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A save in one form by one job, and the layout and the job that go on from it."""

    model: Fields
    form: str
    before: Fields
    after: Fields
    to: str = "torch_dist"
    always: bool = False
    """In the default run; the other cases are the campaign's."""

    @property
    def tolerance(self) -> float:
        if "is_latent" in self.model and "tp" in {**self.before, **self.after}:
            # Megatron's own modules do not add up the gradients of the positions' keys over
            # tensor-parallel ranks: the first loss is equal, the next ones to 1e-5.
            return 3e-5
        return {"bf16": BF16, "fp16": FP16}.get(self.model.get("precision", ""), FP32)


CASES = {
    "flat-dp2-to-tp2": Case(BUCKETS, FLAT, DP2, TP2),
    "flat-tp2pp2-to-dp3": Case({**BUCKETS, "global_batch_size": 6}, FLAT, TP2PP2, DP3, always=True),
    "flat-bf16-tp2pp2-to-dp2": Case({**BUCKETS, **HALF}, FLAT, TP2PP2, DP2),
    "flat-gated-tp2dp2-to-pp2": Case({**BUCKETS, **GATED}, FLAT, TP2DP2, PP2),
    "flat-virtual-to-tp2": Case(BUCKETS, FLAT, VPP2, TP2),
    "flat-experts-ep2-to-dp2": Case({**MOE, **SPLIT}, FLAT, EP2, DP2),
    "full-dp2-to-tp2pp2": Case(SPLIT, FULL, DP2, TP2PP2),
    "full-untied-tp4-to-pp2dp2": Case({**SPLIT, "is_tied": False}, FULL, TP4, PP2DP2),
    "full-experts-dp2-to-ep2": Case({**MOE, **SPLIT}, FULL, DP2, EP2),
    "full-fp16-tp2-to-pp2": Case({**SPLIT, **FP16_}, FULL, TP2, PP2),
    "whole-tp2pp2-to-one": Case({}, WHOLE, TP2PP2, ONE),
    "whole-bf16-one-to-tp2": Case(HALF, WHOLE, ONE, TP2),
    "flat-qk-norm-tp2dp2-to-pp2dp2": Case(QK_NORM, FLAT, TP2DP2, PP2DP2),
    "flat-dense-first-ep2-to-pp2": Case(DENSE_FIRST, FLAT, EP2, PP2, always=True),
    "flat-dense-first-pp2ep2-to-one": Case(DENSE_FIRST, FLAT, PP2EP2, ONE),
    "flat-dense-first-one-to-ep2": Case(DENSE_FIRST, FLAT, ONE, EP2),
    "flat-dense-last-pp2ep2-to-pp2": Case(
        {**DENSE_FIRST, "expert_layers": (1, 1, 1, 0)}, FLAT, PP2EP2, PP2
    ),
    "flat-experts-ep2dp2-to-pp2": Case({**MOE, **BUCKETS}, FLAT, EP2DP2, PP2),
    "flat-predicting-pp2-to-tp2": Case(PREDICTING, FLAT, PP2, TP2),
    "flat-predicting-pp2dp2-to-one": Case({**PREDICTING, "overlap": True}, FLAT, PP2DP2, ONE),
    "flat-predicting-experts-ep2-to-dp2": Case(
        {**PREDICTING, **SPARSE, "layers": 2}, FLAT, EP2, DP2
    ),
    "flat-t5-dp2-to-tp2": Case(T5, FLAT, DP2, TP2),
    "flat-t5-tp2dp2-to-one": Case({**T5, "overlap": True, **HALF}, FLAT, TP2DP2, ONE),
    "flat-frozen-dp2-to-tp2": Case({**SPLIT, "frozen": FROZEN}, FLAT, DP2, TP2),
    "flat-frozen-bf16-tp2pp2-to-dp2": Case(
        {**BUCKETS, "frozen": PARTLY, **HALF}, FLAT, TP2PP2, DP2
    ),
    "full-adapters-tp2-to-pp2": Case(LORA, FULL, TP2, PP2, always=True),
    "full-adapters-dp2-to-tp2pp2": Case(LORA, FULL, DP2, TP2PP2),
    "whole-adapters-bf16-tp2pp2-to-dp2": Case(
        {**LORA, "distributed": False, **HALF}, WHOLE, TP2PP2, DP2
    ),
    "full-adapters-gated-tp2-to-dp2": Case({**LORA, **GATED}, FULL, TP2, DP2),
    "full-adapters-experts-ep2-to-dp2": Case({**LORA, **MOE}, FULL, EP2, DP2, always=True),
    "full-adapters-experts-pp2-to-ep4": Case({**LORA, **MOE}, FULL, PP2, EP4),
    "full-adapters-experts-ep4-to-pp2ep2": Case({**LORA, **MOE}, FULL, EP4, PP2EP2),
    "whole-adapters-experts-bf16-dp2-to-ep2": Case(
        {**LORA, **MOE, "distributed": False, **HALF}, WHOLE, DP2, EP2
    ),
    "flat-text-tp2-to-pp2": Case({**TEXT, **SPLIT}, FLAT, TP2, PP2),
    "flat-text-buckets-pp2-to-tp2": Case({**TEXT, **BUCKETS}, FLAT, PP2, TP2),
    "flat-gated-tp2pp2-to-dp2": Case({**GATED, **BUCKETS}, FLAT, TP2PP2, DP2),
    "flat-experts-ep2-to-one": Case({**MOE, **BUCKETS}, FLAT, EP2, ONE),
    "flat-experts-one-to-ep2": Case({**MOE, **BUCKETS}, FLAT, ONE, EP2),
    "flat-experts-pp2-to-ep2": Case({**MOE, **SPLIT}, FLAT, PP2, EP2),
    "flat-experts-one-to-ep4": Case({**MOE, **BUCKETS}, FLAT, ONE, EP4),
    "flat-experts-ep4-to-dp2": Case({**MOE, **BUCKETS}, FLAT, EP4, DP2),
    "flat-experts-ep4-to-ep2dp2": Case({**MOE, **SPLIT}, FLAT, EP4, EP2DP2),
    "flat-experts-ep2dp2-to-ep4": Case({**MOE, **SPLIT}, FLAT, EP2DP2, EP4),
    "flat-untied-tp2pp2-to-tp4": Case({**BUCKETS, "is_tied": False}, FLAT, TP2PP2, TP4),
    "flat-predicting-dp2-to-tp2": Case({**BUCKETS, "predicted": 1}, FLAT, DP2, TP2),
    "flat-predicting-split-tp2-to-dp2": Case({**SPLIT, "predicted": 1}, FLAT, TP2, DP2),
    "full-muon-dp2-to-pp2": Case(MUON, FULL, DP2, PP2),
    "full-muon-bf16-pp2-to-one": Case({**MUON, **HALF}, FULL, PP2, ONE),
    "flat-latent-tp2pp2-to-dp2": Case(LATENT, FLAT, TP2PP2, DP2),
    "full-latent-dp2-to-tp2": Case(LATENT, FULL, DP2, TP2),
    "flat-latent-experts-ep2-to-pp2": Case({**DENSE_FIRST, **LATENT}, FLAT, EP2, PP2),
    "full-latent-experts-pp2-to-ep2": Case({**DENSE_FIRST, **LATENT}, FULL, PP2, EP2),
    "legacy-latent-dp2-to-pp2": Case(LATENT, LEGACY, DP2, PP2, "torch"),
    "legacy-latent-to-torch_dist": Case(LATENT, LEGACY, PP2, TP2),
    "legacy-split-dp2-to-tp2": Case(SPLIT, LEGACY, DP2, TP2, "torch"),
    "legacy-buckets-tp2pp2-to-dp3": Case(
        {**BUCKETS, "global_batch_size": 6}, LEGACY, TP2PP2, DP3, "torch"
    ),
    "legacy-buckets-dp2-to-pp2dp2": Case(BUCKETS, LEGACY, DP2, PP2DP2, "torch", always=True),
    "legacy-buckets-bf16-tp2dp2-to-pp2": Case({**BUCKETS, **HALF}, LEGACY, TP2DP2, PP2, "torch"),
    "legacy-gated-virtual-to-tp2dp2": Case({**SPLIT, **GATED}, LEGACY, VPP2, TP2DP2, "torch"),
    "legacy-untied-tp4-to-virtual": Case({**SPLIT, "is_tied": False}, LEGACY, TP4, VPP2, "torch"),
    "legacy-fp16-tp2-to-pp2": Case({**SPLIT, **FP16_}, LEGACY, TP2, PP2, "torch"),
    "legacy-experts-ep2-to-dp2": Case({**MOE, **SPLIT}, LEGACY, EP2, DP2, "torch"),
    "legacy-experts-dp2-to-ep2": Case({**MOE, **SPLIT}, LEGACY, DP2, EP2, "torch"),
    "legacy-experts-ep4-to-ep2dp2": Case({**MOE, **SPLIT}, LEGACY, EP4, EP2DP2, "torch"),
    "legacy-experts-ep2dp2-to-ep4": Case({**MOE, **SPLIT}, LEGACY, EP2DP2, EP4, "torch"),
    "legacy-whole-experts-ep4-to-dp2": Case(MOE, LEGACY, EP4, DP2, "torch"),
    "legacy-whole-tp2pp2-to-one": Case({}, LEGACY, TP2PP2, ONE, "torch"),
    "legacy-whole-bf16-one-to-tp2pp2": Case(HALF, LEGACY, ONE, TP2PP2, "torch"),
    "legacy-whole-gated-fp16-pp2-to-tp2": Case({**GATED, **FP16_}, LEGACY, PP2, TP2, "torch"),
    "legacy-whole-experts-ep2-to-one": Case(MOE, LEGACY, EP2, ONE, "torch"),
    "legacy-gated-to-torch_dist": Case({**SPLIT, **GATED}, LEGACY, TP2, PP2),
    "legacy-bf16-to-torch_dist": Case(HALF, LEGACY, TP2, PP2),
    "flat-gated-to-legacy": Case({**BUCKETS, **GATED}, FLAT, TP2, PP2DP2, "torch"),
    "whole-bf16-to-legacy": Case(HALF, WHOLE, TP2, PP2DP2, "torch"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if case.always else [pytest.mark.campaign])
        for name, case in CASES.items()
    ],
)
def test_a_resharded_checkpoint_goes_on_as_the_run_that_never_stopped(
    pool: WorkerPool, tmp_path: Path, case: Case
) -> None:
    old, new = Job(**{**case.model, **case.before}), Job(**{**case.model, **case.after})
    runs = save(pool, old, tmp_path / "saved", case.form)
    verify(open_checkpoint(tmp_path / "saved"), workers=0)
    convert(tmp_path / "saved", tmp_path / "converted", new, case.to)
    if case.to == LEGACY:
        assert names(tmp_path / "converted") == names(tmp_path / "saved")
    if case.to == case.form:
        assert facts(tmp_path / "converted") == facts(tmp_path / "saved")
    check(runs, load(pool, new, tmp_path / "converted", case.to), case.tolerance)


def names(directory: Path) -> dict[str, tuple[str, Any]]:
    """Return the tensors of a checkpoint with dtypes and shapes."""
    tensors = describe(open_checkpoint(directory))["tensors"]
    return {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in tensors}


def facts(directory: Path) -> Any:
    """Return what degrees must not change."""
    values = open_checkpoint(directory).values
    counters = {**values.counters, "flops": values.extra["num_floating_point_operations_so_far"]}
    return values.step, counters, values.scheduler, values.is_split


def test_the_newest_form_of_a_default_save_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    """Norms of queries and keys are of one shape and, in 16 bits, of one content: that each gets
    its own moments rests on the order alone. And there is no common.pt."""
    old = Job(**{**QK_NORM, **DP2})
    runs = save(pool, old, tmp_path / "saved", FLAT, has_file=False)
    directory = tmp_path / "saved" / f"iter_{AFTER.start:07d}"
    keys = [stored.key for stored in read_metadata(directory).tensors]
    names = [
        Naming(is_local=True).to_rank(name_at(key, (0,) * leading_axes(key)), 0, 0)
        for key in keys
        if not is_bucket(key)
    ]
    assert names != sorted(names, key=in_order), "the keys stand in the order of the modules"
    assert open_checkpoint(tmp_path / "saved").values.extra[FORM] == COMMON_OBJECT
    new = Job(**{**QK_NORM, **TP2})
    convert(tmp_path / "saved", tmp_path / "converted", new)
    check(runs, load(pool, new, tmp_path / "converted"), BF16)


@pytest.mark.parametrize(
    ("fields", "form", "algorithm"),
    [
        pytest.param({**BUCKETS, **GATED, **HALF, **TP2DP2}, FLAT, "fully_parallel", id="buckets"),
        *(
            pytest.param(fields, form, algorithm, id=name, marks=pytest.mark.campaign)
            for name, fields, form, algorithm in (
                ("atomic-buckets", {**SPLIT, **PP2DP2}, FLAT, "atomic"),
                ("whole", {**HALF, **TP2DP2}, WHOLE, "fully_parallel"),
                ("atomic-whole", TP2DP2, WHOLE, "atomic"),
                ("experts", {**MOE, **BUCKETS, **EP2DP2}, FLAT, "fully_parallel"),
                ("virtual", {**SPLIT, **VPP2}, FLAT, "fully_parallel"),
            )
        ),
    ],
)
def test_local_files_hold_what_a_global_checkpoint_of_the_step_does(
    pool: WorkerPool, tmp_path: Path, fields: Fields, form: str, algorithm: str
) -> None:
    job, local = Job(**fields), tmp_path / "local"
    save(pool, job, tmp_path / "saved", form, local=(algorithm, str(local)))
    check_local(local, tmp_path / "saved")
    convert(local, tmp_path / "new", Job(**{**fields, **ONE}))
    assert list(compare(open_checkpoint(local), open_checkpoint(tmp_path / "new"), 0)) == []


def check_local(local: Path, saved: Path) -> None:
    one, two = open_checkpoint(local), open_checkpoint(saved)
    verify(one, workers=0)
    assert list(compare(one, two, 0)) == [] and one.notes == two.notes
    for name in ("step", "degrees", "is_split", "scheduler", "param_groups", "counters"):
        assert getattr(one.values, name) == getattr(two.values, name)
    assert one.values.extra["objects"].keys() == two.values.extra["objects"].keys()


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


@pytest.mark.fault
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


@pytest.mark.campaign
def test_adapters_are_refused_where_only_the_order_of_modules_names_parameters(
    pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(pool, Job(**{**LORA, **DP2}), tmp_path / "saved", FULL)
    assert run("reshard", tmp_path / "saved", tmp_path / "new", "--to", "torch") == 3
    said = capsys.readouterr().err
    assert "adapter" in said and "torch_dist" in said
    save(pool, Job(**{**LORA, **DP2}), tmp_path / "flat", FLAT)
    assert run("reshard", tmp_path / "flat", tmp_path / "new", "--tp", 2) == 3
    assert "adapter" in capsys.readouterr().err


@pytest.mark.campaign
def test_an_optimizer_that_counts_no_steps_gains_none(pool: WorkerPool, tmp_path: Path) -> None:
    """Megatron itself has no way to load what it saves of SGD in fp32."""
    old, new = Job(optimizer="sgd", **DP2), Job(optimizer="sgd", **TP2)
    save(pool, old, tmp_path / "saved", FULL)
    convert(tmp_path / "saved", tmp_path / "converted", new)
    saved, converted = (open_checkpoint(tmp_path / at) for at in ("saved", "converted"))
    assert list(compare(saved, converted, 1)) == []


@pytest.mark.campaign
def test_muon_of_shards_stays_at_its_tp(
    pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(pool, Job(**MUON, **DP2), tmp_path / "saved", FULL)
    assert run("reshard", tmp_path / "saved", tmp_path / "new", "--tp", 2) == 3
    assert "tp=2 must stay 1: --muon-tp-mode blockwise" in capsys.readouterr().err


LAYOUTS = {
    "one": ONE, "dp2": DP2, "dp3": DP3, "tp2": TP2, "tp4": TP4, "pp2": PP2, "vpp2": VPP2,
    "tp2dp2": TP2DP2, "pp2dp2": PP2DP2, "tp2pp2": TP2PP2,
}  # fmt: skip
FORMS = {"whole": ({}, WHOLE), "full": (SPLIT, FULL), "flat": (BUCKETS, FLAT)}
PAIRS = [
    (before, after, [*FORMS][(here + there) % len(FORMS)])
    for (here, before), (there, after) in permutations(enumerate(LAYOUTS), 2)
]
"""The forms change, so that each is read of every layout, and goes on in every layout."""


def go_on(
    folder: Path, old: Job, form: str, new: Job, saving: WorkerPool, loading: WorkerPool,
    tolerance: float = FP32,
) -> None:  # fmt: skip
    """Save, convert, load and train on, as the run that never stopped."""
    runs = save(saving, old, folder / "saved", form)
    verify(open_checkpoint(folder / "saved"), 0)
    convert(folder / "saved", folder / "converted", new)
    check(runs, load(loading, new, folder / "converted"), tolerance)


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize(("before", "after", "form"), PAIRS)
def test_every_layout_into_every_other(
    pool: WorkerPool, tmp_path: Path, before: str, after: str, form: str
) -> None:
    model, sharding = FORMS[form]
    samples = SIX
    if "vpp2" in (before, after):  # micro-batches must be a multiple of the stages
        samples = {}
        if "dp3" in (before, after):
            pytest.skip("four samples do not divide by three replicas")
    old, new = (Job(**{**samples, **model, **LAYOUTS[at]}) for at in (before, after))
    go_on(tmp_path, old, sharding, new, pool, pool)


LATER = {
    name: Path(os.environ[name]) if name in os.environ else None
    for name in ("MEGATRON_LM_0_19_PATH", "MEGATRON_LM_MAIN_PATH")
}
"""Checkouts of releases that are no packages yet."""


@pytest.fixture(scope="module", params=LATER)
def later_pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Workers with a later megatron-core than the installed one."""
    checkout = LATER[request.param]
    if checkout is None or not (checkout / "megatron" / "core").is_dir():
        pytest.skip(f"{request.param} names no Megatron-LM checkout")
    workers = WorkerPool(4, checkout)
    yield workers
    workers.close()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "before", "after"),
    [({**BUCKETS, **GATED}, DP2, TP2), (DENSE_FIRST, PP2EP2, ONE)],
    ids=["dense", "experts"],
)
def test_a_later_release_saves_and_goes_on(
    later_pool: WorkerPool, tmp_path: Path, model: Fields, before: Fields, after: Fields
) -> None:
    old, new = Job(**{**model, **before}), Job(**{**model, **after})
    go_on(tmp_path, old, FLAT, new, later_pool, later_pool)
    assert open_checkpoint(tmp_path / "saved").values.extra[FORM] == COMMON_OBJECT


@pytest.fixture(scope="module")
def pool_of_eight() -> Iterator[WorkerPool]:
    workers = WorkerPool(8)
    yield workers
    workers.close()


@pytest.mark.campaign
def test_eight_ranks_become_eight_others(pool_of_eight: WorkerPool, tmp_path: Path) -> None:
    old, new = (Job(**{**BUCKETS, "world": 8, "tp": 2, "pp": pp}) for pp in (2, 1))
    go_on(tmp_path, old, FLAT, new, pool_of_eight, pool_of_eight)


@pytest.fixture(scope="module")
def older_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Workers with the last megatron-core that saves ``fully_sharded_model_space``."""
    directory = tmp_path_factory.mktemp("megatron-core")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(directory), "megatron-core==0.15.0"]
    subprocess.run(command, check=True, timeout=240)
    workers = WorkerPool(4, directory)
    yield workers
    workers.close()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    [
        (SPLIT, DP2, TP2, FP32),
        ({**SPLIT, **GATED, "precision": "bf16"}, TP2DP2, PP2, BF16),
        ({**SPLIT, **MOE}, EP2, DP2, FP32),
    ],
)
def test_flat_ranges_of_an_older_megatron_core_go_on_in_the_installed_one(
    older_pool: WorkerPool, pool: WorkerPool, tmp_path: Path,
    model: Fields, before: Fields, after: Fields, tolerance: float,
) -> None:  # fmt: skip
    old, new = Job(**{**model, **before}), Job(**{**model, **after})
    go_on(tmp_path, old, "fully_sharded_model_space", new, older_pool, pool, tolerance)


@pytest.mark.campaign
def test_flat_ranges_in_local_files_of_an_older_megatron_core(
    older_pool: WorkerPool, tmp_path: Path
) -> None:
    local = "fully_parallel", str(tmp_path / "local")
    job = Job(**{**SPLIT, **GATED, **TP2DP2})
    save(older_pool, job, tmp_path / "saved", "fully_sharded_model_space", local=local)
    check_local(tmp_path / "local", tmp_path / "saved")
