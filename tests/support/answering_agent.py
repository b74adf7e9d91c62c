"""An agent that has files for every snapshot, and keeps what its one worker says: the real end of
the wire, and as much of the law of a host as a snapshot on the way needs."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError
from scalai.core.messages.worker_messages import (
    BeginSnapshot,
    RankWritten,
    WorkerRequest,
    WriteOrder,
)
from scalai.core.tensors.region import Piece
from scalai.launch.agent.worker_group import WorkerCalls
from scalai.runtime.agent_folder import call_agent
from scalai.runtime.live import Slot
from scalai.runtime.live_files import ordered_views

FIRST_BYTE, STEP_BYTES = 64, 64
"""Where the first row lies in the file, and of what the places of the others are multiples."""


class AnsweringAgent:
    """Answers as a host that has one worker.

    Attributes:
        path: The file of all snapshots.
        heard: What the worker has said, in order.
        refused: So many times it is not heard that something is written.
        has_files: Else there are no files for a snapshot.
        channel: The worker's own connection.
    """

    def __init__(self, folder: Path, rows: Sequence[tuple[Slot, Piece]]) -> None:
        self.directory = folder / "agent"
        self.directory.mkdir(mode=0o700)
        self.path, self.heard, self.refused = folder / "rank", list[WorkerRequest](), 0
        self.has_files = True
        begins, end = list[int](), FIRST_BYTE
        for slot, piece in rows:
            begins.append(end)
            size = piece.box.numel * slot.buffer.element_size()
            end += -(-size // STEP_BYTES) * STEP_BYTES
        self._size = end
        self.make_file()
        self._order = WriteOrder(0, str(self.path), tuple(range(len(rows))), tuple(begins))
        ordered_views(rows, self._order)  # or the file would be too short
        self._lock = threading.Lock()
        self._calls = WorkerCalls(self.directory, self._at_once, self._answer, lambda *_: None)
        self.channel = call_agent(str(self.directory))

    def close(self) -> None:
        self.channel.close()
        self._calls.close()

    def make_file(self) -> None:
        """Make the file, of zeros."""
        self.path.write_bytes(bytes(self._size))

    def told(self) -> list[RankWritten]:
        """Return what the worker says that it has written."""
        return [request for request in self.heard if isinstance(request, RankWritten)]

    def _at_once(self, what: Callable[[], None]) -> None:
        with self._lock:
            what()

    def _answer(self, answer: "Future[Any]", request: WorkerRequest) -> None:
        self.heard.append(request)
        if isinstance(request, RankWritten) and self.refused:
            self.refused -= 1
            answer.set_exception(PeerError("it is not heard"))
        elif isinstance(request, BeginSnapshot) and self.has_files:
            answer.set_result(self._order)
        else:
            answer.set_result(None)
