"""Where the workers of one host call their agent."""

import secrets
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError, ScalaiError
from scalai.core.worker_messages import AwaitSlot, Hello, WorkerRequest
from scalai.launch.round import Round
from scalai.launch.workforce import Workforce
from scalai.runtime.agent_folder import SOCKET, TOKEN
from scalai.runtime.calls import Peer, Server
from scalai.store.secure import Folder


class WorkerCalls:
    """Hands each call to the agent's loop, with the round that its caller is of.

    Args:
        directory: The agent's own; gets the socket and the token that workers need.
        workforce: Whose rounds they are.
        put: Hands the loop something to do.
        carry_out: ``carry_out(round, answer, request)`` carries a call out, in the loop, and
            answers it at once or later.
        gone: Is told of a rank of the present round whose connection has ended, in the loop.
    """

    def __init__(
        self,
        directory: Path,
        workforce: Workforce,
        put: Callable[[Callable[[], None]], object],
        carry_out: Callable[[Round, "Future[Any]", WorkerRequest], None],
        gone: Callable[[int], None],
    ) -> None:
        self._workforce, self._put = workforce, put
        self._carry_out, self._gone = carry_out, gone
        self._callers: dict[Peer, tuple[Round, int]] = {}
        token = secrets.token_bytes(32)
        # Open as long as the server, which removes its socket by this path.
        self._folder = Folder.open(directory)
        self._folder.write(TOKEN, token)
        self._folder.remove(SOCKET)
        self._server = Server(
            self._folder.reach(SOCKET), token, WorkerRequest, self._handle, self._left
        )

    def close(self) -> None:
        self._server.close()
        self._folder.close()

    def _handle(self, peer: Peer, request: WorkerRequest) -> object:
        """Hand a call to the loop and wait for the answer, in the connection's thread."""
        answer: Future[Any] = Future()

        def deliver() -> None:
            try:
                round = self._round_of(peer, request)
                round.unanswered.add(answer)
                answer.add_done_callback(round.unanswered.discard)
                self._carry_out(round, answer, request)
            except ScalaiError as error:
                if not answer.done():
                    answer.set_exception(error)

        self._put(deliver)
        return answer.result()

    def _round_of(self, peer: Peer, request: WorkerRequest) -> Round:
        """Return the round that a worker speaks of, the present one or the one ahead.

        Raises:
            PeerError: It has ended: words of its workers may still be on their way.
        """
        found = next((r for r in self._workforce.rounds() if r.number == request.round), None)
        is_known = found is not None and (request.rank in found.ranks)
        if found is None or not (is_known or isinstance(request, AwaitSlot)):
            raise PeerError("this round of workers has ended.")
        if isinstance(request, Hello):
            self._callers[peer] = (found, request.rank)
        return found

    def _left(self, peer: Peer) -> None:
        def deliver() -> None:
            caller = self._callers.pop(peer, None)
            if caller is not None and caller[0] is self._workforce.round:
                self._gone(caller[1])

        self._put(deliver)
