"""Requests of workers to their agent, each bound to a rank and a round, and the orders and results
of snapshots and restores.

A worker waits for each answer. An answer of None says only: the agent has heard it, or the others
of the job have come as far.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scalai.core.dataset.ledger import Lost
from scalai.core.degrees.passes import Offload
from scalai.core.job.function_proof import Numbers
from scalai.core.jsonable import Json
from scalai.core.messages.shared import JsonText, Request
from scalai.core.tensors.collection import MAX_NDIM, Collection, Columns


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """One rank's share of a snapshot: ``rows`` of its held collection, each at byte ``begins`` of
    ``path``.

    The file exists, with its header and all its pages.
    """

    rank: int
    path: str
    rows: tuple[int, ...]
    begins: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class ReadOrder:
    """One rank's copies at a restore, as columns: copy ``i`` fills a box of a wanted piece.

    Attributes:
        row: [copies] Row of the rank's wanted collection.
        offset, shape: [copies, MAX_NDIM] Copied box of the global tensor, in elements,
            right-aligned as in a ``Collection``.
        file, begin: [copies] Source: a row-major piece in ``files[file]`` at byte ``begin``.
        source_offset, source_shape: [copies, MAX_NDIM] Box of the source piece.
    """

    files: tuple[str, ...]
    row: Columns
    offset: Columns
    shape: Columns
    file: Columns
    begin: Columns
    source_offset: Columns
    source_shape: Columns

    def __len__(self) -> int:
        return len(self.row)

    @staticmethod
    def empty() -> "ReadOrder":
        """Return an order without copies."""
        none, boxes = np.zeros(0, np.int64), np.zeros((0, MAX_NDIM), np.int64)
        return ReadOrder((), none, boxes, boxes, none, none, boxes, boxes)


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """One rank's result of writing: ``fingerprints`` in the order of its rows, and its state.

    ``rank_state`` belongs to ``coordinate`` alone; ``scalars`` are equal on all ranks with them.
    """

    fingerprints: tuple[int, ...]
    coordinate: str
    scalars: Mapping[str, Json] = field(default_factory=dict)
    rank_state: Json = None


Samples = int | float | None
"""Number of samples trained on, as the script counts them. None: unknown, as after a checkpoint
without it."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Memory of a host beside a worker at the brink, in bytes, its equal share of each: ``used`` by
    the present workers, and ``free``."""

    used: int
    free: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Facts for a worker before it builds its model.

    Attributes:
        degrees: Sizes by short names (``tp``, ``pp``, ``vpp``, ``cp``, ``ep``).
        micro_batch_size: Samples.
        is_async: Snapshots on the way are written beside the training.
        has_emergency: A worker that outlives a failure writes its state.
        restorable_step: Step of the generation for ``Publish``; None: no generation.
        is_at_brink: On standby without memory for a second model: it stops before it takes any.
        is_from_standby: This round's workers were started on standby, on all hosts; this one may
            ask late, behind the round's beginning.
        beside: Memory beside a worker that ``is_at_brink``.
        facts: Facts of the job's first workers.
        settings: The elastic configuration's values for a framework's hooks.
        run: Name of this run of the job.
        offload: State in host memory; None: by the script's flags.
        paces: As of ``Workers``.
    """

    degrees: Mapping[str, int]
    micro_batch_size: int | None
    snapshot_every: int
    is_async: bool
    has_emergency: bool
    restorable_step: int | None
    is_standby: bool
    facts: JsonText
    settings: JsonText
    run: str = "-"
    offload: Offload | None = None
    paces: tuple[int, ...] | None = None
    is_at_brink: bool = False
    is_from_standby: bool = False
    beside: Beside | None = None


@dataclass(frozen=True, slots=True)
class AtBrink:
    """Memory of a worker at the brink, in bytes: of its ``host`` and ``device``, by all that its
    script has made before."""

    host: int
    device: int


@dataclass(frozen=True, slots=True)
class Hello(Request[Welcome]):
    """A worker's first message. ``imports``: from one rank per host."""

    rank: int
    round: int
    imports: "Imports | None" = None


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """State for a worker to restore, and its context.

    Attributes:
        order: Copies of what this host holds. Other hosts' pieces are asked for (``AwaitPieces``)
            while wanted elements are missing.
        scalars: Scalars of all ranks.
        rank_state: State by this rank's coordinate, or empty.
        lost: Steps done before and contained in no generation.
        proves: The first step is compared with that of the workers before.
    """

    order: ReadOrder
    step: int
    consumed_samples: Samples
    scalars: JsonText
    rank_state: JsonText
    lost: tuple[Lost, ...] = ()
    proves: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Publish(Request[Source | None]):
    """The model is built. ``held``: pieces of this rank at a snapshot; ``wanted``: pieces to
    restore; ``coordinate``: place of its own state; ``brink``: its memory where its script can stop
    on standby; None: nowhere.

    Answered once the restore is planned; None: the workers begin from their built state.
    """

    rank: int
    round: int
    is_restoring: bool
    held: Collection
    wanted: Collection
    coordinate: str
    facts: JsonText
    uses_devices: bool
    brink: AtBrink | None = None

    def __post_init__(self) -> None:
        self.held.check()
        self.wanted.check()


