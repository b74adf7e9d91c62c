"""Which agents count as lost, whom the coordinator listens to, and what it survives itself."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from scalai.core.errors import AnswerError, PeerError
from scalai.core.job import membership as m
from scalai.core.messages import actions
from scalai.core.messages.commands import Save
from scalai.core.messages.reports import Leaving, Report, Stalled
from scalai.core.messages.shared import JsonText, Named
from scalai.launch import cli
from scalai.launch.agent.link import LONGEST_KEPT_S
from scalai.launch.commands import job_commands as questions
from scalai.launch.coordinator.calls import Bye, Tell
from scalai.launch.coordinator.losses import (
    LOOK_S,
    MOST_POLL_S,
    TICK_S,
    Patience,
    PortProbe,
    tick_s,
)
from scalai.launch.coordinator.members import Member
from scalai.launch.coordinator.named_once import BroughtPart
from scalai.runtime.calls import Peer
from scalai.runtime.codec import encode
from scalai.runtime.connections import Listener
from scalai.runtime.framing import FramedSocket
from scalai.runtime.handshake import DATA_PLANE, service_key
from support.coordinator_line import DEADLINE_S, QUICK, TOKEN, Line, wait_until
from support.wire_words import call_raw

pytestmark = pytest.mark.fault

SHORT_S = 1.5
"""Many times what a living agent is silent for here."""
SHORT = replace(QUICK, lost_after_s=SHORT_S)
ALONE = ("--nnodes", "1:3", "--settle-s", "0.1", "--max-restarts", "9")
"""One host soon begins."""
TOGETHER = ("--nnodes", "1:2", "--settle-s", "600", "--max-restarts", "9")
"""Two hosts begin as soon as both have joined; one could go on."""


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path, *ALONE)
    yield line
    line.end()


@pytest.fixture
def pair_line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path, *TOGETHER)
    yield line
    line.end()


@pytest.fixture
def short_line(tmp_path: Path) -> Iterator[Line]:
    """A coordinator that soon takes a silent agent for lost."""
    line = Line(tmp_path, *TOGETHER, patience=SHORT)
    yield line
    line.end()


def note(line: Line, *hosts: str) -> None:
    with line.coordinator._lock:
        line.coordinator._live.command(hosts, Save(77))


def has_logged(line: Line, *words: str) -> bool:
    return any(all(word in text for word in words) for text in line.log)


def test_a_silent_host_is_lost_where_others_can_go_on(short_line: Line) -> None:
    short_line.join("a")
    silent = short_line.join("b")
    silent.wait_for("start")
    silent.pause()
    wait_until(lambda: has_logged(short_line, "event=lost host=b", "silent"), "b is lost")
    silent.go_on()
    wait_until(lambda: silent.error is not None, "b is told")
    assert "not in the job (any more)" in str(silent.error)


def test_a_call_that_nobody_had_time_to_read_is_no_silence(
    short_line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator's machine is busy: what an agent has sent lies there unread."""
    short_line.join("a")
    calls = short_line.join("b")
    calls.wait_for("start")
    peers = short_line.coordinator._live.members["b"]._peers
    busy, has_time, receive = {p._framed for p in peers}, threading.Event(), FramedSocket.receive

    def receive_late(framed: FramedSocket, *most: int) -> bytes:
        if framed in busy:
            has_time.wait(DEADLINE_S)
        return receive(framed, *most)

    monkeypatch.setattr(FramedSocket, "receive", receive_late)
    wait_until(lambda: any(framed.has_unread() for framed in busy), "b's call lies there")
    time.sleep(3 * SHORT_S)
    assert not has_logged(short_line, "event=lost host=b")
    assert not has_logged(short_line, "event=host_silent host=b")
    has_time.set()
    note(short_line, "b")
    calls.wait_for("save")


def listens(host: str) -> Listener:
    """As the data plane of an agent."""
    key = service_key(TOKEN, DATA_PLANE, host)
    return Listener(("127.0.0.1", 0), key, lambda framed: None, timeout_s=5.0)


