"""Output of a host's law (``law.advance``), for the agent to perform in order: commands passed on
unchanged, and local acts of a host. Results: ``events.Done``, ``events.Failed``, and reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from scalai.core.host.state import Call, SnapshotFiles, Want
from scalai.core.jsonable import Json
from scalai.core.messages.commands import Command, Exit, Start, Workers
from scalai.core.messages.reports import Report
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import AtBrink, Imports, RankSnapshot, WriteOrder
from scalai.core.tensors.collection import Collection


class Level(Enum):
    """Urgency of a line of the log."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Log:
    """One line for the log."""

    level: Level
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class SendReport:
    """Report to the coordinator."""

    report: Report


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """Answer a worker's call: with a value of its request's type or, if there is one, an error."""

    call: Call
    value: object = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class AnswerHello:
    """Answer a worker's first call with ``Welcome``."""

    call: Call
    workers: Workers
    is_standby: bool
    is_at_brink: bool = False
    is_from_standby: bool = False


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Start the workers of a round. Result: their level of standby, which the room beside present
    workers allows (``standby.choose``); None: they begin at once.

    ``on_devices``: the present ones' state is in device memory; ``brink``: their memory at the
    brink; None: their script cannot stop there.
    """

    workers: Workers
    is_standby: bool
    on_devices: bool = False
    brink: AtBrink | None = None


@dataclass(frozen=True, slots=True)
class BeginGroup:
    """Make the standby workers the present ones."""

    round: int


@dataclass(frozen=True, slots=True)
class EndGroup:
    """End the workers of a round, after ``grace_s`` seconds to leave by themselves. Result: their
    last step."""

    round: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class PollGroup:
    """Look for ended workers of a round: ``GroupOver`` once all have ended, or one has failed."""

    round: int


@dataclass(frozen=True, slots=True)
class WantStop:
    """Set the urgency of a stop behind a save: 0, 1 or 2 (``Session.stop_urgency``)."""

    round: int
    urgency: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the living ones of these ranks at once."""

    round: int
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class ShowStacks:
    """Have the workers of a round log their stacks."""

    round: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Have the fork server of later rounds import what a script has, and start it before.

    ``is_last``: then it forks. Result, of the last one alone: None, also where it cannot fork.
    """

    imports: Imports
    is_last: bool


@dataclass(frozen=True, eq=False, slots=True)
class Reserve:
    """Make the files of the next snapshot. Result: its ``SnapshotFiles``."""

    round: int
    held: Mapping[int, Collection]


@dataclass(frozen=True, slots=True)
class StopReserving:
    """Cancel files in the making."""


@dataclass(frozen=True, eq=False, slots=True)
class ReuseFiles:
    """Free a slot: the next snapshot may use its files."""

    slot: SnapshotFiles


@dataclass(frozen=True, eq=False, slots=True)
class Seal:
    """Seal a snapshot. Result: its manifest, as bytes; a failure frees its room."""

    round: int
    slot: SnapshotFiles
    step: int
    about: Mapping[str, Json]
    parts: Mapping[int, RankSnapshot]
    taken_over: Sequence[tuple[WriteOrder, Sequence[int]]]


@dataclass(frozen=True, eq=False, slots=True)
class FetchWanted:
    """Plan the restore of a round's workers (``RestorePlanned``) and fetch pieces missing here
    (``PiecesHere``; ``Moved`` at intervals). Done once all are here; or the report ``Unproven``."""

    start: Start
    wants: Mapping[int, Want]


@dataclass(frozen=True, slots=True)
class TrustFetched:
    """The fetched pieces of a generation are proven: as good as written ones."""

    generation: int


@dataclass(frozen=True, slots=True)
class DiscardSealed:
    """Give up all sealed snapshots except these."""

    kept: frozenset[str]


@dataclass(frozen=True, eq=False, slots=True)
class TellHeld:
    """Report the pieces held by all workers of a round, with the store's room: ``Holding``."""

    round: int
    held: Collection


@dataclass(frozen=True, slots=True)
class LeaveState:
    """Prepare the agent's end by this command: keep or remove the store, and record the job's end.
    ``last_step``: highest last step of a finished worker here; ``ledger``: its ledger of
    samples."""

    command: Exit
    last_step: int
    ledger: JsonText | None


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Join the job again with the store's generations."""


Action = (
    Log | SendReport | AnswerCall | AnswerHello | StartGroup | BeginGroup | EndGroup | PollGroup
    | WantStop | Kill | ShowStacks | WarmUp | Reserve | StopReserving | ReuseFiles | Seal
    | FetchWanted | TrustFetched | DiscardSealed | TellHeld | LeaveState | Rejoin | Command
)  # fmt: skip
