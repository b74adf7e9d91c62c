"""Megatron-LM's own pretrain_gpt.py, unmodified, changes its layout as if nothing had happened:
while it trains, and by checkpoints that are resharded offline. Jobs of many kinds and other scripts
change their degrees likewise; evaluations included."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.checkpoint import parameters_of
from scalai.converters.layouts import open_checkpoint
from support import megatron_lm_job
from support.accelerator import BACKEND
from support.megatron_lm_job import (
    CHECKOUT,
    MODEL,
    Job,
    check_same_steps,
    evaluations,
    make_dataset,
)

STEPS, BEFORE = 120 if BACKEND == "gloo" else 12, 4
"""Steps of a job, and the steps that it has done at least before it is changed. On the CPU it
trains on while the workers of the change are built; ranks of one device are slow."""

pytestmark = [
    pytest.mark.skipif(
        megatron_lm_job.skip_reason() is not None, reason=str(megatron_lm_job.skip_reason())
    ),
    pytest.mark.timeout(1200),
]

Start = Callable[..., Job]


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Give the list of jobs that end with the test."""
    found: list[Job] = []
    yield found
    for job in found:
        job.stop()


@pytest.fixture
def start(tmp_path: Path, jobs: list[Job]) -> Start:
    def start_job(
        name: str, nproc: int, degrees: dict[int, str], flags: Sequence[str], **more: Any
    ) -> Job:
        flags = ["--train-iters", str(STEPS), *flags]
        jobs.append(Job(tmp_path / name, nproc, degrees, flags, **more))
        return jobs[-1]

    return start_job


def mock_data(folder: Path) -> list[str]:
    return ["--mock-data", "--vocab-size", "4300"]


def padded_vocabulary(saved: Path) -> int:
    """Return how many rows the embedding of a checkpoint has: releases differ in whether they count
    an end-of-document token."""
    return parameters_of(open_checkpoint(saved))["embedding.word_embeddings.weight"].shape[0]


def real_text(folder: Path) -> list[str]:
    make_dataset(folder / "text")
    return [
        "--data-path", str(folder / "text"), "--split", "90,5,5", "--vocab-size", "256",
        "--data-cache-path", str(folder / "cache"),
    ]  # fmt: skip


@pytest.mark.fault
@pytest.mark.campaign
def test_a_host_that_megatron_finds_to_compute_wrongly_is_named_at_no_restart(
    tmp_path: Path, jobs: list[Job]
) -> None:
    """By errors that its rerun state machine injects; it leaves with 17."""
    inject = ["--rerun-mode", "validate_results", "--error-injection-rate", "30",
              "--error-injection-type", "transient_error"]  # fmt: skip
    saves = ["--save", str(tmp_path / "saved"), "--save-interval", "1000", "--train-iters", "20"]
    flags = [*mock_data(tmp_path), *inject, *saves]
    job = Job(tmp_path / "wrong", 2, {2: "tp1"}, flags, launcher_flags=("--nnodes", "1:2"))
    jobs.append(job)
    job.wait_until(lambda: "; 3 restarts left" in job.log, "it starts again")
    assert "event=wrong_result" in job.log and "kind='a wrong result'" in job.log, job.log


DISTRIBUTED = [
    "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
    "--ddp-bucket-size", "20000",
]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "nproc", "target", "degrees", "flags"),
    [
        (mock_data, 4, 2, {4: "tp2 pp1", 2: "tp1 pp2"}, []),
        (real_text, 3, 2, {3: "tp1 pp1", 2: "tp2 pp1"}, DISTRIBUTED),
        pytest.param(
            real_text,
            4,
            2,
            {4: "tp1 pp1", 2: "tp1 pp2"},
            ["--dataloader-type", "cyclic"],
            marks=pytest.mark.campaign,
        ),
        (real_text, 4, 2, {4: "tp2 pp1 mbs2", 2: "tp2 pp1 mbs1 recompute=full"}, DISTRIBUTED),
    ],
    ids=[
        "mock data, TP2·DP2 to PP2",
        "real text, DP3 to TP2",
        "each its own part, TP2·DP2 to PP2",
        "other passes, TP2·DP2 to TP2",
    ],
)
def test_losses_samples_and_rates_are_those_of_the_uninterrupted_run(
    data: Callable[[Path], list[str]],
    nproc: int,
    target: int,
    degrees: dict[int, str],
    flags: list[str],
    tmp_path: Path,
    start: Start,
) -> None:
    flags = [*flags, *data(tmp_path)]
    alone = start("alone", nproc, degrees, flags)
    alone.finish()
    changed = start("changed", nproc, degrees, flags)
    changed.wait_for_step(BEFORE)
    changed.scale(target)
    changed.finish()
    check_as_uninterrupted(alone, changed)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("nproc", "target", "degrees", "flags"),
    [
        (3, 2, {3: "tp1 pp1", 2: "tp2 pp1"}, DISTRIBUTED),
        (4, 2, {4: "tp2 pp1", 2: "tp1 pp2"}, ["--position-embedding-type", "rope"]),
    ],
    ids=["DP3 to TP2", "TP2·DP2 to PP2, rotary"],
)
def test_next_workers_at_the_brink_go_on_as_if_nothing_had_happened(
    nproc: int, target: int, degrees: dict[int, str], flags: list[str], tmp_path: Path, start: Start
) -> None:
    steps = 2 * STEPS  # the next workers are there in time
    flags = [*flags, *real_text(tmp_path), "--train-iters", str(steps)]
    alone = start("alone", nproc, degrees, flags)
    alone.finish()
    long, settings = {"resize.build_timeout_s": 300}, "standby = 'brink'"
    changed = start("changed", nproc, degrees, flags, constants=long, settings=settings)
    changed.wait_for_step(BEFORE)
    changed.scale(target)
    changed.finish()
    assert "level=brink" in changed.log and changed.log.count("storage_s=") == 1
    check_as_uninterrupted(alone, changed, steps)


