"""The coordinator with agents that are threads of the test: who may join, and with which state."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scalai.core.errors import PeerError
from scalai.core.job.membership import Phase
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.person_calls import Scale, Status
from scalai.launch.coordinator.rendezvous_store import Then
from scalai.runtime.calls import Channel
from support.committed_parts import half, part
from support.coordinator_line import DEADLINE_S, TOKEN, Line, NoStores, wait_until


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path, "--nnodes", "1:3", "--settle-s", "0.1", "--max-restarts", "9")
    yield line
    line.end()


def test_a_second_agent_of_a_host_and_another_job_are_refused(line: Line, tmp_path: Path) -> None:
    line.join("a")
    with pytest.raises(PeerError, match=r"already in job 'j'.*--host-id"):
        line.join("a")
    other = JobSpec.read(parse_options([*line.flags, "other.py"]))
    with pytest.raises(PeerError, match=r"script is 'other.py', the job's is"):
        line.join("b", spec=other)


@pytest.mark.fault
@pytest.mark.parametrize("host", ["../../etc", "", "a b"])
def test_a_host_name_that_is_no_folder_is_refused(line: Line, host: str) -> None:
    with pytest.raises(PeerError, match="cannot name a directory"):
        line.join(host)


def test_hosts_that_join_within_the_settling_time_begin_together(tmp_path: Path) -> None:
    line = Line(tmp_path, "--nnodes", "1:3", "--settle-s", "1")
    first = line.join("a")
    second = line.join("b")
    assert first.wait_for("start")["group"] == ["a", "b"] == second.wait_for("start")["group"]
    assert (first.commands, second.commands) != ([], [])
    assert [command["round"] for command in first.heard("start")] == [1]
    line.end()


def test_the_job_begins_from_the_newest_state_that_the_hosts_hold(
    line: Line, tmp_path: Path
) -> None:
    older, newer = part(tmp_path, "a", 3, 20, "r-1-20"), part(tmp_path, "a", 4, 30, "r-1-30")
    agent = line.join("a", parts=(older, newer))
    assert agent.wait_for("start")["generation"] == 4


def test_parts_that_were_sealed_when_everything_died_are_a_state_again(tmp_path: Path) -> None:
    line = Line(tmp_path, "--nnodes", "1:2", "--settle-s", "600")
    old = part(tmp_path, "a", 3, 20, "r-1-20")
    sealed = part(tmp_path, "a", -1, 25, "r-1-25")
    first = line.join("a", parts=(old,), sealed=(half(sealed, "a", 0),))
    second = line.join("b", sealed=(half(sealed, "b", 1),))
    for agent in (first, second):
        commit = agent.wait_for("commit")
        assert (commit["generation"], commit["snapshot"]) == (4, "r-1-25")
        assert agent.wait_for("start")["generation"] == 4
    line.end()


def test_a_sealed_part_whose_snapshot_was_committed_elsewhere_joins_it(
    line: Line, tmp_path: Path
) -> None:
    whole = part(tmp_path, "a", 3, 20, "r-1-20")
    line.join("a", parts=(half(whole, "a", 0),))
    second = line.join("b", sealed=(half(replace(whole, generation=-1), "b", 1),))
    commit = second.wait_for("commit")
    assert (commit["generation"], commit["snapshot"]) == (3, "r-1-20")
    assert second.wait_for("start")["generation"] == 3


@pytest.mark.fault
def test_sealed_parts_that_make_nothing_whole_are_given_up(line: Line, tmp_path: Path) -> None:
    old = part(tmp_path, "a", 3, 20, "r-1-20")
    sealed = half(part(tmp_path, "a", -1, 25, "r-1-25"), "a", 0)
    agent = line.join("a", parts=(old,), sealed=(sealed,))
    assert agent.wait_for("start")["generation"] == 3
    kinds = [command["command"] for command in agent.commands]
    assert kinds.index("discard") < kinds.index("start") and "commit" not in kinds


def test_a_coordinator_that_nobody_needs_ends(tmp_path: Path) -> None:
    line = Line(tmp_path, "--nnodes", "1:3", alone_s=0.2)
    line.thread.join(DEADLINE_S)
    assert line.code == [1]


def stores_of(line: Line) -> NoStores:
    found = line.coordinator._stores
    assert isinstance(found, NoStores)
    return found


def running(line: Line) -> None:
    wait_until(lambda: line.coordinator._live.state.phase is Phase.RUNNING, "it runs")


@pytest.mark.fault
def test_nobody_waits_for_where_the_next_workers_will_meet(line: Line) -> None:
    """What opens it imports torch first (behind a change of the coordinator, say), or is stopped;
    agents and persons are answered meanwhile, and none takes the coordinator for one that hangs."""
    agent = line.join("a")
    running(line)
    late = stores_of(line).late = []
    person = Channel(line.coordinator.address, TOKEN, call_s=DEADLINE_S, connect_s=DEADLINE_S)
    answer = person.call(Scale(1, None, None, dry_run=False)).value()
    assert answer["workers"] == {"a": 1}
    wait_until(lambda: len(late) == 1, "a store is asked for")
    assert person.call(Status()).value()["phase"] == "building"
    agent.tell("moved", round=1, bytes=1)
    assert not agent.heard("build")
    late[0](17)
    assert agent.wait_for("build")["master_port"] == 17
    person.close()


@pytest.mark.fault
def test_what_was_given_up_before_its_workers_could_meet_is_not_begun(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host is lost, say, before the store is open: the round is another one then."""
    stores, closed = stores_of(line), list[int]()
    monkeypatch.setattr(stores, "close", closed.append)
    late = stores.late = []
    agent, lost = line.join("a"), line.join("b")
    wait_until(lambda: len(late) == 1, "a store is asked for")
    lost.leave()
    wait_until(lambda: len(late) == 2, "one is asked for that round 2 needs")
    late[0](17)
    assert closed == [17] and not agent.heard("start")
    late[1](18)
    begun = agent.wait_for("start")
    assert (begun["round"], begun["master_port"], begun["group"]) == (2, 18, ["a"])


