"""Server for the calls of one host's workers to their agent."""

import secrets
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from scalai.core.messages.worker_messages import Hello, WorkerRequest
from scalai.runtime.agent_folder import SOCKET, TOKEN
from scalai.runtime.calls import Peer, Server
from scalai.store.secure import Folder


class WorkerCalls:
    """Hands each call to the agent's loop, and its answer back.

    Args:
        directory: The agent's own; gets the workers' socket and token.
        put: Hands the loop something to do.
        carry_out: ``carry_out(answer, request)`` performs a call, in the loop, and answers at once
            or later.
        gone: ``gone(round, rank)``, in the loop, after a worker's connection has ended.
    """

    def __init__(
        self,
        directory: Path,
        put: Callable[[Callable[[], None]], object],
        carry_out: Callable[["Future[Any]", WorkerRequest], None],
        gone: Callable[[int, int], None],
    ) -> None:
        self._put, self._carry_out, self._gone = put, carry_out, gone
        self._callers: dict[Peer, Hello] = {}
        """Callers by connection, after their hello. In the loop alone."""
        token = secrets.token_bytes(32)
        # Open as long as the server: it removes its socket by this path.
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
        answer: Future[Any] = Future()

        def deliver() -> None:
            if isinstance(request, Hello):
                self._callers[peer] = request
            self._carry_out(answer, request)

        self._put(deliver)
        return answer.result()

    def _left(self, peer: Peer) -> None:
        def deliver() -> None:
            caller = self._callers.pop(peer, None)
            if caller is not None:
                self._gone(caller.round, caller.rank)

        self._put(deliver)
