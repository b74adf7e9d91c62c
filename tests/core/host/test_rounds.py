"""The law of a host: rounds from their start to their end, commits, and the host itself."""

import numpy as np
import pytest

from scalai.core.host import actions
from scalai.core.host.events import (
    CoordinatorReplaced,
    Expelled,
    Failed,
    JobLost,
    LeaveAsked,
    NothingToCommit,
    PiecesHere,
    RestorePlanned,
)
from scalai.core.host.rounds import ENDED, SERVER_S
from scalai.core.host.standby import Standby
from scalai.core.messages import commands, reports
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    AtBrink,
    AwaitPieces,
    AwaitRound,
    BeginSnapshot,
    Hello,
    Imports,
    RankFinished,
    RankRefused,
    RankRestored,
    RankUnhooked,
    ReadOrder,
    Source,
)
from support.law_host import LawHost
from support.listed import listed, part_of
from support.store_states import two_ranks
from support.wire_words import start, workers

HELD = two_ranks()
SOURCES = listed({"b": part_of(HELD[0], "b", 4)})
PRINTS = np.arange(len(HELD[0]), dtype=np.uint64)


def restoring(host: LawHost) -> list[int]:
    """Begin a round that restores generation 4; return the calls of its workers."""
    host.begin(generation=4, sources=SOURCES)
    return host.publish(is_restoring=True, held=HELD)


def fetch(host: LawHost) -> dict[int, Source]:
    """All wanted pieces are there; return the source of each rank."""
    found = hand(host)
    host.succeed(actions.FetchWanted)
    return found


def hand(host: LawHost) -> dict[int, Source]:
    """What is here is handed to the workers; return the source of each rank."""
    source: Source = object()  # type: ignore[assignment]  # the law does not look into it
    found = {0: source, 1: source}
    host.feed(RestorePlanned(1, found, 0.1, 3, 4))
    return found


def test_workers_are_welcomed_and_publish_what_they_hold() -> None:
    host = LawHost()
    host.begin()
    host.ask(Hello(1, 1))
    (welcome,) = host.all(actions.AnswerHello)
    assert welcome.workers.round == 1
    assert not (welcome.is_standby or welcome.is_from_standby)
    calls = host.publish(held=HELD)
    (published,) = host.told(reports.Published)
    assert set(published.tensors) == {tensor.name for tensor in HELD[0].tensors}
    assert [host.answers()[call] for call in calls] == [None, None], "they begin from their own"
    assert [action.held for action in host.all(actions.Reserve)] == [HELD]


def test_a_restore_waits_for_all_and_is_proven_before_anybody_trains() -> None:
    host = LawHost()
    calls = restoring(host)
    (wanted,) = host.all(actions.FetchWanted)
    assert {rank: want.pieces for rank, want in wanted.wants.items()} == HELD
    assert not host.answers()
    found = fetch(host)
    assert [host.answers()[call] for call in calls] == [found[0], found[1]]
    waits = [host.ask(RankRestored(r, 1, PRINTS, {"restore": 1.0 + r}, "note")) for r in (1, 0)]
    (restored,) = host.told(reports.Restored)
    assert len(restored.rows) == 1 + len(HELD[0]), "what both have counts once"
    assert dict(restored.seconds) == {"plan": 0.1, "restore": 2.0}
    assert (restored.bytes_local, restored.bytes_remote) == (3, 4)
    assert not set(waits) & set(host.answers())
    host.obey(commands.Proceed(1))
    assert set(waits) <= set(host.answers())
    host.obey(commands.Proceed(1))  # by a new coordinator
    assert host.all(actions.TrustFetched) == [actions.TrustFetched(4)]
    assert len([each for each in host.all(actions.AnswerCall) if each.call in waits]) == 2


def pieces(host: LawHost, *ranks: int) -> list[ReadOrder]:
    """A batch for these ranks is here; return the order of each."""
    orders = {rank: ReadOrder.empty() for rank in ranks}
    host.feed(PiecesHere(1, orders))
    return [orders[rank] for rank in ranks]


