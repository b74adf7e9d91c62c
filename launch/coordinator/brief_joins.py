"""Joins of many hosts that are nearly alike: each of thousands names all the others, once for every
state that it holds. What one has brought the others only name, by the digests of its pieces.
"""

import threading
import time
from collections.abc import Sequence

from scalai.core.errors import UsageError
from scalai.launch.coordinator.calls import Join, JoinBriefly
from scalai.runtime.codec import decode
from scalai.runtime.framing import MAX_FRAME_BYTES
from scalai.runtime.pieces import DIGEST_BYTES, digest_of

BRING_S = 3.0
"""How long an agent may take to bring what it was asked for, before others are asked too."""
KEPT_BYTES = 1 << 26
"""So many bytes of pieces are kept: those that were named last."""

NEVER = float("-inf")
MOST_ASKED = 1 << 16
"""Of more pieces it is forgotten who was asked for them in vain."""


class BriefJoins:
    """The pieces of joins. Any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: dict[bytes, bytes] = {}
        self._kept_bytes = 0
        self._asked_at: dict[bytes, float] = {}
        """Of pieces that some agent was asked to bring, and has not brought yet."""

    def read(self, join: JoinBriefly) -> Join | tuple[int, ...]:
        """Return the join that is meant, or which of its pieces are to be brought: those that
        nobody has, once the time of others is over that were asked for them.

        Raises:
            UsageError: It makes no sense.
            MessageError: It is no join.
        """
        with self._changed:
            self._bring(join.brought)
            wanted = self._wanted(join.digests)
            if wanted:
                return wanted
            size = sum(len(self._pieces[digest]) for digest in join.digests)
            if size > MAX_FRAME_BYTES:
                raise UsageError(f"a join names pieces of {size} bytes; at most {MAX_FRAME_BYTES}.")
            data = b"".join(self._pieces[digest] for digest in join.digests)
            self._forget(join.digests)
        found = decode(data, Join)
        if (found.job, found.host, found.incarnation) != (join.job, join.host, join.incarnation):
            raise UsageError(f"host {join.host!r} joins as {found.host!r} of job {found.job!r}.")
        return found

    def _bring(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            digest = digest_of(piece)
            self._asked_at.pop(digest, None)
            if digest not in self._pieces:
                self._pieces[digest] = piece
                self._kept_bytes += len(piece)
        if pieces:
            self._changed.notify_all()

    def _wanted(self, digests: Sequence[bytes]) -> tuple[int, ...]:
        """Wait for what others were asked for; return the places of what is missing then. Whoever
        calls brings it."""
        if any(len(digest) != DIGEST_BYTES for digest in digests):
            raise UsageError("a join names pieces by something that is no digest.")
        deadline = time.monotonic() + BRING_S
        while True:
            missing = [n for n, digest in enumerate(digests) if digest not in self._pieces]
            now = time.monotonic()
            others = [self._asked_at.get(digests[n], NEVER) + BRING_S for n in missing]
            if now >= deadline or max(others, default=NEVER) <= now:
                break
            self._changed.wait(min(deadline, max(others)) - now)
        if len(self._asked_at) > MOST_ASKED:  # of agents that have not come again
            late = now - BRING_S
            self._asked_at = {piece: at for piece, at in self._asked_at.items() if at > late}
        for place in missing:
            self._asked_at[digests[place]] = now
        return tuple(missing)

    def _forget(self, used: Sequence[bytes]) -> None:
        """Keep what was used now for longer than what was used before."""
        for digest in dict.fromkeys(used):
            self._pieces[digest] = self._pieces.pop(digest)
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._pieces.pop(next(iter(self._pieces))))
