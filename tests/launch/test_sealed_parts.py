"""An agent dies with a part that it has sealed, and another one of its host brings that part back:
in whatever order its death, the end of the round and its successor become known."""

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from scalai.core.errors import PeerError, ProofError
from scalai.core.job.function_proof import Asked, Numbers, Waiting
from scalai.core.job.membership import Phase
from scalai.launch.coordinator import held_states as generations
from scalai.launch.coordinator.losses import Patience
from scalai.launch.coordinator.person_calls import Resume, Scale
from scalai.runtime.calls import Channel
from scalai.store.manifest import HostManifest, manifest_bytes
from support.committed_parts import half, part
from support.coordinator_line import DEADLINE_S, QUICK, TOKEN, FakeAgent, Line, wait_until
from support.law_jobs import but

pytestmark = pytest.mark.fault

STORE = ["machine", 1]


def logged(line: Line, text: str) -> bool:
    return any(text in reported for reported in line.log)


class TwoHosts:
    """A running job on hosts a and b that began from a generation which is whole on either; what
    they seal is whole only together."""

    def __init__(self, folder: Path, nodes: str = "1:2", grace_s: float = DEADLINE_S) -> None:
        patience = Patience(grace_s=grace_s)
        flags = ("--nnodes", nodes, "--settle-s", "0.2", "--max-restarts", "9")
        self.line, self._folder = Line(folder, *flags, patience=patience), folder
        self._old = {host: part(folder, host, 1, 0, "r-0-0") for host in "ab"}
        self.a, self.b = self.join("a"), self.join("b")
        self.a.unanswered = {"stop"}
        self.run = self.a.wait_for("start")["run"]
        self.step = 0
        wait_until(lambda: logged(self.line, "event=started"), "every rank has stepped")

    def join(self, host: str, *sealed: HostManifest) -> FakeAgent:
        old = self._old[host]
        return self.line.join(host, store=[*STORE, host], parts=(old,), sealed=sealed)

    def begin_to_stop(self) -> None:
        """Ask for a change; both hosts stand at the agreed stop and may snapshot."""
        person = Channel(self.line.coordinator.address, TOKEN)
        person.call(Scale(3, None, None, dry_run=False))
        person.close()
        self.step = self.a.wait_for("agree")["stop"]
        for agent in (self.a, self.b):
            agent.tell("arrived", round=1, stop=agent.wait_for("agree")["stop"])
        for agent in (self.a, self.b):
            agent.wait_for("take_snapshot")

    def sealed(self, host: str) -> HostManifest:
        """Return what a host has sealed at the present stop."""
        name = f"{self.run}-1-{self.step}"
        whole = part(self._folder, host, -1, self.step, name)
        return half(whole, host, "ab".index(host))

    def a_tells(self, reason: str = "stop") -> None:
        message = manifest_bytes(self.sealed("a"))
        self.a.tell("sealed", round=1, reason=reason, part=message, seconds={})

    def a_stops(self) -> None:
        self.a.wait_for("stop")
        self.a.tell("stopped", round=1, newest=self.step)

    def comes_back(self) -> None:
        self.b = self.join("b", self.sealed("b"))

    def is_lost(self) -> None:
        """The coordinator learns that b is gone, before another agent of it comes."""
        self.b.leave()
        wait_until(lambda: "b" not in self.line.coordinator._live.members, "b is lost")

    def a_tells_a_snapshot(self) -> None:
        self.a_tells("snapshot")

    def is_stopping(self) -> None:
        self.wait_for_phase(Phase.STOPPING)

    def is_waiting(self) -> None:
        self.wait_for_phase(Phase.WAITING)

    def wait_for_phase(self, phase: Phase) -> None:
        live = self.line.coordinator._live
        wait_until(lambda: live.state.phase is phase, f"the job is {phase.value}")

    def check(self) -> None:
        """Both hosts commit what they had sealed, and go on from there."""

        def is_begun() -> bool:
            return bool(self.b.heard("start")) or logged(self.line, "event=went_back")

        wait_until(is_begun, "a round begins")
        assert not logged(self.line, "event=went_back"), self.line.log
        for agent in (self.a, self.b):
            committed = agent.wait_for("commit")
            assert committed["snapshot"] == f"{self.run}-1-{self.step}"
        start = self.b.wait_for("start")
        assert (start["generation"], start["restorable_step"]) == (2, self.step)
        assert set(start["sources"]) == {"a", "b"}
        self.end()

    def end(self) -> None:
        self.line.coordinator._losses._patience = QUICK
        self.line.end()