def test_other_passes_at_the_same_degrees_change_nothing_but_themselves(
    tmp_path: Path, start: Start
) -> None:
    flags, degrees = mock_data(tmp_path), {2: "tp1 pp2"}
    alone = start("alone", 2, degrees, flags)
    alone.finish()
    changed = start("changed", 2, degrees, flags)
    changed.wait_for_step(BEFORE)
    assert changed.status()["micro_batch_size"] == 1
    changed.scale(2, "tp1 pp2 mbs3 recompute=full")
    changed.wait_until(lambda: changed.status()["recompute"] == "full", "recomputation")
    changed.finish()
    assert "micro-batch 1 -> 3, recompute none -> full, as requested" in changed.log
    assert "event=resized" in changed.log
    check_as_uninterrupted(alone, changed)


def check_as_uninterrupted(alone: Job, changed: Job, steps: int = STEPS) -> None:
    """Compare what two jobs have consumed and learned, one of which was changed once."""
    expected, found = alone.ledger(), changed.ledger()
    assert list(found) == list(expected) == list(range(1, steps + 1))
    assert len({entry.round for entry in found.values()}) == 2, changed.log
    check_same_steps(found, expected)
    assert changed.verified() == {"is_kept": True, "breaks": [], "notes": []}


@pytest.mark.parametrize(
    ("saved", "written", "degrees", "flags"),
    [
        ("torch", "torch", "tp2 pp1", DISTRIBUTED),
        ("torch", "torch_dist", "tp1 pp2", DISTRIBUTED),
        ("torch_dist", "torch", "tp1 pp2", []),
        ("torch_dist", "torch_dist", "tp2 pp1", DISTRIBUTED),
    ],
)
def test_a_resharded_checkpoint_goes_on_as_the_job_that_never_stopped(
    saved: str, written: str, degrees: str, flags: list[str], tmp_path: Path, start: Start
) -> None:
    flags = [*flags, *real_text(tmp_path), "--train-iters", "16"]
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "8", "--ckpt-format", saved]
    alone = start("alone", 2, {2: "tp1 pp1"}, [*flags, *saving])
    alone.finish()
    tp, pp = degrees[2], degrees[-1]
    reshard = ["reshard", str(tmp_path / "saved"), str(tmp_path / "new"), "--iteration", "8"]
    reshard += ["--tp", tp, "--pp", pp, "--dp", "1", "--to", written]
    subprocess.run([sys.executable, "-m", "scalai.launch.cli", *reshard], check=True, timeout=120)
    loading = ["--load", str(tmp_path / "new"), "--ckpt-format", written]
    divisor = padded_vocabulary(tmp_path / "saved" / "iter_0000008") // int(tp)
    loading += ["--make-vocab-size-divisible-by", str(divisor)]  # as it is told
    resumed = start("resumed", 2, {2: degrees}, [*flags, *loading])
    resumed.finish()
    expected, found = alone.ledger(), resumed.ledger()
    assert list(found) == list(range(9, 17)), resumed.log
    check_same_steps(found, expected)


# ------------------------------------------------------------------ kinds of jobs

KIND_STEPS = 14
FP32, BF16, MUON = 1e-6, 2e-4, 1e-4
"""Relative difference of a loss: another order of additions, of roundings to 16 bits, and of
Newton-Schulz steps in bf16."""
PADDED_AT_TP2 = "--make-vocab-size-divisible-by 8"
"""At TP2 the embedding has as many rows as MODEL's at TP1; further ones would be new, and change
every loss."""


