"""What crosses the border between an agent and its workers around a deposit and a restore: orders
there, results back, as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from scalai.core.collection import MAX_NDIM, Columns
from scalai.core.jsonable import Json


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """What one rank writes at a deposit: ``rows`` of its own held collection, each at byte
    ``begins`` of ``path``.

    The file exists, with its header and all its pages.
    """

    rank: int
    path: str
    rows: tuple[int, ...]
    begins: tuple[int, ...]

    def to_json(self) -> dict[str, Json]:
        """Return plain values that ``json`` writes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "WriteOrder":
        """Read what ``to_json`` wrote."""
        return cls(data["rank"], data["path"], tuple(data["rows"]), tuple(data["begins"]))


@dataclass(frozen=True, eq=False, slots=True)
class ReadOrder:
    """What one rank copies at a restore, as columns: copy ``i`` fills a box of a wanted piece.

    ``row`` [copies] is the row of the rank's own wanted collection; ``offset`` and ``shape``
    [copies, MAX_NDIM] the box of the global tensor that is copied, in elements, right-aligned as in
    a ``Collection``. The source is a row-major piece in ``files[file]`` at byte ``begin``
    [copies]; ``source_offset`` and ``source_shape`` [copies, MAX_NDIM] say which box that piece is.
    """

    files: tuple[str, ...]
    row: Columns
    offset: Columns
    shape: Columns
    file: Columns
    begin: Columns
    source_offset: Columns
    source_shape: Columns

    def __len__(self) -> int:
        return len(self.row)

    def to_json(self) -> dict[str, Json]:
        """Return plain values that ``json`` writes."""
        return {
            "files": list(self.files),
            **{name: getattr(self, name).tolist() for name in (*_FLAT, *_BOXES)},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "ReadOrder":
        """Read what ``to_json`` wrote."""
        flat = {name: np.array(data[name], dtype=np.int64) for name in _FLAT}
        boxes = {
            name: np.array(data[name], dtype=np.int64).reshape(-1, MAX_NDIM) for name in _BOXES
        }
        return cls(files=tuple(data["files"]), **flat, **boxes)


_FLAT = ("row", "file", "begin")
_BOXES = ("offset", "shape", "source_offset", "source_shape")


@dataclass(frozen=True, slots=True)
class RankDeposit:
    """What one rank reports after writing: ``fingerprints`` of the rows of its order, in that
    order, and its state.

    ``rank_state`` belongs to ``coordinate`` alone; ``scalars`` are the same on all ranks that have
    them."""

    fingerprints: tuple[int, ...]
    coordinate: str
    scalars: Mapping[str, Json] = field(default_factory=dict)
    rank_state: Json = None

    def to_json(self) -> dict[str, Json]:
        """Return plain values that ``json`` writes."""
        return {
            "fingerprints": list(self.fingerprints),
            "coordinate": self.coordinate,
            "scalars": dict(self.scalars),
            "rank_state": self.rank_state,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "RankDeposit":
        """Read what ``to_json`` wrote."""
        return cls(
            tuple(data["fingerprints"]), data["coordinate"], data["scalars"], data["rank_state"]
        )
