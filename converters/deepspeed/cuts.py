"""Tensor-parallel cuts of a parameter, and the place of a rank's part in the whole.

A rank's shard consists of runs along one dimension: one run, or one per part of a fused parameter
(gate and up projection; query, key and value).

DeepSpeed's files hold shards without their place in the whole. Megatron-DeepSpeed and AutoTP
write patterns of names as ``universal_checkpoint_info``; for others a file states them (--cuts):

    [[cut]]
    parameters = '.*\\.(up|gate)_proj\\.weight' # of the whole name
    dimension = 0                                # left out: every rank has all of it
    parts = 2              # parameters one after the other; or their sizes, [64, 16, 16]
    unit = 16              # shards are multiples of it
    vocabulary = true      # refuse a tp that does not divide it

Source: ``merge_tp_slices`` of deepspeed/checkpoint/ds_to_universal.py,
``collect_autotp_universal_checkpoint_info`` of module_inject/layers.py, 0.19.8. Differs in:
parameters averaged by Megatron-DeepSpeed must be equal.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import STEP, FilePiece
from scalai.converters.deepspeed.flat import Shape
from scalai.core.errors import RefusedError, UsageError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, row_major


@dataclass(frozen=True, slots=True)
class ShardRun:
    """``size`` elements along the cut dimension, from ``local`` of a shard and ``start`` of the
    whole."""

    local: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class ShardCut:
    """The cut of a parameter.

    Attributes:
        dim: Dimension of the cut; None: every rank has all of it.
        widths: [parts][ranks] Elements of each part on each rank along ``dim``.
        unit: Elements; shards are multiples of it, such as the size of a head.
        is_vocabulary: Whether ``dim`` is a vocabulary's, padded by Megatron.
    """

    dim: int | None = None
    widths: tuple[tuple[int, ...], ...] = ()
    unit: int = 1
    is_vocabulary: bool = False

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of the parts in the whole."""
        return tuple(map(sum, self.widths))

    def whole(self, shape: Shape) -> Shape:
        """Return the whole shape from a rank's."""
        return self._with(shape, sum(self.parts))

    def shard(self, shape: Shape, rank: int) -> Shape:
        """Return a rank's shape from the whole one."""
        return self._with(shape, sum(widths[rank] for widths in self.widths))

    def _with(self, shape: Shape, size: int) -> Shape:
        if self.dim is None:
            return shape
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def runs(self, rank: int) -> Iterator[ShardRun]:
        """Yield a rank's runs, in the order of its shard."""
        local = start = 0
        for widths in self.widths:
            yield ShardRun(local, start + sum(widths[:rank]), widths[rank])
            local, start = local + widths[rank], start + sum(widths)

    def recut(self, name: str, tp: int) -> "ShardCut":
        """Return the cut of the same parameter over another number of ranks.

        Deals each part out in units as evenly as possible, one more to the first ranks, as
        DeepSpeed's AutoTP does (``get_shard_size`` of module_inject/tp_shard.py, 0.19.8).

        Raises:
            RefusedError: ``tp`` does not divide a vocabulary; or the unit does not divide a part.
        """
        if self.dim is None or tp == len(self.widths[0]):
            return self
        for size in self.parts:
            if self.is_vocabulary and size % tp:
                raise RefusedError(
                    f"{name} has {size} rows, its vocabulary's padding among them, and tp={tp} "
                    "does not divide them. The padding is part of the model: choose another --tp."
                )
            if size % self.unit:
                raise RefusedError(
                    f"{name} is {size} along dimension {self.dim}, which is no multiple of the "
                    f"unit {self.unit} of its [[cut]]. Correct the file of --cuts."
                )
        return replace(self, widths=tuple(even(size, tp, self.unit) for size in self.parts))


