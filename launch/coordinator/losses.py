"""Lost agents: disconnected for too long, or silent while the coordinator listened."""

import logging
import queue
import threading
from dataclasses import dataclass
from typing import TypeVar

from scalai.core.errors import AbsentError, PeerError
from scalai.launch.config.endpoint import join_endpoint
from scalai.launch.coordinator.live_job import LiveJob
from scalai.launch.coordinator.members import Member
from scalai.runtime.connections import connect
from scalai.runtime.handshake import DATA_PLANE, service_key

GRACE_S = 2.0
"""Time for an agent to reconnect, in seconds."""
TICK_S = 0.1
"""Interval of looks at all agents and at the law's deadlines, in seconds."""
MOST_TICK_S = 0.4
AGENTS_A_TICK = 512
"""Above this number of agents looks are rarer, for the same share of time."""
POLL_S = 1.0
"""Duration of a poll for commands, in seconds."""
POLLS_PER_S = 200
"""Most polls per second: with more agents each poll lasts longer."""
MOST_POLL_S = 10.0
LOST_AFTER_S = 15.0
"""Silence of an agent lost with its machine, in seconds; a living one polls at least every
``MOST_POLL_S``."""
KEPT_SHARE = 2 / 3
"""Longest poll as a share of ``LOST_AFTER_S``: a living agent always polls again before the limit.
"""
LOOK_S = 0.5
"""Delay of seeing a silence, in seconds."""
REPLACED_AFTER_S = 4.0
"""Silence after which another agent of the host may replace one, in seconds."""
RETURN_S = 10.0
"""Time for a disconnected agent to fetch its exit at the end of a job, in seconds."""
KEPT_S = 2.0
"""Time for hosts to keep a person's request, in seconds; then the answer reports the failure."""
STALL_S = 0.5
"""Delay of a look that shows a stall of the coordinator itself: a pause, or a held lock."""

KNOCK_S = 1.0
"""Time for the other side to prove its identity, in seconds."""

MOST_KNOCKS = 8192
"""Most answers and addresses kept: several times the hosts of the largest job."""

log = logging.getLogger(__name__)

Address = tuple[str, int]
Key = TypeVar("Key")
Value = TypeVar("Value")
_Knock = tuple[str, Address, float | None]
"""Host, address, and start of its agent's disconnection."""


def tick_s(agents: int) -> float:
    """Interval of looks at this number of agents, in seconds."""
    return min(TICK_S * max(1.0, agents / AGENTS_A_TICK), MOST_TICK_S)


@dataclass(frozen=True, slots=True)
class Patience:
    """Waits of the coordinator for agents, in seconds.

    Attributes:
        poll_s: Shortest poll without commands; bounds a living agent's silence.
        kept_s: Wait of a person's request until most hosts know it.
    """

    grace_s: float = GRACE_S
    lost_after_s: float = LOST_AFTER_S
    replaced_after_s: float = REPLACED_AFTER_S
    poll_s: float = POLL_S
    return_s: float = RETURN_S
    kept_s: float = KEPT_S

    def to_keep_s(self, agents: int) -> float:
        """Duration of a poll with this number of agents."""
        most_s = min(MOST_POLL_S, KEPT_SHARE * self.lost_after_s)
        return max(self.poll_s, min(agents / POLLS_PER_S, most_s))

    def to_lose_s(self, agents: int) -> float:
        """Silence of a lost agent; its last sign of life may be the start of a long poll."""
        behind_s = self.lost_after_s - self.to_keep_s(agents) - LOOK_S
        return max(KEPT_SHARE * self.lost_after_s, behind_s)

    def to_grace_s(self, agents: int) -> float:
        """Longest disconnection: if all agents connect at once, each waits for its turn."""
        return self.grace_s + self.to_keep_s(agents) - self.poll_s

    def to_replace_s(self, agents: int) -> float:
        """Silence after which another agent of the host may replace one."""
        return self.replaced_after_s + self.to_keep_s(agents) - self.poll_s

    def to_return_s(self, agent: Member) -> float:
        """Time for an agent to come back to an ended job."""
        return self.grace_s if agent.was_sent_exit else max(self.grace_s, self.return_s)


