"""What is taken does the most work until the next change, and nothing is changed for little."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError
from scalai.core.planner.change import (
    ChangeChoice,
    Option,
    choose,
    estimate_of,
    fill,
    in_order,
    options_for,
    plan_change,
)
from scalai.core.planner.columns import Layout, Workload
from scalai.core.planner.devices import device_named
from scalai.core.planner.reconfiguration import Hosts, reconfiguration
from scalai.core.planner.score import limits_of
from scalai.core.planner.step_memory import USABLE
from scalai.core.planner.weighing import MARGIN, is_worth_leaving, needed_gain, steps_within
from support.model_shapes import gpt

A100 = device_named("a100")
WORK = Workload(gpt(24, 2_048, 16, 51_200, 1_024), 96)
PRESENT = Layout(Degrees(2, 2, 4), 2, "full", is_sequence_parallel=True)
TWO: Hosts = (("a", 8), ("b", 8))


@pytest.mark.parametrize(
    ("steps", "present", "spread", "leaves"),
    [
        (104.9, 100, 0.0, False), (105.1, 100, 0.0, True), (119.9, 100, 0.2, False),
        (120.1, 100, 0.2, True), (1, 0, 0.2, True), (0, 0, 0.0, False),
    ],
)  # fmt: skip
def test_what_runs_is_left_for_more_than_the_margin_and_what_is_uncertain(
    steps: float, present: float, spread: float, leaves: bool
) -> None:
    assert is_worth_leaving(steps, present, spread) == leaves


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 10))
def test_nobody_goes_there_and_back(one: float, other: float, spread: float) -> None:
    assert not (is_worth_leaving(one, other, spread) and is_worth_leaving(other, one, spread))
    assert needed_gain(spread) >= MARGIN
    assert steps_within(one, other, 2.0) == max(one - other, 0) / 2


@st.composite
def _options(draw: st.DrawFn) -> list[Option]:
    """Options with any seconds a step and of the change; the first may be staying."""
    base = estimate_of(WORK, A100, PRESENT, 16)
    change = reconfiguration(WORK, A100, PRESENT, PRESENT)
    found = []
    hundredths = st.lists(st.integers(1, 10_000), min_size=1, max_size=6, unique=True)
    for number, seconds in enumerate(size / 100 for size in draw(hundredths)):
        width = draw(st.floats(1.0, 1.4))
        estimate = replace(base, seconds=seconds, low=seconds / width, high=seconds * width)
        costs = {**change.seconds, "relaunch": draw(st.floats(0.1, 1_000))}
        is_stay = number == 0 and draw(st.booleans())
        found.append(Option(estimate, TWO, None if is_stay else replace(change, seconds=costs)))
    return draw(st.permutations(found))


@settings(max_examples=120, deadline=None)
@given(_options(), st.floats(0, 1e5))
def test_what_is_taken_does_the_most_unless_it_stays(
    options: list[Option], residence_s: float
) -> None:
    choice = choose(options, residence_s)
    best = max(one.steps(residence_s) for one in options)
    assert choice.taken.is_stay or choice.taken.steps(residence_s) == best
    assert len(choice.others) == len(options) - 1 and all(why for _, why in choice.others)
    assert choice.reason
    stay = next((one for one in options if one.is_stay), None)
    at_once = choose(options, 0.0).taken
    shortest = min(one.change.total_s if one.change else 0.0 for one in options)
    assert at_once is stay or (at_once.change and at_once.change.total_s == shortest)
    fastest = min(options, key=lambda one: one.estimate.seconds)
    at_last = choose(options, 1e12).taken
    if stay is None or stay is fastest:
        assert at_last.estimate.seconds == fastest.estimate.seconds
        return
    half = (fastest.estimate.high - fastest.estimate.low) / 2 / fastest.estimate.seconds
    gain, need = stay.estimate.seconds / fastest.estimate.seconds - 1, max(MARGIN, half)
    if abs(gain - need) > 1e-6:
        assert (at_last is stay) == (gain < need)


def taken_on(there: Hosts, residence_s: float, *lost: str) -> ChangeChoice:
    return plan_change(
        WORK, A100, limits_of(WORK), PRESENT, TWO, there, residence_s=residence_s,
        lost=frozenset(lost),
    )  # fmt: skip


def test_the_same_hosts_go_on_as_they_are_for_a_short_time_and_change_for_a_long_one() -> None:
    at_once, with_another = taken_on(TWO, 60.0), taken_on((("c", 8), *TWO), 10.0)
    assert at_once.taken.is_stay and at_once.taken.hosts == TWO
    assert with_another.taken.is_stay and with_another.taken.estimate.idle == 8
    at_last = taken_on(TWO, 1e9)
    stays = next(one for one, _ in at_last.others if one.is_stay)
    assert stays.estimate.layout == PRESENT and "against staying" in at_last.reason
    assert at_last.taken.estimate.seconds < stays.estimate.seconds / (1 + MARGIN)


def test_seven_of_eight_devices_leave_one_idle_where_that_does_more() -> None:
    taken = taken_on((("a", 7),), 1e6, "b").taken
    used = taken.estimate.layout.degrees.world_size
    assert used + taken.estimate.idle == 7 and used < 7
    assert taken.hosts == (("a", used),)
    assert WORK.global_batch % taken.estimate.layout.degrees.dp == 0
    assert taken.estimate.bytes <= USABLE * A100.memory


def test_a_lost_host_ends_staying() -> None:
    choice = taken_on((("a", 8), ("c", 8)), 0.0, "b")
    options = [choice.taken, *(one for one, _ in choice.others)]
    assert not any(one.is_stay for one in options)
    same = next(one for one in options if one.estimate.layout == PRESENT)
    assert same.change is not None and same.change.total_s > 0
    back = taken_on(TWO, 0.0, "b")
    assert back.taken.change is not None, "it is there again without its memory"


def test_hosts_stand_where_less_crosses() -> None:
    same = estimate_of(WORK, A100, PRESENT, 16)
    there = (("c", 8), ("b", 8))
    (one,) = options_for(WORK, A100, [same], PRESENT, TWO, there, lost=frozenset("a"))
    assert one.change is not None and one.change.moves <= one.unplaced_moves
    assert dict(one.hosts) == {"b": 8, "c": 8} and one.hosts[1][0] == "b"


def test_hosts_that_were_there_stand_first_and_tp_groups_stay_inside() -> None:
    assert in_order(TWO, (("c", 8), ("b", 8), ("a", 7))) == (("a", 7), ("b", 8), ("c", 8))
    assert fill((("a", 7), ("b", 8)), 12, tp=4) == (("a", 4), ("b", 8))
    assert fill((("a", 7), ("b", 8), ("c", 8)), 8, tp=1) == (("a", 7), ("b", 1), ("c", 0))
    assert fill((("a", 3), ("b", 3)), 4, tp=4) == (("a", 3), ("b", 1))
    with pytest.raises(RefusedError, match="1 ranks have no device"):
        fill((("a", 3),), 4)
    with pytest.raises(RefusedError, match="add devices"):
        choose([], 100.0)


def test_a_candidate_whose_parts_are_not_modelled_is_left_out() -> None:
    shape = replace(WORK.shape, experts=8, moe_layers=WORK.shape.layers, top_k=2, expert_ffn=4096)
    work = replace(WORK, shape=shape, expert_tp=PRESENT.degrees.tp)
    same = estimate_of(work, A100, PRESENT, 16)
    degrees = replace(PRESENT.degrees, tp=2 * PRESENT.degrees.tp, dp=PRESENT.degrees.dp // 2)
    other = replace(same, layout=replace(PRESENT, degrees=degrees))
    found = options_for(work, A100, [other, same], PRESENT, TWO, TWO)
    assert [each.estimate for each in found] == [same]
    with pytest.raises(RefusedError, match="experts have a tensor parallelism"):
        options_for(work, A100, [other], PRESENT, TWO, TWO)
