"""How hosts are let go: those that drain, and all of them where the job ends."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from scalai.core.messages import actions, commands
from scalai.core.messages.actions import RESUMABLE
from scalai.launch.coordinator.registers import LEASES

if TYPE_CHECKING:
    from scalai.launch.coordinator.live_job import LiveJob


def end_job(live: "LiveJob", action: actions.Exit) -> None:
    """Say why the job ends, and let these hosts go."""
    code, reason = action.code, action.reason
    live.exit_code = code
    live.log(f"event=exit code={code} reason={reason!r}")
    ending = None
    if code == 0 and live.state.finished:
        newest = live.state.newest_generation
        live.finished_step = max(live.state.newest, live.members.newest())
        ending = commands.Ending(live.finished_step, newest.number if newest else None)
    live.say_farewell(action.hosts, commands.Exit(code, reason, _keeps_state(live, code), ending))


def let_go(live: "LiveJob", leaving: Collection[str]) -> None:
    """Let hosts go that drain; the job goes on without them."""
    behind = _left_behind(live, frozenset(leaving))
    for host in leaving:
        is_its = live.members[host].address[0] == live.interface
        reason = f"drained: the job goes on without this host{behind if is_its else ''}"
        live.command([host], commands.Exit(live.drained_code, reason, _keeps_state(live, 0)))
        live.members.release(host)
        live.generations.forget(host, is_released=True)


def _keeps_state(live: "LiveJob", code: int) -> bool:
    """Whether an agent that exits leaves its store as it is: a job that has not begun has made
    nothing of what is there, and one that failed may be resumed."""
    return live.state.round == 0 or code not in (0, RESUMABLE)


def _left_behind(live: "LiveJob", leaving: frozenset[str]) -> str:
    """Say what becomes of the coordinator where its machine is that of hosts that leave, and no
    other can have the next one; empty where that is not so."""
    own = live.interface
    staying = [name for name in live.members.hosts() if name not in leaving]
    if not staying or any(live.members[name].address[0] == own for name in staying):
        return ""
    if not live.is_alone():
        return ""
    return (
        f". Its coordinator stays on this machine ({own}), and no other can have the next one: "
        "keep it up until the job has ended. Where it goes sooner, hosts "
        f"{sorted(staying)} end within [resize] coordinator_timeout_s, exit code 1, and keep "
        f"their state. With a --durable-dir that all hosts reach, or {LEASES}, another host takes "
        "over"
    )
