"""Commands of the coordinator to one host, numbered by incarnation of the agent; each arrives once,
in order. Those about a round name it; a host in another round ignores them."""

from collections.abc import Mapping
from dataclasses import dataclass

from scalai.core.dataset.ledger import Lost
from scalai.core.degrees.passes import Offload, Recompute
from scalai.core.job.remembered import Remembered
from scalai.core.messages.shared import JsonText, Shared
from scalai.core.tensors.fingerprint import CommitStatement
from scalai.core.tensors.holders import SourceList
from scalai.core.tensors.replicas import Ring


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of a host's workers in the world of a round.

    Names are those of torchrun's environment: ``group_rank`` counts hosts; ``first_rank`` is the
    host's lowest global rank; ``hosts`` are all hosts with workers, in rank order, with their
    ``counts`` of workers.
    """

    hosts: Shared[tuple[str, ...]]
    counts: Shared[tuple[int, ...]]
    group_rank: int
    first_rank: int
    local_world_size: int
    world_size: int

    @property
    def group(self) -> tuple[str, ...]:
        """All hosts with workers, in rank order."""
        return self.hosts.value

    @property
    def workers(self) -> tuple[tuple[str, int], ...]:
        """All hosts with their numbers of workers, in rank order."""
        return tuple(zip(self.hosts.value, self.counts.value, strict=True))

    @property
    def group_world_size(self) -> int:
        """Hosts with workers."""
        return len(self.group)

    @property
    def ranks(self) -> range:
        """Global ranks of the host's workers."""
        return range(self.first_rank, self.first_rank + self.local_world_size)


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers of a host in a round, and facts for their models.

    Attributes:
        run: Name of this run of the job.
        degrees: As in ``Degrees.to_json``.
        micro_batch_size, recompute, offload: None: by the script's flags.
        master_addr, master_port: Rendezvous of the workers.
        generation: The newest one; None: none.
        restorable_step, facts: Of that generation.
        snapshot_every: Steps between snapshots on the way; 0: none.
        paces: Time of a pass on each replica, for its share of the batch; empty: all are alike,
            None: shares are even, and nothing is measured.
    """

    run: str
    round: int
    placement: Placement
    degrees: Mapping[str, int]
    micro_batch_size: int | None
    master_addr: str
    master_port: int
    generation: int | None
    restorable_step: int | None
    facts: JsonText
    snapshot_every: int
    recompute: Recompute | None = None
    offload: Offload | None = None
    paces: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep this record for the next coordinator, in place of an earlier one."""

    known: Shared[Remembered]


@dataclass(frozen=True, slots=True)
class Build:
    """Start the workers of a later round beside the present ones: they build their models and
    wait."""

    workers: Workers


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the workers built for this round."""

    round: int


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a round, with its standby workers if ``is_built``, from the generation of ``sources``;
    None: from the script's own initial state. ``lost``: earlier steps outside of any generation.
    ``proves``: the first step is compared with the same step of the workers before."""

    workers: Workers
    sources: Shared[SourceList] | None
    is_built: bool
    lost: tuple[Lost, ...] = ()
    proves: bool = False


@dataclass(frozen=True, slots=True)
class Expect:
    """All workers of the job have published: its number of tensors."""

    round: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Proceed:
    """The restored state of all workers is proven: they may train."""

    round: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Propose a stop to the workers."""

    round: int
    stop: int


@dataclass(frozen=True, slots=True)
class Agree:
    """All workers of the job see the stop: they may come to it. ``proves``: after the seal they
    make the next step without its update, and report its numbers."""

    round: int
    stop: int
    proves: bool = False


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Forget the stop, proposed or agreed: waiting workers go on."""

    round: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Every worker of the job stands at the stop: write the state, and leave."""

    round: int


@dataclass(frozen=True, slots=True)
class Space:
    """From step ``begin`` on, the snapshots on the way lie ``every`` steps apart."""

    round: int
    begin: int
    every: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """Workers of the round have failed: living ones make no further update. Report their steps."""

    round: int


@dataclass(frozen=True, slots=True)
class Rescue:
    """Workers standing at this step write their state."""

    round: int
    step: int


@dataclass(frozen=True, slots=True)
class LogStacks:
    """The job waits for the workers: have them log their stacks."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Give up sealed parts without a number."""


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Give up the sealed part of this ``snapshot`` on the way, which is no state."""

    snapshot: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Rename the sealed ``snapshot`` to ``generation``, with its statement: the ``hosts`` of its
    writers (None: no statement) and the fingerprints of tensors with pieces here."""

    generation: int
    snapshot: str
    hosts: Shared[tuple[str, ...]] | None
    fingerprints: Mapping[str, int]

    @property
    def committed(self) -> CommitStatement | None:
        """The statement in the host's manifest."""
        return None if self.hosts is None else CommitStatement(self.hosts.value, self.fingerprints)


@dataclass(frozen=True, slots=True)
class Stop:
    """Make the workers of a round exit; after a snapshot they leave by themselves."""

    round: int
    has_written: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of a generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Save:
    """Bring the part of a generation to the durable directory."""

    generation: int


@dataclass(frozen=True, slots=True)
class Archive:
    """Write the part of a generation to the durable directory beside the training, hidden;
    ``own_only``: without pieces written by other hosts. The answer repeats ``order``. An earlier
    order is cancelled."""

    order: int
    generation: int
    own_only: bool = False


@dataclass(frozen=True, slots=True)
class FinishArchive:
    """Let the archived parts of a generation appear; ``order`` goes back."""

    order: int
    generation: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Remove generations ``before`` this number from the durable directory."""

    before: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Fetch this host's replicas, by the ``ring``, of the generation held by the hosts of
    ``sources``; ``order`` goes back with the answer."""

    order: int
    sources: Shared[SourceList]
    ring: Shared[Ring]


@dataclass(frozen=True, slots=True)
class Examine:
    """Read the own part of this generation again, and compare it with its committed
    fingerprints."""

    generation: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """A proof of this generation has failed: give up its fetched pieces."""

    generation: int


@dataclass(frozen=True, slots=True)
class Look:
    """Report the contents of the durable directory."""


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Run the health check, for this reason; ``order`` goes back with the answer."""

    order: int
    reason: str


@dataclass(frozen=True, slots=True)
class Knock:
    """Knock at the data planes of these hosts; ``order`` goes back with the answer."""

    order: int
    peers: tuple[tuple[str, tuple[str, int]], ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the job: its step and newest generation."""

    step: int
    generation: int | None


@dataclass(frozen=True, slots=True)
class Exit:
    """End with this code. ``ending``: of the job; ``keeps_state``: the store stays unchanged."""

    code: int
    reason: str
    keeps_state: bool = True
    ending: Ending | None = None


Command = (
    Remember | Build | GiveUp | Start | Expect | Proceed | Prepare | Agree | Withdraw
    | TakeSnapshot | LogStacks | Space | Freeze | Rescue | Discard | DropSnapshot | Commit | Stop
    | Drop | Save | Archive | FinishArchive | Retire | Replicate | Examine | Doubt | Look
    | CheckHealth | Knock | Exit
)  # fmt: skip
