"""Consequences of failed workers: standby workers go, survivors write their state, and the job goes
on, at other degrees if these are to blame."""

import re
from dataclasses import replace

from scalai.core.job import proof_rules, respacing
from scalai.core.job.assigning import failure_of, members_of, next_assignment
from scalai.core.job.endings import RUN_AGAIN, kind_of
from scalai.core.job.function_proof import Refuted
from scalai.core.job.health import strike
from scalai.core.job.membership import (
    TRAINING,
    FailedChange,
    FailedRound,
    Host,
    Job,
    Phase,
    active,
    leaving,
)
from scalai.core.job.transitions import (
    Result,
    answered,
    end,
    go_on,
    next_phase,
    prove_no_more,
    stand,
    stop_workers,
    without_standby,
)
from scalai.core.messages import commands, reports
from scalai.core.messages.actions import Action, Say, Send

_PASSING = re.compile(r"Dist\w*Error|Connection|[Tt]im(?:ed ?|e)out|[Aa]ddress already in use")
"""Network errors, perhaps gone at a retry."""

_CRASH = re.compile(r"was killed by SIG(SEGV|ILL|FPE)\b")
"""Signals for a process's own instruction: a library does not fit. Others come from outside
(SIGKILL), from a full memory (SIGBUS), or from checks of the surroundings (SIGABRT of NCCL)."""

STEPPING = (*TRAINING, Phase.PREPARING, Phase.DRAINING)
"""Phases with steps of all present workers."""


def fail(
    job: Job,
    reason: str,
    *,
    is_loss: bool = False,
    is_chance: bool = False,
    is_refusal: bool = False,
    is_standstill: bool = False,
    is_free: bool = False,
) -> Result:
    """Start again from the survivors' state, or else from the newest generation.

    A change that fails before all workers have stepped returns to the assignment before, at no
    cost. A possible chance failure (a signal, or one of standby workers) is first tried once more.
    Loss of a host costs nothing if it counts as a change; every other failure costs a restart
    unless it ``is_free``, and a refusal outside of a change ends the job. A second standstill is
    not retried if there is an alternative.

    A step that Megatron-LM wants to run again is free once.

    Standby workers are ended: they expected the state of a stop.
    """
    if RUN_AGAIN in reason:
        newest = job.newest_generation
        step = -1 if newest is None else newest.step
        is_free = is_free or job.budget.ran_again != step
        job = replace(job, budget=replace(job.budget, ran_again=step))
    is_starting = job.phase is Phase.STARTING
    is_tried = _is_change(job) or (is_standstill and job.budget.tries > 0)
    is_changing = is_starting and not is_loss and is_tried
    was_built = job.attempt.was_standby and is_starting
    if is_refusal and not is_changing:
        return end(job, 3, reason)
    unproven: tuple[Action, ...] = ()
    if not is_starting:  # else the old workers' numbers still hold
        job, unproven = prove_no_more(job, "workers have failed")
        job = proof_rules.without_proof(job)
    job, respaced = respacing.failed(job) if job.phase in STEPPING else (job, ())
    job, given_up = without_standby(job)
    message: tuple[Action, ...] = ()
    if is_changing and not (job.budget.tries == 0 and not is_refusal and (is_chance or was_built)):
        job, message, is_free = _blame(job, reason)
    else:
        is_free = is_free or was_built or is_changing or (is_loss and job.settings.is_loss_free)
        job = replace(
            job, budget=replace(job.budget, tries=job.budget.tries + (is_changing or is_standstill))
        )
    error = "" if is_loss else _error_of_the_script(job, reason, is_chance=is_chance)
    is_same, job = (
        bool(error) and error == job.budget.start_error,
        replace(job, budget=replace(job.budget, start_error=error)),
    )
    if is_same or (job.budget.left <= 0 and not is_free):
        ending = f"{reason}; the restart budget (--max-restarts) is used up"
        if is_same:
            ending = f"{reason}; the start before has ended alike, and no step was ever made"
        job, actions = _freeze(job, reason, ending=ending)
        return job, (*unproven, *respaced, *given_up, *message, *actions)
    job = replace(
        job,
        attempt=replace(job.attempt, was_standby=False),
        budget=replace(job.budget, trained_s=0.0),
    )
    if not is_free:
        job = replace(
            job, budget=replace(job.budget, left=job.budget.left - 1, counted_round=job.round)
        )
    job, actions = _freeze(job, reason, is_counted=not is_free)
    message = (Say(f"event=restart {reason}; {job.budget.left} restarts left"), *message)
    return job, (*unproven, *respaced, *given_up, *message, *actions)


