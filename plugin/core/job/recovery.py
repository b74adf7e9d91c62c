"""Choice of the state to go on from: the newest whole one on the present hosts, without doubt.

Candidates are states of survivors, snapshots, generations with their replicas, and states on disks
alone. The answer has a reason for each rejected candidate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from scalai.core.jsonable import Json

LINEAGE = "lineage"
"""Key in a manifest's ``about``: earlier runs behind the state, oldest first, each with the number
of the next run's source."""
MOST_RUNS = 64
"""Most runs in a lineage."""


def lineage_from(source: Mapping[str, Json], number: int, run: str) -> list[list[Json]]:
    """Lineage of states of ``run`` after generation ``number`` with ``about`` ``source``."""
    before, its = list(source.get(LINEAGE, [])), _run_of(source)
    if its is not None and its != run:
        before.append([its, number])
    return before[-MOST_RUNS:]


def contains(one: "Descent", other: "Descent") -> bool:
    """Whether ``one`` descends from ``other``, or from a later generation of its run. Without a
    lineage the number decides, and for a generation before the first run of a full one: it only
    grows within a run."""
    if one.run == other.run:
        return one.number >= other.number
    if any(run == other.run and number >= other.number for run, number in one.lineage or ()):
        return True
    is_known = None not in (one.run, other.run, one.lineage, other.lineage)
    if is_known and one.lineage is not None and len(one.lineage) >= MOST_RUNS:
        is_known = other.number >= one.lineage[0][1]
    return not is_known and one.number >= other.number


@dataclass(frozen=True, slots=True)
class Descent:
    """Origin of a generation: number, run and lineage; None: unknown."""

    number: int
    run: str | None
    lineage: tuple[tuple[str, int], ...] | None

    @classmethod
    def of(cls, number: int, about: Mapping[str, Json]) -> "Descent":
        """Read the ``about`` of a manifest."""
        found = about.get(LINEAGE)
        named = None if found is None else tuple((run, its) for run, its in found)
        return cls(number, _run_of(about), named)


def _run_of(about: Mapping[str, Json]) -> str | None:
    parts = str(about.get("snapshot", "")).rsplit("-", 2)
    return parts[0] if len(parts) == 3 else None


class Origin(Enum):
    """Origin of a state."""

    STOP = "the stop of a change"
    SNAPSHOT = "a snapshot"
    SURVIVORS = "workers that outlived a failure"
    SEALED = "a snapshot that was not committed"
    STORE = "what hosts held before"
    DISK = "a durable directory"


@dataclass(frozen=True, slots=True)
class KnownState:
    """A known state of the job.

    Attributes:
        step: Optimizer step; None: unreadable.
        number: Generation; None: not committed.
        hosts: Present hosts with parts.
        lost: Absent writers.
        lacks: Missing parts; "": whole.
        doubt: Reason against a whole state.
        is_left_behind: Only a disk has it, and the job had gone on without it.
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
        """Name in log lines."""
        step = "of an unknown step" if self.step is None else f"of step {self.step}"
        return f"{self.origin.value} {step}" if self.number is None else (
            f"generation {self.number} {step}"
        )  # fmt: skip

    @property
    def age(self) -> tuple[bool, int, int]:
        """Sort key, oldest first. Generation numbers only grow, also after a return to an earlier
        step; an uncommitted state belongs to the present round, and is newer."""
        number = 1 << 62 if self.number is None else self.number
        return not self.is_left_behind, number, -1 if self.step is None else self.step


@dataclass(frozen=True, slots=True)
class Recovery:
    """The ``state`` to go on from (None: none), and the others with their reasons, newest first."""

    state: KnownState | None
    others: tuple[tuple[KnownState, str], ...]

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
        """Content for a report."""
        return {
            "state": None if self.state is None else _to_json(self.state),
            "others": [{**_to_json(other), "why": why} for other, why in self.others],
        }


def _to_json(state: KnownState) -> dict[str, Json]:
    return {
        "origin": state.origin.name.lower(), "step": state.step, "generation": state.number,
        "hosts": list(state.hosts), "lost": list(state.lost),
    }  # fmt: skip


def newest_whole(states: Iterable[KnownState]) -> Recovery:
    """The newest whole state without doubt.

    An uncommitted one counts only if it is further than every usable generation.
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


def _is_further(state: KnownState, than: KnownState | None) -> bool:
    if state.step is None:
        return False
    return than is None or than.step is None or state.step > than.step


def _why_not(state: KnownState, chosen: KnownState | None) -> str:
    if state.is_left_behind and chosen is not None and not chosen.is_left_behind:
        return "the job has gone on without it"
    if chosen is not None and _is_further(state, chosen):
        return "the job had gone back behind it"
    return "it is no further"
