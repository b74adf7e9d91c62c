"""The law of a host: stops, those that wait for a save of the training's own, and those at which
workers die or hang."""

import pytest

from scalai.core.host import actions, stops
from scalai.core.host.events import (
    Agreed,
    GroupOver,
    GroupSeen,
    GroupStarted,
    SealDone,
    WorkerGone,
)
from scalai.core.messages import commands, reports
from scalai.core.messages.reports import WorkersFailed
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    BeginSnapshot,
    RankStepped,
    RankWritten,
    Stand,
    WorkerRequest,
)
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import whole
from support.law_host import LawHost
from support.wire_words import start

NONE = JsonText.of(None)
FREE = GroupSeen(newest=7)
SAVING = GroupSeen(newest=7, save=4, looks=1)


def written(rank: int) -> WorkerRequest:
    return RankWritten(rank, 1, 8, (rank,), f"dp{rank}", NONE, NONE, 12, {"snapshot": 1.0})


@pytest.fixture
def host() -> LawHost:
    host = LawHost()
    host.begin()
    return host


def test_a_stop_is_proposed_and_reported_as_far_as_the_workers_are(host: LawHost) -> None:
    host.obey(commands.Prepare(1, 8), FREE)
    assert host.done[-2:] == [actions.WantStop(1, 0), commands.Prepare(1, 8)]
    host.feed(reports.Prepared(1, 8, 7))
    (prepared,) = host.reports()
    assert (prepared.stop, prepared.newest, prepared.round) == (8, 7, 1)  # type: ignore[union-attr]


@pytest.mark.fault
def test_a_stop_is_proposed_once_no_save_is_in_flight(
    host: LawHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "HELD_TELL_S", 0.0)
    host.obey(commands.Prepare(1, 8), SAVING)
    host.tick(seen=SAVING)
    assert host.reported() == ["held", "held"], "it is told again"
    assert "iteration 4 is in flight" in str(host.reports()[0])
    assert actions.WantStop(1, 1) in host.done and not host.all(commands.Prepare)
    host.tick(seen=FREE)
    host.tick(seen=FREE)
    assert host.all(commands.Prepare) == [commands.Prepare(1, 8)]
    assert host.all(actions.WantStop)[-1] == actions.WantStop(1, 0)


def test_a_held_stop_that_is_taken_back_or_whose_round_has_ended_is_not_proposed(
    host: LawHost,
) -> None:
    host.obey(commands.Prepare(1, 8), SAVING)
    host.obey(commands.Withdraw(1))
    assert host.all(actions.WantStop)[-1] == actions.WantStop(1, 0)
    host.tick(seen=FREE)
    host.obey(commands.Prepare(1, 8), SAVING)
    host.obey(start(2, 0, 2))
    host.feed(GroupStarted(2))
    host.tick(seen=FREE)
    assert host.reported() == ["held", "held"] and not host.all(commands.Prepare)


@pytest.mark.fault
def test_workers_that_come_to_a_stop_with_a_save_are_sent_on_and_that_is_told_once(
    host: LawHost,
) -> None:
    host.agree(8)
    calls = [host.ask(Stand(rank, 1, 8, 8)) for rank in range(2)]
    assert host.reported() == ["held"] and not host.answers()
    host.obey(commands.Withdraw(1))
    assert set(host.answers()) == set(calls)
    late = host.ask(Stand(1, 1, 8, 8))
    assert late in host.answers(), "its page was read before the stop was taken back"
    host.obey(commands.Prepare(1, 9), FREE)
    assert host.all(actions.WantStop)[-1] == actions.WantStop(1, 2), "it may save there as well"


def test_workers_that_stood_when_their_round_ended_keep_no_later_stop_from_being_told(
    host: LawHost,
) -> None:
    host.agree(8)
    host.ask(Stand(0, 1, 8, 8))
    host.obey(start(2, 0, 2))
    host.feed(GroupStarted(2))
    host.agree(9, 2)
    host.ask(Stand(0, 2, 9, 9))
    assert host.reported() == ["held", "held"]


@pytest.mark.fault
def test_of_a_save_that_nobody_looks_for_any_more_that_is_said(host: LawHost) -> None:
    """The training hangs, and the change waits with it."""
    host.obey(commands.Prepare(1, 8), SAVING)
    host.tick(stops.UNLOOKED_S - 1, SAVING)
    assert "no worker has looked" not in str(host.reports()[-1])
    host.tick(stops.HELD_TELL_S + 2, SAVING)
    assert "no worker has looked for its end for" in str(host.reports()[-1])


@pytest.mark.fault
def test_a_leaving_host_waits_for_a_save_as_long_as_somebody_looks_for_it(host: LawHost) -> None:
    from scalai.core.host.events import LeaveAsked

    host.feed(LeaveAsked())
    for looks in range(1, 5):
        host.tick(8.0, GroupSeen(save=4, looks=looks))
    assert host.state.exit is None
    host.tick(8.0, GroupSeen(save=4, looks=4))
    host.tick(8.0, GroupSeen(save=4, looks=4))
    assert host.state.exit == 1, "the workers hang"


def test_commands_for_a_round_that_is_not_there_are_left(host: LawHost) -> None:
    for command in (
        commands.Prepare(2, 8), commands.Agree(2, 8), commands.TakeSnapshot(2),
        commands.Withdraw(2), commands.Expect(2, 5), commands.Proceed(2),
    ):  # fmt: skip
        assert host.obey(command, FREE) == ()


