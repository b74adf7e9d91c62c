"""A self-renewing connection to the coordinator, and the coordinator's recent answers."""

import logging
import threading
import time
from dataclasses import dataclass
from typing import TypeVar

from scalai.core.errors import (
    AbsentError,
    AnswerError,
    MessageError,
    PeerError,
    SilentError,
)
from scalai.core.job.deadlines import JOIN_S, TELL_S
from scalai.core.messages.shared import Request
from scalai.launch.coordinator.discovery import Place
from scalai.runtime.calls import CONNECT_S, Channel

Answer = TypeVar("Answer")

LONGEST_ANSWER_S = 60.0
"""Seconds; longest time for an answer, after late ones."""
RETRY_S = 0.25

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waits:
    """An agent's time limits for its coordinator, in seconds.

    Args:
        connect_s: For a connection.
        knock_s: For the first joining connection, in any number of tries.
        poll_s: For the answer to a poll, beyond the coordinator's keeping time.
        tell_s: For the answer to an event, including proof of a state; a late event is sent again,
            and counts once.
        join_s: For the answer to a join.
        dead_s: A coordinator refusing connections for so long has ended.
    """

    connect_s: float = CONNECT_S
    knock_s: float = 3 * CONNECT_S
    poll_s: float = 5.0
    tell_s: float = TELL_S
    join_s: float = JOIN_S
    dead_s: float = 1.5


class Health:
    """The coordinator's recent answers. Shared by the calling threads.

    Args:
        silence_s: Seconds of silence before the coordinator counts as gone.
        dead_s: Seconds of refused connections before it does.
    """

    def __init__(self, silence_s: float, dead_s: float) -> None:
        self.limit_s, self._dead_s = silence_s, dead_s
        self._mutex = threading.Lock()
        self._answered_at = time.monotonic()
        self._absent_since: float | None = None
        self._is_silent = False

    def answered(self) -> None:
        """Record an answer."""
        with self._mutex:
            if self._is_silent:
                after_s = time.monotonic() - self._answered_at
                log.info("event=coordinator_back after_s=%.1f", after_s)
            self._answered_at = time.monotonic()
            self._absent_since, self._is_silent = None, False

    def failed(self, error: PeerError, tries: int) -> None:
        """Record a call's failed tries. Raises ``error`` if the coordinator counts as gone.

        One failure proves nothing: this agent may have stood still. An answer without proof counts
        as silence.
        """
        if isinstance(error, MessageError):
            raise error  # the next try would end alike
        with self._mutex:
            now = time.monotonic()
            silence_s = now - self._answered_at
            if not isinstance(error, AbsentError):
                self._absent_since = None
            elif self._absent_since is None:
                self._absent_since = now
            if self._absent_since is not None and now - self._absent_since > self._dead_s:
                raise error
            if silence_s > self.limit_s and tries > 1:
                raise SilentError(f"it has been silent for {silence_s:.0f} s: {error}") from error
            is_silent = isinstance(error, SilentError) or silence_s > self._dead_s
            if is_silent and not self._is_silent:
                self._is_silent = True
                log.warning(
                    "event=coordinator_silent since_s=%.0f %s The workers train on, and this agent "
                    "keeps trying; after %.0f s ([resize] coordinator_timeout_s) it ends them, and "
                    "the state stays in the store.",
                    silence_s, error, self.limit_s,
                )  # fmt: skip

    def silence_s(self) -> float | None:
        """Return the seconds of the coordinator's silence; None: it is not silent."""
        with self._mutex:
            return time.monotonic() - self._answered_at if self._is_silent else None


class Line:
    """A self-renewing connection to the coordinator, for one thread.

    Args:
        place: Address of the coordinator.
        connect_s: Seconds for a connection.
        answer_s: Seconds for an answer.
        health: Records its answers.
        is_over: Set when answers are no longer needed.
    """

    def __init__(
        self,
        place: Place,
        connect_s: float,
        answer_s: float,
        health: Health,
        is_over: threading.Event,
    ) -> None:
        self._place, self._connect_s, self._answer_s = place, connect_s, answer_s
        self._health, self._is_over = health, is_over
        self._channel: Channel | None = None
        self._wait_s = answer_s
        """Seconds for the next answer; more after a late one, possibly long on its way."""

    def allow(self, answer_s: float) -> None:
        """Set the seconds for the next answer."""
        self._wait_s = answer_s

    def call(self, request: Request[Answer]) -> Answer:
        """Call until there is an answer.

        Raises:
            AnswerError: The answer is an error.
            PeerError: The coordinator counts as gone, or no answer is needed any more.
        """
        tries = 0
        while True:
            tries += 1
            try:
                answer = self.try_call(request)
            except AnswerError:
                self._health.answered()
                raise
            except PeerError as error:
                if self._is_over.is_set():
                    raise
                self._health.failed(error, tries)
                if self._is_over.wait(RETRY_S):
                    raise
            else:
                self._health.answered()
                return answer

    def try_call(self, request: Request[Answer]) -> Answer:
        """Call once."""
        channel = self._channel  # another thread may cut it
        try:
            if channel is None:
                channel = self._channel = Channel(
                    self._place.address, self._place.token, connect_s=self._connect_s
                )
            channel.call_s = self._wait_s
            answer = channel.call(request)
        except AnswerError:
            raise
        except PeerError as error:
            self.cut()
            if isinstance(error, SilentError) and channel is not None:
                self._wait_s = max(self._wait_s, min(2 * self._wait_s, LONGEST_ANSWER_S))
            raise
        self._wait_s = self._answer_s
        return answer

    def cut(self) -> None:
        """Close the connection, if any. Any thread may call it."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
