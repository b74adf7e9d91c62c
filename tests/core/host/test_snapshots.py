"""The law of a host: room for snapshots, who writes what, and what is sealed."""

from dataclasses import replace
from typing import Any

import pytest

from scalai.core.host import actions, events, snapshots
from scalai.core.host.events import (
    Expelled,
    GroupEnded,
    GroupSeen,
    Holds,
    NoRoom,
    Reserved,
    SealDone,
    Spaced,
    TimePassed,
    WorkerGone,
    WorkFailed,
)
from scalai.core.job.remembered import Remembered
from scalai.core.messages import commands, reports
from scalai.core.messages.shared import JsonText, Shared
from scalai.core.messages.worker_messages import (
    AwaitSlot,
    BeginSnapshot,
    RankStepped,
    RankUnwritten,
    RankWritten,
)
from scalai.core.tensors.holders import SourceList, source_list
from support.law_host import LawHost, MadeSlot
from support.wire_words import start

NONE = JsonText.of(None)


def written(rank: int, step: int = 7) -> RankWritten:
    return RankWritten(rank, 1, step, (rank,), f"dp{rank}", NONE, NONE, 12, {"snapshot": 1.0})


def snapshot(host: LawHost, step: int = 7) -> actions.Seal:
    """Have both workers write a snapshot; return how it is to be sealed."""
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "snapshot", step))
    for rank in range(2):
        host.ask(written(rank, step))
    return host.all(actions.Seal)[-1]


@pytest.mark.fault
def test_a_state_says_what_persons_have_asked_of_its_job() -> None:
    host = LawHost()
    host.train()
    assert "asked" not in snapshot(host).about["facts"]
    known = Remembered(1, 1, JsonText.of([2, 1, "tp2"]), 1, 3, 0, 0, None, (), ())
    host = LawHost()
    host.train()
    host.obey(commands.Remember(Shared(known)))
    assert snapshot(host).about["facts"]["asked"] == [2, 1, "tp2"]


def test_a_snapshot_is_sealed_once_all_have_written_and_the_next_one_has_room() -> None:
    host = LawHost()
    slot = host.train()
    seal = snapshot(host)
    assert seal.slot is slot and seal.about["snapshot"] == "r-1-7" and set(seal.parts) == {0, 1}
    assert seal.about["hosts"] == ["a"] and seal.about["tensors"] == 5
    host.feed(SealDone(1, slot, b"manifest"))
    sealed = host.reports()[-1]
    assert isinstance(sealed, reports.Sealed) and sealed.manifest == b"manifest"
    assert (sealed.reason, dict(sealed.seconds)) == ("snapshot", {"snapshot": 1.0})
    host.feed(Holds(frozenset({1})))
    assert len(host.all(actions.Reserve)) == 2


