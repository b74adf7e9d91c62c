"""The law of a host: workers that make a step behind their stop hold up nobody for long."""

import pytest

from scalai.core.host import actions
from scalai.core.host.events import GroupSeen
from scalai.core.host.standby import Standby
from scalai.core.job.function_proof import PROOF_S, Numbers
from scalai.core.messages import commands, reports
from scalai.core.messages.worker_messages import Hello, Imports, RankStepped
from support.law_host import LawHost
from support.wire_words import start, workers

pytestmark = pytest.mark.fault

NUMBERS = Numbers(5.0, 2.0, framework="f")


@pytest.fixture
def host() -> LawHost:
    """A host whose two workers have written at their stop, and make a step more."""
    host = LawHost()
    host.train()
    host.agree(8, proves=True)
    host.come(8, "stop")
    host.obey(commands.TakeSnapshot(1))
    host.write(8)
    host.sealed()
    return host


def stop(host: LawHost, *, level: Standby = Standby.NOTHING) -> None:
    """End the round, with or without workers on standby."""
    if level is not Standby.NOTHING:
        host.build(level=level)
    host.obey(commands.Stop(1, has_written=True))


def tell(host: LawHost, rank: int, loss: float | None = None) -> None:
    host.ask(RankStepped(rank, 1, 9, None, Numbers(loss, 2.0, framework="f")))


def ends(host: LawHost) -> list[tuple[int, float]]:
    return [(action.round, action.grace_s) for action in host.all(actions.EndGroup)]


def test_where_the_next_workers_stand_by_the_old_ones_go_on_beside_them(host: LawHost) -> None:
    stop(host, level=Standby.MODELS)
    assert host.reported()[-1] == "stopped" and not ends(host)
    host.obey(start(2, 3, is_built=True))
    answers = len(host.answers())
    tell(host, 0)
    assert host.told(reports.Stepped) == [reports.Stepped(1)], "of the first step"
    tell(host, 1, 5.0)
    assert len(host.answers()) == answers + 2, "they leave, and their memory is free"
    assert host.reports()[-1] == reports.Stepped(1, NUMBERS)
    host.over(1, "rank 0 was killed")
    assert ends(host) == [(1, 0.0)]
    host.end(newest=8)
    assert host.reported().count("stopped") == 1 and host.failure() is None
    assert host.state.round is not None


def test_who_makes_the_step_for_too_long_beside_the_next_round_is_ended(host: LawHost) -> None:
    stop(host, level=Standby.MODELS)
    host.tick(PROOF_S - 1)
    assert not ends(host)
    host.tick(2)
    assert host.reports()[-1] == reports.Stepped(1), "nobody waits for its numbers"
    host.tick(2)
    assert ends(host) == [(1, 0.0)]


@pytest.mark.parametrize("level", [Standby.NOTHING, Standby.BRINK])
def test_elsewhere_the_round_ends_behind_the_step(host: LawHost, level: Standby) -> None:
    """Nor do workers at the brink begin before: they need the memory of the old ones."""
    stop(host, level=level)
    tell(host, 0)
    host.tick()
    assert not ends(host) and "stopped" not in host.reported()
    tell(host, 1, 5.0)
    host.tick()
    assert ends(host) == [(1, host.state.settings.exit_grace_s)]
    host.end(newest=8)
    assert host.reported()[-1] == "stopped"


def test_next_workers_that_have_not_started_wait_for_the_step(host: LawHost) -> None:
    """They would begin beside the old ones without a look at the memory."""
    host.ask(Hello(0, 1, Imports(("torch",), ())))
    host.obey(commands.Build(workers(2, 0, 2)))
    stop(host)
    assert "stopped" not in host.reported()
    for rank in (0, 1):
        tell(host, rank)
    host.tick()
    assert ends(host) == [(1, host.state.settings.exit_grace_s)]


@pytest.mark.parametrize(
    ("seconds", "ended"), [(PROOF_S + 1, {}), (1.0, {0: 0, 1: 0})], ids=["hangs", "left out"]
)
def test_a_step_that_hangs_or_is_left_out_ends_the_round_too(
    host: LawHost, seconds: float, ended: dict[int, int]
) -> None:
    stop(host)
    host.tick(seconds, GroupSeen(ended=ended))
    assert ends(host) == [(1, 0.0)] and host.told(reports.Stepped)[1:] == [reports.Stepped(1)]


@pytest.mark.parametrize("has_told", [True, False])
def test_who_dies_in_the_step_is_told_of_at_once_with_what_the_others_know(
    host: LawHost, *, has_told: bool
) -> None:
    stop(host, level=Standby.MODELS)
    host.obey(start(2, 3, is_built=True))
    if has_told:
        tell(host, 1, 5.0)
    host.over(1, "rank 0 was killed")
    assert host.told(reports.Stepped)[1:] == [reports.Stepped(1, NUMBERS if has_told else None)]


def test_workers_that_have_told_of_the_step_before_the_end_hold_up_nothing(host: LawHost) -> None:
    tell(host, 0)
    tell(host, 1, 5.0)
    stop(host)
    assert len(ends(host)) == 1


def test_a_next_round_without_workers_on_standby_has_the_memory_of_the_old_ones(
    host: LawHost,
) -> None:
    stop(host, level=Standby.MODELS)
    host.obey(commands.GiveUp(5))
    assert not ends(host), "it is of no other round"
    host.obey(commands.GiveUp(2))
    host.obey(start(3, 3))
    assert ends(host) == [(2, 0.0), (1, 0.0)]
