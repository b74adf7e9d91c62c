"""Parts of a job's states by host, and their proof.

The catalogue (``core.job.catalogue``) decides; here are the manifests, with coverage and
fingerprints for every proof.
"""

from collections import Counter, UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from scalai.core.errors import LayoutError, ProofError
from scalai.core.job.catalogue import Catalogue, Contents, PartFacts, Survey
from scalai.core.job.membership import Generation
from scalai.core.job.outlook import doubtful
from scalai.core.job.recovery import Descent, Origin
from scalai.core.tensors.collection import concatenate
from scalai.core.tensors.coverage import Cover
from scalai.core.tensors.fingerprint import (
    CommitStatement,
    combine,
    compare,
    tensor_fingerprints,
    unite_committed,
)
from scalai.core.tensors.region import Box
from scalai.store.generation import check_whole, contradiction
from scalai.store.manifest import HostManifest
from scalai.store.parts import attached_hosts, is_fetched, proven_only, snapshot_name


def written_fingerprints(parts: Iterable[HostManifest]) -> Mapping[str, int]:
    """Fingerprint of every tensor by name, summed from the pieces of a snapshot. Equal boxes on
    several hosts must agree (``ProofError``)."""
    parts = list(parts)
    rows = concatenate([part.collection for part in parts])
    values = np.concatenate([part.fingerprint for part in parts])
    return tensor_fingerprints(rows, values)


def committed_fingerprints(parts: Iterable[HostManifest]) -> Mapping[str, int]:
    """Committed fingerprint of every tensor of a whole generation, by name.

    Raises:
        ProofError: The parts contradict each other; or they state nothing (a converted generation),
            and fetched pieces overlap.
    """
    parts = list(parts)
    check_alike(contradiction(parts))
    united = unite_committed(part.committed for part in parts)
    stated = {} if united is None else united.fingerprints
    tensors = [tensor for part in parts for tensor in part.collection.tensors]
    stated = {**{tensor.name: 0 for tensor in tensors if not tensor.numel}, **stated}
    held = {tensor.name for tensor in tensors}
    if held <= stated.keys():
        return stated
    return {**_fingerprints_of_a_cover(parts, held - stated.keys()), **stated}


def check_alike(contradiction: str | None) -> None:
    """Raise ``ProofError`` for a contradiction between parts of one generation."""
    if contradiction is not None:
        raise ProofError(
            f"{contradiction} One of them is of another state: remove its part, or start without "
            "its host."
        )


def _fingerprints_of_a_cover(parts: Sequence[HostManifest], names: Set[str]) -> Mapping[str, int]:
    """Sum pieces that cover each of these tensors once: written ones first, since fetched ones may
    overlap with them."""
    pieces = [
        (is_fetched(part.files[file]), -int(size), number, row)
        for number, part in enumerate(parts)
        for row, (file, size) in enumerate(
            zip(part.file.tolist(), part.collection.size_bytes().tolist(), strict=True)
        )
        if part.collection.tensors[part.collection.tensor[row]].name in names
    ]
    chosen: dict[str, dict[Box, int]] = {}
    for _, _, number, row in sorted(pieces):
        tensor, box = parts[number].collection.box(row)
        boxes, value = chosen.setdefault(tensor.name, {}), int(parts[number].fingerprint[row])
        if boxes.get(box, value) != value:
            raise ProofError(
                f"replicas of {list(box.offset)}+{list(box.shape)} of {tensor.name!r} differ among "
                f"hosts {[part.host for part in parts]}. Resume from an older generation."
            )
        if box.numel and not any(box.intersect(other) for other in boxes):
            boxes[box] = value
    shapes = {t.name: t for part in parts for t in part.collection.tensors if t.name in names}
    chosen = {name: chosen.get(name, {}) for name in shapes}
    holes = [n for n, boxes in chosen.items() if sum(b.numel for b in boxes) != shapes[n].numel]
    if holes:
        raise ProofError(
            f"{len(holes)} tensors of generation {parts[0].generation} are cut so that their "
            f"pieces do not tell their fingerprint: {', '.join(sorted(holes)[:5])}. Resume from "
            "another generation."
        )
    return {name: combine(boxes.values()) for name, boxes in chosen.items()}


