"""Generations come to the durable directory while the job trains: it goes on from there where more
is lost than its hosts keep for each other, in the same job or in a later one.

Each worker of the tiny job has a shard that no other has, and no host keeps another's.
"""

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from scalai.launch.agent.durable import look
from support.agents import Agents, tiny_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

SHARDS = '3 = "tp3"\n2 = "tp2"\n1 = "tp1"'
STORE = "snapshot_every = 7\nreplicas = 0\ndurable_dir = '{disk}'\ndurable_every_s = 1"


def hosts_ab(folder: Path, nodes: str = "1:2", **given: Any) -> Any:
    settings = {"store": STORE.format(disk=folder / "disk")}
    return tiny_agents(folder, SHARDS, nodes=nodes, slots=1, settings=settings, **given)


def train(agents: Agents, hosts: str = "ab", step: int = 8) -> None:
    for host in hosts:
        agents.start(host)
    agents.wait_until(lambda: bool(agents.resizes()), "every rank has stepped")
    agents.wait_for_step(step)


def archived(agents: Agents, count: int = 1) -> list[int]:
    """Return the generations that came to the disk, once there are so many."""

    def found() -> list[int]:
        texts = "".join(path.read_text() for path in sorted(agents.folder.glob("*.log")))
        return [int(number) for number in re.findall(r"event=archived generation=(\d+)", texts)]

    agents.wait_until(lambda: len(found()) >= count, f"{count} generations are archived")
    return found()


def saved(folder: Path) -> dict[int, list[str]]:
    """Return the hosts whose parts are shown, by generation."""
    seen = look(next((folder / "disk").iterdir()))
    assert not seen.damaged
    return {n: sorted(part.host for _, part in parts) for n, parts in seen.parts.items()}


@pytest.mark.campaign
def test_a_job_that_loses_more_than_it_keeps_goes_back_to_the_disk_unasked(tmp_path: Path) -> None:
    with hosts_ab(tmp_path) as agents:
        train(agents)
        archived(agents, 3)
        agents.kill("b", with_its_memory=True)
        agents.wait_until(lambda: len(agents.resizes()) > 1, "the job goes on")
        report = agents.resizes()[-1]
        assert report["generation"] in archived(agents), report
        agents.wait_for_step(report["step"] + 16)
        check_steps(agents.lines())
        assert "event=exit" not in agents.text()


def test_after_all_hosts_died_others_go_on_from_the_newest_that_is_shown(tmp_path: Path) -> None:
    with hosts_ab(tmp_path, flags=("--max-restarts", "0")) as agents:
        train(agents)
        archived(agents, 4)
        for host in "ab":
            agents.kill(host, with_its_memory=True)
        agents.kill_coordinator()
        kept = saved(tmp_path)
        assert 1 <= len(kept) <= 3, "two are kept, and one may just have come"
        assert all(hosts == ["a", "b"] for hosts in kept.values()), kept
        shutil.rmtree(agents.reports)  # another coordinator numbers its own anew
        agents.start("c")
        agents.wait_until(lambda: bool(agents.resizes()), "the job goes on")
        report = agents.resizes()[-1]
        assert report["generation"] == max(kept) and report["step"] % 7 == 0, (report, kept)
        agents.wait_for_step(report["step"] + 8)
        check_steps(agents.lines())


@pytest.mark.campaign
@pytest.mark.turns
def test_a_disk_that_refuses_ends_nothing(tmp_path: Path) -> None:
    with hosts_ab(tmp_path) as agents:
        train(agents)
        archived(agents)
        (job,) = (tmp_path / "disk").iterdir()
        job.rename(tmp_path / "away")
        job.write_text("no folder any more")
        agents.wait_until(lambda: "event=not_archived host=" in agents.text(), "it is said")
        step = agents.lines()[-1]["step"]
        agents.wait_for_step(step + 20)
        job.unlink()
        (tmp_path / "away").rename(job)
        before = len(archived(agents))
        archived(agents, before + 1)


@pytest.mark.campaign
def test_an_agent_that_stands_still_in_a_copy_shows_nothing(tmp_path: Path) -> None:
    """SIGSTOP while generations come to the disk: what is shown stays whole."""
    with hosts_ab(tmp_path) as agents:
        train(agents)
        archived(agents, 2)
        for _ in range(3):
            os.kill(agents.agent_pid("b"), signal.SIGSTOP)
            time.sleep(1.0)
            assert all(hosts == ["a", "b"] for hosts in saved(tmp_path).values())
            os.kill(agents.agent_pid("b"), signal.SIGCONT)
            archived(agents, len(archived(agents)) + 1)