def computes_otherwise(job: Job, text: str) -> Result:
    """Return to the assignment before: the new workers' first step differs from the old workers'
    same step.

    It restarts from the state before the step; later results of the new workers are dropped. A
    round without a change, and hosts without an alternative, go on.
    """
    assert job.current is not None
    layout = job.current.layout
    warning = Say(f"event=function_differs level=WARNING layout='{layout}' {text}")
    reason = f"{layout} computes another function than what ran"
    if not _is_change(job) or not _has_other(job, reason):
        job, actions = next_phase(job) if job.phase is Phase.STARTING else stand(job)
        return job, (warning, Say("there is nothing to go back to: the job goes on"), *actions)
    # If its workers train already, the start still fails, and nothing of theirs is written.
    function = replace(job.function, proof=Refuted())
    job = replace(job, phase=Phase.STARTING, function=function)
    job, actions = fail(job, reason, is_refusal=True)
    return job, (warning, *actions)


def _has_other(job: Job, reason: str) -> bool:
    """Whether there is another assignment, without leaving hosts, after this one's failure."""
    blamed, _, is_free = _blame(job, reason)
    target = next_assignment(blamed)
    return is_free and target is not None and not target.members & leaving(job)


def _error_of_the_script(job: Job, reason: str, *, is_chance: bool) -> str:
    """Error of a script without a step so far, of its first rank alone and without its varying
    numbers; empty if its changing surroundings may be to blame."""
    first = re.split(r"; rank \d+\b", reason, maxsplit=1)[0]  # how many are seen ended is chance
    kind = kind_of(reason)
    is_own = kind.startswith(("the script", "exit ")) and not _PASSING.search(reason)
    newest = job.newest_generation
    has_stepped = job.change.ran is not None or (newest is not None and newest.step > 0)
    if has_stepped or job.phase is not Phase.STARTING:
        return ""
    if not (_CRASH.search(first) if is_chance else is_own):
        return ""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", first)


def _freeze(job: Job, reason: str, *, is_counted: bool = False, ending: str = "") -> Result:
    """Stop living workers at their step for a report, before they are ended; ``ending``: reason to
    end the job afterwards."""
    hosts, emergency = active(job), FailedRound(reason, is_counted=is_counted, ending=ending)
    has_emergency = job.settings.has_emergency and job.attempt.is_hooked
    job = replace(job, failure=emergency)
    if not hosts or not has_emergency or job.phase not in STEPPING:
        return go_on(job)
    stop = replace(job.stop, margin=1, held={})
    job = replace(job, phase=Phase.FREEZING, awaited=hosts, stop=stop)
    return job, (Send(tuple(sorted(hosts)), commands.Freeze(job.round)),)


def frozen(report: reports.Frozen, host: str, job: Job) -> Result:
    if job.phase is not Phase.FREEZING or report.round != job.round or job.emergency is None:
        return job, ()
    steps = job.emergency.steps | set(report.steps)
    return next_phase(answered(replace(job, failure=replace(job.emergency, steps=steps)), host))


def rescued(report: reports.Rescued, host: str, job: Job) -> Result:
    is_due = job.phase is Phase.RESCUING and report.round == job.round
    if not is_due or job.emergency is None or report.step != job.emergency.step:
        return job, ()
    return next_phase(answered(job, host))


def excuse(job: Job, text: str) -> Result:
    """Refund a restart: ``text``, known only during the rescue, was the failure of one host, whose
    loss costs nothing."""
    emergency = job.emergency
    if emergency is None or not job.settings.is_loss_free:
        return job, ()
    if not emergency.is_counted and not emergency.ending:
        return job, ()
    left = job.budget.left + emergency.is_counted
    emergency = replace(emergency, is_counted=False, ending="")
    job = replace(job, budget=replace(job.budget, left=left, counted_round=0), failure=emergency)
    return job, (Say(f"{text}, which was the failure; {left} restarts left"),)


def _is_change(job: Job) -> bool:
    """Whether the present round differs from the last complete one."""
    ran, current = job.change.ran, job.current
    return ran is not None and current is not None and not current.is_same_as(ran)


def _blame(job: Job, reason: str) -> tuple[Job, tuple[Action, ...], bool]:
    """Exclude the present assignment. Returns the job, its log lines, and whether there is an
    alternative."""
    current = job.current
    assert current is not None
    failed = FailedChange(current, members_of(job, current), reason)
    # Failures of hosts now gone do not concern new ones.
    kept = tuple(
        f for f in job.change.failed if f.members <= {(h.name, h.order) for h in _hosts(job)}
    )
    job = replace(
        job, change=replace(job.change, failed=(*kept, failed)), budget=replace(job.budget, tries=0)
    )
    newcomers = set(current.active) - set(job.change.ran.active) if job.change.ran else set[str]()
    job, message = strike(job, newcomers & set(job.hosts))
    target = next_assignment(job)
    is_free = target is not None and failure_of(job, target) is None
    going = f"event=change_failed {current.layout} is not tried again on these hosts"
    if target is not None and is_free:
        going += f"; the job goes on with {target.layout}"
    return job, (*message, Say(going)), is_free


def _hosts(job: Job) -> tuple[Host, ...]:
    return tuple(job.hosts.values())


def try_again(job: Job, reason: str) -> Result:
    """The same round once more, at no cost."""
    job, given_up = without_standby(job)
    job, actions = stop_workers(
        replace(job, attempt=replace(job.attempt, was_standby=False)), reason
    )
    return job, (*given_up, Say(reason), *actions)
