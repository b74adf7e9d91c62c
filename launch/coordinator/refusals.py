"""Whether the process of an agent whose connections have ended is gone: where it listened, nobody
listens any more. Then nothing is to be waited for."""

import logging
import queue
import threading
from typing import TypeVar

from scalai.core.errors import AbsentError, PeerError
from scalai.launch.coordinator.members import Member
from scalai.runtime.connecting import connect
from scalai.runtime.handshake import DATA_PLANE, service_key

ANSWER_S = 1.0
"""How long the other side may take to say who it is."""

MOST = 8192
"""Answers and addresses that are remembered: those of the hosts of the largest job, some times."""

log = logging.getLogger(__name__)

Address = tuple[str, int]
Key = TypeVar("Key")
Value = TypeVar("Value")
_Knock = tuple[str, Address, float | None]
"""At which host's address, for an agent that has no connection since when."""


class Refusals:
    """Knocks at the data planes of agents, in a thread of its own. Any thread may ask.

    A host that says that nobody listens there has lost its agent, and with it its workers, if it
    could be reached before: else a wall on the way may say so. Silence says nothing, nor does who
    cannot prove that it knows the token: it may be the agent, and somebody on the way.

    Args:
        token: The job's secret.
    """

    def __init__(self, token: bytes) -> None:
        self._token, self._mutex = token, threading.Lock()
        self._asked: queue.SimpleQueue[_Knock] = queue.SimpleQueue()
        self._found: dict[_Knock, bool] = {}
        """What came of knocking; where that is not over, False."""
        self._reached: dict[tuple[str, Address], None] = {}
        """Where somebody of the job has answered."""
        self._thread: threading.Thread | None = None

    def is_gone(self, host: str, agent: Member) -> bool:
        """Whether it was seen, since the agent has no connection, that nobody listens where it
        did. Blocks for nothing: the first question has somebody look."""
        knock = host, agent.address, agent.unlinked_at
        with self._mutex:
            if knock in self._found or knock[:2] not in self._reached:
                return self._found.get(knock, False)
        self._ask(knock)
        return False

    def greet(self, host: str, agent: Member) -> None:
        """It has joined: see whether it can be reached at all."""
        self._ask((host, agent.address, None))

    def _ask(self, knock: _Knock) -> None:
        with self._mutex:
            _remember(self._found, knock, False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="refusals", daemon=True)
                self._thread.start()
        self._asked.put(knock)

    def _run(self) -> None:
        while True:
            knock = self._asked.get()
            answers = self._answers(*knock[:2])
            with self._mutex:
                _remember(self._found, knock, answers is False)
                if answers:
                    _remember(self._reached, knock[:2], None)

    def _answers(self, host: str, address: Address) -> bool | None:
        """Whether somebody of the job listens there; None: it cannot be told."""
        try:
            connect(address, service_key(self._token, DATA_PLANE, host), ANSWER_S).close()
        except AbsentError:
            return False
        except PeerError:
            return None
        except Exception as error:  # our own slip: who is gone is lost a little later
            log.warning("event=not_knocked address=%s: %r", address, error)
            return None
        return True


def _remember(table: dict[Key, Value], key: Key, value: Value) -> None:
    """Note this as the newest of a table, of which the oldest goes where it is full."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MOST:
        del table[next(iter(table))]