def test_workers_restore_what_is_here_while_the_rest_comes() -> None:
    host = LawHost()
    calls = restoring(host)
    hand(host)
    assert set(calls) <= set(host.answers()), "they need not wait for other hosts"
    (early,) = pieces(host, 1)
    waits = [host.ask(AwaitPieces(rank, 1)) for rank in (0, 1)]
    assert waits[0] not in host.answers() and host.answers()[waits[1]] is early
    late = pieces(host, 0, 1)
    assert host.answers()[waits[0]] is late[0]
    last = pieces(host, 1)
    again = [host.ask(AwaitPieces(1, 1)) for _ in range(3)]
    assert [host.answers().get(call) for call in again[:2]] == [late[1], last[0]]
    assert again[2] not in host.answers()
    host.succeed(actions.FetchWanted)
    assert host.answers()[again[2]] is None, "no more come"


def test_a_restore_is_told_of_once_all_that_came_is_in_the_store() -> None:
    """A worker may have restored the last batch before the fetch says that it was the last."""
    host = LawHost()
    restoring(host)
    hand(host)
    for rank in (0, 1):
        host.ask(RankRestored(rank, 1, PRINTS, {"move": 0.5 + rank}, ""))
    assert not host.told(reports.Restored)
    host.feed(reports.Grown(b"grown"))
    host.succeed(actions.FetchWanted)
    assert host.reported()[-2:] == ["grown", "restored"]
    assert host.told(reports.Restored)[0].seconds["move"] == 1.5, "the longest wait"


@pytest.mark.fault
@pytest.mark.parametrize("is_proof", [False, True])
def test_workers_that_wait_for_pieces_that_do_not_come_end_with_their_round(
    is_proof: bool,
) -> None:
    host = LawHost()
    restoring(host)
    hand(host)
    pieces(host, 0)
    waits = [host.ask(AwaitPieces(1, 1))]
    if is_proof:
        host.feed(reports.Unproven(1, "2 pieces differ"))
        assert host.failure() is None, "the coordinator decides"
    else:
        host.fail(actions.FetchWanted, "b is gone")
        assert "b is gone" in str(host.failure())
    assert not set(waits) & set(host.answers())
    host.obey(commands.Stop(1, False))
    waits.append(host.ask(AwaitPieces(0, 1)))
    host.end()
    assert {host.refused()[call] for call in waits} == {ENDED}
    pieces(host, 0, 1)
    assert not set(waits) & set(host.answers()), "what still comes is nobody's"


def test_replicas_of_one_host_that_differ_are_reported_and_nobody_trains() -> None:
    host = LawHost()
    restoring(host)
    fetch(host)
    waits = [host.ask(RankRestored(r, 1, PRINTS + np.uint64(r), {}, "")) for r in (0, 1)]
    (unproven,) = host.told(reports.Unproven)
    assert "replicas of" in unproven.reason and not set(waits) & set(host.answers())


@pytest.mark.parametrize(
    "report", [reports.Unproven(1, "2 pieces"), reports.Moved(1, 5), reports.Prepared(1, 8, 7)]
)
def test_what_comes_of_a_round_is_left_to_the_coordinator_unless_it_has_ended(
    report: reports.Unproven | reports.Moved | reports.Prepared,
) -> None:
    host = LawHost()
    restoring(host)
    before = host.reports()
    host.feed(report)
    host.begin(2)
    host.feed(report)
    assert host.reports() == [*before, report]


def test_what_comes_when_its_round_has_ended_is_still_told_of() -> None:
    """The store holds it."""
    host = LawHost()
    calls = restoring(host)
    host.obey(commands.Stop(1, False))
    host.end()
    assert {host.refused()[call] for call in calls} == {ENDED}
    host.feed(reports.Grown(b"grown"))
    fetch(host)
    assert host.reported()[-1] == "grown" and not host.answers()


# ---------------------------------------------------------------------- beside each other


