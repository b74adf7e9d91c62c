"""A layout: a reader and a writer of files, and the values between them.

A *reader* turns files into a ``Checkpoint``: a parallelizable tensor collection whose rows place
boxes of tensors in files, and ``Values`` for everything else. It reads metadata alone. A *writer*
turns a ``Checkpoint`` and new degrees into a ``CheckpointTarget``: files, their known bytes, and
the rows for a streaming engine (``scalai.converters.engine``) to fill. Neither moves a tensor's
bytes, and neither knows of the other's layout.

Names of tensors do not depend on the layout; they are those of live state
(``scalai.patches.megatron.megatron_state``): ``<kind>/<parameter's global name>`` with the kinds
``param``, ``main``, ``exp_avg``, ``exp_avg_sq``, ``step``. Two rules make equal states equal
collections:

* An fp32 parameter is its own master, so it has no ``main``, although most layouts store it twice.
* The optimizer's step is a 0-d fp32 tensor a parameter (torch Adam's own form), also for layouts
  with one number for all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from scalai.core.jsonable import Json
from scalai.core.tensors.collection import (
    MAX_NDIM,
    Collection,
    Columns,
    Tensor,
    concatenate,
    split_name,
)
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, Index, row_major, whole

PARAM, MAIN, STEP, USER = "param", "main", "step", "user"
"""Kinds of tensors; the others are the optimizer's own names, as ``exp_avg``. ``user`` are tensors
registered by a script, without a parameter."""


CONFIG = "config"
"""The key in ``Values.extra`` of Hugging Face's ``config.json``."""

REPORT = "scalai.json"
"""The report of a conversion in its destination."""
REPORT_VERSION = 2


@dataclass(frozen=True, eq=False, slots=True)
class Overlay:
    """What is read instead of a matrix in a file: it plus ``scale * left @ right``, or this alone.

    The matrix is row-major, [left.shape[0], right.shape[1]], at the bytes ``begin`` to ``end``.
    """

    begin: int
    end: int
    left: npt.NDArray[np.float32]
    right: npt.NDArray[np.float32]
    scale: float
    is_sum: bool

    def identity(self) -> bytes:
        """Return a value that changes with the overlay."""
        where = repr((self.begin, self.end, self.scale, self.is_sum)).encode()
        return where + self.left.tobytes() + self.right.tobytes()


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file with pieces.

    ``path`` is relative to the checkpoint's directory. ``content`` belongs to files of a source
    that exist in memory only: a value among the settings, but a tensor in other layouts.
    ``overlays``: changes of a source's numbers on reading. ``copies``: paths of equal files.
    """

    path: str
    size_bytes: int
    content: bytes | None = None
    overlays: tuple[Overlay, ...] = ()
    copies: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class PlacedTensors:
    """Pieces and their places, as columns.

    Element ``i`` of row ``r`` (relative to its box) lies in ``files[file[r]]`` at byte ``begin[r] +
    sum(i * stride[r]) * item size``. ``stride`` [rows, MAX_NDIM] counts elements, right-aligned as
    ``Collection`` is.

    ``is_rounded`` [rows], None for nowhere: the row lies there as fp32, and is rounded to its
    tensor's dtype on reading. So are weights of layouts that keep masters alone. Rows of a target
    never are.
    """

    collection: Collection
    file: Columns
    begin: Columns
    stride: Columns
    files: tuple[CheckpointFile, ...]
    is_rounded: npt.NDArray[np.bool_] | None = None

    def is_rounded_at(self, row: int) -> bool:
        return self.is_rounded is not None and bool(self.is_rounded[row])

    def item_bytes(self, row: int) -> int:
        """Return the bytes of one element of a row in its file."""
        dtype = self.collection.tensors[int(self.collection.tensor[row])].dtype
        return ITEM_BYTES["F32" if self.is_rounded_at(row) else dtype]

    def piece(self, row: int) -> "FilePiece":
        """Return a row as a piece."""
        tensor, box = self.collection.box(row)
        stride = tuple(self.stride[row, MAX_NDIM - len(box.shape) :].tolist())
        file, begin = self.files[self.file[row]].path, int(self.begin[row])
        return FilePiece(tensor, box, file, begin, stride, self.is_rounded_at(row))

    def rounded(self) -> npt.NDArray[np.bool_]:
        return np.zeros(len(self.file), np.bool_) if self.is_rounded is None else self.is_rounded


@dataclass(frozen=True, slots=True)
class FilePiece:
    """One row of ``PlacedTensors``. ``stride`` None: row-major and without gaps."""

    tensor: Tensor
    box: Box
    file: str
    begin: int
    stride: Index | None = None
    is_rounded: bool = False

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES["F32" if self.is_rounded else self.tensor.dtype]


def step_piece(parameter: str, step: float) -> tuple[FilePiece, CheckpointFile]:
    """Return the optimizer's step of a parameter, and the file in memory with it."""
    content = np.float32(step).tobytes()
    file = CheckpointFile(f"(step {step:g})", len(content), content)
    return FilePiece(Tensor(f"{STEP}/{parameter}", (), "F32"), whole(()), file.path, 0), file


