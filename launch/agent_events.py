"""What agents tell the coordinator, made into events of the job once all of whom it takes have told
it."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from scalai.core import events
from scalai.core.errors import LayoutError, ProofError
from scalai.core.membership import Phase
from scalai.launch.gathering import Restored
from scalai.launch.generations import check_whole, deposit_name
from scalai.launch.live_job import LiveJob
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
            "prepared": self._as_it_is(events.Prepared),
            "sealed": self._sealed,
            "committed": self._committed,
            "stopped": self._as_it_is(events.Stopped),
            "failed": self._failed,
            "published": self._published,
            "grown": self._grown,
            "restored": self._restored,
            "stepped": self._as_it_is(events.Stepped),
            "finished": self._as_it_is(events.Finished),
            "saved": self._as_it_is(events.Saved),
            "unsaved": self._as_it_is(events.NotSaved),
            "leaving": self._leaving,
            "slots": self._slots,
        }
        words[event](host=host, **facts)

    def _as_it_is(self, kind: Callable[..., events.Event]) -> Callable[..., None]:
        return lambda **facts: self._live.feed(kind(**facts))

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
            except LayoutError as error:
                live.log(f"event={reason} step={step} refused: {error}")
                return
            number = live.commit(name)
            live.log(f"event={reason} committed={number} step={step}")
            live.feed(events.Snapshotted(hosts, step, number))

    def _committed(self, host: str, generation: int) -> None:
        line = self._live.timeline
        self._live.feed(events.Committed(host, generation))
        if self._live.state.phase is Phase.STOPPING:
            line.phase("commit", line.since("sealed"), generation=generation)
            line.mark("committed")

    def _failed(self, host: str, round: int, reason: str, out_of_memory: bool = False) -> None:
        live, current = self._live, self._live.state.current
        if out_of_memory and current is not None and live.state.phase is Phase.STARTING:
            live.sizing.exclude(current)
            live.limit()
            reason += f"; {current.degrees} is not tried again"
        live.timeline.begin(reason)
        live.feed(events.WorkersFailed(host, round, reason))

    def _published(self, host: str, round: int, tensors: list[Json]) -> None:
        """A host's workers have built their models and said what they hold."""
        live = self._live
        if round != live.state.round:
            return
        live.told.tensors[host] = frozenset(name for name, *_ in tensors)
        if set(live.told.tensors) >= live.active():
            count = len(live.told.names())
            live.timeline.phase("relaunch", live.timeline.since("committed"), tensors=count)
            live.command(live.active(), command="expect", tensors=count)

    def _grown(self, host: str, part: Json) -> None:
        """A host fetched what its workers need: it holds that from now on."""
        self._live.generations.add(manifest_from_message(part, host))
        self._live.recount()

    def _restored(self, host: str, round: int, **told: Json) -> None:
        live = self._live
        if round != live.state.round or live.source is None:
            return
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
            reason = f"the restored state is not the deposited one: {error}"
            live.feed(events.WorkersFailed("any", live.state.round, reason))
            return
        took = live.told.slowest("proof") + time.monotonic() - began
        live.timeline.phase("proof", took, generation=number, proven=len(rows.tensors))
        live.timeline.mark("proven")
        live.command(live.active(), command="proceed")

    def _leaving(self, host: str) -> None:
        self._live.timeline.begin(f"host {host} drains")
        self._live.log(f"event=leaving host={host}")
        self._live.feed(events.HostLeaving(host, time.monotonic()))

    def _slots(self, host: str, slots: int) -> None:
        self._live.timeline.begin(f"host {host} has {slots} devices")
        self._live.feed(events.SlotsChanged(host, slots, time.monotonic()))
