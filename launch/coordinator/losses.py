"""Which agents count as lost: whose connections ended and did not come back, and who is silent
though the coordinator listened."""

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TypeVar

from scalai.core.errors import AbsentError, PeerError
from scalai.launch.coordinator.live_job import LiveJob
from scalai.launch.coordinator.members import Member
from scalai.runtime.connecting import connect
from scalai.runtime.handshake import DATA_PLANE, service_key

GRACE_S = 2.0
"""How long an agent whose connections have ended may take to come back."""
TICK_S = 0.1
"""How long after a look at all agents and at the deadlines of the law the next one comes."""
MOST_TICK_S = 0.4
AGENTS_A_TICK = 512
"""Where more take part, looks come less often, so that they take no greater share of the time."""
POLL_S = 1.0
"""How long a poll for commands is kept waiting."""
POLLS_PER_S = 200
"""Where more agents than this poll, each is kept waiting longer, so that all of them together take
little of the coordinator's time."""
MOST_POLL_S = 10.0
LOST_AFTER_S = 15.0
"""An agent polls once in ``MOST_POLL_S`` at least; one that gives no sign of life for so long is
gone with its machine."""
KEPT_SHARE = 2 / 3
"""Of that time a poll is kept for this share at most; and so much of it behind the answer to a poll
is silence, at least."""
LOOK_S = 0.5
"""How much later than its time a silence may be seen."""
REPLACED_AFTER_S = 4.0
"""An agent that is silent for so long gives way to another one of its host."""
RETURN_S = 10.0
"""How long an agent whose connections have ended may take to come back for its exit, once the job
has ended."""
KEPT_S = 2.0
"""How long hosts may take to keep what a person has asked for, before that is said to whom."""
STALL_S = 0.5
"""A look that comes so much too late tells of a stall of the coordinator itself: it was paused, or
its lock was held."""

KNOCK_S = 1.0
"""How long the other side may take to say who it is."""

MOST_KNOCKS = 8192
"""Answers and addresses that are remembered: those of the hosts of the largest job, some times."""

log = logging.getLogger(__name__)

Address = tuple[str, int]
Key = TypeVar("Key")
Value = TypeVar("Value")
_Knock = tuple[str, Address, float | None]
"""At which host's address, for an agent that has no connection since when."""


def tick_s(agents: int) -> float:
    """Return how long after a look the next one comes where so many agents take part."""
    return min(TICK_S * max(1.0, agents / AGENTS_A_TICK), MOST_TICK_S)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the coordinator waits for agents, in seconds.

    ``poll_s`` is how long an agent that polls is kept waiting, at least, where there is no command
    for it; a living one is never silent for much longer. ``kept_s`` is how long a person who asks
    for a change waits until most hosts know of it.
    """

    grace_s: float = GRACE_S
    lost_after_s: float = LOST_AFTER_S
    replaced_after_s: float = REPLACED_AFTER_S
    poll_s: float = POLL_S
    return_s: float = RETURN_S
    kept_s: float = KEPT_S

    def to_keep_s(self, agents: int) -> float:
        """How long a poll is kept where so many agents take part."""
        most_s = min(MOST_POLL_S, KEPT_SHARE * self.lost_after_s)
        return max(self.poll_s, min(agents / POLLS_PER_S, most_s))

    def to_lose_s(self, agents: int) -> float:
        """After how much silence one of so many agents is lost. Its poll was kept before, and may
        have been its last sign of life."""
        behind_s = self.lost_after_s - self.to_keep_s(agents) - LOOK_S
        return max(KEPT_SHARE * self.lost_after_s, behind_s)

    def to_grace_s(self, agents: int) -> float:
        """How long one of so many agents may be without a connection: where all of them make new
        ones at once, each waits for its turn."""
        return self.grace_s + self.to_keep_s(agents) - self.poll_s

    def to_replace_s(self, agents: int) -> float:
        """After how much silence an agent gives way to another one of its host."""
        return self.replaced_after_s + self.to_keep_s(agents) - self.poll_s

    def to_return_s(self, agent: Member) -> float:
        """How long an agent of a job that has ended may take to come back."""
        return self.grace_s if agent.was_sent_exit else max(self.grace_s, self.return_s)


class PortProbe:
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
                self._thread = threading.Thread(target=self._run, name="port-probe", daemon=True)
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
            connect(address, service_key(self._token, DATA_PLANE, host), KNOCK_S).close()
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
    if len(table) > MOST_KNOCKS:
        del table[next(iter(table))]


class Losses:
    """Looks at all agents now and then, and loses those that are gone. Whoever calls it holds the
    coordinator's lock.

    Args:
        live: The job.
        patience: How long agents may be away.
        probe: Says whose process is gone: nobody waits for its return. None: all are waited for.
    """

    def __init__(
        self,
        live: LiveJob,
        patience: Patience,
        probe: PortProbe | None = None,
    ) -> None:
        self._live, self._patience = live, patience
        self._probe = probe
        self._looked_at = time.monotonic()

    def look(self) -> None:
        """Lose who is gone. The time that the coordinator itself stood still counts for nobody.
        Called every ``tick_s``."""
        late_s = time.monotonic() - self._looked_at - tick_s(len(self._live.members))
        self._looked_at = time.monotonic()
        live, patience = self._live, self._patience
        grace_s = patience.to_grace_s(len(live.members))
        if late_s > STALL_S:
            live.excuse(late_s)
            live.log(f"event=stalled for_s={late_s:.1f}: it is not taken for silence of agents")
        lose_s = patience.to_lose_s(len(live.members))
        for host in live.members.doubtful(lose_s):
            if host not in live.members:
                continue  # another loss has ended it
            agent = live.members[host]
            unlinked_s = agent.unlinked_s()
            if live.has_ended:
                if unlinked_s is not None and unlinked_s > patience.to_return_s(agent):
                    live.members.remove(host)  # nobody waits for it any longer
            elif unlinked_s is not None and unlinked_s > grace_s:
                live.log(f"event=lost host={host}: its connections have ended")
                live.lose(host)
            elif unlinked_s is not None and self._probe and self._probe.is_gone(host, agent):
                live.log(
                    f"event=lost host={host}: its connections have ended, and nobody listens at "
                    f"{agent.address[0]}:{agent.address[1]} any more"
                )
                live.lose(host)
            else:
                self._listen(host, agent, lose_s)
        live.members.forget_released(patience.grace_s)

    def is_replaceable(self, agent: Member, store: object) -> bool:
        """Whether another agent of its host may take an agent's place: it holds the same store,
        whose lock has one holder, or the present one is gone or silent."""
        is_same_store = store is not None and store == agent.store
        limit_s = self._patience.to_replace_s(len(self._live.members))
        is_silent = agent.silence_s() > limit_s
        return is_same_store or is_silent or agent.unlinked_s() is not None

    def _listen(self, host: str, agent: Member, lose_s: float) -> None:
        """Lose a silent agent, where the job can go on without its host."""
        live, silence_s = self._live, agent.silence_s()
        if silence_s <= lose_s:
            if agent.is_reported:
                agent.is_reported = False
                live.log(f"event=host_back host={host}")
            return
        if agent.is_reported and silence_s < agent.judge_again_s:
            return
        agent.judge_again_s = silence_s + 1.0
        if live.can_go_on_without(host):
            live.log(f"event=lost host={host}: silent for {silence_s:.0f} s")
            live.lose(host)
        elif not agent.is_reported:
            agent.is_reported = True
            live.log(
                f"event=host_silent host={host} for_s={silence_s:.0f}: the job cannot go on "
                "without it, and its connection is up; waiting for it"
            )