def test_workers_that_were_on_standby_begin_when_the_round_does() -> None:
    host = LawHost()
    host.train()
    host.build()
    host.ask(Hello(0, 2))
    assert host.all(actions.AnswerHello)[-1].is_standby
    calls = host.publish(2, held=HELD)
    assert host.reports()[-1] == reports.Built(2) and not set(calls) & set(host.answers())
    host.obey(commands.Stop(1, True))
    host.end()
    host.obey(start(2, 0, 2, is_built=True))
    assert actions.BeginGroup(2) in host.done and set(calls) <= set(host.answers())
    assert len(host.all(actions.StartGroup)) == 2
    host.ask(Hello(1, 2))  # a leaving host is not waited for
    late = host.all(actions.AnswerHello)[-1]
    assert late.is_from_standby and not late.is_standby, "it meets the others at the brink"


@pytest.mark.parametrize("brink", [(0, 1), (1,), (0,), ()])
def test_next_workers_hear_how_far_they_go_beside_the_training(brink: tuple[int, ...]) -> None:
    """All workers of the present round must know the brink, and the host have room up to it."""
    host = LawHost()
    host.begin()
    host.publish(brink=brink)
    host.build(level=Standby.BRINK)
    found = AtBrink(1, 1) if brink == (0, 1) else None
    assert host.all(actions.StartGroup)[-1].brink == found, "the largest of all"
    host.ask(Hello(0, 2))
    assert host.all(actions.AnswerHello)[-1].is_at_brink
    host.ask(Hello(0, 1))
    assert not host.all(actions.AnswerHello)[-1].is_at_brink


def test_workers_that_have_nothing_built_at_the_brink_build_it_in_their_round() -> None:
    host = LawHost()
    host.train()
    host.build(level=Standby.MODELS)  # others of the job have no room, so these wait as well
    calls = [host.ask(AwaitRound(0, 2))]
    assert reports.Built(2) not in host.reports()
    calls.append(host.ask(AwaitRound(1, 2)))
    assert host.reports()[-1] == reports.Built(2) and not set(calls) & set(host.answers())
    host.obey(commands.Stop(1, True))
    host.end()
    host.obey(start(2, 0, 2, is_built=True))
    assert set(calls) <= set(host.answers())
    host.publish(2, held=HELD)
    assert host.told(reports.Published)[-1].round == 2
    late = host.ask(AwaitRound(0, 2))
    assert late in host.answers(), "its round has begun"


def test_the_end_of_workers_at_the_brink_answers_them_and_leaves_the_training_alone() -> None:
    host = LawHost()
    host.train()
    host.build(level=Standby.BRINK)
    calls = [host.ask(AwaitRound(rank, 2)) for rank in (0, 1)]
    host.over(2, "rank 1 was killed")
    assert host.reports()[-1] == reports.Built(2, "rank 1 was killed") and host.failure() is None
    host.end(2)
    assert set(calls) <= set(host.refused())


def test_what_was_on_standby_and_is_gone_fails_the_round_that_counts_on_it() -> None:
    host = LawHost()
    host.train()
    host.build()
    call, _ = host.publish(2)
    host.over(2, "rank 0 exited with 1")
    assert (
        host.reports()[-1] == reports.Built(2, "rank 0 exited with 1")
        and call not in host.refused()
    )
    assert actions.EndGroup(2, 0.0) in host.done
    host.obey(start(2, 0, 2, is_built=True))
    assert "what was on standby is gone" in str(host.failure())
    host.obey(commands.Stop(2, False))
    assert "stopped" not in host.reported(), "those that were on standby are being ended"
    host.end(2)
    assert host.reported()[-1] == "stopped" and host.refused()[call] == ENDED


@pytest.mark.fault
def test_workers_that_cannot_be_started_end_no_agent() -> None:
    host = LawHost()
    host.obey(commands.Build(workers(3)))
    host.fail(actions.StartGroup, "no page")
    assert host.reports() == [reports.Built(3, "no page")]
    host.obey(start(3))
    host.fail(actions.StartGroup, "no page")
    assert "no page" in str(host.failure())
    host.obey(commands.Stop(3, False))
    assert host.reported()[-1] == "stopped" and not host.all(actions.EndGroup)


