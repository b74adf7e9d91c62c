"""``engine.load_checkpoint`` at other degrees and stages than the checkpoint's."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scalai.converters.deepspeed.tag_files import find_tag
from scalai.converters.layouts import open_checkpoint
from support.training.deepspeed_jobs import INFO, Job
from support.training.jobs import AFTER, mean_losses
from support.training.worker_pool import WorkerPool

Run = tuple[list[float], float, list[int]]

FP32, BF16, FP16 = 1e-6, 2e-2, 2e-3
SAMPLES = 12


class Saves:
    """Checkpoints by the job that saved them, each made once."""

    def __init__(self, pool: WorkerPool, directory: Path) -> None:
        self._pool, self._directory = pool, directory
        self._made: dict[str, tuple[Path, Run]] = {}

    def of(self, job: Job) -> tuple[Path, Run]:
        """Return where a job has saved, and how it went on."""
        key = repr(job)
        if key not in self._made:
            path = self._directory / str(len(self._made))
            state = {"universal_checkpoint_info": job.info} if job.info else {}
            arguments = [(job, str(path), state)] * job.world
            answers = self._pool.run("loading_worker:save", arguments)
            self._made[key] = path, united(answers)
        return self._made[key]


@pytest.fixture(scope="module")
def saves(deepspeed_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(deepspeed_pool, tmp_path_factory.mktemp("saves"))


def united(answers: list[Any]) -> Run:
    _, learning_rate, skipped = answers[0]
    return mean_losses([losses for losses, _, _ in answers]), learning_rate, skipped


def ranks(world: int, stage: int, **values: Any) -> Job:
    return Job(world=world, stage=stage, **values)


def pipeline(pp: int, dp: int, **values: Any) -> Job:
    return Job(world=pp * dp, pp=pp, **values)


BFLOAT: dict[str, Any] = {"precision": "bf16"}
HALF: dict[str, Any] = {"precision": "fp16"}

CASES = [
    ("zero1-2-to-3", ranks(2, 1), ranks(3, 1), FP32),
    ("zero1-to-zero3", ranks(2, 1), ranks(2, 3), FP32),
    ("pipeline-2x1-to-1x2", pipeline(2, 1), pipeline(1, 2), FP32),
]

TRAINED: dict[str, Any] = {"frozen": False}
"""Without ZeRO nothing else tells frozen parameters from others of their shape."""

MORE = [
    ("zero2-2-to-1", ranks(2, 2), ranks(1, 2), FP32),
    ("zero3-2-to-3", ranks(2, 3), ranks(3, 3), FP32),
    ("zero0-to-zero1", ranks(2, 0, **TRAINED), ranks(3, 1, **TRAINED), FP32),
    ("zero0-to-zero3", ranks(2, 0, **TRAINED), ranks(2, 3, **TRAINED), FP32),
    ("zero2-to-zero0", ranks(2, 2), ranks(3, 0), FP32),
    ("zero3-to-zero2", ranks(2, 3), ranks(2, 2), FP32),
    ("bf16-zero1-to-zero3", ranks(2, 1, **BFLOAT), ranks(3, 3, **BFLOAT), BF16),
    ("bf16-zero3-to-zero2", ranks(2, 3, **BFLOAT), ranks(1, 2, **BFLOAT), BF16),
    ("bf16-optimizer", ranks(2, 1, precision="bf16-fp32"), ranks(3, 1, **BFLOAT), BF16),
    ("fp16-zero2-to-zero3", ranks(2, 2, **HALF), ranks(2, 3, **HALF), FP16),
    ("fp32-to-bf16", ranks(2, 1), ranks(3, 2, **BFLOAT), BF16),
    ("pipeline-1x2-to-3x1", pipeline(1, 2), pipeline(3, 1), FP32),
    ("cut-2x1-to-1x2", Job(world=2, tp=2, info=INFO), Job(world=2, tp=1), FP32),
    ("cut-1x2-to-2x1", Job(world=2, tp=1), Job(world=2, tp=2), FP32),
    ("same-zero1", ranks(2, 1), ranks(2, 1), 0.0),
    ("same-pipeline", pipeline(2, 1), pipeline(2, 1), 0.0),
]

NO_CLIP = {"gradient_clipping": 0.0}
BARE: dict[str, Any] = {"stage": 0, "tied": False, "config": NO_CLIP}
"""Without ZeRO the file does not name the optimizer's parameters, of which some are alike: each
stage's engine does. It clips each stage's gradients by their own norm."""
BACKWARDS: dict[str, Any] = {"tied": False, "config": NO_CLIP, "backwards": True}
ORDERS = [
    (
        "the-stages-order",
        pipeline(2, 1, **BACKWARDS, stage=0),
        pipeline(2, 1, **BACKWARDS, stage=1),
        FP32,
    ),
    ("the-modules-order", pipeline(1, 2, **BARE), pipeline(2, 1, **BARE), FP32),
]

LONG = [pytest.mark.campaign, pytest.mark.turns]


@pytest.mark.parametrize(
    ("before", "after", "tolerance"),
    [
        *(pytest.param(*case[1:], id=case[0]) for case in (*CASES, ORDERS[0])),
        *(pytest.param(*case[1:], id=case[0], marks=LONG) for case in (*MORE, ORDERS[1])),
    ],
)
def test_a_loaded_job_goes_on_as_the_one_that_saved(
    deepspeed_pool: WorkerPool, saves: Saves, before: Job, after: Job, tolerance: float
) -> None:
    path, (losses, rate, skipped) = saves.of(before)
    answers = deepspeed_pool.run("loading_worker:load", [(after, str(path))] * after.world)
    found, found_rate, found_skipped = united([run for run, _ in answers])
    differences = [abs(a - b) / abs(a) for a, b in zip(losses, found, strict=True)]
    print(f"largest relative difference of a loss: {max(differences):.1e}")
    assert max(differences) <= tolerance
    assert found_rate == rate
    assert found_skipped == [step for step in skipped if step in AFTER]
    for _, (file, note, (steps, samples, _)) in answers:
        assert Path(file).is_file() and Path(file).parent == find_tag(path, None)
        assert note == {"text": "kept", "n": 7}
        assert (steps, samples) == (AFTER.start, AFTER.start * SAMPLES)


CUTS = """
[[cut]]
parameters = '.*(norm\\..*|down_bias|embed.*)'

