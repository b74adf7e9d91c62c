"""Tensor-parallel cuts of parameters, as a checkpoint or its user states them.

DeepSpeed's files hold shards without their place in the whole. Megatron-DeepSpeed and AutoTP
write patterns of names as ``universal_checkpoint_info``; for others a file states them (--cuts):

    [[cut]]
    parameters = '.*\\.(up|gate)_proj\\.weight'   # of the whole name
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.shards.cuts import WHOLE, Cut, even
from scalai.converters.deepspeed.shards.flat import Shape
from scalai.core.errors import RefusedError, UsageError

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
class Rule:
    """The stated cut of a parameter.

    ``parts``: number of equal parts, or their sizes. ``widths`` [parts][ranks]: stored widths.
    """

    dim: int | None = None
    parts: int | tuple[int, ...] = 1
    widths: tuple[tuple[int, ...], ...] = ()
    unit: int = 1
    is_vocabulary: bool = False

    def cut(self, name: str, shapes: Sequence[Shape]) -> Cut:
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
        return Cut(self.dim, widths, self.unit, self.is_vocabulary)

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
    given: tuple[tuple[re.Pattern[str], Rule], ...] = ()

    def cuts(self, shapes: Mapping[str, Sequence[Shape]]) -> dict[str, Cut]:
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

    def known_cuts(self, shapes: Mapping[str, Sequence[Shape]]) -> dict[str, Cut]:
        """Return ``cuts`` of the parameters with a rule."""
        unsupported = self.info.get(_UNSUPPORTED) or {}
        rules = {name: self.rule(name) for name in shapes if _first(unsupported, name) is None}
        return {name: rule.cut(name, shapes[name]) for name, rule in rules.items() if rule}

    def rule(self, name: str) -> Rule | None:
        """Return a parameter's rule; None: there is none. Raises as ``cuts``."""
        given = next((rule for pattern, rule in self.given if pattern.fullmatch(name)), None)
        return self._of_info(name) or given or self._default()

    def _of_info(self, name: str) -> Rule | None:
        info = self.info
        reason = _first(info.get(_UNSUPPORTED) or {}, name)
        if reason is not None:
            raise RefusedError(
                f"{name} is cut in a way that DeepSpeed's AutoTP does not describe "
                f"({info[_UNSUPPORTED][reason]}). Load the checkpoint at the tp that saved it."
            )
        # AutoTP does not pad vocabularies; ``_UNSUPPORTED`` is its key.
        words = () if _UNSUPPORTED in info else info.get(_VOCABULARY, ())
        entry = _first((info.get(_MAPS) or {}).get("params") or {}, name)
        if entry is not None and len(info[_MAPS]["params"][entry]["ranks"]) > 1:
            return _of_map(name, info[_MAPS]["params"][entry])
        if any(_first(info.get(key, ()), name) is not None for key in _REPLICATED):
            return Rule()
        if _first(info.get(_TWO_PARTS, ()), name) is not None:
            return Rule(0, parts=2)
        for parts in info.get(_PARTS, ()):
            pattern = _first(parts["patterns"], name)
            if pattern is not None:
                return _of_parts(parts, (info.get(_WIDTHS) or {}).get(pattern))
        if _first(info.get(_ROWS, ()), name) is not None:
            return Rule(1)
        return Rule(0, is_vocabulary=True) if _first(words, name) is not None else None

    def _default(self) -> Rule | None:
        """Return the rule of unmatched names; Megatron-DeepSpeed's patterns omit dimension 0."""
        keys = (*_REPLICATED, _ROWS, _TWO_PARTS, _PARTS, _VOCABULARY)
        return Rule(0) if any(self.info.get(key) for key in keys) else None


def info_at(info: Mapping[str, Any], cuts: Mapping[str, Cut]) -> dict[str, Any]:
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


def read_cuts(path: Path | None) -> tuple[tuple[re.Pattern[str], Rule], ...]:
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


def _given(section: Mapping[str, Any]) -> Rule:
    unknown = sorted(section.keys() - set(_KEYS))
    if unknown:
        raise ValueError(f"{unknown[0]} is none of {', '.join(_KEYS)}")
    parts = section.get("parts", 1)
    return Rule(
        section.get("dimension"),
        tuple(parts) if isinstance(parts, list) else int(parts),
        unit=int(section.get("unit", 1)),
        is_vocabulary=bool(section.get("vocabulary")),
    )


def _first(patterns: Any, name: str) -> Any:
    return next((pattern for pattern in patterns if re.match(pattern, name)), None)


def _of_parts(parts: Mapping[str, Any], widths: Any) -> Rule:
    dim = parts["partition_dim"]
    if widths is not None:
        return Rule(dim, widths=tuple(map(tuple, widths)))
    sizes = parts["shape"][dim]
    return Rule(dim, tuple(sizes) if isinstance(sizes, list | tuple) else int(sizes))


def _of_map(name: str, entry: Mapping[str, Any]) -> Rule:
    """Return the rule of an affine map of boxes cut along one dimension; ``RefusedError``: another
    map."""
    shape = entry["logical_shape"]
    pieces = [entry["ranks"][rank]["pieces"] for rank in sorted(entry["ranks"], key=int)]
    firsts = [tuple(of[0]["shape"]) for of in pieces]
    if all(len(of) == 1 and of[0]["shape"] == shape for of in pieces):
        scales = {of[0].get("scale", 1.0) for of in pieces}
        if scales == {1.0}:
            return Rule()
    dims = [axis for axis, size in enumerate(shape) if any(of[axis] != size for of in firsts)]
    if len(dims) == 1 and len({len(of) for of in pieces}) == 1:
        dim = dims[0]
        widths = tuple(
            tuple(piece["shape"][dim] for piece in of) for of in zip(*pieces, strict=True)
        )
        if _is_map(entry, pieces, Cut(dim, widths)):
            return Rule(dim, widths=widths)
    raise RefusedError(
        f"{name} is cut by AutoTP in a way that is not read: other than in runs along one "
        "dimension, or scaled. Make the checkpoint universal with ds_to_universal first."
    )


def _is_map(entry: Mapping[str, Any], pieces: Sequence[Any], cut: Cut) -> bool:
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
