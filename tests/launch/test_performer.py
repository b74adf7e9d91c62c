"""What a host's law decides, carried out on a real store; workers are stand-ins."""

import errno
import queue
import threading
from collections.abc import Iterator
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
from scalai.launch.agent.fetch import Restore
from scalai.launch.agent.health import HealthCheck
from scalai.launch.agent.loop import THREADS
from scalai.launch.agent.moving import Moving
from scalai.launch.agent.performer import Hands, Performer
from scalai.runtime.lanes import Lanes
from scalai.store.host import HostStore
from scalai.store.parts import snapshot_name
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


class Set:
    """A performer on a store, and what reaches its agent's loop."""

    def __init__(self, store: HostStore) -> None:
        self.fed: queue.Queue[Event] = queue.Queue()
        self.group, self.reported = FakeGroup(), list[Any]()
        groups: Any = SimpleNamespace(start=lambda wanted: self.group)
        self.groups = groups
        lanes = Lanes(THREADS, lambda due: due())
        lanes.start()
        resize = SimpleNamespace(standby="never")
        config = SimpleNamespace(
            resize=resize,
            store=SimpleNamespace(async_snapshots=True, emergency=True),
        )
        spec: Any = SimpleNamespace(
            config=config, is_elastic=True, hook_settings=lambda world: {"world": world},
            dataset=lambda facts: DatasetTable(),
        )  # fmt: skip
        nothing: Any = None
        self.hands = Hands(
            spec, "a", b"token", store, nothing, self.groups, nothing, lanes,
            self.reported.append, self.fed.put, self.rejoin, lambda: False,
            HealthCheck(None, 1.0, {}),
        )  # fmt: skip
        self.performer = Performer(self.hands)
        self.rejoin_error: Exception | None = None

    def rejoin(self) -> None:
        if self.rejoin_error is not None:
            raise self.rejoin_error

    def perform(self, action: Any) -> list[Event]:
        return list(self.performer.perform(action))

    def later(self, action: Any) -> Event:
        """Return what comes of an action that runs beside the loop."""
        assert self.perform(action) == []
        return self.fed.get(timeout=DEADLINE_S)


@pytest.fixture
def made(store: HostStore) -> Iterator[Set]:
    yield Set(store)


