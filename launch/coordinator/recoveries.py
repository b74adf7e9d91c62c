"""What a coordinator knows of the states that its job may go on from, as candidates of
``core.recovery``."""

from collections.abc import Callable, Iterable, Iterator

from scalai.core.job.recovery import Origin, State, newest_whole
from scalai.core.jsonable import Json
from scalai.launch.coordinator.generations import Generations, Incomplete


class Recoveries:
    """How the generations came about, and what became of the present failure. Not shared between
    threads."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._origins: dict[int, Origin] = {}
        self._failed: list[State] = []

    def note_committed(self, number: int, origin: Origin) -> None:
        """A snapshot has become this generation."""
        has = self._generations.has
        self._origins = {n: kept for n, kept in self._origins.items() if has(n)} | {number: origin}

    def note_failed(self, step: int, why: str) -> None:
        """What workers that outlived a failure wrote at this step is no state."""
        self._failed.append(State(Origin.SURVIVORS, step, lacks=why))

    def explain(self, present: Iterable[str], say: Callable[[str], None]) -> Json:
        """Say which state the job goes on from with the hosts that are ``present``, and what else
        there was; return it for the report. What has failed is forgotten."""
        failed, self._failed = self._failed, []
        found = newest_whole([*failed, *self._states(present)])
        if found.state is not None or found.others:
            say(f"event=recovery {found}")
        return found.to_json()

    def _states(self, present: Iterable[str]) -> Iterator[State]:
        generations = self._generations
        held = generations.covered()
        whole = {each.number: each for each in held}
        newest = held[-1].number if held else 0
        for number, each in whole.items():
            stated = generations.stated(number)
            hosts = tuple(sorted(each.hosts))
            lost = sorted(set(stated.hosts) - each.hosts) if stated else []
            yield State(
                self._origin(number), each.step, number, hosts, tuple(lost),
                doubt=f"generation {newest} goes on from it" if number > newest else "",
                is_left_behind=generations.is_offered(number),
            )  # fmt: skip
        for lacking in generations.incomplete(()):
            if lacking.number not in whole:
                origin = self._origin(lacking.number)
                yield State(
                    origin, lacking.step, lacking.number, lacking.present, lacking.missing,
                    lacks=what_lacks(lacking),
                )  # fmt: skip
        for sealed in generations.unfinished(present):
            why = f"the parts of {list(sealed.missing)} are missing"
            yield State(Origin.SEALED, sealed.step, None, sealed.present, sealed.missing, why)
        refused = generations.refused()
        if refused is not None:
            yield State(
                Origin.SEALED, refused.step, None, refused.hosts, doubt=refused.reason
            )  # fmt: skip

    def _origin(self, number: int) -> Origin:
        if self._generations.is_offered(number):
            return Origin.DISK
        return self._origins.get(number, Origin.STORE)


def what_lacks(state: Incomplete) -> str:
    """Say who holds parts of a generation that is not whole, and whose are missing."""
    found = [f"hosts {list(state.present)} hold parts"] if state.present else []
    if state.missing:
        found.append(f"those of {list(state.missing)} are missing")
    found += [f"host {host!r}: {why}" for host, why in sorted(state.damaged.items())]
    return ", ".join(found) or "nothing of it"
