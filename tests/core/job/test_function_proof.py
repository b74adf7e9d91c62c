"""A change is proven to compute the same function, or goes back to what ran."""

import math
from dataclasses import replace

import pytest

from scalai.core.job import membership as m
from scalai.core.job import proof_rules
from scalai.core.job.function_proof import (
    PROOF_S,
    Numbers,
    Remade,
    Spread,
    compare,
    merged,
    remade,
)
from scalai.core.job.membership import active
from scalai.core.job.proof_rules import key_of
from scalai.core.job.succession import recall, remember
from scalai.core.messages import actions, commands, events, reports
from scalai.core.messages.shared import JsonText
from support.law_jobs import but
from support.membership_jobs import rounds, two_hosts, until
from support.membership_simulation import Simulation

HERE = Numbers(5.202133, 2.061, framework="megatron-core 0.16.1")
NAN = math.nan


@pytest.mark.parametrize(
    ("after", "is_same"),
    [
        (replace(HERE, loss=5.202133 * (1 + 2.7e-7)), True),
        (replace(HERE, loss=5.202133 * (1 + 6.9e-5)), False),
        (replace(HERE, loss=5.202134, norm=2.114), False),  # a global auxiliary loss
        (replace(HERE, loss=None), True),
        (replace(HERE, loss=None, norm=2.0612), False),
        (replace(HERE, norm=math.inf, is_skipped=True), True),
        (replace(HERE, norm=math.inf), False),
        (Numbers(), None),
        (None, None),
        (replace(HERE, obstacle="dropout 0.1"), None),
        (replace(HERE, is_random=True), True),
        (replace(HERE, norms={"experts": 0.1, "others": 2.0}), True),
        (replace(HERE, norms={"experts": 0.101, "others": 2.0}), False),
        (replace(HERE, norms={"experts": 0.0}), False),
    ],
)
def test_numbers_of_float32_agree_within_the_limits(
    after: Numbers | None, is_same: bool | None
) -> None:
    here = replace(HERE, norms={"experts": 0.1, "idle": 0.0})
    assert compare(here, after).is_same is is_same
    assert compare(after, here).is_same is is_same


def test_numbers_that_are_not_finite_on_both_sides_are_equal() -> None:
    both = Numbers(NAN, math.inf)
    assert compare(both, replace(both, loss=math.inf)).is_same


def test_half_precision_is_judged_by_the_jobs_own_repetitions_and_never_below_rounding() -> None:
    here = replace(HERE, dtype="bfloat16")
    off = replace(here, norm=2.061 * 1.01)
    assert compare(here, here).is_same is None
    assert compare(here, off, Spread(0.0, 0.0, 1)).is_same is False
    assert compare(here, off, Spread(0.0, 0.004, 1)).is_same is True
    assert compare(here, replace(here, norm=2.061 * 1.003), Spread(0.0, 0.0, 1)).is_same is True


def test_what_the_stages_of_a_pipeline_know_is_put_together() -> None:
    first = Numbers(None, 2.0, norms={"others": 2.0}, seconds=1.0)
    last = Numbers(5.0, 2.0, framework="f", obstacle="o", is_random=True, seconds=2.0)
    assert merged(merged(None, first), last) == replace(last, norms={"others": 2.0})


STEPS = [(step, 5.0 + step, 2.0) for step in range(1, 80)]


def test_steps_that_are_made_again_are_compared_with_what_was_told_of_them_once_a_round() -> None:
    known, text = remade(Remade(), 1, "dp2", "float32", STEPS)
    assert not text and min(known.steps) == 16, "the table has an end"
    known, text = remade(known, 2, "tp2", "float32", [(70, 75.00001, 2.0), (71, 76.0, 2.0)])
    assert not text and not known.spread.steps
    known, text = remade(known, 3, "dp2", "float32", [(72, 77.01, 2.0)])
    assert "step 72" in text and "77.01" in text and "dp2, then dp2" in text
    assert known.spread.steps == 0
    known, text = remade(known, 3, "dp2", "float32", [(73, 79.0, 2.0), (80, 1.0, 2.0)])
    assert not text, "once a round"
    assert remade(known, 4, "dp2", "float32", [(74, 79.0, NAN)])[1] == "", "as far as it is known"


