"""Which agents count as lost, whom the coordinator listens to, and what it survives itself."""

import re
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from scalai.core.errors import StaleError, UsageError
from scalai.core.job.membership import Phase
from scalai.core.messages.commands import Save
from scalai.core.messages.reports import Leaving
from scalai.core.messages.shared import JsonText
from scalai.launch.agent.link import LONGEST_KEPT_S
from scalai.launch.coordinator.calls import BroughtPart, Bye
from scalai.launch.coordinator.losses import (
    LOOK_S,
    MOST_POLL_S,
    TICK_S,
    Patience,
    PortProbe,
    tick_s,
)
from scalai.runtime.codec import encode
from scalai.runtime.connections import Listener
from scalai.runtime.handshake import DATA_PLANE, service_key
from support.coordinator_line import QUICK, TOKEN, FakeAgent, Line, running
from support.wire_words import call_raw

from .conftest import OpenLine

pytestmark = pytest.mark.fault

LOST_S = QUICK.lost_after_s + 1.0


def pair(line: Line, **facts: Any) -> tuple[FakeAgent, FakeAgent]:
    """Two hosts that train; either could go on alone."""
    agents = line.join("a", **facts), line.join("b", **facts)
    for agent in agents:
        agent.wait_for("start")
    return agents


def gets_commands(line: Line, agent: FakeAgent) -> bool:
    with line.coordinator.lock:
        line.live.command([agent.host], Save(77))
    line.settle()
    return bool(agent.heard("save"))


# ---------------------------------------------------------------------- silence


def test_a_silent_host_is_lost_where_others_can_go_on(line: Line) -> None:
    _, silent = pair(line)
    silent.is_paused = True
    line.pass_time(LOST_S)
    assert line.logged("event=lost host=b", "silent") and line.live.members.hosts() == ("a",)
    silent.is_paused = False
    line.settle()
    assert "not in the job (any more)" in str(silent.error)


def test_silence_alone_does_not_end_a_job_that_has_no_other_host(line: Line) -> None:
    agent = line.join("a")
    agent.wait_for("start")
    agent.is_paused = True
    line.pass_time(2 * LOST_S)
    assert len(line.logged("event=host_silent host=a", "waiting for it")) == 1
    agent.is_paused = False
    line.pass_time(1.0)
    assert line.logged("event=host_back host=a")
    assert not line.logged("event=lost") and len(agent.heard("start")) == 1


def test_who_does_not_answer_is_lost_only_where_the_others_can_go_on(
    open_line: OpenLine,
) -> None:
    """Two of three hosts hang as their workers are stopped, and two are needed."""
    line = open_line("--nnodes", "2:3", "--max-restarts", "9")
    first, second, third = (line.join(host) for host in "abc")
    third.wait_for("start")
    first.unanswered = second.unanswered = {"stop"}
    first.tell("workers_failed", round=1, reason="killed", is_chance=True)
    line.until(lambda: line.logged("event=no_answer host=b"), "both are judged")
    assert line.logged("event=no_answer host=a", "it counts as lost")
    assert line.logged("event=no_answer host=b", "waiting for it")
    assert line.live.members.hosts() == ("b", "c")


@pytest.mark.parametrize("why", ["its call is unread", "its call waits for the lock"])
def test_a_call_that_the_coordinator_has_yet_to_answer_is_no_silence(line: Line, why: str) -> None:
    """The coordinator's machine is busy, or it is busy with others: it looks all the while."""
    _, waits = pair(line)
    waits.is_paused = True
    members = line.live.members
    if why == "its call is unread":
        waits.wire.has_unread = True
        line.pass_time(3 * LOST_S)
    else:
        with members.in_hand("b", waits.incarnation, waits.wire):
            line.pass_time(3 * LOST_S)
    assert not line.logged("event=lost") and not line.logged("event=host_silent")
    assert "b" in members and not line.logged("event=stalled")


