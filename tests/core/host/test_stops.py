"""The law of a host: stops, those that wait for a save of the training's own, and those at which
workers die or hang."""

import pytest

from scalai.core.host import actions, stops
from scalai.core.host.events import Done, GroupSeen, LeaveAsked
from scalai.core.host.succession import underway
from scalai.core.messages import commands, reports
from scalai.core.messages.worker_messages import BeginSnapshot, Stand
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import whole
from support.law_host import LawHost

FREE = GroupSeen(newest=7)
SAVING = GroupSeen(newest=7, save=4, looks=1)
AT_STOP = frozenset({0, 1})
HELD = dict.fromkeys(AT_STOP, Collection.of([(Tensor("param/w", (2,), "F32"), whole((2,)))]))


@pytest.fixture
def host() -> LawHost:
    host = LawHost()
    host.train()
    return host


def urgencies(host: LawHost) -> list[int]:
    return [action.urgency for action in host.all(actions.WantStop)]


# ---------------------------------------------------------------------- saves


@pytest.mark.fault
def test_a_stop_is_proposed_once_no_save_is_in_flight(host: LawHost) -> None:
    host.obey(commands.Prepare(1, 8), SAVING)
    host.tick(stops.HELD_TELL_S - 1, SAVING)
    assert len(host.told(reports.Held)) == 1
    host.tick(1.0, SAVING)
    assert len(held := host.told(reports.Held)) == 2, "it is told again"
    assert "iteration 4 is in flight" in held[0].what
    assert urgencies(host) == [1] and not host.all(commands.Prepare)
    host.tick(seen=FREE)
    host.tick(seen=FREE)
    assert host.all(commands.Prepare) == [commands.Prepare(1, 8)] and urgencies(host) == [1, 0]


def test_a_held_stop_that_is_taken_back_or_whose_round_has_ended_is_not_proposed(
    host: LawHost,
) -> None:
    host.obey(commands.Prepare(1, 8), SAVING)
    host.obey(commands.Withdraw(1))
    assert urgencies(host)[-1] == 0
    host.tick(seen=FREE)
    host.obey(commands.Prepare(1, 8), SAVING)
    host.begin(2)
    host.tick(seen=FREE)
    assert len(host.told(reports.Held)) == 2 and not host.all(commands.Prepare)


@pytest.mark.fault
def test_workers_that_come_to_a_stop_with_a_save_are_sent_on_and_that_is_told_once(
    host: LawHost,
) -> None:
    host.agree(8)
    calls = [host.ask(Stand(rank, 1, 8, 8)) for rank in range(2)]
    assert len(host.told(reports.Held)) == 1 and not set(calls) & set(host.answers())
    host.obey(commands.Withdraw(1))
    assert set(calls) <= set(host.answers())
    late = host.ask(Stand(1, 1, 8, 8))
    assert late in host.answers(), "its page was read before the stop was taken back"
    host.obey(commands.Prepare(1, 9), FREE)
    assert urgencies(host)[-1] == 2, "it may save there as well"


def test_a_stop_that_the_script_passes_without_a_boundary_is_put_off_at_once(
    host: LawHost,
) -> None:
    """As a skipped iteration; it would never be met."""
    host.agree(8)
    calls = host.come(9, "stop")
    (held,) = host.told(reports.Held)
    assert (held.round, held.stop) == (1, 8) and "no boundary" in held.what
    assert set(calls) <= set(host.answers()), "they train on"


def test_workers_that_stood_when_their_round_ended_keep_no_later_stop_from_being_told(
    host: LawHost,
) -> None:
    host.agree(8)
    host.ask(Stand(0, 1, 8, 8))
    host.begin(2)
    host.agree(9, 2)
    host.ask(Stand(0, 2, 9, 9))
    assert [held.round for held in host.told(reports.Held)] == [1, 2]


@pytest.mark.fault
def test_of_a_save_that_nobody_looks_for_any_more_that_is_said(host: LawHost) -> None:
    """The training hangs, and the change waits with it."""
    host.obey(commands.Prepare(1, 8), SAVING)
    host.tick(stops.UNLOOKED_S - 1, SAVING)
    assert "no worker has looked" not in host.told(reports.Held)[-1].what
    host.tick(stops.HELD_TELL_S + 2, SAVING)
    assert "no worker has looked for its end for" in host.told(reports.Held)[-1].what


@pytest.mark.fault
def test_a_leaving_host_waits_for_a_save_as_long_as_somebody_looks_for_it(host: LawHost) -> None:
    host.feed(LeaveAsked())
    for looks in (1, 2, 3, 4, 4):
        assert host.state.exit is None
        host.tick(8.0, GroupSeen(save=4, looks=looks))
    host.tick(8.0, GroupSeen(save=4, looks=4))
    assert host.state.exit == 1, "the workers hang"


# ---------------------------------------------------------------------- the stop


@pytest.mark.parametrize(
    "command",
    [commands.Prepare(2, 8), commands.Agree(2, 8), commands.TakeSnapshot(2), commands.Withdraw(2),
     commands.Expect(2, 5), commands.Proceed(2)],
)  # fmt: skip
def test_commands_for_a_round_that_is_not_there_are_left(
    host: LawHost, command: commands.Command
) -> None:
    assert host.obey(command, FREE) == ()


def test_an_agreed_stop_is_not_the_stop_of_workers_that_have_ended(host: LawHost) -> None:
    host.obey(commands.Agree(1, 8))
    host.over()
    host.feed(Done(commands.Agree(2, 8)))
    assert host.state.round is not None and not host.state.round.is_draining
    assert host.reported()[-1] == "finished"


