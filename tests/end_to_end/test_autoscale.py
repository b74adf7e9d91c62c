"""``scalai autoscale`` over live jobs: it gives and takes devices; nothing happens without it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scalai.launch.config.endpoint import read_holder
from support.agents import DEADLINE_S, Agents, tiny_agents
from support.autoscaled import Shared, through_all
from support.tiny_job import check_steps
from support.waiting import wait_until

DEGREES = '2 = "tp1"\n1 = "tp1"'


def scaler(folder: Path, name: str, *more: str) -> "subprocess.Popen[bytes]":
    """The command, over the jobs in a folder; what it says is in a file of this name."""
    words = [sys.executable, "-m", "scalai", "autoscale", "--jobs", str(folder / "jobs")]
    with (folder / "autoscale.log").open("a") as log, (folder / name).open("w") as output:
        return subprocess.Popen(
            [*words, "--devices", str(folder / "devices"), "--json", *more],
            stdout=output, stderr=log,
        )  # fmt: skip


def said(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def describe(folder: Path, jobs: Mapping[str, Agents]) -> None:
    (folder / "jobs").mkdir(mode=0o700)
    for name, agents in jobs.items():
        text = f'job = "tiny"\nstore_dir = "{agents.store}"\ndevices = [1, 2]\n'
        (folder / "jobs" / f"{name}.toml").write_text(text)


@pytest.mark.fault
@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_lost_devices_are_taken_and_nothing_happens_without_the_autoscaler(tmp_path: Path) -> None:
    """A second one is refused while the first one lives; behind a dead one another goes on. A job
    whose coordinator is silent keeps what it has, and others give theirs."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    devices = tmp_path / "devices"
    devices.write_text("4\n")
    with (
        tiny_agents(folders[0], DEGREES, nodes="1") as a,
        tiny_agents(folders[1], DEGREES, nodes="1") as b,
    ):
        jobs = {"a": a, "b": b}
        for agents in jobs.values():
            agents.start("h")
        for agents in jobs.values():
            agents.wait_for_step(2, world=2)
        describe(tmp_path, jobs)
        first, log = scaler(tmp_path, "first"), tmp_path / "autoscale.log"
        try:
            wait_until(lambda: said(tmp_path, "first"), "a decision", DEADLINE_S)
            told = said(tmp_path, "first")[0]
            assert told["devices"] == 4 and set(told["jobs"]) == {"a", "b"}
            other = scaler(tmp_path, "other")
            assert other.wait(DEADLINE_S) == 3
            assert "owns these jobs" in log.read_text()
            holder = read_holder(a.store / a.job)
            assert holder is not None
            os.kill(holder.pid, signal.SIGSTOP)
            wait_until(lambda: "keeps its 2 devices" in log.read_text(), "silence", DEADLINE_S)
            devices.write_text("3\n")
            b.wait_for_all(1)
            os.kill(holder.pid, signal.SIGCONT)
            wait_until(lambda: "problem_over what='job a'" in log.read_text(), "it is heard again",
                       DEADLINE_S)  # fmt: skip
            assert a.lines()[-1]["world"] == 2
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait(10)
        for agents in jobs.values():
            agents.wait_for_step(agents.lines()[-1]["step"] + 5)
        devices.write_text("2\n")
        last = scaler(tmp_path, "last", "--once")
        assert last.wait(DEADLINE_S) == 0, (tmp_path / "autoscale.log").read_text()
        assert said(tmp_path, "last")[-1]["devices"] == 2
        for agents in jobs.values():
            agents.wait_for_all(1)
            check_steps(agents.lines())


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.timeout(1500)
def test_jobs_of_both_frameworks_share_devices_and_train_as_if_they_were_alone(
    tmp_path: Path,
) -> None:
    """Four devices, one lost, one back, and a fourth job: after each event all devices are used,
    never more are given, and every loss is that of an uninterrupted run."""
    shared = Shared(tmp_path)
    try:
        through_all(shared, stay=20)
    finally:
        shared.close()
    told = shared.told()
    assert all(sum(j["after"] for j in each["jobs"].values()) <= each["devices"] for each in told)
    sizes = {name: [sum(r["workers"].values()) for r in a.resizes()]
             for name, a in shared.jobs.items()}  # fmt: skip
    assert sizes["megatron-c"] == sizes["megatron-d"] == [1], sizes
    assert sorted(sizes["megatron-a"] + sizes["deepspeed-b"]) == [1, 1, 1, 2, 2, 2], sizes
    for name, agents in shared.jobs.items():
        assert not any(report.get("steps_lost") for report in agents.resizes())
        check_losses(shared, name)


def check_losses(shared: Shared, name: str) -> None:
    """Compare a job's losses with those of one process outside of any launcher."""
    steps = shared.steps(name)
    environment = {
        **os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_BUILD_OPS": "0",
    }  # fmt: skip
    command = [*shared.command(name, is_paced=False), "--steps", str(steps)]
    subprocess.run([sys.executable, *command], env=environment, check=True, timeout=280)
    found, alone = (losses(shared.folder / name / kind) for kind in ("metrics", "alone"))
    assert list(found) == list(range(1, steps + 1))
    assert found == {step: pytest.approx(alone[step], rel=1e-5) for step in found}


def losses(folder: Path) -> Mapping[int, float]:
    lines = map(json.loads, (folder / "loss.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}
