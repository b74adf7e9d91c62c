"""What a witness remembers of the vote on a job's coordinator, and what it grants.

It has no clock. A term is granted once, to one, who has seen everything that the witness has: so
who claims has watched the newest record that any majority has taken, and its holder has had the
time to end itself.
"""

from dataclasses import dataclass, replace

from scalai.core.electorate import Electorate, Key, Record, key_of


@dataclass(frozen=True, slots=True)
class ReadVote:
    """Say what you remember. ``memory`` is whose answer counts."""

    host: str
    memory: str


@dataclass(frozen=True, slots=True)
class ClaimTerm:
    """Grant ``claimant`` a term; ``seen`` is the newest record that it has watched."""

    host: str
    memory: str
    term: int
    claimant: str
    seen: Key


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Take a record of a holder."""

    host: str
    memory: str
    record: Record


VoteRequest = ReadVote | ClaimTerm | WriteRecord


@dataclass(frozen=True, slots=True)
class Told:
    """The answer: what the witness remembers by then, and whether it has granted what was asked."""

    memory: str
    term: int
    record: Record | None
    is_granted: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """What a witness remembers: the highest ``term`` that it has granted, and to whom, and the
    newest record."""

    name: str
    term: int = 0
    claimant: str = ""
    record: Record | None = None


def answer(memory: Memory, request: VoteRequest) -> tuple[Memory, Told]:
    """Return what a witness remembers after a request, and its answer. One that comes twice is
    answered alike."""
    memory, is_granted = _grant(memory, request)
    return memory, Told(memory.name, memory.term, memory.record, is_granted)


def _grant(memory: Memory, request: VoteRequest) -> tuple[Memory, bool]:
    if request.memory != memory.name:  # it was started again, and has forgotten what it granted
        return memory, False
    match request:
        case ClaimTerm(_, _, term, claimant, seen):
            if key_of(memory.record) > seen:
                return memory, False
            if term == memory.term and claimant == memory.claimant:
                return memory, True
            if term <= memory.term:
                return memory, False
            return replace(memory, term=term, claimant=claimant), True
        case WriteRecord(_, _, record):
            if record.term < memory.term or record.key < key_of(memory.record):
                return memory, False
            claimant = memory.claimant if record.term == memory.term else ""
            return replace(memory, term=record.term, claimant=claimant, record=record), True
    return memory, True


@dataclass(frozen=True, slots=True)
class Known:
    """What one process knows of a vote: whom to ask, the newest record, and the highest term that
    any witness has granted."""

    electorate: Electorate
    record: Record | None = None
    term: int = 0

    def with_answer(self, told: Told) -> "Known":
        """Return what is known after an answer."""
        known = replace(self, term=max(self.term, told.term))
        if key_of(told.record) <= key_of(self.record) or told.record is None:
            return known
        return replace(known, record=told.record, electorate=told.record.electorate)

    @property
    def is_off(self) -> bool:
        """Whether nobody can be elected but on the machine of the coordinator."""
        return self.electorate.is_off
