"""An agent's link to its coordinator: what it tells, and the commands that it fetches."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from scalai.core.errors import PeerError
from scalai.launch.places import Place
from scalai.launch.workforce import Workforce
from scalai.runtime.messages import Channel

Json = Any


class CoordinatorLink:
    """Two connections: one to tell of events, one that waits for commands in a thread of its own.

    Args:
        place: Where the coordinator is.
        host: Name of this host in the job.
        put: Hands the agent's loop something to do.
        lost: Is told that the coordinator is gone before this host had all of its commands, in the
            loop.
    """

    def __init__(
        self,
        place: Place,
        host: str,
        put: Callable[[Callable[[], None]], object],
        lost: Callable[[PeerError], None],
    ) -> None:
        self._host, self._put, self._lost = host, put, lost
        self._calls = Channel(place.address, place.token)
        self._polls = Channel(place.address, place.token)
        self._is_told_to_exit = False

    def join(self, **brings: Json) -> None:
        """Become part of the job. Raises ``PeerError`` where it is refused."""
        self._calls.call("join", host=self._host, **brings)

    def tell(self, event: str, **facts: Json) -> None:
        """Tell of an event. Only the loop's thread calls it."""
        try:
            self._calls.call("tell", host=self._host, event=event, **facts)
        except PeerError as error:
            self._gone(error)

    def follow(
        self,
        workforce: Workforce,
        obey: Callable[[Mapping[str, Json]], None],
        is_over: Callable[[], bool],
    ) -> None:
        """From now on fetch commands, telling how far the workers are, and have the loop ``obey``
        them until the agent ``is_over``."""

        def poll() -> None:
            while not is_over():
                current, crew = workforce.round, workforce.crew
                newest = crew.newest_step() if crew else 0
                round = current.number if current else 0
                try:
                    commands = self._polls.call("poll", host=self._host, round=round, newest=newest)
                except PeerError as error:
                    if not is_over():
                        self._put(partial(self._gone, error))
                    return
                for command in commands:
                    self._is_told_to_exit |= command["command"] == "exit"
                    self._put(partial(obey, command))

        threading.Thread(target=poll, name="poll", daemon=True).start()

    def _gone(self, error: PeerError) -> None:
        # Else it went before this host had done all that it was told.
        if not self._is_told_to_exit:
            self._lost(error)
