"""Megatron-LM's own pretrain_gpt.py reads its data set as files, by Scalai's reader hook and
through a mount: the same samples at all degrees, and what becomes of a job whose data goes away."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from scalai.vfs.mounts import find_mount
from support import megatron_lm_job
from support.megatron_lm_job import Job, check_same_steps, make_dataset
from support.stopping import stop

pytestmark = [
    pytest.mark.fault,
    pytest.mark.campaign,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        megatron_lm_job.skip_reason() is not None, reason=str(megatron_lm_job.skip_reason())
    ),
    pytest.mark.skipif(
        not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None,
        reason="no /dev/fuse here, or no fuse3",
    ),
]
SCALAI = Path(sys.executable).with_name("scalai")
DEGREES = {1: "tp1", 2: "tp1"}
FILES, HOOK, MOUNT = "files", "hook", "mount"
STEPS = 60
AT_ONCE = "standby = 'never'"
"""A change stops the training before the next workers are built: few steps are made meanwhile."""


class Data:
    """A corpus, and the ways to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.point, self.corpus = folder, folder / "point", folder / "data"
        for each in (self.point, self.corpus):
            each.mkdir()
        make_dataset(self.corpus / "text")
        self.bin = self.corpus / "text.bin"

    def mount(self) -> int:
        """Mount, and return the number of the process that serves."""
        command = [str(SCALAI), "mount", "gpt", str(self.point)]
        command += [f"--source=corpus={self.corpus}", f"--log={self.folder / 'mount.txt'}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
        found = re.search(r"by process (\d+)", done.stdout)
        assert found is not None, done.stdout
        return int(found[1])

    def flags(self, way: str) -> list[str]:
        prefix = {
            FILES: str(self.corpus / "text"),
            HOOK: "scalai://gpt/dataset/corpus/source/text",
            MOUNT: str(self.point / "dataset" / "corpus" / "source" / "text"),
        }[way]
        return [
            "--data-path", prefix, "--split", "90,5,5", "--vocab-size", "256",
            "--data-cache-path", str(self.folder / f"cache-{way}"), "--num-workers", "2",
        ]  # fmt: skip


class Jobs:
    """Starts jobs that read the corpus; they end with the test."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self._jobs: list[Job] = []

    def start(
        self, way: str, name: str, settings: str = "", constants: Mapping[str, float] = {}
    ) -> Job:
        """Start a job; one whose name was given before goes on."""
        told = json.dumps({"sources": {"corpus": str(self.data.corpus)}})
        folder = self.data.folder / name
        job = Job(
            folder, 2, DEGREES, [*self.data.flags(way), "--train-iters", str(STEPS)],
            environment={"FSSPEC_SCALAI": told}, settings=f"{AT_ONCE}\n{settings}",
            constants=constants,
            launcher_flags=["--durable-dir", str(folder / "durable"), "--max-restarts", "1"],
        )  # fmt: skip
        self._jobs.append(job)
        return job

    def verdict(self, name: str) -> str:
        """What `scalai ledger` proves of a job."""
        store = self.data.folder / name / "store"
        command = [str(SCALAI), "ledger", "verify", name, "--store-dir", str(store)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
        return done.stdout.strip().splitlines()[-1]

    def stop(self) -> None:
        for job in self._jobs:
            job.stop()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(Data(tmp_path))
    yield made
    made.stop()
    if find_mount(made.data.point) is not None:
        subprocess.run([SCALAI, "unmount", "--lazy", made.data.point], timeout=60, check=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that read the files, and that nobody interrupted."""
    jobs = Jobs(Data(tmp_path_factory.mktemp("files")))
    job = jobs.start(FILES, "files")
    try:
        job.finish()
    finally:
        jobs.stop()
    return job


@contextmanager
def forgetting(data: Data) -> Iterator[Callable[[], None]]:
    """Give what has the kernel ask the mount for all bytes again."""
    with open(data.point / "dataset" / "corpus" / "source" / "text.bin", "rb") as file:
        yield lambda: os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def change(job: Job, nproc: int, rounds: int) -> None:
    """Have the job go on on so many ranks, as its round of this number."""
    made = max(job.ledger())
    job.scale(nproc)
    job.wait_until(lambda: job.log.count("event=resized") >= rounds - 1, f"{nproc} ranks")
    job.wait_for_step(made + 2)


def check_same(found: Job, expected: Job) -> None:
    """Compare all steps of two whole jobs."""
    assert list(found.ledger()) == list(range(1, STEPS + 1))
    check_same_steps(found.ledger(), expected.ledger())
    assert found.verified()["is_kept"]


def test_dp_changes_twice_and_the_samples_are_those_of_the_files(jobs: Jobs, files: Job) -> None:
    """Through the mount, whose process stands still for a while, and by the hook."""
    process = jobs.data.mount()
    for way in (MOUNT, HOOK):
        job = jobs.start(way, way)
        job.wait_for_step(4)
        change(job, 1, rounds=2)
        if way == MOUNT:
            with forgetting(jobs.data) as forget:
                stop(process)
                forget()
                wait_until_it_stands(job)
                os.kill(process, signal.SIGCONT)
        change(job, 2, rounds=3)
        assert jobs.verdict(way).startswith("proven: ")
        job.finish()
        check_same(job, files)
        assert len({each.round for each in job.ledger().values()}) == 3


def test_a_job_that_began_with_files_goes_on_by_mount_and_by_hook(jobs: Jobs, files: Job) -> None:
    """They are the same data set. What was changed meanwhile is another one."""
    jobs.data.mount()
    for way, step in ((FILES, 5), (MOUNT, 15), (HOOK, 25)):
        job = jobs.start(way, "job")
        job.wait_for_step(step)
        assert job.leave() == 75, job.log[-6000:]
    content = jobs.data.bin.read_bytes()
    jobs.data.bin.write_bytes(content[::-1])
    changed = jobs.start(HOOK, "job")
    assert changed.exit_code() == 3, changed.log[-6000:]
    assert "content of text=" in changed.log
    jobs.data.bin.write_bytes(content)
    last = jobs.start(HOOK, "job")
    last.finish()
    check_same(last, files)


def test_a_mount_that_is_killed_ends_the_job_with_the_reason_and_it_goes_on_from_its_state(
    jobs: Jobs,
    files: Job,
) -> None:
    process = jobs.data.mount()
    job = jobs.start(MOUNT, "job")
    job.wait_for_step(5)
    with forgetting(jobs.data) as forget:
        os.kill(process, signal.SIGKILL)
        forget()
    assert job.exit_code() == 1, job.log[-6000:]
    assert "text.bin cannot be read: the process of the mount at" in job.log
    assert "Transport endpoint is not connected" in job.log
    jobs.data.mount()
    again = jobs.start(MOUNT, "job")
    again.finish()
    check_same(again, files)


def test_a_mount_that_stands_still_for_ever_is_named_and_the_job_ends(
    jobs: Jobs, files: Job
) -> None:
    process = jobs.data.mount()
    job = jobs.start(MOUNT, "job", settings="hang_s = 60", constants={"resize.stall_s": 2.0})
    job.wait_for_step(5)
    with forgetting(jobs.data) as forget:
        stop(process)
        forget()
        assert job.exit_code() == 1, job.log[-6000:]
        os.kill(process, signal.SIGKILL)
    assert "event=read_waits" in job.log
    assert "does not answer: its process is stopped or hangs" in job.log
    jobs.data.mount()
    again = jobs.start(MOUNT, "job")
    again.finish()
    check_same(again, files)


@pytest.mark.parametrize("way", [HOOK, MOUNT])
def test_a_source_that_is_cut_ends_the_job_with_its_name_until_it_is_put_back(
    way: str, jobs: Jobs, files: Job
) -> None:
    data = jobs.data
    process = data.mount()
    job = jobs.start(way, "job")
    job.wait_for_step(5)
    content = data.bin.read_bytes()
    with forgetting(data) as forget:
        os.truncate(data.bin, len(content) // 2)
        forget()
        assert job.exit_code() in (1, 3), job.log[-6000:]
    told = {
        # Cut between look and read, a worker is killed, and the next round says why it cannot be.
        HOOK: r"text\.bin (is not what was opened|has \d+ bytes, and its index wants)",
        MOUNT: r"text\.bin cannot be read: its source changed",
    }
    assert re.search(told[way], job.log)
    data.bin.write_bytes(content)
    os.kill(process, signal.SIGKILL)
    data.mount()
    again = jobs.start(way, "job")
    again.finish()
    check_same(again, files)


def wait_until_it_stands(job: Job) -> None:
    """Wait until a job makes no steps: its loaders have drawn what they had read ahead."""
    since: dict[int, float] = {}

    def stands() -> bool:
        now = time.monotonic()
        return now - since.setdefault(max(job.ledger()), now) > 3.0

    job.wait_until(stands, "a job that waits for its data")
