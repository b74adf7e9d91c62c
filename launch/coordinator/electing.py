"""The coordinator's side of the vote: which of its agents are the witnesses, and who learns it."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from scalai.core.electorate import Candidate, Electorate, Witness, choose, count_machines
from scalai.core.errors import ScalaiError
from scalai.core.messages import Shared
from scalai.core.witness import Known
from scalai.launch.coordinator.leases import Lease
from scalai.launch.coordinator.live_job import LiveJob
from scalai.launch.coordinator.vote_file import keep_electorate
from scalai.launch.coordinator.votes import VoteRegister

WAYS_OUT = "--coordinator-lease file:/FOLDER or etcd:URL"

PAIRS = 3
"""How often two hosts are found before it is said that they are too few."""

log = logging.getLogger(__name__)


class Electing:
    """Chooses the witnesses of a job's coordinator, in the thread of its lease, which takes no
    lock.

    Args:
        live: The job.
        own: The address by which agents reach the coordinator's machine.
        folder: The job's folder on this machine: keeps whom to ask when this process is gone.
        tell: Takes the electorate that agents look for a successor by, with its number.
    """

    def __init__(
        self,
        live: LiveJob,
        own: str,
        folder: Path,
        tell: Callable[[int, Shared[Electorate]], None],
    ) -> None:
        self._live, self._own, self._folder, self._tell = live, own, folder, tell
        self._number = 0
        self._chosen: tuple[object, tuple[Witness, ...]] = None, ()
        self._pairs = 0
        self._witnesses: tuple[Witness, ...] = ()
        self._hurried = frozenset[str]()

    def register(self, known: Known, token: bytes) -> VoteRegister:
        """Return the vote on this coordinator."""
        return VoteRegister(
            known, token, wanted=self.wanted, agreed=self.agreed, about_to=self.keep
        )

    def wanted(
        self, present: tuple[Witness, ...], is_unfit: Callable[[Witness], bool]
    ) -> tuple[Witness, ...]:
        """Return who should be the witnesses: as long as those of the coordinator before have yet
        to join this one, and where the job has ended, the same."""
        live, members, hosts = self._live, self._live.members, self._live.state.hosts
        if live.state.taking_over is not None or live.has_ended or not hosts:
            return present
        leaving = frozenset(name for name, host in hosts.items() if host.is_leaving)
        found = members.candidates(leaving)
        found = [each for each in found if not is_unfit(each.witness)]
        self._say_alone(found)
        basis = frozenset(found), present
        if basis != self._chosen[0]:
            self._chosen = basis, choose(found, present, self._own)
        return self._chosen[1]

    def _say_alone(self, found: Sequence[Candidate]) -> None:
        """Say once that two hosts are too few, where no other one comes in a moment."""
        if self._number > 0 or self._pairs >= PAIRS:
            return
        self._pairs = self._pairs + 1 if count_machines(found) == 2 else 0
        if self._pairs == PAIRS:
            log.warning(
                "event=lease kind=none machines=2: of two hosts none can be outvoted, so the loss "
                "of this one ends the job, unless all hosts have %s, or there are three.", WAYS_OUT,
            )  # fmt: skip

    def keep(self, electorate: Electorate) -> None:
        """Note whom another coordinator of this machine would have to ask. Raises ``ScalaiError``
        or ``OSError`` where that cannot be."""
        keep_electorate(self._folder, electorate)

    def agreed(self, electorate: Electorate) -> None:
        """A majority has taken an electorate."""
        self._witnesses = electorate.witnesses
        try:
            self.keep(electorate)
        except (ScalaiError, OSError) as error:
            log.warning("event=lease kind=vote the witnesses cannot be noted here: %s", error)
        if self._number == 0 and not electorate.witnesses:
            return
        self._number += 1
        self._tell(self._number, Shared(electorate))
        names = ",".join(witness.host for witness in electorate.witnesses)
        if electorate.witnesses:
            log.info(
                "event=lease kind=vote witnesses=%s: a majority of them says which coordinator the "
                "job has. Where this host is lost, another one takes over.", names,
            )  # fmt: skip
        else:
            log.warning(
                "event=lease kind=none: fewer than three machines are left, so the loss of this "
                "one ends the job. With %s it would not.", WAYS_OUT,
            )  # fmt: skip

    def hurry(self, lease: Lease) -> None:
        """Have the lease's thread look at once where a witness leaves: its agent may end soon."""
        hosts = self._live.state.hosts
        lost = frozenset(
            w.memory for w in self._witnesses if w.host not in hosts or hosts[w.host].is_leaving
        )
        if lost != self._hurried:
            self._hurried = lost
            lease.hurry()