def test_workers_are_started_once_those_before_them_are_gone_with_their_memory() -> None:
    host = LawHost()
    host.train()
    for number in (2, 3):
        host.obey(commands.Build(workers(number, 0, 2)))
    assert [each.workers.round for each in host.all(actions.StartGroup)] == [1, 2]
    host.obey(commands.GiveUp(3))
    host.obey(commands.Build(workers(4, 0, 2)))
    assert host.all(actions.EndGroup) == [actions.EndGroup(2, 0.0)], "the third was not started"
    host.obey(commands.Stop(1, False))
    host.end(2)
    assert len(host.all(actions.StartGroup)) == 2, "the first is being ended, too"
    host.end()
    assert [each.workers.round for each in host.all(actions.StartGroup)] == [1, 2, 4]


def test_workers_that_are_being_ended_are_told_nothing_and_ended_once() -> None:
    host = LawHost()
    host.train()
    host.obey(commands.Stop(1, False))
    done = len(host.done)
    host.obey(commands.Stop(1, False))
    host.obey(commands.Prepare(1, 12))
    host.obey(commands.LogStacks())
    host.tick(1.0)
    assert host.done[done:] == []
    host.end()
    assert host.reported().count("stopped") == 1 and host.state.round is None


@pytest.mark.parametrize(("grace", "seconds"), [(True, 10.0), (False, 0.0)])
def test_workers_that_have_written_may_leave_by_themselves(grace: bool, seconds: float) -> None:
    host = LawHost()
    host.train()
    host.obey(commands.Stop(1, grace))
    assert host.all(actions.EndGroup) == [actions.EndGroup(1, seconds)]
    host.end()
    assert host.told(reports.Stopped) == [reports.Stopped(1, 9)]
    host.obey(commands.Stop(1, grace))
    assert host.reported()[-2:] == ["stopped", "stopped"], "each stop is answered"


# ---------------------------------------------------------------------- workers' words


@pytest.mark.parametrize(
    "request_",
    [Hello(0, 7), Hello(9, 1), RankFinished(0, 7, 3), BeginSnapshot(0, 2, "stop", 4)],
    ids=["round", "rank", "finished", "standby"],
)
def test_calls_of_workers_that_are_not_there_are_refused(
    request_: Hello | RankFinished | BeginSnapshot,
) -> None:
    host = LawHost()
    host.train()
    host.build()
    call = host.ask(request_)
    assert host.refused()[call] == ENDED


def test_a_plain_job_steps_as_soon_as_it_runs() -> None:
    host = LawHost(is_elastic=False)
    host.begin()
    assert host.reported() == ["stepped"]


def test_steps_and_ends_of_workers_are_told_of_once() -> None:
    host = LawHost()
    host.train()
    host.tick()
    assert actions.PollGroup(1) in host.done
    host.over()
    host.over()
    assert [host.reported().count(word) for word in ("stepped", "finished")] == [1, 1]


def test_a_failure_of_workers_is_told_of_once() -> None:
    host = LawHost()
    host.train()
    host.over(1, "rank 1 was killed by SIGKILL", is_chance=True)
    host.fail(actions.StartGroup, "and no room")
    host.feed(Failed(actions.WarmUp(Imports((), ()), True), "and no file"))
    assert (failed := host.failure()) is not None and failed.is_chance


def test_a_worker_that_refuses_the_job_ends_the_round_and_not_a_training_beside_it() -> None:
    host = LawHost()
    host.train()
    host.build()
    host.ask(RankRefused(0, 2, "TP 3 does not divide 4 heads"))
    assert host.reports()[-1] == reports.Built(2, "TP 3 does not divide 4 heads")
    assert host.state.standby is None
    host.ask(RankRefused(0, 1, "not this one either"))
    assert (failed := host.failure()) is not None and failed.is_refusal


def test_a_script_that_nothing_connects_is_told_of_once_and_may_connect_itself() -> None:
    host = LawHost()
    host.begin()
    for _ in range(2):
        host.ask(RankUnhooked(0, 1))
    assert (
        host.reports() == [reports.Hooked(1, is_hooked=False)]
        and "NOTHING CONNECTS IT" in host.log()
    )
    host.publish()
    assert host.reports()[1] == reports.Hooked(1)


FIRST, ALL = Imports(("torch",), ()), Imports(("torch", "json"), ())


