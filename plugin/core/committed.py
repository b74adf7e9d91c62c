"""What the coordinator stated of a snapshot when it became a generation: every host's manifest
keeps it, and every later proof compares with it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scalai.core import fields
from scalai.core.jsonable import Json


@dataclass(frozen=True, slots=True)
class Committed:
    """The ``hosts`` that wrote a part, and the fingerprints of whole tensors by name, added up
    from the disjoint pieces of the snapshot.

    A host keeps those of the tensors that it has pieces of; all hosts together have all. What hosts
    fetch from each other later may overlap with the pieces of the snapshot, so that it can not be
    added up again.
    """

    hosts: tuple[str, ...]
    fingerprints: Mapping[str, int]

    def to_json(self) -> dict[str, Json]:
        """Return plain values that ``json`` writes; ``from_json`` reads them back."""
        # Text, because readers that hold numbers as doubles would round them.
        fingerprints = {name: f"{value:016x}" for name, value in self.fingerprints.items()}
        return {"hosts": list(self.hosts), "fingerprints": fingerprints}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "Committed":
        """Read what ``to_json`` wrote. Raises ``KeyError``, ``TypeError`` or ``ValueError`` where
        it is something else."""
        prints = fields.mapped(fields.mapped(data, "committed")["fingerprints"], "fingerprints")
        fingerprints = {
            name: fields.fingerprint(value, f"committed fingerprint of {name!r}")
            for name, value in prints.items()
        }
        hosts = fields.listed(data["hosts"], "committed.hosts")
        return cls(tuple(fields.text(host, "a committed host") for host in hosts), fingerprints)

    def of_tensors(self, names: Iterable[str]) -> "Committed":
        """Return what is stated of these tensors."""
        mine = self.fingerprints
        return Committed(self.hosts, {name: mine[name] for name in names if name in mine})

    def united(self, other: "Committed | None") -> "Committed":
        """Return what either states of the same generation."""
        if other is None:
            return self
        hosts = self.hosts if set(self.hosts) >= set(other.hosts) else (
            tuple(sorted({*self.hosts, *other.hosts}))
        )  # fmt: skip
        return Committed(hosts, {**other.fingerprints, **self.fingerprints})

    def difference(self, other: "Committed") -> list[str]:
        """Return the tensors of which the two state different things, sorted."""
        mine, its = self.fingerprints, other.fingerprints
        return sorted(name for name in mine.keys() & its.keys() if mine[name] != its[name])


def unite_committed(statements: Iterable[Committed | None]) -> Committed | None:
    """Return what these state together; None where none states anything."""
    hosts: set[str] = set()
    fingerprints: dict[str, int] = {}
    found = [each for each in statements if each is not None]
    last: tuple[str, ...] = ()
    for each in found:
        if each.hosts is not last:  # usually all parts name the same
            hosts.update(each.hosts)
            last = each.hosts
        fingerprints.update(each.fingerprints)
    return Committed(tuple(sorted(hosts)), fingerprints) if found else None
