"""Snapshots are written while the job trains, and each host's are kept by another one, too: the job
goes on from the state of one step, whoever dies or hangs. The tiny job changes every number of its
state with every step."""

import re
from pathlib import Path
from typing import Any

import pytest

from support.agents import Agents, tiny_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

TWO_SHARDS, REPLICAS = '2 = "tp2"\n1 = "tp1"', '2 = "tp1"\n1 = "tp1"'
RESTARTS = ("--max-restarts", "2")


def snapshots(agents: Agents) -> list[str]:
    """Return the lines of the log about snapshots that were committed on the way."""
    return [line for line in agents.logs().splitlines() if "event=snapshot committed=" in line]


def test_a_job_goes_on_from_a_snapshot_that_was_written_beside_its_training(
    tmp_path: Path,
) -> None:
    settings = {"store": "snapshot_every = 3\nemergency = false"}
    flags = RESTARTS
    with tiny_agents(tmp_path, TWO_SHARDS, nodes="1", settings=settings, flags=flags) as agents:
        agents.start("a")
        agents.wait_until(lambda: len(snapshots(agents)) > 3, "snapshots are made")
        agents.kill_worker(1)
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the job goes on")
        report = agents.resizes()[-1]
        assert report["step"] >= 3 and report["step"] % 3 == 0, report
        agents.wait_for_step(report["step"] + 3)
        check_steps(agents.lines())
        assert "event=no_async_snapshot" not in agents.logs(), agents.logs()
        assert "stall_s=" in snapshots(agents)[-1] and "copy_s=" in snapshots(agents)[-1]


@pytest.mark.turns
def test_a_job_that_chooses_how_often_learns_it_and_keeps_it_through_a_failure(
    tmp_path: Path,
) -> None:
    """It fails so often, as is assumed, that snapshots are as near as they may be: 10 s."""
    store = 'snapshot_every = "auto"\nemergency = false'
    given: dict[str, Any] = {
        "settings": {"store": store, "resize": "silent_s = 3"},
        "constants": {"store.mtbf_hours_per_worker": 0.001}, "flags": RESTARTS,
    }  # fmt: skip
    with tiny_agents(tmp_path, TWO_SHARDS, nodes="1", **given) as agents:

        def found(pattern: str) -> list[list[int]]:
            return [[int(n) for n in each.groups()] for each in re.finditer(pattern, agents.text())]

        def made(least: int) -> list[int]:
            steps = found(r"event=snapshot committed=\d+ step=(\d+)")
            return [step for (step,) in steps if step >= least]

        agents.start("a")
        agents.wait_until(lambda: bool(found(r"event=spaced .*begin=(\d+)")), "workers are told")
        assert made(1)[0] == 50 and "event=snapshot_every k=50 is assumed" in agents.text()
        begin, every = found(r"event=spaced .*begin=(\d+) every=(\d+)")[0]
        assert every > 75, agents.logs()
        agents.wait_until(lambda: bool(made(begin)), "a snapshot is made where it was told")
        agents.kill_worker(1)
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the job goes on")
        step = agents.resizes()[-1]["step"]
        assert step >= begin and (step - begin) % every == 0, agents.logs()
        agents.wait_until(lambda: bool(made(step + 1)), "and makes snapshots as it has learned")
        ((last,),) = found(r"event=snapshot_every k=(\d+) cost_s=")[-1:]
        assert made(step + 1)[0] % last == 0, agents.logs()
        check_steps(agents.lines())


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("place", ["copying", "written"])
def test_a_worker_that_dies_or_hangs_while_it_writes_costs_no_step(
    place: str, signal: str, tmp_path: Path
) -> None:
    """The other one gives its copy up, and writes the same state at once."""
    settings = {"store": "snapshot_every = 5", "resize": "hang_s = 3"}
    constants = {"resize.stall_s": 1.0}
    with tiny_agents(
        tmp_path, REPLICAS, nodes="1", settings=settings, constants=constants, flags=RESTARTS
    ) as agents:
        agents.start("a")
        agents.wait_for_step(3)
        agents.arm(place, "1", signal)
        agents.wait_for_death()
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the job goes on")
        report = agents.resizes()[-1]
        assert report.get("steps_lost", 0) == 0, f"{report}\n{agents.logs()}"
        agents.wait_for_step(report["step"] + 6)
        agents.check_each_once()


THREE_SHARDS = '3 = "tp3"\n2 = "tp2"\n1 = "tp1"'
EVERY_7 = {"store": "snapshot_every = 7"}