@pytest.mark.parametrize(("cores", "early"), [(2, []), (3, [actions.WarmUp(FIRST, False)])])
def test_the_fork_server_imports_beside_the_first_workers_where_a_core_is_spare(
    cores: int, early: list[actions.WarmUp]
) -> None:
    host = LawHost(cores=cores)
    host.begin()
    for rank, imports in enumerate([FIRST, None]):
        host.ask(Hello(rank, 1, imports))
    assert host.all(actions.WarmUp) == early
    host.train_on(ALL)
    assert host.all(actions.WarmUp) == [*early, actions.WarmUp(ALL, True)]


@pytest.mark.fault
def test_a_change_waits_for_imports_under_way_and_makes_none_beside_them() -> None:
    host = LawHost()
    host.begin()
    host.train_on(ALL)
    host.obey(commands.Build(workers(2, 0, 2)))
    host.tick()
    assert [start.workers.round for start in host.all(actions.StartGroup)] == [1]
    host.succeed(actions.WarmUp)
    host.tick()
    assert [start.workers.round for start in host.all(actions.StartGroup)] == [1, 2]


@pytest.mark.fault
@pytest.mark.parametrize(("cores", "early"), [(2, []), (8, [actions.WarmUp(FIRST, False)])])
def test_a_round_before_the_first_step_waits_for_the_imports_known_so_far(
    cores: int, early: list[actions.WarmUp]
) -> None:
    host = LawHost(cores=cores)
    host.begin()
    host.ask(Hello(0, 1, FIRST))
    host.over(1, "rank 1 was killed by SIGKILL")
    host.obey(commands.Stop(1, has_written=False))
    host.succeed(actions.EndGroup, 0)
    host.obey(start(2, 0, 2))
    expected = [*early, actions.WarmUp(FIRST, True)]
    assert host.all(actions.WarmUp) == expected and len(host.all(actions.StartGroup)) == 1
    host.succeed(actions.WarmUp)
    assert len(host.all(actions.StartGroup)) == 2


@pytest.mark.fault
@pytest.mark.parametrize("is_built", [False, True])
def test_a_round_that_begins_before_its_standby_has_started_starts_then(is_built: bool) -> None:
    host = LawHost()
    host.begin()
    host.train_on(ALL)
    host.obey(commands.Build(workers(2, 0, 2)))
    host.obey(commands.Stop(1, has_written=False))
    host.succeed(actions.EndGroup, 0)
    host.obey(start(2, 0, 2, is_built=is_built))
    assert not host.all(actions.BeginGroup) and len(host.all(actions.StartGroup)) == 1
    host.succeed(actions.WarmUp)
    (_, late) = host.all(actions.StartGroup)
    assert (late.workers.round, late.is_standby) == (2, False)
    assert host.failure() is None


@pytest.mark.fault
def test_an_import_that_hangs_holds_up_a_change_for_a_while_only() -> None:
    host = LawHost()
    host.begin()
    host.train_on(ALL)
    host.obey(commands.Build(workers(2, 0, 2)))
    host.tick(SERVER_S - 1)
    assert len(host.all(actions.StartGroup)) == 1
    host.tick(2)
    assert len(host.all(actions.StartGroup)) == 2


# ---------------------------------------------------------------------- commits


def waiting_commit() -> tuple[LawHost, commands.Commit]:
    """Return a host without room for the commit of generation 3."""
    host, command = LawHost(), commands.Commit(3, "r-1-7", None, {})
    host.obey(command)
    assert host.done == [command]
    host.fail(commands.Commit, "no room.")
    assert host.log() == "event=late_commit generation=3: no room."
    return host, command


def test_what_there_is_no_room_for_is_committed_later() -> None:
    host, command = waiting_commit()
    host.obey(commands.Discard())
    assert host.all(actions.DiscardSealed)[-1].kept == {"r-1-7"}
    assert host.tick() == (command,)
    host.fail(commands.Commit, "no room.")
    assert host.log().count("event=late_commit") == 1
    host.feed(reports.Committed(3))
    assert host.reported() == ["committed"] and not host.tick()
    host.obey(commands.Discard())
    assert host.all(actions.DiscardSealed)[-1].kept == frozenset()


