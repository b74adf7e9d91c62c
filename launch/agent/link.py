"""An agent's link to its coordinator: sends reports, fetches commands.

No call from the agent's loop waits for the coordinator. A thread sends queued reports; a broken
connection is renewed; numbers on events and commands make each arrive once.
"""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from scalai.core.errors import (
    AbsentError,
    AnswerError,
    MessageError,
    PeerError,
    ReplacedError,
    SilentError,
    StaleError,
)
from scalai.core.job.deadlines import JOIN_S, TELL_S
from scalai.core.messages.commands import Command, Exit
from scalai.core.messages.reports import Report, Stalled
from scalai.core.messages.shared import Named, Request
from scalai.launch.agent.loop import Agent
from scalai.launch.coordinator.calls import (
    Bye,
    Farewell,
    Join,
    Joined,
    Poll,
    Tell,
)
from scalai.launch.coordinator.discovery import Place
from scalai.runtime.calls import CONNECT_S, Channel

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LONGEST_ANSWER_S = 60.0
"""Seconds; longest time for an answer, after late ones."""
RETRY_S = 0.25


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


class RenewedChannel:
    """A self-renewing connection to the coordinator, for one thread.

    Args:
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
                if self._is_over.is_set():  # whoever cut it then may have found none
                    channel.close()
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


KEEP_S = 1.0
"""Seconds the coordinator may keep an agent's first poll; its answer gives the next one's."""
LONGEST_KEPT_S = 12.0
REJOIN_S = 0.5
"""Seconds before an expelled agent joins again."""
CLOSE_S = 2.0
"""Seconds an ending agent waits for delivery of its reports."""

_OUTDATED = (
    "the coordinator that answers is of an earlier term than the one that this agent joined."
)


@dataclass(slots=True)
class _Membership:
    """One membership of this agent: an incarnation, with its outgoing and received messages."""

    incarnation: str
    is_over: threading.Event
    calls: RenewedChannel
    polls: RenewedChannel
    untold: "queue.Queue[Report | None]" = field(default_factory=queue.Queue)
    received: int = 0
    extra_s: float = 0.0
    """Additional seconds for answers: with many agents, reports arrive together and the coordinator
    keeps polls longer."""
    is_told_to_exit: bool = False
    threads: list[threading.Thread] = field(default_factory=list)


class CoordinatorLink:
    """Two connections, each with a thread: one for reports, one for commands.

    Args:
        job, host: Names of the job, and of this host in it.
        silence_s: Seconds of silence before the coordinator counts as gone.
        put: Hands work to the agent's loop.
        lost: Called in the loop if the coordinator is gone, or refuses this host, with commands
            left.
        expelled: Called in the loop once this host is no longer in the job.
        waits: Time limits for the coordinator.
        succeed: Returns the place of a lost coordinator's successor; None: there is no succession.
        replaced: Called in the loop after a succession.
    """

    def __init__(
        self,
        place: Place,
        job: str,
        host: str,
        silence_s: float,
        put: Callable[[Callable[[], None]], object],
        lost: Callable[[PeerError], None],
        expelled: Callable[[PeerError], None],
        waits: Waits = Waits(),  # it is frozen
        *,
        succeed: Callable[[Place, int, threading.Event], Place] | None = None,
        replaced: Callable[[], None] = lambda: None,
    ) -> None:
        self._succeed, self._replaced = succeed, replaced
        self._closing, self._term = threading.Event(), 0
        self._place, self._job, self._host = place, job, host
        self._put, self._lost, self._expelled = put, lost, expelled
        self._waits = waits
        self._health = Health(silence_s, waits.dead_s)
        self._member = self._new_member()
        self._commanded: Callable[[Command], None] | None = None
        self._taken_in = ""
        """The last incarnation in the job."""
        self._is_closed = False

    @property
    def term(self) -> int:
        """Term of the coordinator joined last; 0: none."""
        return self._term

    @property
    def place(self) -> Place:
        """Address of this agent's coordinator."""
        return self._place

    @property
    def silence_s(self) -> float | None:
        """Seconds of the coordinator's silence; None: it is not silent."""
        return self._health.silence_s()

    def join(self, brings: Callable[[str], Join]) -> Joined:
        """Join the job; returns the coordinator's answer.

        Args:
            brings: Returns the host's request for an incarnation.

        Raises:
            PeerError: It is refused, or nobody answers.
        """
        member, request = self._member, brings(self._member.incarnation)
        began = time.monotonic()
        while True:
            try:
                answer = self._ask(member, member.calls.try_call, request)
                break
            except SilentError:  # overloaded; joining twice counts once
                if time.monotonic() - began > self._waits.knock_s:
                    raise
        self._taken_in, self._term = member.incarnation, answer.term
        return answer

    def rejoin(self, brings: Callable[[str], Join], joined: Callable[[], None]) -> None:
        """Join again beside the loop, as a new incarnation; then call ``joined`` in the loop."""
        member = self._member = self._new_member()
        request = brings(member.incarnation)

        def come() -> None:
            if member.is_over.wait(REJOIN_S):
                return
            answer = self._ask(member, member.calls.call, request)
            self._term = max(self._term, answer.term)
            self._taken_in = member.incarnation
            self._put(joined)

        threading.Thread(target=self._run, args=(member, come), name="rejoin", daemon=True).start()

    def _ask(
        self,
        member: _Membership,
        call: Callable[[Request[Joined]], Joined],
        request: Request[Joined],
    ) -> Joined:
        """Call the coordinator about a join, with the longer time limit."""
        member.calls.allow(self._waits.join_s)
        return call(request)

    def tell(self, report: Report) -> None:
        """Queue a report for the coordinator. Returns at once; keeps the order."""
        self._member.untold.put(report)

    def follow(
        self,
        agent: Agent,
        obey: Callable[[Command], None],
        stalled: Callable[[], Stalled | None] = lambda: None,
    ) -> None:
        """Start to deliver reports and fetch commands, for the loop to ``obey``.

        Polls carry the workers' progress and the ``stalled`` ones.
        """
        member, self._commanded = self._member, obey
        poll = partial(self._poll, member, agent, obey, stalled)
        for work in (partial(self._send, member), poll):
            thread = threading.Thread(target=self._run, args=(member, work), daemon=True)
            member.threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Deliver the remaining reports and say goodbye.

        Waits at most ``CLOSE_S``; not at all for a silent coordinator.
        """
        member, self._is_closed = self._member, True
        self._closing.set()
        end = time.monotonic() + CLOSE_S
        member.untold.put(None)
        if self.silence_s is None:
            for thread in member.threads:
                if member.is_told_to_exit or thread is member.threads[0]:
                    thread.join(max(0.0, end - time.monotonic()))
        self._give_up(member)

    def _new_member(self) -> _Membership:
        is_over = threading.Event()
        waits, health = self._waits, self._health
        calls = RenewedChannel(self._place, waits.connect_s, waits.tell_s, health, is_over)
        polls = RenewedChannel(self._place, waits.connect_s, waits.poll_s, health, is_over)
        return _Membership(secrets.token_hex(8), is_over, calls, polls)

    @staticmethod
    def _give_up(member: _Membership) -> None:
        member.is_over.set()
        member.untold.put(None)
        member.calls.cut()
        member.polls.cut()

    def _run(self, member: _Membership, work: Callable[[], None]) -> None:
        try:
            try:
                work()
            except AnswerError:  # this host is not in the job, or the job is over
                farewell = self._ask_farewell(member)
                if farewell is None:
                    raise
                self._put(partial(self._dismissed, member, farewell))
        except PeerError as error:
            if not member.is_over.is_set():
                self._put(partial(self._ended, member, error))
        except Exception as error:  # our own slip: else the agent waits for a dead thread
            if not member.is_over.is_set():
                self._put(partial(_fail, error))

    def _send(self, member: _Membership) -> None:
        number = 0
        while not member.is_over.is_set():
            unsent = member.untold.get()
            if unsent is None:
                if not member.is_told_to_exit and not member.is_over.is_set():
                    member.calls.try_call(Bye(self._job, self._host, member.incarnation))
                return
            number += 1
            member.calls.allow(self._waits.tell_s + member.extra_s)
            report = Named(unsent)
            member.calls.call(Tell(self._job, self._host, member.incarnation, number, report))

    def _poll(
        self,
        member: _Membership,
        agent: Agent,
        obey: Callable[[Command], None],
        stalled: Callable[[], Stalled | None],
    ) -> None:
        is_last, keep_s = False, KEEP_S
        told = (0, 0)  # the round, and the last reported step
        while not member.is_over.is_set() and not is_last:
            # An agent with an Exit polls once more, to acknowledge it.
            is_last = member.is_told_to_exit
            current, group = agent.round, agent.group
            if current is None or current.number != told[0]:
                told = (current.number if current else 0, 0)
            made = group.page.made(told[1]) if group else []
            told = (told[0], made[-1][0]) if made else told
            member.polls.allow(keep_s + self._waits.poll_s + member.extra_s)
            answer = member.polls.call(
                Poll(
                    job=self._job,
                    host=self._host,
                    incarnation=member.incarnation,
                    received=member.received,
                    round=current.number if current else 0,
                    newest=group.newest_step() if group else 0,
                    stalled=stalled(),
                    keep_s=keep_s,
                    made=tuple(made),
                    pace=group.pace() if group else None,
                )
            )
            if answer.term < self._term:
                raise AnswerError(_OUTDATED, ReplacedError.__name__)
            keep_s = min(max(0.0, answer.keep_s), LONGEST_KEPT_S)
            member.extra_s = max(0.0, keep_s - KEEP_S)
            for number, command in enumerate(answer.commands, answer.first):
                if number > member.received:
                    member.received = number
                    member.is_told_to_exit |= isinstance(command.message, Exit)
                    self._put(partial(self._obey, member, obey, command.message))

    def _obey(
        self,
        member: _Membership,
        obey: Callable[[Command], None],
        command: Command,
    ) -> None:
        if member is self._member:  # else for a past incarnation
            obey(command)

    def _ask_farewell(self, member: _Membership) -> Exit | None:
        """Return the command of the job's end; None: the job goes on, or the coordinator is of a
        job without this host."""
        waits = self._waits
        line = RenewedChannel(
            self._place, waits.connect_s, waits.tell_s, self._health, member.is_over
        )
        try:
            return line.call(Farewell(self._job, self._host, self._taken_in))
        finally:
            line.cut()

    def _dismissed(self, member: _Membership, farewell: Exit) -> None:
        """In the loop, once: the job ended while this host was cut off."""
        if member is not self._member or member.is_over.is_set():
            return
        self._give_up(member)
        if member.is_told_to_exit or self._is_closed or self._commanded is None:
            return
        member.is_told_to_exit = True
        self._commanded(farewell)

    def _ended(self, member: _Membership, error: PeerError) -> None:
        """In the loop, once: a thread has ended."""
        if member is not self._member or member.is_over.is_set():
            return
        self._give_up(member)
        # Otherwise the coordinator left with commands unfinished.
        if member.is_told_to_exit or self._is_closed:
            return
        kind = error.kind if isinstance(error, AnswerError) else None
        if self._succeed is not None and kind in (None, ReplacedError.__name__):
            self._search(self._succeed)
        elif kind in (StaleError.__name__, ReplacedError.__name__):
            self._expelled(error)
        else:
            self._lost(error)

    def _search(self, succeed: Callable[[Place, int, threading.Event], Place]) -> None:
        def look() -> None:
            try:
                place = succeed(self._place, self._term, self._closing)
            except PeerError as error:
                self._put(partial(self._not_found, error))
            except Exception as error:  # our own slip: else the agent waits forever
                self._put(partial(_fail, error))
            else:
                self._put(partial(self._found, place))

        threading.Thread(target=look, name="succession", daemon=True).start()

    def _not_found(self, error: PeerError) -> None:
        if not self._is_closed:
            self._lost(error)

    def _found(self, place: Place) -> None:
        if not self._is_closed:
            self._place = place
            self._health.answered()
            self._replaced()


def _fail(error: Exception) -> None:
    raise RuntimeError("the link to the coordinator has failed") from error