def test_a_stop_that_is_taken_back_sends_on_whoever_waits_at_it() -> None:
    host = LawHost()
    host.train()
    host.agree(8)
    calls = [host.ask(BeginSnapshot(rank, 1, "stop", 8)) for rank in range(2)]
    assert host.reported()[-1] == "arrived" and not set(calls) & set(host.answers())
    host.obey(commands.Withdraw(1))
    assert [host.answers()[call] for call in calls] == [None, None]
    late = host.ask(BeginSnapshot(0, 1, "stop", 8))
    assert host.answers()[late] is None


@pytest.mark.fault
@pytest.mark.parametrize(("other", "named"), [(5, ""), (6, "'param/w' on ranks [0, 1]")])
def test_replicas_that_differ_at_a_stop_are_named_before_anybody_writes(
    other: int, named: str
) -> None:
    host = LawHost()
    held = Collection.of([(Tensor("param/w", (2,), "F32"), whole((2,)))])
    host.begin(1, 2)
    host.publish(1, 2, held=dict.fromkeys(range(2), held))
    host.obey(commands.Expect(1, 1))
    for rank in range(2):
        host.ask(RankStepped(rank, 1, 1, None))
    host.agree(8)
    calls = [
        host.ask(BeginSnapshot(rank, 1, "stop", 8, (value,)))
        for rank, value in enumerate((5, other))
    ]
    arrived = host.reports()[-1]
    assert isinstance(arrived, reports.Arrived) and arrived.differing == named
    assert not set(calls) & set(host.answers())


def test_replicas_that_differ_at_the_start_are_named_and_the_job_begins() -> None:
    host = LawHost()
    held = Collection.of([(Tensor("param/w", (2,), "F32"), whole((2,)))])
    host.begin(1, 2)
    host.publish(1, 2, held=dict.fromkeys(range(2), held))
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "start", 0, (rank + 1,)))
    (said,) = [log.text for log in host.all(actions.Log) if "replicas_differ" in log.text]
    assert "'param/w' on ranks [0, 1]" in said


def test_a_worker_that_dies_at_the_stop_is_written_for_by_a_replica() -> None:
    host = LawHost()
    slot = host.train()
    host.agree(8)
    host.ask(BeginSnapshot(0, 1, "stop", 8))
    host.feed(WorkerGone(1, 1, GroupSeen(reached=frozenset({0, 1}))))
    assert host.reported()[-1] == "arrived"
    host.obey(commands.TakeSnapshot(1))
    first = host.ask(written(0))
    order = host.answers()[first]
    assert order is not None and order.path == slot.orders[1].path  # type: ignore[attr-defined]
    last = host.ask(written(0))
    (seal,) = host.all(actions.Seal)
    assert set(seal.parts) == {0} and len(seal.taken_over) == 1 and host.answers()[last] is None


def test_workers_that_leave_once_all_is_sealed_are_not_called_lost() -> None:
    host = LawHost()
    slot = host.train()
    host.agree(8)
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "stop", 8))
    host.obey(commands.TakeSnapshot(1))
    for rank in range(2):
        host.ask(written(rank))
    host.feed(SealDone(1, slot, b"manifest"))
    host.feed(WorkerGone(1, 0, GroupSeen(reached=frozenset({0, 1}))))
    assert not [each for each in host.all(actions.Log) if "worker_lost" in each.text]


def test_a_worker_that_dies_before_the_stop_fails_the_round() -> None:
    host = LawHost()
    host.train()
    host.agree(8)
    host.feed(WorkerGone(1, 1, GroupSeen()))
    assert "workers_failed" not in host.reported(), "how it ends tells"
    host.tick(seen=GroupSeen(ended={1: -9}))
    failed = host.reports()[-1]
    assert (
        isinstance(failed, WorkersFailed) and failed.is_chance and "ranks [1] died" in failed.reason
    )


def test_workers_that_have_finished_on_the_way_to_a_stop_are_told_of_once() -> None:
    host = LawHost()
    host.train()
    host.agree(8)
    for _ in range(3):
        host.tick(seen=GroupSeen(ended={0: 0, 1: 0}))
        if host.done[-1] == actions.PollGroup(1):
            host.feed(GroupOver(1))
    assert host.reported().count("finished") == 1


@pytest.mark.fault
def test_a_dead_worker_whose_connection_stands_is_given_up_and_not_killed_again() -> None:
    """A process that it has forked holds the connection."""
    host = LawHost(drain_timeout_s=5.0)
    host.train()
    host.agree(8)
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "stop", 8))
    host.obey(commands.TakeSnapshot(1))
    host.ask(written(0))
    dead = GroupSeen(reached=frozenset({0, 1}), ended={1: -9})
    host.tick(1.0, dead)
    assert not host.all(actions.Kill)
    host.tick(6.0, dead)
    assert host.all(actions.Kill) == [actions.Kill(1, frozenset())]
    assert host.state.round is not None and host.state.round.lost == {1}
    host.ask(written(0))
    assert len(host.all(actions.Seal)) == 1


def test_workers_that_hang_in_their_snapshot_are_ended() -> None:
    host = LawHost(drain_timeout_s=5.0)
    host.train()
    host.agree(8)
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "stop", 8))
    host.obey(commands.TakeSnapshot(1))
    seen = GroupSeen(reached=frozenset({0, 1}))
    for seconds in (1.0, 4.0):
        host.tick(seconds, seen)
    assert not host.all(actions.Kill)
    host.tick(2.0, seen)
    assert host.all(actions.Kill) == [actions.Kill(1, frozenset({0, 1}))]


def test_an_agreed_stop_is_not_the_stop_of_workers_that_have_ended(host: LawHost) -> None:
    host.obey(commands.Agree(1, 8))
    host.feed(GroupOver(1))
    assert host.state.round is not None and not host.state.round.is_draining
    host.feed(Agreed(2, 8))
    assert not host.state.round.is_draining and host.reported() == ["finished"]
