"""Manifests without their lists of hosts. Each part of a state names all its writers, and thousands
of parts share one list; a join has each list once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from scalai.core.errors import UsageError
from scalai.core.jsonable import Json
from scalai.store.manifest import HostManifest, manifest_bytes, manifest_of_bytes

NOBODY = -1
HOSTS = "hosts"
"""Key in a manifest's ``about``: the hosts of the snapshot."""


@dataclass(frozen=True, slots=True)
class BroughtPart:
    """A manifest without its lists. ``hosts`` of its snapshot and ``writers`` of its generation are
    places in the lists beside it; ``NOBODY``: no list."""

    manifest: bytes
    hosts: int
    writers: int


class HostLists:
    """Distinct lists of hosts in manifests."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, ...], int] = {}

    @property
    def lists(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self._places)

    def take(self, manifests: Iterable[bytes]) -> tuple[BroughtPart, ...]:
        """These manifests without their lists."""
        return tuple(self._part(manifest_of_bytes(each, "this host")) for each in manifests)

    def _part(self, part: HostManifest) -> BroughtPart:
        named, committed = part.about.get(HOSTS), part.committed
        hosts, writers = NOBODY, NOBODY
        if isinstance(named, list):
            hosts = self._place(tuple(named))
            part = replace(part, about={k: v for k, v in part.about.items() if k != HOSTS})
        if committed is not None:
            writers = self._place(committed.hosts)
            part = replace(part, committed=replace(committed, hosts=()))
        return BroughtPart(manifest_bytes(part), hosts, writers)

    def _place(self, names: tuple[str, ...]) -> int:
        return self._places.setdefault(names, len(self._places))


def read_part(part: BroughtPart, lists: Sequence[tuple[str, ...]], where: str) -> HostManifest:
    """The manifest with its lists of hosts.

    Raises:
        StoreError: It is not a manifest; names ``where``.
        UsageError: A list is missing.
    """
    for place in (part.hosts, part.writers):
        if not NOBODY <= place < len(lists):
            raise UsageError(
                f"a part of {where} names list {place} of {len(lists)} lists of hosts."
            )
    found = manifest_of_bytes(part.manifest, where)
    if part.hosts != NOBODY:
        found = replace(found, about={**found.about, HOSTS: list(lists[part.hosts])})
    if part.writers != NOBODY and found.committed is not None:
        found = replace(found, committed=replace(found.committed, hosts=lists[part.writers]))
    return shared(found)


def shared(part: HostManifest) -> HostManifest:
    """A part with shared copies of its lists: thousands of copies of thousands of names are
    gigabytes."""
    named, committed = part.about.get(HOSTS), part.committed
    if isinstance(named, list):
        part = replace(part, about={**part.about, HOSTS: _one_list(tuple(named))})
    if committed is not None:
        part = replace(part, committed=replace(committed, hosts=_one_tuple(committed.hosts)))
    return part


@lru_cache(maxsize=64)
def _one_list(names: tuple[Json, ...]) -> list[Json]:
    return list(names)


@lru_cache(maxsize=64)
def _one_tuple(names: tuple[str, ...]) -> tuple[str, ...]:
    return names
