"""A worker's snapshot in one call, of tensors of every width."""

from collections.abc import Sequence

import torch

from scalai.core.messages.worker_messages import WriteOrder
from scalai.runtime.live_files import MappedFile, Row, ordered_fingerprints, place_rows

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64,
    "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


def write_rows(
    rows: Sequence[Row], order: WriteOrder, mapped: MappedFile | None = None
) -> tuple[int, ...]:
    """Write the ordered rows of a rank and return their fingerprints, in the order's order."""
    place_rows(rows, order, mapped=mapped)
    return ordered_fingerprints(rows, order, {})
