"""What the coordinator knows of the generations: every host's manifests, what they cover together,
and the proof."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

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


class Generations:
    """Committed generations and the deposits on their way to become one, by host. Not shared
    between threads."""

    def __init__(self) -> None:
        self._committed: dict[int, dict[str, HostManifest]] = {}
        self._deposits: dict[int, dict[str, HostManifest]] = {}
        self._fingerprints: dict[int, Mapping[str, int]] = {}

    def deposit(self, part: HostManifest) -> Mapping[str, HostManifest]:
        """Note a sealed part; return all parts of its step so far, by host."""
        parts = self._deposits.setdefault(part.step, {})
        parts[part.host] = part
        return parts

    def deposited(self, hosts: Iterable[str]) -> tuple[int, dict[str, HostManifest]]:
        """Return the newest deposited step and its parts on these hosts."""
        wanted = frozenset(hosts)
        step = max(self._deposits, default=-1)
        parts = {h: p for h, p in self._deposits.get(step, {}).items() if h in wanted}
        return step, parts

    def commit(self, number: int, step: int) -> None:
        """The deposits of ``step`` are generation ``number`` now."""
        parts = self._deposits.pop(step)
        self._committed[number] = {h: replace(p, generation=number) for h, p in parts.items()}
        self._fingerprints[number] = fingerprints(parts.values())

    def step(self, number: int) -> int:
        """Return the step of a committed generation."""
        return next(iter(self._committed[number].values())).step

    def add(self, part: HostManifest) -> None:
        """A host holds this part of a committed generation (it was re-adopted, or grew by what was
        fetched)."""
        self._committed.setdefault(part.generation, {})[part.host] = part

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
        before = self._fingerprints.get(number) or fingerprints(self._committed[number].values())
        compare(before, tensor_fingerprints(rows, values))
