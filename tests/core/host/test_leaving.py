"""The law of a host: it is told to leave, by a signal or by whoever will take it away."""

import pytest

from scalai.core.host.actions import Rejoin
from scalai.core.host.events import (
    Done,
    Event,
    Expelled,
    GroupSeen,
    LeaveAsked,
    Noticed,
    NoticeWithdrawn,
)
from scalai.core.messages.reports import Leaving, Staying
from support.law_host import LawHost

SIGNAL = LeaveAsked()


def told(*notices: Event, then_s: float = 0.0) -> LawHost:
    """Return a host that has got these notices, and this time to act."""
    host = LawHost(drain_timeout_s=50.0)
    for notice in notices:
        host.feed(notice)
    host.tick(then_s)
    return host


@pytest.mark.fault
@pytest.mark.parametrize(
    ("notices", "reported"),
    [
        ([Noticed("file", 30.0), Noticed("file", 29.4)], [Leaving("file", 30.0, True)]),
        (
            [Noticed("azure", 600.0), Noticed("azure", 60.0), Noticed("azure", 300.0)],
            [Leaving("azure", left_s, True) for left_s in (600.0, 60.0, 300.0)],
        ),
        (
            [Noticed("rebalance", None), Noticed("action", 120.0), Noticed("file", 300.0)],
            [Leaving("rebalance", None, False), Leaving("action", 120.0, True)],
        ),
        (
            [Noticed("gcp", 30.0), SIGNAL],
            [Leaving("gcp", 30.0, True), Leaving("a signal", 30.0, True)],
        ),
        ([SIGNAL, SIGNAL], [Leaving("a signal", 50.0, False)]),
        (
            [Noticed("azure", 30.0), NoticeWithdrawn("azure"), NoticeWithdrawn("azure")],
            [Leaving("azure", 30.0, True), Staying()],
        ),
        (
            [Noticed("azure", 30.0), SIGNAL, NoticeWithdrawn("azure")],
            [Leaving("azure", 30.0, True), Leaving("a signal", 30.0, True),
             Leaving("a signal", 50.0, False)],
        ),
    ],
    ids=["twice", "nearer and put off", "the soonest counts", "sooner than a signal",
         "a second signal", "withdrawn", "others hold"],
)  # fmt: skip
def test_notices_are_told_once_with_the_time_that_is_left(
    notices: list[Event], reported: list[Leaving | Staying]
) -> None:
    assert told(*notices).reports() == reported


@pytest.mark.fault
@pytest.mark.parametrize(
    ("notices", "then_s", "ends_by"),
    [
        ([Noticed("gcp", 30.0), SIGNAL], 29.0, ""),
        ([Noticed("gcp", 30.0), SIGNAL], 31.0, "event=notice_over"),
        ([SIGNAL], 49.0, ""),
        ([SIGNAL, SIGNAL], 51.0, "event=drain_timeout"),
        ([Noticed("rebalance", None)], 10_000.0, ""),
        ([Noticed("azure", 30.0), NoticeWithdrawn("azure")], 60.0, ""),
    ],
    ids=["in time", "taken away", "drains", "nobody lets it go", "recommended", "withdrawn"],
)
def test_a_host_leaves_without_a_goodbye_once_its_time_is_over(
    notices: list[Event], then_s: float, ends_by: str
) -> None:
    host = told(*notices, then_s=then_s)
    assert host.state.exit == (1 if ends_by else None) and ends_by in host.log()


@pytest.mark.fault
def test_the_time_of_a_save_is_not_the_hosts_own_where_it_is_taken_away() -> None:
    host = told(Noticed("gcp", 30.0))
    for looks in range(1, 5):
        host.tick(8.0, GroupSeen(save=4, looks=looks))
    assert host.state.exit == 1


def test_notices_are_logged_once_each_and_so_is_their_end() -> None:
    host = told(Noticed("azure", 30.0), Noticed("azure", 30.0), SIGNAL, NoticeWithdrawn("azure"))
    assert host.log().count("event=notice ") == host.log().count("event=notice_withdrawn ") == 1
    assert "leaves all the same, because of a signal" in host.log()


def test_a_host_that_joins_again_says_how_much_is_left_by_then() -> None:
    host = told(Noticed("gcp", 30.0), Expelled("host 'a' is not in the job."), then_s=12.0)
    host.feed(Done(Rejoin()))
    assert host.reports()[-1] == Leaving("gcp", 18.0, True)