def test_whose_process_is_gone_is_not_waited_for_and_whose_lives_is(tmp_path: Path) -> None:
    """The connections of two hosts end; where one of them listened, nobody does."""
    patience, probe = replace(QUICK, grace_s=600.0), PortProbe(TOKEN)
    line = Line(
        tmp_path, "--nnodes", "1:4", "--max-restarts", "9", patience=patience, probe=probe,
    )  # fmt: skip
    with closing(listens("b")) as there:
        goes = listens("c")
        line.join("a")
        lives = line.join("b", address=there.address)
        dies = line.join("c", address=goes.address)
        walled = line.join("d", address=("127.0.0.1", 1))
        wait_until(
            lambda: {("b", there.address), ("c", goes.address)} <= set(probe._reached),
            "both are reached",
        )
        goes.close()
        for agent in (lives, dies):
            agent.wait_for("start")
        for agent in (lives, walled, dies):
            agent.leave()
        wait_until(lambda: has_logged(line, "event=lost host=c", "nobody listens at"), "c is lost")
        time.sleep(10 * TICK_S)
        assert not has_logged(line, "event=lost host=b")
        assert not has_logged(line, "event=lost host=d"), "it never could be reached"
    line.coordinator._losses._patience = QUICK  # the test need not wait for it
    line.end()


def test_a_stranger_that_listens_there_is_neither_the_agent_nor_its_loss() -> None:
    """It may be the agent, with somebody on the way who changes what it says."""
    first = listens("a")
    assert isinstance(first.address, tuple)
    agent, probe = Member(cast(Peer, None), first.address), PortProbe(TOKEN)
    probe.greet("a", agent)
    wait_until(lambda: ("a", first.address) in probe._reached, "it is reached")
    first.close()
    agent.unlinked_at = 1.0
    with closing(Listener(agent.address, b"another", lambda framed: None, timeout_s=5.0)):
        assert not probe.is_gone("a", agent)
        behind = "a", agent.address, -1.0
        probe._asked.put(behind)  # answered by the same thread after the first
        wait_until(lambda: behind in probe._found, "both were looked at")
        assert not probe.is_gone("a", agent)


def test_silence_alone_does_not_end_a_job_that_has_no_other_host(tmp_path: Path) -> None:
    line = Line(tmp_path, *ALONE, patience=SHORT)
    agent = line.join("a")
    agent.wait_for("start")
    agent.pause()
    wait_until(
        lambda: has_logged(line, "event=host_silent host=a", "waiting for it"), "it is told of"
    )
    kept = line.coordinator._live.members["a"]
    first_s = kept.judge_again_s
    wait_until(lambda: kept.judge_again_s > first_s, "it is judged again")
    agent.go_on()
    wait_until(lambda: has_logged(line, "event=host_back host=a"), "it is back")
    assert not has_logged(line, "event=lost") and len(agent.heard("start")) == 1
    line.end()


def test_who_does_not_answer_is_lost_only_where_the_others_can_go_on(tmp_path: Path) -> None:
    line = Line(tmp_path, "--nnodes", "1:2")
    first = line.join("a")
    line.join("b").wait_for("start")
    first.wait_for("start")
    live = line.coordinator._live
    with line.coordinator._lock:
        live._perform(actions.Lose(("a", "b"), "no answer within 61 s"))
        assert live.members.hosts() == ("b",)
    assert has_logged(line, "event=no_answer host=a", "it counts as lost")
    assert has_logged(line, "event=no_answer host=b", "waiting for it")
    line.end()


def test_a_stall_of_the_coordinator_is_not_taken_for_silence(short_line: Line) -> None:
    """Its lock is held, as it is where the whole process is stopped."""
    agents = [short_line.join("a"), short_line.join("b")]
    agents[1].wait_for("start")
    with short_line.coordinator._lock:
        time.sleep(1.5 * SHORT_S)
    wait_until(lambda: has_logged(short_line, "event=stalled"), "the stall is told of")
    note(short_line, "a", "b")
    for agent in agents:
        agent.wait_for("save")
    assert not has_logged(short_line, "event=lost")