def stored_files(directory: Path, names: Iterable[str]) -> list[CheckpointFile]:
    """Return files of a directory, with their sizes."""
    return [CheckpointFile(name, (directory / name).stat().st_size) for name in names]


def place(pieces: Sequence[FilePiece], files: Sequence[CheckpointFile]) -> PlacedTensors:
    """Return pieces as columns, in order.

    Raises:
        LayoutError: Pieces of one name disagree about the tensor.
    """
    number = {file.path: index for index, file in enumerate(files)}
    stride = np.zeros((len(pieces), MAX_NDIM), dtype=np.int64)
    for row, piece in zip(stride, pieces, strict=True):
        steps = row_major(piece.box.shape) if piece.stride is None else piece.stride
        row[MAX_NDIM - len(steps) :] = steps
    return PlacedTensors(
        Collection.of((piece.tensor, piece.box) for piece in pieces),
        np.array([number[piece.file] for piece in pieces], dtype=np.int64),
        np.array([piece.begin for piece in pieces], dtype=np.int64),
        stride,
        tuple(files),
        np.array([piece.is_rounded for piece in pieces], dtype=np.bool_),
    )


def unite(parts: Sequence[PlacedTensors]) -> PlacedTensors:
    """Return the rows of all parts in order; files of equal paths are one."""
    files: dict[str, CheckpointFile] = {}
    for part in parts:
        files.update((file.path, file) for file in part.files)
    number = {path: index for index, path in enumerate(files)}
    columns = [np.zeros(0, np.int64)]
    for part in parts:
        renumber = np.array([number[file.path] for file in part.files], dtype=np.int64)
        columns.append(renumber[part.file] if len(part.file) else part.file)
    none, flat = np.zeros((0, MAX_NDIM), np.int64), np.zeros(0, np.int64)
    return PlacedTensors(
        concatenate([part.collection for part in parts]),
        np.concatenate(columns),
        np.concatenate([flat, *(part.begin for part in parts)]),
        np.concatenate([none, *(part.stride for part in parts)]),
        tuple(files.values()),
        np.concatenate([np.zeros(0, np.bool_), *(part.rounded() for part in parts)]),
    )


@dataclass(frozen=True, slots=True)
class Values:
    """Everything in a checkpoint beside tensors.

    Attributes:
        step: Optimizer steps done; the framework's iteration.
        degrees: Sizes of the parallel axes (``tp pp vpp cp ep etp dp``), as far as the files say.
        framework: ``megatron`` or ``deepspeed``.
        is_split: Whether the optimizer's state is split over data-parallel ranks (Megatron's
            distributed optimizer, ZeRO 1 to 3).
        scheduler: The learning-rate schedule's state, as its own ``state_dict`` has it.
        grad_scaler: The fp16 loss scale's state, likewise.
        param_groups: Parameter groups with the framework's own keys, without lists of parameters.
        arguments: The framework's arguments. May hold stand-ins (``pickles.Foreign``).
        counters: ``consumed_train_samples`` and the like, as far as known.
        rank_state: RNG states by coordinate, for a target of the same degrees.
        extra: Further state of a layout, for a target of the same layout (Megatron's extra state).
    """

    step: int
    degrees: Mapping[str, int]
    framework: str
    is_split: bool | None = None
    scheduler: Mapping[str, Any] | None = None
    grad_scaler: Mapping[str, Any] | None = None
    param_groups: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] | None = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Json] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Checkpoint:
    """A checkpoint that was read; only metadata is in memory.

    Attributes:
        layout: The layout's name.
        directory: The directory of its files.
        placed: Every piece. Replicas may come several times, as equal boxes.
        values: Everything beside tensors.
        duplicates: Second copies under another name (fp32 masters beside fp32 parameters): each row
            names the tensor it must equal. ``scalai verify`` compares them.
        may_overlap: Equal elements may lie in boxes with different cuts, as in pieces that hosts
            fetched from each other.
        recorded: The layout's own fingerprints, by row of ``placed``; None: it has none.
        stated: The layout's own fingerprints of whole tensors, by name: they prove pieces that were
            fetched and never proven.
        notes: Findings, one line each: losses and their reasons.
        changed: Tensors renamed, cut or padded after reading: records beside the files do not
            apply.
        guessed: Parameters whose optimizer states are not identified.
    """

    layout: str
    directory: Path
    placed: PlacedTensors
    values: Values
    duplicates: PlacedTensors | None = None
    may_overlap: bool = False
    recorded: npt.NDArray[np.uint64] | None = None
    stated: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    changed: frozenset[str] = frozenset()
    guessed: frozenset[str] = frozenset()


