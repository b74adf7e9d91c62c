"""A change is proven to compute the same function, or goes back to what ran."""

import math
from dataclasses import replace
from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.core.job import proof_rules
from scalai.core.job.function_proof import (
    PROOF_S,
    FunctionProof,
    Numbers,
    Remade,
    Spread,
    compare,
    merged,
    remade,
)
from scalai.core.job.membership import Phase, active
from scalai.core.job.proof_rules import key_of
from scalai.core.job.succession import recall, remember
from scalai.core.messages import actions, commands, events, reports
from scalai.core.messages.shared import JsonText
from support import laws
from support.laws import (
    advance_all,
    answers,
    but,
    generations,
    joined,
    lines,
    ordered,
    published,
    restored,
    ticked,
    told,
    until,
)
from support.two_laws import World

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


# ---------------------------------------------------------------------- steps that are made again

KILLED = reports.WorkersFailed(1, "killed", is_chance=True)


def training(proves: str = "auto", **facts: Any) -> m.Job:
    """Return a job on a and b that knows the numbers of its steps."""
    job = laws.training("ab", **{"max_hosts": 3, "proves": proves, **facts})
    job = replace(job, function=FunctionProof(framework=HERE.framework))
    assert job.current is not None
    return replace(job, function=replace(job.function, known=(key_of(job, job.current),)))


@pytest.mark.fault
def test_the_coordinator_warns_of_steps_that_a_recovery_makes_otherwise() -> None:
    job, text = proof_rules.made(training(), [(26, 5.0, 2.0), (27, 4.9, 2.0)])
    assert not text
    job = until(advance_all(job, *told("a", KILLED))[0], Phase.RUNNING)
    job, text = proof_rules.made(job, [(26, 5.0, 2.0)])
    assert not text and job.function.remade.spread.steps == 1
    assert "step 27 computes otherwise" in proof_rules.made(job, [(27, 4.8, 2.0)])[1]


def test_with_dropout_steps_are_compared_with_those_of_the_same_layout_alone() -> None:
    job = training()
    job = replace(job, function=replace(job.function, is_random=True))
    job, _ = proof_rules.made(job, [(30, 5.0, 2.0), (31, 4.9, 2.0)])
    job, _ = advance_all(job, events.HostLost("b", generations("a", 2), job.now))
    job, _ = made(job, replace(HERE, obstacle="dropout 0.1"))
    job, text = proof_rules.made(job, [(30, 5.01, 2.0)])
    assert active(job) == {"a"} and not text, "other degrees have other random streams"
    job, _ = advance_all(job, *told("a", replace(KILLED, round=job.round)))
    job, _ = made(job, replace(HERE, obstacle="dropout 0.1"))
    assert "step 30 computes otherwise" in proof_rules.made(job, [(30, 5.02, 2.0)])[1]


# ---------------------------------------------------------------------- a change that is proven

OFF = replace(HERE, norm=2.114)
Due = list[actions.Action]


def stopping(job: m.Job, *due: events.Event) -> tuple[m.Job, Due]:
    """Return the job once its workers leave for a change: c joins, if nothing else is said."""
    done: Due = []
    job, _ = advance_all(job, *(due or (joined(job, "c"),)))
    return until(ticked(job)[0], Phase.STOPPING, done), done


def made(job: m.Job, numbers: Numbers | None) -> tuple[m.Job, Due]:
    """Return the job once the workers of its start have made their first step."""
    job = until(job, Phase.STARTING)
    hosts = "".join(sorted(active(job)))
    ready = told(hosts, published(job.round), restored(job.round))
    stepped = told(hosts, reports.Stepped(job.round, numbers))
    return advance_all(job, *ready, events.Proven(job.round), *stepped)


def change(job: m.Job, before: Numbers | None, after: Numbers | None) -> tuple[m.Job, Due]:
    """Return the job that grows by c, and what comes of both sides' numbers."""
    job, done = stopping(job)
    if before is not None:
        job, _ = advance_all(job, *told("ab", reports.Stepped(1, before)))
    job, due = made(job, after)
    return job, [*done, *due]


