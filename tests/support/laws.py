"""Jobs, choices and reports of the job's law, as its tests say them."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import Recompute
from scalai.core.job import membership as m
from scalai.core.job.resize import advance
from scalai.core.messages import events, reports
from scalai.core.messages.actions import Action, Say, Send
from scalai.core.tensors.collection import Collection

RECORDS = (
    "settings", "budget", "change", "attempt", "stop", "states", "copies", "health", "takeover",
)  # fmt: skip
"""Fields of a job that are records of its fields."""


def but(job: m.Job, **facts: Any) -> m.Job:
    """Return the job with these fields, of its own or of one of its records."""
    own = {field.name for field in fields(m.Job)}
    for name, value in facts.items():
        owners = [each for each in RECORDS if name in _names(getattr(job, each))]
        if name in own and not (name == "stop" and isinstance(value, int)):
            job = replace(job, **{name: value})
            continue
        (owner,) = owners
        job = replace(job, **{owner: replace(getattr(job, owner), **{name: value})})
    return job


def _names(record: object) -> set[str]:
    return {field.name for field in fields(record)} if is_dataclass(record) else set()


def made(**facts: Any) -> m.Job:
    """Return a job with these fields; ``assign`` is its choice of degrees."""
    return but(m.Job(m.JobSettings(facts.pop("assign"))), **facts)


def assign_all(minimum: int = 1, allowed: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> m.Assign:
    """Return a choice of the largest allowed number of workers."""

    def assign(hosts: tuple[tuple[str, int], ...], ran: m.Assignment | None) -> m.Assignment | None:
        world = max((n for n in allowed if n <= sum(s for _, s in hosts)), default=0)
        if len(hosts) < minimum or not world:
            return None
        workers, left = [], world
        for name, slots in hosts:
            workers.append((name, min(slots, left)))
            left -= workers[-1][1]
        return m.Assignment(tuple(workers), Degrees(1, 1, world), 1, f"dp={world}")

    return assign


def ran(degrees: Degrees, recompute: Recompute | None = None) -> m.Assignment:
    """Return what ran on one host."""
    return m.Assignment((("a", degrees.world_size),), degrees, None, "it ran", recompute)


def training(workers: str, idle: str = "", **facts: Any) -> m.Job:
    """Return a job that trains at step 25, on hosts of one slot each that have generation 2."""
    hosts = {name: m.Host(name, 1, number) for number, name in enumerate(workers + idle)}
    assign = assign_all(allowed=(len(workers),) if idle else (1, 2, 3, 4, 6, 8))
    current = assign(tuple((name, 1) for name in hosts), None)
    given = {
        "assign": assign, "max_hosts": len(hosts), "phase": m.Phase.RUNNING, "hosts": hosts,
        "joined": len(hosts), "round": 1, "last_round": 1, "current": current, "ran": current,
        "has_state": True, "generations": generations(workers, 2), "committing": 2,
        "newest": 25, "now": 100.0, "has_durable_dir": True,
    }  # fmt: skip
    return made(**{**given, **facts})


def generations(hosts: str, *numbers: int) -> tuple[m.Generation, ...]:
    """Return generations, each of ten times its number of steps, whole on hosts together."""
    return tuple(m.Generation(number, 10 * number, frozenset(hosts)) for number in numbers)


def advance_all(job: m.Job, *due: events.Event) -> tuple[m.Job, list[Action]]:
    """Return the job after these events, and all actions of them."""
    done: list[Action] = []
    for event in due:
        job, wanted = advance(job, event)
        done += wanted
    return job, done


def told(hosts: str, *said: reports.Report) -> list[events.Event]:
    """Return each report by each of these hosts, one report after the other."""
    return [events.Reported(host, each) for each in said for host in hosts]


def ticked(job: m.Job, seconds: float = 1.0) -> tuple[m.Job, list[Action]]:
    return advance_all(job, events.Ticked(job.now + seconds, job.newest))


def answers(job: m.Job) -> list[events.Event]:
    """Return how the awaited hosts and the coordinator answer in a phase, if all goes well."""
    hosts, round, stop = "".join(sorted(job.awaited)), job.round, job.stop.step
    match job.phase:
        case m.Phase.BUILDING:
            assert job.change.standby is not None
            return told(hosts, reports.Built(job.change.standby.round))
        case m.Phase.PREPARING:
            return told(hosts, reports.Prepared(round, stop, job.newest))
        case m.Phase.DRAINING:
            return told(hosts, reports.Arrived(round, stop))
        case m.Phase.SNAPSHOTTING:
            judged = events.Judged(True, stop, 9 + round, m.active(job))
            return [*told(hosts, reports.Sealed(round, "stop", "")), judged]
        case m.Phase.COMMITTING:
            assert job.states.committing is not None
            return told(hosts, reports.Committed(job.states.committing))
        case m.Phase.STOPPING:
            return told(hosts, reports.Stopped(round, stop))
        case m.Phase.STARTING:
            started = told(hosts, published(round), restored(round))
            return [*started, events.Proven(round), *told(hosts, reports.Stepped(round))]
    raise AssertionError(job.phase)


def until(job: m.Job, phase: m.Phase, done: list[Action] | None = None) -> m.Job:
    """Return the job once it is in this phase, if all goes well; ``done`` gets all actions."""
    for _ in range(20):
        for event in answers(job) if job.phase is not phase else ():
            was = job.phase
            job, due = advance(job, event)
            if done is not None:
                done += due
            if job.phase is phase or (job.phase is not was and was is not m.Phase.STARTING):
                break
        if job.phase is phase:
            return job
    raise AssertionError((phase, job))


def at(phase: m.Phase, job: m.Job | None = None) -> m.Job:
    """Return a job of two hosts that is in this phase of a change to one worker."""
    job, _ = advance_all(job or training("ab"), events.Rescaled(assign_all(allowed=(1,)), 100.0))
    return until(job, phase)


def joined(job: m.Job, name: str, slots: int = 1, **how: Any) -> events.HostJoined:
    """Return the join of a host that brings nothing."""
    return events.HostJoined(name, slots, job.states.generations, False, job.now, **how)


def published(round: int) -> reports.Published:
    return reports.Published(round, ())


def restored(round: int) -> reports.Restored:
    """Return the report of a host whose workers hold no tensors."""
    return reports.Restored(round, Collection.of([]), np.zeros(0, np.uint64), {}, 0, 0)


def ordered(action: Action) -> Any:
    """Return the command of an order, and other actions as they are."""
    return action.command if isinstance(action, Send) else action


def lines(due: list[Action]) -> str:
    """Return what is said, one line each."""
    return "\n".join(action.text for action in due if isinstance(action, Say))


def kinds(due: list[Action]) -> list[type]:
    """Return the kinds of commands and of other actions, but for what is said."""
    return [type(ordered(action)) for action in due if not isinstance(action, Say)]
