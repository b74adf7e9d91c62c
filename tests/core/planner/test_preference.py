"""The planner of a running job: what it takes, what it keeps, and what it tries."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.degrees.choice import choose
from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits, Sharding
from scalai.core.degrees.policy import Choice, DegreePolicy
from scalai.core.errors import LayoutError, UsageError
from scalai.core.planner import preference
from scalai.core.planner.columns import OPTIMIZER, Layout, Workload
from scalai.core.planner.devices import device_named
from scalai.core.planner.meter import ChangeTime
from scalai.core.planner.preference import (
    Measured,
    Preference,
    Terms,
    change_of_json,
    change_to_json,
    measured_of_json,
    measured_to_json,
)
from scalai.core.planner.reconfiguration import reconfiguration
from scalai.core.planner.weighing import MARGIN, RESIDENCE_S
from support.model_shapes import gpt

SHAPE = gpt(24, 2048, 16, 51200, 2048)
LIMITS = ModelLimits(
    num_attention_heads=16, num_query_groups=16, num_layers=24, global_batch_size=64,
    micro_batch_size=2, padded_vocab_size=51200,
)  # fmt: skip
A, B, C = Degrees(2, 1, 4), Degrees(1, 2, 4), Degrees(4, 2, 1)


def planner(**terms: Any) -> Preference:
    work, device = Workload(SHAPE, 64), device_named("a100-80gb")
    return Preference(work, device, "none", Sharding(OPTIMIZER), False, 2, Terms(**terms))


def asked(**terms: Any) -> Preference:
    return planner(is_asked=True, **terms)


def choices(*degrees: Degrees) -> list[Choice]:
    return [Choice(each, (), str(each)) for each in degrees]


def measured(**seconds: float) -> list[Measured]:
    return [
        Measured(degrees, 2, 100, seconds[name])
        for name, degrees in (("a", A), ("b", B), ("c", C))
        if name in seconds
    ]


def first(preference: Preference, present: Degrees | None, *degrees: Degrees) -> Degrees:
    return preference.order(choices(*degrees), present)[0].degrees


def test_it_says_nothing_before_two_layouts_were_measured_unless_it_is_asked() -> None:
    for found in ([], measured(a=1.0), [*measured(a=1.0), *measured(a=2.0)]):
        learned = planner()
        for each in found:
            learned = learned.with_measured(each)
        assert learned.order(choices(A, B), A) == ()
    assert planner().with_all_measured(measured(a=1.0, b=0.5)).order(choices(A, B), A)
    assert asked().order(choices(A, B), A)


def test_what_was_measured_is_believed_before_what_is_predicted() -> None:
    slow = asked().with_all_measured(measured(a=1.0, b=0.5))
    assert first(slow, None, A, B) == B
    assert first(asked().with_all_measured(measured(a=0.5, b=1.0)), None, A, B) == A


def test_what_runs_is_kept_until_something_is_better_by_more_than_is_uncertain() -> None:
    near = 1.0 / (1 + MARGIN / 2)
    assert first(asked().with_all_measured(measured(a=1.0, b=near)), A, A, B) == A
    assert first(asked().with_all_measured(measured(a=1.0, b=0.5)), A, A, B) == B


@pytest.mark.parametrize(
    ("change_of_residence", "taken"), [(2.0, A), (0.6, A), (0.1, B)], ids=["never", "dear", "cheap"]
)
def test_a_change_that_does_not_pay_within_the_residence_is_not_made(
    change_of_residence: float, taken: Degrees
) -> None:
    change = ChangeTime(change_of_residence * RESIDENCE_S)
    known = asked(change=change).with_all_measured(measured(a=1.0, b=0.5))
    assert first(known, A, A, B) == taken
    assert first(known, None, A, B) in (A, B), "something must run although no work is expected"


@pytest.mark.parametrize("moves_s", [0.0, 200.0])
def test_the_bytes_of_the_last_change_are_no_part_of_the_next_one(moves_s: float) -> None:
    last = ChangeTime(fixed_s=60.0, moves_s=moves_s)
    known = asked(change=last).with_all_measured(measured(a=1.0, b=0.5))
    before, after = (Layout(degrees, 2, sharding=OPTIMIZER) for degrees in (A, B))
    own = reconfiguration(known.work, known.device, before, after, relaunch_s=60.0).total_s
    assert own > 60
    reason = known.order(choices(A, B), A)[0].reason
    assert f"a change costs {own:.0f} s" in reason


def test_a_kept_time_of_a_change_is_read() -> None:
    for change in (None, ChangeTime(60.0), ChangeTime(60.0, 20.0)):
        assert change_of_json(change_to_json(change)) == change
    for wrong in ([], [80.0], [None], [1.0, 2.0], ["x"], [1.0, None], [-1.0], [5.0, 1.0, 1.0], 7):
        with pytest.raises((ValueError, TypeError)):
            change_of_json(wrong)  # type: ignore[arg-type]


@pytest.mark.turns
@settings(deadline=None, max_examples=15)
@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_where_a_change_takes_the_residence_it_never_moves_and_where_none_the_fastest_wins(
    a: float, b: float
) -> None:
    known = measured(a=a, b=b)
    never = asked(change=ChangeTime(RESIDENCE_S)).with_all_measured(known)
    assert first(never, A, A, B) == A
    free = asked(change=ChangeTime(1e-6)).with_all_measured(known)
    needed = 1 + MARGIN if b < a else 1.0
    if not a / (1.1 * needed) < b < a * 1.1:  # nearer ones differ by the bytes of the change
        assert first(free, A, A, B) == (B if b < a else A)


@pytest.mark.turns
@settings(deadline=None, max_examples=15)
@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_two_measured_layouts_do_not_take_turns(a: float, b: float) -> None:
    known = asked().with_all_measured(measured(a=a, b=b))
    taken = first(known, A, A, B)
    assert first(known, taken, A, B) == taken


def test_what_does_not_fit_is_not_offered_unless_it_ran() -> None:
    big = replace(asked(), work=Workload(gpt(24, 16384, 16, 51200, 2048), 64))
    small = choices(Degrees(1, 1, 8))
    assert big.order(small, None) == ()
    assert big.order(small, Degrees(1, 1, 8)), "it runs, so it fits"
    ran = big.with_measured(Measured(Degrees(1, 1, 8), 2, 10, 1.0))
    assert ran.order(small, None)


def test_what_was_measured_travels() -> None:
    found = measured(a=1.0, b=0.25)
    assert measured_of_json(measured_to_json(found)) == found


@pytest.mark.parametrize(
    "wrong",
    [
        None, 3, [1], [None], [[{"tp": 1}, 2, 3]], [["x", 1, 2, 3.0]], [[{"tp": "x"}, 1, 2, 3.0]],
        [[{"xp": 1}, 1, 2, 3.0]], [[{"tp": 1}, None, 2, 3.0]], [[{"tp": 1}, 1, 2, "3"]],
        [[{"tp": 1}, 1, 2, float("nan")]], [[{"tp": 1}, 1, 2, 0.0]], {"tp": 1},
    ],
)  # fmt: skip
def test_what_was_not_measured_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"is not? "):
        measured_of_json(wrong)


def test_a_change_whose_bytes_cannot_be_counted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncut(*_: object, **__: object) -> None:
        raise UsageError("the hosts have other ranks")

    monkeypatch.setattr(preference, "reconfiguration", uncut)
    best = asked().with_all_measured(measured(a=1.0, b=0.5)).order(choices(A, B), A)[0]
    assert best.degrees == B
    assert "a change costs 79 s and its bytes: the hosts have other ranks" in best.reason


class _Failing:
    """A planner that cannot say what anything costs."""

    def order(
        self, _: Sequence[Choice], present: Degrees | None, *passes: object
    ) -> Sequence[Choice]:
        raise LayoutError(f"nothing is known of {present}")

    def on_hosts(self, slots: int) -> "_Failing":
        return self


def test_what_runs_is_kept_where_the_planner_cannot_say_and_the_reason_says_so() -> None:
    policy = DegreePolicy(initial=DegreeRequest(2, 1), preference=_Failing())
    kept = choose(8, LIMITS, policy, A)
    assert kept.degrees == A
    assert kept.reason.endswith(f"; the planner cannot say: nothing is known of {A}")


def test_a_persons_table_wins_over_it_and_it_wins_over_what_ran() -> None:
    fast = asked().with_all_measured(measured(a=1.0, b=0.1))
    policy = DegreePolicy(initial=DegreeRequest(2, 1), preference=fast)
    assert choose(8, LIMITS, policy, A).degrees == B
    asks = choose(8, LIMITS, policy, A, requested=DegreeRequest(8, 1))
    assert asks.degrees == Degrees(8, 1, 1)
    silent = DegreePolicy(initial=DegreeRequest(2, 1), preference=planner())
    assert choose(8, LIMITS, silent, A).degrees == A


def test_it_goes_below_what_ran_but_not_below_what_a_person_or_a_failure_forbids() -> None:
    large = Degrees(8, 1, 1)
    policy = DegreePolicy(initial=DegreeRequest(8, 1), preference=asked())
    free = choose(8, LIMITS, policy, large)
    assert free.degrees.model_parallel < 8
    stated = choose(8, LIMITS, replace(policy, min_model_parallel=8), large)
    assert stated.degrees.model_parallel == 8
    again = choose(8, LIMITS, policy, large, excluded=[free])
    assert again.degrees != free.degrees


def test_devices_that_a_layout_cannot_use_stay_idle() -> None:
    policy = DegreePolicy(initial=DegreeRequest(1, 1), preference=asked())
    choice = choose(7, LIMITS, policy, None)
    assert choice.degrees.world_size <= 7
    assert len(choice.idle_ranks) == 7 - choice.degrees.world_size
    assert "by cost" in choice.reason
