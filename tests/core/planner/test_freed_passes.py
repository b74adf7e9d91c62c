"""Micro-batch, recomputation and virtual stages of a running job: the script's own, until memory
forces another or a person frees them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.degrees.choice import candidates, choose
from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits, Sharding
from scalai.core.degrees.passes import AS_GIVEN, NO_FREEDOM, PARTS, Freedom, Passes
from scalai.core.degrees.policy import Choice, DegreePolicy
from scalai.core.planner.columns import OPTIMIZER, Workload, columns_of
from scalai.core.planner.devices import device_named
from scalai.core.planner.preference import (
    Measured,
    Preference,
    Terms,
    measured_of_json,
    measured_to_json,
)
from scalai.core.planner.step_memory import USABLE, step_memory
from support.model_shapes import gpt

LAYERS, BATCH, MICRO = 64, 64, 4
SHAPE = gpt(LAYERS, 5120, 40, 51200, 2048)
LIMITS = ModelLimits(
    num_attention_heads=40, num_query_groups=40, num_layers=LAYERS, global_batch_size=BATCH,
    micro_batch_size=MICRO, padded_vocab_size=51200, ffn_hidden_size=20480,
)  # fmt: skip
PLANNER = Preference(
    Workload(SHAPE, BATCH),
    device_named("a100-80gb"),
    "none",
    Sharding(OPTIMIZER),
    False,
    MICRO,
    Terms(True),
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
    return choose(world, LIMITS, policy(freedom, planner), present, excluded=excluded, ran=passes)


def does_fit(choice: Choice) -> bool:
    case = PLANNER._case(*choice.key)
    return bool(step_memory(columns_of([case])).total[0] <= USABLE * PLANNER.device.memory)


@pytest.mark.fault
def test_fewer_devices_have_it_recompute_where_nothing_fits_without_and_more_have_it_stop() -> None:
    many = chosen(64)
    assert many.passes == Passes(MICRO) and does_fit(many)
    few = chosen(8, ran=many)
    assert few.passes == Passes(MICRO, "full") and does_fit(few)
    assert "recompute none -> full" in few.reason
    assert "no layout fits with the script's flags alone" in few.reason
    again = chosen(8, ran=few)
    assert again.key == few.key, "what runs is kept"
    back = chosen(64, ran=few)
    assert back.passes == Passes(MICRO)
    assert "recompute full -> none" in back.reason


def test_where_nothing_is_free_for_memory_nothing_is_forced() -> None:
    silent = chosen(8, NO_FREEDOM, chosen(64))
    assert silent.passes == Passes(MICRO) and "by cost" not in silent.reason
    fixed = replace(FREEDOM, fixed=(("recompute", "of graphs"),))
    assert chosen(8, fixed, chosen(64)).key == silent.key


def test_the_micro_batch_is_made_smaller_where_that_is_what_a_person_allows() -> None:
    few = chosen(8, Freedom(for_memory=("micro-batch",)), chosen(64))
    assert few.recompute is None and does_fit(few)
    assert few.micro_batch_size is not None and few.micro_batch_size < MICRO
    assert f"micro-batch {MICRO} -> {few.micro_batch_size}" in few.reason


def test_a_micro_batch_is_never_made_larger_for_memory() -> None:
    free = Freedom(more=("full",), for_memory=("recompute", "micro-batch"))
    sizes = {
        choice.micro_batch_size for choice in candidates(8, LIMITS, policy(free), None)
    }  # fmt: skip
    assert max(size or 0 for size in sizes) == MICRO and len(sizes) > 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64), st.sampled_from([FREEDOM, Freedom(more=("full",), for_speed=PARTS)]))
def test_the_global_batch_stays_exact(world: int, freedom: Freedom) -> None:
    choice = next(iter(candidates(world, LIMITS, policy(freedom), None)), None)
    if choice is not None:
        assert BATCH % ((choice.micro_batch_size or MICRO) * choice.degrees.dp) == 0


def test_what_is_freed_for_speed_is_chosen_by_what_a_step_takes() -> None:
    free = chosen(64, Freedom(more=("full",), for_speed=PARTS))
    kept = chosen(64)
    predicted = PLANNER.calibration.predict(
        columns_of([PLANNER._case(*choice.key) for choice in (free, kept)])
    ).seconds
    assert predicted[0] <= predicted[1]
    assert free.key != kept.key
    offered = candidates(64, LIMITS, policy(Freedom(for_speed=PARTS)), None)
    assert {choice.degrees.vpp for choice in offered} > {1, 2}


def test_the_same_degrees_with_other_passes_are_another_layout_with_its_own_steps() -> None:
    degrees = Degrees(4, 2, 8)
    own, again = Choice(degrees, (), "", MICRO), Choice(degrees, (), "", MICRO, "full")
    found = [Measured(degrees, MICRO, 50, 9.0), Measured(degrees, MICRO, 50, 2.0, "full")]
    learned = PLANNER
    for each in found:
        learned = learned.with_measured(each)
    assert learned.measured == tuple(found)
    best = learned.order([own, again], degrees, own.passes)
    assert best[0].key == again.key and "what runs has 9 s" in best[0].reason
    stays = learned.order([own, again], degrees, again.passes)
    assert stays[0].key == again.key and stays[0].reason.endswith("kept")
    assert learned.with_measured(replace(found[0], seconds=1.0)).measured[0] == found[1]


def test_measured_steps_say_what_was_recomputed() -> None:
    found = [Measured(Degrees(2, 1, 4), 2, 50, 1.0, "full"), Measured(Degrees(1, 1, 8), 2, 50, 2.0)]
    written = measured_to_json(found)
    assert measured_of_json(written) == found
    with pytest.raises(ValueError, match="is no measured step"):
        measured_of_json([entry[:4] for entry in written])


def test_what_ran_out_of_memory_says_that_nothing_as_large_fits() -> None:
    first = chosen(64)
    second = chosen(64, ran=first, excluded=[first])
    needed = step_memory(columns_of([PLANNER._case(*each.key) for each in (first, second)])).total
    assert needed[1] < needed[0]


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


def test_what_is_kept_keeps_its_passes() -> None:
    ran = Choice(Degrees(4, 2, 1), (), "", 2, "full")
    kept = chosen(8, ran=ran, planner=None)
    assert kept.key == ran.key and "->" not in kept.reason
    assert chosen(16, ran=ran, planner=None).passes == Passes(MICRO)


def test_a_person_may_ask_for_it() -> None:
    asks = DegreeRequest(4, 2, recompute="full")
    choice = choose(16, LIMITS, policy(FREEDOM), None, requested=asks)
    assert choice.passes == Passes(MICRO, "full")
    own = choose(16, LIMITS, policy(FREEDOM), None, requested=replace(asks, recompute="none"))
    assert own.passes == Passes(MICRO), "that is what the flags say"


def test_passes_that_a_person_asked_for_stay_where_others_are_not_better() -> None:
    """A rule of one change says them; after it they are what runs."""
    runs = Choice(Degrees(4, 2, 1), (), "", 2, "full")
    knows = PLANNER.with_measured(Measured(runs.degrees, 2, 50, 0.01, "full"))
    stays = chosen(8, ran=runs, planner=knows)
    assert stays.key == runs.key and "kept" in stays.reason
    without = chosen(8, ran=runs, planner=knows, excluded=[runs])
    assert without.key != runs.key
