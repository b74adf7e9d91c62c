"""Reports of agents: tensors, fingerprints, manifests and seconds stay in the shell; the law gets
the rest."""

from collections.abc import Mapping
from dataclasses import replace

from scalai.core.errors import LayoutError
from scalai.core.host.snapshots import longest
from scalai.core.job.membership import TRAINING, Phase
from scalai.core.job.replicating import keepers
from scalai.core.messages import commands, events, reports
from scalai.core.messages.reports import Report
from scalai.core.tensors.replicas import ReplicaMemory, memory_of, ring_of, shortage
from scalai.launch.coordinator.calls import BroughtPart
from scalai.launch.coordinator.judging import doubted
from scalai.launch.coordinator.live_job import LiveJob
from scalai.store.manifest import HostManifest

Manifests = Mapping[bytes | BroughtPart, HostManifest]
"""Manifests of a call by their bytes, read before the coordinator's lock is taken."""


class AgentEvents:
    """Handles reports: keeps the coordinator's part, and feeds the law."""

    def __init__(self, live: LiveJob) -> None:
        self._live = live

    def hear(self, host: str, report: Report, manifests: Manifests) -> None:
        """Handle a host's report; ``manifests``: those in it."""
        live, is_present = self._live, False
        if isinstance(report, reports.Published | reports.Holding | reports.Restored):
            is_present = report.round == live.state.round
        match report:
            case reports.Grown(manifest):
                self._add(host, manifests[manifest])
                live.recount()
            case reports.Doubted(generation, left):
                self._doubted(host, generation, None if left is None else manifests[left])
            case reports.Holding():
                if is_present:
                    live.answers.holding[host] = report
            case reports.Unproven(round, reason):
                self._unproven(host, round, reason)
            case reports.Leaving():
                self._leaving(host, report)
            case reports.Published() if is_present:
                live.answers.tensors[host] = frozenset(report.tensors)
                live.feed(refuse_early(live) or events.Reported(host, report))
            case reports.WorkersFailed():
                live.hear(host, self._failed(host, report))
            case reports.Committed(generation):
                live.hear(host, report)
                self._committed(generation)
            case reports.Stepped():
                live.hear(host, report)
                weigh_late(live)
            case _:
                self._note(host, report, manifests, is_present=is_present)
                live.hear(host, report)

    def _note(self, host: str, report: Report, manifests: Manifests, *, is_present: bool) -> None:
        """Keep the coordinator's part of a report, before the law gets it."""
        live = self._live
        match report:
            case reports.Sealed():
                self._sealed(host, report, manifests)
            case reports.Restored() if is_present and live.state.attempt.source is not None:
                live.answers.add(host, report)
            case reports.Prepared() if host in live.state.stop.held:
                # Training went on until now: no drain.
                live.timeline.mark("preparing")
            case reports.Suspected(_, hosts, reason):
                live.log(f"event=suspected by={host} hosts={','.join(hosts)} {reason}")
            case reports.Examined():
                self._examined(host, report, manifests)
            case reports.Attached():
                self._attached(host, report, manifests)
            case reports.Staying():
                live.log(f"event=staying host={host}: what told it to leave is withdrawn")
            case reports.Slots(slots):
                live.timeline.begin(f"host {host} has {slots} devices", "devices")

    def _sealed(self, host: str, report: reports.Sealed, manifests: Manifests) -> None:
        """Add a sealed snapshot; a host whose workers died before writing has none."""
        live, has_part = self._live, report.manifest is not None
        if report.manifest is not None:
            live.generations.add_sealed(manifests[report.manifest])
        if report.reason == "stop":
            live.answers.snapshots[host] = report.seconds
        elif has_part and report.reason != "emergency":
            name, kept = report.snapshot, live.answers.on_the_way
            kept[name] = longest(kept.get(name, {}), report.seconds)

    def _committed(self, generation: int) -> None:
        line = self._live.timeline
        if self._live.state.phase is Phase.STOPPING:
            line.phase("commit", line.since("sealed"), generation=generation)
            line.mark("committed")

    def _failed(self, host: str, report: reports.WorkersFailed) -> reports.WorkersFailed:
        """Record a failure. Returns the law's report: a layout out of memory is not tried again."""
        live, current, reason = self._live, self._live.state.current, report.reason
        if report.out_of_memory and current is not None and live.state.phase is Phase.STARTING:
            live.sizing.exclude(current)
            live.limit()
            reason += f"; {current.layout} is not tried again"
        live.timeline.begin(reason, "failed")
        live.note_failure(host, reason)
        return replace(report, reason=reason)

    def _add(self, host: str, part: HostManifest) -> None:
        """Add a host's part. A part of an abandoned generation is dropped: at a new start it would
        pass for the newest state."""
        if not self._live.generations.add(part):
            self._live.command([host], commands.Drop(part.generation))

    def _unproven(self, host: str, round: int, reason: str) -> None:
        """Handle a host's fetch that differs from the committed state."""
        live, source = self._live, self._live.state.attempt.source
        if round == live.state.round and source is not None:
            live.feed(doubted(round, source, f"host {host}: {reason}", live.generations))

    def _doubted(self, host: str, generation: int, left: HostManifest | None) -> None:
        """Record a host's loss of fetched or damaged parts."""
        generations = self._live.generations
        if left is None:
            generations.without(host, generation)
        else:
            self._add(host, left)
        self._live.recount()

    def _examined(self, host: str, report: reports.Examined, manifests: Manifests) -> None:
        """Discount pieces that a host found damaged at a second look."""
        number = report.generation
        self._live.note_examined(host, number, report.damage, report.directory)
        left = None if report.manifest is None else manifests[report.manifest]
        self._doubted(host, number, left)

    def _attached(self, host: str, report: reports.Attached, manifests: Manifests) -> None:
        """Handle a host's second look into its durable directory, for want of a whole state in
        memory. If the job has gone on meanwhile, its finds are dropped: the store needs the room.
        """
        live, generations = self._live, self._live.generations
        before = live.state.states.obstacle
        for part in (manifests[each] for each in report.manifests):
            generations.count_from(part.generation)
            if live.state.phase is Phase.WAITING:
                is_kept = generations.offer(part)
            else:
                is_kept = generations.has(part.generation) and not generations.is_foreign(part)
            if not is_kept:
                live.command([host], commands.Drop(part.generation))
        for number, reason in report.damaged:
            generations.count_from(number)
            generations.note_damaged(host, number, reason)
        live.recount()
        if live.state.phase is Phase.WAITING and live.state.states.obstacle not in ("", before):
            live.log(f"event=note waiting {live.state.states.obstacle}")

    def _leaving(self, host: str, report: reports.Leaving) -> None:
        live, newest = self._live, self._live.state.newest_generation
        live.timeline.begin(f"host {host} drains", "leaving")
        live.log(f"event=leaving host={host} source={report.source!r}")
        part = live.generations.parts(newest.number).get(host) if newest else None
        size = part.size_bytes if part else 0
        live.feed(
            events.HostLeaving(
                host, live.clock(), report.source, report.left_s, report.is_final, size
            )
        )