@pytest.mark.fault
def test_while_nobody_commits_the_two_newest_snapshots_stay_and_older_ones_go() -> None:
    """The coordinator is silent: memory would fill up with the job's states."""
    host = LawHost()
    slot = host.train()
    for at in (7, 14, 21, 28):
        snapshot(host, at)
        host.feed(SealDone(1, slot, b""))
        host.tick(seen=GroupSeen(newest=at))
        host.feed(events.Reserved(1, slot))
        assert len(host.all(commands.DropSnapshot)) <= max(0, at // 7 - 3), "others may not have it"
        host.tick(seen=GroupSeen(newest=at + 2))
    assert host.all(commands.DropSnapshot) == [
        commands.DropSnapshot("r-1-7"), commands.DropSnapshot("r-1-14")
    ]  # fmt: skip
    assert "event=snapshot_given_up snapshot=r-1-7" in host.log()
    # It is back, and has heard of all of them.
    host.obey(commands.Commit(3, "r-1-7", None, {}))
    host.feed(events.NothingToCommit(3, "sealed"))
    assert host.reports()[-2:] == [reports.Doubted(3, None), reports.Committed(3)]
    host.obey(commands.Commit(4, "r-1-21", None, {}))
    host.feed(reports.Committed(4))
    snapshot(host, 35)
    host.feed(SealDone(1, slot, b""))
    host.tick(seen=GroupSeen(newest=37))
    assert len(host.all(commands.DropSnapshot)) == 2, "one that has its number is not given up"
    assert "workers_failed" not in host.reported()


def test_a_snapshot_that_is_missing_and_was_not_given_up_fails_its_round() -> None:
    host = LawHost()
    slot = host.train()
    snapshot(host)
    host.feed(SealDone(1, slot, b""))
    host.obey(commands.Commit(3, "r-1-7", None, {}))
    host.feed(events.NothingToCommit(3, "sealed"))
    assert "workers_failed" in host.reported()


def test_a_snapshot_says_of_which_runs_it_comes() -> None:
    host = LawHost()
    assert snapshot_of(host, None).about["lineage"] == []
    again = LawHost()
    source = source_of(8, {"snapshot": "old-2-90", "lineage": [["older", 3]]})
    assert snapshot_of(again, source).about["lineage"] == [["older", 3], ["old", 8]]
    same = LawHost()
    source = source_of(8, {"snapshot": "r-1-90", "lineage": [["older", 3]]})
    assert snapshot_of(same, source).about["lineage"] == [["older", 3]]


def source_of(number: int, about: dict[str, Any]) -> Shared[SourceList]:
    return Shared(source_list(
        [], generation=number, step=90, about=about, scalars={}, ranks=0
    ))  # fmt: skip


def snapshot_of(host: LawHost, sources: Shared[SourceList] | None) -> actions.Seal:
    """Return how the first snapshot of a round is sealed that begins from this source."""
    host.obey(replace(start(1, 0, 2), sources=sources))
    host.feed(events.GroupStarted(1))
    host.publish()
    host.feed(events.Reserved(1, MadeSlot(range(2))))
    host.obey(commands.Expect(1, 5))
    for rank in range(2):
        host.ask(RankStepped(rank, 1, 1, None))
    return snapshot(host)


def test_no_files_are_made_while_the_store_holds_two_generations() -> None:
    host = LawHost()
    slot = host.train()
    snapshot(host)
    host.feed(Holds(frozenset({1, 2})))
    host.feed(SealDone(1, slot, b""))
    host.feed(Holds(frozenset({1, 2, 3})))
    assert len(host.all(actions.Reserve)) == 1
    host.feed(Holds(frozenset({3})))
    assert len(host.all(actions.Reserve)) == 2


@pytest.mark.fault
def test_a_round_that_trains_goes_on_without_room_and_takes_it_when_it_is_there() -> None:
    host = LawHost()
    host.begin()
    host.publish()
    host.feed(Reserved(1, MadeSlot(range(2))))
    host.obey(commands.Expect(1, 5))
    for rank in range(2):
        host.ask(RankStepped(rank, 1, 1, None))
    slot = snapshot(host).slot
    host.feed(SealDone(1, slot, b""))
    host.feed(Holds(frozenset({1})))
    host.feed(NoRoom(1, "no room."))
    assert "no room. Until there is room the training goes on" in host.log()
    assert "workers_failed" not in host.reported()
    before = len(host.all(actions.Reserve))
    host.tick(snapshots.AGAIN_S - 1)
    assert len(host.all(actions.Reserve)) == before, "not yet"
    host.tick(2.0)
    assert len(host.all(actions.Reserve)) == before + 1
    host.feed(NoRoom(1, "no room."))
    host.tick(2 * snapshots.AGAIN_S - 1)
    assert len(host.all(actions.Reserve)) == before + 1, "later and later"
    host.tick(2.0)
    host.feed(Reserved(1, MadeSlot(range(2))))
    assert host.state.round is not None and host.state.round.reserved is not None


def without_files(hang_s: float = 0.0) -> LawHost:
    """Return a host that trains behind a snapshot, and has no room for the next one."""
    host = LawHost(hang_s=hang_s)
    host.train()
    slot = snapshot(host).slot
    host.feed(SealDone(1, slot, b""))
    host.feed(Holds(frozenset({1})))
    host.feed(NoRoom(1, "no room."))
    return host


@pytest.mark.fault
@pytest.mark.parametrize("is_restoring", [False, True])
def test_a_host_without_room_refuses_a_job_that_begins_and_fails_a_round_of_one_that_goes_on(
    is_restoring: bool,
) -> None:
    host = LawHost()
    sources = source_of(8, {}) if is_restoring else None
    host.obey(replace(start(1, 0, 2), sources=sources))
    host.feed(events.GroupStarted(1))
    host.publish()
    host.feed(NoRoom(1, "no room."))
    (failure,) = [r for r in host.reports() if isinstance(r, reports.WorkersFailed)]
    assert failure.is_refusal is not is_restoring and "no room." in failure.reason


@pytest.mark.fault
def test_a_snapshot_that_is_wanted_at_a_stop_and_finds_no_room_fails_the_round() -> None:
    host = without_files()
    host.agree(9)
    host.ask(BeginSnapshot(0, 1, "stop", 9))
    host.tick(snapshots.AGAIN_S + 1)
    host.feed(NoRoom(1, "no room."))
    failed = host.reports()[-1]
    assert isinstance(failed, reports.WorkersFailed)
    assert failed.reason == "making room for a snapshot: no room."


@pytest.mark.fault
@pytest.mark.parametrize("is_expelled", [False, True])
def test_what_is_sealed_after_its_round_is_kept_where_the_host_joins_again(
    is_expelled: bool,
) -> None:
    """It may have been told of to the coordinator, which may count on it."""
    host = LawHost()
    slot = host.train()
    snapshot(host)
    if is_expelled:
        host.feed(Expelled("host 'a' is not in the job."))
    else:
        host.obey(commands.Stop(1, False))
    host.feed(GroupEnded(1, 9))
    assert slot not in host.discarded(), "it is being sealed"
    host.feed(SealDone(1, slot, b""))
    assert host.discarded() == ([] if is_expelled else [slot])


def test_files_that_come_when_their_round_has_ended_are_used_again() -> None:
    host = LawHost()
    host.begin()
    host.publish()
    host.obey(commands.Stop(1, False))
    host.feed(GroupEnded(1, 0))
    assert actions.StopReserving() in host.done
    slot = MadeSlot(range(2))
    host.feed(Reserved(1, slot))
    assert host.discarded() == [slot]


@pytest.mark.fault
@pytest.mark.parametrize("how", ["no room", "never"])
def test_a_snapshot_on_the_way_that_has_no_files_is_done_without(how: str) -> None:
    host = without_files()
    if how == "never":  # an older generation does not go, as where the coordinator is gone
        host.feed(Holds(frozenset({1, 2})))
    first = host.ask(BeginSnapshot(0, 1, "snapshot", 9))
    assert first not in host.answers(), "it may be made in time"
    host.tick(snapshots.AGAIN_S + 1)
    if how == "no room":
        host.feed(NoRoom(1, "no room."))
    else:
        host.tick(snapshots.FILES_S)
    assert host.answers()[first] is None and "event=snapshot_skipped step=9" in host.log()
    assert "skipped" not in host.reported(), "the other rank has yet to come to it"
    second = host.ask(BeginSnapshot(1, 1, "snapshot", 9))
    assert host.answers()[second] is None
    assert host.reports()[-1] == reports.Skipped(1, "r-1-9")
    assert "workers_failed" not in host.reported()
    host.feed(Holds(frozenset({2})))
    host.tick(snapshots.LONGEST_AGAIN_S)
    host.feed(Reserved(1, MadeSlot(range(2))))
    assert set(snapshot(host, 11).parts) == {0, 1}, "the next one is written"


def test_nobody_waits_for_files_until_that_counts_as_a_hang() -> None:
    """As where the coordinator dies between a commit and its replicas, and its successor would
    start the round again."""
    host = without_files(hang_s=3.0)
    host.feed(Holds(frozenset({1, 2})))
    first = host.ask(BeginSnapshot(0, 1, "snapshot", 9))
    host.tick(1.4)
    assert first not in host.answers(), "they may be made in time"
    host.tick(0.2)
    assert host.answers()[first] is None and "event=snapshot_skipped step=9" in host.log()


@pytest.mark.fault
def test_a_stop_waits_for_no_snapshot_on_the_way_that_has_no_files() -> None:
    """Its own is newer, and needs the room and the time."""
    host = without_files()
    host.feed(Holds(frozenset({1, 2})))
    calls = [host.ask(BeginSnapshot(rank, 1, "snapshot", 9)) for rank in range(2)]
    host.agree(10)
    host.tick(1.0)
    assert [host.answers()[call] for call in calls] == [None, None]
    assert host.reports()[-1] == reports.Skipped(1, "r-1-9")
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "stop", 10))
    host.obey(commands.TakeSnapshot(1))
    host.feed(Holds(frozenset({2})))
    host.tick(snapshots.AGAIN_S)
    host.feed(Reserved(1, MadeSlot(range(2))))
    for rank in range(2):
        host.ask(written(rank, 10))
    assert [seal.step for seal in host.all(actions.Seal)] == [7, 10]