class HeldParts(UserDict[str, HostManifest]):
    """Parts of one state by host.

    Args:
        committed: Statement of the committing coordinator; None: the parts tell.
    """

    def __init__(self, committed: CommitStatement | None = None) -> None:
        self._committed = committed
        self._fingerprints = None if committed is None else committed.fingerprints
        self._attached: frozenset[str] | None = frozenset()
        """Hosts with durable parts among these; None: stale."""
        self._cover = Cover()
        self._known: dict[str, str] | None = {}
        """A host with a statement of the fingerprint, by tensor; None: stale."""
        self._hosts: tuple[str, ...] = ()
        """Writers named by the parts."""
        self._prints: dict[str, int] | None = {}
        """Fingerprints of all parts; None: stale, with ``_hosts``."""
        self._steps = Counter[int]()
        """Number of parts by step."""
        self._holders: frozenset[str] | None = None
        super().__init__()

    def __setitem__(self, host: str, part: HostManifest) -> None:
        known = self.data.get(host)
        if known is None or known.collection is not part.collection:
            # A part without a number of tensors makes no whole state.
            self._cover.put(host, part.collection, int(part.about.get("tensors", -1)))
        self.data[host] = part
        self._steps[part.step] += 1
        if known is not None:
            self._forget_step(known)
            self._known = self._prints = self._attached = None
            return
        self._holders = None
        if self._attached is not None and (attached := attached_hosts(part)):
            self._attached |= {*attached}
        if self._prints is not None:
            self._gather(part)
        self._known = self._with(self._known, part)

    def __delitem__(self, host: str) -> None:
        self._forget_step(self.data.pop(host))
        self._holders = None
        self._cover.remove(host)
        self._known = self._prints = self._attached = None

    def is_whole(self) -> bool:
        """Whether they hold every element of every tensor, from one step; pieces may overlap."""
        return self._is_of_one_step() and self._cover.is_whole()

    def is_whole_without(self, host: str) -> bool:
        """The same without this host."""
        return self._is_of_one_step() and self._cover.is_whole_without(host)

    def _is_of_one_step(self) -> bool:
        return len(self._steps) == 1

    def _forget_step(self, part: HostManifest) -> None:
        self._steps[part.step] -= 1
        if not self._steps[part.step]:
            del self._steps[part.step]

    def holders(self) -> frozenset[str]:
        if self._holders is None:
            self._holders = frozenset(self.data)
        return self._holders

    def contradiction(self, part: HostManifest) -> str | None:
        """Names a part with other committed fingerprints than this one; None: none."""
        if self._known is None:
            self._known = {}
            for each in self.data.values():
                self._with(self._known, each)
        stated = {} if part.committed is None else part.committed.fingerprints
        others = {self._known[name] for name in stated if name in self._known} - {part.host}
        found = (contradiction([self.data[host], part]) for host in sorted(others))
        return next(filter(None, found), None)

    @staticmethod
    def _with(known: dict[str, str] | None, part: HostManifest) -> dict[str, str] | None:
        if known is not None and part.committed is not None:
            for name in part.committed.fingerprints:
                known.setdefault(name, part.host)
        return known

    def stated(self) -> CommitStatement | None:
        """Statement of the commit, or of all parts together."""
        if self._committed is not None:
            return self._committed
        hosts = self.writers()
        return CommitStatement(hosts, dict(self._prints or {})) if hosts else None

    def writers(self) -> tuple[str, ...]:
        """Known hosts that wrote the state."""
        if self._committed is not None:
            return self._committed.hosts
        if self._prints is None:
            self._hosts, self._prints = (), {}
            for part in self.data.values():
                self._gather(part)
        return self._hosts

    def attached(self) -> frozenset[str]:
        """Hosts with durable parts among these."""
        if self._attached is None:
            named = (host for part in self.data.values() for host in attached_hosts(part))
            self._attached = frozenset(named)
        return self._attached

    def has_fingerprints(self) -> bool:
        """Whether the fingerprints of all tensors are known; they stay known after losses of
        hosts."""
        try:
            self.fingerprints()
        except (LayoutError, ProofError):
            return False
        return True

    def fingerprints(self) -> Mapping[str, int]:
        """Fingerprint of every tensor by name, as in ``committed_fingerprints``."""
        if self._fingerprints is None:
            self._fingerprints = committed_fingerprints(self.data.values())
        return self._fingerprints

    def pin(self) -> bool:
        """Keep the statement of a whole state from now on. Returns whether it is new. Raises
        ``ProofError`` if the parts contradict each other."""
        if self._committed is not None or not self.is_whole():
            return False
        prints = committed_fingerprints(self.data.values())
        hosts = self.writers() or tuple(sorted(self.data))
        self._committed = CommitStatement(hosts, prints)
        return True

    def _gather(self, part: HostManifest) -> None:
        assert self._prints is not None
        if part.committed is None:
            return
        self._prints.update(part.committed.fingerprints)
        if part.committed.hosts is not self._hosts:  # usually all parts name the same
            self._hosts = tuple(sorted({*self._hosts, *part.committed.hosts}))
            if self._hosts == part.committed.hosts:
                self._hosts = part.committed.hosts