def test_what_there_is_no_room_for_goes_where_the_job_has_left_it_behind() -> None:
    """Else it would be committed once there is room, and nobody would let go of it any more."""
    host, _ = waiting_commit()
    assert host.obey(commands.Drop(3)) == (commands.Drop(3), commands.DropSnapshot("r-1-7"))
    assert not host.tick() and host.obey(commands.Drop(2)) == (commands.Drop(2),)


def test_a_host_that_the_job_goes_on_without_commits_nothing_late_by_itself() -> None:
    """The number may be left behind by then; it would be a newer state of which parts miss."""
    host, _ = waiting_commit()
    host.feed(Expelled("the job goes on without it."))
    assert not host.tick()


@pytest.mark.fault
@pytest.mark.parametrize("snapshot", ["another", "r-1-7"], ids=["never here", "not given up"])
def test_nothing_to_commit_fails_the_round(snapshot: str) -> None:
    host, command = LawHost(), commands.Commit(4, snapshot, None, {})
    host.train()
    host.snapshot(7)
    host.sealed()
    host.obey(command)
    host.feed(NothingToCommit(command, "sealed in /s, but []"))
    assert f"snapshot {snapshot!r} is not sealed in /s" in str(host.failure())
    assert not host.state.late


# ---------------------------------------------------------------------- the host itself


def test_a_host_that_was_expelled_ends_its_workers_and_joins_again() -> None:
    host = LawHost()
    slot = host.train()
    host.build()
    host.feed(LeaveAsked())
    host.feed(Expelled("host 'a' is not in the job."))
    assert host.all(actions.EndGroup) == [actions.EndGroup(2, 0.0), actions.EndGroup(1, 0.0)]
    assert actions.Rejoin() not in host.done, "its workers live"
    host.end(2)
    host.end()
    assert host.done[-1] == actions.Rejoin() and host.discarded() == [slot]
    assert "stopped" not in host.reported(), "nobody has asked for it"
    host.succeed(actions.Rejoin)
    assert host.reported()[-2:] == ["slots", "leaving"]


@pytest.mark.fault
@pytest.mark.parametrize("is_refused", [True, False])
def test_a_host_without_workers_joins_again_at_once_and_ends_where_it_cannot(
    is_refused: bool,
) -> None:
    host = LawHost()
    host.feed(Expelled("host 'a' is not in the job."))
    assert host.done[-1] == actions.Rejoin()
    if is_refused:
        host.fail(actions.Rejoin, "/durable cannot be read.")
    else:
        host.feed(JobLost("/durable cannot be read."))
    assert host.state.exit == 1 and "/durable cannot be read" in host.log()


@pytest.mark.parametrize(
    ("failures", "word"), [((), "finished"), (("rank 0 exited with 1",), "workers_failed")]
)
def test_another_coordinator_hears_again_how_the_workers_ended(
    failures: tuple[str, ...], word: str
) -> None:
    host = LawHost()
    host.train()
    host.over(1, *failures)
    host.feed(CoordinatorReplaced())
    assert host.done[-1] == actions.Rejoin()
    host.succeed(actions.Rejoin)
    assert host.reported()[-1] == word and host.reported().count(word) == 2


def test_a_probe_that_tells_nothing_new_is_not_told_of() -> None:
    host = LawHost()
    for slots in (2, 1, 1):
        host.feed(reports.Slots(slots))
    assert host.reports() == [reports.Slots(1)]


def test_an_agent_that_exits_does_nothing_more() -> None:
    host = LawHost()
    host.train()
    ledger, leave = JsonText("{}"), commands.Exit(0, "done", False, commands.Ending(41, 3))
    host.ask(RankFinished(0, 1, 41, ledger))
    host.ask(RankFinished(1, 1, 40))  # it draws no samples
    host.obey(leave)
    assert host.all(actions.LeaveState) == [actions.LeaveState(leave, 41, ledger)]
    assert host.state.exit == 0
    assert host.tick() == () and host.feed(LeaveAsked()) == ()