def test_repeated_steps_of_half_precision_say_how_far_layouts_may_differ() -> None:
    known, text = remade(Remade(), 1, "dp2", "bfloat16", [(1, 5.0, 2.0), (2, 5.0, 2.0)])
    known, text = remade(known, 2, "tp2", "bfloat16", [(1, 6.0, 2.0)])
    assert not text, "nothing was repeated yet"
    known, text = remade(known, 3, "dp2", "bfloat16", [(2, 5.01, 2.0)])
    assert not text and known.spread.steps == 1
    assert known.spread.loss == pytest.approx(0.002, rel=0.01)
    assert remade(known, 4, "tp2", "bfloat16", [(1, 5.0, 2.0)])[1]


@pytest.mark.fault
def test_the_coordinator_warns_of_steps_that_a_recovery_makes_otherwise() -> None:
    simulation = training()
    job, text = proof_rules.made(simulation.job, [(6, 5.0, 2.0), (7, 4.9, 2.0)])
    simulation.job = job
    assert not text
    simulation.feed(
        events.Reported("a", reports.WorkersFailed(job.round, "killed", is_chance=True))
    )
    simulation.settle()
    job, text = proof_rules.made(simulation.job, [(6, 5.0, 2.0)])
    assert not text and job.function.remade.spread.steps == 1
    assert "step 7 computes otherwise" in proof_rules.made(job, [(7, 4.8, 2.0)])[1]


def test_with_dropout_steps_are_compared_with_those_of_the_same_layout_alone() -> None:
    simulation = training()
    random = replace(HERE, obstacle="dropout 0.1")
    simulation.computed = {2: random, 4: random}
    simulation.join("c", 2)  # so that there is a first step that tells of it
    simulation.settle()
    simulation.feed(events.HostLeaving("c", simulation.now))
    simulation.settle()
    before, _ = proof_rules.made(simulation.job, [(20, 5.0, 2.0), (21, 4.9, 2.0)])
    simulation.job = before
    simulation.lose("b")
    simulation.settle()
    assert active(simulation.job) == {"a"}
    job, text = proof_rules.made(simulation.job, [(20, 5.01, 2.0)])
    assert not text, "other degrees have other random streams"
    simulation.job = job
    simulation.feed(
        events.Reported("a", reports.WorkersFailed(job.round, "killed", is_chance=True))
    )
    simulation.settle()
    assert "step 20 computes otherwise" in proof_rules.made(simulation.job, [(20, 5.02, 2.0)])[1]


def training(policy: str = "auto", **settings: object) -> Simulation:
    """Return a job on a and b with two workers each, that knows the numbers of its steps."""
    simulation = two_hosts(max_hosts=3, proves=policy, **settings)
    job = simulation.job
    job = replace(job, function=replace(job.function, framework=HERE.framework))
    assert job.current is not None
    function = replace(job.function, known=(key_of(job, job.current),))
    simulation.job = replace(job, function=function)
    simulation.train(5)
    return simulation


def change(simulation: Simulation, before: Numbers | None, after: Numbers | None) -> None:
    """Have c join, so that the job is to grow from 4 to 6 workers."""
    simulation.computed = {4: HERE, 6: after} if after is not None else {4: HERE}
    simulation.join("c", 2)
    simulation.tick()
    until(simulation, m.Phase.STOPPING)
    if before is not None:
        for host in "ab":
            simulation.feed(events.Reported(host, reports.Stepped(simulation.job.round, before)))
    simulation.settle()


def proves(simulation: Simulation) -> list[bool]:
    return [each.proves for each in simulation.logged if isinstance(each, commands.Agree)]


def said(simulation: Simulation, word: str) -> list[str]:
    lines = [each.text for each in simulation.logged if isinstance(each, actions.Say)]
    return [line for line in lines if word in line]


