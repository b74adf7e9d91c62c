"""How much room a store needs: for the generation that is kept and the one that is written."""

from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import StoreError


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a host's directory: in use by generations and snapshots, in files that wait for
    reuse, and free on the file system."""

    in_use: int
    reusable: int
    free: int


def check_budget(needed: int, room: Room, limit: int | None, host: str, directory: Path) -> int:
    """Return how many bytes may wait for reuse beside a snapshot of ``needed`` bytes.

    Args:
        limit: What the store may take, in bytes; None: what there is.
        host, directory: Whose store it is, for the error.

    Raises:
        StoreError: There is no room for two generations of that size, beside what others use.
    """
    budget = 2 * needed
    if limit is not None and max(budget, room.in_use + needed) > limit:
        raise StoreError(
            f"the pieces of host {host!r} are {needed} bytes and two generations of them "
            f"need {budget}, beside {room.in_use} in use; the store may take {limit}. Raise "
            "--store-budget-gb, or spread the job over more hosts."
        )
    available = room.free + room.reusable
    if needed > available or budget > available + room.in_use:
        raise StoreError(
            f"the pieces of host {host!r} are {needed} bytes and two generations of them "
            f"need {budget}; {directory} has {room.in_use} in use, {room.reusable} to reuse and "
            f"{room.free} free. Enlarge the shared memory (docker run "
            f"--shm-size={_gibibytes(budget)}g) or choose another --store-dir."
        )
    keep = max(budget - room.in_use, needed)
    return keep if limit is None else min(keep, limit - room.in_use)


def _gibibytes(size_bytes: int) -> int:
    return -(-size_bytes >> 30) if size_bytes else 1