@pytest.mark.fault
def test_a_rank_that_cannot_write_is_left_out_and_trains_on() -> None:
    """What others hold of it may make the snapshot whole all the same."""
    host = LawHost()
    host.train()
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "snapshot", 7))
    call = host.ask(RankUnwritten(0, 1, 7, "No space left on device"))
    assert host.answers()[call] is None and "No space left" in host.log()
    host.ask(written(1))
    (seal,) = host.all(actions.Seal)
    assert (
        set(seal.parts) == {1} and not seal.taken_over and "workers_failed" not in host.reported()
    )


def test_where_no_rank_can_write_the_files_are_kept_for_the_next_snapshot() -> None:
    host = LawHost()
    slot = host.train()
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "snapshot", 7))
    for rank in range(2):
        host.ask(RankUnwritten(rank, 1, 7, "full"))
    assert host.reports()[-1] == reports.Skipped(1, "r-1-7") and not host.all(actions.Seal)
    assert snapshot(host, 9).slot is slot


@pytest.mark.fault
def test_what_is_written_of_another_step_does_not_count() -> None:
    """It comes late, of a snapshot that was given up when workers failed."""
    host = LawHost()
    host.train()
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "snapshot", 7))
    host.ask(written(1))
    call = host.ask(written(0, 6))
    assert host.answers()[call] is None and not host.all(actions.Seal)
    host.ask(written(0))
    assert len(host.all(actions.Seal)) == 1


