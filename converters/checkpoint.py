"""What a layout is: a reader and a writer of files, and the values that pass between them.

A *reader* turns files into a ``Checkpoint``: a parallelizable tensor collection whose rows say
which box of which tensor lies where, and everything that is no tensor in ``Values``. It reads
metadata alone. A *writer* turns a ``Checkpoint`` and new degrees into a ``Target``: files, the
bytes of them that are known, and the rows that a streaming engine (``scalai.converters.engine``)
is to fill. Neither moves a tensor's bytes, and neither knows of the other's layout.

Names of tensors do not depend on the layout; they are those of live state
(``scalai.patches.megatron.state``): ``<kind>/<parameter's global name>`` with the kinds ``param``,
``main``, ``exp_avg``, ``exp_avg_sq``, ``step``. Two rules make equal states equal collections:

* An fp32 parameter is its own master, so there is no ``main`` of it, although most layouts store
  it twice.
* The optimizer's step is a 0-d fp32 tensor a parameter (torch Adam's own form), also where a
  layout keeps one number for all.
"""

from collections.abc import Callable, Mapping, Sequence
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
from scalai.core.tensors.region import Box, Index, row_major

PARAM, MAIN, STEP, USER = "param", "main", "step", "user"
"""Kinds of tensors; the others are the optimizer's own names, as ``exp_avg``. ``user`` are tensors
that a script registered, of which there is no parameter."""


CONFIG = "config"
"""The key in ``Values.extra`` of what Hugging Face's ``config.json`` says."""

