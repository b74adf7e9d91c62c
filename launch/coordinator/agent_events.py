"""What agents report to the coordinator, made into events of the job. What of a report the law does
not need (tensors, fingerprints, manifests, seconds) stays here in the shell."""

import time
from collections.abc import Mapping

from scalai.core.errors import UsageError
from scalai.core.host.snapshots import longest
from scalai.core.job.membership import Phase
from scalai.core.messages import commands, events, reports
from scalai.core.messages.reports import HostEvent, Report
from scalai.launch.coordinator.live_job import LiveJob
from scalai.launch.coordinator.named_once import BroughtPart
from scalai.launch.coordinator.proving import doubted
from scalai.launch.coordinator.replica_room import refuse_early, weigh_late
from scalai.store.manifest import HostManifest
from scalai.store.parts import snapshot_name

Manifests = Mapping[bytes | BroughtPart, HostManifest]
"""What a call brings, by what came: read before the coordinator's lock is taken."""


class AgentEvents:
    """One method for each report; those with nothing but what the law needs are fed as they are.

    Args:
        live: The job.
    """

    def __init__(self, live: LiveJob) -> None:
        self._live = live

    def hear(self, host: str, report: Report, manifests: Manifests) -> None:
        """Hear what has happened on a host; ``manifests``: those of the report."""
        match report:
            case reports.Sealed():
                self._sealed(host, report, manifests)
            case reports.Failed():
                self._failed(host, report)
            case reports.Published():
                self._published(host, report)
            case reports.Holding():
                if report.round == self._live.state.round:
                    self._live.answers.holding[host] = report
            case reports.Moved(round, count):
                self._feed(events.Progressed(host, round, f"moved {count / 1e9:.6f} GB"))
            case reports.Grown(manifest):
                self._add(host, manifests[manifest])
                self._live.recount()
            case reports.Restored():
                self._restored(host, report)
            case reports.Unproven(round, reason):
                self._unproven(host, round, reason)
            case reports.Doubted(generation, left):
                self._doubted(host, generation, None if left is None else manifests[left])
            case reports.Suspected():
                self._suspected(host, report)
            case reports.Examined():
                self._examined(host, report, manifests)
            case reports.Attached():
                self._attached(host, report, manifests)
            case reports.Leaving():
                self._leaving(host, report)
            case reports.Staying():
                self._live.log(f"event=staying host={host}: what told it to leave is withdrawn")
                self._feed(events.HostStaying(host, time.monotonic()))
            case reports.Slots(slots):
                self._slots(host, slots)
            case _:
                self._as_it_is(host, report)

    def _feed(self, event: events.Event) -> None:
        self._live.feed(event)

    def _as_it_is(self, host: str, event: HostEvent) -> None:
        """Feed an event of the law that a host reports of itself."""
        if event.host != host:
            raise UsageError(f"host {host!r} reports {event!r}, which is of another host.")
        match event:
            case events.Prepared() if host in self._live.state.held:
                # Until now the training went on: it was no drain.
                self._live.timeline.mark("preparing")
                self._feed(event)
            case events.Committed():
                self._committed(event)
            case events.Stepped():
                self._feed(event)
                weigh_late(self._live)
            case _:
                self._feed(event)

    def _sealed(self, host: str, report: reports.Sealed, manifests: Manifests) -> None:
        """Take a snapshot that is sealed, or learn that a host has none (its workers died before
        they wrote)."""
        live, part = self._live, None
        if report.manifest is not None:
            part = manifests[report.manifest]
            live.generations.add_sealed(part)
        if report.reason == "stop":
            live.answers.snapshots[host] = report.seconds
            live.feed(events.SnapshotWritten(host, report.round))
        elif part is not None and report.reason != "emergency":
            name, kept = snapshot_name(part), live.answers.on_the_way
            kept[name] = longest(kept.get(name, {}), report.seconds)
            live.feed(events.Sealed(host, report.round, report.reason, name))

    def _committed(self, event: events.Committed) -> None:
        line = self._live.timeline
        self._live.feed(event)
        if self._live.state.phase is Phase.STOPPING:
            line.phase("commit", line.since("sealed"), generation=event.generation)
            line.mark("committed")

    def _failed(self, host: str, report: reports.Failed) -> None:
        live, current, reason = self._live, self._live.state.current, report.reason
        if report.out_of_memory and current is not None and live.state.phase is Phase.STARTING:
            live.sizing.exclude(current)
            live.limit()
            reason += f"; {current.layout} is not tried again"
        live.timeline.begin(reason)
        live.note_failure(host, reason)
        live.feed(
            events.WorkersFailed(host, report.round, reason, report.is_chance, report.is_refusal)
        )

    def _published(self, host: str, report: reports.Published) -> None:
        """A host's workers have built their models and said what they hold."""
        if report.round == self._live.state.round:
            self._live.answers.tensors[host] = frozenset(report.tensors)
            if (refused := refuse_early(self._live)) is None:
                self._feed(events.Published(host, report.round))
            else:
                self._feed(refused)

    def _add(self, host: str, part: HostManifest) -> None:
        """Note a host's part; one of a generation that the job has left behind meanwhile goes, or
        it would pass for the newest state when the job begins again."""
        if not self._live.generations.add(part):
            self._live.command([host], commands.Drop(part.generation))

    def _restored(self, host: str, report: reports.Restored) -> None:
        live, source = self._live, self._live.state.start.source
        if report.round != live.state.round or source is None:
            return
        live.answers.add(host, report)
        self._feed(events.Restored(host, report.round))

    def _unproven(self, host: str, round: int, reason: str) -> None:
        """What a host fetched is not what the hosts that gave it had committed."""
        live, source = self._live, self._live.state.start.source
        if round == live.state.round and source is not None:
            self._feed(doubted(round, source, f"host {host}: {reason}", live.generations))

    def _suspected(self, host: str, report: reports.Suspected) -> None:
        """What a host was given is not what was committed: it has kept nothing of it."""
        self._live.log(f"event=suspected by={host} hosts={','.join(report.hosts)} {report.reason}")
        self._feed(events.Suspected(report.hosts, report.generation))

    def _doubted(self, host: str, generation: int, left: HostManifest | None) -> None:
        """A host has given up what it had fetched, or what is damaged."""
        generations = self._live.generations
        if left is None:
            generations.without(host, generation)
        else:
            self._add(host, left)
        self._live.recount()

    def _examined(self, host: str, report: reports.Examined, manifests: Manifests) -> None:
        """A host has read its part of a generation again: what is damaged of it counts no more."""
        number = report.generation
        self._live.note_examined(host, number, report.damage, report.directory)
        left = None if report.manifest is None else manifests[report.manifest]
        self._doubted(host, number, left)
        self._feed(events.Examined(host, number, bool(report.damage)))

    def _attached(self, host: str, report: reports.Attached, manifests: Manifests) -> None:
        """A host has looked into its durable directory again, because nothing in memory is whole.
        Where the job has gone on meanwhile, what it found goes: its store needs the room."""
        live, generations = self._live, self._live.generations
        before = live.state.obstacle
        for part in (manifests[each] for each in report.manifests):
            live.count_from(part.generation)
            if live.state.phase is Phase.WAITING:
                is_kept = generations.offer(part)
            else:
                is_kept = generations.has(part.generation) and not generations.is_foreign(part)
            if not is_kept:
                live.command([host], commands.Drop(part.generation))
        for number, reason in report.damaged:
            live.count_from(number)
            generations.note_damaged(host, number, reason)
        live.recount()
        if live.state.phase is Phase.WAITING and live.state.obstacle not in ("", before):
            live.log(f"event=note waiting {live.state.obstacle}")
        self._feed(events.Looked(host, time.monotonic()))

    def _leaving(self, host: str, report: reports.Leaving) -> None:
        live, newest = self._live, self._live.state.newest_generation
        live.timeline.begin(f"host {host} drains")
        live.log(f"event=leaving host={host} source={report.source!r}")
        part = live.generations.parts(newest.number).get(host) if newest else None
        size = part.size_bytes if part else 0
        self._feed(
            events.HostLeaving(
                host, time.monotonic(), report.source, report.left_s, report.is_final, size
            )
        )

    def _slots(self, host: str, slots: int) -> None:
        self._live.timeline.begin(f"host {host} has {slots} devices")
        self._live.feed(events.SlotsChanged(host, slots, time.monotonic()))