def test_a_change_that_computes_the_same_stands_and_is_not_proven_again() -> None:
    simulation = training()
    change(simulation, HERE, HERE)
    assert active(simulation.job) == {"a", "b", "c"} and len(said(simulation, "proven")) == 1
    for present in ({"a", "b"}, {"a", "b", "c"}):  # and back, and forth
        if len(present) == 2:
            simulation.feed(events.HostLeaving("c", simulation.now))
        else:
            simulation.join("c", 2)
        simulation.settle()
        assert active(simulation.job) == present
    assert proves(simulation) == [True, False, False]
    assert [each.proves for each in rounds(simulation)] == [False, True, False, False]


@pytest.mark.fault
def test_a_change_that_computes_otherwise_goes_back_to_what_ran_from_the_stop_and_stays_there(
) -> None:  # fmt: skip
    simulation = training(left=0)
    change(simulation, HERE, replace(HERE, norm=2.114))
    (warning,) = said(simulation, "function_differs")
    assert "2.061" in warning and "2.114" in warning
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a", "b"}
    tried, back = rounds(simulation)[-2:]
    assert back.generation == tried.generation, "the state of the stop, which nobody has changed"
    assert tried.proves and not back.proves
    assert simulation.job.budget.left == 0
    simulation.feed(events.Rescaled(simulation.job.settings.assign, simulation.now))
    simulation.settle()
    assert len(rounds(simulation)) == 3, "it is not tried again"


@pytest.mark.parametrize("is_lost", [True, False])
def test_where_what_ran_needs_a_host_that_is_gone_or_leaves_the_job_goes_on_and_it_is_said(
    *, is_lost: bool
) -> None:
    simulation = training(left=0)
    simulation.computed = {2: replace(HERE, norm=2.114)}
    simulation.feed(events.HostLeaving("b", simulation.now))
    simulation.tick()
    until(simulation, m.Phase.STOPPING)
    simulation.feed(events.Reported("a", reports.Stepped(simulation.job.round, HERE)))
    until(simulation, m.Phase.STARTING)
    if is_lost:
        simulation.lose("b")
    simulation.settle()
    assert len(said(simulation, "function_differs")) == 1
    assert said(simulation, "nothing to go back to")
    assert simulation.job.phase is m.Phase.RUNNING and simulation.job.hosts.keys() == {"a"}
    assert len(rounds(simulation)) == 2 and simulation.job.budget.left == 0


def test_a_round_that_goes_on_from_an_older_state_is_not_compared_with_the_step_behind_the_stop(
) -> None:  # fmt: skip
    simulation = training(left=5)
    older = simulation.job.states.generations
    simulation.computed = {4: HERE, 6: replace(HERE, loss=5.3)}
    simulation.join("c", 2)
    simulation.tick()
    until(simulation, m.Phase.STOPPING)
    for host in "ab":
        simulation.feed(events.Reported(host, reports.Stepped(simulation.job.round, HERE)))
    until(simulation, m.Phase.STARTING)
    simulation.known = {one.number: simulation.known[one.number] for one in older}
    job = m.replace_generations(simulation.job, simulation.covered())
    simulation.job = job
    assert job.newest_generation is not None and job.newest_generation.step < job.stop.step
    simulation.feed(
        events.Reported("a", reports.WorkersFailed(job.round, "killed", is_chance=True))
    )
    simulation.settle()
    assert rounds(simulation)[-1].generation == older[-1].number
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a", "b", "c"}
    assert not said(simulation, "function_differs")


def test_a_recovery_behind_a_proven_change_is_not_reported_as_proven() -> None:
    simulation = training()
    change(simulation, HERE, HERE)
    assert simulation.job.function.found.startswith("proven")
    simulation.feed(
        events.Reported("a", reports.WorkersFailed(simulation.job.round, "killed", is_chance=True))
    )
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and not simulation.job.function.found


@pytest.mark.fault
@pytest.mark.parametrize(("before", "after"), [(None, HERE), (HERE, None)])
def test_a_change_whose_numbers_are_missing_stands_and_it_is_said_once(
    before: Numbers | None, after: Numbers | None
) -> None:
    simulation = training("always")
    change(simulation, before, after)
    assert active(simulation.job) == {"a", "b", "c"}
    assert len(said(simulation, "function_unproven")) == 1


