"""The planner of a running job: what it takes and keeps, of degrees and of passes."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.degrees.choice import candidates, choose
from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits, Sharding
from scalai.core.degrees.passes import AS_GIVEN, NO_FREEDOM, SPEED_PARTS, Freedom, Passes
from scalai.core.degrees.policy import Choice, DegreePolicy
from scalai.core.errors import LayoutError, RefusedError
from scalai.core.planner.columns import OPTIMIZER, Layout, Workload, columns_of
from scalai.core.planner.devices import device_named
from scalai.core.planner.meter import ChangeTime
from scalai.core.planner.preference import (
    Measured,
    PlannerTerms,
    Preference,
    change_of_json,
    change_to_json,
    measured_of_json,
    measured_to_json,
)
from scalai.core.planner.reconfiguration import RELAUNCH_S, reconfiguration
from scalai.core.planner.step_memory import USABLE, step_memory
from scalai.core.planner.weighing import MARGIN, RESIDENCE_S
from support.model_shapes import gpt

A100 = device_named("a100-80gb")
LIMITS = ModelLimits(
    num_attention_heads=16, num_query_groups=16, num_layers=24, global_batch_size=64,
    micro_batch_size=2, padded_vocab_size=51200,
)  # fmt: skip
A, B, C = Degrees(2, 1, 4), Degrees(1, 2, 4), Degrees(4, 2, 1)


def planner(**terms: Any) -> Preference:
    work = Workload(gpt(24, 2048, 16, 51200, 2048), 64)
    return Preference(work, A100, "none", Sharding(OPTIMIZER), False, 2, PlannerTerms(**terms))


def asked(change: ChangeTime | None = None, **seconds: float) -> Preference:
    """Return a planner that was asked for, and has measured these layouts."""
    found = planner(is_asked=True, change=change or ChangeTime())
    return found.with_all_measured(measured(**seconds))


def choices(*degrees: Degrees) -> list[Choice]:
    return [Choice(each, (), str(each)) for each in degrees]


def measured(**seconds: float) -> list[Measured]:
    return [Measured({"a": A, "b": B, "c": C}[name], 2, 100, s) for name, s in seconds.items()]


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
    assert first(asked(a=1.0, b=0.5), None, A, B) == B
    assert first(asked(a=0.5, b=1.0), None, A, B) == A


@pytest.mark.parametrize(
    ("change_of_residence", "taken"), [(2.0, A), (0.6, A), (0.1, B)], ids=["never", "dear", "cheap"]
)
def test_a_change_that_does_not_pay_within_the_residence_is_not_made(
    change_of_residence: float, taken: Degrees
) -> None:
    known = asked(ChangeTime(change_of_residence * RESIDENCE_S), a=1.0, b=0.5)
    assert first(known, A, A, B) == taken
    assert first(known, None, A, B) in (A, B), "something must run although no work is expected"


@pytest.mark.turns
@settings(deadline=None, max_examples=15)
@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_faster_one_wins_by_the_margin_where_a_change_is_free_and_then_stays(
    a: float, b: float
) -> None:
    free = asked(ChangeTime(1e-6), a=a, b=b)
    dear = replace(free, terms=replace(free.terms, change=ChangeTime(RESIDENCE_S)))
    assert first(dear, A, A, B) == A
    needed = 1 + MARGIN if b < a else 1.0
    taken = first(free, A, A, B)
    if not a / (1.1 * needed) < b < a * 1.1:  # nearer ones differ by the bytes of the change
        assert taken == (B if b < a else A)
    assert first(free, taken, A, B) == taken, "two layouts do not take turns"


@pytest.mark.parametrize("moves_s", [0.0, 200.0])
def test_the_bytes_of_the_last_change_are_no_part_of_the_next_one(moves_s: float) -> None:
    known = asked(ChangeTime(fixed_s=60.0, moves_s=moves_s), a=1.0, b=0.5)
    before, after = (Layout(degrees, 2, sharding=OPTIMIZER) for degrees in (A, B))
    own = reconfiguration(known.work, known.device, before, after, relaunch_s=60.0).total_s
    assert own > 60
    assert f"a change costs {own:.0f} s" in known.order(choices(A, B), A)[0].reason


def test_a_change_whose_bytes_cannot_be_counted_says_so() -> None:
    known = asked(a=1.0, b=0.5)
    shape = replace(known.work.shape, experts=8, moe_layers=24, top_k=2, expert_ffn=2048)
    best = replace(known, work=replace(known.work, shape=shape, expert_tp=2)).order(
        choices(A, B), A
    )[0]
    assert best.degrees == B
    assert f"a change costs {RELAUNCH_S:.0f} s and its bytes: " in best.reason


def test_what_does_not_fit_is_not_offered_unless_it_ran() -> None:
    big = replace(asked(), work=Workload(gpt(24, 16384, 16, 51200, 2048), 64))
    small = choices(Degrees(1, 1, 8))
    assert big.order(small, None) == ()
    assert big.order(small, Degrees(1, 1, 8)), "it runs, so it fits"
    assert big.with_measured(Measured(Degrees(1, 1, 8), 2, 10, 1.0)).order(small, None)


def test_what_was_measured_is_read_as_it_was_written() -> None:
    found = [*measured(a=1.0, b=0.25), Measured(A, 2, 50, 1.0, "full")]
    assert measured_of_json(measured_to_json(found)) == found
    for change in (None, ChangeTime(60.0), ChangeTime(60.0, 20.0)):
        assert change_of_json(change_to_json(change)) == change


@pytest.mark.parametrize(
    "wrong", [[], [80.0], [None], [1.0, 2.0], ["x"], [1.0, None], [-1.0], [5.0, 1.0, 1.0], 7]
)
def test_what_is_no_time_of_a_change_is_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        change_of_json(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        None, 3, [1], [None], [[{"tp": 1}, 2, 3]], [["x", 1, 2, 3.0]], [[{"tp": "x"}, 1, 2, 3.0]],
        [[{"tp": 1}, 1, 2, 3.0]], [[{"tp": 1}, None, 2, 3.0, None]], [[{"tp": 1}, 1, 2, "3", None]],
        [[{"tp": 1}, 1, 2, float("nan"), None]], [[{"tp": 1}, 1, 2, 0.0, None]], {"tp": 1},
    ],
)  # fmt: skip
def test_what_was_not_measured_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"is no (list of )?measured step"):
        measured_of_json(wrong)


class _Failing:
    """A planner that cannot say what anything costs."""

    def order(
        self, _: Sequence[Choice], present: Degrees | None, *passes: object
    ) -> Sequence[Choice]:
        raise LayoutError(f"nothing is known of {present}")

    def on_hosts(self, slots: int) -> "_Failing":
        return self

    def spilled(self, choice: Choice) -> str:
        return ""


def test_what_runs_is_kept_where_the_planner_cannot_say_and_the_reason_says_so() -> None:
    policy = DegreePolicy(initial=DegreeRequest(2, 1), preference=_Failing())
    kept = choose(8, LIMITS, policy, A)
    assert kept.degrees == A
    assert kept.reason.endswith(f"; the planner cannot say: nothing is known of {A}")


def test_a_persons_table_wins_over_it_and_it_wins_over_what_ran() -> None:
    policy = DegreePolicy(initial=DegreeRequest(2, 1), preference=asked(a=1.0, b=0.1))
    assert choose(8, LIMITS, policy, A).degrees == B
    asks = choose(8, LIMITS, policy, A, requested=DegreeRequest(8, 1))
    assert asks.degrees == Degrees(8, 1, 1)
    assert choose(8, LIMITS, replace(policy, preference=planner()), A).degrees == A


def test_it_goes_below_what_ran_but_not_below_what_a_person_or_a_failure_forbids() -> None:
    large = Degrees(8, 1, 1)
    policy = DegreePolicy(initial=DegreeRequest(8, 1), preference=asked())
    free = choose(8, LIMITS, policy, large)
    assert free.degrees.model_parallel < 8
    stated = choose(8, LIMITS, replace(policy, min_model_parallel=8), large)
    assert stated.degrees.model_parallel == 8
    assert choose(8, LIMITS, policy, large, excluded=[free]).degrees != free.degrees


def test_devices_that_a_layout_cannot_use_stay_idle() -> None:
    policy = DegreePolicy(initial=DegreeRequest(1, 1), preference=asked())
    choice = choose(7, LIMITS, policy, None)
    assert len(choice.idle_ranks) == 7 - choice.degrees.world_size >= 0
    assert "by cost" in choice.reason


# ------------------------------------------------------------------ micro-batch, recomputation

LAYERS, BATCH, MICRO = 64, 64, 4
LARGE = ModelLimits(
    num_attention_heads=40, num_query_groups=40, num_layers=LAYERS, global_batch_size=BATCH,
    micro_batch_size=MICRO, padded_vocab_size=51200, ffn_hidden_size=20480,
)  # fmt: skip
PLANNER = replace(
    asked(), work=Workload(gpt(LAYERS, 5120, 40, 51200, 2048), BATCH), micro_batch=MICRO
)
FREEDOM = Freedom(more=("full",), for_memory=("recompute",))


def policy(freedom: Freedom, planner: Preference | None = PLANNER) -> DegreePolicy:
    initial = DegreeRequest(4, 2, micro_batch_size=MICRO)
    return DegreePolicy(initial=initial, preference=planner, freedom=freedom)


def chosen(
    world: int,
    freedom: Freedom = FREEDOM,
    ran: Choice | None = None,
    excluded: Sequence[Choice] = (),
    planner: Preference | None = PLANNER,
) -> Choice:
    present, passes = (None, AS_GIVEN) if ran is None else (ran.degrees, ran.passes)
    return choose(world, LARGE, policy(freedom, planner), present, excluded=excluded, ran=passes)


def needed(*found: Choice) -> list[float]:
    """Return the bytes of each."""
    layouts = [
        Layout(each.degrees, each.micro_batch_size or MICRO, each.recompute or "none", OPTIMIZER)
        for each in found
    ]
    x = columns_of([(PLANNER.work, PLANNER.device, layout) for layout in layouts])
    return [float(each) for each in step_memory(x).total]


def does_fit(choice: Choice) -> bool:
    return needed(choice)[0] <= USABLE * A100.memory


@pytest.mark.fault
def test_fewer_devices_have_it_recompute_where_nothing_fits_without_and_more_have_it_stop() -> None:
    many = chosen(64)
    assert many.passes == Passes(MICRO) and does_fit(many)
    few = chosen(8, ran=many)
    assert few.passes == Passes(MICRO, "full") and does_fit(few)
    assert "recompute none -> full" in few.reason
    assert "no layout fits with the script's flags alone" in few.reason
    assert chosen(8, ran=few).key == few.key, "what runs is kept"
    back = chosen(64, ran=few)
    assert back.passes == Passes(MICRO) and "recompute full -> none" in back.reason


def test_where_nothing_is_free_for_memory_nothing_is_forced() -> None:
    silent = chosen(8, NO_FREEDOM, chosen(64))
    assert silent.passes == Passes(MICRO) and "by cost" not in silent.reason
    fixed = replace(FREEDOM, fixed=(("recompute", "of graphs"),))
    assert chosen(8, fixed, chosen(64)).key == silent.key


def test_the_micro_batch_is_made_smaller_and_never_larger_where_a_person_allows_it() -> None:
    few = chosen(8, Freedom(for_memory=("micro-batch",)), chosen(64))
    assert few.recompute is None and does_fit(few)
    assert few.micro_batch_size is not None and few.micro_batch_size < MICRO
    assert f"micro-batch {MICRO} -> {few.micro_batch_size}" in few.reason
    free = Freedom(more=("full",), for_memory=("recompute", "micro-batch"))
    sizes = {each.micro_batch_size or 0 for each in candidates(8, LARGE, policy(free), None)}
    assert max(sizes) == MICRO and len(sizes) > 1


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 64), st.sampled_from([FREEDOM, Freedom(more=("full",), for_speed=SPEED_PARTS)])
)
def test_the_global_batch_stays_exact(world: int, freedom: Freedom) -> None:
    choice = next(iter(candidates(world, LARGE, policy(freedom), None)), None)
    if choice is not None:
        assert BATCH % ((choice.micro_batch_size or MICRO) * choice.degrees.dp) == 0


def test_what_is_freed_for_speed_is_chosen_by_what_a_step_takes() -> None:
    free, kept = chosen(64, Freedom(more=("full",), for_speed=SPEED_PARTS)), chosen(64)
    best, *_ = PLANNER.order([free, kept], None)
    assert free.key != kept.key and best.key == free.key
    offered = candidates(64, LARGE, policy(Freedom(for_speed=SPEED_PARTS)), None)
    assert {choice.degrees.vpp for choice in offered} > {1, 2}


def test_the_same_degrees_with_other_passes_are_another_layout_with_its_own_steps() -> None:
    degrees = Degrees(4, 2, 8)
    own, again = Choice(degrees, (), "", MICRO), Choice(degrees, (), "", MICRO, "full")
    found = [Measured(degrees, MICRO, 50, 9.0), Measured(degrees, MICRO, 50, 2.0, "full")]
    learned = PLANNER.with_measured(found[0]).with_measured(found[1])
    assert learned.measured == tuple(found)
    best = learned.order([own, again], degrees, own.passes)
    assert best[0].key == again.key and "what runs has 9 s" in best[0].reason
    stays = learned.order([own, again], degrees, again.passes)
    assert stays[0].key == again.key and stays[0].reason.endswith("kept")
    assert learned.with_measured(replace(found[0], seconds=1.0)).measured[0] == found[1]


def test_what_ran_out_of_memory_says_that_nothing_as_large_fits() -> None:
    tried = chosen(64)
    second = chosen(64, ran=tried, excluded=[tried])
    sizes = needed(tried, second)
    assert sizes[1] < sizes[0]


SPILLS = replace(
    FREEDOM, for_memory=("recompute", "offload"), offloads=("optimizer-half", "optimizer")
)


@pytest.mark.fault
def test_too_few_devices_have_state_in_host_memory_and_bring_it_back_with_more() -> None:
    assert chosen(8, SPILLS, chosen(64)).passes == Passes(MICRO, "full"), "behind recomputation"
    few = chosen(4, SPILLS, chosen(64))
    assert few.passes == Passes(MICRO, "full", "optimizer-half"), "the least that is enough"
    assert "recompute none -> full, offload none -> optimizer-half" in few.reason
    assert re.search(
        r"; nothing fits in 85\.2 GB without it: the optimizer's 3\d(\.\d)? GB a device go to host "
        r"memory, steps 1\.\d\d times as long$", few.reason,
    )  # fmt: skip
    kept = chosen(4, SPILLS, few)
    assert kept.key == few.key
    back = chosen(8, SPILLS, few)
    assert back.passes == Passes(MICRO, "full") and "offload optimizer-half -> none" in back.reason


def test_state_that_fits_no_host_stays_on_the_devices() -> None:
    narrow = replace(PLANNER, device=replace(A100, host_memory=64e9))
    with pytest.raises(RefusedError, match="not known to fit in memory"):
        chosen(4, SPILLS, chosen(64), planner=narrow)


@pytest.mark.fault
def test_without_a_planner_an_out_of_memory_with_recomputation_leads_to_host_memory() -> None:
    tried: list[Choice] = []
    for _ in range(40):
        tried.append(chosen(8, SPILLS, planner=None, excluded=tried))
        if tried[-1].offload == "optimizer":
            break
    passes = [choice.passes for choice in tried]
    in_turn = (
        Passes(MICRO), Passes(MICRO, "full"), Passes(MICRO, "full", "optimizer-half"),
        Passes(MICRO, "full", "optimizer"),
    )  # fmt: skip
    first = [passes.index(each) for each in in_turn]
    assert first == sorted(first)
    back = chosen(16, SPILLS, ran=tried[-1], planner=None, excluded=tried[:-1])
    assert back.passes == Passes(MICRO), "more devices have it as the flags say"
    before = Degrees(8, 2, 1), Passes(MICRO)
    has_run = replace(policy(SPILLS, None), stepped=(before,))
    again = choose(16, LARGE, has_run, tried[-1].degrees, excluded=tried[:-1], ran=tried[-1].passes)
    assert again.key == before, "it goes back to what ran"


def needs(layouts: Sequence[tuple[Degrees, Passes]]) -> list[float]:
    cases = [
        Layout(degrees, passes.micro_batch_size or MICRO, passes.recompute or "none", OPTIMIZER,
               offload=passes.offload or "none")
        for degrees, passes in layouts
    ]  # fmt: skip
    return [float(each) for each in step_memory(columns_of(
        [(PLANNER.work, PLANNER.device, layout) for layout in cases]
    )).total]  # fmt: skip


@pytest.mark.fault
def test_without_a_planner_too_few_devices_have_state_in_host_memory_at_once() -> None:
    """Below the size known to fit, where modelled bytes say that it fits so."""
    before = Degrees(4, 2, 2), Passes(MICRO)
    ran = replace(policy(SPILLS, None), stepped=(before,), needs=needs)
    few = choose(4, LARGE, ran, before[0], ran=before[1])
    assert few.offload is not None and few.degrees.world_size == 4
    assert "as nothing is known to fit without state in host memory" in few.reason
    both = replace(ran, stepped=(before, few.key))
    assert choose(16, LARGE, both, few.degrees, ran=few.passes).key == before
    with pytest.raises(RefusedError, match="not known to fit in memory"):
        choose(4, LARGE, replace(ran, freedom=NO_FREEDOM), before[0], ran=before[1])


@pytest.mark.fault
def test_without_a_planner_an_out_of_memory_leads_to_recomputation_before_the_job_is_given_up() -> (
    None
):
    kept = chosen(8, planner=None)
    assert kept.passes == Passes(MICRO)
    tried = [kept]
    while (choice := chosen(8, planner=None, excluded=tried)).recompute is None:
        assert choice.degrees.model_parallel > kept.degrees.model_parallel, "larger splits first"
        tried.append(choice)
    assert choice.passes == Passes(MICRO, "full")
    assert "recompute none -> full" in choice.reason


def test_passes_that_run_stay_where_others_are_not_better() -> None:
    """A rule of one change may have asked for them; after it they are what runs."""
    runs = Choice(Degrees(4, 2, 1), (), "", 2, "full")
    kept = chosen(8, ran=runs, planner=None)
    assert kept.key == runs.key and "->" not in kept.reason
    assert chosen(16, ran=runs, planner=None).passes == Passes(MICRO)
    knows = PLANNER.with_measured(Measured(runs.degrees, 2, 50, 0.01, "full"))
    stays = chosen(8, ran=runs, planner=knows)
    assert stays.key == runs.key and "kept" in stays.reason
    assert chosen(8, ran=runs, planner=knows, excluded=[runs]).key != runs.key


def test_a_person_may_ask_for_a_recomputation() -> None:
    for kind, found in (("full", "full"), ("none", None)):  # the latter is the flags' own
        asks = DegreeRequest(4, 2, recompute=kind)  # type: ignore[arg-type]
        assert choose(16, LARGE, policy(FREEDOM), None, requested=asks).recompute == found
