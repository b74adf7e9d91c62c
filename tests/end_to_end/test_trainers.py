"""Scripts on transformers' Trainer and on Accelerate change their ranks while they train: same
samples, same losses, same learning rates, same logs."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from support.agents import Agents
from support.alone import start_alone
from support.deepspeed_elastic import try_odd
from support.needed import need

need("accelerate", "pip install transformers accelerate")
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(1800),  # the first one compiles
    pytest.mark.usefixtures("compiled_shared_memory"),
]

SUPPORT = Path(__file__).parents[1] / "support"
TRAINER, ACCELERATE = SUPPORT / "trainer_script.py", SUPPORT / "accelerate_script.py"
TOLERANCE = 1e-6
BATCH, MICRO_BATCH, SAMPLES, EPOCHS = 12, 2, 60, 6
STEPS = SAMPLES // BATCH * EPOCHS
UNEVEN = 15
"""Samples of a global batch that two ranks do not divide, in micro-batches of one."""
WORLDS = (3, 1, 2)
Note = dict[str, Any]
STEP_S = 0.3


def words(
    script: Path,
    folder: Path,
    stage: int,
    accumulate: int,
    *flags: str,
    micro: int = MICRO_BATCH,
    **settings: Any,
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
        "--micro-batch": micro, "--accumulate": accumulate,
    }  # fmt: skip
    return [str(script), *(str(word) for pair in given.items() for word in pair), *flags]


def train_through(
    folder: Path, command: Sequence[str], worlds: Sequence[int] = WORLDS, odd: int = 0
) -> Agents:
    """Run a script through the worlds, to its end; before the first change it tries one of ``odd``
    ranks, which is to be refused. Returns the job, which has ended."""
    slow = [*command, "--step-s", str(STEP_S)]
    with Agents(folder, None, slow, nodes="1", slots=max(worlds)) as agents:
        agents.metrics = folder / "notes" / "n.0"
        agents.start("a")
        agents.wait_for_step(2, world=worlds[0])
        for changes, world in enumerate(worlds[1:], try_odd(agents, odd) if odd else 1):
            agents.wait_until(lambda: agents.has_reported(changes), "every rank has stepped")  # noqa: B023
            agents.scale(nproc=world)
            agents.wait_for_world(world)
        assert agents.exit_code("a") == 0, agents.logs()
    return agents


@dataclass(frozen=True, slots=True)
class Counts:
    """Micro-batches of a step, steps, and whether notes have means over the passes of a replica."""

    micro_batches: int = BATCH // MICRO_BATCH
    steps: int = STEPS
    is_mean: bool = False

    def counted(self, notes: Sequence[Note]) -> Iterator[Note]:
        """Yield the notes of a rank that count: where its last pass of a step may be a filler, and
        repeats the first one, it does not, and a mean over passes is one over micro-batches."""
        for (_, _, world), of in groupby(
            notes, lambda note: (note["round"], note["step"], note["world"])
        ):
            made, passes = list(of), -(-self.micro_batches // world)
            has_filler = self.micro_batches % world and len(made) == passes
            if has_filler and made[-1]["samples"] == made[0]["samples"]:
                filler = made.pop()
                made[-1] |= {key: filler[key] for key in ("rate",) if key in filler}
            weight = passes * world / self.micro_batches if self.is_mean else 1.0
            yield from ({**note, "loss": note["loss"] * weight} for note in made)


def notes_of(folder: Path, counts: Counts = Counts()) -> list[Note]:
    paths = (folder / "notes").glob("n.[0-9]*")
    ranks = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
    return [note for notes in ranks for note in counts.counted(notes)]


def without_proof(folder: Path, agents: Agents, counts: Counts = Counts()) -> list[Note]:
    """Return the notes without those of passes that old workers made behind their stop, to prove a
    change: of the one step behind it, as noted by whoever makes that step for the training, and of
    a worker that has come to the door of its update all but the pass that ends there."""
    reports, notes = agents.resizes(), notes_of(folder, counts)
    rounds = {report["round"] for report in reports}  # of others all is given up
    notes = [note for note in notes if note["round"] in rounds]
    for before, change in pairwise(reports):
        round, last = before["round"], change["step"]
        if change["round"] == round + 1:  # else they are of rounds that were given up
            last += change.get("steps_lost", 0)
        extra = [note for note in notes if note["round"] == round and note["step"] >= last]
        notes = [note for note in notes if note not in extra]
        assert {note["step"] for note in extra} <= {last}
        made = shares([note for note in notes if note["step"] == last])
        assert shares(extra) == {
            names: pytest.approx(made[names], rel=TOLERANCE) for names in shares(extra)
        }
        assert len(shares(extra)) == len(extra), "each pass is made once"
        if change.get("function", "").startswith(("proven", "differs")):
            count, world = counts.micro_batches, extra[0]["world"]
            assert len(extra) == count - (count % world or world), (change, extra)
    return notes


def shares(notes: Sequence[Note]) -> dict[tuple[str, ...], float]:
    """Return by the samples of each micro-batch its part of the loss of its step."""
    return {tuple(note["samples"]): note["loss"] / note["world"] for note in notes}


def by_world(notes: Sequence[Note]) -> dict[tuple[int, int], tuple[float, list[str]]]:
    """Return by step and number of ranks the mean loss and the samples."""
    found: dict[tuple[int, int], list[Note]] = defaultdict(list)
    for note in notes:
        found[note["step"], note["world"]].append(note)
    return {
        (step, world): (
            sum(note["loss"] for note in of) / world,
            sorted(name for note in of for name in note["samples"]),
        )
        for (step, world), of in found.items()
    }


def by_step(notes: Sequence[Note], steps: int = STEPS) -> list[tuple[float, list[str]]]:
    """Return by step the mean loss and the samples. Each step was made once."""
    found = by_world(notes)
    assert sorted(step for step, _ in found) == list(range(steps))
    return [found[key] for key in sorted(found)]


def check(
    folder: Path, agents: Agents, worlds: Sequence[int] = WORLDS, counts: Counts = Counts()
) -> None:
    """Each step was made once, on the samples and with the loss of the uninterrupted run, and each
    change is proven."""
    later = agents.resizes()[1:]
    changes = [each for each in later if not each["function"].startswith("differs")]
    assert [report.get("steps_lost", 0) for report in changes] == [0, 0]
    assert all(each["function"].startswith("proven") for each in changes), changes
    notes = without_proof(folder / "elastic", agents, counts)
    expected = by_step(notes_of(folder / "alone", counts), counts.steps)
    made = by_step(notes, counts.steps)
    assert [samples for _, samples in made] == [samples for _, samples in expected]
    differences = [abs(a - b) / b for (a, _), (b, _) in zip(made, expected, strict=True)]
    print(f"largest relative difference of {len(made)} losses: {max(differences):.1e}")
    assert max(differences) < TOLERANCE
    found = sorted((note["step"], note["world"]) for note in notes)
    assert [world for world, _ in groupby(world for _, world in found)] == list(worlds)


@pytest.mark.turns
@pytest.mark.parametrize(("stage", "odd", "worlds"), [(1, 0, WORLDS), (3, 2, (3, 1, 3))])
def test_a_script_on_trainer_goes_through_other_worlds(
    stage: int, odd: int, worlds: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logs tell of one training: a line a step, with the learning rate of that step; no
    callback hears of a step that proves a change. What is ``auto`` in our block is none of
    Trainer's. A world whose loss is ``odd`` is left again."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    alone = start_alone(tmp_path / "alone", words(TRAINER, tmp_path / "alone", stage, 6))
    chosen = {"snapshot_every": "auto"}
    flags = ("--save-every", "4", "--odd-world", str(odd))
    resize = {"settle_s": 0.2, "standby": "never", "prove_function": "always" if odd else "auto"}
    folder = tmp_path / "elastic"
    script = words(TRAINER, folder, stage, 2, *flags, store=chosen, resize=resize)
    agents = train_through(folder, script, worlds, odd)
    assert alone.wait(60) == 0, (tmp_path / "alone" / "log").read_text()[-3000:]
    check(tmp_path, agents, worlds)
    check_history(tmp_path)
    check_heard(folder, agents, odd)


def check_heard(folder: Path, agents: Agents, odd: int) -> None:
    """No callback has heard of a step behind a stop; rounds without a report are of ``odd``
    ranks."""
    heard = (folder / "notes" / "n.heard").read_text().splitlines()
    rounds = [report["round"] for report in agents.resizes()]
    tries = {note["round"] for note in notes_of(folder)} - {*rounds}
    assert {note["world"] for note in notes_of(folder) if note["round"] in tries} == {odd} - {0}
    for before, change in pairwise(agents.resizes()):
        assert f"{before['round']} {change['step'] - 1}" in heard
        assert f"{before['round']} {change['step']}" not in heard


def check_history(folder: Path, steps: int = STEPS) -> None:
    reported, expected = (
        json.loads((folder / name / "notes" / "n.history").read_text())
        for name in ("elastic", "alone")
    )
    assert reported["step"] == expected["step"] == steps
    logs = [[line for line in of["log"] if "loss" in line] for of in (reported, expected)]
    for mine, its in zip(*logs, strict=True):
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
    expected = by_step(notes_of(tmp_path / "alone"))
    made = by_world(without_proof(folder, agents))
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
    check_rates(tmp_path, agents)


@pytest.mark.parametrize("script", [TRAINER, ACCELERATE], ids=["Trainer", "Accelerate"])
def test_replicas_may_have_uneven_shares(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script is told of no filler: losses, logs and rates are those of one rank."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    counts = Counts(UNEVEN, SAMPLES // UNEVEN * EPOCHS, is_mean=script == ACCELERATE)
    alone, worlds = tmp_path / "alone", (3, 2, 3)
    reference = start_alone(alone, words(script, alone, 2, UNEVEN, micro=1))
    always = {"settle_s": 0.2, "standby": "never", "prove_function": "always"}
    accumulate = UNEVEN // worlds[0]
    job = words(script, tmp_path / "elastic", 2, accumulate, micro=1, resize=always)
    agents = train_through(tmp_path / "elastic", job, worlds)
    assert reference.wait(60) == 0, (alone / "log").read_text()[-3000:]
    check(tmp_path, agents, worlds, counts)
    if script == TRAINER:
        check_history(tmp_path, counts.steps)
    else:
        check_rates(tmp_path, agents, counts)


def check_rates(folder: Path, agents: Agents, counts: Counts = Counts()) -> None:
    """Each step leaves the schedule where that of the uninterrupted run is."""
    made = without_proof(folder / "elastic", agents, counts)
    expected = notes_of(folder / "alone", counts)
    rates = [{note["step"]: note["rate"] for note in notes} for notes in (made, expected)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-9)