def test_a_stop_that_another_coordinator_repeats_is_the_one_that_was_agreed(
    host: LawHost,
) -> None:
    host.stand()
    host.agree(8)
    kept = underway(host.state, None)
    assert kept is not None and kept.has_arrived and kept.is_writing
    host.agree(9)
    moved = underway(host.state, None)
    assert moved is not None and moved.stop == 9 and not moved.has_arrived


def test_a_stop_that_is_taken_back_sends_on_whoever_waits_at_it(host: LawHost) -> None:
    calls = host.stand(writes=False)
    assert host.reported()[-1] == "arrived" and not set(calls) & set(host.answers())
    host.obey(commands.Withdraw(1))
    late = host.come(8, "stop", [0])
    assert [host.answers()[call] for call in (*calls, *late)] == [None, None, None]


@pytest.mark.fault
@pytest.mark.parametrize(("other", "named"), [(5, ""), (6, "'param/w' on ranks [0, 1]")])
def test_replicas_that_differ_at_a_stop_are_named_before_anybody_writes(
    other: int, named: str
) -> None:
    host = LawHost()
    host.begin()
    host.publish(held=HELD)
    host.make_files()
    host.obey(commands.Expect(1, 1))
    host.agree(8)
    calls = [
        host.ask(BeginSnapshot(r, 1, "stop", 8, (print_,))) for r, print_ in ((0, 5), (1, other))
    ]
    assert host.reports()[-1] == reports.Arrived(1, 8, named)
    assert not set(calls) & set(host.answers())


def test_replicas_that_differ_at_the_start_are_named_and_the_job_begins() -> None:
    host = LawHost()
    host.begin()
    host.publish(held=HELD)
    host.make_files()
    host.obey(commands.Expect(1, 1))
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "start", 0, (rank + 1,)))
    assert host.log().count("event=replicas_differ 'param/w' on ranks [0, 1]") == 1
    assert host.orders() == [0, 1]


# ---------------------------------------------------------------------- deaths


def test_a_worker_that_dies_at_the_stop_is_written_for_by_a_replica() -> None:
    host = LawHost()
    slot = host.train()
    host.agree(8)
    host.come(8, "stop", [0])
    host.lose(1)
    assert host.reported()[-1] == "arrived"
    host.obey(commands.TakeSnapshot(1))
    (first,) = host.write(8, 0)
    order = host.answers()[first]
    assert order is not None and order.path == slot.orders[1].path  # type: ignore[attr-defined]
    (last,) = host.write(8, 0)
    (seal,) = host.all(actions.Seal)
    assert set(seal.parts) == {0} and len(seal.taken_over) == 1 and host.answers()[last] is None


@pytest.mark.parametrize("lost", [{0}, {1}, {0, 1}])
def test_where_nobody_else_holds_it_what_the_dead_had_is_left_out(lost: set[int]) -> None:
    host = LawHost()
    host.train(shared=False)
    host.stand()
    for rank in lost:
        host.lose(rank)
    if living := {0, 1} - lost:
        host.write(8, *living)
        (seal,) = host.all(actions.Seal)
        assert set(seal.parts) == living and not seal.taken_over
    else:
        assert host.told(reports.Sealed)[-1].manifest is None and not host.all(actions.Seal)


def test_a_substitute_that_dies_too_is_not_waited_for() -> None:
    host = LawHost()
    host.train(ranks=3)
    host.stand()
    host.lose(1)
    host.write(8, 0, 2)
    assert not host.all(actions.Seal), "rank 0 writes for rank 1"
    host.lose(0)
    (seal,) = host.all(actions.Seal)
    assert set(seal.parts) == {0, 2}


def test_workers_that_leave_once_all_is_sealed_are_not_called_lost(host: LawHost) -> None:
    host.stand()
    host.write(8)
    host.sealed()
    host.lose(0)
    assert "worker_lost" not in host.log()


def test_a_worker_that_dies_before_the_stop_fails_the_round(host: LawHost) -> None:
    host.agree(8)
    host.lose(1, at_stop=False)
    assert host.failure() is None, "how it ends tells"
    host.tick(seen=GroupSeen(ended={1: -9}))
    failed = host.failure()
    assert failed is not None and failed.is_chance and "ranks [1] died" in failed.reason


def test_workers_that_have_finished_on_the_way_to_a_stop_are_told_of_once(host: LawHost) -> None:
    host.agree(8)
    for _ in range(3):
        if actions.PollGroup(1) in host.tick(seen=GroupSeen(ended={0: 0, 1: 0})):
            host.over()
    assert host.reported().count("finished") == 1


@pytest.mark.fault
@pytest.mark.parametrize(
    ("written", "ended", "killed"),
    [((), {}, AT_STOP), ((0,), {1: -9}, frozenset())],
    ids=["hang", "dead, and a process that it has forked holds its connection"],
)
def test_who_hangs_in_a_snapshot_is_ended_and_who_is_dead_is_not_killed_again(
    written: tuple[int, ...], ended: dict[int, int], killed: frozenset[int]
) -> None:
    host = LawHost(drain_timeout_s=5.0)
    host.train()
    host.stand()
    if written:
        host.write(8, *written)
    for seconds in (1.0, 4.0):
        host.tick(seconds, GroupSeen(reached=AT_STOP, ended=ended))
    assert not host.all(actions.Kill)
    host.tick(2.0, GroupSeen(reached=AT_STOP, ended=ended))
    assert host.all(actions.Kill) == [actions.Kill(1, killed)]
    host.write(8, *written)
    assert len(host.all(actions.Seal)) == 1, "the share of the dead was written for it"
