"""Exit commands: to draining hosts, and to all hosts at the end of a job."""

from collections.abc import Collection
from dataclasses import dataclass

from scalai.core.job.membership import Generation
from scalai.core.messages.actions import RESUMABLE
from scalai.core.messages.commands import Ending, Exit
from scalai.launch.coordinator.members import Members
from scalai.launch.coordinator.registers import LEASES


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job: the command for every agent, and the step of the script's end (None: no
    end)."""

    farewell: Exit
    finished_step: int | None = None


def job_end(
    code: int, reason: str, *, round: int, finished_step: int | None, newest: Generation | None
) -> JobEnd:
    """The end of a job.

    Args:
        code: Exit code.
        reason: Reason for the agents' logs.
        round: Last round; 0: the job has not begun.
        finished_step: Step of the script's end.
        newest: Newest generation.
    """
    ending = None
    if finished_step is not None:
        ending = Ending(finished_step, newest.number if newest else None)
    return JobEnd(Exit(code, reason, keeps_state(code, round), ending), finished_step)


def keeps_state(code: int, round: int) -> bool:
    """Whether an exiting agent keeps its store: a job that has not begun did not make it, and a
    failed job may be resumed."""
    return round == 0 or code not in (0, RESUMABLE)


def drained(members: Members, host: str, leaving: Collection[str], own: str, *, stays: bool) -> str:
    """Exit reason of a draining host.

    Args:
        members: The job's hosts.
        host: The draining host.
        leaving: All draining hosts.
        own: Address of the coordinator's machine.
        stays: No other machine can have the next coordinator.
    """
    behind = ""
    if stays and members[host].address[0] == own:
        behind = _left_behind(members, leaving, own)
    return f"drained: the job goes on without this host{behind}"


def _left_behind(members: Members, leaving: Collection[str], own: str) -> str:
    """Warning for a coordinator on a draining machine; "": a host stays there, or none stays at
    all."""
    staying = [name for name in members.hosts() if name not in leaving]
    if not staying or any(members[name].address[0] == own for name in staying):
        return ""
    return (
        f". Its coordinator stays on this machine ({own}), and no other can have the next one: "
        "keep it up until the job has ended. Where it goes sooner, hosts "
        f"{sorted(staying)} end within [resize] coordinator_timeout_s, exit code 1, and keep "
        f"their state. With a --durable-dir that all hosts reach, or {LEASES}, another host takes "
        "over"
    )
