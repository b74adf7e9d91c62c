"""What a host that leaves hears of the coordinator that stays behind on its machine."""

from pathlib import Path

import pytest

from support.coordinator_line import Line


@pytest.mark.parametrize(
    ("machines", "leaving", "is_told"),
    [
        ({"a": "127.0.0.1", "b": "192.0.2.2"}, "a", True),
        ({"a": "127.0.0.1", "b": "192.0.2.2"}, "b", False),
        ({"a": "127.0.0.1", "b": "192.0.2.2", "c": "127.0.0.1"}, "a", False),
    ],
)
def test_who_leaves_the_coordinator_behind_hears_what_comes_of_that(
    tmp_path: Path, machines: dict[str, str], leaving: str, is_told: bool
) -> None:
    """It has the coordinator's machine for itself, and no other machine can have the next one."""
    line = Line(tmp_path, "--nnodes", "4")
    agents = {name: line.join(name, address=(machine, 1)) for name, machine in machines.items()}
    agents[leaving].tell("leaving")
    reason = agents[leaving].wait_for("exit")["reason"]
    assert reason.startswith("drained: the job goes on without this host")
    assert ("keep it up until the job has ended" in reason) == is_told, reason
    line.end()


def test_where_another_machine_can_have_the_next_one_nothing_is_to_be_kept_up(
    tmp_path: Path,
) -> None:
    line = Line(tmp_path, "--nnodes", "4")
    line.coordinator.is_alone = lambda: False  # type: ignore[method-assign]
    agent, _ = line.join("a"), line.join("b", address=("192.0.2.2", 1))
    agent.tell("leaving")
    assert agent.wait_for("exit")["reason"] == "drained: the job goes on without this host"
    line.end()
