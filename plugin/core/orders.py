"""What crosses the border between an agent and its workers around a deposit and a restore: orders
there, results back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scalai.core.collection import Columns
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
