"""The rules for hosts that have a health check (``--health-check``): which are asked, when, and
what comes of the answer.

Who is asked runs no workers until it has passed. It stays in the job, and its store serves. The
others wait for a first answer for a moment, and train on without it then.
"""

from collections.abc import Iterable
from dataclasses import replace

from scalai.core.job.checks import Check
from scalai.core.job.deadlines import CHECK_AGAIN_S, LONGEST_CHECK_AGAIN_S
from scalai.core.job.membership import Job, Phase
from scalai.core.job.transitions import Result, changed, consider
from scalai.core.messages import events
from scalai.core.messages.actions import Action, CheckHealth, Say


def joined(job: Job, host: str) -> Result:
    """A host's agent has come: it is asked before it runs workers, whatever was asked before."""
    left = {name: check for name, check in job.checks.items() if name != host}
    return ask(replace(job, checks=left), [host], "it joins the job")


def ask(job: Job, hosts: Iterable[str], reason: str) -> Result:
    """Ask those of the hosts that have a check, and are not being asked already."""
    checks, order, due = dict(job.checks), job.last_check, list[Action]()
    for host in sorted(hosts):
        has_check = host in job.hosts and job.hosts[host].has_check
        before = checks.get(host)
        if not has_check or (before is not None and before.is_asked):
            continue
        order += 1
        failures, why = (before.failures, before.reason) if before else (0, "")
        checks[host] = Check(order, job.now, failures=failures, reason=why)
        due.append(CheckHealth((host,), order, reason))
    return replace(job, checks=checks, last_check=order), tuple(due)


def ask_again(job: Job) -> Result:
    """Ask those whose pause is over."""
    due = [
        host
        for host, check in job.checks.items()
        if not check.is_asked and check.again_at <= job.now
    ]
    return ask(job, due, "it failed its check before") if due else (job, ())


def checked(event: events.HealthChecked, job: Job) -> Result:
    """A host has answered."""
    check = job.checks.get(event.host)
    if check is None or check.order != event.order or not check.is_asked:
        return job, ()
    if event.is_healthy:
        left = {name: kept for name, kept in job.checks.items() if name != event.host}
        job = replace(job, checks=left)
        has_begun = job.phase is Phase.WAITING and job.current is not None
        job, actions = consider(job) if has_begun else changed(job, job.now)
        return job, (Say(f"host {event.host} passes its health check"), *actions)
    failures = check.failures + 1
    pause_s = min(CHECK_AGAIN_S * 2.0 ** (failures - 1), LONGEST_CHECK_AGAIN_S)
    failed = replace(
        check, is_asked=False, failures=failures, again_at=job.now + pause_s, reason=event.reason
    )
    job = replace(job, checks={**job.checks, event.host: failed})
    said = Say(
        f"host {event.host} fails its health check ({event.reason}): it runs no workers, and is "
        f"asked again after {pause_s:.0f} s"
    )
    # Whoever waited for the answer goes on without it.
    job, actions = consider(job) if job.phase is Phase.WAITING else (job, ())
    return job, (said, *actions)
