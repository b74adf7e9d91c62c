"""Answers calls of a job's agents and of persons: the coordinator without its sockets.

Commands to an agent are numbered and wait for the acknowledgement of its ``Poll``; reports of
agents are numbered too. So a broken connection costs nothing.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from scalai.core.degrees.passes import AS_GIVEN
from scalai.core.errors import EndedError, ScalaiError, StaleError, UsageError
from scalai.core.host.standby import NEVER
from scalai.core.job.assigning import failure_of, placed
from scalai.core.job.membership import (
    TRAINING,
    Assignment,
    Job,
    Phase,
    active,
    present,
    staying,
)
from scalai.core.job.transitions import UNHOOKED, missing
from scalai.core.jsonable import Json
from scalai.core.messages import events
from scalai.core.messages.commands import Exit
from scalai.core.messages.reports import (
    Attached,
    Doubted,
    Examined,
    Grown,
    Leaving,
    Report,
    Sealed,
)
from scalai.core.messages.shared import JsonText
from scalai.core.planner.reconfiguration import schedule
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator import control_file
from scalai.launch.coordinator.agent_events import AgentEvents, Manifests
from scalai.launch.coordinator.calls import (
    AgentCall,
    Bye,
    CommandsDue,
    CoordinatorRequest,
    Farewell,
    Join,
    Joined,
    Poll,
    Tell,
    read_part,
    shared,
)
from scalai.launch.coordinator.joins import Admission
from scalai.launch.coordinator.live_job import LiveJob, SayLine
from scalai.launch.coordinator.losses import AgentLosses, Patience, PortProbe, tick_s
from scalai.launch.coordinator.members import Member
from scalai.launch.coordinator.person_calls import ReadReports, ReadSpec, Resume, Scale, Status
from scalai.launch.coordinator.rendezvous_store import RendezvousStores
from scalai.launch.coordinator.sight import Lookout
from scalai.runtime.calls import Peer
from scalai.store.manifest import manifest_of_bytes
from scalai.store.places import check_host

READS = (Status, ReadSpec, ReadReports, Farewell)
"""Calls without changes: their failure does not harm the job."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was not carried out; ``at``: seconds since 1970."""

    who: str
    asked: str
    why: str
    at: float


