"""Asking many witnesses at once, each over a connection of its own that is kept."""

import queue
import threading
import time
from collections.abc import Callable, Mapping

from scalai.core.electorate import Witness
from scalai.core.errors import MessageError, PeerError, SilentError
from scalai.core.messages import Named
from scalai.core.witness import Told, VoteRequest
from scalai.runtime.codec import decode, encode
from scalai.runtime.connecting import connect
from scalai.runtime.framing import FramedSocket
from scalai.runtime.handshake import DATA_PLANE, service_key

ASK_S = 2.0
"""How long a witness may take to answer."""
CONNECT_S = ASK_S / 2
"""How long to take a connection, and how long to prove itself."""
ANSWER_BYTES = 1 << 20


class _Line:
    """A connection to one witness. One call at a time: while an earlier one has not ended, there is
    no other."""

    def __init__(self, witness: Witness, token: bytes) -> None:
        self._witness, self._token = witness, service_key(token, DATA_PLANE, witness.host)
        self.mutex = threading.Lock()
        self._framed: FramedSocket | None = None

    def ask(self, request: VoteRequest) -> Told:
        """Ask, a second time where the connection had ended meanwhile. Whoever calls holds the
        mutex. Raises ``PeerError``."""
        if self._framed is not None:
            try:
                return self._talk(self._framed, request)
            except SilentError:
                raise
            except PeerError:
                pass  # it was broken before; a request that comes twice counts once
        self._framed = connect(self._witness.address, self._token, CONNECT_S, "the witness at")
        return self._talk(self._framed, request)

    def _talk(self, framed: FramedSocket, request: VoteRequest) -> Told:
        try:
            framed.expire_in(ASK_S)
            framed.send(encode(Named(request)))
            return decode(framed.receive(ANSWER_BYTES), Named[Told]).message
        except PeerError:
            self.close()
            raise

    def close(self) -> None:
        framed, self._framed = self._framed, None
        if framed is not None:
            framed.close()


Reply = tuple[Witness, Told | PeerError]


class Ballots:
    """What one process asks the witnesses of a job. One thread asks at a time.

    Args:
        token: The job's.
        is_kept: Keep connections for the next question.
    """

    def __init__(self, token: bytes, *, is_kept: bool = True) -> None:
        self._token, self._is_kept = token, is_kept
        self._lines: dict[Witness, _Line] = {}

    def ask(
        self, requests: Mapping[Witness, VoteRequest], is_enough: Callable[[list[Told]], bool]
    ) -> tuple[list[Told], dict[Witness, PeerError]]:
        """Ask all at once, until the answers are enough or the time is over. Returns the answers,
        and who has not answered, with the reason."""
        replies: queue.Queue[Reply] = queue.Queue()
        silent: dict[Witness, PeerError] = {}
        for witness, request in requests.items():
            silent[witness] = SilentError(f"it has not answered within {ASK_S:g} s.")
            line = self._lines.get(witness) or _Line(witness, self._token)
            self._lines[witness] = line
            work = threading.Thread(
                target=self._ask, args=(line, witness, request, replies), daemon=True
            )
            work.start()
        told: list[Told] = []
        deadline = time.monotonic() + ASK_S
        left = len(requests)
        while left and not is_enough(told):
            try:
                witness, reply = replies.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            left -= 1
            if isinstance(reply, Told):
                told.append(reply)
                del silent[witness]
            else:
                silent[witness] = reply
        self._forget(requests)
        return told, silent

    def _ask(
        self, line: _Line, witness: Witness, request: VoteRequest, replies: "queue.Queue[Reply]"
    ) -> None:
        # It may still be answering what it was asked before, which was decided without it.
        if not line.mutex.acquire(timeout=ASK_S):
            replies.put((witness, SilentError("it has not answered what it was asked before.")))
            return
        try:
            replies.put((witness, line.ask(request)))
        except MessageError as error:
            replies.put((witness, PeerError(f"it answers something else: {error}")))
        except PeerError as error:
            replies.put((witness, error))
        finally:
            if not self._is_kept:
                line.close()
            line.mutex.release()

    def _forget(self, requests: Mapping[Witness, VoteRequest]) -> None:
        """End the connections to those that were not asked now."""
        for witness in self._lines.keys() - requests.keys():
            line = self._lines[witness]
            if line.mutex.acquire(blocking=False):
                line.close()
                line.mutex.release()
                del self._lines[witness]
