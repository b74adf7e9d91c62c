"""A worker's snapshot in one call."""

from collections.abc import Sequence

from scalai.core.messages.worker_messages import WriteOrder
from scalai.runtime.live_files import MappedFile, Row, ordered_fingerprints, place_rows


def write_rows(
    rows: Sequence[Row], order: WriteOrder, mapped: MappedFile | None = None
) -> tuple[int, ...]:
    """Write the ordered rows of a rank and return their fingerprints, in the order's order."""
    place_rows(rows, order, mapped=mapped)
    return ordered_fingerprints(rows, order, {})
