"""Which rank of a host writes which piece into the host's store.

Source: Tenplex/Scalai, arXiv 2312.05181, whose public code lets data-parallel rank 0 write alone.
Differs in: the replicas on a host share the work, and a piece is written once a host.
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from scalai.core.tensors.boxes import NumberLine, distinct
from scalai.core.tensors.collection import Collection, Columns, concatenate


def assign_writers(held: Mapping[int, Collection]) -> Mapping[int, Columns]:
    """Assign every distinct box that ranks of one host hold to one of its holders.

    Args:
        held: What each rank of the host holds. Empty boxes are written by nobody.

    Returns:
        For every rank the rows of its collection that it writes, ascending. Bytes are balanced: the
        largest boxes first, each to the holder that has the least to write, ties to the lowest
        rank. Depends on the content alone.
    """
    ranks = sorted(held)
    together = concatenate([held[rank] for rank in ranks])
    counts = [len(held[rank]) for rank in ranks]
    rank_of = np.repeat(np.arange(len(ranks)), counts)
    row_of = np.concatenate([np.zeros(0, np.int64), *(np.arange(count) for count in counts)])
    rows = np.flatnonzero(together.numel())
    line = NumberLine.of(together.tensors)
    boxes = line.place(together.tensor[rows], together.offset[rows], together.shape[rows])
    _, number = distinct(boxes)
    writers = _balance(number, rank_of[rows], together.size_bytes()[rows], len(ranks))
    chosen = rows[writers]
    return {
        rank: np.sort(row_of[chosen[rank_of[chosen] == index]]) for index, rank in enumerate(ranks)
    }


def _balance(number: Columns, rank: Columns, size_bytes: Columns, ranks: int) -> Columns:
    """Choose one of the rows of every box ``number``, so that the bytes of the ranks are balanced.

    Args:
        number: Which box a row is, counted from 0, [rows].
        rank: Who holds the row, ascending, [rows].
        size_bytes: Bytes of the row, [rows].
        ranks: How many ranks there are.
    """
    order = np.argsort(number, kind="stable")
    begin = np.searchsorted(number[order], np.arange(number.max(initial=-1) + 2))
    holders = [order[low:high].tolist() for low, high in pairwise(begin.tolist())]
    # What only one rank holds is no choice, so that it is known before the others are shared out.
    holders.sort(key=lambda rows: (len(rows) > 1, -size_bytes[rows[0]], rows[0]))
    load = [0] * ranks
    chosen: list[int] = []
    for rows in holders:
        best = min(rows, key=lambda row: (load[rank[row]], row))
        load[rank[best]] += int(size_bytes[best])
        chosen.append(best)
    return np.array(chosen, dtype=np.int64)
