"""What the coordinator knows of the generations: every host's manifests, what they cover together,
and the proof."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from scalai.core.errors import LayoutError, ProofError
from scalai.core.job.membership import Generation
from scalai.core.job.recovery import Descent, contains
from scalai.core.tensors.fingerprint import Committed, compare
from scalai.launch.coordinator.doubts import Doubts
from scalai.launch.coordinator.parts import (
    HeldParts,
    check_alike,
    committed_fingerprints,
    written_fingerprints,
)
from scalai.store.generation import check_whole
from scalai.store.manifest import HostManifest
from scalai.store.parts import attached_hosts, proven_only, snapshot_name


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A generation that is not whole here: its step (None: its manifests cannot be read), the hosts
    that hold parts of it and those that are known to lack, and what is damaged, by host.
    ``is_found``: the damage was found by reading parts again."""

    number: int
    step: int | None
    present: tuple[str, ...]
    missing: tuple[str, ...]
    damaged: Mapping[str, str]
    is_found: bool = False


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A snapshot that was sealed in part and never committed: its step, the hosts that hold parts
    of it, and those that were to write the rest and are not there."""

    step: int
    present: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A snapshot that covers the state and that nobody may go on from: its step, the hosts that
    sealed it, and why."""

    step: int
    hosts: tuple[str, ...]
    reason: str


def _numbered(part: HostManifest, number: int, stated: Committed | None) -> HostManifest:
    """Return a sealed part as that of a generation, with what is stated of its tensors."""
    names = [tensor.name for tensor in part.collection.tensors]
    mine = None if stated is None else stated.of_tensors(names)
    return replace(part, generation=number, committed=mine)


