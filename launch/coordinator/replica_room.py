"""Memory for replicas: logged for each host. A job with requested replicas and too little room is
refused before its first step.

A round after the first is weighed once it trains: it delays no change and ends no running job.
"""

from scalai.core.errors import LayoutError
from scalai.core.job.membership import TRAINING
from scalai.core.job.replicating import keepers
from scalai.core.messages import events, reports
from scalai.core.tensors.replicas import ReplicaMemory, memory_of, ring_of, shortage
from scalai.launch.coordinator.live_job import LiveJob

MOST_ROWS = 200_000
"""Most pieces of all hosts to weigh: more would hold the coordinator up for seconds."""
NAMED = 64
"""Most hosts with a log line of their own, the fullest first."""


def refuse_early(live: LiveJob) -> events.Reported | None:
    """Weigh a job's first round once all hosts have published, before any step.

    Returns:
        The refusal of requested replicas without room; None: none.
    """
    is_first, told = live.state.change.ran is None, live.answers.tensors.keys()
    if not is_first or not told >= live.active():
        return None
    found = _weigh(live)
    reason = shortage(found)
    if not reason:
        return None
    if live.are_replicas_asked:
        host = next(memory.host for memory in found if memory.is_short)
        refusal = reports.WorkersFailed(live.state.round, reason, is_refusal=True)
        return events.Reported(host, refusal)
    _say_short(live, reason)
    return None


def weigh_late(live: LiveJob) -> None:
    """Weigh a later round, once its workers train."""
    if live.state.phase in TRAINING and (reason := shortage(_weigh(live))):
        _say_short(live, reason)


def _say_short(live: LiveJob, reason: str) -> None:
    live.log(f"event=no_replica_room {reason} The training goes on, with those that fit.")


def _weigh(live: LiveJob) -> tuple[ReplicaMemory, ...]:
    """Log the memory of generations on each host once a round; empty if unknown."""
    answers, hosts = live.answers, live.active()
    told = {host: answers.holding[host] for host in hosts & answers.holding.keys()}
    kept_by = keepers(live.state) & frozenset(live.members.hosts())
    if answers.is_weighed or not told.keys() >= hosts:
        return ()
    answers.is_weighed = True
    ring = ring_of(
        {host: live.members[host].domain for host in kept_by}, live.state.settings.replicas
    )
    held = {host: report.rows for host, report in told.items()}
    room = {host: report.room_bytes for host, report in told.items()}
    answers.holding.clear()
    if (rows := sum(map(len, held.values()))) > MOST_ROWS:
        live.log(f"event=note the memory of generations is not known: {rows} pieces are too many")
        return ()
    try:
        found = memory_of(ring, held, room)
    except LayoutError as error:  # the snapshot will say more
        live.log(f"event=note the memory of generations is not known: {error}")
        return ()
    for memory in sorted(found, key=_spare)[:NAMED]:
        has = "unknown" if memory.room is None else memory.room
        live.log(
            f"event=store_memory host={memory.host} needed_bytes={memory.needed} "
            f"replica_bytes={memory.replicas} room_bytes={has} lacks_bytes={memory.lacks}"
        )
    if len(found) > NAMED:
        live.log(f"event=store_memory hosts={len(found)}: of the others each has more to spare")
    return found


def _spare(memory: ReplicaMemory) -> tuple[float, str]:
    left = float("inf") if memory.room is None else memory.room - memory.needed
    return left, memory.host