# ---------------------------------------------------------------------- memory for replicas


MOST_ROWS = 200_000
"""Most pieces of all hosts to weigh: more would hold the coordinator up for seconds."""
NAMED = 64
"""Most hosts with a log line of their own, the fullest first."""


def refuse_early(live: LiveJob) -> events.Reported | None:
    """Weigh a job's first round once all hosts have published, before any step.

    Returns:
        The refusal of requested replicas without room; None: none.
    """
    is_first, told = live.state.change.ran is None, live.answers.tensors.keys()
    if not is_first or not told >= live.active():
        return None
    found = _weigh(live)
    reason = shortage(found)
    if not reason:
        return None
    if live.spec.are_replicas_asked:
        host = next(memory.host for memory in found if memory.is_short)
        refusal = reports.WorkersFailed(live.state.round, reason, is_refusal=True)
        return events.Reported(host, refusal)
    _say_short(live, reason)
    return None


def weigh_late(live: LiveJob) -> None:
    """Weigh a later round, once its workers train."""
    if live.state.phase in TRAINING and (reason := shortage(_weigh(live))):
        _say_short(live, reason)


def _say_short(live: LiveJob, reason: str) -> None:
    live.log(f"event=no_replica_room {reason} The training goes on, with those that fit.")


def _weigh(live: LiveJob) -> tuple[ReplicaMemory, ...]:
    """Log the memory of generations on each host once a round; empty if unknown."""
    answers, hosts = live.answers, live.active()
    told = {host: answers.holding[host] for host in hosts & answers.holding.keys()}
    kept_by = keepers(live.state) & frozenset(live.members.hosts())
    if answers.is_weighed or not told.keys() >= hosts:
        return ()
    answers.is_weighed = True
    ring = ring_of(
        {host: live.members[host].domain for host in kept_by}, live.state.settings.replicas
    )
    held = {host: report.rows for host, report in told.items()}
    room = {host: report.room_bytes for host, report in told.items()}
    answers.holding.clear()
    if (rows := sum(map(len, held.values()))) > MOST_ROWS:
        live.log(f"event=note the memory of generations is not known: {rows} pieces are too many")
        return ()
    try:
        found = memory_of(ring, held, room)
    except LayoutError as error:  # the snapshot will say more
        live.log(f"event=note the memory of generations is not known: {error}")
        return ()
    for memory in sorted(found, key=_spare)[:NAMED]:
        has = "unknown" if memory.room is None else memory.room
        live.log(
            f"event=store_memory host={memory.host} needed_bytes={memory.needed} "
            f"replica_bytes={memory.replicas} room_bytes={has} lacks_bytes={memory.lacks}"
        )
    if len(found) > NAMED:
        live.log(f"event=store_memory hosts={len(found)}: of the others each has more to spare")
    return found


def _spare(memory: ReplicaMemory) -> tuple[float, str]:
    left = float("inf") if memory.room is None else memory.room - memory.needed
    return left, memory.host
