"""What this host's agent remembers as a witness of the vote on the job's coordinator. It lives in
the agent's memory: one that is started again has granted nothing."""

import secrets
import threading

from scalai.core.witness import Memory, Told, VoteRequest, answer


class VoteDesk:
    """Answers whoever asks, one after the other. Any thread may."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._memory = Memory(secrets.token_hex(8))

    @property
    def name(self) -> str:
        """What this memory is called, as no other is."""
        return self._memory.name

    def answer(self, request: VoteRequest) -> Told:
        with self._mutex:
            self._memory, told = answer(self._memory, request)
            return told