[[cut]]
parameters = '.*\\.down'
dimension = 1

[[cut]]
parameters = '.*gate_up'
dimension = 0
parts = 2

[[cut]]
parameters = '.*'
dimension = 0
"""
"""The same as ``INFO``, as a person says it."""


@pytest.mark.campaign
def test_cuts_that_a_checkpoint_does_not_tell_are_told_by_a_file(
    deepspeed_pool: WorkerPool, saves: Saves, tmp_path: Path
) -> None:
    path, (losses, *_) = saves.of(Job(world=2, tp=2))
    after = Job(world=2, tp=1)
    assert all("Name a file that says it" in text for text in refused(deepspeed_pool, after, path))
    file = tmp_path / "cuts.toml"
    file.write_text(CUTS)
    answers = deepspeed_pool.run("loading_worker:load", [(after, str(path), str(file))] * 2)
    assert united([run for run, _ in answers])[0] == pytest.approx(losses, rel=FP32)


def refused(
    pool: WorkerPool, job: Job, path: Path, arguments: dict[str, Any] | None = None
) -> list[str]:
    """Return by rank how a load is refused that leaves the engine as it was."""
    calls = [(job, str(path), dict(arguments or {}))] * job.world
    answers = pool.run("loading_worker:refuse", calls)
    assert all(is_untouched for _, is_untouched in answers)
    return [text for text, _ in answers]


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        pytest.param("missing", marks=pytest.mark.campaign),
        pytest.param("other stage", marks=pytest.mark.campaign),
    ],
)
def test_a_damaged_checkpoint_is_refused_on_all_ranks(
    deepspeed_pool: WorkerPool, saves: Saves, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(saves.of(ranks(2, 1))[0], tmp_path, dirs_exist_ok=True)
    directory = find_tag(tmp_path, None)
    assert directory is not None
    file = directory / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "missing":
        file.unlink()
    else:
        other = find_tag(saves.of(ranks(2, 3))[0], None)
        assert other is not None
        shutil.copy(other / file.name, file)
    texts = refused(deepspeed_pool, ranks(3, 1), tmp_path)
    assert all(text.startswith("RefusedError") for text in texts), texts
    named = file.name if damage != "missing" else "2 data-parallel ranks"
    assert all(named in text for text in texts), texts


def test_a_flipped_byte_is_found_before_anything_is_written(
    deepspeed_pool: WorkerPool, saves: Saves, tmp_path: Path
) -> None:
    """In the first moments of a file that no checksum but torch's own speaks for."""
    shutil.copytree(saves.of(ranks(2, 1))[0], tmp_path, dirs_exist_ok=True)
    directory = find_tag(tmp_path, None)
    assert directory is not None
    file = directory / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    placed = open_checkpoint(directory).placed
    number = [entry.path for entry in placed.files].index(file.name)
    rows = [row for row in range(len(placed.collection)) if placed.file[row] == number]
    tensor, row = next(
        (tensor, row)
        for row in rows
        if (tensor := placed.collection.box(row)[0]).name.startswith("exp_avg/")
    )
    content = bytearray(file.read_bytes())
    content[placed.begin[row]] ^= 1
    file.write_bytes(content)
    texts = refused(deepspeed_pool, ranks(3, 1), tmp_path)
    assert all(text.startswith("ProofError") for text in texts), texts
    for named in (file.name, "data/", tensor.name, "copy it again", "The engine is as it was."):
        assert all(named in text for text in texts), (named, texts)


