"""What the coordinator stated of a deposit when it became a generation: every host's manifest keeps
it, and every later proof compares with it."""

from collections.abc import Mapping
from dataclasses import dataclass

from scalai.core import fields
from scalai.core.jsonable import Json


@dataclass(frozen=True, slots=True)
class Committed:
    """The ``hosts`` that deposited a part, and the fingerprint of every tensor by name, added up
    from the disjoint pieces of the deposit.

    What hosts fetch from each other later may overlap with those pieces, so that it can not be
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

    def difference(self, other: "Committed") -> list[str]:
        """Return the tensors that the two state otherwise, sorted."""
        mine, its = self.fingerprints, other.fingerprints
        return sorted(name for name in mine.keys() | its.keys() if mine.get(name) != its.get(name))
