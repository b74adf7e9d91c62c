"""The manifests of examples/kubernetes, acted out: their command lines, environment and volumes in
pods of this machine, with the tiny job as the script (``support.pods``)."""

import json
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.agents import TINY_JOB, TINY_MODEL
from support.job_controller import JobState
from support.kueue import Kueue
from support.manifests import AUTOSCALER, BASE, built
from support.pods import Cluster, obstacle
from support.tiny_job import check_steps

no_pods = obstacle()
pytestmark = [
    pytest.mark.fault,
    pytest.mark.recipes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(no_pods is not None, reason=str(no_pods)),
]
ELASTIC = f"""
[degrees]
default = "tp1"
[model]
{TINY_MODEL}
[resize]
settle_s = 0.2
[store]
snapshot_every = 500
[probe]
kind = "none"
"""


class Job(Cluster):
    """The tiny job in the Job of the manifests."""

    def __init__(self, folder: Path, pods: int, **changes: Any) -> None:
        script = [
            str(TINY_JOB), "--steps", "100000", "--step-s", "0.1", "--shares",
            "--metrics", "/durable/metrics.jsonl", "--enough", "/durable/enough",
            "--held", "/durable/held",
        ]  # fmt: skip
        files = {"elastic.toml": ELASTIC}
        super().__init__(folder, built(BASE), script, files=files, **changes)
        self.job["spec"] |= {"parallelism": pods, "completions": pods}

    def lines(self) -> list[dict[str, Any]]:
        """What the job has written, a line a step."""
        path = self.durable / "metrics.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for_world(self, world: int, **facts: Any) -> int:
        """Wait for ten steps of so many workers behind now. Returns the newest step."""
        before = len(self.lines())

        def made() -> list[dict[str, Any]]:
            return [line for line in self.lines()[before:] if line["world"] == world]

        self.wait_until(lambda: len(made()) >= 10, f"ten steps on {world} pods", **facts)
        return int(made()[-1]["step"])

    def let_end(self) -> None:
        (self.durable / "enough").touch()


@contextmanager
def running(folder: Path, pods: int, **changes: Any) -> Iterator[Job]:
    with Job(folder, pods, **changes) as job:
        job.wait_for_world(pods)
        yield job


def test_an_evicted_pod_is_drained_and_replaced_and_the_training_completes_the_job(
    tmp_path: Path,
) -> None:
    with running(tmp_path, 2) as job:
        evicted = job.pod(1)
        job.evict(evicted)
        assert job.wait_for_end(evicted) == 76, job.logs()
        job.wait_for_world(2)
        assert job.pod(1).name != evicted.name and job.state.failed == 0
        steps = check_steps(job.lines())
        assert steps == list(range(1, len(steps) + 1)), "no step is lost"
        job.let_end()
        job.wait_until(lambda: not job.living(), "all pods end")
        assert job.state.result == "Complete", job.logs()
        assert all(pod.code == 0 for pod in job.pods if pod is not evicted)
        job.state = JobState(job.job)  # the Job is created anew
        job.wait_until(lambda: job.state.result, "it ends")
        assert job.state.result == "Failed" and 3 in {pod.code for pod in job.pods[-2:]}


def test_the_job_is_scaled_from_within_a_pod(tmp_path: Path) -> None:
    with running(tmp_path, 2) as job:
        for pods in (3, 1):
            before = job.living()
            done = job.execute(
                job.pod(0), "scalai", "scale", "--kubernetes", "gpt", "--nnodes", str(pods)
            )
            assert done.returncode == 0, done.stderr
            assert f"-> {pods} pods" in done.stdout
            job.wait_for_world(pods)
        gone = [pod for pod in before if pod.index > 0]
        assert [job.wait_for_end(pod) for pod in gone] == [76, 76], job.logs()
        assert job.state.failed == 0 and [pod.index for pod in job.living()] == [0]
        steps = check_steps(job.lines())
        assert steps == list(range(1, len(steps) + 1)), "no step is lost"


