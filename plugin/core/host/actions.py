"""What must be done on a host: the actions that ``law.advance`` returns, for the agent to carry out
in order. What comes of one is an event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from scalai.core.host.state import Call, Slot, Want
from scalai.core.jsonable import Json
from scalai.core.messages import commands
from scalai.core.messages.commands import Ending, Start, Workers
from scalai.core.messages.reports import Report
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import Imports, RankSnapshot, WriteOrder
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.fingerprint import Committed


class Level(Enum):
    """How urgent a line of the log is."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Log:
    """One line for the log."""

    level: Level
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class Tell:
    """Report to the coordinator."""

    report: Report


@dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """Answer a worker's call, with a value of the type that its request names."""

    call: Call
    value: object = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a worker's call with an error."""

    call: Call
    reason: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer a worker's first call with what it has to know."""

    call: Call
    workers: Workers
    is_standby: bool


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Start the workers of a round: ``GroupStarted`` or ``GroupNotStarted``. Where they come beside
    present ones, only where memory holds both models; ``on_devices``: theirs is device memory."""

    workers: Workers
    is_standby: bool
    on_devices: bool = False


@dataclass(frozen=True, slots=True)
class BeginGroup:
    """Workers that were on standby are the present ones from now on."""

    round: int


@dataclass(frozen=True, slots=True)
class EndGroup:
    """End the workers of a round, once they had so long to leave by themselves: ``GroupEnded``."""

    round: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class Poll:
    """Look whether the workers of a round have ended by themselves, or one has failed:
    ``GroupOver``, if so."""

    round: int


@dataclass(frozen=True, slots=True)
class WantStop:
    """Tell the workers how much a stop waits for a save: 0, 1 or 2 (``Session.stop_urgency``)."""

    round: int
    urgency: int


@dataclass(frozen=True, slots=True)
class Propose:
    """Write the proposed stop, then read the workers: ``Proposed``."""

    round: int
    stop: int


@dataclass(frozen=True, slots=True)
class Agree:
    """Write the agreed stop, unless the workers have ended: ``Agreed`` or ``GroupOver``;
    ``probes``: behind it they make a step more, without its update."""

    round: int
    stop: int
    probes: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """Write on the workers' page how many steps lie between snapshots from step ``begin`` on, then
    read the workers: ``Spaced``."""

    round: int
    begin: int
    every: int


@dataclass(frozen=True, slots=True)
class WithdrawStop:
    """Forget the stop on the workers' page."""

    round: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End those of these ranks that live, at once."""

    round: int
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class ShowStacks:
    """Have the workers of a round say where they stand."""

    round: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Start the fork server of later rounds with what a script has imported."""

    imports: Imports


@dataclass(frozen=True, eq=False, slots=True)
class Reserve:
    """Make the files of the next snapshot: ``Reserved`` or ``NoRoom``."""

    round: int
    held: Mapping[int, Collection]


@dataclass(frozen=True, slots=True)
class StopReserving:
    """Files that are being made are not needed any more."""


@dataclass(frozen=True, eq=False, slots=True)
class Discard:
    """Use these files again."""

    slot: Slot


@dataclass(frozen=True, eq=False, slots=True)
class Seal:
    """Seal a snapshot: ``Sealed``, or ``WorkFailed`` and its room is given back."""

    round: int
    slot: Slot
    step: int
    about: Mapping[str, Json]
    parts: Mapping[int, RankSnapshot]
    taken_over: Sequence[tuple[WriteOrder, Sequence[int]]]


@dataclass(frozen=True, eq=False, slots=True)
class Fetch:
    """Plan what the workers of a round want and fetch what this host lacks: ``Fetched``,
    ``NotProven`` or ``WorkFailed``, and ``Moved`` now and then."""

    start: Start
    wants: Mapping[int, Want]


@dataclass(frozen=True, slots=True)
class Prove:
    """What was fetched of a generation is proven: it is as good as what was written."""

    generation: int


@dataclass(frozen=True, slots=True)
class TryCommit:
    """Make the sealed ``snapshot`` a generation: ``CommitDone``, ``CommitWaits`` or
    ``NothingToCommit``."""

    generation: int
    snapshot: str
    committed: Committed | None
    is_again: bool


@dataclass(frozen=True, slots=True)
class DiscardSealed:
    """Give up what is sealed, but for these snapshots."""

    kept: frozenset[str]


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Give up the sealed snapshot of this name."""

    snapshot: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of a generation, and of the sealed snapshot of this name that would become it; "":
    there is none. ``Holds``."""

    generation: int
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class Save:
    """Bring the part of a generation to the durable directory, and report it."""

    generation: int


@dataclass(frozen=True, slots=True)
class Archive:
    """Bring the part of a generation to the durable directory beside the training, let it appear
    there and report either, or let older ones go. What was asked for before is given up."""

    command: commands.Archive | commands.FinishArchive | commands.Retire


@dataclass(frozen=True, slots=True)
class Replicate:
    """Fetch what this host is to keep for others: ``Replicated``. An earlier one is given up."""

    command: commands.Replicate


@dataclass(frozen=True, eq=False, slots=True)
class TellHeld:
    """Report what the workers of a round hold together, and what room the store has: the
    coordinator knows then what replicas take."""

    round: int
    held: Collection


@dataclass(frozen=True, slots=True)
class Examine:
    """Compare this host's part of a generation with what was committed, beside the loop; what is
    damaged counts no more. Report both."""

    generation: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """Give up what was fetched of a generation, and report what is left."""

    generation: int


@dataclass(frozen=True, slots=True)
class Look:
    """Report what the durable directory holds."""


@dataclass(frozen=True, slots=True)
class Knock:
    """Knock at the data planes of these hosts, beside the loop: ``Knocked``."""

    order: int
    peers: tuple[tuple[str, tuple[str, int]], ...]


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Run the health check beside the loop, for this reason: ``HealthChecked``."""

    order: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveState:
    """The agent will end: whether its store stays as it is, and how the job has ended; the last
    step of this host's workers that have come to the end of their script, and their ledger."""

    keeps_state: bool
    ending: Ending | None
    last_step: int
    ledger: JsonText | None


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Join the job again with what the store holds: ``Rejoined`` or ``NotRejoined``."""


Action = (
    Log | Tell | Answer | Refuse | Welcome | StartGroup | BeginGroup | EndGroup | Poll | WantStop
    | Propose | Agree | Space | WithdrawStop | Kill | ShowStacks | WarmUp | Reserve | StopReserving
    | Discard | Seal | Fetch | Prove | TryCommit | DiscardSealed | DropSnapshot | Drop | Save
    | Archive | Replicate | TellHeld | Examine | Doubt | Look | CheckHealth | Knock
    | LeaveState | Rejoin
)  # fmt: skip
