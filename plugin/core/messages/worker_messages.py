"""What the workers of a host ask their agent, each bound to a rank and a round.

A worker waits for the answer of each: where that is None it waits only until the agent has heard
it, or until the others of the job have come as far.

What crosses with them around a snapshot and a restore: orders there, results back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scalai.core.dataset.ledger import Lost
from scalai.core.job.function_proof import Numbers
from scalai.core.jsonable import Json
from scalai.core.messages.shared import JsonText, Request
from scalai.core.tensors.collection import Collection, Columns


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """What one rank writes at a snapshot: ``rows`` of its own held collection, each at byte
    ``begins`` of ``path``.

    The file exists, with its header and all its pages.
    """

    rank: int
    path: str
    rows: tuple[int, ...]
    begins: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class ReadOrder:
    """What one rank copies at a restore, as columns: copy ``i`` fills a box of a wanted piece.

    ``row`` [copies] is the row of the rank's own wanted collection; ``offset`` and ``shape``
    [copies, MAX_NDIM] the box of the global tensor that is copied, in elements, right-aligned as in
    a ``Collection``. The source is a row-major piece in ``files[file]`` at byte ``begin``
    [copies]; ``source_offset`` and ``source_shape`` [copies, MAX_NDIM] say which box that piece is.
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


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """What one rank reports after writing: ``fingerprints`` of the rows of its order, in that
    order, and its state.

    ``rank_state`` belongs to ``coordinate`` alone; ``scalars`` are the same on all ranks that have
    them."""

    fingerprints: tuple[int, ...]
    coordinate: str
    scalars: Mapping[str, Json] = field(default_factory=dict)
    rank_state: Json = None


Samples = int | float | None
"""How many samples a script says that it has trained on: any number. None: not known, as where the
state comes from a checkpoint that does not say."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a worker has to know before it builds its model.

    ``degrees`` are sizes by their short names (``tp``, ``pp``, ``vpp``, ``cp``, ``ep``);
    ``micro_batch_size`` is in samples; ``is_async``: snapshots on the way are written beside the
    training; ``has_emergency``: a worker that outlives a failure writes what it has;
    ``restorable_step`` is the step of the generation that ``Publish`` will hand out, None where
    there is none; ``facts`` are those of the job's first workers; ``settings`` are the elastic
    configuration's words to a framework's hooks; ``run`` names this run of the job.
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


@dataclass(frozen=True, slots=True)
class Hello(Request[Welcome]):
    """The first word of a worker."""

    rank: int
    round: int


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """What a worker restores: which bytes of which files (``order``), and what goes with them.

    ``scalars`` are those of all ranks; ``rank_state`` maps this rank's coordinate to its state, or
    is empty. ``lost`` are the steps that were done before and are in no generation. ``proves``: the
    first step is compared with what the workers before have computed.
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
    """The model is built: ``held`` are the pieces that this rank holds at a snapshot, ``wanted``
    those that it restores; its own state is that of ``coordinate``. Answered once all that is
    needed is on this host; None: the workers begin from what they have built."""

    rank: int
    round: int
    is_restoring: bool
    held: Collection
    wanted: Collection
    coordinate: str
    facts: JsonText
    uses_devices: bool

    def __post_init__(self) -> None:
        self.held.check()
        self.wanted.check()


@dataclass(frozen=True, slots=True)
class AwaitSlot(Request[WriteOrder | None]):
    """Where this rank will write at the next snapshot, so that it can map the file before; None:
    the round ends before that is known."""

    rank: int
    round: int


@dataclass(frozen=True, slots=True)
class BeginSnapshot(Request[WriteOrder | None]):
    """This rank has come to a step at which it snapshots; ``reason`` is ``stop``, ``snapshot`` or
    ``start``. None: the stop was taken back, and the training goes on. ``fingerprints``: of the
    rows that it holds, ``NOT_COMPARED`` of those that may differ from rank to rank; empty: it does
    not say."""

    rank: int
    round: int
    reason: str
    step: int
    fingerprints: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stand(Request[None]):
    """This rank stands at an agreed stop, with the save of ``iteration`` in flight. Answered once
    the stop is taken back."""

    rank: int
    round: int
    step: int
    iteration: int


@dataclass(frozen=True, slots=True)
class RankWritten(Request[WriteOrder | None]):
    """This rank has written its order of ``step``, and has these fingerprints of its rows, in that
    order; the rest is as of ``RankSnapshot``. The answer is what to write for another rank that
    died."""

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
        """What it has written, for the manifest."""
        scalars, rank_state = self.scalars.value(), self.rank_state.value()
        return RankSnapshot(self.fingerprints, self.coordinate, scalars, rank_state)


@dataclass(frozen=True, slots=True)
class RankUnwritten(Request[None]):
    """This rank has written nothing that counts of the snapshot of ``step``, which was made on the
    way, for this ``reason``; it trains on."""

    rank: int
    round: int
    step: int
    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class RankRestored(Request[None]):
    """This rank has filled its memory; ``fingerprints`` [wanted pieces] are of what it read.
    Answered once the whole job's state is proven."""

    rank: int
    round: int
    fingerprints: npt.NDArray[np.uint64]
    seconds: Mapping[str, float]
    note: str


@dataclass(frozen=True, slots=True)
class AwaitFreeze(Request[None]):
    """A thread of this rank waits beside the training. Answered where workers of the job have
    failed: it must make no further update."""

    rank: int
    round: int


@dataclass(frozen=True, slots=True)
class RankFrozen(Request[WriteOrder | None]):
    """This rank makes no further update, and its memory is the state of ``step``; None: it is of no
    step, for this ``reason``. Answered with what to write, if it is to write."""

    rank: int
    round: int
    step: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class RankFailed(Request[None]):
    """The script of this rank has raised, or has left with an error. The process waits to be ended,
    so that its state can be written; it waits for no answer."""

    rank: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Imports:
    """What a script has imported, and from where, for the fork server of later rounds."""

    modules: tuple[str, ...]
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankStepped(Request[None]):
    """This rank has made its first step of the round, or one behind its stop, which has no update;
    ``numbers``: of that step, as far as this rank knows them. ``imports``: of one rank a host."""

    rank: int
    round: int
    step: int
    imports: Imports | None
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class RankFinished(Request[None]):
    """The script of this rank has come to its end, at this step; ``ledger``: of the samples that
    the job has consumed, from ranks that draw them."""

    rank: int
    round: int
    step: int
    ledger: JsonText | None = None


@dataclass(frozen=True, slots=True)
class RankRefused(Request[None]):
    """This rank cannot run the job, and would say so again. It waits to be ended."""

    rank: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankUnhooked(Request[None]):
    """The script of this rank trains, and nothing hooks its steps."""

    rank: int
    round: int


WorkerRequest = (
    Hello | Publish | AwaitSlot | BeginSnapshot | Stand | RankWritten | RankUnwritten | RankRestored
    | RankStepped | RankFinished | RankRefused | RankUnhooked | AwaitFreeze | RankFrozen
    | RankFailed
)  # fmt: skip
