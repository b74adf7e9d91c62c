"""A table of changes is read as it is meant; its replay loses nothing that is not accounted for."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import Layout, Workload
from scalai.core.planner.devices import device_named
from scalai.core.planner.reconfiguration import RELAUNCH_S
from scalai.core.planner.trace import Trace, TraceEvent, read_trace
from scalai.core.planner.trace_replay import (
    CAUSES,
    STATE_BYTES,
    Account,
    Cost,
    Menu,
    Moment,
    Policy,
    Prices,
    Terms,
    TracePiece,
    account,
    by_table,
    by_work,
    change_cost,
    fastest,
    replay,
    replicas_only,
    same_degrees,
)
from support.model_shapes import gpt


def read(text: str, until_s: float | None = None) -> Trace:
    return read_trace(text.splitlines(), "t.csv", until_s)


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("", "t.csv is empty. It needs a header such as time_min,gpus,kind"),
        ("# nothing\n\n", "t.csv is empty"),
        ("time_s,gpus\n", "no line below it"),
        ("time,gpus\n0,8\n9,4\n", "have one of time_s, time_min and time_h"),
        ("time_s,time_min,gpus\n0,0,8\n", "several columns of times"),
        ("time_s,hosts\n0,8\n9,4\n", "have one called gpus"),
        ("0,8\n9,4\n", "no column of times in a unit among 0, 8"),
        ("time_s,gpus\n0,8\n9,4\n5,8\n", "line 4: 5 is not after the time of the line before"),
        ("time_s,gpus\n0,8\n-1,4\n", "'-1' is no time of 0 or more"),
        ("time_s,gpus\n0,8\ninf,4\n", "'inf' is no time of 0 or more"),
        ("time_s,gpus\n0,8\nsoon,4\n", "'soon' is no time of 0 or more"),
        ("time_s,gpus\n0,8\n9,-4\n", "'-4' is no number of devices; use 0 (the job waits)"),
        ("time_s,gpus\n0,8\n9,4.5\n", "'4.5' is no number of devices"),
        ("time_s,gpus\n0,8\n9,\n", "'' is no number of devices"),
        ("time_s,gpus\n0,8\n9,99999999999\n", "use 0 (the job waits) to 1000000000"),
        ("time_s,gpus\n0,8\n9\n", "line 3: 1 cells below a header of 2"),
        ("time_s,gpus,kind\n0,8,\n9,4,flood\n", "kind 'flood' is none of planned, failure, end"),
        ("time_s,gpus,kind\n0,8,\n9,4,end\n10,4,\n", "only the last line may have the kind 'end'"),
        ("time_s,gpus\n0,0\n9,0\n", "at no time is there a device"),
        ("time_s,gpus\n0,8\n", "add a line of kind 'end', or say --until"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_way_out(text: str, way_out: str) -> None:
    with pytest.raises(RefusedError) as error:
        read(text)
    assert way_out in str(error.value)


def test_an_end_that_contradicts_the_table_is_refused() -> None:
    with pytest.raises(RefusedError, match="end the trace after it"):
        read("time_s,gpus\n0,8\n9,4\n", until_s=9)
    with pytest.raises(RefusedError, match="leave out --until"):
        read("time_s,gpus,kind\n0,8,\n9,4,end\n", until_s=20)


def test_units_kinds_comments_and_blanks_are_read() -> None:
    text = (
        "# source\n GPUs , time_min , kind\n\n16,0,\n8,35,Failure\n0,70,planned\n8,80,\n0,90,end\n"
    )
    assert read(text) == Trace(
        (
            TraceEvent(0, 16),
            TraceEvent(2100, 8, is_failure=True),
            TraceEvent(4200, 0),
            TraceEvent(4800, 8),
        ),
        5400,
    )
    assert read("seconds,devices\n0,2\n10,1\n", until_s=15).events[1] == TraceEvent(10, 1)


def test_a_last_line_without_devices_ends_the_trace() -> None:
    assert read("time_s,gpus\n0,8\n9,0\n") == Trace((TraceEvent(0, 8),), 9)
    waits = read("time_s,gpus\n0,8\n9,0\n", until_s=12)
    assert waits == Trace((TraceEvent(0, 8), TraceEvent(9, 0)), 12) and waits.sizes == (8,)


def test_without_an_end_the_last_event_lasts_as_the_others_did_and_it_is_said() -> None:
    assert read("time_s,gpus\n0,8\n10,4\n30,8\n60,4\n") == Trace(
        (TraceEvent(0, 8), TraceEvent(10, 4), TraceEvent(30, 8), TraceEvent(60, 4)),
        80,
        is_end_assumed=True,
    )


def layout(tp: int, pp: int, dp: int) -> Layout:
    return Layout(Degrees(tp, pp, dp), 1)


SMALL, MIDDLE, LARGE = layout(2, 2, 1), layout(2, 4, 1), layout(2, 4, 2)
MENU = Menu({SMALL: 6.0, MIDDLE: 3.5, LARGE: 2.0})
NEVER = 1e12


def cost_of(seconds: float) -> Cost:
    return lambda before, after: seconds


def policy(name: str = "ours", cost_s: float = 60.0, **changes: Any) -> Policy:
    cost = cost_of(cost_s)
    decides = {
        "ours": by_work(MENU, cost),
        "replicas": fastest(replicas_only(MENU, LARGE)),
        "fixed": fastest(same_degrees(MENU, LARGE)),
        "fastest": fastest(MENU),
        "table": by_table({4: SMALL, 8: MIDDLE, 16: LARGE}),
    }
    return replace(Policy(name, decides[name], cost, 100.0), **changes)


def trace(*gpus: int | tuple[int, bool], each_s: float = 1000.0) -> Trace:
    events = tuple(
        TraceEvent(place * each_s, *(one if isinstance(one, tuple) else (one, False)))
        for place, one in enumerate(gpus)
    )
    return Trace(events, len(gpus) * each_s)


def run(of: Trace, by: Policy, start: Layout | None = LARGE, terms: Terms | None = None) -> Account:
    return account(replay(of, by, start, terms or Terms(residence_s=1000.0)), MENU)


def test_a_job_without_devices_waits_and_comes_back_from_a_checkpoint() -> None:
    asked: list[Layout | None] = []

    def cost(before: Layout | None, after: Layout) -> float:
        asked.append(before)
        return 60.0

    pieces = replay(trace(16, 0, 16), policy("fixed", cost=cost), LARGE, Terms())
    assert [(one.state, one.seconds) for one in pieces] == [
        ("run", 1000), ("waiting", 1000), ("reconfiguration", 60), ("run", 940),
    ]  # fmt: skip
    assert asked == [None]


def test_a_change_that_is_cut_off_goes_on_where_it_is_still_wanted() -> None:
    slow = policy("table", cost_s=1500.0)
    pieces = replay(trace(16, 8, 9, 8), slow, LARGE, Terms())
    assert [(one.state, one.seconds) for one in pieces] == [
        ("run", 1000), ("reconfiguration", 1000), ("reconfiguration", 500), ("run", 500),
        ("run", 1000),
    ]  # fmt: skip
    assert account(pieces, MENU).changes == 1


def test_a_change_that_is_cut_off_by_another_begins_from_where_the_state_is() -> None:
    asked: list[Layout | None] = []

    def cost(before: Layout | None, after: Layout) -> float:
        asked.append(before)
        return 1500.0

    pieces = replay(trace(16, 8, 4, 4), policy("table", cost=cost), LARGE, Terms())
    assert asked == [LARGE, LARGE]
    assert [one.state for one in pieces] == ["run", *["reconfiguration"] * 3, "run"]
    assert pieces[-1].seconds == 500


def test_a_failure_loses_what_was_done_since_it_was_kept() -> None:
    of = Trace((TraceEvent(0, 16), TraceEvent(950, 16, is_failure=True)), 2000)
    found = run(of, policy("fixed", kept_every_s=100.0))
    assert found.lost_s["redone"] == pytest.approx(50) and found.changes == 1
    assert found.lost_s["reconfiguration"] == pytest.approx(60)
    assert found.steps == pytest.approx((900 + 990) / 2.0)


def test_a_failure_that_leaves_less_than_half_goes_back_to_the_checkpoint() -> None:
    of = Trace((TraceEvent(0, 16), TraceEvent(3000, 8), TraceEvent(4000, 4, is_failure=True)), 5000)
    some = Trace((*of.events[:2], TraceEvent(4000, 3, is_failure=True)), 5000)
    terms = Terms(residence_s=1000.0, checkpoint_every_s=2500.0)
    by = policy("table", cost_s=0.0)
    assert run(of, by, terms=terms).lost_s["redone"] == pytest.approx(0)
    # Also what was done before the last change is lost: it was in memory only.
    assert run(some, by, terms=terms).lost_s["redone"] == pytest.approx(1500)


def test_a_failure_while_a_change_is_under_way_loses_no_step_twice() -> None:
    of = Trace((TraceEvent(0, 16), TraceEvent(1000, 8), TraceEvent(1100, 8, is_failure=True)), 3000)
    found = run(of, policy("table", cost_s=500.0))
    assert found.lost_s["redone"] == 0
    assert found.lost_s["reconfiguration"] == pytest.approx(100 + 500)


def test_an_announced_change_writes_first_where_state_is_not_in_memory() -> None:
    planned, failed = trace(16, 8), trace(16, (8, True))
    by = policy("table", save_s=40.0, is_in_memory=False)
    assert run(planned, by).lost_s["reconfiguration"] == pytest.approx(100)
    assert run(failed, by).lost_s["reconfiguration"] == pytest.approx(60)


def test_ours_stays_where_a_change_would_not_pay_and_leaves_devices_idle() -> None:
    short = replay(trace(8, 16, each_s=100.0), policy(), MIDDLE, Terms(residence_s=100.0))
    assert {one.layout for one in short} == {MIDDLE}
    found = account(short, MENU)
    assert found.idle_device_s == pytest.approx(8 * 100)
    assert found.lost_s["idle"] == pytest.approx(100 * (1 - 2.0 / 3.5)) and found.changes == 0
    long = replay(trace(8, 16), policy(), MIDDLE, Terms(residence_s=1000.0))
    assert long[-1].layout == LARGE


def test_degrees_that_are_slower_than_the_best_on_as_many_devices_are_said_to_be() -> None:
    other = layout(1, 1, 16)
    menu = Menu({**MENU.seconds, other: 3.0})
    found = account(replay(trace(16), policy("fixed"), other, Terms()), menu)
    assert found.lost_s["slower"] == 0  # fixed runs what its own menu has
    by = replace(policy("fixed"), decide=lambda now: other)
    found = account(replay(trace(16), by, other, Terms()), menu)
    assert found.lost_s["slower"] == pytest.approx(1000 / 3)


def test_the_residence_follows_what_was_seen() -> None:
    # Far shorter than 35 minutes: after some of them a change does not pay any more.
    of = trace(*[8, 16] * 20, each_s=130.0)
    pieces = replay(of, policy(), MIDDLE, Terms())
    assert LARGE in {one.layout for one in pieces[:4]}
    assert {one.layout for one in pieces[-8:]} == {MIDDLE}


NAMES = st.sampled_from(["ours", "replicas", "fixed", "fastest", "table"])
EVENTS = st.lists(
    st.tuples(st.floats(1, 5000), st.integers(0, 20), st.booleans()), min_size=1, max_size=12
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    at_s = 0.0
    events: list[TraceEvent] = []
    for stay, gpus, is_failure in draw(EVENTS):
        events.append(TraceEvent(at_s, gpus, is_failure and bool(events)))
        at_s += stay
    return Trace(tuple(events), at_s)


@settings(max_examples=300, deadline=None)
@given(traces(), NAMES, st.floats(0, 3000), st.floats(0, 2000), st.booleans())
def test_no_policy_makes_more_steps_than_the_ideal_and_all_time_is_accounted_for(
    of: Trace, name: str, cost_s: float, kept_s: float, in_memory: bool
) -> None:
    by = policy(name, cost_s, kept_every_s=kept_s, is_in_memory=in_memory, save_s=cost_s / 3)
    start = LARGE if of.events[0].gpus >= 16 else None
    pieces = replay(of, by, start, Terms())
    assert all(after.begin_s == before.end_s for before, after in pairwise(pieces))
    assert (pieces[0].begin_s, pieces[-1].end_s) == (of.events[0].at_s, of.end_s)
    assert all(_is_possible(one) for one in pieces)
    found = account(pieces, MENU)
    assert -1e-9 <= found.steps <= found.ideal_steps * (1 + 1e-9)
    assert set(found.lost_s) == set(CAUSES) and min(found.lost_s.values()) >= 0
    assert found.useful_s + sum(found.lost_s.values()) == pytest.approx(of.seconds)


def _is_possible(one: TracePiece) -> bool:
    is_small = one.layout is None or one.layout.degrees.world_size <= one.gpus
    return is_small and one.seconds > 0 and (one.layout is None) == (one.state == "waiting")


@settings(max_examples=50, deadline=None)
@given(NAMES, st.floats(10, 1e5), st.floats(0, 3000))
def test_a_trace_without_changes_loses_nothing(name: str, seconds: float, cost_s: float) -> None:
    found = run(trace(16, each_s=seconds), policy(name, cost_s))
    assert found.steps == pytest.approx(found.ideal_steps) and found.changes == 0
    assert sum(found.lost_s.values()) == pytest.approx(0, abs=1e-6)
    assert found.goodput == pytest.approx(1)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=12),
    st.one_of(st.just(0.0), st.floats(0, 1000)),
    st.sampled_from([SMALL, MIDDLE, LARGE]),
    st.sampled_from([same_degrees, replicas_only]),
)
def test_ours_is_never_worse_than_fixed_degrees_by_more_than_the_hysteresis(
    gpus: list[int], cost_s: float, start: Layout, kept: Callable[[Menu, Layout], Menu]
) -> None:
    """Where devices stay as long as is expected. Who does not know what comes may make a change in
    each stretch that turns out to have been for nothing: that share is allowed for."""
    of, terms = trace(*gpus), Terms(residence_s=1000.0)
    begin = start if start.degrees.world_size <= gpus[0] else None
    fixed = replace(policy("fixed", cost_s), decide=fastest(kept(MENU, start)))
    mine = run(of, policy("ours", cost_s), begin, terms)
    theirs = run(of, fixed, begin, terms)
    assert mine.steps >= theirs.steps * (1 - cost_s / 1000) / 1.05 - 1e-6


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 20), st.sampled_from([None, SMALL, MIDDLE, LARGE]), st.floats(0, 2000),
    st.booleans(), st.floats(1, 3000),
)  # fmt: skip
def test_in_the_expected_time_no_other_choice_does_more_than_the_hysteresis_more(
    gpus: int, held: Layout | None, cost_s: float, is_failure: bool, residence_s: float
) -> None:
    now = Moment(gpus, held, 0.0, held, is_failure, residence_s)
    chosen = by_work(MENU, cost_of(cost_s))(now)

    def work(one: Layout) -> float:
        wait = 0.0 if one == held and now.can_stay else cost_s
        return max(0.0, residence_s - wait) / MENU.seconds[one]

    options = MENU.on(gpus)
    assert (chosen is None) == (not options)
    if chosen is not None:
        assert work(chosen) >= max(map(work, options)) / 1.05 - 1e-9


@pytest.mark.parametrize("storage", [1e9, 4e9])
def test_a_model_that_is_not_cut_comes_from_storage_at_its_price(storage: float) -> None:
    shape = replace(gpt(24, 2048, 16, 51200, 1024), experts=8, moe_layers=24, top_k=2, expert_ffn=8)
    work = Workload(shape, 96, expert_tp=2)  # which no count of bytes has beside a TP of 1
    cost = change_cost(work, device_named("a100"), Prices(storage=storage))
    size = shape.total_parameters * STATE_BYTES
    assert cost(layout(2, 2, 2), layout(1, 2, 1)) == pytest.approx(RELAUNCH_S + size / storage)
    assert cost(layout(2, 2, 2), layout(2, 2, 1)) < RELAUNCH_S + size / 4e9
