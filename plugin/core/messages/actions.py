"""What must be done for a job: the actions that ``resize.advance`` returns, for the coordinator to
carry out in order."""

from dataclasses import dataclass

from scalai.core.dataset.ledger import Lost
from scalai.core.job.membership import Assignment, Standby


@dataclass(frozen=True, slots=True)
class Build:
    """Start these workers beside the present ones; they build their models and wait. Their
    snapshots lie ``every`` steps apart."""

    standby: Standby
    every: int = 0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the workers that were on standby for this round."""

    round: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Propose a stop to these hosts."""

    hosts: tuple[str, ...]
    stop: int


@dataclass(frozen=True, slots=True)
class Agree:
    """These hosts' workers come to the stop; ``probes``: once they have written they make the next
    step up to the door of its update."""

    hosts: tuple[str, ...]
    stop: int
    probes: bool = False


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Forget the stop, proposed or agreed: workers that wait at it go on."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Every worker of the job stands at the stop: those of these hosts write their state, and
    leave. From here on the stop is not taken back."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """From step ``begin`` on, the snapshots of the workers of these hosts lie ``every`` steps
    apart."""

    hosts: tuple[str, ...]
    begin: int
    every: int


@dataclass(frozen=True, slots=True)
class Lose:
    """These hosts do not answer: they count as lost where the others can go on."""

    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Say what is waited for; these hosts say where their workers are."""

    text: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Judge:
    """Unite the snapshots of these hosts and answer with ``Judged``."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Freeze:
    """The round has failed: workers of these hosts that live make no further update; each host says
    at which steps they stand."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rescue:
    """Workers of these hosts that stand at this step write their state."""

    hosts: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class JudgeRescue:
    """Unite what was written of this step, and answer with ``RescueJudged``."""

    step: int


@dataclass(frozen=True, slots=True)
class JudgeSnapshot:
    """Unite the parts of this snapshot, which was made without a stop; answer with
    ``SnapshotJudged`` where it is a state. ``reason`` is ``snapshot`` or ``start``."""

    reason: str
    snapshot: str


@dataclass(frozen=True, slots=True)
class Commit:
    """These hosts rename their sealed part to this generation."""

    hosts: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """These hosts fetch from each other what would be lost of this generation with one of them, so
    that of everything there are so many ``replicas``; each answers ``order`` with ``Replicated``.
    ``giving``: only of what nobody holds but these, which will be taken away and keep nothing."""

    hosts: tuple[str, ...]
    order: int
    generation: int
    replicas: int
    giving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Make the workers exit. ``has_written``: they leave by themselves, and may say goodbye."""

    hosts: tuple[str, ...]
    reason: str
    has_written: bool = False


@dataclass(frozen=True, slots=True)
class EndWorkers:
    """Make the workers of a round exit that the job goes on without."""

    hosts: tuple[str, ...]
    round: int


@dataclass(frozen=True, slots=True)
class StartRound:
    """Start these workers from this generation (None: from the script's own initial state).
    ``steps_lost``: steps that were made and are in no generation; ``is_built``: the workers were
    started by ``Build``. Their snapshots lie ``every`` steps apart. ``lost`` is all that rounds of
    this job have done and that it went back behind, as of ``Job``. ``proves``: its first step is
    compared with what the workers before have computed."""

    round: int
    assignment: Assignment
    generation: int | None
    steps_lost: int = 0
    is_built: bool = False
    every: int = 0
    lost: tuple[Lost, ...] = ()
    proves: bool = False


@dataclass(frozen=True, slots=True)
class Discard:
    """A round begins: these hosts give up what they have sealed and nobody has committed."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GoBack:
    """The job goes on from this generation (None: from the script's own initial state): these hosts
    let go of later ones, which are not whole, or were given up."""

    hosts: tuple[str, ...]
    generation: int | None


@dataclass(frozen=True, slots=True)
class Expect:
    """The workers of all of these hosts have built their models: each host learns how many tensors
    the job has."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prove:
    """The workers of all hosts have restored this generation: compare it with what was committed,
    and answer with ``Proven`` or ``ProofFailed``."""

    generation: int


@dataclass(frozen=True, slots=True)
class Proceed:
    """The workers of these hosts may train."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Examine:
    """These hosts read their parts of a generation again, and compare them with what was
    committed: ``Examined``."""

    hosts: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """A proof of this generation has failed, and nobody finds damage. These hosts give up what they
    have fetched of it."""

    hosts: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Drop:
    """These hosts let go of these generations."""

    hosts: tuple[str, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Every rank has stepped: older generations may go, leaving hosts may exit."""

    round: int
    keep: int | None
    leaving: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveDurable:
    hosts: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Archive:
    """These hosts bring their parts of a generation to the durable directory, where nobody sees
    them yet."""

    hosts: tuple[str, ...]
    order: int
    generation: int


@dataclass(frozen=True, slots=True)
class FinishArchive:
    """Every part of the generation is written: these hosts let them appear."""

    hosts: tuple[str, ...]
    order: int
    generation: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Generations ``before`` this number may go from the durable directory."""

    hosts: tuple[str, ...]
    before: int


@dataclass(frozen=True, slots=True)
class Look:
    """No state in memory is whole: these hosts say what their durable directories hold."""

    hosts: tuple[str, ...]


RESUMABLE = 75
"""Exit code: stopped, and the same command goes on, or begins what never began."""


@dataclass(frozen=True, slots=True)
class Exit:
    """These agents end with this code."""

    hosts: tuple[str, ...]
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """These hosts run their health check, for this reason: ``HealthChecked``."""

    hosts: tuple[str, ...]
    order: int
    reason: str


@dataclass(frozen=True, slots=True)
class Knock:
    """These hosts knock at each other's data planes: ``Knocked``."""

    hosts: tuple[str, ...]
    order: int


@dataclass(frozen=True, slots=True)
class AmendReport:
    """The report of the newest change says what came of the proof of its ``function``, which took
    ``prove_s``: it was written before."""

    function: str
    prove_s: float


@dataclass(frozen=True, slots=True)
class Say:
    """One line for the log."""

    text: str


Action = (
    Build | GiveUp | Prepare | Agree | Withdraw | TakeSnapshot | Space | Lose | Report | Judge
    | Commit
    | Replicate | JudgeSnapshot | Freeze | Rescue | JudgeRescue | StopWorkers | Discard | GoBack
    | StartRound | Expect | Prove | Proceed | Examine | Doubt | Drop | Release | SaveDurable
    | Archive | FinishArchive | Retire | Look | CheckHealth | Knock | Exit | Say | AmendReport
    | EndWorkers
)  # fmt: skip