def proves(done: Due) -> list[bool]:
    return [each.proves for each in map(ordered, done) if isinstance(each, commands.Agree)]


def amended(due: Due) -> list[str]:
    found = [each for each in due if isinstance(each, actions.AmendReport)]
    return [each.function.partition(":")[0] for each in found]


def test_a_change_that_computes_the_same_stands_and_is_not_proven_again() -> None:
    job, done = change(training(), HERE, HERE)
    assert active(job) == {"a", "b", "c"} and lines(done).count("event=function_proven") == 1
    assert proves(done) == [True]
    for what, hosts in ((events.HostLeaving("c", job.now), "ab"), (joined(job, "c"), "abc")):
        job, done = stopping(job, what)  # and back, and forth
        assert proves(done) == [False]
        job, _ = made(job, HERE)
        assert active(job) == set(hosts) and job.phase is Phase.RUNNING
    assert change(training("never"), None, OFF)[0].phase is Phase.RUNNING


@pytest.mark.fault
def test_a_change_that_computes_otherwise_goes_back_to_what_ran_from_the_stop_and_stays_there(
) -> None:  # fmt: skip
    job, due = change(training(left=0), HERE, OFF)
    assert "event=function_differs" in lines(due) and "2.061" in lines(due)
    assert "2.114" in lines(due) and job.phase is Phase.STOPPING
    done: Due = []
    job = until(job, Phase.RUNNING, done)
    (back,) = [each for each in done if isinstance(each, actions.StartRound)]
    assert back.generation == 10, "the state of the stop, which nobody has changed"
    assert not back.proves and active(job) == {"a", "b"} and job.budget.left == 0
    job, due = advance_all(job, events.Rescaled(job.settings.assign, job.now))
    assert job.phase is Phase.RUNNING, "it is not tried again"


@pytest.mark.parametrize("is_lost", [True, False])
def test_where_what_ran_needs_a_host_that_is_gone_or_leaves_the_job_goes_on_and_it_is_said(
    *, is_lost: bool
) -> None:
    job, _ = stopping(training(left=0), events.HostLeaving("b", 100.0))
    job, _ = advance_all(job, *told("ab", reports.Stepped(1, HERE)))
    job = until(job, Phase.STARTING)
    if is_lost:
        job, _ = advance_all(job, events.HostLost("b", generations("a", 10), job.now))
    job, due = made(job, OFF)
    assert "event=function_differs" in lines(due) and "nothing to go back to" in lines(due)
    assert job.phase is Phase.RUNNING and job.hosts.keys() == {"a"} and job.round == 2


def test_a_round_that_goes_on_from_an_older_state_is_not_compared_with_the_step_behind_the_stop(
) -> None:  # fmt: skip
    job, _ = stopping(training(left=5))
    job, _ = advance_all(job, *told("ab", reports.Stepped(1, HERE)))
    job = but(until(job, Phase.STARTING), generations=generations("ab", 2))
    job, _ = advance_all(job, *told("a", replace(KILLED, round=2)))
    job, due = made(job, OFF)
    assert job.attempt.source == 2 and active(job) == {"a", "b", "c"}
    assert job.phase is Phase.RUNNING and "function_differs" not in lines(due)


def test_a_recovery_behind_a_proven_change_is_not_reported_as_proven() -> None:
    job, _ = change(training(), HERE, HERE)
    assert job.function.found.startswith("proven")
    job, _ = advance_all(job, *told("a", replace(KILLED, round=2)))
    assert not until(job, Phase.RUNNING).function.found


@pytest.mark.fault
@pytest.mark.parametrize(("before", "after"), [(None, HERE), (HERE, None)])
def test_a_change_whose_numbers_are_missing_stands_and_it_is_said_once(
    before: Numbers | None, after: Numbers | None
) -> None:
    job, _ = stopping(training("always"))
    job, due = advance_all(job, *told("ab", reports.Stepped(1, before)))
    job, more = made(job, after)
    assert active(job) == {"a", "b", "c"} and job.phase is Phase.RUNNING
    assert lines([*due, *more]).count("event=function_unproven") == 1


