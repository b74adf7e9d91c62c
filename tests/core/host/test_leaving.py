"""The law of a host: it is told to leave, by a signal or by whoever will take it away."""

import pytest

from scalai.core.host.events import (
    Expelled,
    GroupSeen,
    LeaveAsked,
    Noticed,
    NoticeWithdrawn,
    Rejoined,
)
from scalai.core.messages import reports
from support.law_host import LawHost


@pytest.mark.fault
def test_a_notice_is_told_with_what_is_left_and_twice_the_same_counts_once() -> None:
    host = LawHost()
    host.feed(Noticed("file:/n", 30.0))
    host.tick(1.0)
    host.feed(Noticed("file:/n", 29.4))
    assert host.reports() == [reports.Leaving("file:/n", 30.0, True)]
    assert host.log().count("event=notice ") == 1


def test_a_notice_that_comes_nearer_or_is_put_off_is_told_anew() -> None:
    host = LawHost()
    host.feed(Noticed("azure", 600.0))
    host.feed(Noticed("azure", 60.0))
    host.feed(Noticed("azure", 300.0))
    assert host.reports() == [
        reports.Leaving("azure", left_s, True) for left_s in (600.0, 60.0, 300.0)
    ]


@pytest.mark.fault
def test_the_soonest_of_several_sources_counts() -> None:
    host = LawHost()
    host.feed(Noticed("aws rebalance", None))
    host.feed(Noticed("aws instance-action", 120.0))
    host.feed(Noticed("file:/n", 300.0))
    assert host.reports() == [
        reports.Leaving("aws rebalance", None, False),
        reports.Leaving("aws instance-action", 120.0, True),
    ]


def test_a_signal_after_a_notice_leaves_its_deadline_where_that_is_sooner() -> None:
    host = LawHost(drain_timeout_s=60.0)
    host.feed(Noticed("gcp", 30.0))
    host.feed(LeaveAsked())
    assert host.reports()[-1] == reports.Leaving("a signal", 30.0, True)
    host.tick(31.0)
    assert host.state.exit == 1 and "event=notice_over" in host.log()


@pytest.mark.fault
def test_the_time_of_a_save_is_not_the_hosts_own_where_it_is_taken_away() -> None:
    host = LawHost()
    host.feed(Noticed("gcp", 30.0))
    for looks in range(1, 5):
        host.tick(8.0, GroupSeen(save=4, looks=looks))
    assert host.state.exit == 1


@pytest.mark.fault
def test_a_recommendation_never_ends_an_agent() -> None:
    host = LawHost(drain_timeout_s=9.0)
    host.feed(Noticed("aws rebalance", None))
    host.tick(10_000.0)
    assert host.state.exit is None


def test_a_notice_that_is_withdrawn_is_told_and_ends_nothing() -> None:
    host = LawHost()
    host.feed(Noticed("azure", 30.0))
    host.feed(NoticeWithdrawn("azure"))
    assert host.reports()[-1] == reports.Staying() and "event=notice_withdrawn" in host.log()
    host.feed(NoticeWithdrawn("azure"))
    assert len(host.reports()) == 2
    host.tick(60.0)
    assert host.state.exit is None


@pytest.mark.fault
def test_what_others_have_said_holds_when_one_is_withdrawn() -> None:
    host = LawHost(drain_timeout_s=50.0)
    host.feed(Noticed("azure", 30.0))
    host.feed(LeaveAsked())
    host.feed(NoticeWithdrawn("azure"))
    assert host.reports()[-1] == reports.Leaving("a signal", 50.0, False)
    assert "leaves all the same" in host.log()


def test_a_host_that_joins_again_says_how_much_is_left_by_then() -> None:
    host = LawHost()
    host.feed(Noticed("gcp", 30.0))
    host.feed(Expelled("host 'a' is not in the job."))
    host.tick(12.0)
    host.feed(Rejoined())
    last = host.reports()[-1]
    assert isinstance(last, reports.Leaving) and last.is_final and last.left_s == 18.0
