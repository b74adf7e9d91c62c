"""Lists of sources, as the coordinator makes them of the parts that it knows."""

from collections.abc import Mapping

import numpy as np

from scalai.core.messages.shared import Shared
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.holders import Listed, SourceList, source_list
from scalai.store.generation import unite
from scalai.store.manifest import HostManifest, StoredFile
from scalai.store.parts import reference_of, summary

NOWHERE = ("127.0.0.1", 1)


def listed(
    parts: Mapping[str, HostManifest],
    addresses: Mapping[str, tuple[str, int]] | None = None,
    ranks: int = 0,
) -> Shared[SourceList]:
    """Return the list of these parts of one generation; ``ranks``: with the states of so many."""
    first = parts[min(parts)]
    short = {host: summary(part) for host, part in sorted(parts.items())}
    where = addresses or {}
    return Shared(
        source_list(
            [
                Listed(
                    host,
                    where.get(host, NOWHERE),
                    reference_of(part),
                    part.collection.tensors,
                    part.rank_state,
                )
                for host, part in short.items()
            ],
            generation=first.generation,
            step=first.step,
            about=first.about,
            scalars=unite(part.scalars for part in short.values()),
            ranks=ranks,
        )
    )


def part_of(rows: Collection, host: str, number: int) -> HostManifest:
    """Return a host's part of a generation with these rows."""
    count = len(rows)
    return HostManifest(
        generation=number, step=7, host=host,
        about={"consumed_samples": 1, "degrees": {}, "world_size": 1, "tensors": 1},
        ranks=(0,), collection=rows, file=np.zeros(count, np.int64),
        begin=np.zeros(count, np.int64), fingerprint=np.zeros(count, np.uint64),
        files=(StoredFile("rank-0.safetensors", 1 << 20),), scalars={}, rank_state={},
    )  # fmt: skip