def test_a_stall_of_the_coordinator_is_neither_silence_nor_a_slow_phase(line: Line) -> None:
    """Its lock was held, or the whole process was stopped, for longer than any limit."""
    agents = pair(line, is_slow=True)
    line.pass_time(1.0)  # the clock of the start runs
    line.now += 2 * line.live.state.settings.start_timeout_s
    line.pass_time(1.0)
    assert line.logged("event=stalled") and not line.logged("event=lost")
    assert all(gets_commands(line, agent) for agent in agents)
    for agent in agents:
        agent.tell("stepped")
    assert line.phase is Phase.RUNNING and line.live.state.round == 1


def test_a_start_whose_bytes_still_flow_makes_progress(line: Line) -> None:
    """However long it takes: only a silence of ``start_timeout_s`` ends it."""
    agent = line.join("a", is_slow=True)
    agent.wait_for("start")
    for moved in range(1, 4):
        line.pass_time(0.7 * line.live.state.settings.start_timeout_s)
        agent.tell("moved", round=1, bytes=moved * 10**6)
    agent.tell("stepped")
    assert line.phase is Phase.RUNNING and line.live.state.round == 1
    assert not line.logged("no progress of the start")


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


# ---------------------------------------------------------------------- ended connections


def test_an_agent_whose_connections_end_is_lost_and_one_that_says_goodbye_at_once(
    line: Line,
) -> None:
    cut, ends = pair(line)
    ends.call(Bye("j", "b", ends.incarnation))
    assert line.live.members.hosts() == ("a",) and line.logged("event=bye host=b")
    cut.leave()
    line.pass_time(QUICK.grace_s - 0.5)
    assert "a" in line.live.members
    line.pass_time(1.0)
    assert line.logged("event=lost host=a", "connections have ended")


def listens(host: str, address: Any = ("127.0.0.1", 0), token: bytes = TOKEN) -> Listener:
    """As the data plane of an agent, or of a stranger."""
    key = service_key(token, DATA_PLANE, host)
    return Listener(address, key, lambda framed: None, timeout_s=5.0)


def test_whose_process_is_gone_is_not_waited_for_and_whose_lives_is(open_line: OpenLine) -> None:
    """The connections of all hosts end; where one of them listened, nobody does any more, and a
    stranger does at the port of another: it may be the agent, behind a relay."""
    probe, places = PortProbe(TOKEN), {host: listens(host) for host in "bce"}
    line = open_line(patience=replace(QUICK, grace_s=600.0), probe=probe)
    line.join("a").wait_for("start")
    addresses = {host: place.address for host, place in places.items()}
    left = [
        line.join(host, address=addresses.get(host, ("127.0.0.1", 1))) for host in (*places, "d")
    ]
    probe.look()
    for host in "ce":
        places[host].close()
    with closing(places["b"]), closing(listens("e", addresses["e"], b"another")):
        for agent in left:
            agent.leave()
        line.pass_time(TICK_S)
        probe.look()
        line.pass_time(TICK_S)
    assert line.logged("event=lost host=c", "nobody listens at")
    assert line.live.members.hosts() == ("a", "b", "e", "d"), "d never could be reached"


# ---------------------------------------------------------------------- another agent of a host


def test_commands_go_to_the_agent_that_took_the_place_of_a_stale_one(line: Line) -> None:
    """The two hold the same store, whose lock has one holder."""
    line.join("b")
    old = line.join("a", store=["machine", 1])
    old.wait_for("start")
    old.is_paused = True
    new = line.join("a", store=["machine", 1])
    old.is_paused = False
    assert gets_commands(line, new) and not old.heard("save")
    assert "another agent, which replaced it" in str(old.error)
    with pytest.raises(StaleError, match="replaced it"):
        old.tell("leaving")


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_silent_agent_gives_way_to_another_of_its_host(line: Line, is_silent: bool) -> None:
    line.join("b")
    old = line.join("a", store=["machine", 1])
    old.wait_for("start")
    old.is_paused = is_silent
    line.pass_time(QUICK.to_replace_s(2) + 1.0)
    if is_silent:
        assert line.join("a", store=["another", 1]).wait_for("start")
        return
    with pytest.raises(UsageError, match=r"already in job 'j'.*--host-id"):
        line.join("a", store=["another", 1])


# ---------------------------------------------------------------------- calls


