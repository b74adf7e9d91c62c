"""The law of a host: room for snapshots, who writes what, and what is sealed."""

from typing import Any

import pytest

from scalai.core.host import actions, snapshots
from scalai.core.host.events import (
    Expelled,
    GroupSeen,
    Holds,
    NothingToCommit,
)
from scalai.core.job.remembered import Remembered
from scalai.core.messages import commands, reports
from scalai.core.messages.shared import JsonText, Shared
from scalai.core.messages.worker_messages import AwaitSlot, RankUnwritten
from scalai.core.tensors.holders import SourceList, source_list
from support.law_host import LawHost

FULL = "making room for a snapshot: no room."


@pytest.fixture
def host() -> LawHost:
    host = LawHost()
    host.train()
    return host


def sources(**about: Any) -> Shared[SourceList]:
    """Return the sources of generation 8, at step 90."""
    found = source_list([], generation=8, step=90, about=about, scalars={}, ranks=0)
    return Shared(found)


def reserves(host: LawHost) -> int:
    return len(host.all(actions.Reserve))


# ---------------------------------------------------------------------- what is sealed


def test_a_snapshot_is_sealed_once_all_have_written_and_the_next_one_has_room() -> None:
    host = LawHost()
    slot = host.train()
    seal = host.snapshot()
    assert seal.slot is slot and seal.about["snapshot"] == "r-1-7" and set(seal.parts) == {0, 1}
    assert seal.about["hosts"] == ["a"] and seal.about["tensors"] == 5
    host.sealed(b"manifest")
    told = reports.Sealed(1, "snapshot", "r-1-7", b"manifest", {"snapshot": 1.0})
    assert host.reports()[-1] == told
    host.feed(Holds(frozenset({1})))
    assert reserves(host) == 2


@pytest.mark.fault
def test_a_state_says_what_persons_have_asked_of_its_job(host: LawHost) -> None:
    assert "asked" not in host.snapshot().about["facts"]
    host.sealed()
    host.make_files()
    known = Remembered(1, 1, JsonText.of([2, 1, "tp2"]), 1, 3, 0, 0, None, (), ())
    host.obey(commands.Remember(Shared(known)))
    assert host.snapshot(9).about["facts"]["asked"] == [2, 1, "tp2"]


@pytest.mark.parametrize(
    ("begins", "lineage"),
    [
        ({}, []),
        ({"snapshot": "old-2-90", "lineage": [["older", 3]]}, [["older", 3], ["old", 8]]),
        ({"snapshot": "r-1-90", "lineage": [["older", 3]]}, [["older", 3]]),
    ],
    ids=["none", "another run", "the same run"],
)
def test_a_snapshot_says_of_which_runs_it_comes(begins: dict[str, Any], lineage: Any) -> None:
    host = LawHost()
    host.train(sources=sources(**begins) if begins else None)
    assert host.snapshot().about["lineage"] == lineage


