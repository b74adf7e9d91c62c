"""What agents tell the coordinator, made into events of the job once all of whom it takes have told
it."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from scalai.core import events
from scalai.core.errors import LayoutError, ProofError, UsageError
from scalai.core.membership import Phase
from scalai.launch.gathering import Restored
from scalai.launch.generations import check_whole, deposit_name
from scalai.launch.live_job import LiveJob
from scalai.runtime.arguments import check_arguments
from scalai.store.manifest import HostManifest, manifest_from_message

Json = Any


class AgentEvents:
    """One method a word that agents say; the words with nothing to decide are fed as they are.

    Args:
        live: The job.
    """

    def __init__(self, live: LiveJob) -> None:
        self._live = live

    def hear(self, host: str, event: str, facts: Mapping[str, Json]) -> None:
        """An agent says that something has happened on its host."""
        words: Mapping[str, Callable[..., None]] = {
            "built": self._as_it_is(events.Built),
            "not_built": self._as_it_is(events.NotBuilt),
            "prepared": self._prepared,
            "held": self._as_it_is(events.Held),
            "arrived": self._as_it_is(events.Arrived),
            "sealed": self._sealed,
            "committed": self._committed,
            "stopped": self._as_it_is(events.Stopped),
            "failed": self._failed,
            "published": self._published,
            "grown": self._grown,
            "moved": self._moved,
            "restored": self._restored,
            "unproven": self._unproven,
            "doubted": self._doubted,
            "examined": self._examined,
            "attached": self._attached,
            "stepped": self._as_it_is(events.Stepped),
            "unhooked": self._as_it_is(events.Unhooked),
            "finished": self._as_it_is(events.Finished),
            "saved": self._as_it_is(events.Saved),
            "unsaved": self._as_it_is(events.NotSaved),
            "leaving": self._leaving,
            "hooked": self._as_it_is(events.Hooked),
            "slots": self._slots,
        }
        if event not in words:
            raise UsageError(f"{event!r} is no event of an agent. Do the versions differ?")
        told = {**facts, "host": host}
        check_arguments(words[event], told, event)
        words[event](**told)

    def _as_it_is(self, kind: Callable[..., events.Event]) -> Callable[..., None]:
        def feed(**facts: Json) -> None:
            check_arguments(kind, facts, kind.__name__)
            self._live.feed(kind(**facts))

        return feed

    def _prepared(self, host: str, stop: int, newest: int) -> None:
        if host in self._live.state.held:  # until now the training went on: it was no drain
            self._live.timeline.mark("preparing")
        self._live.feed(events.Prepared(host, stop, newest))

    def _sealed(
        self, host: str, round: int, reason: str, part: Json, seconds: dict[str, float]
    ) -> None:
        """A host's deposit is sealed; ``part`` None: it has nothing (its workers died before they
        wrote)."""
        live = self._live
        parts: Mapping[str, HostManifest] = {}
        if part is not None:
            parts = live.generations.deposit(manifest_from_message(part, host))
        if reason == "stop":
            live.told.deposits[host] = seconds
            live.feed(events.Deposited(host, round))
            return
        hosts = tuple(sorted(live.active()))
        if part is not None and round == live.state.round and set(parts) >= set(hosts):
            step, name = parts[host].step, deposit_name(parts[host])
            try:
                check_whole(parts.values())
                number = live.commit(name)
            except (LayoutError, ProofError) as error:
                live.log(f"event={reason} step={step} refused: {error}")
                return
            live.log(f"event={reason} committed={number} step={step}")
            live.feed(events.Snapshotted(tuple(sorted(parts)), step, number))

    def _committed(self, host: str, generation: int) -> None:
        line = self._live.timeline
        self._live.feed(events.Committed(host, generation))
        if self._live.state.phase is Phase.STOPPING:
            line.phase("commit", line.since("sealed"), generation=generation)
            line.mark("committed")

    def _failed(
        self, host: str, round: int, reason: str, out_of_memory: bool = False,
        is_chance: bool = False, is_refusal: bool = False,
    ) -> None:  # fmt: skip
        live, current = self._live, self._live.state.current
        if out_of_memory and current is not None and live.state.phase is Phase.STARTING:
            live.sizing.exclude(current)
            live.limit()
            reason += f"; {current.degrees} is not tried again"
        live.timeline.begin(reason)
        live.feed(events.WorkersFailed(host, round, reason, is_chance, is_refusal))

    def _published(self, host: str, round: int, tensors: list[Json]) -> None:
        """A host's workers have built their models and said what they hold."""
        live = self._live
        if round != live.state.round:
            return
        live.feed(events.Progressed(host, round, "published"))
        live.told.tensors[host] = frozenset(name for name, *_ in tensors)
        if set(live.told.tensors) >= live.active():
            count = len(live.told.names())
            live.timeline.phase("relaunch", live.timeline.since("committed"), tensors=count)
            live.command(live.active(), command="expect", tensors=count)

    def _moved(self, host: str, round: int, bytes: int) -> None:
        """So many bytes of the state have come to a host from others."""
        self._live.feed(events.Progressed(host, round, f"moved {bytes / 1e9:.6f} GB"))

    def _grown(self, host: str, part: Json) -> None:
        """A host fetched what its workers need: it holds that from now on."""
        self._add(host, part)
        self._live.recount()

    def _add(self, host: str, part: Json) -> None:
        """Note a host's part; one of a generation that the job has left behind meanwhile goes, or
        it would pass for the newest state when the job begins again."""
        manifest = manifest_from_message(part, host)
        if not self._live.generations.add(manifest):
            self._live.command([host], command="drop", generation=manifest.generation)

    def _restored(self, host: str, round: int, **told: Json) -> None:
        live = self._live
        if round != live.state.round or live.source is None:
            return
        live.feed(events.Progressed(host, round, "restored"))
        live.told.restored[host] = Restored.from_json(**told)
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
        live.command(live.active(), command="proceed")

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
                live.command(live.roster.hosts(), command="doubt", generation=number)
            else:
                live.log(f"event=note generation {number} stays as it is: of some of it there is "
                         "nothing but what was fetched")  # fmt: skip
        live.feed(events.ProofFailed(live.state.round, reason, is_final))

    def _doubted(self, host: str, generation: int, part: Json) -> None:
        """A host has given up what it had fetched; ``part`` is what is left."""
        generations = self._live.generations
        if part is None:
            generations.without(host, generation)
        else:
            self._add(host, part)
        self._live.recount()

    def _examined(self, host: str, generation: int, damage: list[str], directory: str) -> None:
        """A host has read its part of a doubted generation again."""
        for line in damage:
            self._live.log(f"event=damage host={host} {line}")
        self._live.generations.note_examined(generation, host, directory, damage)

    def _attached(self, host: str, parts: list[Json], damaged: list[Json]) -> None:
        """A host has looked into its durable directory again, because nothing in memory is whole.
        Where the job has gone on meanwhile, what it found goes: its store needs the room."""
        live, generations = self._live, self._live.generations
        before = live.state.obstacle
        for part in (manifest_from_message(each, host) for each in parts):
            live.count_from(part.generation)
            if live.state.phase is Phase.WAITING:
                is_kept = generations.offer(part)
            else:
                is_kept = generations.has(part.generation) and not generations.is_foreign(part)
            if not is_kept:
                live.command([host], command="drop", generation=part.generation)
        for number, reason in damaged:
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
