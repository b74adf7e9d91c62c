"""What a run of ``reshard`` may use, and what it needs at least."""

from dataclasses import dataclass

from scalai.converters.checkpoint import Checkpoint, Target
from scalai.core.errors import UsageError

MAX_BUFFER_BYTES = 4 << 20
MIN_BUFFER_BYTES = 1 << 20
WORKER_BYTES = 24 << 20
"""Anonymous memory of a worker beside its buffers, after the fork: measured, rounded up."""
ROW_BYTES, FILE_BYTES = 1400, 2200
"""Of a piece and of a file in the tables of the process that starts the workers: measured."""
BUFFERS = 3
"""Buffers of a worker: what is gathered, what is read back, what a fingerprint widens."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may use: bytes of memory, and processes. ``table_bytes`` of the memory are of the
    process that starts the others (``table_bytes_of``)."""

    memory_bytes: int
    workers: int
    table_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """The least memory that does."""
        return self.table_bytes + self.workers * (WORKER_BYTES + BUFFERS * MIN_BUFFER_BYTES)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one buffer of a worker.

        Raises:
            UsageError: Memory is too little for that many workers.
        """
        left = self.memory_bytes - self.table_bytes
        each = (left // self.workers - WORKER_BYTES) // BUFFERS
        if each < MIN_BUFFER_BYTES:
            raise UsageError(
                f"--memory of {self.memory_bytes} bytes is too little for {self.workers} workers "
                f"and {self.table_bytes} bytes of tables. Give at least {self.least_bytes}, or "
                "fewer --workers."
            )
        # A power of two, so that a little more or less free memory does not undo a started run.
        return min(1 << (each.bit_length() - 1), MAX_BUFFER_BYTES)


def table_bytes_of(source: Checkpoint, target: Target) -> int:
    """Return how much memory it takes to know what lies where, and what has been done: little, but
    for very many tensors."""
    rows = len(source.placed.collection) + len(target.placed.collection)
    files = len(source.placed.files) + len(target.placed.files)
    return rows * ROW_BYTES + files * FILE_BYTES
