"""The law of a host: workers that make a step behind their stop hold up nobody for long."""

import pytest

from scalai.core.host import actions
from scalai.core.host.events import Agreed, GroupEnded, GroupOver, GroupSeen, GroupStarted, SealDone
from scalai.core.job.function_proof import PROOF_S, Numbers
from scalai.core.messages import commands, reports
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import BeginSnapshot, RankStepped, RankWritten
from support.law_host import LawHost
from support.wire_words import start, workers

pytestmark = pytest.mark.fault

NONE = JsonText.of(None)
NUMBERS = Numbers(5.0, 2.0, framework="f")


@pytest.fixture
def host() -> LawHost:
    """A host whose two workers have written at their stop, and make a step more."""
    host = LawHost()
    slot = host.train()
    host.obey(commands.Agree(1, 8, proves=True))
    host.feed(Agreed(1, 8))
    for rank in range(2):
        host.ask(BeginSnapshot(rank, 1, "stop", 8))
    host.obey(commands.TakeSnapshot(1))
    for rank in range(2):
        host.ask(RankWritten(rank, 1, 8, (rank,), f"dp{rank}", NONE, NONE, 12, {}))
    host.feed(SealDone(1, slot, b""))
    return host


def stand_by(host: LawHost) -> None:
    host.obey(commands.Build(workers(2)))
    host.feed(GroupStarted(2))


def tell(host: LawHost, rank: int, loss: float | None = None) -> None:
    host.ask(RankStepped(rank, 1, 9, None, Numbers(loss, 2.0, framework="f")))


def stepped(host: LawHost) -> list[reports.Stepped]:
    return [each for each in host.reports() if isinstance(each, reports.Stepped)]


def test_where_the_next_workers_stand_by_the_old_ones_go_on_beside_them(host: LawHost) -> None:
    stand_by(host)
    host.obey(commands.Stop(1, has_written=True))
    assert host.reported()[-1] == "stopped" and not host.all(actions.EndGroup)
    host.obey(start(2, 3, is_built=True))
    answers = len(host.all(actions.AnswerCall))
    tell(host, 0)
    assert stepped(host)[-1].round == 1 and stepped(host)[-1].numbers is None, "of the first step"
    tell(host, 1, 5.0)
    assert len(host.all(actions.AnswerCall)) == answers + 2, "they leave, and their memory is free"
    assert stepped(host)[-1] == reports.Stepped(1, NUMBERS)
    host.feed(GroupOver(1, ("rank 0 was killed",)))
    assert host.all(actions.EndGroup) == [actions.EndGroup(1, 0.0)]
    host.feed(GroupEnded(1, 8))
    assert host.reported().count("stopped") == 1 and "workers_failed" not in host.reported()
    assert host.state.proving is None and host.state.round is not None


def test_who_makes_the_step_for_too_long_beside_the_next_round_is_ended(host: LawHost) -> None:
    stand_by(host)
    host.obey(commands.Stop(1, has_written=True))
    host.tick(PROOF_S - 1)
    assert not host.all(actions.EndGroup)
    host.tick(2)
    assert stepped(host)[-1] == reports.Stepped(1, None), "nobody waits for its numbers"
    host.tick(2)
    assert host.all(actions.EndGroup) == [actions.EndGroup(1, 0.0)]


def test_elsewhere_the_round_ends_behind_the_step(host: LawHost) -> None:
    host.obey(commands.Stop(1, has_written=True))
    tell(host, 0)
    host.tick()
    assert not host.all(actions.EndGroup) and "stopped" not in host.reported()
    tell(host, 1, 5.0)
    host.tick()
    (ended,) = host.all(actions.EndGroup)
    assert ended.grace_s == host.state.settings.exit_grace_s
    host.feed(GroupEnded(1, 8))
    assert host.reported()[-1] == "stopped"


@pytest.mark.parametrize("is_late", [True, False])
def test_a_step_that_hangs_or_is_left_out_ends_the_round_too(host: LawHost, is_late: bool) -> None:
    host.obey(commands.Stop(1, has_written=True))
    if is_late:
        host.tick(PROOF_S + 1, GroupSeen())
    else:
        host.tick(1, GroupSeen(ended={0: 0, 1: 0}))
    assert host.all(actions.EndGroup) == [actions.EndGroup(1, 0.0)]
    assert stepped(host)[-1] == reports.Stepped(1, None)


@pytest.mark.parametrize("has_told", [True, False])
def test_who_dies_in_the_step_is_told_of_at_once_with_what_the_others_know(
    host: LawHost, *, has_told: bool
) -> None:
    stand_by(host)
    host.obey(commands.Stop(1, has_written=True))
    host.obey(start(2, 3, is_built=True))
    if has_told:
        tell(host, 1, 5.0)
    host.feed(GroupOver(1, ("rank 0 was killed",)))
    assert stepped(host)[-1] == reports.Stepped(1, NUMBERS if has_told else None)


def test_workers_that_have_told_of_the_step_before_the_end_hold_up_nothing(host: LawHost) -> None:
    tell(host, 0)
    tell(host, 1, 5.0)
    host.obey(commands.Stop(1, has_written=True))
    assert len(host.all(actions.EndGroup)) == 1


def test_a_next_round_without_workers_on_standby_has_the_memory_of_the_old_ones(
    host: LawHost,
) -> None:
    stand_by(host)
    host.obey(commands.Stop(1, has_written=True))
    host.obey(commands.GiveUp(2))
    host.obey(start(3, 3))
    ends = [each.round for each in host.all(actions.EndGroup)]
    assert ends == [2, 1] and host.done.index(actions.EndGroup(1, 0.0)) < len(host.done)
