"""Output of the job's law (``resize.advance``), for the coordinator to perform in order: commands
to hosts, and a few acts of its own."""

from dataclasses import dataclass

from scalai.core.dataset.ledger import Lost
from scalai.core.job.membership import Assignment, StandbyRound
from scalai.core.messages.commands import Command


@dataclass(frozen=True, slots=True)
class Send:
    """A command to each of these hosts."""

    hosts: tuple[str, ...]
    command: Command


@dataclass(frozen=True, slots=True)
class BuildRound:
    """Start a standby round's workers beside the present ones; they build their models and wait.
    ``every``: steps between their snapshots."""

    standby: StandbyRound
    every: int = 0


@dataclass(frozen=True, slots=True)
class StartRound:
    """Start a round's workers from a generation (None: from the script's own initial state).

    Attributes:
        steps_lost: Steps made and in no generation.
        is_built: The workers were started by ``BuildRound``.
        every: Steps between their snapshots.
        lost: Steps dropped by returns in all rounds, as in ``Job``.
        proves: Its first step is compared with the same step of the workers before.
    """

    round: int
    assignment: Assignment
    generation: int | None
    steps_lost: int = 0
    is_built: bool = False
    every: int = 0
    lost: tuple[Lost, ...] = ()
    proves: bool = False


@dataclass(frozen=True, slots=True)
class GoBack:
    """Go on from this generation (None: from the script's own initial state): these hosts drop
    later ones, incomplete or given up."""

    hosts: tuple[str, ...]
    generation: int | None


@dataclass(frozen=True, slots=True)
class CountTensors:
    """The workers of all these hosts have built their models: each host gets the job's number of
    tensors (``Expect``)."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prove:
    """Compare the generation restored by all hosts with the committed one. Answer: ``Proven`` or
    ``ProofFailed``."""

    generation: int


@dataclass(frozen=True, slots=True)
class JudgeStop:
    """Unite the snapshots of these hosts. Answer: ``Judged``."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JudgeRescue:
    """Unite survivors' parts of this step. Answer: ``Judged``."""

    step: int


@dataclass(frozen=True, slots=True)
class JudgeSnapshot:
    """Unite the parts of a snapshot without a stop. Answer for a whole state: ``SnapshotJudged``.
    ``reason``: ``snapshot`` or ``start``."""

    reason: str
    snapshot: str


@dataclass(frozen=True, slots=True)
class CommitParts:
    """These hosts rename their sealed part to this generation (``Commit``)."""

    hosts: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class MakeReplicas:
    """These hosts fetch the pieces of a generation that one loss would take away (``Replicate``),
    up to this number of ``replicas``. ``giving``: only pieces on these leaving hosts alone; they
    keep nothing."""

    hosts: tuple[str, ...]
    order: int
    generation: int
    replicas: int
    giving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TryLinks:
    """These hosts probe each other's data planes (``Knock``)."""

    hosts: tuple[str, ...]
    order: int


@dataclass(frozen=True, slots=True)
class Release:
    """All ranks have stepped: generations older than ``keep`` may go, ``leaving`` hosts may
    exit."""

    round: int
    keep: int | None
    leaving: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lose:
    """These hosts do not answer: they count as lost if the others can go on."""

    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class EndJob:
    """The agents of these hosts end with this exit code (``Exit``)."""

    hosts: tuple[str, ...]
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class AmendReport:
    """Add the result of the proof of the ``function``, and its ``prove_s`` seconds, to the report
    of the newest change."""

    function: str
    prove_s: float


@dataclass(frozen=True, slots=True)
class Say:
    """One line for the log."""

    text: str


Action = (
    Send | BuildRound | StartRound | GoBack | CountTensors | Prove | JudgeStop | JudgeRescue
    | JudgeSnapshot | CommitParts | MakeReplicas | TryLinks | Release | Lose | EndJob | AmendReport
    | Say
)  # fmt: skip
