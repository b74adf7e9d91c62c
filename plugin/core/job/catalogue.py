"""States of a job by number and by snapshot, and their standing.

The catalogue keeps decisions: a number given to a snapshot, a generation brought by a host or given
up by a person. The contents of hosts come from outside as a ``Survey``, at each question. Numbers
only grow within a run; a descendant of another generation is newer.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from scalai.core.job.membership import Generation
from scalai.core.job.recovery import Descent, KnownState, Origin, contains


class SnapshotId(NamedTuple):
    """Run, round and step of a snapshot. ``run`` is the random name of one run of the job."""

    run: str
    round: int
    step: int


def snapshot_id(snapshot: str) -> SnapshotId | None:
    """Parse the name of a snapshot; None: another kind of name."""
    run, *place = snapshot.rsplit("-", 2)
    if len(place) != 2 or not all(number.isdecimal() for number in place):
        return None
    return SnapshotId(run, int(place[0]), int(place[1]))


@dataclass(frozen=True, eq=False, slots=True)
class PartFacts:
    """One host's part of a state.

    Attributes:
        number: Generation of the part; below 0: sealed, not committed.
        step: Optimizer step.
        snapshot: Name of the snapshot, equal in all of its parts.
        descent: Origin of the state.
        named: Hosts of the snapshot by the part's list.
    """

    host: str
    number: int
    step: int
    snapshot: str
    descent: Descent
    named: Collection[str] = ()

    @property
    def id(self) -> SnapshotId | None:
        return snapshot_id(self.snapshot)


class NumberStanding(Enum):
    """Standing of a number in the job."""

    MADE = "this coordinator gave it to a snapshot"
    BROUGHT = "a host brought it"
    OFFERED = "known from a disk alone: the job had gone on without it, and a person may go back"
    UNREAD = "only damage is known of it"
    ASIDE = "the job begins anew without it; hosts drop it once the job has its own state"
    LEFT = "the job went back behind it"
    GIVEN_UP = "a person gave it up; hosts drop it at the next start"


HELD = frozenset({NumberStanding.MADE, NumberStanding.BROUGHT, NumberStanding.OFFERED})
"""A state of the job has the number."""
PASSED = frozenset({NumberStanding.LEFT, NumberStanding.GIVEN_UP})
"""Hosts drop parts of these."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """A generation by its number.

    Attributes:
        snapshot, step, descent: Of the state; "", None if unreadable.
        damaged: Reasons by host for an unreadable part or directory.
        found: Hosts that found damage at a second look.
        unproven: After a failed proof without a later success: directory of each host with an
            undamaged part at a second look. None: no doubt.
    """

    number: int
    standing: NumberStanding
    snapshot: str = ""
    step: int | None = None
    descent: Descent | None = None
    origin: Origin = Origin.STORE
    damaged: Mapping[str, str] = field(default_factory=dict)
    found: frozenset[str] = frozenset()
    unproven: Mapping[str, str] | None = None

    @property
    def id(self) -> SnapshotId | None:
        return snapshot_id(self.snapshot)


@dataclass(frozen=True, slots=True)
class SealedSnapshot:
    """Sealed, uncommitted parts: step, writers, and hosts named by the newest part (usually one
    shared list)."""

    step: int
    hosts: frozenset[str]
    named: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class RefusedSnapshot:
    """A covering snapshot without a valid state: its replicas differ (``reason``)."""

    step: int
    hosts: tuple[str, ...]
    reason: str


class Contents(NamedTuple):
    """Contents of the present hosts of one generation.

    ``hosts`` hold parts; ``is_whole``: together they hold every element; ``writers``: known hosts
    of the snapshot; ``attached``: hosts with durable parts among these.
    """

    hosts: frozenset[str]
    is_whole: bool
    writers: tuple[str, ...] = ()
    attached: frozenset[str] = frozenset()


NOTHING = Contents(frozenset(), is_whole=False)


class Survey(NamedTuple):
    """Contents of the present hosts: generations by number, holders of sealed parts by snapshot."""

    generations: Mapping[int, Contents]
    snapshots: Mapping[str, frozenset[str]] = {}

    def of(self, number: int) -> Contents:
        return self.generations.get(number, NOTHING)


@dataclass(frozen=True, slots=True)
class Lacking:
    """An incomplete generation. ``step`` None: unreadable manifests; ``present`` hosts hold parts,
    ``missing`` writers are away; ``damaged``: reasons by host; ``is_found``: found at a second
    look."""

    number: int
    step: int | None
    present: tuple[str, ...]
    missing: tuple[str, ...]
    damaged: Mapping[str, str]
    is_found: bool = False


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A snapshot sealed in part: hosts with parts, and absent hosts of the rest."""

    step: int
    present: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All states of a job; each change returns a new catalogue.

    Attributes:
        numbered: Generations by number. Numbers below ``oldest`` are dropped.
        sealed: Snapshots by name, also those of lost parts.
        refused: Refused snapshots by name, until something as far is committed.
        unread: Reason of unreadable sealed parts, by host.
        left: Released hosts: their contents do not come back.
        descends: Origin of generation ``oldest``; the job owns all states in it.
        failures: Vain states of survivors of the present failure.
    """

    numbered: Mapping[int, Numbered] = field(default_factory=dict)
    sealed: Mapping[str, SealedSnapshot] = field(default_factory=dict)
    refused: Mapping[str, RefusedSnapshot] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    left: frozenset[str] = frozenset()
    oldest: int = 0
    descends: Descent | None = None
    failures: tuple[KnownState, ...] = ()

    # ------------------------------------------------------------------ questions

    def has(self, number: int) -> bool:
        """Whether a state of this job has this number."""
        return self._standing(number) in HELD

    def is_offered(self, number: int) -> bool:
        return self._standing(number) is NumberStanding.OFFERED

    def is_made(self, number: int) -> bool:
        """Whether this coordinator gave the number."""
        return self._standing(number) is NumberStanding.MADE

    def _standing(self, number: int) -> NumberStanding | None:
        found = self.numbered.get(number)
        return None if found is None else found.standing

    def number_of(self, snapshot: str) -> int | None:
        """Number of a snapshot; None: never committed."""
        return next((n for n, each in self.numbered.items() if each.snapshot == snapshot), None)

    def is_known(self, part: PartFacts) -> bool:
        """Whether this run has made the part's generation or begun with it."""
        if part.number < self.oldest and self.descends is not None:
            return contains(self.descends, part.descent)
        found = self.numbered.get(part.number)
        return found is not None and found.snapshot == part.snapshot

    def is_foreign(self, part: PartFacts, holders: Collection[str]) -> bool:
        """Whether another state has this part's number; ``holders``: present hosts with parts of
        the number."""
        found = self.numbered.get(part.number)
        is_other = found is not None and found.snapshot != part.snapshot
        return is_other and self.has(part.number) and bool(holders)

    def newest(self, survey: Survey) -> Numbered | None:
        """Newest generation with parts on present hosts."""
        numbers = [n for n in self.numbered if self.has(n) and survey.of(n).hosts]
        return self.numbered[max(numbers)] if numbers else None

    def candidates(self) -> tuple[str, ...]:
        """Names of sealed snapshots for the newest state, the furthest first. One before the newest
        generation's step was left behind: under a new number it would pass for the newest state."""
        newest = self.numbered.get(max(filter(self.has, self.numbered), default=0))
        passed = 0 if newest is None or newest.step is None else newest.step
        found = [(each.step, name) for name, each in self.sealed.items() if each.step >= passed]
        return tuple(name for _, name in sorted(found, reverse=True))

    def on_the_way(self, run: str, round: int) -> tuple[str, ...]:
        """Names of a round's snapshots sealed in part."""
        return tuple(name for name in self.sealed if name.startswith(f"{run}-{round}-"))

    def whole(self, survey: Survey) -> tuple[Generation, ...]:
        """Whole generations, oldest first.

        A descendant is newer; else the number decides: within a run numbers only grow, also after a
        return to an earlier step. Generations of a disk alone are older than all others: another
        run may have left them there.
        """
        found = [
            Generation(number, each.step, survey.of(number).hosts)
            for number, each in self.numbered.items()
            if each.step is not None and self.has(number) and survey.of(number).is_whole
        ]
        depth = {one.number: len(self._contained(one.number, found)) for one in found}

        def age(one: Generation) -> tuple[bool, int, int]:
            return not self.is_offered(one.number), depth[one.number], one.number

        return tuple(sorted(found, key=age))

    def _contained(self, number: int, others: Iterable[Generation]) -> list[Generation]:
        return [one for one in others if self._contains(number, one.number)]

    def _contains(self, number: int, other: int) -> bool:
        mine, its = self.numbered[number].descent, self.numbered[other].descent
        return mine is not None and its is not None and contains(mine, its)

    def forks(self, whole: Collection[Generation]) -> tuple[Generation, ...]:
        """Newest generations of diverged runs, each without the others'; more than one needs a
        person's decision."""
        own = [one for one in whole if not self.is_offered(one.number)]
        held = {one.number: self._contained(one.number, own) for one in own}
        return tuple(
            one for one in own
            if not any(one in held[other.number] for other in own if other is not one)
        )  # fmt: skip

    def lacking(self, whole: Sequence[Generation], survey: Survey) -> tuple[Lacking, ...]:
        """Generations newer than the newest of the ``whole`` ones, newest first."""
        newest = max((g.number for g in whole if not self.is_offered(g.number)), default=0)
        known = [
            number
            for number, each in self.numbered.items()
            if each.standing in HELD | {NumberStanding.UNREAD} and not self.is_offered(number)
        ]
        return tuple(
            self._lacking(number, survey.of(number))
            for number in sorted(known, reverse=True)
            if number > newest
        )

    def _lacking(self, number: int, held: Contents) -> Lacking:
        missing = {*held.writers} - held.hosts - held.attached - self.left
        it = self.numbered[number]
        present, away = tuple(sorted(held.hosts)), tuple(sorted(missing))
        return Lacking(number, it.step, present, away, it.damaged, bool(it.found))

    def unfinished(self, present: Iterable[str], survey: Survey) -> tuple[Unfinished, ...]:
        """Snapshots that absent hosts may make whole, the furthest first."""
        here, found = frozenset(present), list[Unfinished]()
        for name, each in self.sealed.items():
            missing = tuple(sorted(each.hosts - here))
            if missing:
                holders = tuple(sorted(survey.snapshots.get(name, ())))
                found.append(Unfinished(each.step, holders, missing))
        return tuple(sorted(found, key=lambda snapshot: (-snapshot.step, snapshot.present)))

    def furthest_refused(self) -> RefusedSnapshot | None:
        return max(self.refused.values(), key=lambda entry: entry.step, default=None)

    def still_unread(self, whole: Sequence[Generation], survey: Survey) -> Mapping[str, str]:
        """Reasons of unreadable sealed parts by host, except for writers of the newest whole
        generation without it: theirs was that part."""
        held = survey.of(whole[-1].number if whole else 0)
        known = {*held.writers} - held.hosts
        return {host: why for host, why in sorted(self.unread.items()) if host not in known}

    def states(self, present: Iterable[str], survey: Survey) -> tuple[KnownState, ...]:
        """All known states, as candidates to go on from with the ``present`` hosts."""
        whole = self.whole(survey)
        newest = whole[-1].number if whole else 0
        passed = f"generation {newest} goes on from it"
        found = list(self.failures)
        for each in whole:
            lost = sorted({*survey.of(each.number).writers} - each.hosts)
            is_offered = self.is_offered(each.number)
            origin = Origin.DISK if is_offered else self.numbered[each.number].origin
            found.append(
                KnownState(
                    origin, each.step, each.number, tuple(sorted(each.hosts)), tuple(lost),
                    doubt="" if is_offered or each.number <= newest else passed,
                    is_left_behind=is_offered,
                )
            )  # fmt: skip
        is_whole = {each.number for each in whole}
        for one in self.lacking((), survey):
            if one.number not in is_whole:
                origin, lacks = self.numbered[one.number].origin, what_lacks(one)
                found.append(
                    KnownState(origin, one.step, one.number, one.present, one.missing, lacks=lacks)
                )
        for sealed in self.unfinished(present, survey):
            why = f"the parts of {list(sealed.missing)} are missing"
            found.append(
                KnownState(Origin.SEALED, sealed.step, None, sealed.present, sealed.missing, why)
            )
        if (refused := self.furthest_refused()) is not None:
            found.append(
                KnownState(Origin.SEALED, refused.step, hosts=refused.hosts, doubt=refused.reason)
            )
        return tuple(found)

    # ------------------------------------------------------------------ snapshots

    def with_sealed(self, part: PartFacts) -> "Catalogue":
        """Add a host's sealed part of a snapshot."""
        before = self.sealed.get(part.snapshot, SealedSnapshot(part.step, frozenset()))
        hosts = before.hosts
        if part.host not in hosts or part.named is not before.named:
            hosts |= {part.host, *part.named}
        now = SealedSnapshot(part.step, hosts, part.named)
        return replace(self, sealed={**self.sealed, part.snapshot: now})

    def without_sealed(self, names: Container[str]) -> "Catalogue":
        """Drop snapshots: useless, or generations now."""
        return replace(self, sealed={n: each for n, each in self.sealed.items() if n not in names})

    def with_refused(self, name: str, hosts: Iterable[str], reason: str) -> "Catalogue":
        """Refuse a snapshot for ever: its replicas differ."""
        refused = RefusedSnapshot(self.sealed[name].step, tuple(sorted(hosts)), reason)
        return replace(self.without_sealed({name}), refused={**self.refused, name: refused})

    def committed(
        self, name: str, number: int, descent: Descent, hosts: Iterable[str], origin: Origin
    ) -> "Catalogue":
        """Make a snapshot generation ``number``; these hosts hold its parts."""
        step = self.sealed[name].step
        return replace(
            self.without_sealed({name})._with(
                Numbered(number, NumberStanding.MADE, name, step, descent, origin)
            ),
            refused={n: entry for n, entry in self.refused.items() if entry.step > step},
            left=self.left - frozenset(hosts),
        )

    def with_failure(self, step: int, why: str) -> "Catalogue":
        """Record that survivors of a failure wrote no state at this step."""
        return replace(
            self, failures=(*self.failures, KnownState(Origin.SURVIVORS, step, lacks=why))
        )

    # ------------------------------------------------------------------ generations

    def added(self, part: PartFacts, holders: Collection[str]) -> "Catalogue | None":
        """Add a host's part of a generation; the ``holders`` hold others. None: the job has dropped
        the generation or left it behind, and the part must go."""
        number, found = part.number, self.numbered.get(part.number)
        is_past = number < self.oldest and not self.has(number)
        if is_past or (found is not None and found.standing in PASSED):
            return None
        known = self
        if found is not None and found.snapshot != part.snapshot and not holders:
            # The holders of another state of this number are lost, and with them the cause of a
            # doubt.
            known = self._with(replace(found, unproven=None))
        return known._took(part, NumberStanding.BROUGHT)

    def offered(self, part: PartFacts, holders: Collection[str]) -> "Catalogue | None":
        """Add a part in a durable directory, perhaps of a generation left behind. None: it is
        useless, and must go."""
        found = self.numbered.get(part.number)
        is_passed = found is not None and found.standing in PASSED
        if is_passed or self.is_foreign(part, holders):
            return None
        return self._took(part, NumberStanding.OFFERED)

    def _took(self, part: PartFacts, standing: NumberStanding) -> "Catalogue":
        before = self.numbered.get(part.number, Numbered(part.number, standing))
        taken = replace(before, snapshot=part.snapshot, step=part.step, descent=part.descent)
        if not self.has(part.number):
            taken = replace(taken, standing=standing)
        known = self if taken == before else self._with(taken)
        is_back = part.host in self.left
        return replace(known, left=self.left - {part.host}) if is_back else known

    def _with(self, *entries: Numbered) -> "Catalogue":
        return replace(self, numbered={**self.numbered, **{each.number: each for each in entries}})

    def _without(self, numbers: Container[int]) -> "Catalogue":
        kept = {n: each for n, each in self.numbered.items() if n not in numbers}
        return replace(self, numbered=kept)

    def released(self, host: str) -> "Catalogue":
        """Release a host for good."""
        return replace(self, left=self.left | {host})

    def with_aside(self, number: int) -> "Catalogue":
        """Set a host's generation aside: the job begins anew."""
        return self._with(Numbered(number, NumberStanding.ASIDE))

    def gone_back_to(self, number: int | None) -> tuple["Catalogue", tuple[int, ...]]:
        """Go on from this generation. Also returns the numbers for hosts to drop: later, incomplete
        ones, and those given up by a person."""
        later = [n for n in self.numbered if self.has(n) and n > (number or 0)]
        known = self._with(*(_gone(self.numbered[n], NumberStanding.LEFT) for n in later))
        told = [n for n, e in known.numbered.items() if e.standing is NumberStanding.GIVEN_UP]
        known = known._with(*(_gone(known.numbered[n], NumberStanding.LEFT) for n in told))
        return known._chosen(number or 0), tuple(sorted({*later, *told}))

    def gave_up_after(self, number: int, survey: Survey) -> "Catalogue":
        """Give up newer generations, whole or not, and diverged ones: a person goes on from this
        one."""
        apart = [
            n for n in self.numbered
            if self.has(n) and not self.is_offered(n) and survey.of(n).hosts
            and not self._contains(number, n)
        ]  # fmt: skip
        known = [n for n in self.numbered if self.has(n) or self.numbered[n].damaged]
        later = [n for n in known if n > number or n in apart]
        gone = self._with(*(_gone(self.numbered[n], NumberStanding.GIVEN_UP) for n in later))
        return replace(gone._chosen(number), refused={}, unread={})

    def _chosen(self, number: int) -> "Catalogue":
        if not self.is_offered(number):
            return self
        return self._with(replace(self.numbered[number], standing=NumberStanding.BROUGHT))

    def keeping(self, number: int, writers: Collection[str]) -> tuple["Catalogue", tuple[int, ...]]:
        """Forget all generations before this one. Also returns the numbers for hosts to drop.

        Args:
            number: Oldest generation to keep.
            writers: Hosts of the remaining generations.
        """
        older = [n for n in self.numbered if n < number]
        aside = [n for n in self.numbered if self._standing(n) is NumberStanding.ASIDE]
        dropped = {*filter(self.has, older), *aside}
        kept = self._without({*older, *aside})
        found = kept.numbered.get(number)
        if found is not None:
            kept = kept._with(replace(found, damaged={}, found=frozenset()))
        if found is not None and found.descent is not None:
            kept = replace(kept, descends=found.descent)
        left = self.left & frozenset(writers)
        return replace(kept, oldest=max(self.oldest, number), left=left), tuple(sorted(dropped))

    # ------------------------------------------------------------------ damage and doubt

    def with_unread(self, host: str, reasons: Iterable[str]) -> "Catalogue":
        """Record a joining host's unreadable sealed parts."""
        unread = {name: why for name, why in self.unread.items() if name != host}
        if entry := " ".join(reasons):
            unread[host] = entry
        return replace(self, unread=unread)

    def with_damage(self, host: str, number: int, reason: str) -> "Catalogue":
        """Record an unreadable generation on a host or in its durable directory."""
        before = self.numbered.get(number, Numbered(number, NumberStanding.UNREAD))
        if before.standing in PASSED:
            return self
        return self._with(replace(before, damaged={**before.damaged, host: reason}))

    def examined(
        self, host: str, number: int, directory: str, damage: Sequence[str]
    ) -> "Catalogue":
        """Record a host's comparison of its part with its manifest."""
        before = self.numbered.get(number)
        if before is None or before.standing not in HELD:
            return self
        if damage:
            damaged = {**before.damaged, host: "; ".join(damage)}
            found = before.found | {host}
            return self._with(replace(before, damaged=damaged, found=found, unproven=None))
        if before.unproven is None:
            return self
        return self._with(replace(before, unproven={**before.unproven, host: directory}))

    def found_damage(self) -> tuple[tuple[int, str], ...]:
        """Generations with damage found at a second look, and the hosts."""
        return tuple(sorted((n, host) for n, each in self.numbered.items() for host in each.found))

    def failed_proof(self, number: int) -> tuple["Catalogue", bool]:
        """Record a failed proof. Also returns whether it is the second without a success or damage
        in between."""
        before = self.numbered[number]
        if before.unproven is not None:
            return self, True
        return self._with(replace(before, unproven={})), False

    def passed_proof(self, number: int) -> "Catalogue":
        """Record a successful proof."""
        before = self.numbered[number]
        return self if before.unproven is None else self._with(replace(before, unproven=None))


def _gone(entry: Numbered, standing: NumberStanding) -> Numbered:
    return Numbered(entry.number, standing, entry.snapshot, entry.step, entry.descent)


def what_lacks(state: Lacking) -> str:
    """Text on present and missing hosts of an incomplete generation, and its damage."""
    found = [f"hosts {list(state.present)} hold parts"] if state.present else []
    if state.missing:
        found.append(f"those of {list(state.missing)} are missing")
    found += [f"host {host!r}: {why}" for host, why in sorted(state.damaged.items())]
    return ", ".join(found) or "nothing of it"