@pytest.mark.fault
def test_who_dies_at_the_stop_with_a_snapshot_under_way_does_not_hold_up_the_stop() -> None:
    """It has made the steps to the stop while the agent has yet to hear what it wrote."""
    host = LawHost()
    slot = host.train()
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "snapshot", 7))
    host.agree(8)
    host.ask(written(0))
    host.ask(BeginSnapshot(0, 1, "stop", 8))
    host.feed(WorkerGone(1, 1, GroupSeen(reached=frozenset({0, 1}))))
    (seal,) = host.all(actions.Seal)
    assert set(seal.parts) == {0} and seal.step == 7
    host.feed(SealDone(1, slot, b"manifest"))
    assert host.reported()[-2:] == ["sealed", "arrived"]


@pytest.mark.fault
def test_a_snapshot_on_the_way_that_cannot_be_sealed_is_done_without() -> None:
    host = LawHost()
    host.train()
    snapshot(host)
    host.feed(WorkFailed(1, "sealing the snapshot: no room for the manifest."))
    assert host.reports()[-1] == reports.Skipped(1, "r-1-7")
    assert "event=snapshot_skipped step=7 sealing the snapshot" in host.log()
    host.feed(Holds(frozenset({1})))
    host.feed(Reserved(1, MadeSlot(range(2))))
    assert snapshot(host, 9).step == 9 and "workers_failed" not in host.reported()


@pytest.mark.fault
def test_a_snapshot_at_a_stop_that_cannot_be_sealed_fails_the_round() -> None:
    host = LawHost()
    host.train()
    host.agree(8)
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "stop", 8))
    host.obey(commands.TakeSnapshot(1))
    for rank in range(2):
        host.ask(written(rank, 8))
    host.feed(WorkFailed(1, "sealing the snapshot: no room for the manifest."))
    assert "no room for the manifest" in str(host.reports()[-1])
    host.feed(WorkFailed(1, "and again"))
    assert host.reported().count("workers_failed") == 1


def test_what_a_worker_says_when_its_snapshot_was_sealed_without_it_is_answered() -> None:
    """Its last word may wait in a thread while it is found dead."""
    host = LawHost()
    host.train()
    call = host.ask(written(0))
    assert host.answers()[call] is None


def test_a_worker_that_is_ahead_by_a_snapshot_waits_for_the_others() -> None:
    host = LawHost()
    slot = host.train()
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "snapshot", 7))
    host.ask(written(0))
    early = host.ask(BeginSnapshot(0, 1, "snapshot", 9))
    assert early not in host.answers()
    host.ask(written(1))
    host.feed(SealDone(1, slot, b""))
    host.feed(Holds(frozenset({1})))
    host.feed(Reserved(1, MadeSlot(range(2))))
    assert host.answers()[early] is not None


@pytest.mark.fault
def test_who_comes_to_a_later_snapshot_writes_nothing_of_an_earlier_one() -> None:
    """It has learned too late at which steps they are. The other has written, and counts."""
    host = LawHost()
    slot = host.train()
    host.ask(BeginSnapshot(0, 1, "snapshot", 7))
    host.ask(written(0))
    assert not host.all(actions.Seal)
    later = host.ask(BeginSnapshot(1, 1, "snapshot", 9))
    (seal,) = host.all(actions.Seal)
    assert seal.step == 7 and set(seal.parts) == {0} and not seal.taken_over
    host.feed(SealDone(1, slot, b""))
    host.feed(Holds(frozenset({1})))
    host.feed(Reserved(1, MadeSlot(range(2))))
    assert host.answers()[later] is not None
    host.ask(BeginSnapshot(0, 1, "snapshot", 9))
    for rank in range(2):
        host.ask(written(rank, 9))
    assert set(host.all(actions.Seal)[-1].parts) == {0, 1}