def test_an_event_that_is_told_twice_counts_once(line: Line) -> None:
    agent = line.join("a")
    agent.wait_for("start")
    for number in (2, 2, 3, 2):
        agent.report(number, Leaving())
    assert len(line.logged("event=leaving host=a")) == 2


WHO = {"job": "j", "host": "a", "incarnation": "i"}
BRINGS: dict[str, Any] = {
    **WHO, "host": "b", "store": None, "slots": 2, "address": ("127.0.0.1", 1), "parts": (),
    "sealed": (), "damaged": (), "spec": {"text": "{}"},
}  # fmt: skip
DIFFER = "Do the versions differ"


def tell(*report: Any) -> tuple[str, dict[str, Any], str]:
    return "Tell", {**WHO, "number": 9, "report": report}, DIFFER


POLL = {"received": "1", "round": 1, "newest": 1, "stalled": None}
SCALE = {"nproc": "many", "nnodes": None, "degrees": None, "dry_run": True}
TORN = (BroughtPart(b'{"generation": 1}', -1, -1),)
NONSENSE: dict[str, tuple[str, dict[str, Any], str]] = {
    "no call": ("Quit", {}, DIFFER),
    "no arguments": ("Poll", {}, DIFFER),
    "wrong type": ("Poll", {**WHO, **POLL}, DIFFER),
    "no folder": ("Join", {**BRINGS, "host": "../../etc"}, "cannot name a directory"),
    "no host": ("Join", {**BRINGS, "host": ""}, "cannot name a directory"),
    "two words": ("Join", {**BRINGS, "host": "a b"}, "cannot name a directory"),
    "spec": ("Join", BRINGS, "brings no job"),
    "no JSON": ("Join", {**BRINGS, "spec": {"text": "{"}}, "brings no job"),
    "depth": ("Join", {**BRINGS, "spec": {"text": "[" * 100_000}}, "brings no job"),
    "argv": ("Join", {**BRINGS, "spec": {"text": '{"options": 1}'}}, "brings no job"),
    "parts": ("Join", {**BRINGS, "parts": TORN}, "damaged"),
    "another job": ("Join", {**BRINGS, "job": "k"}, "job 'k' is called"),
    "scale": ("Scale", SCALE, DIFFER),
    "no event": tell("Sleep", {}),
    "wrong round": tell("Built", {"round": "one"}),
    "no round": tell("Stopped", {}),
    "slots": tell("Slots", {"slots": "two"}),
}


@pytest.fixture(scope="module")
def any_line(tmp_path_factory: pytest.TempPathFactory) -> Any:
    line = Line(tmp_path_factory.mktemp("line"))
    with running(line):
        yield line


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_and_changes_nothing(any_line: Line, case: str) -> None:
    word, arguments, message = NONSENSE[case]
    if case == "parts":
        arguments = {**arguments, "spec": JsonText.of(any_line.spec.to_json())}
    logged = call_raw(any_line.address, TOKEN, encode((word, arguments)))
    assert re.search(message, logged), logged
    assert not any_line.logged("event=crashed") and not any_line.live.members.hosts()


# ---------------------------------------------------------------------- its end


def test_a_failure_of_the_coordinator_ends_the_job_with_its_reason(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a host that counts as lost and half of a change."""

    def fail(then: object) -> None:
        raise KeyError("h7")

    monkeypatch.setattr(line.stores, "open", fail)
    for agent in [line.join("a"), line.join("b")]:
        reported = agent.wait_for("exit")
        assert reported["code"] == 1 and "KeyError('h7')" in reported["reason"]
        agent.leave()
    line.pass_time(QUICK.return_s + 1.0)
    assert line.code == 1
    assert line.logged("event=crashed", "Traceback") and not line.logged("event=lost")


def test_the_coordinator_of_a_finished_job_waits_until_all_have_their_exit(line: Line) -> None:
    """A late one must not take the end of a job for the end of its coordinator."""
    first, late = pair(line)
    late.is_paused = True
    for agent in (first, late):
        agent.tell("finished")
    assert first.heard("exit")
    first.leave()
    line.pass_time(QUICK.return_s)
    assert line.code is None
    late.is_paused = False
    line.pass_time(1.0)
    assert line.code == 0 == late.heard("exit")[0]["code"]