def even(size: int, tp: int, unit: int = 1) -> tuple[int, ...]:
    """Deal ``size`` out to ranks in units, as evenly as possible, one more to the first ranks."""
    count, rest = divmod(size // unit, tp)
    return tuple((count + (rank < rest)) * unit for rank in range(tp))


WHOLE = ShardCut()
"""The cut of a parameter that every rank has whole."""


@dataclass(frozen=True, slots=True)
class Shards:
    """One tensor-parallel rank's part of every parameter.

    ``cuts`` are by parameter name; parameters without a cut are whole.
    """

    cuts: Mapping[str, ShardCut]
    rank: int

    def cut(self, tensor: Tensor) -> ShardCut:
        """Return the cut of a tensor of any kind: its parameter's."""
        kind, name = split_name(tensor.name)
        return WHOLE if kind == STEP else self.cuts.get(name, WHOLE)

    def is_shared(self, tensor: Tensor) -> bool:
        """Tell whether all ranks have the whole tensor."""
        return self.cut(tensor).dim is None

    def shard(self, tensor: Tensor) -> Tensor:
        """Return the rank's part of a tensor.

        Raises:
            RefusedError: An optimizer state has another shape than its parameter.
        """
        cut = self.cut(tensor)
        if cut.dim is not None and (
            len(tensor.shape) <= cut.dim or tensor.shape[cut.dim] != sum(cut.parts)
        ):
            raise RefusedError(
                f"{tensor.name} is {list(tensor.shape)}, and {sum(cut.parts)} are expected along "
                f"dimension {cut.dim} of its parameter. Use an optimizer that keeps states of "
                "the parameters' own shapes (Adam)."
            )
        return replace(tensor, shape=cut.shard(tensor.shape, self.rank))

    def of_whole(self, piece: FilePiece) -> Iterator[FilePiece]:
        """Yield a piece of the rank's shard as pieces of the whole tensor."""
        cut = self.cut(piece.tensor)
        if cut.dim is None:
            yield piece
            return
        tensor = replace(piece.tensor, shape=cut.whole(piece.tensor.shape))
        box = piece.box
        stride = row_major(box.shape) if piece.stride is None else piece.stride
        item = piece.item_bytes
        first, last = box.offset[cut.dim], box.offset[cut.dim] + box.shape[cut.dim]
        for run in cut.runs(self.rank):
            low, high = max(first, run.local), min(last, run.local + run.size)
            if low < high:
                offset, shape = list(box.offset), list(box.shape)
                offset[cut.dim], shape[cut.dim] = low - run.local + run.start, high - low
                begin = piece.begin + (low - first) * stride[cut.dim] * item
                part = Box(tuple(offset), tuple(shape))
                yield replace(piece, tensor=tensor, box=part, begin=begin, stride=stride)


EVERYTHING = Shards({}, 0)
"""The shards of an only rank."""


def contiguous(piece: FilePiece) -> Iterator[FilePiece]:
    """Yield a piece as pieces without gaps, for a target."""
    shape = piece.box.shape
    stride = row_major(shape) if piece.stride is None else piece.stride
    is_dense = all(
        size == 1 or step == plain
        for size, step, plain in zip(shape, stride, row_major(shape), strict=True)
    )
    if is_dense:
        yield replace(piece, stride=None)
        return
    axis = next(axis for axis, size in enumerate(shape) if size > 1)
    item = ITEM_BYTES[piece.tensor.dtype]
    for index in range(shape[axis]):
        offset, extent = list(piece.box.offset), list(shape)
        offset[axis], extent[axis] = offset[axis] + index, 1
        begin = piece.begin + index * stride[axis] * item
        box = Box(tuple(offset), tuple(extent))
        yield from contiguous(replace(piece, box=box, begin=begin, stride=stride))


INFO = "universal_checkpoint_info"
"""Key among the entries of a model's file."""

_REPLICATED = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
_ROWS = "parameter_with_row_parallelism_patterns"
_TWO_PARTS = "parameter_with_2_sub_params_cat_dim_0"
_PARTS = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_VOCABULARY = "vocabulary_parameter_patterns"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_MAPS = "affine_map"
_KEYS = ("parameters", "dimension", "parts", "unit", "vocabulary")


@dataclass(frozen=True, slots=True)
class CutRule:
    """The stated cut of a parameter.

    ``parts``: number of equal parts, or their sizes. ``widths`` [parts][ranks]: stored widths.
    """

    dim: int | None = None
    parts: int | tuple[int, ...] = 1
    widths: tuple[tuple[int, ...], ...] = ()
    unit: int = 1
    is_vocabulary: bool = False

    def cut(self, name: str, shapes: Sequence[Shape]) -> ShardCut:
        """Return the cut of a parameter from its shapes on the ranks.

        Raises:
            RefusedError: The shapes do not fit the rule.
        """
        if len({self._others(shape) for shape in shapes}) > 1 or (
            self.dim is not None and len(shapes[0]) <= self.dim
        ):
            found = ", ".join(str(list(shape)) for shape in sorted(set(shapes)))
            raise RefusedError(
                f"tensor-parallel ranks have {name} as {found}, which "
                f"{'are not equal' if self.dim is None else f'no cut of dimension {self.dim} is'}."
                " Correct its [[cut]] in the file of --cuts, or use another checkpoint."
            )
        if self.dim is None:
            return WHOLE
        sizes = [shape[self.dim] for shape in shapes]
        widths = self.widths or self._widths(sizes)
        if [sum(of) for of in zip(*widths, strict=True)] != sizes:
            raise RefusedError(
                f"tensor-parallel ranks have {sizes} of {name} along dimension {self.dim}, and "
                f"parts of it are said to be cut as {[list(of) for of in widths]}. Correct its "
                "[[cut]] in the file of --cuts, or use another checkpoint."
            )
        return ShardCut(self.dim, widths, self.unit, self.is_vocabulary)

    def _others(self, shape: Shape) -> Shape:
        return shape if self.dim is None else (*shape[: self.dim], *shape[self.dim + 1 :])

    def _widths(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        if isinstance(self.parts, tuple):
            return tuple(even(size, len(sizes), self.unit) for size in self.parts)
        return (tuple(size // self.parts for size in sizes),) * self.parts


@dataclass(frozen=True, slots=True)
class CutRules:
    """Rules of a checkpoint (``info``) and of a file (``given``: patterns and rules)."""

    info: Mapping[str, Any]
    given: tuple[tuple[re.Pattern[str], CutRule], ...] = ()

    def cuts(self, shapes: Mapping[str, Sequence[Shape]]) -> dict[str, ShardCut]:
        """Return the cuts of parameters from their shapes on the tensor-parallel ranks.

        Raises:
            RefusedError: A parameter has no rule, or its shapes do not fit.
        """
        rules = {name: self.rule(name) for name in shapes}
        unknown = [name for name, rule in rules.items() if rule is None]
        if unknown:
            more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
            raise RefusedError(
                f"nothing says along which dimension tensor-parallel ranks cut "
                f"{', '.join(unknown[:20])}{more}. Name a file that says it (gpt and llama are "
                "shipped) by --cuts, or for load_checkpoint by cuts in the elastic configuration's "
                "section deepspeed; or pass --args-from with a checkpoint of the job that does."
            )
        return {name: rule.cut(name, shapes[name]) for name, rule in rules.items() if rule}

    def known_cuts(self, shapes: Mapping[str, Sequence[Shape]]) -> dict[str, ShardCut]:
        """Return ``cuts`` of the parameters with a rule."""
        unsupported = self.info.get(_UNSUPPORTED) or {}
        rules = {
            name: self.rule(name)
            for name in shapes
            if _first(unsupported, name) is None or self._given(name)
        }
        return {name: rule.cut(name, shapes[name]) for name, rule in rules.items() if rule}

    def rule(self, name: str) -> CutRule | None:
        """Return a parameter's rule; None: there is none. Raises as ``cuts``."""
        given = self._given(name)
        reason = _first(self.info.get(_UNSUPPORTED) or {}, name)
        if reason is None:
            return self._of_info(name) or given or self._default()
        if given is None:
            raise RefusedError(
                f"{name} is cut in a way that DeepSpeed's AutoTP does not describe "
                f"({self.info[_UNSUPPORTED][reason]}). Load the checkpoint at the tp that saved "
                "it, or say its cut in a file for --cuts."
            )
        return given

    def _given(self, name: str) -> CutRule | None:
        return next((rule for pattern, rule in self.given if pattern.fullmatch(name)), None)

    def _of_info(self, name: str) -> CutRule | None:
        info = self.info
        # AutoTP does not pad vocabularies; ``_UNSUPPORTED`` is its key.
        words = () if _UNSUPPORTED in info else info.get(_VOCABULARY, ())
        entry = _first((info.get(_MAPS) or {}).get("params") or {}, name)
        if entry is not None and len(info[_MAPS]["params"][entry]["ranks"]) > 1:
            return _of_map(name, info[_MAPS]["params"][entry])
        if any(_first(info.get(key, ()), name) is not None for key in _REPLICATED):
            return CutRule()
        if _first(info.get(_TWO_PARTS, ()), name) is not None:
            return CutRule(0, parts=2)
        for parts in info.get(_PARTS, ()):
            pattern = _first(parts["patterns"], name)
            if pattern is not None:
                return _of_parts(parts, (info.get(_WIDTHS) or {}).get(pattern))
        if _first(info.get(_ROWS, ()), name) is not None:
            return CutRule(1)
        return CutRule(0, is_vocabulary=True) if _first(words, name) is not None else None

    def _default(self) -> CutRule | None:
        """Return the rule of unmatched names; Megatron-DeepSpeed's patterns omit dimension 0."""
        keys = (*_REPLICATED, _ROWS, _TWO_PARTS, _PARTS, _VOCABULARY)
        return CutRule(0) if any(self.info.get(key) for key in keys) else None


def info_at(info: Mapping[str, Any], cuts: Mapping[str, ShardCut]) -> dict[str, Any]:
    """Return a checkpoint's statement for other cuts; patterns stand in for its maps."""
    stated = {key: value for key, value in info.items() if key != _MAPS}
    if _WIDTHS in info:
        stated[_WIDTHS] = {
            pattern: [list(of) for of in cuts[name].widths]
            for pattern in info[_WIDTHS]
            for name in [next((name for name in cuts if re.match(pattern, name)), None)]
            if name is not None
        }
    return stated


def read_cuts(path: Path | None) -> tuple[tuple[re.Pattern[str], CutRule], ...]:
    """Read the ``[[cut]]`` sections of a file.

    Raises:
        UsageError: It cannot be read, or a section is not as described above.
    """
    if path is None:
        return ()
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8")).get("cut", [])
        return tuple((re.compile(section["parameters"]), _given(section)) for section in sections)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        raise UsageError(
            f"{path} has no [[cut]] sections as expected ({type(error).__name__}: {error}). Give "
            f"parameters, and where they apply {', '.join(_KEYS[1:])}."
        ) from error


def _given(section: Mapping[str, Any]) -> CutRule:
    unknown = sorted(section.keys() - set(_KEYS))
    if unknown:
        raise ValueError(f"{unknown[0]} is none of {', '.join(_KEYS)}")
    parts = section.get("parts", 1)
    return CutRule(
        section.get("dimension"),
        tuple(parts) if isinstance(parts, list) else int(parts),
        unit=int(section.get("unit", 1)),
        is_vocabulary=bool(section.get("vocabulary")),
    )


def _first(patterns: Any, name: str) -> Any:
    return next((pattern for pattern in patterns if re.match(pattern, name)), None)


def _of_parts(parts: Mapping[str, Any], widths: Any) -> CutRule:
    dim = parts["partition_dim"]
    if widths is not None:
        return CutRule(dim, widths=tuple(map(tuple, widths)))
    sizes = parts["shape"][dim]
    return CutRule(dim, tuple(sizes) if isinstance(sizes, list | tuple) else int(sizes))


def _of_map(name: str, entry: Mapping[str, Any]) -> CutRule:
    """Return the rule of an affine map of boxes cut along one dimension; ``RefusedError``: another
    map."""
    shape = entry["logical_shape"]
    pieces = [entry["ranks"][rank]["pieces"] for rank in sorted(entry["ranks"], key=int)]
    firsts = [tuple(of[0]["shape"]) for of in pieces]
    if all(len(of) == 1 and of[0]["shape"] == shape for of in pieces):
        scales = {of[0].get("scale", 1.0) for of in pieces}
        if scales == {1.0}:
            return CutRule()
    dims = [axis for axis, size in enumerate(shape) if any(of[axis] != size for of in firsts)]
    if len(dims) == 1 and len({len(of) for of in pieces}) == 1:
        dim = dims[0]
        widths = tuple(
            tuple(piece["shape"][dim] for piece in of) for of in zip(*pieces, strict=True)
        )
        if _is_map(entry, pieces, ShardCut(dim, widths)):
            return CutRule(dim, widths=widths)
    raise RefusedError(
        f"{name} is cut by AutoTP in a way that is not read: other than in runs along one "
        "dimension, or scaled. Make the checkpoint universal with ds_to_universal first."
    )


def _is_map(entry: Mapping[str, Any], pieces: Sequence[Any], cut: ShardCut) -> bool:
    shape = tuple(entry["logical_shape"])
    step = _step(shape, cut.dim or 0)
    if cut.whole(shape) != shape:
        return False
    for rank, of in enumerate(pieces):
        inner = _step(cut.shard(shape, rank), cut.dim or 0)
        for piece, run in zip(of, cut.runs(rank), strict=True):
            if piece["source"][0] != run.start * step or piece["dest"][0] != run.local * inner:
                return False
            if piece.get("scale", 1.0) != 1.0:
                return False
    return True


def _step(shape: Shape, dim: int) -> int:
    count = 1
    for size in shape[dim + 1 :]:
        count *= size
    return count