@pytest.mark.parametrize("what", ["devices", "quota"])
def test_an_autoscaler_in_a_pod_takes_lost_devices_and_gives_new_ones(
    tmp_path: Path, what: str
) -> None:
    """By its manifest's command line; it owns the jobs by a lease. The quota is Kueue's."""
    with running(tmp_path, 2) as job:
        first, jobs, made = job.pod(0), job.durable / "jobs", built(AUTOSCALER)
        jobs.mkdir()
        (jobs / "token").write_text(first.environment["SCALAI_JOB_TOKEN"])
        file = made["ConfigMap", "autoscale-jobs"]["data"]["gpt.toml"]
        (jobs / "gpt.toml").write_text(file.replace("/tokens/gpt", "/durable/jobs/token"))
        kueue = Kueue(nominal=16)

        def have(pods: int) -> None:
            if what == "devices":
                (jobs / "devices").write_text(f"{pods}x1\n")
            else:
                kueue.nominal = 8 * pods

        (jobs / "devices").write_text("4x1\n")
        if what == "quota":
            job.api.kueue = kueue
            kueue.take("gpt", job.job)
        have(1)
        (container,) = made["Deployment", "autoscale"]["spec"]["template"]["spec"]["containers"]
        words = [*container["command"], *container["args"], "--every=2"]
        command = shlex.join(words).replace("/etc/scalai", "/durable/jobs")
        script = (
            f"{command} & while [ ! -e /durable/jobs/over ]; do sleep 1; done; kill $!; wait $!"
        )
        with ThreadPoolExecutor(1) as aside:  # the pods go and come meanwhile
            done = aside.submit(job.execute, first, "sh", "-c", script, deadline_s=600)
            try:
                job.wait_for_world(1, deadline_s=300)
                assert [pod.index for pod in job.living()] == [0] and job.state.failed == 0
                have(2)
                job.wait_for_world(2, deadline_s=300)
            finally:
                (jobs / "over").touch()
            job.wait_until(done.done, "it returns")
        assert done.result().returncode == 0, done.result().stderr
        said = done.result().stdout
        assert "gpt 2 -> 1" in said and "gpt 1 -> 2" in said, said
        assert any("autoscale" in name for name in job.api.leases), job.api.leases
        steps = check_steps(job.lines())
        assert steps == list(range(1, len(steps) + 1)), "no step is lost"


def test_a_pod_of_a_lost_node_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, 3) as job:
        lost = job.pod(1)
        job.lose(lost)
        assert job.wait_for_end(lost) == 137
        job.wait_for_world(3)
        assert job.state.failed == 0
        check_steps(job.lines())


@pytest.mark.parametrize("how", ["deleted", "lost"])
def test_without_the_coordinators_pod_the_others_go_on_and_its_successor_joins(
    tmp_path: Path, how: str
) -> None:
    with running(tmp_path, 2) as job:
        first = job.pod(0)
        (job.lose if how == "lost" else job.delete)(first)
        code = job.wait_for_end(first)
        assert code == (137 if how == "lost" else 76), job.logs()
        job.wait_until(lambda: "event=adopted" in job.text(), "another pod has the coordinator")
        assert ("event=handed_over" in job.text()) == (how == "deleted"), "it waits for no minute"
        job.wait_for_world(2)
        assert job.pod(0).name != first.name and job.state.failed == 0
        steps = check_steps(job.lines())
        # The pod that died may have made this one without having written its line.
        rescued = re.findall(r"event=rescued committed=\d+ step=(\d+)", job.text())
        assert {*steps, *map(int, rescued)} == set(range(1, steps[-1] + 1)), "no step is lost"
        assert len(steps) == len(set(steps)), "none is made twice"


def test_pods_that_are_all_evicted_resume_from_the_durable_volume(tmp_path: Path) -> None:
    with running(tmp_path, 2) as job:
        before = job.living()
        for pod in before:
            job.evict(pod)
        assert [job.wait_for_end(pod) for pod in before] == [75, 75], job.logs()
        saved = len(job.lines())
        job.wait_for_world(2)
        steps = check_steps(job.lines())
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > saved
        assert job.state.failed == 0, job.logs()


def test_wrong_usage_fails_the_job_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, 1, flags={"--nnodes": "4:2"}) as job:
        job.wait_until(lambda: job.state.result, "the Job ends")
        assert (job.state.result, len(job.pods), job.pods[0].code) == ("Failed", 1, 2)


def test_the_base_trains_as_it_is(tmp_path: Path) -> None:
    """With its own script and configuration: a read-only root takes what frameworks write."""
    with Cluster(tmp_path, built(BASE)) as job:
        job.job["spec"] |= {"parallelism": 2, "completions": 2}
        job.wait_until(lambda: re.search(r"event=started .*TP1·PP2·DP1", job.text()), "2")
        job.job["spec"] |= {"parallelism": 1, "completions": 1}
        removed = job.pod(1)
        job.wait_until(lambda: re.search(r"event=resized .*TP1·PP1·DP1", job.text()), "1")
        assert job.wait_for_end(removed) == 76, job.logs()
        assert job.state.failed == 0
