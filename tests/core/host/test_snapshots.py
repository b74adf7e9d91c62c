"""The law of a host: room for snapshots, who writes what, and what is sealed."""

import pytest

from scalai.core import commands, reports
from scalai.core.host import actions, snapshots
from scalai.core.host.events import (
    Expelled,
    GroupEnded,
    Holds,
    NoRoom,
    Reserved,
    Sealed,
    Ticked,
    WorkFailed,
)
from scalai.core.messages import JsonText
from scalai.core.worker_messages import AwaitSlot, BeginSnapshot, RankStepped, RankWritten
from support.law_host import LawHost, MadeSlot
from support.wire_words import start

NONE = JsonText.of(None)


def written(rank: int, number: int = 1) -> RankWritten:
    return RankWritten(rank, number, (rank,), f"dp{rank}", NONE, NONE, 12, {"snapshot": 1.0})


def snapshot(host: LawHost, step: int = 7) -> actions.Seal:
    """Have both workers write a snapshot; return how it is to be sealed."""
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "snapshot", step))
    for rank in range(2):
        host.ask(written(rank))
    return host.all(actions.Seal)[-1]


def test_a_snapshot_is_sealed_once_all_have_written_and_the_next_one_has_room() -> None:
    host = LawHost()
    slot = host.train()
    seal = snapshot(host)
    assert seal.slot is slot and seal.about["snapshot"] == "r-1-7" and set(seal.parts) == {0, 1}
    assert seal.about["hosts"] == ["a"] and seal.about["tensors"] == 5
    host.feed(Sealed(1, slot, b"manifest"))
    sealed = host.reports()[-1]
    assert isinstance(sealed, reports.Sealed) and sealed.manifest == b"manifest"
    assert (sealed.reason, dict(sealed.seconds)) == ("snapshot", {"snapshot": 1.0})
    host.feed(Holds(frozenset({1})))
    assert len(host.all(actions.Reserve)) == 2


def test_no_files_are_made_while_the_store_holds_two_generations() -> None:
    host = LawHost()
    slot = host.train()
    snapshot(host)
    host.feed(Holds(frozenset({1, 2})))
    host.feed(Sealed(1, slot, b""))
    host.feed(Holds(frozenset({1, 2, 3})))
    assert len(host.all(actions.Reserve)) == 1
    host.feed(Holds(frozenset({3})))
    assert len(host.all(actions.Reserve)) == 2


def test_a_round_that_trains_goes_on_without_room_and_takes_it_when_it_is_there() -> None:
    host = LawHost()
    host.begin()
    host.publish()
    host.feed(Reserved(1, MadeSlot(range(2))))
    host.obey(commands.Expect(1, 5))
    for rank in range(2):
        host.ask(RankStepped(rank, 1, 1, None))
    slot = snapshot(host).slot
    host.feed(Sealed(1, slot, b""))
    host.feed(Holds(frozenset({1})))
    host.feed(NoRoom(1, "no room."))
    assert "no room. Until there is room the training goes on" in host.log()
    assert "failed" not in host.reported()
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


def test_a_snapshot_that_is_wanted_and_finds_no_room_fails_the_round() -> None:
    host = LawHost()
    host.train()
    slot = snapshot(host).slot
    host.feed(Sealed(1, slot, b""))
    host.feed(Holds(frozenset({1})))
    host.feed(NoRoom(1, "no room."))
    host.ask(BeginSnapshot(0, 1, "snapshot", 9))
    host.feed(NoRoom(1, "no room."))
    failed = host.reports()[-1]
    assert isinstance(failed, reports.Failed)
    assert failed.reason == "making room for a snapshot: no room."


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
    host.feed(Sealed(1, slot, b""))
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


def test_a_snapshot_that_cannot_be_sealed_fails_the_round() -> None:
    host = LawHost()
    host.train()
    snapshot(host)
    host.feed(WorkFailed(1, "sealing the snapshot: no room for the manifest."))
    assert "no room for the manifest" in str(host.reports()[-1])
    host.feed(WorkFailed(1, "and again"))
    assert host.reported().count("failed") == 1


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
    host.feed(Sealed(1, slot, b""))
    host.feed(Holds(frozenset({1})))
    host.feed(Reserved(1, MadeSlot(range(2))))
    assert host.answers()[early] is not None


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
    from scalai.core.host.events import Seen, WorkerGone

    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "stop", 8))
    host.obey(commands.TakeSnapshot(1))
    for rank in lost:
        host.feed(WorkerGone(1, rank, Seen(reached=frozenset({0, 1}))))
    for rank in {0, 1} - lost:
        host.ask(written(rank))
    if lost == {0, 1}:
        sealed = host.reports()[-1]
        assert isinstance(sealed, reports.Sealed) and sealed.manifest is None
        assert not host.all(actions.Seal)
    else:
        (seal,) = host.all(actions.Seal)
        assert set(seal.parts) == {0, 1} - lost and not seal.taken_over


def test_a_substitute_that_dies_too_is_not_waited_for() -> None:
    from scalai.core.host.events import Seen, WorkerGone

    host = LawHost()
    host.train(ranks=3)
    host.agree(8)
    for rank in range(3):
        host.ask(BeginSnapshot(rank, 1, "stop", 8))
    host.obey(commands.TakeSnapshot(1))
    seen = Seen(reached=frozenset({0, 1, 2}))
    host.feed(WorkerGone(1, 1, seen))
    host.ask(written(0))
    host.ask(written(2))
    assert not host.all(actions.Seal), "rank 0 writes for rank 1"
    host.feed(WorkerGone(1, 0, seen))
    (seal,) = host.all(actions.Seal)
    assert set(seal.parts) == {0, 2}


def test_the_longest_time_of_each_phase_is_kept() -> None:
    kept = snapshots.longest({"snapshot": 1.0}, {"snapshot": 0.5, "proof": 2.0})
    assert kept == {"snapshot": 1.0, "proof": 2.0}


def test_time_moves_by_ticks_alone() -> None:
    host = LawHost()
    host.feed(Ticked(500.0))
    host.obey(start(1, 0, 2))
    assert host.state.now == 500.0