# ---------------------------------------------------------------------- commits


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.fault
def test_what_there_is_no_room_for_stays_sealed_and_is_committed_later(
    store: HostStore, made: Set, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slot, manifest = snapshot(store, 3)
    name = snapshot_name(manifest)
    with monkeypatch.context() as context:
        context.setattr("os.fsync", full)
        command = commands.Commit(3, name, None, {})
        first = actions.TryCommit(command, is_again=False)
        assert made.perform(first) == [events.CommitWaits(3)]
        again = actions.TryCommit(command, is_again=True)
        assert made.perform(again) == [events.CommitWaits(3)]
    assert [sealed.directory for sealed, _ in store.sealed()] == [slot.directory]
    assert caplog.text.count("it stays sealed. Make room") == 1
    made.perform(actions.DiscardSealed(frozenset({name})))
    assert made.perform(again) == [reports.Committed(3)]
    assert is_whole(store, 3, step=3) and made.performer.generations() == {3}


@pytest.mark.fault
def test_what_waits_for_its_commit_is_let_go_of_with_its_number(
    store: HostStore, made: Set, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, manifest = snapshot(store, 3)
    name = snapshot_name(manifest)
    with monkeypatch.context() as context:
        context.setattr("os.fsync", full)
        commit = actions.TryCommit(commands.Commit(3, name, None, {}), is_again=False)
        assert made.perform(commit) == [events.CommitWaits(3)]
    made.perform(commands.DropSnapshot("another"))
    assert [sealed.directory for sealed, _ in store.sealed()] == [slot.directory]
    made.perform(commands.Drop(3))
    made.perform(commands.DropSnapshot(name))
    assert store.sealed() == [] and store.generations() == [] and not slot.directory.exists()


def test_nothing_to_commit_is_said_once(store: HostStore, made: Set) -> None:
    snapshot(store, 3)
    nothing = commands.Commit(4, "another", None, {})
    (found,) = made.perform(actions.TryCommit(nothing, is_again=False))
    assert isinstance(found, events.NothingToCommit) and "sealed in" in found.found
    assert made.perform(actions.TryCommit(nothing, is_again=True)) == []
    assert store.generations() == []


def test_a_commit_that_is_told_twice_is_done_once(store: HostStore, made: Set) -> None:
    manifest = generation(store, 3, step=3)
    command = commands.Commit(3, snapshot_name(manifest), None, {})
    again = actions.TryCommit(command, is_again=False)
    assert made.perform(again) == [reports.Committed(3)] and store.generations() == [3]


def test_what_was_sealed_and_has_no_number_is_given_up(store: HostStore, made: Set) -> None:
    slot, _ = snapshot(store, 3)
    made.perform(actions.DiscardSealed(frozenset()))
    assert store.sealed() == [] and not slot.directory.exists()


def test_a_sealed_snapshot_that_is_no_state_goes_and_others_stay(
    store: HostStore, made: Set
) -> None:
    slot, manifest = snapshot(store, 3)
    made.perform(commands.DropSnapshot("another"))
    assert len(store.sealed()) == 1
    made.perform(commands.DropSnapshot(snapshot_name(manifest)))
    assert store.sealed() == [] and not slot.directory.exists()


# ---------------------------------------------------------------------- snapshots


def test_files_are_made_beside_the_loop_or_there_is_no_room(
    store: HostStore, made: Set, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = two_ranks()
    reserved = made.later(actions.Reserve(1, held))
    assert isinstance(reserved, events.Reserved) and set(reserved.slot.orders) == {0, 1}

    def no_room(held: Any) -> Any:
        raise StoreError("no room.")

    monkeypatch.setattr(store, "reserve", no_room)
    assert made.later(actions.Reserve(1, held)) == events.NoRoom(1, "no room.")


@pytest.mark.fault
def test_a_snapshot_that_cannot_be_sealed_gives_its_room_back(
    store: HostStore, made: Set, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round fails; without that room no later one would find any."""
    slot = store.reserve(two_ranks())

    def refuse(*_: Any, **__: Any) -> Any:
        raise StoreError("no room for the manifest.")

    monkeypatch.setattr(store, "seal", refuse)
    failed = made.later(actions.Seal(1, slot, 7, {}, {}, ()))
    assert failed == events.WorkFailed(1, "sealing the snapshot: no room for the manifest.")
    made.perform(actions.StopReserving())
    assert not slot.directory.exists() and not store._is_giving_back()


# ---------------------------------------------------------------------- restores


def test_what_is_not_what_was_promised_fails_no_round(
    made: Set, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, expected in (
        (ProofError("2 pieces differ"), reports.Unproven(7, "2 pieces differ")),
        (PeerError("b is gone"), events.WorkFailed(7, "planning and moving: b is gone")),
    ):

        def fail(*_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(performer_module, "prepare_restore", fail)
        assert made.later(actions.FetchWanted(start(7), {})) == expected


@pytest.mark.fault
def test_bytes_that_come_are_told_of_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they do, the coordinator does not take the start for one that hangs."""
    monkeypatch.setattr("scalai.launch.agent.moving.TELL_EVERY_S", 0.0)
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
    restore = Restore({}, None, plan_s=0.0, move_s=0.0, bytes_local=0, bytes_remote=1)

    def fetch(*given: Any) -> Any:
        given[-1](1 << 20)
        return restore

    monkeypatch.setattr(performer_module, "prepare_restore", fetch)
    assert isinstance(made.later(actions.FetchWanted(start(7), {})), events.WantedFetched)
    assert all(getattr(event, "round", None) != 7 for event in made.performer.arrivals())


# ---------------------------------------------------------------------- workers


def test_workers_are_started_asked_and_ended(made: Set) -> None:
    assert made.perform(actions.StartGroup(workers(3), is_standby=False)) == [
        events.GroupStarted(3)
    ]
    assert made.perform(commands.Prepare(3, 8)) == [reports.Prepared(3, 8, 7)]
    assert made.perform(commands.Space(3, 9, 4)) == [events.Spaced(commands.Space(3, 9, 4), 7)]
    assert made.perform(actions.PollGroup(3)) == []
    assert made.perform(commands.Agree(3, 8)) == [events.Agreed(3, 8)]
    assert made.group.page.written == [("prepare", 8), ("space", 9, 4), ("agree", 8)]
    made.group.outcome = SimpleNamespace(failures=("rank 1 was killed by SIGKILL",))
    over = events.GroupOver(3, ("rank 1 was killed by SIGKILL",), False, True)
    assert made.perform(actions.PollGroup(3)) == [over] == made.perform(commands.Agree(3, 9))
    assert made.later(actions.EndGroup(3, 5.0)) == events.GroupEnded(3, 7)
    assert made.group.is_ended and not made.performer.groups


def test_workers_that_the_kernel_cannot_end_do_not_hold_up_the_loop(made: Set) -> None:
    made.perform(actions.StartGroup(workers(3), is_standby=False))
    made.group.kernel.clear()
    assert made.perform(actions.EndGroup(3, 0.0)) == []
    assert not made.group.is_ended and made.fed.empty()
    made.group.kernel.set()
    assert made.fed.get(timeout=DEADLINE_S) == events.GroupEnded(3, 7)
    made.performer.close()


def test_workers_that_cannot_be_started_or_built_are_told_of(made: Set) -> None:
    (never,) = made.perform(actions.StartGroup(workers(3), is_standby=True))
    assert isinstance(never, events.GroupNotStarted) and "standby is never" in never.reason

    def fail(wanted: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    made.groups.start = fail
    (failed,) = made.perform(actions.StartGroup(workers(3), is_standby=False))
    assert isinstance(failed, events.GroupNotStarted) and "temporarily" in failed.reason


def test_what_is_seen_of_workers_is_their_page_and_their_ends(made: Set) -> None:
    from support.law_host import LawHost

    host = LawHost()
    assert made.performer.seen(host.state.round) is None
    host.begin(3)
    made.perform(actions.StartGroup(workers(3), is_standby=False))
    assert made.performer.seen(host.state.round) == events.GroupSeen(
        newest=7, reached=frozenset({1})
    )
    host.agree(8, 3)
    seen = made.performer.seen(host.state.round)
    assert seen is not None and seen.ended == {1: -9}


def test_calls_are_answered_refused_and_welcomed(made: Set) -> None:
    from concurrent.futures import Future

    answers: list[Future[Any]] = [Future() for _ in range(4)]
    calls = [made.performer.take_call(answer) for answer in answers]
    made.perform(actions.AnswerCall(calls[0], 5))
    made.perform(actions.RefuseCall(calls[1], "it has ended."))
    made.perform(
        actions.AnswerHello(
            calls[2], workers(3, facts=JsonText.of({"a": 1}), snapshot_every=5), True
        )
    )
    assert answers[0].result() == 5
    with pytest.raises(PeerError, match="it has ended"):
        answers[1].result()
    welcome = answers[2].result()
    assert isinstance(welcome, Welcome) and welcome.is_standby and welcome.snapshot_every == 5
    assert welcome.facts.value() == {"a": 1} and welcome.settings.value() == {"world": 1}
    made.performer.close()
    with pytest.raises(PeerError, match="the agent ends"):
        answers[3].result()


@pytest.mark.fault
def test_a_host_that_cannot_join_again_says_why(made: Set) -> None:
    assert made.perform(actions.Rejoin()) == []
    made.rejoin_error = StoreError("/durable cannot be read.")
    (failed,) = made.perform(actions.Rejoin())
    assert isinstance(failed, events.JobLost) and "/durable cannot be read" in failed.reason
