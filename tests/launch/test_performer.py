"""Decisions of a host's law, performed on a real store; workers are stand-ins."""

import errno
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.dataset.table import DatasetTable
from scalai.core.errors import PeerError, ProofError, StoreError
from scalai.core.host import actions, events
from scalai.core.host.events import Event
from scalai.core.messages import commands, reports
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import Welcome
from scalai.launch.agent import performer as performer_module
from scalai.launch.agent.fetch import Moving, Restore
from scalai.launch.agent.holdings import Holdings
from scalai.launch.agent.host_checks import HealthCheck
from scalai.launch.agent.loop import THREADS
from scalai.launch.agent.performer import Hands, Performer
from scalai.launch.command_runner import CommandRunner
from scalai.runtime.lanes import Lanes
from scalai.store.host import HostStore
from scalai.store.parts import snapshot_name
from support.law_host import LawHost
from support.store_states import generation, is_whole, snapshot, two_ranks
from support.wire_words import start, workers

DEADLINE_S = 60.0


class FakeGroup:
    """Workers of a round that do what a test says."""

    def __init__(self) -> None:
        self.outcome: Any = None
        self.is_ended = False
        self.kernel = threading.Event()
        """Set once the kernel can end the workers."""
        self.kernel.set()
        self.page: Any = SimpleNamespace(
            written=[], save_in_flight=lambda: None, save_looks=lambda: 0,
            has_reached_stop=lambda local: local == 1,
            prepare=lambda stop: self.page.written.append(("prepare", stop)),
            agree=lambda stop, proves: self.page.written.append(("agree", stop)),
        )  # fmt: skip

    def pids(self) -> dict[str, int]:
        return {}

    def poll(self) -> Any:
        return self.outcome

    def ended(self) -> dict[int, int]:
        return {1: -9}

    def newest_step(self) -> int:
        return 7

    def space(self, begin: int, every: int) -> int:
        self.page.written.append(("space", begin, every))
        return self.newest_step()

    def end(self, is_over: object = None) -> None:
        self.kernel.wait(DEADLINE_S)
        self.is_ended = True


def nothing() -> None: ...


class Set:
    """A performer on a store, and what it tells the coordinator and feeds its agent's loop."""

    def __init__(self, store: HostStore, disk: Path) -> None:
        self.fed: queue.Queue[Event] = queue.Queue()
        self.told: queue.Queue[reports.Report] = queue.Queue()
        self.group = FakeGroup()
        self.start_group: Callable[[Any], Any] = lambda wanted: self.group
        self.rejoin: Callable[[], None] = nothing
        lanes = Lanes(THREADS, lambda due: due())
        lanes.start()
        config = SimpleNamespace(
            resize=SimpleNamespace(standby="never"), store=SimpleNamespace(emergency=True)
        )
        spec: Any = SimpleNamespace(
            config=config, job="job", is_elastic=True, is_fresh=False, durable_dir=disk,
            hook_settings=lambda world: {"world": world}, dataset=lambda facts: DatasetTable(),
        )  # fmt: skip
        holdings = Holdings(spec, store, self.told.put, lanes, lambda due: due())
        groups: Any = SimpleNamespace(start=lambda wanted: self.start_group(wanted))
        stacks: Any = None
        self.performer = Performer(
            Hands(
                spec, "a", b"token", store, holdings, groups, stacks, lanes, self.told.put,
                self.fed.put, lambda: self.rejoin(), lambda: False,
                HealthCheck(None, {}, CommandRunner()),
            )
        )  # fmt: skip

    def perform(self, action: Any) -> list[Event]:
        return list(self.performer.perform(action))

    def later(self, action: Any) -> Event:
        """Return the event of an action that runs beside the loop."""
        assert self.perform(action) == []
        return self.fed.get(timeout=DEADLINE_S)


@pytest.fixture
def made(store: HostStore, tmp_path: Path) -> Iterator[Set]:
    yield Set(store, tmp_path / "disk")


# ---------------------------------------------------------------------- commits


def commit(number: int, name: str) -> commands.Commit:
    return commands.Commit(number, name, None, {})


@pytest.fixture
def sealed(store: HostStore) -> str:
    """The name of a sealed snapshot of step 3."""
    return snapshot_name(snapshot(store, 3, snapshot="r-1-3")[1])