WITHOUT_BATCH = MODEL.replace("--global-batch-size 12", "")
BY_SAMPLES = MODEL.replace("--lr-decay-iters 100", "--lr-decay-samples 1200")
T5 = """
  --encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 64 --num-attention-heads 4
  --kv-channels 16 --ffn-hidden-size 128 --encoder-seq-length 32 --decoder-seq-length 16
  --max-position-embeddings 32 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local
  --attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion
  --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
  --no-bias-dropout-fusion --no-rope-fusion --distributed-backend gloo --seed 1234
  --micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
  --lr-decay-iters 100 --log-interval 1 --eval-iters 1 --eval-interval 6 --num-workers 0
  --legacy-tokenizer --tokenizer-type BertWordPieceCase --vocab-extra-ids 100
  --make-vocab-size-divisible-by 16
"""


def masked_text(folder: Path) -> list[str]:
    """Bytes under a vocabulary of words: what T5 masks is as good as any text."""
    make_dataset(folder / "text")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(300))]
    (folder / "words.txt").write_text("\n".join(words))
    return [
        "--data-path", str(folder / "text"), "--split", "90,5,5",
        "--vocab-file", str(folder / "words.txt"), "--data-cache-path", str(folder / "cache"),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of job, the degrees that it begins with and those that it changes to."""

    name: str
    ranks: int
    first: str
    then: str
    flags: str = ""
    model: str = MODEL
    script: tuple[str, ...] = ("pretrain_gpt.py",)
    """Where it may lie in a checkout."""
    data: Callable[[Path], list[str]] = mock_data
    ends: str = f"--train-iters {KIND_STEPS}"
    tolerance: float = FP32
    needs: str = ""
    """A word in the checkout's arguments without which it has no such kind."""
    package: str = ""
    """What the checkout imports for this kind alone."""


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear "
    "--use-distributed-optimizer"
)
KINDS = [
    Kind("virtual stages", 2, "tp1 pp2 vpp2", "tp2 pp1",
         "--num-virtual-stages-per-pipeline-rank 2"),
    Kind("experts", 4, "tp1 pp1 ep2", "tp1 pp2 ep2", EXPERTS),
    Kind("experts under TP", 4, "tp1 pp1 ep2", "tp2 pp1 ep2", EXPERTS + " --sequence-parallel"),
    Kind("further tokens", 2, "tp2 pp1", "tp1 pp1",
         "--mtp-num-layers 1 --position-embedding-type rope"),
    Kind("a growing batch", 2, "tp1 pp1", "tp1 pp2", "--rampup-batch-size 4 4 40",
         model=BY_SAMPLES, ends="--train-samples 300"),
    Kind("T5", 2, "tp1 pp1", "tp2 pp1", model=T5, data=masked_text,
         script=("pretrain_t5.py", "examples/t5/pretrain_t5.py"), needs="legacy_tokenizer"),
    Kind("several optimizer instances", 4, "tp1 pp1", "tp2 pp1",
         "--use-distributed-optimizer --num-distributed-optimizer-instances 2 "
         "--overlap-grad-reduce"),
    Kind("precision-aware and offloaded", 2, "tp1 pp1", "tp2 pp1",
         "--use-distributed-optimizer --use-precision-aware-optimizer --optimizer-cpu-offload "
         "--use-torch-optimizer-for-cpu-offload --optimizer-offload-fraction 0.5 --bf16",
         tolerance=BF16),
    *(
        Kind(f"Muon, {mode}", 2, "tp1 pp1", "tp2 pp1", f"--optimizer muon --muon-tp-mode {mode}",
             tolerance=MUON, package="emerging_optimizers", needs="muon-tp-mode")
        for mode in ("duplicated", "distributed")
    ),
    Kind("evaluations without a stated batch", 2, "tp1 pp1", "tp1 pp2",
         "--step-batch-size-schedule 0:12", model=WITHOUT_BATCH.replace("--lr-decay-iters 100",
         "--lr-decay-samples 1200"), ends=f"--train-samples {12 * KIND_STEPS}",
         needs="step_batch_size_schedule"),
]  # fmt: skip

StartKind = Callable[[str, Kind, list[str]], Job]


@pytest.fixture
def start_kind(tmp_path: Path, jobs: list[Job]) -> StartKind:
    def start_job(name: str, kind: Kind, data: list[str]) -> Job:
        assert CHECKOUT is not None
        scripts = [path for path in kind.script if Path(CHECKOUT, path).is_file()]
        flags = [*kind.ends.split(), *kind.flags.split(), *data, "--eval-interval", "6"]
        jobs.append(
            Job(tmp_path / name, kind.ranks, {kind.ranks: kind.first}, flags, script=scripts[0],
                model=kind.model, settings="standby = 'never'")
        )  # fmt: skip
        return jobs[-1]

    return start_job