def hosts_abc(folder: Path, **given: Any) -> Any:
    return tiny_agents(folder, THREE_SHARDS, nodes="1:3", slots=1, **given)


def train(agents: Agents, step: int = 16, hosts: str = "abc") -> None:
    """Begin with these hosts, each of which holds a shard of its own."""
    for host in hosts:
        agents.start(host)
    agents.wait_until(lambda: len(workers(agents)) == len(hosts), f"{hosts} train")
    agents.wait_for_step(step)


def workers(agents: Agents) -> dict[str, int]:
    """Return how many workers each host of the last change has."""
    reports = agents.resizes()
    return {h: n for h, n in reports[-1]["workers"].items() if n} if reports else {}


def replicated_bytes(agents: Agents, count: int = 1) -> int:
    """Return how many bytes have crossed for replicas, once they were made so many times."""
    pattern = r"event=replicated generation=\d+ bytes=(\d+)"
    agents.wait_until(lambda: len(re.findall(pattern, agents.text())) >= count, "replicas are made")
    return sum(int(size) for size in re.findall(pattern, agents.text())[:count])


@pytest.mark.turns
@pytest.mark.parametrize("lost", ["a", pytest.param("c", marks=pytest.mark.campaign)])
def test_a_host_with_shards_of_its_own_may_be_lost_with_its_memory(
    tmp_path: Path, lost: str
) -> None:
    with hosts_abc(tmp_path, settings=EVERY_7) as agents:
        train(agents, 1)
        replicated_bytes(agents, 3)
        agents.kill(lost, with_its_memory=True)
        agents.wait_until(lambda: len(workers(agents)) == 2, "the others go on")
        report = agents.resizes()[-1]
        assert lost not in workers(agents)
        assert report["step"] > 0 and report["step"] % 7 == 0, report
        chosen, others = report["recovery"]["state"], report["recovery"]["others"]
        assert chosen["origin"] == "snapshot" and chosen["lost"] == [lost], report
        assert chosen["generation"] == report["generation"], report
        assert [each["origin"] for each in others][:1] == ["survivors"], "they hold two shards of 3"
        agents.wait_for_step(report["step"] + 15)
        check_steps(agents.lines())


@pytest.mark.campaign
def test_one_host_after_the_other_may_be_lost(tmp_path: Path) -> None:
    """What a host kept for others is made anew on those that are left."""
    with hosts_abc(tmp_path, settings=EVERY_7) as agents:
        train(agents)
        for lost, left in (("c", "ab"), ("b", "a")):
            made = agents.text().count("event=replicated")
            replicated_bytes(agents, made + 1)
            agents.kill(lost, with_its_memory=True)
            agents.wait_until(lambda left=left: {*workers(agents)} == {*left}, f"{left} go on")
            agents.wait_for_step(agents.resizes()[-1]["step"] + 8)
        check_steps(agents.lines())


@pytest.mark.campaign
@pytest.mark.turns
def test_hosts_of_one_rack_may_be_lost_together(tmp_path: Path) -> None:
    with hosts_abc(tmp_path, settings=EVERY_7) as agents:
        for host, rack in (("a", "rack=1"), ("b", "rack=2"), ("c", "rack=2")):
            agents.start(host, "--domain", rack)
        agents.wait_until(lambda: len(workers(agents)) == 3, "all train")
        replicated_bytes(agents, agents.text().count("event=replicated") + 2)
        agents.kill("b", with_its_memory=True)
        agents.kill("c", with_its_memory=True)
        agents.wait_until(lambda: {*workers(agents)} == {"a"}, "the other rack goes on")
        agents.wait_for_step(agents.resizes()[-1]["step"] + 8)
        check_steps(agents.lines())


@pytest.mark.campaign
@pytest.mark.turns
def test_without_room_for_replicas_the_training_goes_on_and_says_so(tmp_path: Path) -> None:
    # Two snapshots of 528 bytes and a manifest of 1,315 fit, but no 160 bytes of others beside.
    with hosts_abc(tmp_path, flags=("--store-budget-gb", "0.00000245")) as agents:
        train(agents)
        agents.wait_until(lambda: "event=no_replica" in agents.text(), "it is said")
        for host in "abc":
            assert f"event=store_memory host={host} needed_bytes=" in agents.text()
        newest = agents.lines()[-1]["step"]
        agents.wait_for_step(newest + 10)
        check_steps(agents.lines())
