"""Rules for unfit hosts: failed health checks (``--health-check``), and hosts that come and go or
break every round they join.

A host runs no workers before it has passed its check; the others wait a moment for its first
answer, and train on without it. A flapping host is kept out of rounds, longer each time. All unfit
hosts stay in the job: their stores serve, and a barred one is used at once if nothing fits without
it.
"""

from collections.abc import Iterable
from dataclasses import replace

from scalai.core.job.deadlines import CHECK_AGAIN_S, LONGEST_CHECK_AGAIN_S
from scalai.core.job.fitness import Check
from scalai.core.job.membership import Job, Phase
from scalai.core.job.transitions import Result, changed, consider
from scalai.core.messages import commands, reports
from scalai.core.messages.actions import Action, Say, Send


def joined(job: Job, host: str) -> Result:
    """Check a joined host before it runs workers, whatever the earlier checks."""
    left = {name: check for name, check in job.health.checks.items() if name != host}
    return ask(replace(job, health=replace(job.health, checks=left)), [host], "it joins the job")


def ask(job: Job, hosts: Iterable[str], reason: str) -> Result:
    """Check these hosts, except those without a check or with one in progress."""
    checks, order, due = dict(job.health.checks), job.health.last_check, list[Action]()
    for host in sorted(hosts):
        has_check = host in job.hosts and job.hosts[host].has_check
        before = checks.get(host)
        if not has_check or (before is not None and before.is_asked):
            continue
        order += 1
        failures, why = (before.failures, before.reason) if before else (0, "")
        checks[host] = Check(order, job.now, failures=failures, reason=why)
        due.append(Send((host,), commands.CheckHealth(order, reason)))
    return replace(job, health=replace(job.health, checks=checks, last_check=order)), tuple(due)


def ask_again(job: Job) -> Result:
    """Check hosts after their pause."""
    due = [
        host
        for host, check in job.health.checks.items()
        if not check.is_asked and check.again_at <= job.now
    ]
    return ask(job, due, "it failed its check before") if due else (job, ())


def checked(report: reports.HealthChecked, host: str, job: Job) -> Result:
    """Handle a host's answer."""
    check = job.health.checks.get(host)
    if check is None or check.order != report.order or not check.is_asked:
        return job, ()
    if report.is_healthy:
        left = {name: kept for name, kept in job.health.checks.items() if name != host}
        job = replace(job, health=replace(job.health, checks=left))
        has_begun = job.phase is Phase.WAITING and job.current is not None
        job, actions = consider(job) if has_begun else changed(job, job.now)
        return job, (Say(f"host {host} passes its health check"), *actions)
    failures = check.failures + 1
    pause_s = min(CHECK_AGAIN_S * 2.0 ** (failures - 1), LONGEST_CHECK_AGAIN_S)
    failed = replace(
        check, is_asked=False, failures=failures, again_at=job.now + pause_s, reason=report.reason
    )
    job = replace(job, health=replace(job.health, checks={**job.health.checks, host: failed}))
    said = Say(
        f"event=health_failed host={host} fails its health check ({report.reason}): it runs no "
        f"workers, and is asked again after {pause_s:.0f} s"
    )
    # Hosts that waited for the answer go on.
    job, actions = consider(job) if job.phase is Phase.WAITING else (job, ())
    return job, (said, *actions)


STRIKES = 3
"""Losses of a host, or rounds that failed as it joined, before it waits."""
WINDOW_S = 3600.0
"""Age of a strike that no longer counts, in seconds."""
LONGEST_S = 3600.0
HANGS = 2
"""Hangs at which a host was behind before it waits."""
HANG_WAITS = 4
"""First wait, as a multiple of the others' wait for it."""


def strike(job: Job, hosts: Iterable[str]) -> tuple[Job, tuple[Action, ...]]:
    """The job after losses of these hosts, or rounds that they made fail; with log lines."""
    strikes = {name: _recent(job, times) for name, times in job.health.strikes.items()}
    strikes = {name: times for name, times in strikes.items() if times}
    barred, lines = dict(job.health.barred), []
    for host in sorted(hosts):
        strikes[host] = (*strikes.get(host, ()), job.now)
        beyond = len(strikes[host]) - STRIKES
        if beyond >= 0 and job.settings.quarantine_s:
            waits_s = min(job.settings.quarantine_s * 2.0**beyond, LONGEST_S)
            barred[host] = job.now + waits_s
            lines.append(
                Say(
                    f"host {host} was lost or failed to join {len(strikes[host])} times within "
                    f"{WINDOW_S / 60:.0f} minutes: the others go on without it for {waits_s:.0f} s"
                )
            )
    return replace(job, health=replace(job.health, strikes=strikes, barred=barred)), tuple(lines)


def bar_who_hangs(
    job: Job, hosts: Iterable[str], waited_s: float
) -> tuple[Job, tuple[Action, ...]]:
    """The job after these hosts kept the others waiting; with log lines. A new join resets a host's
    count."""
    hangs, barred, lines = dict(job.health.hangs), dict(job.health.barred), []
    for host in sorted(hosts):
        hangs[host] = hangs.get(host, 0) + 1
        if hangs[host] < HANGS or not job.settings.quarantine_s:
            continue
        least_s = max(job.settings.quarantine_s, HANG_WAITS * waited_s)
        waits_s = max(least_s, min(least_s * 2.0 ** (hangs[host] - HANGS), LONGEST_S))
        barred[host] = max(barred.get(host, 0.0), job.now + waits_s)
        lines.append(
            Say(
                f"host {host} has kept the others waiting at {hangs[host]} hangs: they go on "
                f"without it for {waits_s:.0f} s, or until its agent is started anew"
            )
        )
    return replace(job, health=replace(job.health, hangs=hangs, barred=barred)), tuple(lines)


WRONG_S = 86400.0
"""Wait of a host that has computed wrongly, in seconds: until a person has looked at it."""


def bar_for_wrong_results(job: Job, host: str) -> Result:
    """Leave out a host that has computed wrongly, until its agent is started anew; nothing if it is
    left out already."""
    if job.health.barred.get(host, 0.0) > job.now + LONGEST_S:
        return job, ()
    barred = {**job.health.barred, host: job.now + WRONG_S}
    # Known as a host that hangs is: a new join ends the wait.
    hangs = {host: 0, **job.health.hangs}
    text = (
        f"event=wrong_result host={host} has computed a step twice, with two "
        "results: the others go on without it until its agent is started anew. Test its devices"
    )
    return replace(job, health=replace(job.health, barred=barred, hangs=hangs)), (Say(text),)


def joined_anew(job: Job, host: str) -> Job:
    """The job after a host's new agent: its hangs are over, and its flapping still counts."""
    if host not in job.health.hangs:
        return job
    is_flapping = len(_recent(job, job.health.strikes.get(host, ()))) >= STRIKES
    hangs = {name: count for name, count in job.health.hangs.items() if name != host}
    barred = {n: until for n, until in job.health.barred.items() if n != host or is_flapping}
    return replace(job, health=replace(job.health, hangs=hangs, barred=barred))


def _recent(job: Job, times: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(at for at in times if job.now - at < WINDOW_S)


def pardon(job: Job) -> Job:
    """The job without expired bars."""
    barred = {host: until for host, until in job.health.barred.items() if until > job.now}
    return (
        job
        if len(barred) == len(job.health.barred)
        else replace(job, health=replace(job.health, barred=barred))
    )