def test_a_stall_of_the_coordinator_is_not_taken_for_a_slow_phase(line: Line) -> None:
    agent = line.join("a", is_slow=True)
    agent.wait_for("start")
    live = line.coordinator._live
    wait_until(lambda: live.state.wait.since is not None, "the clock of the start runs")
    with line.coordinator._lock:  # as after a pause of two start timeouts
        stall_s = 2 * live.state.settings.start_timeout_s
        line.coordinator._losses._looked_at -= stall_s
        live.state = m.excuse(live.state, -stall_s)
    wait_until(lambda: has_logged(line, "event=stalled"), "the stall is told of")
    agent.tell("stepped", round=1)
    wait_until(lambda: live.state.phase is m.Phase.RUNNING, "the job runs")
    assert live.state.round == 1 and not has_logged(line, "no progress of the start")


def test_the_status_shows_workers_that_make_no_steps(
    line: Line, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = line.join("a")
    agent.wait_for("start")
    agent.stalled = Stalled((1, 3), 41, 75.2)
    members = line.coordinator._live.members
    wait_until(lambda: bool(members.stalled()), "the coordinator has heard it")
    monkeypatch.setattr(questions, "read_card", lambda folder: (line.coordinator.address, TOKEN))
    with pytest.raises(SystemExit):
        cli.main(["status"])
    assert "a: ranks 1, 3 at step 41 for 75 s" in capsys.readouterr().out
    agent.stalled = None
    wait_until(lambda: not members.stalled(), "they go on")


def test_workers_that_are_gone_are_not_shown_as_ones_that_make_no_steps(line: Line) -> None:
    """Between two rounds: an agent polls with no round then."""
    agent = line.join("a")
    agent.wait_for("start")
    agent.stalled = Stalled((1,), 41, 75.2)
    members = line.coordinator._live.members
    wait_until(lambda: bool(members.stalled()), "the coordinator has heard it")
    agent.round = 0
    wait_until(lambda: not members.stalled(), "they are gone")


def test_a_start_whose_bytes_still_flow_makes_progress(line: Line) -> None:
    """However long it takes: only a silence of ``start_timeout_s`` ends it."""
    agent = line.join("a", is_slow=True)
    agent.wait_for("start")
    live = line.coordinator._live
    for moved in range(1, 4):
        wait_until(lambda: live.state.wait.since is not None, "the clock of the start runs")
        with line.coordinator._lock:  # most of the time has passed
            live.state = m.excuse(live.state, -0.7 * live.state.settings.start_timeout_s)
        agent.tell("moved", round=1, bytes=moved)
    agent.tell("stepped", round=1)
    wait_until(lambda: live.state.phase is m.Phase.RUNNING, "the job runs")
    assert live.state.round == 1 and not has_logged(line, "no progress of the start")


def test_an_agent_whose_connections_end_is_lost(pair_line: Line) -> None:
    pair_line.join("a")
    pair_line.join("b").leave()
    logged = ("event=lost host=b", "connections have ended")
    wait_until(lambda: has_logged(pair_line, *logged), "b is lost")


def test_an_agent_that_says_goodbye_is_not_waited_for(tmp_path: Path) -> None:
    line = Line(tmp_path, "--nnodes", "1:3", patience=Patience(grace_s=DEADLINE_S))
    agent = line.join("a")
    agent._calls.call(Bye("j", "a", agent.incarnation))
    wait_until(lambda: "a" not in line.coordinator._live.members, "a is gone")
    line.end()


def test_commands_go_to_the_agent_that_took_the_place_of_a_stale_one(pair_line: Line) -> None:
    """The two hold the same store, whose lock has one holder; or the old one is silent."""
    pair_line.join("b")
    old = pair_line.join("a", store=["machine", 1])
    old.wait_for("start")
    old.pause()
    new = pair_line.join("a", store=["machine", 1])
    note(pair_line, "a")
    old.go_on()
    wait_until(lambda: old.error is not None, "the old one is told")
    assert "another agent, which replaced it" in str(old.error)
    with pytest.raises(AnswerError, match="replaced it"):
        old.tell("leaving")
    new.wait_for("save")
    assert not old.heard("save")


def test_a_silent_agent_gives_way_to_another_of_its_host(tmp_path: Path) -> None:
    line = Line(tmp_path, *TOGETHER, patience=replace(QUICK, replaced_after_s=0.3))
    line.join("b")
    old = line.join("a", store=["machine", 1])
    old.wait_for("start")
    old.pause()
    members = line.coordinator._live.members
    wait_until(lambda: members["a"].silence_s() > 0.3, "it is silent")
    line.join("a", store=["another machine", 1]).wait_for("start")
    line.end()


def test_a_live_agent_is_not_replaced_by_one_of_another_store(line: Line) -> None:
    line.join("a", store=["machine", 1]).wait_for("start")
    with pytest.raises(PeerError, match=r"already in job 'j'.*--host-id"):
        line.join("a", store=["machine", 2])


def test_an_event_that_is_told_twice_counts_once(line: Line) -> None:
    agent = line.join("a")
    agent.wait_for("start")
    wait_until(
        lambda: line.coordinator._live.members["a"].last_report == 1, "its first step is told"
    )
    heard: list[tuple[str, object]] = []
    line.coordinator._agent_events.hear = (  # type: ignore[method-assign]
        lambda host, report, manifests: heard.append((host, report))
    )
    leaving: Named[Report] = Named(Leaving())
    for number in (2, 2, 3, 2):
        agent._calls.call(Tell("j", "a", agent.incarnation, number, leaving))
    assert heard == [("a", Leaving())] * 2


WHO = {"job": "j", "host": "a", "incarnation": "i"}
BRINGS: dict[str, Any] = {
    **WHO, "host": "b", "store": None, "slots": 2, "address": ("127.0.0.1", 1), "parts": (),
    "sealed": (), "damaged": (), "spec": {"text": "{}"},
}  # fmt: skip
DIFFER = "Do the versions differ"
NONSENSE: dict[str, tuple[str, dict[str, Any], str]] = {
    "no call": ("Quit", {}, DIFFER),
    "no arguments": ("Poll", {}, DIFFER),
    "wrong type": ("Poll", {**WHO, "received": "1", "round": 1, "newest": 1, "stalled": None},
                   DIFFER),
    "host": ("Join", {**BRINGS, "host": "../../etc"}, "cannot name a directory"),
    "spec": ("Join", BRINGS, "brings no job"),
    "no JSON": ("Join", {**BRINGS, "spec": {"text": "{"}}, "brings no job"),
    "depth": ("Join", {**BRINGS, "spec": {"text": "[" * 100_000}}, "brings no job"),
    "argv": ("Join", {**BRINGS, "spec": {"text": '{"options": 1}'}}, "brings no job"),
    "parts": ("Join", {**BRINGS, "parts": (BroughtPart(b'{"generation": 1}', -1, -1),)}, "damaged"),
    "another job": ("Join", {**BRINGS, "job": "k"}, "job 'k' is called"),
    "scale": ("Scale", {"nproc": "many", "nnodes": None, "degrees": None, "dry_run": True},
              DIFFER),
    "no event": ("Tell", {**WHO, "number": 9, "report": ("Sleep", {})}, DIFFER),
    "wrong round": ("Tell", {**WHO, "number": 9, "report": (
        "Built", {"round": "one"})}, DIFFER),
    "no round": ("Tell", {**WHO, "number": 9, "report": ("Stopped", {})}, DIFFER),
    "slots": ("Tell", {**WHO, "number": 9, "report": ("Slots", {"slots": "two"})}, DIFFER),
}  # fmt: skip


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_and_changes_nothing(line: Line, case: str) -> None:
    word, arguments, message = NONSENSE[case]
    if case == "parts":
        arguments = {**arguments, "spec": JsonText.of(line.spec.to_json())}
    agent = line.join("a")
    agent.wait_for("start")
    if word == "Tell":
        arguments = {**arguments, "incarnation": agent.incarnation}
    logged = call_raw(line.coordinator.address, TOKEN, encode((word, arguments)))
    assert re.search(message, logged), logged
    assert not has_logged(line, "event=crashed")


def test_a_failure_of_the_coordinator_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    """Not by a host that counts as lost and half of a change."""
    line = Line(tmp_path, "--nnodes", "1:3", "--settle-s", "1")

    def fail(action: object) -> None:
        raise KeyError("h7")

    line.coordinator._live._starter.start = fail  # type: ignore[method-assign]
    agents = [line.join("a"), line.join("b")]
    for agent in agents:
        reported = agent.wait_for("exit")
        assert reported["code"] == 1 and "KeyError('h7')" in reported["reason"]
    line.thread.join(DEADLINE_S)
    assert line.code == [1]
    assert has_logged(line, "event=crashed", "Traceback") and not has_logged(line, "event=lost")
    line.end()


def test_the_coordinator_of_a_finished_job_waits_until_all_have_their_exit(tmp_path: Path) -> None:
    """A late one must not take the end of a job for the end of its coordinator."""
    line = Line(tmp_path, "--nnodes", "2")
    first, late = line.join("a"), line.join("b")
    assert first.wait_for("start")["group"] == ["a", "b"]
    late.wait_for("start")
    late.pause()
    for agent in (first, late):
        agent.tell("finished", round=1)
    first.wait_for("exit")
    first.leave()
    time.sleep(0.5)  # longer than the last answers may be on their way
    assert not line.code
    late.go_on()
    assert late.wait_for("exit")["code"] == 0
    line.thread.join(DEADLINE_S)
    assert line.code == [0]
    line.end()


def test_an_agent_that_waits_for_the_coordinators_lock_is_not_silent(short_line: Line) -> None:
    """The coordinator looks all the while: it does not stand still, it is busy with others."""
    agents = [short_line.join("a"), short_line.join("b")]
    agents[1].wait_for("start")
    coordinator = short_line.coordinator
    with coordinator._lock:
        end = time.monotonic() + 1.5 * SHORT_S
        while time.monotonic() < end:
            coordinator.tick()
            time.sleep(TICK_S)
    note(short_line, "a", "b")
    for agent in agents:
        agent.wait_for("save")
    assert not has_logged(short_line, "event=lost") and not has_logged(short_line, "event=stalled")


def test_polls_of_many_agents_are_kept_longer_and_silence_is_judged_by_it() -> None:
    patience = Patience()
    assert patience.to_keep_s(200) == patience.poll_s and patience.to_keep_s(800) == 4.0
    assert patience.to_keep_s(1 << 20) == MOST_POLL_S < LONGEST_KEPT_S
    for agents in (1, 1024, 1 << 20):
        assert patience.to_keep_s(agents) < patience.to_replace_s(agents) < patience.lost_after_s
    assert patience.to_replace_s(1) == patience.replaced_after_s
    assert patience.to_grace_s(1) == patience.grace_s < patience.to_grace_s(1024)


@pytest.mark.parametrize("silent_s", [6.0, 15.0, 120.0])
def test_the_poll_that_is_kept_counts_as_silence_too(silent_s: float) -> None:
    """The last sign of life may lie as long before the silence as a poll is kept."""
    patience = Patience(lost_after_s=silent_s)
    for agents in (1, 64, 200, *((512, 900) if silent_s >= 15.0 else ())):
        assert patience.to_keep_s(agents) + patience.to_lose_s(agents) + tick_s(agents) < silent_s
    most = 1 << 20
    assert tick_s(1) == TICK_S <= tick_s(most) < LOOK_S
    assert patience.to_keep_s(most) <= silent_s * 2 / 3 <= patience.to_lose_s(most)
