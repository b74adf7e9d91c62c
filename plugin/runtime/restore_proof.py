"""The proof of a restored state: fingerprints of this worker's memory equal the committed ones, and
so do all others of the job.

Between a restore and the round's first update only volatile slots change. So the rest of the host's
memory is proven by a thread, beside the first forward and backward passes; the update waits. A
difference ends the round there, with the state that it began from untouched.
"""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scalai.core.messages.worker_messages import RankRestored
from scalai.core.tensors.region import Piece
from scalai.runtime.agent_folder import call_agent
from scalai.runtime.failpoints import reached
from scalai.runtime.live import Slot
from scalai.runtime.live_files import Filled
from scalai.runtime.live_fingerprints import live_fingerprints


class RestoreProof:
    """The proof of one rank's memory, just filled. Memory of devices is hashed here, in a moment:
    beside the passes it would take memory that they need.

    Args:
        wanted: The rows that were filled.
    """

    def __init__(self, rank: int, round: int, wanted: Sequence[tuple[Slot, Piece]], filled: Filled):
        self._rank, self._round, self._wanted, self._filled = rank, round, wanted, filled
        self._began = time.monotonic()
        self._prints = np.zeros(len(wanted), dtype=np.uint64)
        self._left = [row for row, (slot, _) in enumerate(wanted) if _stays(slot)]
        self._hash([row for row, (slot, _) in enumerate(wanted) if not _stays(slot)])
        self._process = os.getpid()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._hook: Any = None

    def report(self) -> RankRestored:
        """Return the rank's report, with fingerprints of all its wanted rows."""
        self._hash(self._left)
        filled = self._filled
        seconds = {
            "move": filled.waited_s,
            "restore": self._began - filled.began - filled.waited_s,
            "page_fault": filled.mapped_s,
            "proof": time.monotonic() - self._began,
        }
        return RankRestored(self._rank, self._round, self._prints, seconds, filled.note)

    def begin(self, directory: str) -> None:
        """Report in a thread, to the agent of this directory, and let updates wait."""
        self._hook = register_optimizer_step_pre_hook(self.await_verdict)
        self._thread = threading.Thread(
            target=self._run, args=(directory,), name="restore-proof", daemon=True
        )
        self._thread.start()

    def await_verdict(self, *_: Any) -> None:
        """Wait until the whole job's state is proven, at most as long as the agent lives. A round
        whose proof fails or does not come within ``start_timeout_s`` ends meanwhile, and this
        process with it.

        Raises:
            ScalaiError, OSError, RuntimeError, MemoryError: This rank's proof could not be made.
        """
        if self._thread is None or os.getpid() != self._process:
            return
        self._thread.join()
        self._thread = None
        self._hook.remove()
        if self._failure is not None:
            raise self._failure

    def _run(self, directory: str) -> None:
        try:
            with closing(call_agent(directory)) as channel:
                report = self.report()
                reached("proof")
                channel.call(report)
        except Exception as error:  # for the thread that waits
            self._failure = error

    def _hash(self, rows: Sequence[int]) -> None:
        self._prints[rows] = live_fingerprints([self._wanted[row] for row in rows])


def _stays(slot: Slot) -> bool:
    """Whether forward and backward passes leave this memory alone, and it is the host's."""
    return not slot.is_volatile and slot.buffer.device.type == "cpu"
