"""Megatron-LM's own pretrain_gpt.py with ``--async-save``: changes and kills while a save is in
flight. A save is held before its end for as long as a file of the test exists."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support import megatron_lm_job
from support.megatron_lm_job import Job, check_same_steps

HELD_SAVES = Path(__file__).parents[1] / "support" / "held_saves"
DEGREES = {2: "tp2 pp1", 1: "tp1 pp1"}
ASYNC = [
    "--mock-data", "--vocab-size", "4300", "--train-iters", "100000", "--ckpt-format", "torch_dist",
    "--async-save", "--use-persistent-ckpt-worker",
]  # fmt: skip
PADDED = ["--make-vocab-size-divisible-by", "4320"]
"""At TP1 the embedding has as many rows as at TP2."""
STRATEGY = os.environ.get("MEGATRON_ASYNC_STRATEGY")
"""``mcore`` or ``nvrx``, where the checkout has the flag (from 0.17 on)."""
if STRATEGY:
    ASYNC += ["--async-strategy", STRATEGY]

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(
        megatron_lm_job.skip_reason() is not None, reason=str(megatron_lm_job.skip_reason())
    ),
    pytest.mark.timeout(1200),
]


def _files(pid: int) -> list[Path]:
    """Return what a process has open; nothing where it has ended."""
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def _leads_to(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""


class Saving:
    """Jobs that save under one folder, and the gate that their saves wait at."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.root = folder / "saved"
        self.gate = folder / "gate"
        self.gate.touch()
        self._jobs: list[Job] = []

    def start(self, name: str, nproc: int, *flags: str, launcher: tuple[str, ...] = ()) -> Job:
        environment = {
            "SCALAI_TEST_GATE": str(self.gate),
            "PYTHONPATH": os.pathsep.join([str(HELD_SAVES), os.environ.get("PYTHONPATH", "")]),
        }
        flags = (*ASYNC, *flags)
        job = Job(
            self._folder / name, nproc, DEGREES, flags, environment=environment,
            launcher_flags=launcher,
        )  # fmt: skip
        self._jobs.append(job)
        return job

    def close(self) -> None:
        self.gate.unlink(missing_ok=True)
        for job in self._jobs:
            job.stop()

    @property
    def named(self) -> str | None:
        """What the tracker names."""
        tracker = self.root / "latest_checkpointed_iteration.txt"
        return tracker.read_text() if tracker.is_file() else None

    def is_whole(self, iteration: int) -> bool:
        folder = self.root / f"iter_{iteration:07d}"
        return all((folder / name).is_file() for name in (".metadata", "metadata.json"))

    def writers(self) -> set[int]:
        """Return the processes that have a file of a checkpoint open."""
        return {
            pid
            for pid in psutil.pids()
            if any(_leads_to(file).startswith(str(self.root)) for file in _files(pid))
        }

    def command(self, name: str, *options: str) -> None:
        """Run a command of ``scalai`` on what was saved."""
        command = [sys.executable, "-m", "scalai.launch.cli", name, str(self.root), *options]
        subprocess.run(command, check=True, timeout=120)


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Saving]:
    found = Saving(tmp_path)
    yield found
    found.close()


def has_changed(job: Job) -> bool:
    """Whether a rank of the next round has stepped alone."""
    return any("event=resized" in line and "TP1·PP1" in line for line in job.log.splitlines())


def test_a_change_waits_for_a_save_in_flight_and_both_come_about(
    saving: Saving, tmp_path: Path
) -> None:
    save = ["--save", str(saving.root), "--save-interval", "60"]
    job = saving.start("changed", 2, *save)
    job.wait_until(lambda: bool(saving.writers()), "a save")
    job.scale(1)
    job.wait_until(lambda: "60 is in flight" in str(job.status()["held"]), "the reason to wait")
    seen = job.status()
    assert seen["phase"] == "preparing"
    job.wait_until(lambda: job.status()["step"] >= seen["step"] + 3, "a step meanwhile")
    assert saving.named is None and not saving.is_whole(60)
    saving.gate.unlink()
    job.wait_until(lambda: saving.named is not None, "the end of the save")
    assert saving.is_whole(60)
    job.wait_until(lambda: has_changed(job), "the change")
    job.wait_until(lambda: saving.is_whole(120), "the next save, of the next round")
    job.stop()
    trained = job.ledger()
    assert len({entry.round for entry in trained.values()}) == 2
    assert not saving.writers(), "nobody outlives the job"
    saving.command("verify")
    # It is the state of step 60, and not of later ones: the training goes on from it as it did.
    target = [str(tmp_path / "new"), *"--iteration 60 --tp 1 --pp 1 --dp 1 --to torch_dist".split()]
    saving.command("reshard", *target)
    for name, load in (("own", saving.root), ("resharded", tmp_path / "new")):
        resume = ["--load", str(load), "--ckpt-step", "60", *PADDED]
        resumed = saving.start(name, 1, *resume)
        resumed.wait_for_step(70)
        resumed.stop()
        found = resumed.ledger()
        assert min(found) == 61
        check_same_steps({step: found[step] for step in range(61, 71)}, trained)


