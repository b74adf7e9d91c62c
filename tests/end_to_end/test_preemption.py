"""A host is told that it will be taken away: it drains if there is time, and gives away first what
only it holds if there is none."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.agents import Agents, tiny_agents
from support.metadata_server import Said, metadata_server
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

SHARDS = '3 = "tp3"\n2 = "tp2"\n1 = "tp1"'
EVERY_7 = {"store": "snapshot_every = 7"}


def hosts_abc(folder: Path, **given: Any) -> Any:
    return tiny_agents(folder, SHARDS, nodes="1:3", slots=1, **given)


def workers(agents: Agents) -> set[str]:
    """Return the hosts that have workers since the last change."""
    reports = agents.resizes()
    return {h for h, n in reports[-1]["workers"].items() if n} if reports else set()


def log(agents: Agents, host: str) -> str:
    return (agents.folder / f"{host}.log").read_text()


@pytest.mark.turns
def test_what_only_a_host_holds_leaves_it_where_a_drain_takes_too_long(tmp_path: Path) -> None:
    """A worker of it hangs in the middle of an update, so that no drain can end; nobody keeps
    replicas before the notice comes."""
    notice = tmp_path / "notice"
    flags = ("--replicas", "0")
    with hosts_abc(tmp_path, settings=EVERY_7, flags=flags) as agents:
        agents.start("a")
        agents.start("b")
        agents.start("c", "--preemption", f"file:{notice}")
        agents.wait_until(lambda: workers(agents) == {*"abc"}, "all train")
        agents.wait_for_step(agents.lines()[-1]["step"] + 16)
        (tmp_path / "tear-2").touch()
        time.sleep(20.0)  # a long step, which with a snapshot takes longer than what is left
        notice.write_text("24")
        agents.wait_until(lambda: "event=evacuated" in agents.text(), "it has given what it held")
        assert "that is too long" in agents.text()
        agents.kill("c", with_its_memory=True)
        (tmp_path / "tear-2").unlink()
        agents.wait_until(lambda: workers(agents) == {*"ab"}, "the others go on")
        report = agents.resizes()[-1]
        assert report["step"] > 0 and report["step"] % 7 == 0, report
        assert report["recovery"]["state"]["origin"] == "snapshot", report
        agents.wait_for_step(report["step"] + 15)
        check_steps(agents.lines())


def test_sigusr1_to_every_process_of_a_host_is_a_drain(tmp_path: Path) -> None:
    """As Slurm's ``--signal=USR1@300`` sends it; a SIGTERM behind it does not stop the drain."""
    flags = ("--durable-dir", str(tmp_path / "disk"))
    with tiny_agents(tmp_path, '1 = "tp1"', slots=1, nodes="1", flags=flags) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        for process in agents.family():
            process.send_signal(signal.SIGUSR1)
        agents.wait_until(lambda: "event=signal SIGUSR1" in log(agents, "a"), "it is heard")
        os.kill(agents.agent_pid("a"), signal.SIGTERM)
        assert agents.exit_code("a") == 75, agents.logs()
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.campaign
def test_a_clouds_notice_that_is_withdrawn_keeps_the_host_and_one_that_stands_drains_it(
    tmp_path: Path,
) -> None:
    """While the next workers build, the training goes on, and the notice is taken back."""
    preempted, google = "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
    with metadata_server() as server, tiny_agents(tmp_path, SHARDS, slots=1) as agents:
        agents.start("a")
        agents.start("b", "--preemption", f"signal,gcp@{server.address}")
        agents.wait_until(lambda: workers(agents) == {*"ab"}, "both train")
        server.says[preempted] = Said(text="no answer at all", headers=google)
        agents.wait_until(lambda: "gives no answer" in log(agents, "b"), "it is said")
        rank = tmp_path / "tear-1"
        rank.touch()  # no step ends, so the stop is not reached
        server.says[preempted] = Said(text="TRUE", headers=google)
        agents.wait_until(lambda: "event=notice host=b" in agents.text(), "it is heard")
        server.says[preempted] = Said(text="FALSE", headers=google)
        agents.wait_until(lambda: "event=staying host=b" in agents.text(), "it is taken back")
        rank.unlink()
        agents.wait_for_step(agents.lines()[-1]["step"] + 20, world=2)
        assert agents.exit_codes() == {"a": None, "b": None}
        server.says[preempted] = Said(text="TRUE", headers=google)
        agents.wait_until(lambda: workers(agents) == {"a"}, "it has drained")
        assert agents.exit_code("b") == 0
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1))
