"""The scripts of examples/slurm, on a real Slurm: what its users lose with a node, at the end of
the time, by a drain. ``make recipes`` runs them."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scalai.launch.config.constants import TEST_VARIABLE
from support.agents import TINY_JOB, TINY_MODEL
from support.slurm_cluster import SlurmCluster, obstacle
from support.tiny_job import check_steps

no_slurm = obstacle()
pytestmark = [
    pytest.mark.recipes,
    pytest.mark.slurm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(no_slurm is not None, reason=f"Slurm: {no_slurm}"),
]

ROOT = Path(__file__).parents[2]
ALLOCATION, ARRAY = ROOT / "examples/slurm/allocation.sh", ROOT / "examples/slurm/array.sh"
SAVED = "event=exit code=75 reason='saved to the durable directory"


class Submitted(SlurmCluster):
    """A cluster, and a tiny job that a script of examples/slurm runs on it: one rank a host.

    Args:
        folder: For all of both.
        drain_s: The job's ``DRAIN_S``; that long before its end, and some seconds, it hears of it.
        flags: More flags of ``scalai-run``.
        more: More lines of ``slurm.conf``.
    """

    def __init__(
        self, folder: Path, drain_s: int = 60, flags: str = "", more: Sequence[str] = ()
    ) -> None:
        super().__init__(folder / "slurm", 3, more)
        self.work = folder / "work"
        self.work.mkdir()
        worlds = "".join(f'{world} = "tp1"\n' for world in (1, 2, 3))
        (self.work / "elastic.toml").write_text(f"[degrees]\n{worlds}[model]\n{TINY_MODEL}\n")
        words = [TINY_JOB, "--steps", 100_000, "--step-s", 0.3, "--shares"]
        words += ["--metrics", self.metrics, "--enough", self.work / "enough"]
        words += ["--elastic", self.work / "elastic.toml"]
        settings = {
            "DURABLE": self.work / "durable", "TOKEN": self.work / "token", "WORKERS": 1,
            "MOST_NODES": 3, "MOST_HOSTS": 3, "DRAIN_S": drain_s, "FLAGS": f"--settle-s 1 {flags}",
            "TRAIN": " ".join(map(str, words)),
        }  # fmt: skip
        self._settings = {
            **{name: str(value) for name, value in settings.items()},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            TEST_VARIABLE: json.dumps({"preemption.interval_s": 0.1}),
        }  # fmt: skip

    @property
    def metrics(self) -> Path:
        return self.work / "metrics.jsonl"

    def start(self, script: Path, *flags: str) -> str:
        """Submit a script as it is. Returns the job's id."""
        return self.submit(script, "--chdir", str(self.work), *flags, more=self._settings)

    def lines(self) -> list[dict[str, Any]]:
        """Return the steps made so far, in order."""
        text = self.metrics.read_text() if self.metrics.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def wait_for_world(self, world: int) -> int:
        """Wait until the newest step was made by ``world`` ranks. Returns that step."""
        self.wait_until(
            lambda: bool(found := self.lines()) and found[-1]["world"] == world,
            f"a step on {world} ranks",
        )
        return int(self.lines()[-1]["step"])

    def wait_for_progress(self, job_state: Mapping[str, str]) -> None:
        """Wait until twenty steps more were made; then jobs are in these states."""
        goal = len(self.lines()) + 20
        self.wait_until(lambda: len(self.lines()) >= goal, "the job goes on")
        assert {job: self.job_state(job) for job in job_state} == job_state

    def wait_for_saves(self, count: int) -> None:
        """Wait until the job has been stopped and saved so many times."""
        self.wait_until(lambda: self.text().count(SAVED) >= count, f"{count} saves")

    def queue(self) -> dict[str, str]:
        """Return the states of jobs and tasks that have not ended, by id."""
        printed = self.run("squeue", "--array", "--noheader", "--format=%i %T").split()
        return dict(zip(printed[::2], printed[1::2], strict=True))

    def let_end(self) -> None:
        """Have the job make its last step, and wait until nothing is in the queue."""
        (self.work / "enough").touch()
        self.wait_until(lambda: not self.queue(), "the queue is empty")

    def end_soon(self, job: str) -> None:
        """Leave a job or task that runs one to two minutes of time."""
        hours, minutes, _ = self.field("job", job, "RunTime").split(":")
        limit = 60 * int(hours) + int(minutes) + 2
        self.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")

    def begin_now(self, job: str) -> None:
        """Do not wait for the two minutes after which Slurm begins a job again.

        A node refuses to begin it in the second in which it has ended the job before."""
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def text(self) -> str:
        """Return all that the job has printed."""
        return "\n".join(path.read_text() for path in sorted(self.work.glob("*.log")))

    def logs(self) -> str:
        return f"{self.queue()}\n{super().logs()}\n--- the job\n{self.text()[-20_000:]}"


@contextmanager
def submitted(folder: Path, **settings: Any) -> Iterator[Submitted]:
    with Submitted(folder, **settings) as cluster:
        yield cluster