def test_a_job_that_has_ended_builds_nothing(line: Line) -> None:
    """The script comes to its end while the next workers wait for where they will meet."""
    agent = line.join("a")
    running(line)
    late = stores_of(line).late = []
    line.join("b")
    wait_until(lambda: len(late) == 1, "a store is asked for")
    agent.tell("finished", round=1)
    agent.wait_for("exit")
    late[0](17)
    assert not agent.heard("build") and not line.agents[1].heard("build")


def test_a_report_folder_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    line = Line(tmp_path, "--nnodes", "1:3", "--report-dir", str(tmp_path / "file" / "below"))
    line.join("a")
    running(line)
    assert any("event=report_failed" in text for text in line.log)
    line.end()


def test_workers_that_can_meet_nowhere_at_all_end_the_job_with_the_reason(line: Line) -> None:
    late = stores_of(line).late = []
    agent = line.join("a")
    wait_until(lambda: len(late) == 1, "a store is asked for")
    late[0](PeerError("the workers' rendezvous store cannot be opened"))
    assert "cannot be opened" in agent.wait_for("exit")["reason"]


@pytest.mark.fault
def test_workers_that_can_meet_nowhere_are_not_on_standby_and_the_job_goes_on(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = line.join("a")
    first.wait_for("start")
    wait_until(lambda: line.coordinator._live.state.phase is Phase.RUNNING, "it runs")

    def nowhere(then: Then) -> None:
        then(PeerError("the workers' rendezvous store cannot be opened"))

    monkeypatch.setattr(line.coordinator._stores, "open", nowhere)
    line.join("b")
    first.wait_for("prepare")
    assert not line.coordinator._live.has_crashed and not first.heard("build")
    assert any("not built beside" in text and "cannot be opened" in text for text in line.log)