def test_a_script_that_tells_nothing_of_its_steps_is_said_to_be_unproven_once() -> None:
    job, said = replace(training(), function=FunctionProof()), list[actions.Action]()
    for _ in range(2):
        for what in (joined(job, "c"), events.HostLeaving("c", job.now)):
            job, done = stopping(job, what)
            job, due = made(job, None)
            said += [*done, *due]
    assert lines(said).count("event=function_unproven") == 1 and not any(proves(said))


@pytest.mark.parametrize(
    ("policy", "what"),
    [("always", events.HostLeaving("b", 100.0, "aws", 1.0, is_final=True)), ("never", None)],
    ids=["a notice leaves no time", "never means never"],
)
def test_never_means_never(policy: str, what: events.Event | None) -> None:
    job, done = stopping(training(policy), *((what,) if what else ()))
    job, due = made(job, OFF)
    assert proves(done) == [False] and job.phase is Phase.RUNNING
    assert policy != "never" or "function" not in lines(due)


def test_the_next_coordinator_knows_what_is_proven() -> None:
    job, _ = change(training(), HERE, HERE)
    kept = remember(job, "run", 1, 1, JsonText.of({}))
    found = recall(but(laws.training("ab"), recalled=kept))
    assert found.function.known == job.function.known
    assert found.function.framework == HERE.framework


# ---------------------------------------------------------------------- old workers that are late


def grown(after: Numbers = HERE, **facts: Any) -> m.Job:
    """Return the job that trains on a, b and c before a and b have told of their step."""
    job, due = change(training(**facts), None, after)
    assert job.phase is Phase.RUNNING and active(job) == {"a", "b", "c"}
    assert "event=function" not in lines(due) and job.function.is_waiting
    return job


def tell(job: m.Job, *hosts: str, numbers: Numbers | None = HERE) -> tuple[m.Job, Due]:
    return advance_all(job, *told("".join(hosts), reports.Stepped(1, numbers)))


def sealed(job: m.Job) -> list[events.Event]:
    snapshot = f"run-{job.round}-30"
    return told("abc", reports.Sealed(job.round, "snapshot", snapshot, b""))


def test_what_old_workers_tell_behind_the_first_step_of_the_new_ones_still_proves_it() -> None:
    """A snapshot of a round that is not proven yet is judged once it is."""
    job, due = advance_all(grown(), *sealed(grown()))
    assert not due
    job, due = tell(job, "a")
    assert not due, "b may know the loss"
    job, due = tell(job, "b")
    assert amended(due) == ["proven"] and lines(due).count("event=function_proven") == 1
    assert any(isinstance(each, actions.JudgeSnapshot) for each in due)
    assert job.change.ran == job.current and job.round == 2


def test_what_they_tell_late_still_goes_back_to_the_state_of_the_stop() -> None:
    """Of what the new workers have made meanwhile nothing becomes a generation."""
    job, done = but(grown(OFF, left=0), newest=30), list[actions.Action]()
    *early, late = sealed(job)
    job, _ = advance_all(job, *early)
    job, due = tell(job, "a", "b")
    assert amended(due) == ["differs"] and lines(due).count("event=function_differs") == 1
    job, more = advance_all(job, late)
    assert not more, "it was on its way"
    job = until(job, Phase.RUNNING, done)
    (back,) = [each for each in done if isinstance(each, actions.StartRound)]
    assert back.generation == 10 and back.steps_lost == 4
    assert not any(isinstance(each, actions.JudgeSnapshot) for each in [*due, *done])
    assert active(job) == {"a", "b"} and job.budget.left == 0
    job, due = advance_all(job, events.Rescaled(job.settings.assign, job.now))
    assert job.phase is Phase.RUNNING, "it is not tried again"