def compare(changed: Job, alone: Job, tolerance: float, *, rounds: int = 2, since: int = 1) -> None:
    """Everything that was consumed and learned is the same, step by step."""
    expected, found = alone.ledger(), changed.ledger()
    assert list(found) == [step for step in expected if step >= since]
    assert len({entry.round for entry in found.values()}) == rounds, changed.log
    pairs = [(found[step].loss, expected[step].loss) for step in found]
    differences = [abs(ours / theirs - 1) for ours, theirs in pairs if ours and theirs]
    print(f"largest relative difference of a loss: {max(differences):.1e}")
    check_same_steps(found, expected, tolerance)
    assert evaluations(changed)
    for iteration, loss in evaluations(changed).items():
        assert loss == pytest.approx(evaluations(alone)[iteration], rel=tolerance), iteration


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_a_job_of_each_kind_changes_as_if_it_had_not(
    kind: Kind, tmp_path: Path, start_kind: StartKind
) -> None:
    assert CHECKOUT is not None
    arguments = Path(CHECKOUT, "megatron", "training")
    known = "".join(path.read_text() for path in arguments.rglob("*.py") if kind.needs)
    if kind.needs not in known:
        pytest.skip(f"this Megatron-LM has no {kind.needs}")
    if kind.package and importlib.util.find_spec(kind.package) is None:
        pytest.skip(f"{kind.package} is not installed")
    data = kind.data(tmp_path)
    alone = start_kind("alone", kind, data)
    alone.finish()
    changed = start_kind("changed", kind, data)
    changed.wait_for_step(BEFORE)
    changed.scale(kind.ranks, kind.then)
    changed.finish()
    compare(changed, alone, kind.tolerance)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("cut", "wish", "offload"),
    [("tensor", None, "optimizer"), ("pipeline", None, "optimizer-half"),
     ("", "tp1 pp1 offload=optimizer-half", "optimizer-half")],
    ids=["one of two shards", "one of two stages", "as requested"],
)  # fmt: skip
def test_a_job_of_too_few_devices_goes_on_in_host_memory_and_comes_back(
    cut: str, wish: str | None, offload: str, tmp_path: Path, start: Start
) -> None:
    """On one rank nothing else is known to fit, by the bytes of the layout that ran."""
    flags = ["--use-distributed-optimizer", "--bf16", "--train-iters", "60", *mock_data(tmp_path)]
    flags += [f"--{cut}-model-parallel-size", "2"] if cut else []
    alone = start("alone", 2, {}, flags)
    alone.finish()
    changed = start("changed", 2, {}, flags)
    changed.wait_for_step(BEFORE)
    before = changed.status()["degrees"]
    changed.scale(1, wish)
    changed.wait_until(lambda: changed.status()["offload"] == offload, "state in host memory")
    changed.wait_for_step(len(changed.ledger()) + 2)
    changed.scale(2)
    changed.wait_until(lambda: changed.status()["degrees"] == before, "what ran before")
    changed.finish()
    why = "as requested" if wish else "as nothing is known to fit without state in host memory"
    assert f"offload none -> {offload}" in changed.log and why in changed.log
    assert f"offload {offload} -> none" in changed.log
    compare(changed, alone, BF16, rounds=3)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_what_megatron_saves_beside_a_change_is_resumed_at_other_degrees(
    tmp_path: Path, start_kind: StartKind
) -> None:
    saving = "--save-interval 5 --ckpt-format torch_dist --save"
    kind = Kind("saves", 2, "tp1 pp1", "tp1 pp2", f"{saving} {tmp_path / 'saved'}")
    data = mock_data(tmp_path)
    alone = start_kind("alone", replace(kind, flags=f"{saving} {tmp_path / 'other'}"), data)
    alone.finish()
    changed = start_kind("changed", kind, data)
    changed.wait_for_step(BEFORE)
    changed.scale(kind.ranks, kind.then)
    changed.finish()
    compare(changed, alone, kind.tolerance)
    tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    assert int(tracker.read_text()) == KIND_STEPS
    tracker.write_text("10")
    loading = f"--load {tmp_path / 'saved'} --ckpt-format torch_dist {PADDED_AT_TP2}"
    resumed = start_kind("resumed", replace(kind, first="tp2 pp1", flags=loading), data)
    resumed.finish()
    compare(resumed, alone, kind.tolerance, rounds=1, since=11)