@dataclass(frozen=True, slots=True)
class AwaitPieces(Request[ReadOrder | None]):
    """This rank has restored all that it was told of. Answered once further pieces of other hosts
    are here; None: there are no more."""

    rank: int
    round: int


@dataclass(frozen=True, slots=True)
class AwaitRound(Request[None]):
    """This rank, on standby, has come to the brink, and builds its model only in its round.
    Answered once that begins."""

    rank: int
    round: int


@dataclass(frozen=True, slots=True)
class AwaitSlot(Request[WriteOrder | None]):
    """Asks for this rank's order of the next snapshot, to map the file early; None: the round ends
    before."""

    rank: int
    round: int


@dataclass(frozen=True, slots=True)
class BeginSnapshot(Request[WriteOrder | None]):
    """This rank has come to a snapshot step. ``reason``: ``stop``, ``snapshot`` or ``start``.

    ``fingerprints`` of its rows: ``NOT_COMPARED`` for rows that may differ by rank; empty: no
    comparison. Answer None: the stop was withdrawn, and training goes on.
    """

    rank: int
    round: int
    reason: str
    step: int
    fingerprints: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stand(Request[None]):
    """This rank stands at an agreed stop, with the save of ``iteration`` in flight. Answered at the
    stop's withdrawal."""

    rank: int
    round: int
    step: int
    iteration: int


@dataclass(frozen=True, slots=True)
class RankWritten(Request[WriteOrder | None]):
    """This rank has written its order of ``step``. ``fingerprints`` in the order of its rows; the
    rest as in ``RankSnapshot``. Answer: an order for a dead rank's share."""

    rank: int
    round: int
    step: int
    fingerprints: tuple[int, ...]
    coordinate: str
    scalars: JsonText
    rank_state: JsonText
    consumed_samples: Samples
    seconds: Mapping[str, float]

    @property
    def part(self) -> RankSnapshot:
        """The rank's share, for the manifest."""
        scalars, rank_state = self.scalars.value(), self.rank_state.value()
        return RankSnapshot(self.fingerprints, self.coordinate, scalars, rank_state)


@dataclass(frozen=True, slots=True)
class RankUnwritten(Request[None]):
    """This rank has no valid share of the snapshot of ``step`` on the way; it trains on."""

    rank: int
    round: int
    step: int
    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class RankRestored(Request[None]):
    """This rank has filled its memory; ``fingerprints`` [wanted pieces]: of the bytes read.
    Answered once the whole job's state is proven."""

    rank: int
    round: int
    fingerprints: npt.NDArray[np.uint64]
    seconds: Mapping[str, float]
    note: str


@dataclass(frozen=True, slots=True)
class AwaitFreeze(Request[None]):
    """A thread of this rank waits beside the training. Answered at a failure of other workers: then
    no further update is allowed."""

    rank: int
    round: int


@dataclass(frozen=True, slots=True)
class RankFrozen(Request[WriteOrder | None]):
    """This rank makes no further update. ``step``: step of its memory; None: torn, for this
    ``reason``. Answer: a write order, if its state is wanted."""

    rank: int
    round: int
    step: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class RankFailed(Request[None]):
    """This rank's script has raised, or has left with an error. The process waits to be ended,
    without an answer, for its state to be written."""

    rank: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Imports:
    """Modules imported by a script, and their path, for the fork server of later rounds."""

    modules: tuple[str, ...]
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankStepped(Request[None]):
    """This rank has made the round's first step, or one behind its stop (without update).
    ``numbers``: those known to this rank. ``imports``: from one rank per host."""

    rank: int
    round: int
    step: int
    imports: Imports | None
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class RankFinished(Request[None]):
    """This rank's script has ended at this step. ``ledger``: consumed samples, from ranks that draw
    them."""

    rank: int
    round: int
    step: int
    ledger: JsonText | None = None


@dataclass(frozen=True, slots=True)
class RankRefused(Request[None]):
    """This rank cannot run the job, and a retry would not help. It waits to be ended."""

    rank: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankUnhooked(Request[None]):
    """This rank's script trains without hooks on its steps."""

    rank: int
    round: int


WorkerRequest = (
    Hello | AwaitRound | Publish | AwaitPieces | AwaitSlot | BeginSnapshot | Stand | RankWritten
    | RankUnwritten | RankRestored | RankStepped | RankFinished | RankRefused | RankUnhooked
    | AwaitFreeze | RankFrozen | RankFailed
)  # fmt: skip
