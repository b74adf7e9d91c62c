"""Output of the job's law (``resize.advance``), for the coordinator to carry out in order: commands
to hosts, and the few acts of its own."""

from dataclasses import dataclass

from scalai.core.dataset.ledger import Lost
from scalai.core.job.membership import Assignment, Standby
from scalai.core.messages.commands import Command

RESUMABLE = 75
"""Exit code: stopped, and the same command goes on, or begins what never began."""


@dataclass(frozen=True, slots=True)
class Send:
    """A command to each of these hosts, as it travels."""

    hosts: tuple[str, ...]
    command: Command


@dataclass(frozen=True, slots=True)
class BuildRound:
    """Start the workers of a standby round beside the present ones; they build their models and
    wait. Steps between their snapshots: ``every``."""

    standby: Standby
    every: int = 0


@dataclass(frozen=True, slots=True)
class StartRound:
    """Start a round's workers from a generation (None: from the script's own initial state).

    Attributes:
        steps_lost: Steps that were made and are in no generation.
        is_built: Whether the workers were started by ``BuildRound``.
        every: Steps between their snapshots.
        lost: Steps of all rounds behind which the job went back, as of ``Job``.
        proves: Whether its first step is compared with the same step of the workers before.
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
    """The job goes on from this generation (None: from the script's own initial state): these hosts
    drop later ones, which are not whole, or were given up."""

    hosts: tuple[str, ...]
    generation: int | None


@dataclass(frozen=True, slots=True)
class CountTensors:
    """The workers of all of these hosts have built their models: each host learns the number of
    the job's tensors (``Expect``)."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prove:
    """The workers of all hosts have restored this generation: compare it with the committed one.
    Answered by ``Proven`` or ``ProofFailed``."""

    generation: int


@dataclass(frozen=True, slots=True)
class JudgeStop:
    """Unite the snapshots of these hosts: ``Judged``."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JudgeRescue:
    """Unite the parts of this step, written by the survivors of a failure: ``RescueJudged``."""

    step: int


@dataclass(frozen=True, slots=True)
class JudgeSnapshot:
    """Unite the parts of a snapshot that was made without a stop: ``SnapshotJudged`` where it is a
    state. ``reason`` is ``snapshot`` or ``start``."""

    reason: str
    snapshot: str


@dataclass(frozen=True, slots=True)
class CommitParts:
    """These hosts rename their sealed part to this generation (``Commit``)."""

    hosts: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class MakeReplicas:
    """These hosts fetch from each other the pieces of a generation that would be lost with one of
    them (``Replicate``), up to this number of ``replicas``. ``giving``: only the pieces held by
    nobody but these hosts, which will be taken away and keep nothing."""

    hosts: tuple[str, ...]
    order: int
    generation: int
    replicas: int
    giving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TryLinks:
    """These hosts knock at each other's data planes (``Knock``)."""

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
    """These hosts do not answer: they count as lost where the others can go on."""

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
    """The report of the newest change, written before, gets the outcome of the proof of its
    ``function``, which took ``prove_s``."""

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
