"""What joining hosts had sealed, and nobody has committed: whether it may become the job's state.

A snapshot's name says of which run, round and step it is. Where it was never committed, it follows
the newest generation that its host holds.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scalai.core.errors import LayoutError, UsageError
from scalai.core.job.membership import ENDED_BY_A_LOSS, Phase
from scalai.launch.coordinator.live_job import LiveJob
from scalai.store.generation import check_whole
from scalai.store.manifest import HostManifest
from scalai.store.parts import snapshot_name


class Origin(NamedTuple):
    """Where a snapshot was made. ``run`` is the random name of one coordinator's time."""

    run: str
    round: int
    step: int


def origin(part: HostManifest) -> Origin | None:
    """Return where a part's snapshot was made, None where its name does not say."""
    run, *place = snapshot_name(part).rsplit("-", 2)
    if len(place) != 2 or not all(number.isdecimal() for number in place):
        return None
    return Origin(run, int(place[0]), int(place[1]))


class SealedParts:
    """Takes in what joining hosts had sealed.

    Args:
        job: Name of the job.
        live: The job.
    """

    def __init__(self, job: str, live: LiveJob) -> None:
        self._job, self._live = job, live

    def choose(
        self, sealed: Iterable[HostManifest], held: Sequence[HostManifest]
    ) -> list[HostManifest]:
        """Return what may count; says what does not. Changes nothing else.

        Args:
            sealed: What a joining host had sealed.
            held: Its parts of committed generations.

        Raises:
            UsageError: It has a whole state of another run, which is further than this one.
        """
        live = self._live
        if live.is_fresh and live.state.round == 0:
            return []
        self._check_rival(held)
        chosen = []
        for part in sealed:
            if self._counts(part, held):
                chosen.append(part)
                continue
            self._check_given_up(part)
            live.log(
                f"event=note host {part.host} gives up what it had sealed at step {part.step} "
                f"({snapshot_name(part)}): the job goes on, or begins, without it"
            )
        return chosen

    def take(self, host: str, chosen: Iterable[HostManifest]) -> list[tuple[int, tuple[str, ...]]]:
        """A host that comes back may bring what it had sealed, and not committed, when it died.

        It counts before the next round is assigned. While others still write it counts with their
        parts, and a round that goes on without this host has left it behind.

        Returns:
            Generations, and the hosts that have to rename their part of it.
        """
        live = self._live
        for part in chosen:
            live.generations.add_sealed(part)
        renaming: list[tuple[int, tuple[str, ...]]] = [
            (number, (late,)) for late, number in live.generations.late()
        ]
        phase = live.state.phase
        ends_round = host in live.active() and phase in ENDED_BY_A_LOSS
        if ends_round or phase in (Phase.WAITING, Phase.STOPPING):
            number = live.recover()
            if number is not None:
                renaming.append((number, tuple(live.generations.parts(number))))
        return renaming

    def _counts(self, part: HostManifest, held: Sequence[HostManifest]) -> bool:
        live = self._live
        number = live.generations.number(snapshot_name(part))
        if number is not None:
            return live.generations.has(number)
        if live.generations.is_refused(snapshot_name(part)):
            return False
        place = origin(part)
        if live.state.round:
            newest = live.generations.newest_part()
            is_passed = newest is not None and part.step < newest.step
            return place is not None and place[:2] == (live.run, live.state.round) and not is_passed
        known, own = live.generations.newest_part(), max(held, key=_number, default=None)
        newest = own if own and (not known or own.generation >= known.generation) else known
        if newest is None:
            return True
        before = origin(newest)
        if place and before and place.run == before.run:
            return place >= before
        return newest is own or self._is_with_holders(part, newest) or not self._is_whole(part)

    def _others(self, part: HostManifest) -> dict[str, HostManifest]:
        live = self._live
        return live.generations.sealed_parts(snapshot_name(part), live.members.hosts())

    def _is_with_holders(self, part: HostManifest, newest: HostManifest) -> bool:
        """Whether others of the same snapshot hold the newest generation, which it follows then."""
        return bool(self._others(part).keys() & self._live.generations.parts(newest.generation))

    def _is_whole(self, part: HostManifest) -> bool:
        try:
            check_whole({**self._others(part), part.host: part}.values())
        except LayoutError:
            return False
        return True

    def _check_given_up(self, part: HostManifest) -> None:
        """Raise ``UsageError`` where nobody but a person may give up a sealed state."""
        live = self._live
        place, newest = origin(part), live.generations.newest_part()
        is_left = place is not None and place.run == live.run
        is_left |= live.generations.number(snapshot_name(part)) is not None
        is_left |= live.generations.is_refused(snapshot_name(part))
        if newest is not None:
            before = origin(newest)
            is_left |= part.step <= newest.step
            is_left |= bool(place and before and place.run == before.run and place < before)
        if live.is_fresh or is_left or not self._is_whole(part):
            return
        other = _describe(newest, live) if newest else "this run has begun without it"
        raise UsageError(
            f"host {part.host!r} has sealed a whole state of step {part.step} in another run of "
            f"job {self._job!r}, which was not committed; {other}. {_WAYS_OUT}"
        )

    def _check_rival(self, held: Sequence[HostManifest]) -> None:
        """Raise ``UsageError`` where the job would go back without a word from what a host had
        sealed to what another one holds of another run."""
        live = self._live
        rival, newest = live.generations.newest_part(), max(held, key=_number, default=None)
        if live.state.round or rival is None or newest is None:
            return
        if not live.generations.is_made(rival.generation) or live.generations.is_known(newest):
            return
        mine, its = origin(newest), origin(rival)
        is_same_run = mine is not None and its is not None and mine.run == its.run
        if is_same_run or newest.generation <= rival.generation or newest.step >= rival.step:
            return
        raise UsageError(
            f"host {newest.host!r} holds generation {newest.generation} of step {newest.step} of "
            f"another run of job {self._job!r}; {_describe(rival, live)}, as it was sealed. "
            f"{_WAYS_OUT}"
        )


_WAYS_OUT = (
    "Which one to go on from is yours to say: run scalai clean on the hosts of the other, stop the "
    "job and start all hosts together."
)


def _number(part: HostManifest) -> int:
    return part.generation


def _describe(newest: HostManifest, live: LiveJob) -> str:
    hosts = sorted(live.generations.parts(newest.generation))
    return f"hosts {hosts} hold generation {newest.generation} of step {newest.step}"
