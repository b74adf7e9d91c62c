"""The parts of one state by host: whether they are the whole of it, and the fingerprints that were
committed of it, with which every proof compares.

``HeldParts`` keeps what follows from all parts up to date as hosts come and go.
"""

from collections import Counter, UserDict
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from scalai.core.errors import LayoutError, ProofError
from scalai.core.tensors.collection import concatenate
from scalai.core.tensors.coverage import Cover
from scalai.core.tensors.fingerprint import (
    Committed,
    combine,
    tensor_fingerprints,
    unite_committed,
)
from scalai.core.tensors.region import Box
from scalai.store.generation import contradiction
from scalai.store.manifest import HostManifest
from scalai.store.parts import attached_hosts, is_fetched


def written_fingerprints(parts: Iterable[HostManifest]) -> Mapping[str, int]:
    """Return the fingerprint of every tensor by name, added up from the pieces of a snapshot. Equal
    boxes on several hosts must agree (``ProofError``)."""
    parts = list(parts)
    rows = concatenate([part.collection for part in parts])
    values = np.concatenate([part.fingerprint for part in parts])
    return tensor_fingerprints(rows, values)


def committed_fingerprints(parts: Iterable[HostManifest]) -> Mapping[str, int]:
    """Return the fingerprint of every tensor of a whole generation by name, as it was committed.

    Raises:
        ProofError: The parts say different things; or they say nothing, as of a converted
            generation, and hosts have fetched pieces that overlap.
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
    """Raise ``ProofError`` where two parts of one generation contradict each other."""
    if contradiction is not None:
        raise ProofError(
            f"{contradiction} One of them is of another state: remove its part, or start without "
            "its host."
        )


def _fingerprints_of_a_cover(parts: Sequence[HostManifest], names: Set[str]) -> Mapping[str, int]:
    """Add up pieces that cover every one of these tensors once: those that were written, before
    those that were fetched and may overlap with them."""
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
    """Parts by host, of one state.

    Args:
        committed: The statement of the coordinator that committed it; None: the parts tell.
    """

    def __init__(self, committed: Committed | None = None) -> None:
        self._committed = committed
        self._fingerprints = None if committed is None else committed.fingerprints
        self._attached: frozenset[str] | None = frozenset()
        """Hosts whose durable parts are among these; None: to be gathered anew."""
        self._cover = Cover()
        self._known: dict[str, str] | None = {}
        """By tensor a host that states its fingerprint; None: to be gathered anew."""
        self._hosts: tuple[str, ...] = ()
        """Writers that the parts name."""
        self._prints: dict[str, int] | None = {}
        """What all parts state; None: to be gathered anew, with ``_hosts``."""
        self._steps = Counter[int]()
        """How many parts are of each step."""
        self._holders: frozenset[str] | None = None
        super().__init__()

    def __setitem__(self, host: str, part: HostManifest) -> None:
        known = self.data.get(host)
        if known is None or known.collection is not part.collection:
            # A part that does not say how many there are is of no whole state.
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
        """Whether they hold every element of every tensor, all from one step; pieces may
        overlap."""
        return self._is_of_one_step() and self._cover.is_whole()

    def is_whole_without(self, host: str) -> bool:
        """Whether they would without this host."""
        return self._is_of_one_step() and self._cover.is_whole_without(host)

    def _is_of_one_step(self) -> bool:
        return len(self._steps) == 1

    def _forget_step(self, part: HostManifest) -> None:
        self._steps[part.step] -= 1
        if not self._steps[part.step]:
            del self._steps[part.step]

    def holders(self) -> frozenset[str]:
        """Return the hosts."""
        if self._holders is None:
            self._holders = frozenset(self.data)
        return self._holders

    def contradiction(self, part: HostManifest) -> str | None:
        """Say which of the parts was committed with other fingerprints than this one; None: none
        that is known."""
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

    def stated(self) -> Committed | None:
        """Return what was committed, or what the parts state together."""
        if self._committed is not None:
            return self._committed
        hosts = self.writers()
        return Committed(hosts, dict(self._prints or {})) if hosts else None

    def writers(self) -> tuple[str, ...]:
        """Return the hosts that wrote the state, as far as known."""
        if self._committed is not None:
            return self._committed.hosts
        if self._prints is None:
            self._hosts, self._prints = (), {}
            for part in self.data.values():
                self._gather(part)
        return self._hosts

    def attached(self) -> frozenset[str]:
        """Return the hosts whose durable parts are among these."""
        if self._attached is None:
            named = (host for part in self.data.values() for host in attached_hosts(part))
            self._attached = frozenset(named)
        return self._attached

    def has_fingerprints(self) -> bool:
        """Whether the fingerprints of all tensors are known; they stay known when hosts go."""
        try:
            self.fingerprints()
        except (LayoutError, ProofError):
            return False
        return True

    def fingerprints(self) -> Mapping[str, int]:
        """Return the fingerprint of every tensor by name, as of ``committed_fingerprints``."""
        if self._fingerprints is None:
            self._fingerprints = committed_fingerprints(self.data.values())
        return self._fingerprints

    def pin(self) -> bool:
        """Keep the statement of a whole state from now on. Returns whether there was none yet.
        Raises ``ProofError`` where the parts contradict each other."""
        if self._committed is not None or not self.is_whole():
            return False
        prints = committed_fingerprints(self.data.values())
        hosts = self.writers() or tuple(sorted(self.data))
        self._committed = Committed(hosts, prints)
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