def test_nobody_waits_for_old_workers_for_long() -> None:
    job, due = ticked(grown(OFF), PROOF_S - 2.0)
    assert "function_unproven" not in lines(due)
    job, due = ticked(job, 3.0)
    assert lines(due).count("event=function_unproven") == 1 and amended(due) == ["not proven"]
    assert tell(job, "a", "b")[0].phase is Phase.RUNNING


@pytest.mark.parametrize("how", ["they do not tell", "it is lost", "it has left"])
def test_nobody_waits_for_old_workers_that_are_gone(how: str) -> None:
    """Neither for those of whom their host says that they do not tell, nor for a host that left."""
    job, due = grown(), list[actions.Action]()
    if how == "they do not tell":
        job, due = tell(tell(job, "a")[0], "b", numbers=None)
        assert "event=function_proven" in lines(due), "by what the others have told"
        return
    job, _ = stopping(training(), events.HostLeaving("b", 100.0))
    job, due = made(job, HERE)
    assert job.hosts.keys() == {"a"} and job.function.is_waiting
    _, due = tell(job, "a", numbers=None)
    assert "the old workers have given no numbers" in lines(due)


def test_a_further_change_waits_for_no_proof_and_what_was_sealed_meanwhile_counts() -> None:
    job, done = grown(OFF), list[actions.Action]()
    job, _ = advance_all(job, *sealed(job), events.HostLeaving("c", job.now))
    job = until(job, Phase.DRAINING, done)
    assert lines(done).count("a further change has begun") == 1
    assert amended(done) == ["not proven"]
    assert any(isinstance(each, actions.JudgeSnapshot) for each in done)
    job, due = tell(job, "a", "b")
    assert active(until(job, Phase.RUNNING)) == {"a", "b"} and "differs" not in lines(due)


@pytest.mark.parametrize(
    ("what", "hosts", "why"),
    [
        (replace(KILLED, round=2), "a", "workers have failed before the old workers"),
        (reports.Finished(2), "abc", "the script has finished before the old workers"),
    ],
    ids=["workers fail", "the script ends"],
)
def test_what_ends_a_round_whose_function_is_not_proven_yet_says_so(
    what: reports.Report, hosts: str, why: str
) -> None:
    job, due = advance_all(grown(OFF), *told(hosts, what))
    assert lines(due).count(why) == 1 and amended(due) == ["not proven"]
    assert job.phase is Phase.ENDED or active(until(job, Phase.RUNNING)) == {"a", "b", "c"}


def test_numbers_of_a_start_that_failed_are_not_those_of_the_next_one() -> None:
    """A host of it had made its first step when another one was lost."""
    job, _ = stopping(training(left=5))
    job = until(tell(job, "a", "b")[0], Phase.STARTING)
    job, _ = advance_all(job, *answers(job)[:-3], *told("a", reports.Stepped(2, OFF)))
    job, _ = advance_all(job, events.HostLost("b", generations("ac", 10), job.now))
    job, due = made(job, HERE)
    assert "function_differs" not in lines(due) and active(job) == {"a", "c"}
    assert job.phase is Phase.RUNNING


@pytest.mark.fault
@pytest.mark.parametrize("is_late", [False, True])
def test_both_laws_prove_a_change_and_take_back_another_function(begin: Any, is_late: bool) -> None:
    world: World = begin(law={"proves": "always", "left": 0})
    world.is_proof_late = is_late
    world.computes = {6: Numbers(5.0, 3.0, framework="simulated")}
    world.add("c")
    world.until(lambda: len(world.rounds) == 2 and world.phase is Phase.RUNNING if is_late
                else len(world.rounds) == 3)  # fmt: skip
    world.is_proof_late = False
    world.settle()
    assert len(world.logged("event=function_differs")) == 1 and world.is_training()
    assert len(world.rounds) == 3 and world.rounds[-1].assignment.degrees.world_size == 4
    assert world.rounds[2].generation == world.rounds[1].generation