# ------------------------------------------------------------------ one allocation


@pytest.mark.fault
def test_an_allocation_outlives_a_node_and_gives_one_back_that_is_drained(tmp_path: Path) -> None:
    """Slurm finds a dead node after the job has gone on without it, and ends nothing."""
    with submitted(tmp_path) as cluster:
        job = cluster.start(ALLOCATION, "--nodes=2-3", "--time=30")
        cluster.wait_for_world(3)
        cluster.kill_node("n3")
        cluster.wait_for_world(2)
        cluster.wait_until(lambda: "DOWN" in cluster.node_state("n3"), "n3 is down")
        cluster.wait_for_progress({job: "RUNNING"})
        cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
        cluster.wait_for_world(1)
        assert "source='slurm drain of n2'" in cluster.text()
        cluster.wait_for_progress({job: "RUNNING"})
        cluster.let_end()
        assert cluster.job_state(job) == "COMPLETED", cluster.logs()
        check_steps(cluster.lines())


@pytest.mark.fault
def test_an_allocation_without_its_first_node_goes_on_and_is_requeued(tmp_path: Path) -> None:
    """With this node its script, srun and the coordinator are gone."""
    with submitted(tmp_path) as cluster:
        job = cluster.start(ALLOCATION, "--nodes=2-3", "--time=30")
        cluster.wait_for_world(3)
        cluster.kill_node(cluster.field("job", job, "BatchHost"))
        cluster.wait_for_world(2)
        cluster.wait_for_progress({job: "RUNNING"})
        cluster.run("scancel", "--signal=USR1", job)
        cluster.wait_for_saves(1)
        cluster.wait_until(lambda: cluster.job_state(job) == "PENDING", "it is in the queue")
        assert cluster.field("job", job, "Restarts") == "1"
        check_steps(cluster.lines())


@pytest.mark.fault
def test_an_allocation_is_saved_before_its_time_is_over_and_begins_again_once(
    tmp_path: Path,
) -> None:
    """By the signal that it asks for, also where Slurm requeues it by itself; cancelled, it is
    saved too."""
    more = ["RequeueExit=70-75"]
    with submitted(tmp_path, flags="--preemption signal", more=more) as cluster:
        job = cluster.start(ALLOCATION, "--nodes=2", "--time=30", "--signal=USR1@60")
        cluster.wait_for_world(2)
        cluster.end_soon(job)
        cluster.wait_for_saves(1)
        cluster.wait_until(lambda: cluster.job_state(job) == "PENDING", "it is in the queue")
        before = len(cluster.lines())
        cluster.begin_now(job)
        cluster.wait_until(lambda: len(cluster.lines()) > before, "it goes on")
        cluster.wait_for_progress({job: "RUNNING"})
        assert cluster.field("job", job, "Restarts") == "1"
        cluster.run("scancel", job)
        cluster.wait_until(lambda: cluster.job_state(job) == "CANCELLED", "it is cancelled")
        cluster.wait_for_saves(2)
        steps = check_steps(cluster.lines())
        assert steps == list(range(1, len(steps) + 1)), "no step was lost or made twice"


# ------------------------------------------------------------------ an array


@pytest.mark.fault
def test_an_array_grows_and_shrinks_and_the_next_task_takes_a_lost_ones_place(
    tmp_path: Path,
) -> None:
    """The host that is lost is the coordinator's."""
    with submitted(tmp_path) as cluster:
        array = cluster.start(ARRAY, "--array=0-4%1", "--time=30")
        cluster.wait_for_world(1)
        _throttle(cluster, array, 3)
        cluster.wait_for_world(3)
        _throttle(cluster, array, 2)
        # Slurm 22.05 sends the signal to this task, and then says that it could not, or tries on.
        signalling = ("timeout", "20", "scancel", "--signal=USR1", f"{array}_1")
        cluster.run(*signalling, check=False)
        cluster.wait_for_world(2)
        cluster.wait_until(lambda: f"{array}_1" not in cluster.queue(), "task 1 has left")
        assert cluster.queue()[f"{array}_3"] == "PENDING", "it would take the place of task 1"
        cluster.kill_node(cluster.field("job", f"{array}_0", "NodeList"))
        cluster.wait_until(
            lambda: cluster.queue().get(f"{array}_3") == "RUNNING", "task 3 takes its place"
        )
        cluster.wait_until(
            lambda: cluster.lines()[-1]["world"] == 2 and "term=2" in cluster.text(),
            "the job goes on, by another coordinator",
        )
        cluster.wait_for_progress({f"{array}_2": "RUNNING", f"{array}_3": "RUNNING"})
        cluster.let_end()
        check_steps(cluster.lines())
        assert not list(cluster.work.glob(f"*{array}_4.log")), "the last task had nothing to do"


