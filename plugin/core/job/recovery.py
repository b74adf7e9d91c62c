"""Which state does a job go on from? The newest one of which the hosts that are there hold every
element, and of which nothing is in doubt.

Candidates are what workers that outlived a failure have written, snapshots, generations with the
replicas that hosts keep for each other, and what only a disk has. The answer says what was chosen,
and of every other candidate why it was not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from scalai.core.jsonable import Json

LINEAGE = "lineage"
"""In ``about`` of a manifest: the earlier runs of the job that the state comes from, each with the
number of the generation that the next one went on from, oldest first."""
MOST_RUNS = 64
"""Earlier runs that a lineage names."""


def lineage_from(source: Mapping[str, Json], number: int, run: str) -> list[list[Json]]:
    """Return the lineage of what ``run`` makes from generation ``number``, of which ``source`` is
    the ``about``."""
    before, its = list(source.get(LINEAGE, [])), _run_of(source)
    if its is not None and its != run:
        before.append([its, number])
    return before[-MOST_RUNS:]


def contains(one: "Descent", other: "Descent") -> bool:
    """Whether ``one`` comes from ``other``, or from what the same run has made after it. By number,
    which only grows within a run, where it is not known what they come from."""
    if one.run == other.run:
        return one.number >= other.number
    if any(run == other.run and number >= other.number for run, number in one.lineage or ()):
        return True
    is_known = None not in (one.run, other.run, one.lineage, other.lineage)
    return not is_known and one.number >= other.number


@dataclass(frozen=True, slots=True)
class Descent:
    """Where a generation comes from: its number, the run of the job that made it, and its lineage;
    None: not known."""

    number: int
    run: str | None
    lineage: tuple[tuple[str, int], ...] | None

    @classmethod
    def of(cls, number: int, about: Mapping[str, Json]) -> "Descent":
        """Read it of the ``about`` of a manifest."""
        found = about.get(LINEAGE)
        named = None if found is None else tuple((run, its) for run, its in found)
        return cls(number, _run_of(about), named)


def _run_of(about: Mapping[str, Json]) -> str | None:
    parts = str(about.get("snapshot", "")).rsplit("-", 2)
    return parts[0] if len(parts) == 3 else None


class Origin(Enum):
    """How a state came about."""

    STOP = "the stop of a change"
    SNAPSHOT = "a snapshot"
    SURVIVORS = "workers that outlived a failure"
    SEALED = "a snapshot that was not committed"
    STORE = "what hosts held before"
    DISK = "a durable directory"


@dataclass(frozen=True, slots=True)
class State:
    """A state of the job of which something is known.

    ``number``: of the generation, None where it was not committed. ``step``: the optimizer step,
    None where nobody can read it. ``hosts``: those that are there and hold parts; ``lost``: those
    that wrote some of it and are not. ``lacks``: what is missing of it, empty where they hold every
    element. ``doubt``: why it may not be gone on from though it is whole. ``is_left_behind``: only
    a disk knows of it, and the job had gone on without it.
    """

    origin: Origin
    step: int | None
    number: int | None = None
    hosts: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    lacks: str = ""
    doubt: str = ""
    is_left_behind: bool = False

    @property
    def name(self) -> str:
        """What a log calls it."""
        step = "of an unknown step" if self.step is None else f"of step {self.step}"
        return f"{self.origin.value} {step}" if self.number is None else (
            f"generation {self.number} {step}"
        )  # fmt: skip

    @property
    def age(self) -> tuple[bool, int, int]:
        """What states are ordered by, oldest first. Generations by their numbers, which only grow,
        also where the job went back to an earlier step; what was not committed is of the present
        round, and newer than they are."""
        number = 1 << 62 if self.number is None else self.number
        return not self.is_left_behind, number, -1 if self.step is None else self.step


@dataclass(frozen=True, slots=True)
class Recovery:
    """The ``state`` that a job goes on from (None: there is none), and the others with why not,
    newest first."""

    state: State | None
    others: tuple[tuple[State, str], ...]

    def __str__(self) -> str:
        state = self.state
        if state is None:
            chosen = "from=nothing"
        else:
            chosen = f"step={state.step} from={state.origin.value!r} hosts={','.join(state.hosts)}"
            chosen += f" without={','.join(state.lost)}" if state.lost else ""
        others = "; ".join(f"{other.name}: {why}" for other, why in self.others)
        return f"{chosen} passed_over={others!r}" if others else chosen

    def to_json(self) -> Json:
        """Return it as a report has it."""
        return {
            "state": None if self.state is None else _to_json(self.state),
            "others": [{**_to_json(other), "why": why} for other, why in self.others],
        }


def _to_json(state: State) -> dict[str, Json]:
    return {
        "origin": state.origin.name.lower(), "step": state.step, "generation": state.number,
        "hosts": list(state.hosts), "lost": list(state.lost),
    }  # fmt: skip


def newest_whole(states: Iterable[State]) -> Recovery:
    """Return the newest of these states that is whole and not in doubt.

    What was not committed counts only where it is further than every generation that may be gone on
    from.
    """
    ordered = sorted(states, key=lambda state: state.age, reverse=True)
    whole = [state for state in ordered if not (state.lacks or state.doubt)]
    committed = next((state for state in whole if state.number is not None), None)
    fresh = [state for state in whole if state.number is None and _is_further(state, committed)]
    chosen = fresh[0] if fresh else committed
    others = []
    for state in ordered:
        if state is not chosen:
            others.append((state, state.lacks or state.doubt or _why_not(state, chosen)))
    return Recovery(chosen, tuple(others))


def _is_further(state: State, than: State | None) -> bool:
    if state.step is None:
        return False
    return than is None or than.step is None or state.step > than.step


def _why_not(state: State, chosen: State | None) -> str:
    if state.is_left_behind and chosen is not None and not chosen.is_left_behind:
        return "the job has gone on without it"
    if chosen is not None and _is_further(state, chosen):
        return "the job had gone back behind it"
    return "it is no further"
