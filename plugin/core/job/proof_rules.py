"""Rules of the proof of a function across a change: a further step of the old workers, without its
update, and the comparison of both sides' numbers."""

from collections.abc import Sequence
from dataclasses import replace

from scalai.core.job.assigning import next_assignment
from scalai.core.job.function_proof import (
    PROOF_S,
    FunctionProof,
    Made,
    Numbers,
    ProofAsked,
    StepComparison,
    Waiting,
    compare,
    merged,
    remade,
)
from scalai.core.job.membership import Assignment, Job, Phase, active, leaving
from scalai.core.job.spacing import estimate
from scalai.core.messages import reports
from scalai.core.messages.actions import Action, AmendReport, Say

LEAST_STEPS = 2
"""Steps beyond the drain that a notice must leave for a proof."""
UNTOLD = "the old workers have not told of their step yet"


def key_of(job: Job, assignment: Assignment) -> str:
    """Key of an assignment's function."""
    size = assignment.micro_batch_size
    return f"{assignment.layout} micro_batch={size or '-'} {job.function.framework}"


def agreed(job: Job) -> Job:
    """The job after an agreed stop: if a proof is due, its workers make one more step behind it."""
    job = without_proof(job)
    target = (
        job.change.standby.assignment if job.change.standby is not None else next_assignment(job)
    )
    if target is None or not _is_due(job, target):
        return job
    proof = ProofAsked(job.round, active(job))
    return replace(job, function=replace(job.function, proof=proof))


def without_proof(job: Job) -> Job:
    """The job without a proof: the workers do not stop, or do not go on from the stop, so the two
    sides share no step."""
    function = replace(job.function, proof=None, after=None, found="", seconds=0.0)
    return job if function == job.function else replace(job, function=function)


def started(job: Job, *, is_from_stop: bool) -> Job:
    """The job at the start of its next round, with a first step behind the stop or of an older
    state."""
    job = job if is_from_stop else without_proof(job)
    asked = job.function.asked
    proof = None if asked is None else replace(asked, until=job.now + PROOF_S)
    return replace(job, function=replace(job.function, proof=proof, after=None))


def _is_due(job: Job, target: Assignment) -> bool:
    function, current = job.function, job.current
    if job.settings.proves == "never" or not function.framework or current is None:
        return False
    if not job.settings.is_elastic or not job.attempt.is_hooked or target.is_same_as(current):
        return False
    needs = estimate(job.change.pace, job.now, 0)
    needs_s = needs.total_s + LEAST_STEPS * needs.step_s
    hosts = (job.hosts[name] for name in leaving(job))
    if any(host.leave_by is not None and host.leave_by - job.now < needs_s for host in hosts):
        return False
    return job.settings.proves == "always" or key_of(job, target) not in function.known


def is_of_proof(report: reports.Stepped, job: Job) -> bool:
    """Whether a report is of the step behind the stop."""
    asked = job.function.asked
    is_past = report.round != job.round or job.phase is not Phase.STARTING
    return asked is not None and report.round == asked.round and is_past


def recorded(report: reports.Stepped, host: str, job: Job) -> Job:
    function, asked = job.function, job.function.asked
    assert asked is not None
    before = merged(asked.before, report.numbers)
    asked = replace(asked, before=before, awaited=asked.awaited - {host})
    seconds = before.seconds if before is not None else 0.0
    proof = Waiting(asked) if function.is_waiting else asked
    return replace(job, function=replace(function, proof=proof, seconds=seconds))


def stepped(report: reports.Stepped, job: Job) -> Job:
    """Record the first step of a host of the new round."""
    if report.numbers is None:
        return job
    after = merged(job.function.after, report.numbers)
    return replace(job, function=replace(job.function, after=after))


def must_wait(job: Job) -> bool:
    """Whether old workers have yet to report the step made by the new ones."""
    asked, after = job.function.asked, job.function.after
    is_known = after is not None and not after.obstacle
    if asked is None or not is_known:
        return False
    return bool(asked.awaited & job.hosts.keys()) and job.now < asked.until


def judge(job: Job) -> tuple[Job, StepComparison | None, tuple[Action, ...]]:
    """Compare, if there is a step to compare: every rank of the new round has stepped. The new
    workers train on until the old ones report."""
    asked = job.function.asked
    if asked is not None and must_wait(job):
        waiting = replace(job.function, proof=Waiting(asked), found=f"not proven: {UNTOLD}")
        return replace(job, function=waiting), None, ()
    is_late = job.function.is_waiting
    job, verdict, lines = _judge(job)
    function = replace(job.function, proof=None, after=None)
    amended = (AmendReport(function.found, function.seconds),) if is_late else ()
    return replace(job, function=function), verdict, (*lines, *amended)


def _judge(job: Job) -> tuple[Job, StepComparison | None, tuple[Action, ...]]:
    function, current = job.function, job.current
    assert current is not None
    told = function.after or Numbers()
    job = replace(
        job,
        function=replace(
            function,
            framework=told.framework,
            dtype=told.dtype,
            is_random=told.is_random or bool(told.obstacle),
        ),
    )
    framework = told.framework
    if (asked := function.asked) is None:
        if job.change.ran is None and framework:  # what the job begins with is the measure
            job = _known(job, current)
        is_change = job.change.ran is not None and not current.has_layout_of(job.change.ran)
        if (
            is_change
            and not framework
            and job.settings.proves != "never"
            and job.settings.is_elastic
        ):
            return _unproven(job, "nothing tells what the steps of the script compute")
        return job, None, ()
    verdict = compare(asked.before, function.after, function.remade.spread)
    if verdict.is_same is None:
        return _unproven(job, verdict.text)
    found = "proven" if verdict.is_same else "differs"
    job = replace(job, function=replace(job.function, found=f"{found}: {verdict.text}"))
    if not verdict.is_same:
        return job, verdict, ()
    line = Say(f"event=function_proven layout='{current.layout}' {verdict.text}")
    return _known(job, current), verdict, (line,)


def unproven(job: Job, why: str) -> tuple[Job, tuple[Action, ...]]:
    """The job without a wait for old workers, and its log lines."""
    job, _, lines = _unproven(job, why)
    amended = AmendReport(job.function.found, job.function.seconds)
    return without_proof(job), (*lines, amended)


def made(job: Job, made: Sequence[Made]) -> tuple[Job, str]:
    """The job after these steps of its present round, and a log line: they may repeat lost steps of
    an earlier round."""
    if job.current is None:
        return job, ""
    layout = f"{job.current.layout} micro_batch={job.current.micro_batch_size or '-'}"
    function = job.function
    known, text = remade(
        function.remade, job.round, layout, function.dtype, made, is_random=function.is_random
    )
    return replace(job, function=replace(function, remade=known)), text


def _known(job: Job, assignment: Assignment) -> Job:
    known = dict.fromkeys((*job.function.known, key_of(job, assignment)))
    return replace(job, function=replace(job.function, known=tuple(known)))


def _unproven(job: Job, why: str) -> tuple[Job, StepComparison | None, tuple[Action, ...]]:
    """Keep the change; log each reason of a missing proof once."""
    function: FunctionProof = job.function
    is_new = why != function.said
    job = replace(job, function=replace(function, found=f"not proven: {why}", said=why))
    return job, None, (Say(f"event=function_unproven {why}"),) if is_new else ()
