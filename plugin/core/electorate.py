"""Who says by majority which coordinator a job has: its *electorate*, agents on machines of their
own, and how it changes.

A coordinator writes what it is, a ``Record``, to its electorate again and again, each time with a
higher key; a record counts once a majority has taken it. An electorate is part of the record. It
changes by joint agreement: a first record names both, and needs a majority of the witnesses before
and one of those that follow; only once that counts the next one may name the new ones alone.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from ipaddress import ip_address

MOST = 15
"""Witnesses at most: more would make a loss no less likely to be outlived."""
LEAST = 3
"""Of two no majority outlives the loss of one."""

Key = tuple[int, bool, int]
"""In which order records follow each other: of a higher term, that the job is over, a later beat.
"""
NOTHING: Key = (0, False, -1)


@dataclass(frozen=True, slots=True)
class Witness:
    """An agent that remembers whom it has granted a term. ``memory`` names what it remembers by:
    one that is started again has another one, and none of its promises. ``address`` is where its
    data plane listens."""

    host: str
    address: tuple[str, int]
    memory: str


@dataclass(frozen=True, slots=True)
class Electorate:
    """Whose majority counts; where ``before`` is not empty, a majority of those too. Of none there
    is no vote, and nobody else can be elected; nor by those that ``is_first`` says were asked when
    there was none: their coordinator does not know yet that a majority of them has agreed."""

    witnesses: tuple[Witness, ...] = ()
    before: tuple[Witness, ...] = ()
    is_first: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether it is no step from one to another."""
        return not self.before and not self.is_first

    @property
    def is_off(self) -> bool:
        """Whether only the machine of its coordinator may have another one."""
        return not self.witnesses or self.is_first

    @property
    def everyone(self) -> tuple[Witness, ...]:
        """All that are asked, each once."""
        return tuple(dict.fromkeys((*self.witnesses, *self.before)))

    def has_majority(self, memories: Collection[str]) -> bool:
        """Whether these are a majority."""
        parts = (part for part in (self.witnesses, self.before) if part)
        return all(sum(w.memory in memories for w in part) * 2 > len(part) for part in parts)


@dataclass(frozen=True, slots=True)
class Record:
    """What a coordinator writes to its electorate: its term, where it listens, how often it has
    written, whether the job is over, and who is asked from then on."""

    term: int
    host: str
    port: int
    beat: int
    is_over: bool
    electorate: Electorate

    @property
    def key(self) -> Key:
        return self.term, self.is_over, self.beat


def key_of(record: Record | None) -> Key:
    return NOTHING if record is None else record.key


# ------------------------------------------------------------------ who is chosen


@dataclass(frozen=True, slots=True)
class Candidate:
    """An agent that may be a witness; ``domain``: what its host fails with, "": nothing else."""

    witness: Witness
    domain: str = ""

    @property
    def machine(self) -> str:
        return self.witness.address[0]


def choose(
    candidates: Iterable[Candidate], present: Collection[Witness], own: str
) -> tuple[Witness, ...]:
    """Return who should be the witnesses: an odd number, one a machine, spread over domains, of
    which the coordinator's machine ``own`` gives one, and as many as can be of those ``present``.
    None where there are fewer than ``LEAST`` machines."""
    of_machine: dict[str, Candidate] = {}
    in_order = sorted(candidates, key=lambda c: (c.witness not in present, c.witness.host))
    for candidate in in_order:
        if not _is_loopback(candidate.machine):
            of_machine.setdefault(candidate.machine, candidate)
    count = min(MOST, len(of_machine) - 1 + len(of_machine) % 2)
    if count < LEAST:
        return ()
    left, chosen, domains = list(of_machine.values()), list[Witness](), Counter[str]()

    def rank(candidate: Candidate) -> tuple[bool, int, bool, str]:
        witness = candidate.witness
        is_own = candidate.machine == own
        return not is_own, domains[_domain(candidate)], witness not in present, witness.host

    while len(chosen) < count:
        best = min(left, key=rank)
        left.remove(best)
        domains[_domain(best)] += 1
        chosen.append(best.witness)
    return tuple(sorted(chosen, key=lambda witness: witness.host))


def _domain(candidate: Candidate) -> str:
    return candidate.domain or f"machine {candidate.machine}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def count_machines(candidates: Iterable[Candidate]) -> int:
    """Return on how many machines that others reach there are candidates."""
    return len({c.machine for c in candidates if not _is_loopback(c.machine)})


# ------------------------------------------------------------------ how a holder changes it


@dataclass(frozen=True, slots=True)
class Mandate:
    """What a holder has written last, whether a majority has taken that, and the electorate that it
    may go back to where none does."""

    record: Record
    is_agreed: bool = False
    back: Electorate | None = None

    @property
    def is_changing(self) -> bool:
        """Whether the next record should not be waited for."""
        return not self.record.electorate.is_settled or self.back is not None


def following(mandate: Mandate, wanted: tuple[Witness, ...] | None = None) -> Mandate:
    """Return what a holder writes next.

    A joint electorate that both majorities have taken is followed by the new one alone. One that
    they have not is given up for the one before, which was a part of all of its majorities; nothing
    is ever gone back to from the new one alone.

    Args:
        mandate: What it has written last.
        wanted: Who should be the witnesses; None: those that are.
    """
    last, back = mandate.record, None
    now = last.electorate
    if mandate.is_agreed and not now.is_settled:
        now = Electorate(now.witnesses)
    elif mandate.back is not None and not mandate.is_agreed:
        now = mandate.back
    elif mandate.is_agreed and wanted is not None and set(wanted) != set(now.witnesses):
        now, back = Electorate(wanted, now.witnesses, is_first=not now.witnesses), now
    return Mandate(replace(last, beat=last.beat + 1, electorate=now), back=back)


def is_told(mandate: Mandate) -> bool:
    """Whether others may look for a successor by this electorate."""
    return mandate.is_agreed and mandate.record.electorate.is_settled