def test_a_script_that_tells_nothing_of_its_steps_is_said_to_be_unproven_once() -> None:
    simulation = two_hosts(max_hosts=3, proves="auto")
    for _ in range(2):
        simulation.join("c", 2)
        simulation.settle()
        simulation.feed(events.HostLeaving("c", simulation.now))
        simulation.settle()
    assert len(said(simulation, "function_unproven")) == 1 and not any(proves(simulation))


def test_where_a_notice_leaves_no_time_nothing_is_proven() -> None:
    simulation = training("always")
    simulation.feed(events.HostLeaving("b", simulation.now, "aws", 1.0, is_final=True))
    simulation.settle()
    assert proves(simulation) == [False]


def test_never_means_never() -> None:
    simulation = training("never")
    change(simulation, None, replace(HERE, norm=3.0))
    assert proves(simulation) == [False] and not said(simulation, "function")


def test_the_next_coordinator_knows_what_is_proven() -> None:
    simulation = training()
    change(simulation, HERE, HERE)
    kept = remember(simulation.job, "run", 1, 1, JsonText.of({}))
    job = recall(but(two_hosts().job, recalled=kept))
    assert job.function.known == simulation.job.function.known
    assert job.function.framework == HERE.framework


OFF = replace(HERE, norm=2.114)


def grow(simulation: Simulation, after: Numbers) -> int:
    """Have c join, and the new round make its first step before a and b tell of theirs. Return the
    number of the old round."""
    simulation.computed = {4: HERE, 6: after}
    simulation.join("c", 2)
    simulation.tick()
    old = simulation.job.round
    until(simulation, m.Phase.STOPPING)
    until(simulation, m.Phase.RUNNING)
    assert simulation.job.round != old and active(simulation.job) == {"a", "b", "c"}
    assert not said(simulation, "function_proven") and not said(simulation, "function_unproven")
    return old


def tell(simulation: Simulation, old: int, *hosts: str, numbers: Numbers | None = HERE) -> None:
    for host in hosts:
        simulation.feed(events.Reported(host, reports.Stepped(old, numbers)))


def amended(simulation: Simulation) -> list[str]:
    found = [each for each in simulation.logged if isinstance(each, actions.AmendReport)]
    return [each.function.partition(":")[0] for each in found]


def test_what_old_workers_tell_behind_the_first_step_of_the_new_ones_still_proves_it() -> None:
    simulation = training()
    old = grow(simulation, HERE)
    simulation.train(3)
    tell(simulation, old, "a")
    assert not said(simulation, "function_proven"), "b may know the loss"
    tell(simulation, old, "b")
    assert amended(simulation) == ["proven"] and len(said(simulation, "function_proven")) == 1
    assert simulation.job.change.ran == simulation.job.current
    simulation.settle()
    assert len(rounds(simulation)) == 2


def test_what_they_tell_late_still_goes_back_to_the_state_of_the_stop() -> None:
    """Of what the new workers have made meanwhile nothing becomes a generation."""
    simulation = training(left=0)
    old = grow(simulation, OFF)
    simulation.train(3)
    before = len(simulation.logged)
    simulation.snapshot()
    tell(simulation, old, "a", "b")
    assert amended(simulation) == ["differs"] and len(said(simulation, "function_differs")) == 1
    simulation.settle()
    tried, back = rounds(simulation)[-2:]
    assert back.generation == tried.generation
    assert back.steps_lost == 4, "the first one, and three more"
    assert active(simulation.job) == {"a", "b"} and simulation.job.budget.left == 0
    assert not any(isinstance(each, actions.JudgeSnapshot) for each in simulation.logged[before:])
    simulation.feed(events.Rescaled(simulation.job.settings.assign, simulation.now))
    simulation.settle()
    assert len(rounds(simulation)) == 3, "it is not tried again"


