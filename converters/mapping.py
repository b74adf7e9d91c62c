"""Names of another framework for our tensors, and how fused ones are cut: mapping files.

    [attention]                                  # where the checkpoints do not say it
    num_attention_heads = 32
    num_query_groups = 8

    [[tensor]]
    ours = "decoder.layers.{layer}.self_attention.linear_qkv.weight"
    theirs = ["model.layers.{layer}.self_attn.q_proj.weight", "...k_proj...", "...v_proj..."]
    fused = "qkv"

``fused`` is ``qkv`` (Megatron's rows by query group: its queries, key, value), ``gate_up`` (one
half each), or absent: the same tensor under another name. ``{layer}`` and other words in braces
stand for numbers.

Source: ``linear_qkv`` of megatron/core/transformer/attention.py and the gated ``linear_fc1`` of
mlp.py (0.16.1); Llama's modules in transformers.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from scalai.core.errors import UsageError
from scalai.core.region import Box, whole

Shape = tuple[int, ...]
_FUSED = {"qkv": 3, "gate_up": 2, "": 1}


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads and query groups of a model; None: unknown."""

    heads: int | None = None
    groups: int | None = None


@dataclass(frozen=True, slots=True)
class Mapped:
    """A box of our tensor ``ours`` (of ``shape``), which lies row-major at element ``start`` of
    theirs."""

    theirs: str
    their_shape: Shape
    ours: str
    shape: Shape
    box: Box
    start: int


@dataclass(frozen=True, slots=True)
class _Rule:
    ours: str
    theirs: tuple[str, ...]
    fused: str


@dataclass(frozen=True, slots=True)
class NameMapping:
    """The rules of a mapping file; without any, both names are the same."""

    rules: tuple[_Rule, ...]
    heads: Heads
    where: str

    def from_ours(
        self, shapes: Mapping[str, Shape], heads: Heads
    ) -> tuple[list[Mapped], list[str]]:
        """Cut our tensors into theirs.

        Returns:
            The parts of each of their tensors in order, and our names that no rule has.

        Raises:
            UsageError: Heads are needed and nobody knows them, or do not fit a shape.
        """
        parts: list[Mapped] = []
        left = []
        for name, shape in shapes.items():
            rule, numbers = self._of_ours(name)
            if rule is None:
                left.append(name)
            else:
                parts += self._expand(rule, numbers, name, shape, heads)
        return parts, left

    def from_theirs(
        self, shapes: Mapping[str, Shape], heads: Heads
    ) -> tuple[list[Mapped], list[str]]:
        """Put our tensors together from theirs; also return their names that no rule has.

        Raises:
            UsageError: As ``from_ours``; or a part of a fused tensor is not there.
        """
        if not self.rules:
            return [Mapped(n, s, n, s, whole(s), 0) for n, s in shapes.items()], []
        found: dict[str, tuple[_Rule, dict[str, str]]] = {}
        left = []
        for name in shapes:
            known = [
                (rule, match.groupdict())
                for rule in self.rules
                for pattern in rule.theirs
                if (match := _pattern(pattern).fullmatch(name))
            ]
            if known:
                rule, numbers = known[0]
                found[rule.ours.format(**numbers)] = rule, numbers
            else:
                left.append(name)
        parts: list[Mapped] = []
        for ours, (rule, numbers) in found.items():
            names = [pattern.format(**numbers) for pattern in rule.theirs]
            missing = [name for name in names if name not in shapes]
            if missing:
                raise UsageError(f"{ours} is made of {names}, but {missing} are not there.")
            rows = [shapes[name][0] if shapes[name] else 1 for name in names]
            first = shapes[names[0]]
            shape = (sum(rows), *first[1:]) if rule.fused else first
            parts += self._expand(rule, numbers, ours, shape, heads)
        return parts, left

    def _of_ours(self, name: str) -> tuple[_Rule | None, dict[str, str]]:
        if not self.rules:
            return _Rule(name, (name,), ""), {}
        for rule in self.rules:
            match = _pattern(rule.ours).fullmatch(name)
            if match:
                return rule, match.groupdict()
        return None, {}

    def _expand(
        self, rule: _Rule, numbers: Mapping[str, str], ours: str, shape: Shape, heads: Heads
    ) -> Iterator[Mapped]:
        """Yield the boxes of one of our tensors, by the names that they have there."""
        names = [pattern.format(**numbers) if numbers else pattern for pattern in rule.theirs]
        if not rule.fused:
            yield Mapped(names[0], shape, ours, shape, whole(shape), 0)
            return
        for name, rows in zip(names, self._rows(rule, ours, shape, heads), strict=True):
            count = sum(len(part) for part in rows)
            start = 0
            for part in rows:
                box = Box((part.start, *[0] * (len(shape) - 1)), (len(part), *shape[1:]))
                yield Mapped(name, (count, *shape[1:]), ours, shape, box, start)
                start += len(part) * prod(shape[1:])

    def _rows(
        self, rule: _Rule, ours: str, shape: Shape, known: Heads
    ) -> Sequence[Sequence[range]]:
        """Return, for each of their tensors, its rows of ours in order."""
        if rule.fused == "gate_up":
            half = shape[0] // 2
            return [range(half)], [range(half, 2 * half)]
        heads = self.heads.heads or known.heads
        groups = self.heads.groups or known.groups or heads
        if heads is None or groups is None:
            raise UsageError(
                f"to cut {ours} the number of attention heads is needed, and neither checkpoint "
                f"says it. Add [attention] num_attention_heads and num_query_groups to "
                f"{self.where}."
            )
        width, rest = divmod(shape[0], heads + 2 * groups)
        if rest or heads % groups:
            raise UsageError(
                f"{ours} has {shape[0]} rows, which {heads} heads in {groups} query groups do not "
                f"divide. Correct [attention] in {self.where}."
            )
        queries = heads // groups
        rows: tuple[list[range], list[range], list[range]] = ([], [], [])
        for group in range(groups):
            low = group * (queries + 2) * width
            for of, begin, count in zip(
                rows, (0, queries, queries + 1), (queries, 1, 1), strict=True
            ):
                of.append(range(low + begin * width, low + (begin + count) * width))
        return rows


def read_mapping(path: Path | None) -> NameMapping:
    """Read a mapping file; None: names stay.

    Raises:
        UsageError: It cannot be read, or a rule is not as described above.
    """
    if path is None:
        return NameMapping((), Heads(), "a --mapping file")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no mapping file ({error}).") from error
    attention = data.get("attention", {})
    heads = Heads(attention.get("num_attention_heads"), attention.get("num_query_groups"))
    return NameMapping(
        tuple(_rule(entry, path) for entry in data.get("tensor", ())), heads, str(path)
    )


def _rule(entry: Mapping[str, Any], path: Path) -> _Rule:
    theirs, fused = entry.get("theirs"), entry.get("fused", "")
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs or ())
    if not isinstance(entry.get("ours"), str) or fused not in _FUSED or len(names) != _FUSED[fused]:
        raise UsageError(
            f'{path}: {dict(entry)} is no rule. Give ours, theirs (3 names with fused = "qkv", 2 '
            'with "gate_up", else 1) and fused.'
        )
    return _Rule(entry["ours"], names, fused)


def _pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of a name in which words in braces stand for numbers."""
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(text)))
