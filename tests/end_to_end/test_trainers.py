"""Scripts on transformers' Trainer and on Accelerate change their ranks while they train: same
samples, same losses, same learning rates, same logs."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.agents import Agents
from support.alone import start_alone

pytest.importorskip("accelerate", reason="pip install transformers accelerate")
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(1800),  # the first one compiles
    pytest.mark.usefixtures("compiled_shared_memory"),
]

SUPPORT = Path(__file__).parents[1] / "support"
TRAINER, ACCELERATE = SUPPORT / "trainer_script.py", SUPPORT / "accelerate_script.py"
TOLERANCE = 1e-6
BATCH, SAMPLES, EPOCHS = 12, 60, 6
STEPS = SAMPLES // BATCH * EPOCHS
WORLDS = (3, 1, 2)
STEP_S = 0.3


def words(
    script: Path, folder: Path, stage: int, accumulate: int, *flags: str, **settings: Any
) -> list[str]:
    """Return a command line; DeepSpeed's configuration is as Hugging Face's documentation has it,
    but for the block that makes it elastic."""
    folder.mkdir()
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    content = {
        **dict.fromkeys((*auto, "gradient_clipping"), "auto"),
        "zero_optimization": {"stage": stage},
        # Else a busy machine trains to the end before the next workers are built.
        "scalai": {"resize": {"settle_s": 0.2, "standby": "never"}, **settings},
    }
    (folder / "ds.json").write_text(json.dumps(content))
    given = {
        "--output": folder / "out", "--notes": folder / "notes" / "n",
        "--deepspeed": folder / "ds.json", "--samples": SAMPLES, "--epochs": EPOCHS,
        "--micro-batch": 2, "--accumulate": accumulate,
    }  # fmt: skip
    return [str(script), *(str(word) for pair in given.items() for word in pair), *flags]


def train_through(folder: Path, command: Sequence[str]) -> Agents:
    """Run a script through the worlds, to its end. Returns the job, which has ended."""
    slow = [*command, "--step-s", str(STEP_S)]
    with Agents(folder, None, slow, nodes="1", slots=max(WORLDS)) as agents:
        agents.metrics = folder / "notes" / "n.0"
        agents.start("a")
        agents.wait_for_step(2, world=WORLDS[0])
        for changes, world in enumerate(WORLDS[1:], 1):
            agents.wait_until(lambda: len(agents.resizes()) == changes, "every rank has stepped")  # noqa: B023
            agents.scale(nproc=world)
            agents.wait_for_world(world)
        assert agents.exit_code("a") == 0, agents.logs()
    return agents


def notes_of(folder: Path) -> list[dict[str, Any]]:
    paths = (folder / "notes").glob("n.[0-9]*")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def by_world(notes: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], tuple[float, list[str]]]:
    """Return by step and number of ranks the mean loss and the samples."""
    found: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for note in notes:
        found[note["step"], note["world"]].append(note)
    return {
        (step, world): (
            sum(note["loss"] for note in of) / world,
            sorted(name for note in of for name in note["samples"]),
        )
        for (step, world), of in found.items()
    }


def by_step(notes: Sequence[Mapping[str, Any]]) -> list[tuple[float, list[str]]]:
    """Return by step the mean loss and the samples. Each step was made once."""
    found = by_world(notes)
    assert sorted(step for step, _ in found) == list(range(STEPS))
    return [found[key] for key in sorted(found)]


def check(folder: Path, agents: Agents) -> None:
    """Each step was made once, on the samples and with the loss of the uninterrupted run."""
    assert [report.get("steps_lost", 0) for report in agents.resizes()] == [0] * len(WORLDS)
    expected, made = by_step(notes_of(folder / "alone")), by_step(notes_of(folder / "elastic"))
    assert [samples for _, samples in made] == [samples for _, samples in expected]
    differences = [abs(a - b) / b for (a, _), (b, _) in zip(made, expected, strict=True)]
    print(f"largest relative difference of {STEPS} losses: {max(differences):.1e}")
    assert max(differences) < TOLERANCE
    worlds = sorted((note["step"], note["world"]) for note in notes_of(folder / "elastic"))
    assert list(dict.fromkeys(world for _, world in worlds)) == list(WORLDS)


@pytest.mark.turns
@pytest.mark.parametrize("stage", [1, 3])
def test_a_script_on_trainer_goes_through_other_worlds(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logs tell of one training: a line a step, with the learning rate of that step. What is
    ``auto`` in our block is none of Trainer's."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    alone = start_alone(tmp_path / "alone", words(TRAINER, tmp_path / "alone", stage, 6))
    chosen = {"snapshot_every": "auto"}
    script = words(TRAINER, tmp_path / "elastic", stage, 2, "--save-every", "4", store=chosen)
    agents = train_through(tmp_path / "elastic", script)
    assert alone.wait(60) == 0, (tmp_path / "alone" / "log").read_text()[-3000:]
    check(tmp_path, agents)
    check_history(tmp_path)


def check_history(folder: Path) -> None:
    reported, expected = (
        json.loads((folder / name / "notes" / "n.history").read_text())
        for name in ("elastic", "alone")
    )
    assert reported["step"] == expected["step"] == STEPS
    steps = [[line for line in of["log"] if "loss" in line] for of in (reported, expected)]
    for mine, its in zip(*steps, strict=True):
        assert mine == pytest.approx(its, rel=1e-5), mine
    assert reported["log"][-1]["train_loss"] == pytest.approx(expected["log"][-1]["train_loss"])


def test_a_worker_of_a_script_on_trainer_may_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards are gone before they are written: the job goes back to the newest snapshot, and
    so do Trainer's step and logs."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    alone = start_alone(tmp_path / "alone", words(TRAINER, tmp_path / "alone", 1, 6))
    folder, often = tmp_path / "elastic", {"snapshot_every": 4}
    script = [*words(TRAINER, folder, 1, 3, store=often), "--step-s", str(STEP_S)]
    restarts = ("--max-restarts", "1")
    with Agents(folder, None, script, nodes="1", slots=2, flags=restarts) as agents:
        agents.metrics = folder / "notes" / "n.0"
        agents.start("a")
        agents.wait_for_step(6, world=2)
        agents.arm("write", "1")
        agents.scale(nproc=1)
        agents.wait_for_death()
        agents.wait_for_world(1)
        assert agents.exit_code("a") == 0, agents.logs()
    assert alone.wait(60) == 0, (tmp_path / "alone" / "log").read_text()[-3000:]
    expected, made = by_step(notes_of(tmp_path / "alone")), by_world(notes_of(folder))
    assert {step for step, _ in made} == set(range(STEPS))
    for (step, _), (loss, samples) in made.items():
        assert samples == expected[step][1], step
        assert loss == pytest.approx(expected[step][0], rel=TOLERANCE), step
    lost = sum(report.get("steps_lost", 0) for report in agents.resizes())
    assert 0 < lost == len(made) - STEPS
    check_history(tmp_path)


@pytest.mark.turns
@pytest.mark.parametrize("flags", [(), ("--save-epochs",)], ids=["plain", "resumes"])
def test_a_loop_on_accelerate_goes_through_other_worlds(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it saves each epoch, and begins behind the newest that it finds."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    alone = start_alone(tmp_path / "alone", words(ACCELERATE, tmp_path / "alone", 2, 6, *flags))
    script = words(ACCELERATE, tmp_path / "elastic", 2, 2, *flags)
    agents = train_through(tmp_path / "elastic", script)
    assert alone.wait(60) == 0, (tmp_path / "alone" / "log").read_text()[-3000:]
    check(tmp_path, agents)
    rates = [
        {note["step"]: note["rate"] for note in notes_of(tmp_path / name)}
        for name in ("elastic", "alone")
    ]
    assert rates[0] == pytest.approx(rates[1], rel=1e-9)