@pytest.mark.fault
def test_a_snapshot_that_others_have_passed_over_holds_up_nobody() -> None:
    host = LawHost()
    host.train()
    host.ask(BeginSnapshot(0, 1, "snapshot", 9))
    early = host.ask(BeginSnapshot(1, 1, "snapshot", 7))
    host.ask(BeginSnapshot(1, 1, "snapshot", 9))
    assert host.answers()[early] is None
    for rank in range(2):
        host.ask(written(rank, 9))
    assert set(host.all(actions.Seal)[-1].parts) == {0, 1}


@pytest.mark.parametrize(("newest", "level"), [(19, "INFO"), (20, "WARNING")])
def test_a_change_of_the_steps_with_snapshots_is_told_and_said(newest: int, level: str) -> None:
    host = LawHost()
    host.obey(commands.Space(1, 20, 5))
    assert not host.all(commands.Space), "nobody trains"
    host.train()
    host.obey(commands.Space(2, 20, 5))
    assert not host.all(commands.Space), "of another round"
    host.obey(commands.Space(1, 20, 5))
    assert host.all(commands.Space) == [commands.Space(1, 20, 5)]
    host.feed(Spaced(commands.Space(1, 20, 5), newest))
    (said,) = [each for each in host.all(actions.Log) if "event=spaced" in each.text]
    assert said.level.name == level and "begin=20 every=5" in said.text


def test_slots_are_handed_out_ahead_of_time_and_to_ranks_of_this_host_alone() -> None:
    host = LawHost()
    host.begin()
    host.publish()
    mine, other = host.ask(AwaitSlot(0, 1)), host.ask(AwaitSlot(7, 1))
    assert host.answers()[other] is None and mine not in host.answers()
    slot = MadeSlot(range(2))
    host.feed(Reserved(1, slot))
    assert host.answers()[mine] == slot.orders[0]
    late = host.ask(AwaitSlot(1, 1))
    assert host.answers()[late] == slot.orders[1]


@pytest.mark.parametrize("lost", [{0}, {1}, {0, 1}])
def test_where_nobody_else_holds_it_what_the_dead_had_is_left_out(lost: set[int]) -> None:
    host = LawHost()
    host.train(slot=MadeSlot(range(2), shared=False))
    host.agree(8)
    from scalai.core.host.events import GroupSeen, WorkerGone

    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "stop", 8))
    host.obey(commands.TakeSnapshot(1))
    for rank in lost:
        host.feed(WorkerGone(1, rank, GroupSeen(reached=frozenset({0, 1}))))
    for rank in {0, 1} - lost:
        host.ask(written(rank, 8))
    if lost == {0, 1}:
        sealed = host.reports()[-1]
        assert isinstance(sealed, reports.Sealed) and sealed.manifest is None
        assert not host.all(actions.Seal)
    else:
        (seal,) = host.all(actions.Seal)
        assert set(seal.parts) == {0, 1} - lost and not seal.taken_over


def test_a_substitute_that_dies_too_is_not_waited_for() -> None:
    from scalai.core.host.events import GroupSeen, WorkerGone

    host = LawHost()
    host.train(ranks=3)
    host.agree(8)
    for rank in range(3):
        host.ask(BeginSnapshot(rank, 1, "stop", 8))
    host.obey(commands.TakeSnapshot(1))
    seen = GroupSeen(reached=frozenset({0, 1, 2}))
    host.feed(WorkerGone(1, 1, seen))
    host.ask(written(0, 8))
    host.ask(written(2, 8))
    assert not host.all(actions.Seal), "rank 0 writes for rank 1"
    host.feed(WorkerGone(1, 0, seen))
    (seal,) = host.all(actions.Seal)
    assert set(seal.parts) == {0, 2}


def test_the_longest_time_of_each_phase_is_kept() -> None:
    kept = snapshots.longest({"snapshot": 1.0}, {"snapshot": 0.5, "proof": 2.0})
    assert kept == {"snapshot": 1.0, "proof": 2.0}


def test_time_moves_by_ticks_alone() -> None:
    host = LawHost()
    host.feed(TimePassed(500.0))
    host.obey(start(1, 0, 2))
    assert host.state.now == 500.0