def parameters_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return parameters and buffers by name, without the kind."""
    tensors = checkpoint.placed.collection.tensors
    return {split_name(t.name)[1]: t for t in tensors if t.name.startswith(f"{PARAM}/")}


@dataclass(frozen=True, slots=True)
class AuxiliaryFile:
    """A file of a target without tensors: a copy of ``source``, or ``content``.

    ``path`` is relative to the target's directory.
    """

    path: str
    size_bytes: int
    source: Path | None = None
    content: bytes | None = None


@dataclass(frozen=True, eq=False, slots=True)
class CheckpointTarget:
    """A checkpoint to be written.

    Attributes:
        layout: The layout's name.
        placed: The rows to fill, each row-major and without gaps. A tensor may have several rows,
            in layouts that keep replicas. The source must hold every wanted element.
        fixed: By file number, (offset, bytes) of known content: headers, directories, pickles.
        finish: Called once all files are whole, with the directory (under its temporary name) and
            the fingerprint of each row [rows]: writes the small files that complete the checkpoint,
            the framework's marker of completeness last.
        notes: Losses and inventions, one line each.
        auxiliary: Further files; written before ``finish`` is called.
        keeps_order: The optimizer's states stay in the source's order, so their owners do not
            matter.
    """

    layout: str
    placed: PlacedTensors
    fixed: Mapping[int, Sequence[tuple[int, bytes]]]
    finish: Callable[[Path, npt.NDArray[np.uint64]], None]
    notes: tuple[str, ...] = ()
    auxiliary: tuple[AuxiliaryFile, ...] = ()
    keeps_order: bool = False


Order = Callable[[Sequence[str]], Sequence[Sequence[str]] | None]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for reading.

    Attributes:
        trust_pickle: Let pickles name classes of unknown packages.
        iteration: Number of the iteration or generation to read; None: the newest.
        cuts: File with the cuts of tensor-parallel ranks, for layouts without them.
        is_part: Take a generation with parts missing or elsewhere, to look at the rest.
        order: For layouts without names of the optimizer's parameters: deals the module's, in its
            order, to the optimizer's groups, in theirs; None: unknown.
    """

    trust_pickle: bool = False
    iteration: int | None = None
    cuts: Path | None = None
    is_part: bool = False
    order: Order | None = None


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options for writing.

    Attributes:
        degrees: Target degrees by axis; the others stay.
        is_split: Whether to split the optimizer's state over data-parallel ranks; None: as in the
            source.
        reference: Values of another checkpoint of the same job, for values missing in the source
            (arguments, hyperparameters of the parameter groups).
        cuts: As in ``ReadOptions``; may also give the first layers of a pipeline's stages.
    """

    degrees: Mapping[str, int]
    is_split: bool | None = None
    reference: Values | None = None
    cuts: Path | None = None


class CheckpointLayout(Protocol):
    """One layout: found by its files, read, written. A module each; see ``layouts``."""

    @property
    def name(self) -> str:
        """Its name for ``--to``."""
        ...

    @property
    def framework(self) -> str:
        """The framework that loads it, by its name in ``Values``; empty: none, or any."""
        ...

    def find(self, path: Path) -> bool:
        """Whether ``path`` is, or holds, a checkpoint of this layout. Looks at names and, at most,
        at the first bytes of small files; raises nothing."""
        ...

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a checkpoint.

        Raises:
            RefusedError: It is damaged, incomplete or of an unreadable kind; names the file, the
                expectation and the way out.
        """
        ...

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Return the files of a checkpoint of ``source``'s state at other degrees.

        Pure: writes nothing. The same input gives the same target, byte by byte, so an interrupted
        run can go on.

        Raises:
            RefusedError: The source lacks a value of this layout; names it and the way out.
        """
        ...
