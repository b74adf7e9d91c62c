"""What agents report to the coordinator, made into events of the job once every host that is needed
for one has reported."""

import time
from collections.abc import Mapping

from scalai.core import commands, events, reports
from scalai.core.errors import LayoutError, ProofError, UsageError
from scalai.core.membership import Phase
from scalai.core.reports import HostEvent, Report
from scalai.launch.generations import check_whole, deposit_name
from scalai.launch.live_job import LiveJob
from scalai.store.manifest import HostManifest, manifest_of_bytes


class AgentEvents:
    """One method for each report; the reports with nothing to put together are fed as they are.

    Args:
        live: The job.
    """

    def __init__(self, live: LiveJob) -> None:
        self._live = live

    def hear(self, host: str, report: Report) -> None:
        """Hear what has happened on a host."""
        match report:
            case reports.Sealed():
                self._sealed(host, report)
            case reports.Failed():
                self._failed(host, report)
            case reports.Published():
                self._published(host, report)
            case reports.Moved(round, count):
                self._feed(events.Progressed(host, round, f"moved {count / 1e9:.6f} GB"))
            case reports.Grown(manifest):
                self._grown(host, manifest)
            case reports.Restored():
                self._restored(host, report)
            case reports.Unproven(round, reason):
                self._unproven(host, round, reason)
            case reports.Doubted(generation, left):
                self._doubted(host, generation, left)
            case reports.Examined():
                self._examined(host, report)
            case reports.Attached():
                self._attached(host, report)
            case reports.Leaving():
                self._leaving(host)
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
            case _:
                self._feed(event)

    def _sealed(self, host: str, report: reports.Sealed) -> None:
        """Take a deposit that is sealed, or learn that a host has none (its workers died before
        they wrote)."""
        live, reason = self._live, report.reason
        parts: Mapping[str, HostManifest] = {}
        if report.manifest is not None:
            parts = live.generations.deposit(manifest_of_bytes(report.manifest, host))
        if reason == "stop":
            live.told.deposits[host] = report.seconds
            live.feed(events.Deposited(host, report.round))
            return
        hosts = tuple(sorted(live.active()))
        is_present = report.manifest is not None and report.round == live.state.round
        if is_present and set(parts) >= set(hosts):
            step, name = parts[host].step, deposit_name(parts[host])
            try:
                check_whole(parts.values())
                number = live.commit(name)
            except (LayoutError, ProofError) as error:
                live.log(f"event={reason} step={step} refused: {error}")
                return
            live.log(f"event={reason} committed={number} step={step}")
            live.feed(events.Snapshotted(tuple(sorted(parts)), step, number))

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
            reason += f"; {current.degrees} is not tried again"
        live.timeline.begin(reason)
        live.feed(
            events.WorkersFailed(host, report.round, reason, report.is_chance, report.is_refusal)
        )

    def _published(self, host: str, report: reports.Published) -> None:
        """A host's workers have built their models and said what they hold."""
        live, round = self._live, report.round
        if round != live.state.round:
            return
        live.feed(events.Progressed(host, round, "published"))
        live.told.tensors[host] = frozenset(report.tensors)
        if set(live.told.tensors) >= live.active():
            count = len(live.told.names())
            live.timeline.phase("relaunch", live.timeline.since("committed"), tensors=count)
            live.command(live.active(), commands.Expect(round, count))

    def _grown(self, host: str, manifest: bytes) -> None:
        """A host fetched what its workers need: it holds that from now on."""
        self._add(host, manifest)
        self._live.recount()

    def _add(self, host: str, part: bytes) -> None:
        """Note a host's part; one of a generation that the job has left behind meanwhile goes, or
        it would pass for the newest state when the job begins again."""
        manifest = manifest_of_bytes(part, host)
        if not self._live.generations.add(manifest):
            self._live.command([host], commands.Drop(manifest.generation))

    def _restored(self, host: str, report: reports.Restored) -> None:
        live = self._live
        if report.round != live.state.round or live.source is None:
            return
        live.feed(events.Progressed(host, report.round, "restored"))
        live.told.restored[host] = report
        if not set(live.told.restored) >= live.active():
            return
        for name in ("plan", "move", "restore"):
            live.timeline.phase(name, live.told.slowest(name))
        live.timeline.note(
            page_fault_s=live.told.slowest("page_fault"),
            bytes_local=sum(entry.bytes_local for entry in live.told.restored.values()),
            bytes_remote=sum(entry.bytes_remote for entry in live.told.restored.values()),
        )
        self._prove(live.source)

    def _prove(self, number: int) -> None:
        """Compare what was restored with what was deposited, and let the workers go on."""
        live, began = self._live, time.monotonic()
        rows, fingerprints = live.told.rows()
        try:
            live.generations.prove(number, rows, fingerprints)
        except (ProofError, LayoutError) as error:
            self._doubt(number, f"the restored state is not the deposited one: {error}")
            return
        took = live.told.slowest("proof") + time.monotonic() - began
        version = live.generations.fingerprint_version(number)
        live.timeline.phase(
            "proof", took, generation=number, proven=len(rows.tensors), fingerprint_version=version
        )
        live.timeline.mark("proven")
        live.command(live.active(), commands.Proceed(live.state.round))

    def _unproven(self, host: str, round: int, reason: str) -> None:
        """What a host fetched is not what the hosts that gave it had committed."""
        if round == self._live.state.round and self._live.source is not None:
            self._doubt(self._live.source, f"host {host}: {reason}")

    def _doubt(self, number: int, reason: str) -> None:
        """A proof has failed: everything that was fetched for it goes, and is fetched anew; the
        second time, what is stored is damaged, and the job ends."""
        live = self._live
        is_final = live.generations.is_doubted(number)
        if is_final:
            reason = live.generations.verdict(number, reason)
        else:
            live.generations.doubt(number)
            if live.generations.is_whole_as_deposited(number):
                # Before the workers are stopped: the next round's sources are known by then.
                live.command(live.roster.hosts(), commands.Doubt(number))
            else:
                live.log(f"event=note generation {number} stays as it is: of some of it there is "
                         "nothing but what was fetched")  # fmt: skip
        live.feed(events.ProofFailed(live.state.round, reason, is_final))

    def _doubted(self, host: str, generation: int, left: bytes | None) -> None:
        """A host has given up what it had fetched."""
        generations = self._live.generations
        if left is None:
            generations.without(host, generation)
        else:
            self._add(host, left)
        self._live.recount()

    def _examined(self, host: str, report: reports.Examined) -> None:
        """A host has read its part of a doubted generation again."""
        for line in report.damage:
            self._live.log(f"event=damage host={host} {line}")
        self._live.generations.note_examined(
            report.generation, host, report.directory, report.damage
        )

    def _attached(self, host: str, report: reports.Attached) -> None:
        """A host has looked into its durable directory again, because nothing in memory is whole.
        Where the job has gone on meanwhile, what it found goes: its store needs the room."""
        live, generations = self._live, self._live.generations
        before = live.state.obstacle
        for part in (manifest_of_bytes(each, host) for each in report.manifests):
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

    def _leaving(self, host: str) -> None:
        self._live.timeline.begin(f"host {host} drains")
        self._live.log(f"event=leaving host={host}")
        self._live.feed(events.HostLeaving(host, time.monotonic()))

    def _slots(self, host: str, slots: int) -> None:
        self._live.timeline.begin(f"host {host} has {slots} devices")
        self._live.feed(events.SlotsChanged(host, slots, time.monotonic()))
