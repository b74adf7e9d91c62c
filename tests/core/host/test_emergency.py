"""The law of a host: workers that outlive a failure say their step, and write what is wanted."""

import pytest

from scalai.core.host import actions
from scalai.core.job.deadlines import FREEZE_ALL_S
from scalai.core.messages import commands, reports
from scalai.core.messages.worker_messages import RankFailed, RankFrozen
from support.law_host import LawHost


def frozen_host(steps: dict[int, int | None], rescued: int | None = None) -> LawHost:
    """Return a host whose workers stand still at these steps, and write ``rescued``."""
    host = LawHost()
    host.train()
    host.freeze(steps)
    if rescued is not None:
        host.obey(commands.Rescue(1, rescued))
    return host


@pytest.mark.parametrize(
    ("killed", "cause"),
    [(True, "rank 1 was killed by SIGKILL"), (False, "rank 0: Connection closed by peer")],
)
def test_who_was_killed_is_named_before_who_has_raised(killed: bool, cause: str) -> None:
    """A process closes its connections before it has ended."""
    host = LawHost()
    host.train()
    host.ask(RankFailed(0, 1, "Connection closed by peer"))
    host.tick()
    assert host.failure() is None
    if killed:
        host.over(1, "rank 1 was killed by SIGKILL", is_chance=True)
    host.tick(9.0)
    assert (failed := host.failure()) is not None and failed.reason == cause


def test_workers_are_asked_at_once_and_written_when_it_is_wanted() -> None:
    host = frozen_host({0: 9, 1: 9})
    assert host.reports()[-1] == reports.Frozen(1, (9,))
    assert not host.orders(), "nothing is written before the job says of which step"
    host.obey(commands.Rescue(1, 9))
    assert host.orders() == [0, 1]
    host.write(9)
    seal = host.all(actions.Seal)[-1]
    assert seal.step == 9 and set(seal.parts) == {0, 1}
    host.sealed()
    assert host.told(reports.Sealed)[-1].reason == "emergency"
    assert host.reports()[-1] == reports.Rescued(1, 9)


@pytest.mark.fault
@pytest.mark.parametrize("is_late", [False, True], ids=["torn", "cannot write"])
def test_another_rank_writes_what_a_torn_one_should_have_written(is_late: bool) -> None:
    host = frozen_host({0: 9, 1: 9 if is_late else None}, rescued=9)
    host.write(9, 0)
    if is_late:
        host.ask(RankFrozen(1, 1, None, "cannot write: out of memory"))
    assert host.orders() == ([0, 1, 0] if is_late else [0, 0]), "its own share, then the other's"
    host.write(9, 0)
    (seal,) = host.all(actions.Seal)
    assert set(seal.parts) == {0} and len(seal.taken_over) == 1


@pytest.mark.fault
def test_a_worker_that_hangs_while_it_writes_is_ended() -> None:
    host = frozen_host({0: 9, 1: 9}, rescued=9)
    host.write(9, 0)
    host.tick(0.1)
    host.tick(9.1)
    assert host.all(actions.Kill) == [actions.Kill(1, frozenset({1}))]
    host.write(9, 0)
    assert len(host.all(actions.Seal)) == 1


def test_who_does_not_answer_is_done_without() -> None:
    host = frozen_host({0: 9})
    assert not host.told(reports.Frozen)
    host.tick(FREEZE_ALL_S + 0.1)
    assert host.reports()[-1] == reports.Frozen(1, (9,))


def test_nobody_that_lives_writes_where_none_stands_at_the_step() -> None:
    host = frozen_host({0: 9, 1: 9}, rescued=10)
    assert host.reports()[-1] == reports.Rescued(1, 10) and not host.orders()
    host.obey(commands.Rescue(1, 9))
    assert host.orders() == [0, 1], "of an earlier step they do"


@pytest.mark.fault
@pytest.mark.parametrize("has_room", [False, True])
def test_a_host_that_is_to_write_behind_a_snapshot_writes_if_its_store_has_room(
    has_room: bool,
) -> None:
    host = LawHost()
    host.train()
    host.snapshot(7)
    host.freeze({0: 9, 1: 9})
    host.obey(commands.Rescue(1, 9))
    assert not host.all(actions.Seal)[1:], "the one before is being sealed"
    host.sealed()
    assert not host.told(reports.Rescued)
    before = len(host.orders())
    if has_room:
        host.make_files()
        assert host.orders()[before:] == [0, 1]
    else:
        host.fail(actions.Reserve, "full")
        assert host.reports()[-1] == reports.Rescued(1, 9) and host.failure() is None


@pytest.mark.fault
def test_a_snapshot_in_the_middle_of_which_workers_fail_is_written_again() -> None:
    host = LawHost()
    host.train()
    host.come(7)
    host.freeze({0: 7, 1: 7})
    host.obey(commands.Rescue(1, 7))
    host.write(7, 0)  # its main thread
    host.write(7, 0)
    assert not host.all(actions.Seal)
    host.write(7, 1)
    assert len(host.all(actions.Seal)) == 1
