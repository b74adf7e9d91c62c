"""Where the workers of one host call their agent."""

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from scalai.core.errors import PeerError, ScalaiError, UsageError
from scalai.core.jsonable import Json
from scalai.launch.round import Round
from scalai.launch.workforce import Workforce
from scalai.runtime.agent_folder import SOCKET, TOKEN
from scalai.runtime.messages import Peer, Server
from scalai.store.secure import Folder


class WorkerCalls:
    """Hands each call to the agent's loop, with the round that its caller is of.

    Args:
        directory: The agent's own; gets the socket and the token that workers need.
        workforce: Whose rounds they are.
        put: Hands the loop something to do.
        calls: What carries a call out, by its name: ``carry_out(round, answer, **arguments)``, in
            the loop.
        gone: Is told of a rank of the present round whose connection has ended, in the loop.
    """

    def __init__(
        self,
        directory: Path,
        workforce: Workforce,
        put: Callable[[Callable[[], None]], object],
        calls: Mapping[str, Callable[..., None]],
        gone: Callable[[int], None],
    ) -> None:
        self._workforce, self._put = workforce, put
        self._calls, self._gone = calls, gone
        self._callers: dict[Peer, tuple[Round, int]] = {}
        token = secrets.token_bytes(32)
        # Open as long as the server, which removes its socket by this path.
        self._folder = Folder.open(directory)
        self._folder.write(TOKEN, token)
        self._folder.remove(SOCKET)
        self._server = Server(self._folder.reach(SOCKET), token, self._handle, self._left)

    def close(self) -> None:
        self._server.close()
        self._folder.close()

    def _handle(self, peer: Peer, method: str, arguments: Mapping[str, Json]) -> Json:
        """Hand a call to the loop and wait for the answer, in the connection's thread."""
        if method not in self._calls:
            raise UsageError(f"{method!r} is not a call of the agent.")
        answer: Future[Json] = Future()

        def deliver() -> None:
            try:
                round = self._round_of(peer, method, arguments)
                round.unanswered.add(answer)
                answer.add_done_callback(round.unanswered.discard)
                self._calls[method](round, answer, **arguments)
            except ScalaiError as error:
                if not answer.done():
                    answer.set_exception(error)

        self._put(deliver)
        return answer.result()

    def _round_of(self, peer: Peer, method: str, arguments: Mapping[str, Json]) -> Round:
        """Return the round that a worker speaks of, the present one or the one ahead.

        Raises:
            PeerError: It has ended: words of its workers may still be on their way.
        """
        rounds = self._workforce.rounds()
        if method == "await_slot":  # on a connection of its own
            found = self._workforce.round
        elif "round" in arguments:  # a first word
            found = next((r for r in rounds if r.number == arguments["round"]), None)
            if found is not None and method == "hello":
                self._callers[peer] = (found, arguments["rank"])
        else:
            caller = self._callers.get(peer)
            found = caller[0] if caller is not None and caller[0] in rounds else None
        if found is None:
            raise PeerError("this round of workers has ended.")
        return found

    def _left(self, peer: Peer) -> None:
        def deliver() -> None:
            caller = self._callers.pop(peer, None)
            if caller is not None and caller[0] is self._workforce.round:
                self._gone(caller[1])

        self._put(deliver)
