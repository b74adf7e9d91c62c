"""What hosts tell about a round, until every one of them has told it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scalai.core.collection import Collection, concatenate
from scalai.core.jsonable import Json


@dataclass(frozen=True, eq=False, slots=True)
class Restored:
    """What one host's workers have restored: their rows, the rows' fingerprints, and the effort."""

    rows: Collection
    fingerprints: npt.NDArray[np.uint64]
    seconds: Mapping[str, float]
    bytes_local: int
    bytes_remote: int

    @classmethod
    def from_json(
        cls, rows: Json, fingerprints: Iterable[str], seconds: Mapping[str, float],
        bytes_local: int, bytes_remote: int,
    ) -> "Restored":  # fmt: skip
        values = np.array([int(value, 16) for value in fingerprints], dtype=np.uint64)
        return cls(Collection.from_json(rows), values, seconds, bytes_local, bytes_remote)


@dataclass(slots=True)
class Gathering:
    """The answers of one round, by host."""

    tensors: dict[str, frozenset[str]] = field(default_factory=dict)
    """Names of the tensors that each host's workers hold."""
    restored: dict[str, Restored] = field(default_factory=dict)
    deposits: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds of each host's deposit at the stop."""

    def slowest(self, what: str) -> float:
        """Return the longest time that a host took for a part of the restore, in seconds."""
        return max((told.seconds.get(what, 0.0) for told in self.restored.values()), default=0.0)

    def slowest_deposit(self, what: str) -> float:
        return max((seconds.get(what, 0.0) for seconds in self.deposits.values()), default=0.0)

    def names(self) -> frozenset[str]:
        """Return the names of all tensors of the job."""
        return frozenset().union(*self.tensors.values())

    def rows(self) -> tuple[Collection, npt.NDArray[np.uint64]]:
        """Return the restored rows of all hosts and their fingerprints, [rows]."""
        told = list(self.restored.values())
        return (
            concatenate([entry.rows for entry in told]),
            np.concatenate([entry.fingerprints for entry in told]),
        )