STOP = ("begin_to_stop", "a_tells")
ORDERS = {
    # how b's death, its successor and the end of the round become known -> what happens in turn
    "before the loss is known": (*STOP, "comes_back", "a_stops"),
    "before the others have sealed": ("begin_to_stop", "comes_back", "a_tells", "a_stops"),
    "while workers are stopped": (*STOP, "is_lost", "is_stopping", "comes_back", "a_stops"),
    "while the job waits": (
        *STOP, "is_lost", "is_stopping", "a_stops", "is_waiting", "comes_back",
    ),
    "behind a snapshot": ("a_tells_a_snapshot", "comes_back", "a_stops"),
    "before a snapshot": ("comes_back", "a_tells_a_snapshot", "a_stops"),
    "behind a snapshot, while workers are stopped": (
        "a_tells_a_snapshot", "is_lost", "is_stopping", "comes_back", "a_stops",
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_successor_brings_the_part_that_its_host_had_sealed(tmp_path: Path, order: str) -> None:
    events = ORDERS[order]
    grace_s = 0.1 if "is_lost" in events else DEADLINE_S
    hosts = TwoHosts(tmp_path, "2" if "is_waiting" in events else "1:2", grace_s)
    hosts.step = 7  # of a snapshot; a stop says another one
    for event in events:
        getattr(hosts, event)()
    hosts.check()


def test_a_state_whose_replicas_differ_at_a_stop_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes back to the newest committed one, and says which tensor."""

    def differ(parts: object) -> None:
        raise ProofError("replicas of tensor 'param/w' differ.")

    hosts = TwoHosts(tmp_path)
    hosts.begin_to_stop()
    monkeypatch.setattr(generations, "written_fingerprints", differ)
    for host in "ab":
        agent, message = getattr(hosts, host), manifest_bytes(hosts.sealed(host))
        agent.tell("sealed", round=1, reason="stop", part=message, seconds={})
    hosts.a_stops()
    assert hosts.a.wait_for("start", 2)["generation"] == 1
    assert logged(hosts.line, "event=snapshot_refused") and logged(hosts.line, "'param/w'")
    assert logged(hosts.line, "what was written is refused: replicas of tensor 'param/w'")
    assert not logged(hosts.line, "do not cover the state")
    assert not logged(hosts.line, "event=crashed")
    hosts.end()


def test_a_successor_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    hosts = TwoHosts(tmp_path)
    other = part(tmp_path, "b", 7, 99, "other-1-99")
    with pytest.raises(PeerError, match="step 99 of another run"):
        hosts.line.join("b", store=[*STORE, "b"], parts=(other,))
    assert not hosts.a.heard("stop") and "b" in hosts.line.coordinator._live.members
    hosts.end()


# ------------------------------------------------------------------ what is no state of this round


def test_a_whole_part_of_another_run_is_refused_by_a_job_that_has_begun(tmp_path: Path) -> None:
    """Whoever holds it keeps it, and the job goes on from its own state."""
    hosts = TwoHosts(tmp_path, nodes="1:3")
    other = part(tmp_path, "c", -1, 500, "otherrun-3-500")
    with pytest.raises(PeerError, match=r"'c' has sealed .* step 500 in another run.*scalai clean"):
        hosts.line.join("c", sealed=(other,))
    assert "c" not in hosts.line.coordinator._live.members
    hosts.begin_to_stop()
    hosts.comes_back()
    hosts.a_tells()
    hosts.a_stops()
    hosts.check()


@pytest.mark.parametrize("is_of_this_run", [True, False])
def test_what_was_left_behind_never_becomes_the_state(tmp_path: Path, is_of_this_run: bool) -> None:
    """A host that was cut off in an earlier round of this run brings its part, or one brings half
    of another run's."""
    hosts = TwoHosts(tmp_path)
    if is_of_this_run:
        left = (part(tmp_path, "c", -1, 500, f"{hosts.run}-0-500"),)
        joined: tuple[FakeAgent, ...] = (hosts.line.join("c", sealed=left),)
    else:
        whole = part(tmp_path, "c", -1, 500, "otherrun-3-500")
        halves = {host: half(whole, host, n) for n, host in enumerate("cd")}
        joined = tuple(hosts.line.join(host, sealed=(halves[host],)) for host in "cd")
    assert logged(hosts.line, "host c gives up what it had sealed at step 500")
    hosts.begin_to_stop()
    hosts.comes_back()
    hosts.a_tells()
    hosts.a_stops()
    hosts.check()
    assert not any(agent.heard("commit") for agent in joined)


def test_where_all_hosts_were_lost_a_person_may_go_back_to_what_the_job_had_dropped(
    tmp_path: Path,
) -> None:
    """Their memory is lost, and a disk has only an older generation."""
    line = Line(tmp_path, "--nnodes", "1:2", "--settle-s", "0.2")
    older, newest = part(tmp_path, "a", 3, 20, "r-1-20"), part(tmp_path, "a", 4, 30, "r-1-30")
    first = line.join("a", parts=(older, newest))
    assert first.wait_for("start")["generation"] == 4
    wait_until(lambda: first.heard("drop") != [], "the older one is dropped")
    first.leave()
    wait_until(lambda: logged(line, "waiting for more hosts"), "nobody is left")
    again = line.join("a", parts=(older,))
    wait_until(lambda: logged(line, "scalai resume"), "it waits for the newest one")
    assert not again.heard("drop") and not again.heard("start")
    with closing(Channel(line.coordinator.address, TOKEN)) as person:
        person.call(Resume(3, dry_run=False))
    assert again.wait_for("start")["generation"] == 3
    line.end()


@pytest.mark.parametrize("has_joined", [False, True], ids=["", "a host joins"])
def test_what_a_round_has_sealed_that_computes_otherwise_is_no_state(
    tmp_path: Path, has_joined: bool
) -> None:
    """Its workers train already when those of the round before tell what they have computed; while
    they stop a host may join."""
    hosts, old = TwoHosts(tmp_path), 99
    live = hosts.line.coordinator._live
    with hosts.line.coordinator._lock:
        assert live.state.current is not None
        ran = replace(live.state.current, micro_batch_size=7)
        asked = Asked(old, frozenset("ab"), until=time.monotonic() + DEADLINE_S)
        function = replace(live.state.function, proof=Waiting(asked), after=Numbers(5.0, 2.0))
        live.state = but(live.state, ran=ran, function=function)
    hosts.step = 7
    for host in "ab":
        agent, message = getattr(hosts, host), manifest_bytes(hosts.sealed(host))
        agent.tell("sealed", round=1, reason="snapshot", part=message, seconds={})
    for agent in (hosts.a, hosts.b):
        agent.tell("stepped", round=old, numbers=Numbers(5.0, 2.1))
    if has_joined:
        hosts.b.unanswered = {"stop"}
        hosts.b.wait_for("stop")
        hosts.line.join("c")
        hosts.a_stops()
        hosts.b.tell("stopped", round=1, newest=7)
    else:
        hosts.a_stops()
    assert hosts.a.wait_for("start", 2)["generation"] == 1
    assert logged(hosts.line, "event=function_differs level=WARNING")
    assert logged(hosts.line, "event=went_back steps_lost=7")
    assert not logged(hosts.line, "event=snapshot committed")
    assert not logged(hosts.line, "event=recovered")
    hosts.end()