def facts_of(part: HostManifest) -> PartFacts:
    """Facts of a part for the catalogue."""
    named = part.about.get("hosts", ())
    descent = Descent.of(part.generation, part.about)
    return PartFacts(part.host, part.generation, part.step, snapshot_name(part), descent, named)


def _numbered(part: HostManifest, number: int, stated: CommitStatement | None) -> HostManifest:
    """A sealed part as a generation's, with the statement of its tensors."""
    names = [tensor.name for tensor in part.collection.tensors]
    mine = None if stated is None else stated.of_tensors(names)
    return replace(part, generation=number, committed=mine)


class HeldStates:
    """Parts of generations by number, and of snapshots by name. Not shared between threads.

    Args:
        gap: Numbers skipped before the first new generation.
    """

    def __init__(self, gap: int = 0) -> None:
        self._last_number, self._gap = 0, gap
        self._catalogue = Catalogue()
        self._held: dict[int, HeldParts] = {}
        self._snapshots: dict[str, HeldParts] = {}

    @property
    def catalogue(self) -> Catalogue:
        return self._catalogue

    def count_from(self, number: int) -> None:
        """Number new generations above this existing one."""
        self._last_number = max(self._last_number, number)

    def next_number(self) -> int:
        """Number of the next new generation; each is given once."""
        self._last_number, self._gap = self._last_number + 1 + self._gap, 0
        return self._last_number

    def survey(self, without: str | None = None) -> Survey:
        """Contents of the present hosts, except ``without``."""
        found = {number: self._holding(held, without) for number, held in self._held.items()}
        sealed = {name: held.holders() for name, held in self._snapshots.items()}
        return Survey(found, sealed)

    def _holding(self, held: HeldParts, without: str | None) -> Contents:
        hosts = held.holders() if without is None else held.holders() - {without}
        is_whole = held.is_whole() if without is None else held.is_whole_without(without)
        # Fingerprints are computed now: a lost host takes its parts of them along.
        is_whole = bool(hosts) and is_whole and held.has_fingerprints()
        return Contents(hosts, is_whole, held.writers(), held.attached())

    def covered(self, without: str | None = None) -> tuple[Generation, ...]:
        """Whole generations, oldest first, as if ``without`` were lost."""
        return self._catalogue.whole(self.survey(without))

    # ------------------------------------------------------------------ snapshots

    def add_sealed(self, part: HostManifest) -> None:
        self._catalogue = self._catalogue.with_sealed(facts_of(part))
        self._snapshots.setdefault(snapshot_name(part), HeldParts())[part.host] = part

    def sealed_parts(self, name: str, hosts: Iterable[str]) -> dict[str, HostManifest]:
        """Parts of a snapshot on these hosts."""
        wanted = frozenset(hosts)
        return {h: p for h, p in self._snapshots.get(name, {}).items() if h in wanted}

    def whole_snapshot(self) -> str | None:
        """Name of the furthest candidate that covers the state."""
        for name in self._catalogue.candidates():
            parts = self._snapshots.get(name)
            if parts is None or not parts.is_whole():
                continue
            with suppress(LayoutError):
                check_whole(parts.values())
                return name
        return None

    def commit(self, number: int, name: str, origin: Origin = Origin.SEALED) -> None:
        """Make the parts of a snapshot generation ``number``.

        Raises:
            ProofError: Its replicas differ: it never becomes one.
        """
        parts = self._snapshots.pop(name)
        try:
            stated = CommitStatement(tuple(sorted(parts)), written_fingerprints(parts.values()))
        except ProofError as error:
            self._catalogue = self._catalogue.with_refused(name, parts, str(error))
            raise
        about = next(iter(parts.values())).about
        descent = Descent.of(number, about)
        self._catalogue = self._catalogue.committed(name, number, descent, parts, origin)
        self._held[number] = HeldParts(stated)
        for host, part in parts.items():
            self._held[number][host] = _numbered(part, number, stated)

    def late(self) -> Iterator[tuple[str, int]]:
        """Adopt sealed parts of snapshots committed without their host; yield host and
        generation."""
        for name in list(self._snapshots):
            number = self._catalogue.number_of(name)
            if number is None or not self._catalogue.has(number):
                continue
            self._catalogue = self._catalogue.without_sealed({name})
            late, parts = self._snapshots.pop(name), self._held[number]
            for host, part in late.items():
                parts[host] = _numbered(part, number, parts.stated())
            # Only these parts have fingerprints of tensors on no other host.
            with suppress(ProofError):
                if parts.pin():
                    for host, part in late.items():
                        parts[host] = _numbered(part, number, parts.stated())
            for host in late:
                yield host, number

    def forget_sealed(self, name: str | None = None) -> tuple[HostManifest, ...]:
        """Drop, and return, uncommitted sealed parts, of snapshot ``name`` or of all."""
        names = {*self._catalogue.sealed} if name is None else {name}
        self._catalogue = self._catalogue.without_sealed(names)
        return tuple(part for n in names for part in self._snapshots.pop(n, HeldParts()).values())

    def note_failed(self, step: int, why: str) -> None:
        """Record that survivors of a failure wrote no state at this step."""
        self._catalogue = self._catalogue.with_failure(step, why)

    def explained(self) -> None:
        """Forget the causes of a finished recovery."""
        self._catalogue = replace(self._catalogue, failures=())

    # ------------------------------------------------------------------ generations

    def parts(self, number: int) -> Mapping[str, HostManifest]:
        return self._held[number]

    def holders(self, number: int) -> frozenset[str]:
        """Hosts with parts of a generation."""
        return self._held[number].holders() if number in self._held else frozenset()

    def step(self, number: int) -> int:
        """Optimizer step of a generation."""
        step = self._catalogue.numbered[number].step
        assert step is not None
        return step

    def facts(self, number: int) -> Mapping[str, Any]:
        """The script's facts, as reported by a generation's workers."""
        entry: dict[str, Any] = {}
        for part in self._held[number].values():
            entry.update(part.about.get("facts", {}))
        return entry

    def stated(self, number: int) -> CommitStatement | None:
        """Known statement of a generation."""
        return self._held[number].stated() if number in self._held else None

    def check_stated(self, part: HostManifest) -> None:
        """Raise ``ProofError`` if this part's committed fingerprints differ from its generation's;
        names hosts and tensors."""
        if part.generation in self._held:
            check_alike(self._held[part.generation].contradiction(part))

    def has(self, number: int) -> bool:
        """Whether a state of this job has this number."""
        return self._catalogue.has(number)

    def is_foreign(self, part: HostManifest) -> bool:
        """Whether another run gave this part's number to another state."""
        return self._catalogue.is_foreign(facts_of(part), self.holders(part.generation))

    def add(self, part: HostManifest) -> bool:
        """Add a host's part, joined or fetched. False: the job has dropped or left the generation
        behind, and the part must go."""
        return self._take(
            part, self._catalogue.added(facts_of(part), self.holders(part.generation))
        )

    def offer(self, part: HostManifest) -> bool:
        """Add a part in a durable directory. A person may go back to it, even after the job has
        left it behind. False: it is useless, and must go."""
        holders = self.holders(part.generation)
        return self._take(part, self._catalogue.offered(facts_of(part), holders))

    def _take(self, part: HostManifest, taken: Catalogue | None) -> bool:
        if taken is None:
            return False
        number, before = part.generation, self._catalogue.numbered.get(part.generation)
        is_other = before is not None and before.snapshot != taken.numbered[number].snapshot
        self._catalogue = taken
        if is_other or number not in self._held:
            self._held[number] = HeldParts()
        self._held[number][part.host] = part
        return True

    def without(self, host: str, number: int) -> None:
        """Remove a host's part of a generation."""
        if number in self._held:
            self._held[number].pop(host, None)

    def forget(self, host: str, *, is_released: bool = False) -> None:
        """Remove a lost host and its contents; ``is_released``: for good."""
        if is_released:
            self._catalogue = self._catalogue.released(host)
        for parts in (*self._held.values(), *self._snapshots.values()):
            parts.pop(host, None)

    def set_aside(self, number: int) -> None:
        """Record a generation that a fresh job begins without."""
        self._catalogue = self._catalogue.with_aside(number)

    def go_back_to(self, number: int | None) -> tuple[int, ...]:
        """Go on from this generation. Returns the numbers for hosts to drop."""
        known, dropped = self._catalogue.gone_back_to(number)
        self._follow(known)
        return dropped

    def give_up_after(self, number: int) -> None:
        """Drop newer generations: a person goes on from this one."""
        self._follow(self._catalogue.gave_up_after(number, self.survey()))

    def keep(self, number: int) -> tuple[int, ...]:
        """Forget all generations before this one. Returns the numbers for hosts to drop."""
        writers = {h for n, held in self._held.items() if n >= number for h in held.writers()}
        known, dropped = self._catalogue.keeping(number, writers)
        self._follow(known)
        return dropped

    def _follow(self, known: Catalogue) -> None:
        self._catalogue = known
        self._held = {n: held for n, held in self._held.items() if known.has(n)}

    # ------------------------------------------------------------------ damage and proof

    def note_unread(self, host: str, reasons: Iterable[str]) -> None:
        """Record a joining host's unreadable sealed parts."""
        self._catalogue = self._catalogue.with_unread(host, reasons)

    def note_damaged(self, host: str, number: int, reason: str) -> None:
        """Record an unreadable generation on a host or in its durable directory."""
        self._catalogue = self._catalogue.with_damage(host, number, reason)

    def note_examined(self, host: str, number: int, directory: str, damage: Sequence[str]) -> None:
        """Record a host's comparison of its part with its manifest."""
        self._catalogue = self._catalogue.examined(host, number, directory, damage)

    def failed_proof(self, number: int, reason: str) -> str:
        """Record a failed proof of a generation. Returns the verdict at a second failure, else
        nothing."""
        self._catalogue, is_second = self._catalogue.failed_proof(number)
        return doubtful(self._catalogue, self.survey(), number, reason) if is_second else ""

    def prove(self, number: int, found: Mapping[str, int]) -> None:
        """Raise ``ProofError`` unless the restored tensors' fingerprints, by name, equal the
        written ones."""
        held = self._held[number]
        compare(held.fingerprints(), found)
        self._catalogue = self._catalogue.passed_proof(number)
        for host, part in list(held.items()):
            if part.unproven:
                held[host] = replace(part, unproven=())

    def is_whole_as_written(self, number: int) -> bool:
        """Whether hosts hold a generation wholly without unproven pieces of other hosts."""
        try:
            check_whole(map(proven_only, self._held[number].values()), exact=False)
        except LayoutError:
            return False
        return True