class Desk:
    """Membership, generation numbers and commands of one job. It opens nothing.

    Args:
        spec: The job; agents with another one are refused.
        interface: Address of the workers' rendezvous.
        patience: Waits for absent agents.
        probe: Detects ended agents; None: no detection.

    Attributes:
        live: The job; callers hold ``lock``.
    """

    def __init__(
        self,
        spec: JobSpec,
        interface: str,
        stores: RendezvousStores,
        say: SayLine,
        patience: Patience,
        term: int = 1,
        *,
        is_successor: bool = False,
        probe: PortProbe | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._stores, self._patience = spec, stores, patience
        self.lock = threading.RLock()
        self._reading = threading.Lock()
        """Held to read one manifest at a time: more at once are no faster, and delay other
        calls."""
        self.live = LiveJob(
            spec,
            interface,
            stores,
            say,
            self.lock,
            term,
            clock,
            is_successor=is_successor,
            may_retire=lambda: self.may_retire(),
            is_alone=lambda: self.is_alone(),
        )
        self._admission = Admission(spec, self.live)
        self._agent_events = AgentEvents(self.live)
        self._probe = probe
        self._losses = AgentLosses(self.live, patience, probe)
        self._kept: list[tuple[Member, str, Report, Manifests]] = []
        """Reports that wait until the round in progress is known."""
        self._refusal: Refusal | None = None

    def may_retire(self) -> bool:
        """Whether no other run can read the durable directory."""
        return True

    def is_alone(self) -> bool:
        """Whether no other machine can have the job's next coordinator."""
        return True

    def tick_s(self) -> float:
        """Interval of ticks, in seconds."""
        return tick_s(len(self.live.members))

    def tick(self) -> None:
        """Lose dead agents, and give the law the time. Callers hold the lock."""
        live = self.live
        try:
            self._losses.look()
            members = live.members
            live.feed(events.Ticked(live.clock(), members.newest(), members.stalled()))
            self._hear_kept()
        except Exception as error:  # our own slip: agents would wait for an ended loop
            live.crash(error)

    # ------------------------------------------------------------------ calls of agents

    def handle(self, peer: Peer, request: CoordinatorRequest) -> object:
        """Answer a call.

        Raises:
            UsageError: It is refused.
            StaleError: The caller is not in the job (any more).
        """
        try:
            if request.job not in (None, self._spec.job):
                if isinstance(request, Farewell):
                    return None
                raise self._of_another_job(request)
            if not isinstance(request, AgentCall):
                return self._handle(peer, request)
            # Before any lock: a lock's holder makes no agent seem silent.
            with self.live.members.in_hand(request.host, request.incarnation, peer):
                return self._handle(peer, request)
        except UsageError as error:
            match request:
                case Join(host=host) if not isinstance(error, EndedError):
                    self._refused(f"host {host}", "to join", str(error))
                case Scale(dry_run=False):
                    asked = _asked(request.nproc, request.nnodes, request.degrees)
                    self._refused("a person", f"for {asked}", str(error))
                case Resume(generation, dry_run=False):
                    self._refused("a person", f"to resume generation {generation}", str(error))
            raise

    def note_refusal(self, who: str, asked: str, why: str) -> None:
        """Record a request that was not carried out. Any thread may call it."""
        self._refusal = Refusal(who, asked, why, time.time())

    def _refused(self, who: str, asked: str, why: str) -> None:
        self.note_refusal(who, asked, why)
        self.live.log(f"event=refused who={who!r} asked={asked!r} {why}")

    def _handle(self, peer: Peer, request: CoordinatorRequest) -> object:
        if isinstance(request, Join) and request.underway is None:  # else its workers have met
            self._stores.wait_ready()  # without the lock: it delays nobody else
        manifests = self._read(request)  # likewise
        with self.lock:
            try:
                return self._answer(peer, request, manifests)
            except ScalaiError:
                raise
            except Exception as error:  # our own slip, and half of a change may be made
                if not isinstance(request, READS):
                    self.live.crash(error)
                raise

    def _read(self, request: CoordinatorRequest) -> Manifests:
        """Manifests of a call by their packed form. Raises ``StoreError`` for an unreadable one."""
        found: tuple[bytes, ...] = ()
        host = request.host if isinstance(request, AgentCall) else ""
        match request:
            case Join():
                brought = (*request.parts, *request.sealed)
                with self._reading:
                    return {each: read_part(each, request.hosts, host) for each in brought}
            case Tell():
                match request.report.message:
                    case Sealed(manifest=bytes(part)) | Grown(manifest=bytes(part)):
                        found = (part,)
                    case Doubted(manifest=bytes(part)) | Examined(manifest=bytes(part)):
                        found = (part,)
                    case Attached(manifests=parts):
                        found = parts
        if not found:
            return {}
        with self._reading:
            return {each: shared(manifest_of_bytes(each, host)) for each in found}

    def _of_another_job(self, request: CoordinatorRequest) -> ScalaiError:
        """Refusal of a call for another job; its agents join anew, and are refused for good."""
        is_member = isinstance(request, AgentCall) and not isinstance(request, Join)
        return (StaleError if is_member else UsageError)(
            f"job {request.job!r} is called, and the coordinator of job {self._spec.job!r} listens "
            "here. Look for that of the other: it may have ended."
        )

    def _answer(self, peer: Peer, request: CoordinatorRequest, manifests: Manifests) -> object:
        match request:
            case Join():
                return self._join(peer, request, manifests)
            case Poll():
                return self._poll(peer, request)
            case Tell():
                self._tell(peer, request, manifests)
            case Bye(_, host, incarnation):
                self._bye(host, incarnation)
            case Farewell(_, host, incarnation):
                return self._farewell(host, incarnation)
            case Status():
                return JsonText.of(self._status())
            case Scale(nproc, nnodes, degrees, dry_run):
                answer = scale(self.live, nproc, nnodes, degrees, dry_run=dry_run)
                return JsonText.of(answer if dry_run else self._kept_by_hosts(answer))
            case Resume(generation, dry_run):
                return JsonText.of(resume(self.live, generation, dry_run=dry_run))
            case ReadSpec():
                return JsonText.of(self._spec.to_json())
            case ReadReports():
                return JsonText.of(self._reports())
        return None

    def _kept_by_hosts(self, answer: dict[str, Json]) -> dict[str, Json]:
        """Answer to a person's request, once hosts have kept it."""
        if self.live.memory.wait_kept(self._patience.kept_s):
            return answer
        late = "; hosts have yet to hear of it: ask again if the coordinator is lost just now"
        return {**answer, "reason": f"{answer['reason']}{late}"}

    def obey(self, order: control_file.Order) -> str:
        """Carry out an order of the control file. Returns the answer; raises ``UsageError``."""
        with self.lock:
            try:
                return self._obey(order)
            except ScalaiError:
                raise
            except Exception as error:  # our own slip, and half of a change may be made
                self.live.crash(error)
                raise

    def _obey(self, order: control_file.Order) -> str:
        match order:
            case Scale(nproc, nnodes, degrees):
                return str(scale(self.live, nproc, nnodes, degrees, dry_run=False)["reason"])
            case control_file.Drain(host):
                return self._drain(host)
            case control_file.Snapshot():
                return snapshot(self.live)

    def _drain(self, host: str) -> str:
        _refuse_while_taking_over(self.live.state)
        if host not in self.live.members:
            there = ", ".join(sorted(self.live.members.hosts())) or "none"
            raise UsageError(f"host {host!r} is not in the job. Hosts: {there}.")
        self._agent_events.hear(host, Leaving("the control file"), {})
        return f"host {host} drains"

    def gone(self, peer: Peer) -> None:
        """Handle the end of a connection."""
        with self.lock:
            self.live.members.unlinked(peer)

    def _join(self, peer: Peer, join: Join, manifests: Manifests) -> Joined:
        """Admit an agent, as ``Admission.join``; a second time it changes nothing."""
        members, host = self.live.members, join.host
        check_host(host)
        spec = _spec_of(join.spec)
        present = members[host] if host in members else None
        if present is not None and present.incarnation == join.incarnation:
            present.linked(peer)
            return self._admission.answer()
        replaces = present is not None and self._losses.is_replaceable(present, join.store)
        answer = self._admission.join(peer, join, manifests, spec, replaces=replaces)
        members.name(host, join.incarnation, join.store)
        if self._probe is not None:
            self._probe.greet(host, members[host])
        self._hear_kept()
        return answer

    def _poll(self, peer: Peer, poll: Poll) -> CommandsDue:
        """New commands for the agent, once there are any."""
        members = self.live.members
        agent = members.find(poll.host, poll.incarnation)
        agent.linked(peer)
        agent.acknowledge(poll.received)
        is_present = poll.round == self.live.state.round
        agent.stalled = poll.stalled if is_present else None
        if is_present:
            agent.newest = poll.newest
            if poll.made:
                self.live.note_made(poll.made)
            if poll.pace is not None:
                self.live.note_pace(poll.host, *poll.pace)
        assert agent.ready is not None
        keep_s = self._patience.to_keep_s(len(members))
        if not agent.has_commands and not agent.is_dismissed:
            agent.ready.wait(max(0.0, min(poll.keep_s, keep_s)))
            # It may have been lost or replaced meanwhile.
            agent = members.find(poll.host, poll.incarnation)
        return agent.waiting(members.term, keep_s)

    def _tell(self, peer: Peer, tell: Tell, manifests: Manifests) -> None:
        """Handle a report once; an earlier number is a repetition."""
        agent = self.live.members.find(tell.host, tell.incarnation)
        agent.linked(peer)
        if tell.number > agent.last_report:
            agent.last_report = tell.number
            if tell.host in self.live.members:  # else it was released in between
                self._kept.append((agent, tell.host, tell.report.message, manifests))
                self._hear_kept()

    def _hear_kept(self) -> None:
        """Handle reports once the job's round is known."""
        members = self.live.members
        while self._kept and self.live.state.takeover.pending is None:
            agent, host, report, manifests = self._kept.pop(0)
            if host in members and members[host] is agent:
                self._agent_events.hear(host, report, manifests)

    def _bye(self, host: str, incarnation: str) -> None:
        """Lose an agent that ends by itself, without a wait."""
        self.live.members.find(host, incarnation)
        if host in self.live.members:
            self.live.log(f"event=bye host={host}")
            self.live.lose(host)

    def _farewell(self, host: str, incarnation: str) -> Exit | None:
        """Exit of an ended job for a former agent; None while it goes on, and for an agent of
        another job here: this end says nothing of its state."""
        live = self.live
        if live.farewell is None or not live.members.has_had(host, incarnation):
            return None
        live.log(f"event=farewell host={host}: it was cut off, and learns that the job is over")
        return live.farewell

    def _reports(self) -> Json:
        folder, reports = self._spec.report_dir, self.live.timeline.reports
        return {
            "job": self._spec.job,
            "reports": list(reports),
            "most": reports.maxlen,
            "report_dir": None if folder is None else str(folder.absolute()),
            "directory": str(Path.cwd()),
            "script_args": list(self._spec.options.script_args),
            "step": self.live.members.newest(),
            "at": time.time(),
        }

    def _status(self) -> Json:
        job, reports = self.live.state, self.live.timeline.reports
        stalled, every = self.live.members.stalled(), job.spacing.every
        newest, sight = job.newest_generation, Lookout(self.live).look()
        end = self.live.farewell
        return {
            "job": self._spec.job,
            "end": None if end is None else {"code": end.code, "reason": end.reason},
            "term": self.live.members.term,
            "phase": job.phase.value,
            "phase_s": round(self.live.clock() - self.live.entered_at, 1),
            "is_training": job.phase in TRAINING,
            "round": job.round,
            "world_size": job.current.degrees.world_size if job.current else 0,
            "degrees": str(job.current.degrees) if job.current else None,
            **(job.current.passes if job.current else AS_GIVEN).to_json(),
            "reason": job.current.reason if job.current else None,
            "hosts": {h: {"slots": s} for h, s in staying(job)},
            "workers": dict(job.current.workers) if job.current else {},
            "generation": newest.number if newest else None,
            "generation_step": newest.step if newest else None,
            "generation_age_s": sight.generation_age_s,
            "next_snapshot_step": newest.step + every if newest and every else None,
            "host_loss": _host_loss(job, sight.step),
            "idle_hosts": _idle(job),
            "step": self.live.members.newest(),
            "no_progress": {host: asdict(each) for host, each in stalled.items()},
            "held": dict(job.stop.held) if job.phase is Phase.PREPARING else {},
            "missing": missing(job) if job.phase is Phase.WAITING else None,
            "restarts_left": job.budget.left,
            "unhealthy_hosts": {
                host: check.reason or "is being checked"
                for host, check in job.health.checks.items()
            },
            "waiting_hosts": {h: round(until - job.now) for h, until in job.health.barred.items()},
            "failed_changes": [f"{f.assignment.layout}: {f.reason}" for f in job.change.failed],
            "last_failure": self.live.last_failure,
            "last_refusal": None if self._refusal is None else asdict(self._refusal),
            "last_resize": reports[-1] if reports else None,
        }


def _idle(job: Job) -> dict[str, Json]:
    """Hosts without workers, each with the reason."""
    found: dict[str, Json] = {}
    for name, host in job.hosts.items():
        if job.current is not None and name in job.current.members:
            continue
        check, until = job.health.checks.get(name), job.health.barred.get(name)
        if host.is_leaving:
            found[name] = "it leaves"
        elif check is not None:
            found[name] = check.reason or "its health is being checked"
        elif until is not None:
            found[name] = f"it was lost, and waits for {max(0.0, until - job.now):.0f} s"
        else:
            found[name] = missing(job) if job.current is None else job.current.reason
    return found


def _host_loss(job: Job, step: int) -> Json:
    """Most steps that the loss of a host with its memory would cost now; None: unknown, or the
    state."""
    if len(active(job)) < 2 and len(job.hosts) < 2:
        where = "--durable-dir" if job.copies.archived else "no disk"
        return {"steps": None, "why": f"no other host has the state, and {where} has a generation"}
    number, holders = job.copies.replicated or (-1, frozenset())
    is_there = holders <= job.hosts.keys()
    kept = [each for each in job.states.generations if is_there and each.number <= number]
    if not kept:
        return {"steps": None, "why": "other hosts have no replicas of it yet"}
    why = f"others have generation {kept[-1].number}"
    return {"steps": max(0, step - kept[-1].step), "why": why}


# ---------------------------------------------------------------------- requests of persons


def resume(live: LiveJob, generation: int, *, dry_run: bool) -> Json:
    """Go on from an older whole generation at a person's request.

    Returns:
        The generation and the ones given up, as text.

    Raises:
        UsageError: The job does not wait, or the generation is not whole.
    """
    _refuse_while_taking_over(live.state)
    if live.state.phase is not Phase.WAITING:
        raise UsageError(
            f"the job is {live.state.phase.value}, not waiting: it has a state that it goes on "
            "from."
        )
    catalogue, survey = live.generations.catalogue, live.generations.survey()
    held = catalogue.whole(survey)
    whole = {found.number: found for found in held}
    if generation not in whole:
        known = ", ".join(f"{n} (step {found.step})" for n, found in whole.items())
        raise UsageError(
            f"generation {generation} is not whole on the hosts that are here. Whole: "
            f"{known or 'none'}."
        )
    found = whole[generation]
    steps = {one.number: one.step for one in catalogue.lacking(held, survey)}
    steps |= {one.number: one.step for one in held[held.index(found) + 1 :]}
    steps |= {one.number: one.step for one in catalogue.forks(held) if one != found}
    answer = f"going on from generation {generation} of step {found.step}"
    if steps:
        lost = max(live.state.newest, *(step or 0 for step in steps.values())) - found.step
        numbers = ", ".join(map(str, sorted(steps)))
        answer += f"; given up: generation {numbers}, {max(0, lost)} steps"
    if not dry_run:
        live.log(f"event=resume a person says: {answer}")
        live.generations.give_up_after(generation)
        live.recount()
        live.feed(events.Resumed(live.clock()))
    return {"reason": answer}


def scale(
    live: LiveJob, nproc: int | None, nnodes: int | None, degrees: str | None, *, dry_run: bool
) -> dict[str, Json]:
    """Apply a person's request for other degrees or hosts; with ``dry_run`` only describe its
    effect.

    Returns:
        Degrees and workers of the present hosts, and the reason; ``no change ...`` if they run so
            already. With ``dry_run`` also the schedule of the change, a line each.

    Raises:
        UsageError: It is impossible; with the reason and the way out.
    """
    job, why = live.state, list[str]()
    _refuse_while_taking_over(job)
    hosts = staying(job)
    target = live.sizing.scaled(nproc, nnodes, degrees, why.append)(hosts, present(job))
    if target is None:
        reason = why[-1] if why else "no host is there"
        raise UsageError(f"{_asked(nproc, nnodes, degrees)} on the hosts {dict(hosts)}: {reason}")
    target = placed(job, target, hosts)
    is_same = job.current is not None and target.is_same_as(job.current)
    if not is_same:
        _check(job, target)
    if not dry_run:
        live.sizing.rescale(nproc, nnodes, degrees)
        live.timeline.begin(f"a person asked for {_asked(nproc, nnodes, degrees)}")
        live.feed(events.Rescaled(live.sizing.assign(), live.clock(), nnodes))
    slots = sum(count for _, count in hosts)
    short = f"{slots} slots, {nproc} asked; " if nproc is not None and nproc > slots else ""
    reason = f"{short}{target.reason}"
    if is_same:
        reason = f"no change: {short}{target.layout} runs already"
    return {
        "degrees": str(target.degrees), **target.passes.to_json(),
        "workers": dict(target.workers), "reason": reason,
        **({"schedule": _schedule(live, target)} if dry_run and not is_same else {}),
    }  # fmt: skip


def _schedule(live: LiveJob, target: Assignment) -> list[Json]:
    """Return the order of a change: bytes of the job's own model, where it is known, and seconds of
    its last change."""
    ran, resize = live.state.current, live.spec.config.resize
    if ran is None:
        return []
    changes = [each for each in live.timeline.reports if "paused_s" in each]
    last = changes[-1] if changes else {"seconds": {}}
    lines = [*schedule(
        live.sizing.moved(ran, target), last["seconds"], is_ahead=resize.standby != NEVER
    )]  # fmt: skip
    if changes:
        lines.append(f"seconds are of the last change, which paused {last['paused_s']:.2f} s")
    return list(lines)


def snapshot(live: LiveJob) -> str:
    """Ask for a generation beside the schedule.

    Raises:
        UsageError: The job does not train, or makes none.
    """
    job = live.state
    _refuse_while_taking_over(job)
    if job.phase not in TRAINING or not job.settings.is_elastic or not job.attempt.is_hooked:
        raise UsageError(f"no snapshot is made: the job is {job.phase.value}, or not elastic.")
    live.feed(events.SnapshotAsked(live.clock()))
    return "a snapshot is asked for"


def _refuse_while_taking_over(job: Job) -> None:
    if job.takeover.pending is not None:
        raise UsageError(
            "the coordinator has just taken another one's place, and waits for the hosts of the "
            "round under way. Ask again in a moment."
        )


def _asked(nproc: int | None, nnodes: int | None, degrees: str | None) -> str:
    given = {"--nproc": nproc, "--nnodes": nnodes, "--degrees": degrees}
    return " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)


def _check(job: Job, target: Assignment) -> None:
    """Refuse a change that would lose the job's state, or has failed before."""
    if not job.attempt.is_hooked:
        raise UsageError(f"the job cannot be changed while it runs: {UNHOOKED}.")
    if job.phase is Phase.STARTING and not job.states.has_state:
        raise UsageError(
            "the job is in its first start and has no state yet: a change would begin the script "
            "anew. Ask again once it has made a step (scalai status)."
        )
    failed = failure_of(job, target)
    if failed is not None:
        raise UsageError(
            f"{target.layout} failed on these hosts before: {failed.reason}. They are tried again "
            "once the agent of one of the hosts has been started anew; or ask for others."
        )


@lru_cache(maxsize=16)
def _spec_of(text: JsonText) -> JobSpec:
    """The job of an agent's command line; most agents have the same one. Raises ``UsageError`` for
    an invalid one."""
    try:
        return JobSpec.from_json(text.value())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ScalaiError):
            raise
        raise UsageError(f"an agent brings no job: {error!r}. Do the versions differ?") from error