def test_nobody_waits_for_old_workers_for_long() -> None:
    simulation = training()
    old = grow(simulation, OFF)
    simulation.tick(PROOF_S - 1)
    assert not said(simulation, "function_unproven")
    simulation.tick(2)
    assert len(said(simulation, "function_unproven")) == 1 and amended(simulation) == ["not proven"]
    tell(simulation, old, "a", "b")
    simulation.settle()
    assert active(simulation.job) == {"a", "b", "c"} and len(rounds(simulation)) == 2


def test_nobody_waits_for_old_workers_that_are_gone() -> None:
    """Neither for those of whom their host says that they do not tell, nor for a host that left."""
    simulation = training()
    old = grow(simulation, HERE)
    tell(simulation, old, "a")
    tell(simulation, old, "b", numbers=None)
    assert len(said(simulation, "function_proven")) == 1, "by what the others have told"
    simulation.computed[2] = HERE
    old = simulation.job.round
    for host in "bc":
        simulation.feed(events.HostLeaving(host, simulation.now))
    simulation.tick()
    until(simulation, m.Phase.STOPPING)
    until(simulation, m.Phase.RUNNING)
    assert simulation.job.hosts.keys() == {"a"} and simulation.job.function.is_waiting
    tell(simulation, old, "a", numbers=None)
    assert said(simulation, "the old workers have given no numbers")


def test_a_further_change_waits_for_no_proof_and_what_was_sealed_meanwhile_counts() -> None:
    simulation = training()
    old = grow(simulation, OFF)
    simulation.train(3)
    simulation.snapshot()
    simulation.feed(events.HostLeaving("c", simulation.now))
    until(simulation, m.Phase.DRAINING)
    assert len(said(simulation, "a further change has begun")) == 1
    assert amended(simulation) == ["not proven"]
    assert any(isinstance(each, actions.JudgeSnapshot) for each in simulation.logged)
    tell(simulation, old, "a", "b")
    simulation.settle()
    assert active(simulation.job) == {"a", "b"} and not said(simulation, "function_differs")


def test_workers_that_fail_meanwhile_go_on_as_they_ran() -> None:
    simulation = training()
    grow(simulation, OFF)
    simulation.feed(
        events.Reported("a", reports.WorkersFailed(simulation.job.round, "killed", is_chance=True))
    )
    simulation.settle()
    assert len(said(simulation, "workers have failed before the old workers")) == 1
    assert active(simulation.job) == {"a", "b", "c"} and simulation.job.phase is m.Phase.RUNNING


def test_a_snapshot_of_a_round_that_is_not_proven_yet_is_judged_once_it_is() -> None:
    simulation = training()
    old = grow(simulation, HERE)
    source = simulation.job.newest_generation
    simulation.train(3)
    simulation.snapshot()
    simulation.deliver()
    assert simulation.job.newest_generation == source
    tell(simulation, old, "a", "b")
    assert simulation.job.newest_generation is not None
    assert simulation.job.newest_generation.step == simulation.hosts["a"].step


def test_numbers_of_a_start_that_failed_are_not_those_of_the_next_one() -> None:
    """A host of it had made its first step when another one was lost."""
    simulation = training(left=5)
    simulation.computed = {4: HERE, 6: OFF}
    simulation.join("c", 2)
    simulation.tick()
    old = simulation.job.round
    until(simulation, m.Phase.STOPPING)
    tell(simulation, old, "a", "b")
    until(simulation, m.Phase.STARTING)
    simulation.feed(events.Reported("a", reports.Stepped(simulation.job.round, OFF)))
    simulation.computed = {4: HERE, 6: HERE, 2: HERE}
    simulation.lose("b")
    simulation.settle()
    assert not said(simulation, "function_differs")
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a", "c"}


def test_a_script_that_finishes_while_its_function_is_not_proven_yet_says_so() -> None:
    simulation = training()
    grow(simulation, OFF)
    for host in "abc":
        simulation.feed(events.Reported(host, reports.Finished(simulation.job.round)))
    assert len(said(simulation, "the script has finished before the old workers")) == 1
    assert amended(simulation) == ["not proven"]