class PortProbe:
    """Probes agents' data planes in a thread of its own, once started. Any thread may ask.

    A refused connection proves the loss of an agent with its workers, if it was reachable before;
    else a firewall may refuse. Silence proves nothing, nor does a listener without the token: it
    may be the agent behind a relay.
    """

    def __init__(self, token: bytes) -> None:
        self._token, self._mutex = token, threading.Lock()
        self._asked: queue.SimpleQueue[_Knock] = queue.SimpleQueue()
        self._found: dict[_Knock, bool] = {}
        """Results; False during a probe."""
        self._reached: dict[tuple[str, Address], None] = {}
        """Addresses with an earlier answer of an agent of the job."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="port-probe", daemon=True).start()

    def look(self) -> None:
        """Probe all addresses asked for so far."""
        while not self._asked.empty():
            self._probe(self._asked.get())

    def is_gone(self, host: str, agent: Member) -> bool:
        """Whether a probe since the agent's disconnection was refused. Does not block: the first
        call asks for the probe."""
        knock = host, agent.address, agent.unlinked_at
        with self._mutex:
            if knock in self._found or knock[:2] not in self._reached:
                return self._found.get(knock, False)
        self._ask(knock)
        return False

    def greet(self, host: str, agent: Member) -> None:
        """Probe a new agent, to learn whether it is reachable at all."""
        self._ask((host, agent.address, None))

    def _ask(self, knock: _Knock) -> None:
        with self._mutex:
            _remember(self._found, knock, False)
        self._asked.put(knock)

    def _run(self) -> None:
        while True:
            self._probe(self._asked.get())

    def _probe(self, knock: _Knock) -> None:
        answers = self._answers(*knock[:2])
        with self._mutex:
            _remember(self._found, knock, answers is False)
            if answers:
                _remember(self._reached, knock[:2], None)

    def _answers(self, host: str, address: Address) -> bool | None:
        """Whether an agent of the job listens there; None: unknown."""
        try:
            connect(address, service_key(self._token, DATA_PLANE, host), KNOCK_S).close()
        except AbsentError:
            return False
        except PeerError:
            return None
        except Exception as error:  # our own slip: a dead agent is lost a little later
            log.warning("event=not_knocked address=%s: %r", address, error)
            return None
        return True


def _remember(table: dict[Key, Value], key: Key, value: Value) -> None:
    """Add the newest entry of a table; a full table drops its oldest."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MOST_KNOCKS:
        del table[next(iter(table))]


class AgentLosses:
    """Looks at all agents at intervals, and loses dead ones. Callers hold the coordinator's lock.

    Args:
        patience: Waits for absent agents.
        probe: Detects ended agents; None: no detection.
    """

    def __init__(
        self,
        live: LiveJob,
        patience: Patience,
        probe: PortProbe | None = None,
    ) -> None:
        self._live, self._patience = live, patience
        self._probe = probe
        self._looked_at = live.clock()

    def look(self) -> None:
        """Lose dead agents. A stall of the coordinator itself counts as nobody's silence. Called
        every ``tick_s``."""
        live, patience, now = self._live, self._patience, self._live.clock()
        late_s = now - self._looked_at - tick_s(len(live.members))
        self._looked_at = now
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
                    f"{join_endpoint(*agent.address)} any more"
                )
                live.lose(host)
            else:
                self._listen(host, agent, lose_s)
        live.members.forget_released(patience.grace_s)

    def is_replaceable(self, agent: Member, store: object) -> bool:
        """Whether another agent of the host may replace one: it holds the same store (a lock with
        one holder), or the present one is disconnected or silent."""
        is_same_store = store is not None and store == agent.store
        limit_s = self._patience.to_replace_s(len(self._live.members))
        is_silent = agent.silence_s() > limit_s
        return is_same_store or is_silent or agent.unlinked_s() is not None

    def _listen(self, host: str, agent: Member, lose_s: float) -> None:
        """Lose a silent agent if the job can go on without its host."""
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