@pytest.fixture
def waiting(made: Set, sealed: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a snapshot whose commit found no room; since then there is room."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr("os.fsync", full)
        (failed,) = made.perform(commit(3, sealed))
    assert isinstance(failed, events.Failed) and "it stays sealed. Make room" in failed.reason
    return sealed


@pytest.mark.fault
def test_what_there_is_no_room_for_stays_sealed_and_is_committed_later(
    store: HostStore, made: Set, waiting: str
) -> None:
    snapshot(store, 4, snapshot="another")
    made.perform(actions.DiscardSealed(frozenset({waiting})))
    assert [snapshot_name(manifest) for _, manifest in store.sealed()] == [waiting]
    assert made.perform(commit(3, waiting)) == [reports.Committed(3)]
    assert is_whole(store, 3, step=3) and made.performer.generations() == {3}
    assert made.perform(commit(3, waiting)) == [reports.Committed(3)], "told twice, done once"


@pytest.mark.fault
def test_what_waits_for_its_commit_is_let_go_of_with_its_number(
    store: HostStore, made: Set, waiting: str
) -> None:
    made.perform(commands.DropSnapshot("another"))
    made.perform(commands.Drop(3))
    assert len(store.sealed()) == 1
    made.perform(commands.DropSnapshot(waiting))
    assert store.sealed() == [] and not list(store.directory.glob("snapshot-*"))


def test_nothing_to_commit_is_said(store: HostStore, made: Set, sealed: str) -> None:
    (found,) = made.perform(commit(4, "another"))
    assert isinstance(found, events.NothingToCommit) and "sealed in" in found.found
    assert store.generations() == []


@pytest.mark.fault
def test_what_is_damaged_in_memory_is_examined_when_it_is_archived(
    store: HostStore, made: Set
) -> None:
    generation(store, 3, step=30)
    path = store.generation_directory(3) / "rank-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 0xFF]))
    made.perform(commands.Archive(7, 3, own_only=True))
    told = [made.told.get(timeout=DEADLINE_S) for _ in range(2)]
    (archived,) = [one for one in told if isinstance(one, reports.Archived)]
    (examined,) = [one for one in told if isinstance(one, reports.Examined)]
    assert (archived.order, archived.size_bytes) == (7, 0) and "rank-1" in archived.reason
    assert examined.generation == 3 and any("rank-1" in each for each in examined.damage)


# ---------------------------------------------------------------------- snapshots


@pytest.mark.fault
def test_files_are_made_beside_the_loop_and_a_failure_gives_their_room_back(
    store: HostStore, made: Set, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round fails; without that room no later one would find any."""
    reserved = made.later(actions.Reserve(1, two_ranks()))
    assert isinstance(reserved, events.Done)
    slot: Any = reserved.result
    assert set(slot.orders) == {0, 1}

    def refuse(*_: Any, **__: Any) -> Any:
        raise StoreError("no room.")

    monkeypatch.setattr(store, "seal", refuse)
    seal, reserve = actions.Seal(1, slot, 7, {}, {}, ()), actions.Reserve(1, two_ranks())
    assert made.later(seal) == events.Failed(seal, "sealing the snapshot: no room.")
    assert not slot.directory.exists()
    monkeypatch.setattr(store, "reserve", refuse)
    assert made.later(reserve) == events.Failed(reserve, "making room for a snapshot: no room.")


# ---------------------------------------------------------------------- restores

FETCH = actions.FetchWanted(start(7), {})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ProofError("2 pieces differ"), reports.Unproven(7, "2 pieces differ")),
        (PeerError("b is gone"), events.Failed(FETCH, "planning and moving: b is gone")),
    ],
)
def test_what_is_not_what_was_promised_fails_no_round(
    made: Set, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: Event
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(performer_module, "prepare_restore", fail)
    assert made.later(FETCH) == expected


@pytest.mark.fault
def test_bytes_that_come_are_told_of_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they do, the coordinator does not take the start for one that hangs."""
    monkeypatch.setattr("scalai.launch.agent.fetch.TELL_EVERY_S", 0.0)
    moving = Moving(7)
    assert moving.news() is None, "nothing has come"
    threads = [threading.Thread(target=moving.arrived, args=(1 << 20,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [moving.news() for _ in range(3)] == [8 << 20, None, None]
    moving.arrived(1)
    assert moving.news() == (8 << 20) + 1


@pytest.mark.fault
def test_no_bytes_are_told_of_behind_what_was_restored(
    made: Set, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a start hangs, the last that was told says where it stands."""

    def fetch(*given: Any) -> Any:
        given[-1](1 << 20)
        return Restore()

    monkeypatch.setattr(performer_module, "prepare_restore", fetch)
    assert isinstance(made.later(FETCH), events.Done)
    assert all(getattr(event, "round", None) != 7 for event in made.performer.arrivals())


# ---------------------------------------------------------------------- workers

END = actions.EndGroup(3, 0.0)


def begin(made: Set, *, is_standby: bool = False) -> events.Done | events.Failed:
    (event,) = made.perform(actions.StartGroup(workers(3), is_standby=is_standby))
    assert isinstance(event, events.Done | events.Failed)
    return event


def test_workers_are_started_asked_and_ended(made: Set) -> None:
    assert isinstance(begin(made), events.Done)
    space, agree = commands.Space(3, 9, 4), commands.Agree(3, 8)
    assert made.perform(commands.Prepare(3, 8)) == [reports.Prepared(3, 8, 7)]
    assert made.perform(space) == [events.Done(space, 7)]
    assert made.perform(actions.PollGroup(3)) == []
    assert made.perform(agree) == [events.Done(agree)]
    assert made.group.page.written == [("prepare", 8), ("space", 9, 4), ("agree", 8)]
    made.group.outcome = SimpleNamespace(failures=("rank 1 was killed by SIGKILL",))
    over = events.GroupOver(3, ("rank 1 was killed by SIGKILL",), False, True)
    assert made.perform(actions.PollGroup(3)) == [over] == made.perform(commands.Agree(3, 9))
    assert made.later(END) == events.Done(END, 7)
    assert made.group.is_ended and not made.performer.groups


def test_workers_that_the_kernel_cannot_end_do_not_hold_up_the_loop(made: Set) -> None:
    begin(made)
    made.group.kernel.clear()
    assert made.perform(END) == []
    assert not made.group.is_ended and made.fed.empty()
    made.group.kernel.set()
    assert made.fed.get(timeout=DEADLINE_S) == events.Done(END, 7)


def test_workers_that_cannot_be_started_or_built_are_told_of(made: Set) -> None:
    def fail(wanted: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    made.start_group = fail
    for is_standby, reason in ((True, "standby is never"), (False, "temporarily")):
        failed = begin(made, is_standby=is_standby)
        assert isinstance(failed, events.Failed) and reason in failed.reason


def test_what_is_seen_of_workers_is_their_page_and_their_ends(made: Set) -> None:
    host = LawHost()
    assert made.performer.seen(host.state.round) is None
    host.begin(3)
    begin(made)
    seen = made.performer.seen(host.state.round)
    assert seen == events.GroupSeen(newest=7, reached=frozenset({1}))
    host.agree(8, 3)
    seen = made.performer.seen(host.state.round)
    assert seen is not None and seen.ended == {1: -9}


def test_calls_are_answered_refused_and_welcomed(made: Set) -> None:
    answers: list[Future[Any]] = [Future() for _ in range(4)]
    calls = [made.performer.take_call(answer) for answer in answers]
    wanted = workers(3, facts=JsonText.of({"a": 1}), snapshot_every=5)
    made.perform(actions.AnswerCall(calls[0], 5))
    made.perform(actions.AnswerCall(calls[1], error="it has ended."))
    made.perform(actions.AnswerHello(calls[2], wanted, True))
    made.performer.close()
    assert answers[0].result() == 5
    for answer, reason in ((answers[1], "it has ended"), (answers[3], "the agent ends")):
        with pytest.raises(PeerError, match=reason):
            answer.result()
    welcome = answers[2].result()
    assert isinstance(welcome, Welcome) and welcome.is_standby and welcome.snapshot_every == 5
    assert welcome.facts.value() == {"a": 1} and welcome.settings.value() == {"world": 1}


@pytest.mark.fault
def test_a_host_that_cannot_join_again_says_why(made: Set) -> None:
    def fail() -> None:
        raise StoreError("/durable cannot be read.")

    assert made.perform(actions.Rejoin()) == []
    made.rejoin = fail
    (failed,) = made.perform(actions.Rejoin())
    assert isinstance(failed, events.Failed) and "/durable cannot be read" in failed.reason
