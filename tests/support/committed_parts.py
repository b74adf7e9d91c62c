"""Hosts' parts of states that were committed, for tests of who holds what."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from scalai.core.jsonable import Json
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from support.store_states import report, two_ranks, write


def part(
    folder: Path, host: str, number: int, step: int, snapshot: str, **about: Json
) -> HostManifest:
    """Return a host's part of a state, whole by itself; ``number`` -1: sealed."""
    with HostStore("j", host, folder / f"{host}-{number}-{step}-{snapshot}") as store:
        held = two_ranks()
        slot = store.reserve(held)
        written = {rank: report(rank, write(slot.orders[rank], held[rank])) for rank in (0, 1)}
        about = {
            **about, "consumed_samples": 1, "degrees": {"tp": 2}, "world_size": 2, "tensors": 5,
            "snapshot": snapshot,
        }  # fmt: skip
        manifest = store.seal(slot, step=step, about=about, parts=written)
        return manifest if number < 0 else store.commit(slot, number)


def half(whole: HostManifest, host: str, which: int) -> HostManifest:
    """Return every second piece of a part, as another host's."""
    chosen = list(range(which, len(whole.collection), 2))
    return replace(
        whole, host=host, collection=whole.collection.select(np.array(chosen)),
        file=whole.file[chosen] * 0, begin=whole.begin[chosen], files=whole.files[:1],
        fingerprint=whole.fingerprint[chosen],
    )  # fmt: skip
