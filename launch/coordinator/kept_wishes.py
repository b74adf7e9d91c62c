"""Records of persons' requests and the job's course, kept by its hosts for the next coordinator."""

import logging
import time
from collections.abc import Callable

from scalai.core.job.membership import Job, Phase
from scalai.core.job.remembered import Remembered
from scalai.core.job.succession import is_as_before, remember
from scalai.core.messages.commands import Remember
from scalai.core.messages.shared import JsonText, Shared
from scalai.launch.coordinator.members import Members
from scalai.launch.coordinator.sizing import Sizing

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Interval of looks at the hosts' records, in seconds."""


class KeptWishes:
    """Records kept by hosts for the next coordinator. Callers hold the lock of the members.

    Args:
        sizing: Persons' requests.
        recalled: Called when requests to an earlier coordinator take effect.
    """

    def __init__(self, members: Members, sizing: Sizing, recalled: Callable[[], object]) -> None:
        self._members, self._sizing, self._recalled = members, sizing, recalled
        self._said: Shared[Remembered] | None = None
        self._of: tuple[Job, JsonText] | None = None
        self._terms = set[int]()
        """Terms of this coordinator's own records: hosts may know of a later one."""
        self._heard = (0, 0)

    def look(self, job: Job, run: str) -> None:
        """Send hosts a new record after a change. Before their own records are known nothing is
        sent: it would replace those."""
        if job.takeover.pending is not None or job.phase is Phase.ENDED or not len(self._members):
            return
        request = self._sizing.request
        if self._of is not None and request == self._of[1] and is_as_before(job, self._of[0]):
            return
        self._of = job, request
        self._terms.add(self._members.term)
        number = self._said.value.number + 1 if self._said is not None else 1
        self._said = Shared(remember(job, run, self._members.term, number, request))
        self._members.command(self._members.hosts(), Remember(self._said))

    def tell(self, host: str) -> None:
        """Send the record to a new host."""
        if self._said is not None:
            self._members.command([host], Remember(self._said))

    def hear(self, known: Remembered, *, has_begun: bool, is_own: bool) -> Remembered | None:
        """Adopt and return a host's record. None: this coordinator wrote it itself.

        Requests to the earlier coordinator now hold, unless persons have asked this one.

        Args:
            has_begun: The job has had a round.
            is_own: The host was in the job before. Only such a host has this coordinator's own
                records: a coordinator without a card may repeat an earlier term.
        """
        if is_own and known.term in self._terms:
            return None
        said = None if self._said is None else self._said.value
        has_said = said is not None and said.order > known.order
        if said is not None and said.term == known.term and not is_own:
            has_said = False  # numbers of two coordinators have no common order
        if not has_begun and not has_said and known.order > self._heard:
            self._heard = known.order
            try:
                self._sizing.take_over(known.request)
            except ValueError as error:  # the job goes on as it was begun
                log.warning("event=not_taken_over what persons had asked for: %s", error)
            self._recalled()
        return known

    def wait_kept(self, longest_s: float) -> bool:
        """Wait, without the lock, until most hosts have the newest record. Returns whether they
        do."""
        deadline = time.monotonic() + longest_s
        while not self._is_kept():
            if time.monotonic() >= deadline:
                return False
            self._members.pause(LOOK_S)
        return True

    def _is_kept(self) -> bool:
        if self._said is None:
            return False
        hosts, order = self._members.hosts(), self._said.value.order
        count = sum(self._members[host].kept >= order for host in hosts)
        return count > len(hosts) // 2
