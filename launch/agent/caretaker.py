"""The agent that started a coordinator in its own container: stays until the job has ended, because
its end would end the coordinator."""

import logging
import subprocess
import time
from collections.abc import Callable

from scalai.launch.agent.containers import all_end_with_this_process
from scalai.launch.config.job_spec import JobSpec

log = logging.getLogger(__name__)

POLL_S = 0.1
AHEAD = (
    "event=container The coordinator runs in this container and ends with it. Drained first, this "
    "agent stays, without workers, until the job has ended on the other hosts; where the container "
    "is killed sooner (the scheduler's grace period is over), these hosts stop too, and keep their "
    "newest generation. To drain hosts in any order start `scalai coordinator` in a container of "
    "its own, before the agents."
)


def say_ahead(spec: JobSpec) -> None:
    """This agent has just started a coordinator: warn of the consequences in a container."""
    if spec.max_hosts > 1 and all_end_with_this_process():
        log.warning(AHEAD)


def stay(coordinator: "subprocess.Popen[bytes]", must_end: Callable[[], bool]) -> None:
    """Return after the coordinator's end, or at a signal; at once if it needs nobody."""
    if coordinator.poll() is not None or not all_end_with_this_process():
        return
    log.info(
        "event=stay This agent is done; it stays for the coordinator, which runs in its container, "
        "until the job has ended. Another signal ends both, and with them the job."
    )
    while coordinator.poll() is None and not must_end():
        time.sleep(POLL_S)