@pytest.mark.fault
def test_the_next_task_of_an_array_goes_on_where_the_time_of_the_last_one_was_over(
    tmp_path: Path,
) -> None:
    """By the notice of ``--preemption slurm``, before any signal. Cancelled, it goes on in the
    next array of its name."""
    with submitted(tmp_path, drain_s=110) as cluster:
        array = cluster.start(ARRAY, "--array=0-2%1", "--time=30", "--signal=USR1@1")
        chained = cluster.start(ARRAY, "--array=0-1%1", "--time=30", "--signal=USR1@1")
        cluster.wait_for_world(1)
        cluster.end_soon(f"{array}_0")
        cluster.wait_for_saves(1)
        assert f"source='slurm end of job {array}_0'" in cluster.text()
        cluster.wait_for_progress({f"{array}_1": "RUNNING"})
        waiting = {id for id, state in cluster.queue().items() if state == "PENDING"}
        assert waiting == {f"{array}_2", f"{chained}_0", f"{chained}_1"}
        cluster.run("scancel", array)
        cluster.wait_for_saves(2)
        cluster.wait_for_progress({f"{chained}_0": "RUNNING"})
        cluster.let_end()
        steps = check_steps(cluster.lines())
        assert steps == list(range(1, len(steps) + 1)), "no step was lost or made twice"


@pytest.mark.fault
def test_an_autoscaler_takes_a_lost_node_from_an_array_and_gives_a_new_one(tmp_path: Path) -> None:
    """By the array's throttle: its last task drains, and none takes its place until then."""
    with submitted(tmp_path) as cluster:
        array = cluster.start(ARRAY, "--array=0-4%3", "--time=30")
        cluster.wait_for_world(3)
        jobs, devices = tmp_path / "jobs", tmp_path / "devices"
        jobs.mkdir(mode=0o700)
        (jobs / "gpt.toml").write_text(
            f'devices = [1, 3]\nlease = "file:{cluster.work}/durable/gpt.lease"\n'
            f'token_file = "{cluster.work}/token"\n'
        )
        devices.write_text("2x1\n")
        words = [sys.executable, "-m", "scalai", "autoscale", "--jobs", str(jobs), "--slurm",
                 "--devices", str(devices)]  # fmt: skip
        said = cluster.run(*words, "--dry-run", "--once")
        assert "gpt 3 -> 2" in said, said
        assert cluster.lines()[-1]["world"] == 3
        with cluster.beside(*words, "--every", "2"):
            cluster.wait_for_world(2)
            cluster.wait_until(lambda: f"{array}_2" not in cluster.queue(), "task 2 has left")
            assert cluster.queue()[f"{array}_3"] == "PENDING", "it would take the place of task 2"
            cluster.wait_for_progress({f"{array}_0": "RUNNING", f"{array}_1": "RUNNING"})
            devices.write_text("3x1\n")
            cluster.wait_for_world(3)
        cluster.wait_for_progress({f"{array}_3": "RUNNING"})
        cluster.let_end()
        steps = check_steps(cluster.lines())
        assert steps == list(range(1, len(steps) + 1)), "no step is lost"


def _throttle(cluster: SlurmCluster, array: str, tasks: int) -> None:
    cluster.run("scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={tasks}")


# ------------------------------------------------------------------ several tasks on a node

TWO_TASKS = """\
#!/bin/bash
export SCALAI_JOB_TOKEN=0123456789abcdef0123456789abcdef
srun scalai-run --nnodes 2 --nproc-per-node 1 --coordinator slurm --job two $FLAGS $TRAIN
"""


def test_each_task_of_a_node_joins_as_a_host_of_its_own(tmp_path: Path) -> None:
    with submitted(tmp_path) as cluster:
        script = tmp_path / "two.sh"
        script.write_text(TWO_TASKS)
        job = cluster.start(script, "--nodes=1", "--ntasks=2", "--output=two.log")
        cluster.wait_for_world(2)
        names = [f"event=join host={name} " for name in ("n1", "n1-1")]
        assert all(name in cluster.text() for name in names), cluster.logs()
        cluster.let_end()
        assert cluster.job_state(job) == "COMPLETED", cluster.logs()


# ------------------------------------------------------------------ what cannot begin


@pytest.mark.fault
@pytest.mark.parametrize("script", [ALLOCATION, ARRAY], ids=["allocation", "array"])
def test_a_job_that_is_refused_leaves_nothing_in_the_queue(script: Path, tmp_path: Path) -> None:
    """A whole allocation does not stand idle until its time is over, nor does each task of an
    array try in its turn."""
    with submitted(tmp_path, flags="--no-such-flag") as cluster:
        more = ("--nodes=2-3",) if script == ALLOCATION else ("--array=0-9%1",)
        cluster.start(script, *more, "--time=30")
        cluster.wait_until(lambda: "--no-such-flag" in cluster.text(), "it says why")
        cluster.wait_until(lambda: not cluster.queue(), "the queue is empty")
        assert len(list(cluster.work.glob("*.log"))) <= 2