@pytest.mark.fault
def test_while_nobody_commits_the_two_newest_snapshots_stay_and_older_ones_go(
    host: LawHost,
) -> None:
    """The coordinator is silent: memory would fill up with the job's states."""
    for at in (7, 14, 21, 28):
        host.snapshot(at)
        host.sealed()
        host.tick(seen=GroupSeen(newest=at))
        host.make_files()
        assert len(host.all(commands.DropSnapshot)) <= max(0, at // 7 - 3), "others may not have it"
        host.tick(seen=GroupSeen(newest=at + 2))
    dropped = [commands.DropSnapshot("r-1-7"), commands.DropSnapshot("r-1-14")]
    assert host.all(commands.DropSnapshot) == dropped
    assert "event=snapshot_given_up snapshot=r-1-7" in host.log()
    # It is back, and has heard of all of them.
    command = commands.Commit(3, "r-1-7", None, {})
    host.obey(command)
    host.feed(NothingToCommit(command, "sealed"))
    assert host.reports()[-2:] == [reports.Doubted(3, None), reports.Committed(3)]
    host.obey(commands.Commit(4, "r-1-21", None, {}))
    host.feed(reports.Committed(4))
    host.snapshot(35)
    host.sealed()
    host.tick(seen=GroupSeen(newest=37))
    assert len(host.all(commands.DropSnapshot)) == 2, "one that has its number is not given up"
    assert host.failure() is None


@pytest.mark.fault
@pytest.mark.parametrize("is_expelled", [False, True])
def test_what_is_sealed_after_its_round_is_kept_where_the_host_joins_again(
    host: LawHost, is_expelled: bool
) -> None:
    """It may have been told of to the coordinator, which may count on it."""
    slot = host.snapshot().slot
    if is_expelled:
        host.feed(Expelled("host 'a' is not in the job."))
    else:
        host.obey(commands.Stop(1, False))
    host.end()
    assert slot not in host.discarded(), "it is being sealed"
    host.sealed()
    assert host.discarded() == ([] if is_expelled else [slot])


@pytest.mark.fault
def test_a_snapshot_on_the_way_that_cannot_be_sealed_is_done_without(host: LawHost) -> None:
    host.snapshot()
    host.fail(actions.Seal, "sealing the snapshot: no room for the manifest.")
    assert host.reports()[-1] == reports.Skipped(1, "r-1-7")
    assert "event=snapshot_skipped step=7 sealing the snapshot" in host.log()
    host.feed(Holds(frozenset({1})))
    host.make_files()
    assert host.snapshot(9).step == 9 and host.failure() is None


@pytest.mark.fault
def test_a_snapshot_at_a_stop_that_cannot_be_sealed_fails_the_round(host: LawHost) -> None:
    host.stand()
    host.write(8)
    host.fail(actions.Seal, "sealing the snapshot: no room for the manifest.")
    host.fail(actions.Seal, "and again")
    assert "no room for the manifest" in str(host.failure())


# ---------------------------------------------------------------------- room and files


def test_no_files_are_made_while_the_store_holds_two_generations(host: LawHost) -> None:
    host.snapshot()
    host.feed(Holds(frozenset({1, 2})))
    host.sealed()
    host.feed(Holds(frozenset({2, 3})))
    assert reserves(host) == 1
    host.feed(Holds(frozenset({3})))
    assert reserves(host) == 2


def without_files(hang_s: float = 0.0, *, holds: int = 1) -> LawHost:
    """Return a host that trains behind a snapshot, and has no files for the next one: for want of
    room or, where it holds two generations, of an order to make them."""
    host = LawHost(hang_s=hang_s)
    host.train()
    host.snapshot()
    host.sealed()
    host.feed(Holds(frozenset({1})))
    host.fail(actions.Reserve, FULL)
    host.feed(Holds(frozenset(range(1, 1 + holds))))
    return host


@pytest.mark.fault
def test_a_round_that_trains_goes_on_without_room_and_takes_it_when_it_is_there() -> None:
    host = without_files()
    assert "no room. Until there is room the training goes on" in host.log()
    before = reserves(host)
    for tries, pause_s in enumerate((snapshots.AGAIN_S, 2 * snapshots.AGAIN_S), 1):
        host.tick(pause_s - 1)
        assert reserves(host) == before + tries - 1, "not yet, and later and later"
        host.tick(2.0)
        assert reserves(host) == before + tries
        host.fail(actions.Reserve, FULL)
    assert host.failure() is None
    host.tick(snapshots.LONGEST_AGAIN_S)
    host.make_files()
    assert host.snapshot(9).step == 9


@pytest.mark.fault
@pytest.mark.parametrize("is_restoring", [False, True])
def test_a_host_without_room_refuses_a_job_that_begins_and_fails_a_round_of_one_that_goes_on(
    is_restoring: bool,
) -> None:
    host = LawHost()
    host.begin(sources=sources() if is_restoring else None)
    host.publish()
    host.fail(actions.Reserve, FULL)
    assert host.failure() == reports.WorkersFailed(1, FULL, is_refusal=not is_restoring)


@pytest.mark.fault
def test_a_snapshot_that_is_wanted_at_a_stop_and_finds_no_room_fails_the_round() -> None:
    host = without_files()
    host.agree(9)
    host.come(9, "stop", [0])
    host.tick(snapshots.AGAIN_S + 1)
    host.fail(actions.Reserve, FULL)
    assert host.failure() == reports.WorkersFailed(1, FULL)


@pytest.mark.fault
@pytest.mark.parametrize("how", ["no room", "never"])
def test_a_snapshot_on_the_way_that_has_no_files_is_done_without(how: str) -> None:
    """``never``: an older generation does not go, as where the coordinator is gone."""
    host = without_files(holds=1 if how == "no room" else 2)
    (first,) = host.come(9, ranks=[0])
    assert first not in host.answers(), "it may be made in time"
    host.tick(snapshots.AGAIN_S + 1)
    if how == "no room":
        host.fail(actions.Reserve, FULL)
    else:
        host.tick(snapshots.FILES_S)
    assert host.answers()[first] is None and "event=snapshot_skipped step=9" in host.log()
    assert "skipped" not in host.reported(), "the other rank has yet to come to it"
    (second,) = host.come(9, ranks=[1])
    assert host.answers()[second] is None
    assert host.reports()[-1] == reports.Skipped(1, "r-1-9") and host.failure() is None
    host.feed(Holds(frozenset({2})))
    host.tick(snapshots.LONGEST_AGAIN_S)
    host.make_files()
    assert set(host.snapshot(11).parts) == {0, 1}, "the next one is written"


def test_nobody_waits_for_files_until_that_counts_as_a_hang() -> None:
    """As where the coordinator dies between a commit and its replicas, and its successor would
    start the round again."""
    host = without_files(hang_s=3.0, holds=2)
    (first,) = host.come(9, ranks=[0])
    host.tick(1.4)
    assert first not in host.answers(), "they may be made in time"
    host.tick(0.2)
    assert host.answers()[first] is None and "event=snapshot_skipped step=9" in host.log()


@pytest.mark.fault
def test_a_stop_waits_for_no_snapshot_on_the_way_that_has_no_files() -> None:
    """Its own is newer, and needs the room and the time."""
    host = without_files(holds=2)
    calls = host.come(9)
    host.agree(10)
    host.tick(1.0)
    assert [host.answers()[call] for call in calls] == [None, None]
    assert host.reports()[-1] == reports.Skipped(1, "r-1-9")
    host.stand(10)
    host.feed(Holds(frozenset({2})))
    host.tick(snapshots.AGAIN_S)
    host.make_files()
    host.write(10)
    assert [seal.step for seal in host.all(actions.Seal)] == [7, 10]


@pytest.mark.parametrize("begins_again", [False, True])
def test_files_that_come_when_their_round_has_ended_are_used_again(begins_again: bool) -> None:
    host = LawHost()
    host.begin()
    host.publish()
    if begins_again:
        host.begin(2)
    else:
        host.obey(commands.Stop(1, False))
        host.end()
        assert actions.StopReserving() in host.done
    slot = host.make_files()
    assert host.discarded() == [slot]


def test_slots_are_handed_out_ahead_of_time_and_to_ranks_of_this_host_alone() -> None:
    host = LawHost()
    host.begin()
    host.publish()
    mine, other = host.ask(AwaitSlot(0, 1)), host.ask(AwaitSlot(7, 1))
    assert host.answers()[other] is None and mine not in host.answers()
    slot = host.make_files()
    late = host.ask(AwaitSlot(1, 1))
    assert [host.answers()[call] for call in (mine, late)] == [slot.orders[0], slot.orders[1]]


# ---------------------------------------------------------------------- ranks apart


@pytest.mark.fault
def test_a_rank_that_cannot_write_is_left_out_and_trains_on(host: LawHost) -> None:
    """What others hold of it may make the snapshot whole all the same."""
    host.come(7)
    call = host.ask(RankUnwritten(0, 1, 7, "No space left on device"))
    assert host.answers()[call] is None and "No space left" in host.log()
    host.write(7, 1)
    (seal,) = host.all(actions.Seal)
    assert set(seal.parts) == {1} and not seal.taken_over and host.failure() is None


def test_where_no_rank_can_write_the_files_are_kept_for_the_next_snapshot() -> None:
    host = LawHost()
    slot = host.train()
    host.come(7)
    for rank in range(2):
        host.ask(RankUnwritten(rank, 1, 7, "full"))
    assert host.reports()[-1] == reports.Skipped(1, "r-1-7") and not host.all(actions.Seal)
    assert host.snapshot(9).slot is slot


@pytest.mark.fault
def test_what_is_written_of_another_step_does_not_count(host: LawHost) -> None:
    """It comes late, of a snapshot that was given up when workers failed, or was sealed without
    this worker."""
    (early,) = host.write(7, 0)
    host.come(7)
    host.write(7, 1)
    (late,) = host.write(6, 0)
    assert host.answers()[early] is host.answers()[late] is None and not host.all(actions.Seal)
    host.write(7, 0)
    assert len(host.all(actions.Seal)) == 1


@pytest.mark.fault
def test_who_dies_at_the_stop_with_a_snapshot_under_way_does_not_hold_up_the_stop(
    host: LawHost,
) -> None:
    """It has made the steps to the stop while the agent has yet to hear what it wrote."""
    host.come(7)
    host.agree(8)
    host.write(7, 0)
    host.come(8, "stop", [0])
    host.lose(1)
    (seal,) = host.all(actions.Seal)
    assert set(seal.parts) == {0} and seal.step == 7
    host.sealed()
    assert host.reported()[-2:] == ["sealed", "arrived"]


def test_a_worker_that_is_ahead_by_a_snapshot_waits_for_the_others(host: LawHost) -> None:
    host.come(7)
    host.write(7, 0)
    (early,) = host.come(9, ranks=[0])
    assert early not in host.answers()
    host.write(7, 1)
    host.sealed()
    host.feed(Holds(frozenset({1})))
    host.make_files()
    assert host.answers()[early] is not None


@pytest.mark.fault
def test_who_comes_to_a_later_snapshot_writes_nothing_of_an_earlier_one(host: LawHost) -> None:
    """It has learned too late at which steps they are. The other has written, and counts."""
    host.come(7, ranks=[0])
    host.write(7, 0)
    assert not host.all(actions.Seal)
    (later,) = host.come(9, ranks=[1])
    (seal,) = host.all(actions.Seal)
    assert seal.step == 7 and set(seal.parts) == {0} and not seal.taken_over
    host.sealed()
    host.feed(Holds(frozenset({1})))
    host.make_files()
    assert host.answers()[later] is not None
    host.come(9, ranks=[0])
    host.write(9)
    assert set(host.all(actions.Seal)[-1].parts) == {0, 1}


@pytest.mark.fault
def test_a_snapshot_that_others_have_passed_over_holds_up_nobody(host: LawHost) -> None:
    host.come(9, ranks=[0])
    (early,) = host.come(7, ranks=[1])
    host.come(9, ranks=[1])
    assert host.answers()[early] is None
    host.write(9)
    assert set(host.all(actions.Seal)[-1].parts) == {0, 1}


@pytest.mark.parametrize(("newest", "level"), [(19, "INFO"), (20, "WARNING")])
def test_a_change_of_the_steps_with_snapshots_is_told_and_said(newest: int, level: str) -> None:
    host, space = LawHost(), commands.Space(1, 20, 5)
    host.obey(space)  # nobody trains
    host.train()
    host.obey(commands.Space(2, 20, 5))  # of another round
    assert not host.all(commands.Space)
    assert host.obey(space) == (space,)
    (said,) = host.succeed(commands.Space, newest)
    assert isinstance(said, actions.Log) and said.level.name == level
    assert "event=spaced round=1 begin=20 every=5" in said.text