class Generations:
    """Committed generations and the snapshots on their way to become one, by host. Not shared
    between threads."""

    def __init__(self) -> None:
        self._committed: dict[int, HeldParts] = {}
        self._snapshots: dict[str, HeldParts] = {}
        self._sealed: dict[str, tuple[int, frozenset[str], Collection[str]]] = {}
        """By snapshot its step and all of its hosts, also when they have gone with their parts, and
        which hosts the part named that came last."""
        self._refused: dict[str, Refused] = {}
        self._unread: dict[str, str] = {}
        """By host why it cannot read what it had sealed."""
        self._oldest = 0
        """Generations before this one were dropped, whatever was known of them."""
        self._descends: Descent | None = None
        """Where that one comes from: what it contains was the job's own, too."""
        self._made: set[int] = set()
        self._numbers: dict[str, int] = {}
        self._abandoned: set[int] = set()
        self._given_up: set[int] = set()
        self._set_aside: set[int] = set()
        self._offered: set[int] = set()
        self._left: set[str] = set()
        """Hosts that were released: what they held does not come back."""
        self.doubts = Doubts()
        self._steps: dict[int, int] = {}
        self._stated: dict[int, Committed] = {}
        self._fingerprints: dict[int, Mapping[str, int]] = {}

    def add_sealed(self, part: HostManifest) -> Mapping[str, HostManifest]:
        """Note a sealed part; return all parts of the same snapshot so far, by host."""
        name = snapshot_name(part)
        parts = self._snapshots.setdefault(name, HeldParts())
        parts[part.host] = part
        _, hosts, before = self._sealed.get(name, (part.step, frozenset[str](), None))
        named = part.about.get("hosts", ())
        if part.host not in hosts or named is not before:  # usually all parts share one list
            hosts |= {part.host, *named}
        self._sealed[name] = part.step, hosts, named
        return parts

    def sealed_parts(self, name: str, hosts: Iterable[str]) -> dict[str, HostManifest]:
        """Return the parts of a snapshot on these hosts."""
        wanted = frozenset(hosts)
        return {h: p for h, p in self._snapshots.get(name, {}).items() if h in wanted}

    def whole_snapshot(self) -> str | None:
        """Return the name of a snapshot that covers the state and was never committed, the furthest
        one, or None. One of a step before the newest generation was left behind: a host that was
        away may bring it, and under a new number it would pass for the newest state."""
        found = []
        passed = self._steps.get(max(self._committed, default=0), 0)
        for name, parts in self._snapshots.items():
            if not parts.is_whole():
                continue
            try:
                check_whole(parts.values())
            except LayoutError:
                continue
            step = next(iter(parts.values())).step
            if step >= passed:
                found.append((step, name))
        return max(found)[1] if found else None

    def commit(self, number: int, name: str) -> None:
        """The parts of this snapshot are generation ``number`` now.

        Raises:
            ProofError: Its replicas differ: it never becomes one.
        """
        parts = self._snapshots.pop(name)
        self._sealed.pop(name)
        step, hosts = next(iter(parts.values())).step, tuple(sorted(parts))
        try:
            stated = Committed(hosts, written_fingerprints(parts.values()))
        except ProofError as error:
            self._refused[name] = Refused(step, hosts, str(error))
            raise
        self._refused = {n: entry for n, entry in self._refused.items() if entry.step > step}
        self._numbers[name] = number
        self._made.add(number)
        self._left -= set(parts)
        self._steps[number] = step
        self._stated[number], self._fingerprints[number] = stated, stated.fingerprints
        self._committed[number] = HeldParts()
        for host, part in parts.items():
            self._committed[number][host] = _numbered(part, number, stated)

    def refused(self) -> Refused | None:
        """Return the furthest snapshot that was refused and nothing has taken the place of."""
        return max(self._refused.values(), key=lambda entry: entry.step, default=None)

    def is_refused(self, name: str) -> bool:
        """Whether a snapshot was refused: what others bring of it does not count either."""
        return name in self._refused

    def stated(self, number: int) -> Committed | None:
        """Return what is stated of a generation, as far as it is known here."""
        if number in self._stated:
            return self._stated[number]
        parts = self._committed.get(number)
        return parts.stated() if parts is not None else None

    def check_stated(self, part: HostManifest) -> None:
        """Raise ``ProofError`` where this part was committed with other fingerprints than those
        that are known of its generation; names the hosts and the tensors."""
        known = self._committed.get(part.generation)
        if known is not None:
            check_alike(known.contradiction(part))

    def late(self) -> Iterator[tuple[str, int]]:
        """Take the sealed parts whose snapshot was committed while their host was away; yield host
        and generation."""
        for name in [n for n in self._snapshots if self._numbers.get(n) in self._committed]:
            self._sealed.pop(name)
            number, late = self._numbers[name], self._snapshots.pop(name)
            parts = self._committed[number]
            for host, part in late.items():
                parts[host] = _numbered(part, number, self.stated(number))
            if number not in self._stated and parts.is_whole():
                # Of tensors that these alone hold nobody else states anything.
                with suppress(ProofError):
                    known, prints = self.stated(number), committed_fingerprints(parts.values())
                    hosts = known.hosts if known is not None else tuple(sorted(parts))
                    self._stated[number] = Committed(hosts, prints)
                    for host, part in late.items():
                        parts[host] = _numbered(part, number, self._stated[number])
            for host in late:
                yield host, number

    def unfinished(self, present: Iterable[str]) -> tuple[Unfinished, ...]:
        """Return the snapshots that are sealed in part and that hosts beside the ``present`` ones
        may make whole, the furthest first; also those whose parts have gone with their hosts."""
        here, found = frozenset(present), list[Unfinished]()
        for name, (step, hosts, _) in self._sealed.items():
            missing = tuple(sorted(hosts - here))
            if missing:
                found.append(Unfinished(step, tuple(sorted(self._snapshots[name])), missing))
        return tuple(sorted(found, key=lambda snapshot: (-snapshot.step, snapshot.present)))

    def on_the_way(self, run: str, round: int) -> list[tuple[str, tuple[str, ...]]]:
        """Return a round's snapshots that are sealed in part, with the hosts that hold parts."""
        its = f"{run}-{round}-"
        return [(name, tuple(p)) for name, p in self._snapshots.items() if name.startswith(its)]

    def forget_sealed(self, name: str | None = None) -> tuple[HostManifest, ...]:
        """Forget, and return, what was sealed and not committed; or one snapshot, by its name."""
        names = {*self._snapshots, *self._sealed} if name is None else {name}
        given_up = [part for n in names for part in self._snapshots.pop(n, HeldParts()).values()]
        self._sealed = {n: entry for n, entry in self._sealed.items() if n not in names}
        return tuple(given_up)

    def number(self, name: str) -> int | None:
        """Return the number that a snapshot was given, None where it was never committed."""
        return self._numbers.get(name)

    def newest_part(self) -> HostManifest | None:
        """Return some host's part of the newest generation of which there is any."""
        newest = max((n for n, parts in self._committed.items() if parts), default=0)
        return next(iter(self._committed[newest].values())) if newest else None

    def is_made(self, number: int) -> bool:
        """Whether this coordinator gave a snapshot this number."""
        return number in self._made

    def name(self, number: int) -> str:
        """Return the name of the snapshot that became this generation."""
        return snapshot_name(next(iter(self._committed[number].values())))

    def step(self, number: int) -> int:
        """Return the step of a committed generation."""
        return next(iter(self._committed[number].values())).step

    def facts(self, number: int) -> Mapping[str, Any]:
        """Return what the workers of a generation told about the script."""
        entry: dict[str, Any] = {}
        for part in self._committed[number].values():
            entry.update(part.about.get("facts", {}))
        return entry

    def add(self, part: HostManifest) -> bool:
        """A host holds this part of a committed generation (it was re-adopted, or grew by what was
        fetched). False: the job has dropped or left that generation behind, the part must go."""
        known = self._numbers.get(snapshot_name(part)) == part.generation
        is_left = part.generation in self._abandoned or self._is_past(part.generation)
        if is_left or (known and part.generation not in self._committed):
            return False
        if not known and not self._committed.get(part.generation):
            self._forget_number(part.generation)
        self._take(part)
        return True

    def _is_past(self, number: int) -> bool:
        return number < self._oldest and number not in self._committed

    def _forget_number(self, number: int) -> None:
        """Who held another state under this number has gone before the job began: what was stated
        of that one says nothing of this one."""
        self._numbers = {name: n for name, n in self._numbers.items() if n != number}
        for entry in (self._stated, self._fingerprints):
            entry.pop(number, None)
        self.doubts.passed(number)

    def has(self, number: int) -> bool:
        """Whether a state of this job has this number."""
        return number in self._committed

    def _take(self, part: HostManifest) -> None:
        self._left.discard(part.host)
        self._committed.setdefault(part.generation, HeldParts())[part.host] = part
        self._numbers[snapshot_name(part)] = part.generation
        self._steps[part.generation] = part.step

    def offer(self, part: HostManifest) -> bool:
        """A durable directory has this part of a generation that the job may have left behind: a
        person may go back to it. False: it is of no use, the part must go."""
        if part.generation in self._abandoned or self.is_foreign(part):
            return False
        if part.generation not in self._committed:
            self._offered.add(part.generation)
        self._take(part)
        return True

    def without(self, host: str, number: int) -> None:
        """The host holds nothing of this generation any more."""
        if number in self._committed:
            self._committed[number].pop(host, None)

    def note_damaged(self, host: str, number: int, reason: str) -> None:
        """A host, or a durable directory that it sees, has a generation that cannot be read."""
        if number not in self._abandoned:
            self.doubts.note_damaged(host, number, reason)

    def note_unread(self, host: str, reasons: Iterable[str]) -> None:
        """A joining host cannot read what it had sealed before, for these reasons."""
        self._unread.pop(host, None)
        if entry := " ".join(reasons):
            self._unread[host] = entry

    def unread(self, whole: tuple[Generation, ...]) -> Mapping[str, str]:
        """Return why hosts cannot read what they had sealed, but for those whose part of the newest
        of the ``whole`` generations that is: they wrote one, and have none."""
        newest = whole[-1].number if whole else 0
        stated, held = self.stated(newest), self._committed.get(newest, HeldParts())
        known = (set(stated.hosts) if stated else set[str]()) - set(held)
        return {host: why for host, why in sorted(self._unread.items()) if host not in known}

    def set_aside(self, number: int) -> None:
        """A host holds parts of a generation that the job begins anew without: they go once it has
        a generation of its own."""
        self._set_aside.add(number)

    def incomplete(self, whole: tuple[Generation, ...]) -> tuple[Incomplete, ...]:
        """Return the generations that are newer than the newest of the ``whole`` ones, newest
        first."""
        newest = max((g.number for g in whole if g.number not in self._offered), default=0)
        known = {*self._committed, *self.doubts.numbers()} - self._offered
        return tuple(self._describe(n) for n in sorted(known, reverse=True) if n > newest)

    def _describe(self, number: int) -> Incomplete:
        parts, stated = self._committed.get(number, HeldParts()), self.stated(number)
        seen = {*parts, *(host for part in parts.values() for host in attached_hosts(part))}
        missing = tuple(sorted(set(stated.hosts) - seen - self._left)) if stated else ()
        return Incomplete(
            number, self._steps.get(number), tuple(sorted(parts)), missing,
            self.doubts.damaged(number), self.doubts.has_found(number),
        )  # fmt: skip

    def is_offered(self, number: int) -> bool:
        """Whether the job has left this generation behind and knows it from a disk only."""
        return number in self._offered

    def give_up_after(self, number: int) -> tuple[int, ...]:
        """A person goes on from this generation: newer ones, whole or not, and those of runs that
        went on apart from it are of no use. Return them."""
        known, mine = {*self._committed, *self.doubts.numbers()}, self._descent(number)
        apart = {n for n, held in self._committed.items() if held and n not in self._offered}
        apart = {n for n in apart if not contains(mine, self._descent(n))}
        later = tuple(sorted(n for n in known if n > number or n in apart))
        for given_up in later:
            self._committed.pop(given_up, None)
        self.doubts.give_up(later)
        self._offered.discard(number)
        self._abandoned |= set(later)
        self._given_up |= set(later)
        self._refused.clear()
        self._unread.clear()
        return later

    def is_foreign(self, part: HostManifest) -> bool:
        """Whether another run of the job gave the number of this part to another state."""
        parts = self._committed.get(part.generation, {}).values()
        return any(snapshot_name(other) != snapshot_name(part) for other in parts)

    def is_known(self, part: HostManifest) -> bool:
        """Whether this run of the job has made this part's generation or begun with it."""
        if part.generation < self._oldest and self._descends is not None:
            return contains(self._descends, Descent.of(part.generation, part.about))
        return self._numbers.get(snapshot_name(part)) == part.generation

    def go_back_to(self, number: int | None) -> tuple[int, ...]:
        """The job goes on from this generation: later ones, whose parts were missing, are not of
        its history any more. Return them."""
        later = tuple(sorted(n for n in self._committed if n > (number or 0)))
        for abandoned in later:
            del self._committed[abandoned]
        self.doubts.give_up(later)
        self._abandoned |= set(later)
        given_up, self._given_up = self._given_up, set()
        self._offered.discard(number or 0)
        return tuple(sorted({*later, *given_up}))

    def _note_fingerprints(self, number: int) -> None:
        if number not in self._fingerprints:
            parts = self._committed[number].values()
            self._fingerprints[number] = committed_fingerprints(parts)

    def parts(self, number: int) -> Mapping[str, HostManifest]:
        return self._committed[number]

    def forget(self, host: str, *, is_released: bool = False) -> None:
        """The host is gone, and what it held; ``is_released``: for good."""
        if is_released:
            self._left.add(host)
        for parts in (*self._committed.values(), *self._snapshots.values()):
            parts.pop(host, None)

    def keep(self, number: int) -> tuple[int, ...]:
        """Forget all generations but this one; return those that were there."""
        dropped = tuple(sorted(n for n in self._committed if n < number))
        for old in dropped:
            del self._committed[old]
        aside, self._set_aside = self._set_aside, set()
        self.doubts.keep(number)
        self._oldest = max(self._oldest, number)
        if self._committed.get(number):
            self._descends = self._descent(number)
        self._numbers = {name: n for name, n in self._numbers.items() if not self._is_past(n)}
        tables: tuple[dict[int, Any], ...]
        tables = self._steps, self._stated, self._fingerprints
        for table in tables:
            for old in [n for n in table if self._is_past(n)]:
                del table[old]
        for numbers in (self._made, self._abandoned, self._given_up):
            numbers -= {n for n in numbers if self._is_past(n)}
        self._left &= {host for known in self._stated.values() for host in known.hosts}
        return tuple(sorted({*dropped, *aside}))

    def covered(self, without: str | None = None) -> tuple[Generation, ...]:
        """Return the committed generations that the hosts hold wholly, oldest first; ``without``:
        that they would hold without this one.

        What comes from another one is newer; else by number: within a run numbers only grow, also
        where the job went back to an earlier step. What is known from a disk only is older than all
        else: another run may have left it there."""
        whole = []
        for number, held in self._committed.items():
            parts = held.holders() if without is None else held.holders() - {without}
            is_whole = held.is_whole() if without is None else held.is_whole_without(without)
            if not parts or not is_whole:
                continue
            try:
                # Now, because a host that goes away takes with it what they follow from.
                self._note_fingerprints(number)
            except (LayoutError, ProofError):
                continue
            whole.append(Generation(number, self.step(number), parts))
        depth = {one.number: len(self._contained(one.number, whole)) for one in whole}
        return tuple(
            sorted(whole, key=lambda g: (g.number not in self._offered, depth[g.number], g.number))
        )

    def _contained(self, number: int, others: Iterable[Generation]) -> list[Generation]:
        """Return those of the others that a generation comes from."""
        mine = self._descent(number)
        return [one for one in others if contains(mine, self._descent(one.number))]

    def _descent(self, number: int) -> Descent:
        return Descent.of(number, next(iter(self._committed[number].values())).about)

    def forks(self, whole: Collection[Generation]) -> tuple[Generation, ...]:
        """Return the newest generations of runs that went on apart, each without the others': more
        than one where a person has to decide. ``whole``: those that are."""
        own = [one for one in whole if one.number not in self._offered]
        held = {one.number: self._contained(one.number, own) for one in own}
        return tuple(
            one for one in own
            if not any(one in held[other.number] for other in own if other is not one)
        )  # fmt: skip

    def prove(self, number: int, found: Mapping[str, int]) -> None:
        """Raise ``ProofError`` unless the fingerprints of the restored tensors, by name, are those
        that were written."""
        compare(self._fingerprints[number], found)
        self.doubts.passed(number)
        for host, part in list(self._committed[number].items()):
            if part.unproven:
                self._committed[number][host] = replace(part, unproven=())

    def is_whole_as_written(self, number: int) -> bool:
        """Whether the hosts hold a generation wholly without what was fetched and never proven."""
        try:
            check_whole(map(proven_only, self._committed[number].values()), exact=False)
        except LayoutError:
            return False
        return True

    def verdict(self, number: int, reason: str) -> str:
        """Say what is wrong with a generation whose proof has failed twice, and the ways out."""
        return self.doubts.verdict(number, self.step(number), reason, self._committed[number])
