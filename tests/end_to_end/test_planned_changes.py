"""Hosts drain and join while a job trains: it goes on as if nothing had happened."""

from pathlib import Path

from agents import Agents, tiny_agents
from tiny_job import sums

DEGREES = '4 = "tp2"\n2 = "tp1"\n"2->4" = "tp4"\n3 = "tp3"\n1 = "tp1"'


def steps_made(agents: Agents) -> list[int]:
    """Check every step against an uninterrupted run; return the steps in the order made."""
    lines = agents.lines()
    expected = sums(max(line["step"] for line in lines))
    wrong = [line for line in lines if line["sum"] != expected[line["step"] - 1]]
    assert not wrong, f"{wrong[:3]} differ from an uninterrupted run\n{agents.logs()}"
    return [line["step"] for line in lines]


def test_hosts_drain_and_join_the_first_one_too_and_no_step_is_lost(tmp_path: Path) -> None:
    with tiny_agents(tmp_path, DEGREES, steps=400) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_for_step(3, world=4)
        agents.drain("b")
        agents.wait_for_world(2)
        assert agents.exit_code("b") == 0
        agents.start("c")
        step = agents.wait_for_world(4)
        agents.drain("a")
        agents.wait_for_world(2)
        assert agents.exit_code("a") == 0
        agents.wait_for_step(step + 5, world=2)
        assert agents.exit_code("c") == 0
        assert steps_made(agents) == list(range(1, 401))
        changes = agents.resizes()
        assert [change.get("steps_lost", 0) for change in changes] == [0] * 4
        assert not agents.workers()