@pytest.mark.campaign
def test_a_checkpoint_without_an_optimizer_is_refused_by_name(
    deepspeed_pool: WorkerPool, saves: Saves, tmp_path: Path
) -> None:
    """At the same degrees, too, where DeepSpeed itself fails with a TypeError."""
    shutil.copytree(saves.of(ranks(2, 0, **TRAINED))[0], tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*/mp_rank_00_model_states.pt")
    torch.save({**torch.load(file, weights_only=False), "optimizer": None}, file)
    for stage in (0, 1):
        texts = refused(deepspeed_pool, ranks(2, stage, **TRAINED), tmp_path)
        assert all("has no optimizer" in text for text in texts), texts


@pytest.mark.campaign
def test_what_cannot_be_done_is_refused_by_name(deepspeed_pool: WorkerPool, saves: Saves) -> None:
    path, _ = saves.of(ranks(2, 1))
    texts = refused(deepspeed_pool, ranks(3, 1), path, {"custom_load_fn": True})
    assert all("custom_load_fn" in text for text in texts), texts
    texts = refused(deepspeed_pool, ranks(3, 1, empty=True, frozen=False), path)
    assert all("exp_avg/blocks.0.down.bias" in text for text in texts), texts
    texts = refused(deepspeed_pool, ranks(3, 1, decay=(0.1, 0.1)), saves.of(pipeline(2, 1))[0])
    assert all("has no" in text for text in texts), texts


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("stage", "precision", "flag"),
    [
        (1, "fp32", "load_module_only"),
        (1, "bf16", "load_optimizer_states"),
        (3, "fp32", "load_optimizer_states"),
        (3, "bf16", "load_module_only"),
    ],
)
def test_weights_alone_may_be_loaded(
    deepspeed_pool: WorkerPool, saves: Saves, stage: int, precision: str, flag: str
) -> None:
    path, (losses, _, _) = saves.of(ranks(2, 3, precision=precision))
    job = ranks(3, stage, precision=precision)
    arguments = {flag: flag == "load_module_only"}
    answers = deepspeed_pool.run("loading_worker:load_weights", [(job, str(path), arguments)] * 3)
    (first,) = mean_losses([loss for loss, *_ in answers])
    assert first == pytest.approx(losses[0], rel=FP32 if precision == "fp32" else BF16)
    for _, (steps, *_), scheduled, moments in answers:
        assert moments == 0
        assert steps == scheduled == (0 if flag == "load_module_only" else AFTER.start)
