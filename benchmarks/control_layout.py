"""What the simulated hosts of the control plane's benchmark hold and want: the layouts of a GPT-3
175B (``plan``), made once and shared by fork, and the fingerprints that go with them.

The fingerprint of a box is a number of its tensor's name times its elements: it adds up over any
cut, and replicas have the same one, as those of real contents do.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from plan import RANKS_PER_HOST, Degrees, held, wanted

from scalai.core.tensors.collection import Collection
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import Planner
from scalai.core.tensors.universal_hash import P
from scalai.store.manifest import UNNUMBERED, HostManifest, StoredFile

Prints = npt.NDArray[np.uint64]
NOTHING = Collection.of([])
TP, PP_BEFORE, PP_AFTER = 8, 16, 12
HOSTS_A_REPLICA = TP * PP_BEFORE // RANKS_PER_HOST


def degrees_of(hosts: int) -> tuple[Degrees, Degrees]:
    """Return the degrees before and after the change of a job on so many hosts."""
    replicas, rest = divmod(hosts, HOSTS_A_REPLICA)
    if rest or not replicas:
        raise SystemExit(f"--hosts {hosts}: give a multiple of {HOSTS_A_REPLICA}.")
    return Degrees(TP, PP_BEFORE, replicas), Degrees(TP, PP_AFTER, replicas)


def fingerprints(rows: Collection) -> Prints:
    """Return the fingerprint of each row, [rows]: below the modulus, because a factor has 32 bits
    and no box has 2^31 elements."""
    factors = [
        int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:4], "big")
        for tensor in rows.tensors
    ]
    values = np.array(factors, dtype=np.uint64)[rows.tensor] * rows.numel().astype(np.uint64)
    assert not len(rows) or int(values.max()) < P
    return np.asarray(values, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Layouts:
    """By place (a host's place among those with workers): what it holds before the change, what it
    fetches for it, what it holds and what its ranks want after it.

    Hosts keep their places over the change; those beyond the last one have no workers then.
    """

    before: Degrees
    after: Degrees
    held: Sequence[Collection]
    fetched: Sequence[Collection]
    held_after: Sequence[Collection]
    wanted: Sequence[Sequence[Collection]]

    @classmethod
    def of(cls, before: Degrees, after: Degrees) -> "Layouts":
        source, target = held(before), wanted(after)
        by_host = [
            target[begin : begin + RANKS_PER_HOST]
            for begin in range(0, len(target), RANKS_PER_HOST)
        ]
        return cls(
            before,
            after,
            [holder.collection for holder in source],
            _fetched(source, by_host),
            [holder.collection for holder in held(after)],
            [[rank.collection for rank in ranks] for ranks in by_host],
        )


def _fetched(source: Sequence[Holder], target: Sequence[Sequence[Holder]]) -> list[Collection]:
    """Return which boxes each host of the new round fetches from others."""
    planner, found = Planner(source), []
    for position, ranks in enumerate(target):
        fetches = planner.plan_host(ranks[0].host, ranks, position).fetches
        rows = [
            source[holder].collection.tensors[source[holder].collection.tensor[row]]
            for holder, row in zip(
                fetches.source.tolist(), fetches.source_row.tolist(), strict=True
            )
        ]
        table = {tensor.name: (number, tensor) for number, tensor in enumerate(dict.fromkeys(rows))}
        found.append(
            Collection(
                tuple(tensor for _, tensor in table.values()),
                np.array([table[tensor.name][0] for tensor in rows], dtype=np.int64),
                fetches.offset,
                fetches.shape,
            )
        )
    return found


def manifest(
    host: str, step: int, about: Mapping[str, Any], ranks: tuple[int, ...], rows: Collection
) -> HostManifest:
    """Return the manifest of what a host has sealed: all pieces in one file."""
    sizes = rows.size_bytes()
    ends = np.cumsum(sizes, dtype=np.int64)
    return HostManifest(
        generation=UNNUMBERED,
        step=step,
        host=host,
        about=about,
        ranks=ranks,
        collection=rows,
        file=np.zeros(len(rows), np.int64),
        begin=ends - sizes,
        fingerprint=fingerprints(rows),
        files=(StoredFile("rank-0.safetensors", int(sizes.sum())),),
        scalars={},
        rank_state={},
    )
