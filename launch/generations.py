"""What the coordinator knows of the generations: every host's manifests, what they cover together,
and the proof."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from scalai.core.collection import Collection, concatenate
from scalai.core.coverage import check_coverage
from scalai.core.errors import LayoutError
from scalai.core.fingerprint import compare, tensor_fingerprints
from scalai.core.membership import Generation
from scalai.store.manifest import HostManifest


def check_whole(parts: Iterable[HostManifest], *, exact: bool = True) -> None:
    """Raise ``LayoutError`` unless the parts hold every element of every tensor of the job, all
    from one step.

    ``exact`` False: pieces that hosts fetched from each other may overlap with those that were
    deposited.
    """
    parts = list(parts)
    steps = sorted({part.step for part in parts})
    if len(steps) != 1:
        raise LayoutError(f"parts of steps {steps}; a state is made of one step only.")
    rows = concatenate([part.collection for part in parts])
    expected = max(int(part.about["tensors"]) for part in parts)
    if len(rows.tensors) != expected:
        raise LayoutError(
            f"{len(rows.tensors)} of {expected} tensors are held by "
            f"{sorted(p.host for p in parts)}."
        )
    check_coverage(rows, exact_partition=exact)


def fingerprints(parts: Iterable[HostManifest]) -> Mapping[str, int]:
    """Return the fingerprint of every tensor by name. Equal boxes on several hosts must agree
    (``ProofError``)."""
    parts = list(parts)
    rows = concatenate([part.collection for part in parts])
    values = np.concatenate([part.fingerprint for part in parts])
    return tensor_fingerprints(rows, values)


def deposit_name(part: HostManifest) -> str:
    """Return what the parts of one deposit have in common: the run of the coordinator, the round
    and the step, which a host's part says about itself."""
    return str(part.about.get("deposit", f"generation-{part.generation}"))


class Generations:
    """Committed generations and the deposits on their way to become one, by host. Not shared
    between threads."""

    def __init__(self) -> None:
        self._committed: dict[int, dict[str, HostManifest]] = {}
        self._deposits: dict[str, dict[str, HostManifest]] = {}
        self._numbers: dict[str, int] = {}
        self._abandoned: set[int] = set()
        self._fingerprints: dict[int, Mapping[str, int]] = {}

    def deposit(self, part: HostManifest) -> Mapping[str, HostManifest]:
        """Note a sealed part; return all parts of the same deposit so far, by host."""
        parts = self._deposits.setdefault(deposit_name(part), {})
        parts[part.host] = part
        return parts

    def deposited(self, name: str, hosts: Iterable[str]) -> dict[str, HostManifest]:
        """Return the parts of a deposit on these hosts."""
        wanted = frozenset(hosts)
        return {h: p for h, p in self._deposits.get(name, {}).items() if h in wanted}

    def whole_deposit(self) -> str | None:
        """Return the name of a deposit that covers the state and was never committed, the furthest
        one, or None."""
        found = []
        for name, parts in self._deposits.items():
            try:
                check_whole(parts.values())
            except LayoutError:
                continue
            found.append((next(iter(parts.values())).step, name))
        return max(found)[1] if found else None

    def commit(self, number: int, name: str) -> None:
        """The parts of this deposit are generation ``number`` now."""
        parts = self._deposits.pop(name)
        self._numbers[name] = number
        self._committed[number] = {h: replace(p, generation=number) for h, p in parts.items()}
        self._fingerprints[number] = fingerprints(parts.values())

    def late(self) -> Iterator[tuple[str, str, int]]:
        """Take the sealed parts whose deposit was committed while their host was away; yield host,
        deposit and generation."""
        for name in [n for n in self._deposits if self._numbers.get(n) in self._committed]:
            for host, part in self._deposits.pop(name).items():
                number = self._numbers[name]
                self._committed[number][host] = replace(part, generation=number)
                yield host, name, number

    def forget_deposits(self) -> None:
        """A round begins: what was sealed and not committed is of no use any more."""
        self._deposits.clear()

    def name(self, number: int) -> str:
        """Return the name of the deposit that became this generation."""
        return deposit_name(next(iter(self._committed[number].values())))

    def step(self, number: int) -> int:
        """Return the step of a committed generation."""
        return next(iter(self._committed[number].values())).step

    def facts(self, number: int) -> Mapping[str, Any]:
        """Return what the workers of a generation told about the script."""
        told: dict[str, Any] = {}
        for part in self._committed[number].values():
            told.update(part.about.get("facts", {}))
        return told

    def add(self, part: HostManifest) -> bool:
        """A host holds this part of a committed generation (it was re-adopted, or grew by what was
        fetched). False: the job has dropped or left that generation behind, the part must go."""
        known = self._numbers.get(deposit_name(part)) == part.generation
        if part.generation in self._abandoned or (known and part.generation not in self._committed):
            return False
        self._committed.setdefault(part.generation, {})[part.host] = part
        self._numbers[deposit_name(part)] = part.generation
        return True

    def is_foreign(self, part: HostManifest) -> bool:
        """Whether another run of the job gave the number of this part to another state."""
        parts = self._committed.get(part.generation, {}).values()
        return any(deposit_name(other) != deposit_name(part) for other in parts)

    def is_known(self, part: HostManifest) -> bool:
        """Whether this run of the job has made this part's generation or begun with it."""
        return self._numbers.get(deposit_name(part)) == part.generation

    def go_back_to(self, number: int | None) -> tuple[int, ...]:
        """The job goes on from this generation: later ones, whose parts were missing, are not of
        its history any more. Return them."""
        later = tuple(sorted(n for n in self._committed if n > (number or 0)))
        for abandoned in later:
            del self._committed[abandoned]
        self._abandoned |= set(later)
        if number is not None and number not in self._fingerprints:
            # Now, because a host that goes away during the restore takes its fingerprints with it.
            self._fingerprints[number] = fingerprints(self._committed[number].values())
        return later

    def parts(self, number: int) -> Mapping[str, HostManifest]:
        return self._committed[number]

    def forget(self, host: str) -> None:
        """The host is gone, and what it held."""
        for parts in (*self._committed.values(), *self._deposits.values()):
            parts.pop(host, None)

    def keep(self, number: int) -> tuple[int, ...]:
        """Forget all generations but this one; return those that were there."""
        dropped = tuple(sorted(n for n in self._committed if n < number))
        for old in dropped:
            del self._committed[old]
            self._fingerprints.pop(old, None)
        return dropped

    def covered(self) -> tuple[Generation, ...]:
        """Return the committed generations that the hosts hold wholly, oldest first by step and
        number."""
        whole = []
        for number, parts in self._committed.items():
            if not parts:
                continue
            try:
                check_whole(parts.values(), exact=False)
            except LayoutError:
                continue
            step = next(iter(parts.values())).step
            whole.append(Generation(number, step, frozenset(parts)))
        return tuple(sorted(whole, key=lambda generation: (generation.step, generation.number)))

    def prove(
        self, number: int, rows: Collection, values: "np.ndarray[tuple[int], np.dtype[np.uint64]]"
    ) -> None:
        """Raise ``ProofError`` unless these restored pieces make up exactly what was deposited."""
        compare(self._fingerprints[number], tensor_fingerprints(rows, values))