REPORT = "scalai.json"
"""The proof that a conversion leaves in its destination."""
REPORT_VERSION = 2


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file in which pieces lie.

    ``path`` is relative to the checkpoint's directory. ``content`` is for files of a source that
    exist in memory only: a value among the settings that is a tensor to others.
    """

    path: str
    size_bytes: int
    content: bytes | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """Pieces and where they lie, as columns.

    Element ``i`` of row ``r`` (relative to its box) lies in ``files[file[r]]`` at byte
    ``begin[r] + sum(i * stride[r]) * item size``. ``stride`` [rows, MAX_NDIM] counts elements,
    right-aligned as ``Collection`` is.

    ``is_rounded`` [rows], None for nowhere: whether a row lies there as fp32, and is rounded to its
    tensor's dtype when it is read. So are weights of which a layout keeps masters alone. Rows of a
    target never are.
    """

    collection: Collection
    file: Columns
    begin: Columns
    stride: Columns
    files: tuple[CheckpointFile, ...]
    is_rounded: npt.NDArray[np.bool_] | None = None

    def is_rounded_at(self, row: int) -> bool:
        """Return ``is_rounded`` of a row."""
        return self.is_rounded is not None and bool(self.is_rounded[row])

    def item_bytes(self, row: int) -> int:
        """Return how many bytes one element of a row takes in its file."""
        dtype = self.collection.tensors[int(self.collection.tensor[row])].dtype
        return ITEM_BYTES["F32" if self.is_rounded_at(row) else dtype]

    def rounded(self) -> npt.NDArray[np.bool_]:
        """Return ``is_rounded`` for all rows."""
        return np.zeros(len(self.file), np.bool_) if self.is_rounded is None else self.is_rounded


@dataclass(frozen=True, slots=True)
class FilePiece:
    """One row of ``Placed``. ``stride`` None: row-major and without gaps."""

    tensor: Tensor
    box: Box
    file: str
    begin: int
    stride: Index | None = None
    is_rounded: bool = False

    @property
    def item_bytes(self) -> int:
        """How many bytes one element takes in its file."""
        return ITEM_BYTES["F32" if self.is_rounded else self.tensor.dtype]


def place(pieces: Sequence[FilePiece], files: Sequence[CheckpointFile]) -> Placed:
    """Return pieces as columns, in their order.

    Raises:
        LayoutError: Pieces of one name disagree about the tensor.
    """
    number = {file.path: index for index, file in enumerate(files)}
    stride = np.zeros((len(pieces), MAX_NDIM), dtype=np.int64)
    for row, piece in zip(stride, pieces, strict=True):
        steps = row_major(piece.box.shape) if piece.stride is None else piece.stride
        row[MAX_NDIM - len(steps) :] = steps
    return Placed(
        Collection.of((piece.tensor, piece.box) for piece in pieces),
        np.array([number[piece.file] for piece in pieces], dtype=np.int64),
        np.array([piece.begin for piece in pieces], dtype=np.int64),
        stride,
        tuple(files),
        np.array([piece.is_rounded for piece in pieces], dtype=np.bool_),
    )


def unite(parts: Sequence[Placed]) -> Placed:
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
    return Placed(
        concatenate([part.collection for part in parts]),
        np.concatenate(columns),
        np.concatenate([flat, *(part.begin for part in parts)]),
        np.concatenate([none, *(part.stride for part in parts)]),
        tuple(files.values()),
        np.concatenate([np.zeros(0, np.bool_), *(part.rounded() for part in parts)]),
    )


@dataclass(frozen=True, slots=True)
class Values:
    """Everything in a checkpoint that is no tensor.

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
        counters: ``consumed_train_samples`` and the like, as far as they are known.
        rank_state: RNG states by coordinate, for a target of the same degrees.
        extra: What else a layout keeps, for a target of the same layout (Megatron's extra state).
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
    """A checkpoint that was read: nothing but metadata is in memory.

    Attributes:
        layout: The layout's name.
        directory: Where its files lie.
        placed: Every piece. Replicas may come several times, as equal boxes.
        values: What is no tensor.
        duplicates: Second copies under another name (fp32 masters beside fp32 parameters): the rows
            name the tensor that they must be equal to. ``scalai verify`` compares them.
        may_overlap: Whether equal elements may lie in boxes that are cut differently, as the
            pieces that hosts have fetched from each other.
        recorded: By row of ``placed`` the fingerprint that the layout itself keeps; None: it has
            none.
        stated: The fingerprints of whole tensors that the layout itself keeps, by name: pieces that
            were fetched and never proven are proven by them.
        notes: What was noticed, one line each: what cannot be carried and why.
        changed: Tensors that are not as the directory has them, but renamed, cut or padded: what is
            recorded beside the files is not of them.
        guessed: Parameters of which nothing tells which of the optimizer's states are theirs.
    """

    layout: str
    directory: Path
    placed: Placed
    values: Values
    duplicates: Placed | None = None
    may_overlap: bool = False
    recorded: npt.NDArray[np.uint64] | None = None
    stated: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    changed: frozenset[str] = frozenset()
    guessed: frozenset[str] = frozenset()


def parameters_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the parameters, and buffers, by their names without the kind."""
    tensors = checkpoint.placed.collection.tensors
    return {split_name(t.name)[1]: t for t in tensors if t.name.startswith(f"{PARAM}/")}


@dataclass(frozen=True, slots=True)
class AuxiliaryFile:
    """A file of a target that holds no tensors: a copy of ``source``, or ``content``.

    ``path`` is relative to the target's directory.
    """

    path: str
    size_bytes: int
    source: Path | None = None
    content: bytes | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """A checkpoint that is to be written.

    Attributes:
        layout: The layout's name.
        placed: The rows to be filled, each row-major and without gaps. Rows may name a tensor
            several times, where the layout keeps replicas. Every wanted element must be held by
            the source.
        fixed: By file number, (offset, bytes) of what is known: headers, directories, pickles.
        finish: Called once all files are whole, with the directory (under its temporary name) and
            the fingerprint of each row [rows]: writes the small files that complete the
            checkpoint, the framework's marker of completeness last.
        notes: What the target does not carry, or what was invented, one line each.
        auxiliary: What else belongs to it; written before ``finish`` is called.
        keeps_order: Whether it has the optimizer's states in the source's order, so that it does
            not matter whose they are.
    """

    layout: str
    placed: Placed
    fixed: Mapping[int, Sequence[tuple[int, bytes]]]
    finish: Callable[[Path, npt.NDArray[np.uint64]], None]
    notes: tuple[str, ...] = ()
    auxiliary: tuple[AuxiliaryFile, ...] = ()
    keeps_order: bool = False


Order = Callable[[Sequence[str]], Sequence[Sequence[str]] | None]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read.

    Attributes:
        trust_pickle: Let pickles name classes of unknown packages.
        iteration: Of several iterations or generations below a directory this one, not the newest.
        cuts: A file that says how tensor-parallel ranks cut parameters, for layouts that do not.
        is_part: Take a generation of which parts are missing or lie elsewhere, to look at what is
            there.
        order: For layouts that do not name the optimizer's parameters: deals the module's, in its
            order, to the optimizer's groups, in theirs; None: it does not tell.
    """

    trust_pickle: bool = False
    iteration: int | None = None
    cuts: Path | None = None
    is_part: bool = False
    order: Order | None = None


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What to write.

    Attributes:
        degrees: Target degrees by axis; those not named stay.
        is_split: Whether the optimizer's state is to be split over data-parallel ranks; None: as
            in the source.
        reference: Values of another checkpoint of the same job, for what the source lacks
            (arguments, hyperparameters of the parameter groups).
        cuts: As of ``ReadOptions``; it may also say where the stages of a pipeline begin.
    """

    degrees: Mapping[str, int]
    is_split: bool | None = None
    reference: Values | None = None
    cuts: Path | None = None


class CheckpointLayout(Protocol):
    """One layout: found by looking at files, read, written. A module each; see ``layouts``."""

    @property
    def name(self) -> str:
        """What ``--to`` calls it."""
        ...

    def find(self, path: Path) -> bool:
        """Tell whether ``path`` is, or holds, a checkpoint of this layout. Looks at names and, at
        most, at the first bytes of small files; raises nothing."""
        ...

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a checkpoint.

        Raises:
            RefusedError: It is damaged, incomplete or of a kind that cannot be read; names the
                file, what was expected and the way out.
        """
        ...

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> Target:
        """Say which files a checkpoint of ``source``'s state at other degrees is made of.

        Pure: writes nothing. The same input gives the same target, byte by byte, so that an
        interrupted run can go on.

        Raises:
            RefusedError: The source lacks what this layout needs; names it and the way out.
        """
        ...