@pytest.mark.campaign
def test_a_change_comes_about_where_every_step_saves(saving: Saving) -> None:
    saving.gate.unlink()
    job = saving.start("job", 2, "--save", str(saving.root), "--save-interval", "1")
    job.wait_until(lambda: saving.named is not None, "a save")
    job.scale(1)
    job.wait_until(lambda: has_changed(job), "the change")
    before = int(saving.named or 0)
    job.wait_until(lambda: int(saving.named or 0) > before, "a save of the next round")
    job.stop()
    assert saving.is_whole(int(saving.named or 0))


def kill_worker(job: Job, saving: Saving) -> None:
    """The last rank, with a save of its own in flight."""
    sessions = {os.getsid(pid) for pid in saving.writers()}
    os.kill(max(sessions), signal.SIGKILL)


def kill_writer(job: Job, saving: Saving) -> None:
    """What writes for one rank, which lives on."""
    writer = min(saving.writers())
    parent = int(Path(f"/proc/{writer}/stat").read_text().rpartition(")")[2].split()[1])
    own = [pid for pid in (parent, writer) if os.getsid(pid) != pid]
    os.kill(own[0], signal.SIGKILL)


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize("kill", [kill_worker, kill_writer])
def test_a_kill_leaves_no_half_written_save_that_is_named_and_nobody_who_writes_on(
    kill: Callable[[Job, Saving], None], saving: Saving
) -> None:
    save = ["--save", str(saving.root), "--save-interval", "30"]
    job = saving.start("job", 2, *save, launcher=("--max-restarts", "3"))
    job.wait_until(lambda: len(saving.writers()) >= 2, "a save of both ranks")
    before = saving.writers()
    kill(job, saving)
    job.wait_until(lambda: not before & saving.writers(), "the end of what writes")
    assert saving.named is None
    saving.gate.unlink()
    if kill is kill_worker:
        # Nobody else has its state: the job has gone back, and comes to the same step again.
        job.wait_until(lambda: saving.named == "30", "the save of step 30")
        assert "event=saved_anew iteration=30" in job.log
    else:
        said = "the process that was to write the save of iteration 30 has ended"
        job.wait_until(lambda: said in job.log, "a message of the worker that waits for it")
        # Both workers live: the job goes on from the step that they have come to.
        job.wait_until(lambda: saving.named is not None, "a later save")
    assert saving.is_whole(int(saving.named or 0))
    saving.command("verify")


@pytest.mark.campaign
def test_a_whole_save_stays_where_the_job_comes_to_its_step_again(saving: Saving) -> None:
    saving.gate.unlink()
    save = ["--save", str(saving.root), "--save-interval", "30"]
    launcher = ("--max-restarts", "3", "--snapshot-every", "0")  # a snapshot would be behind it
    job = saving.start("job", 2, *save, launcher=launcher)
    job.wait_until(lambda: saving.named == "30", "the save of step 30")
    folder = saving.root / "iter_0000030"
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    saving.gate.touch()
    job.wait_until(lambda: len(saving.writers()) >= 2, "the save of step 60")
    kill_worker(job, saving)
    job.wait_until(lambda: "event=saved_before iteration=30" in job.log, "step 30 again")
    assert saving.named == "30"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    saving.gate.unlink()
    job.wait_until(lambda: saving.named == "60", "the save of step 60")
    assert saving.is_whole(60)


@pytest.mark.campaign
def test_a_killed_agent_takes_what_writes_along_and_the_job_saves_again(saving: Saving) -> None:
    save = ["--save", str(saving.root), "--save-interval", "30"]
    job = saving.start("job", 2, *save, launcher=("--max-restarts", "1"))
    job.wait_until(lambda: len(saving.writers()) >= 2, "a save of both ranks")
    os.kill(job.pid, signal.SIGKILL)
    again = saving.start("job", 2, *save, launcher=("--max-restarts", "1"))
    again.wait_until(lambda: "event=saved_anew iteration=30" in again.log, "the save of step 30")
    assert saving.named is None
    saving.gate.unlink()
    again.wait_until(lambda: saving.named == "30", "the end of it")
    assert saving.is_whole(30)
    saving.command("verify")
