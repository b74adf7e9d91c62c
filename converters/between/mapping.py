"""Mapping files: another framework's names for our tensors, and the cuts of fused ones.

    extends = "llama"                            # rules behind these; equal ``ours``: this file's
    prefix = "model."                            # optional in theirs
    ignored = ["model.layers.{layer}.self_attn.rotary_emb.inv_freq"]   # left out knowingly
    [attention]                                  # if the checkpoints do not state it
    num_attention_heads = 32
    num_query_groups = 8
    [tied]                                       # shared if we have no tensor of this name
    "lm_head.weight" = "model.embed_tokens.weight"
    [classes]                                    # values of model_type: classes with these names
    llama = "LlamaForCausalLM"
    [arguments]                                  # of Megatron, on which the tensors' values depend
    apply_layernorm_1p = true
    [[tensor]]
    ours = "decoder.layers.{layer}.self_attention.linear_qkv.weight"
    theirs = ["model.layers.{layer}.self_attn.q_proj.weight", "...k_proj...", "...v_proj..."]
    fused = "qkv"

``fused`` is ``qkv`` (Megatron's rows by query group: its queries, key, value), ``gate_up`` (one
half each), or absent: the same tensor under another name. ``theirs`` of a fused tensor has a name
per part, or one name for the parts one above the other. ``transposed = true``: theirs has rows and
columns exchanged. ``optional = true``: models without it are whole. ``routed``: our name in a layer
with a router, unless its modules are Megatron's own (``--transformer-impl local``). ``local``: our
name in a layer of Megatron's own modules. ``{layer}`` and other words in braces stand for numbers.
The rules have the order of their module's parameters, the same as an optimizer's with all of them
(``in_order``).

Source: ``linear_qkv`` of megatron/core/transformer/attention.py and the gated ``linear_fc1`` of
mlp.py (0.16.1); GPT-2's, GPT-NeoX' and Llama's modules in transformers.

Without a file ``llama``, the name means the shipped ``names_llama.toml``, or ``cuts_llama.toml``
for cuts; the name of a class (``qwen3``) the shipped file that has it.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from scalai.converters.megatron.model_limits import FUSED_PARTS, Heads, rows_of_parts
from scalai.core.errors import UsageError
from scalai.core.tensors.region import Box, whole

Shape = tuple[int, ...]
Numbers = Mapping[str, str]
"""Numbers in a name, by the words in braces."""


@dataclass(frozen=True, slots=True)
class Link:
    """Common elements of two tensors: ``box`` of ``name`` is ``their_box`` of ``theirs``, possibly
    with the two axes exchanged."""

    name: str
    shape: Shape
    box: Box
    theirs: str
    their_shape: Shape
    their_box: Box
    is_transposed: bool = False

    def turned(self) -> "Link":
        """Return the link from the other side."""
        return Link(
            self.theirs, self.their_shape, self.their_box,
            self.name, self.shape, self.box, self.is_transposed,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NameRule:
    """One of our tensors, and its names on their side."""

    ours: str
    theirs: tuple[str, ...]
    fused: str = ""
    is_transposed: bool = False
    is_optional: bool = False
    routed: str = ""
    local: str = ""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Tensors without a name on the other side, and missing ones: names, or patterns of them."""

    nameless: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.nameless or self.missing)


_ROUTER = "decoder.layers.{layer}.mlp.router.weight"


@dataclass(frozen=True, slots=True)
class NameMapping:
    """The rules of a mapping file.

    Attributes:
        rules: Rules in the order of their module's parameters.
        tied: Their names of shared tensors -> the kept names.
        ignored: Patterns of tensors to leave out, on either side.
        prefix: Optional start of their names; a model without its head lacks it.
        classes: Hugging Face's classes with these names, by ``model_type``.
        arguments: Megatron's arguments that the values of the tensors suppose.
    """

    rules: tuple[NameRule, ...]
    heads: Heads
    tied: Mapping[str, str]
    ignored: tuple[str, ...]
    where: str
    prefix: str = ""
    classes: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def is_ours(self, names: Iterable[str]) -> bool:
        """Tell whether these are our names rather than theirs.

        Raises:
            UsageError: They are neither.
        """
        ours = theirs = 0
        some = list(names)
        for name in some:
            ours += self._of_ours(name) is not None
            theirs += self._of_theirs(self._full(name)) is not None
        if ours == theirs:
            raise UsageError(
                f"{self.where} names {ours} of {len(some)} tensors on its one side and {theirs} on "
                f"its other (first {some[:1]}): it is of another model."
            )
        return ours > theirs

    def stored(self, names: Iterable[str]) -> dict[str, str]:
        """Return their names as in the files, with or without prefix, by full name."""
        return {self._full(name): name for name in names}

    def numbers(self, names: Iterable[str], what: str) -> dict[int, set[int]]:
        """Return the numbers at ``{layer}`` in their names, each with those at ``{what}``."""
        found: dict[int, set[int]] = {}
        for name in names:
            at = (self._of_theirs(self._full(name)) or (None, {}))[1]
            if "layer" in at and what in at:
                found.setdefault(int(at["layer"]), set()).add(int(at[what]))
        return found

    def is_ignored(self, name: str) -> bool:
        """Tell whether to leave a tensor out."""
        full = self._full(name)
        return any(_pattern(pattern).fullmatch(full) for pattern in self.ignored)

    def from_ours(
        self, shapes: Mapping[str, Shape], heads: Heads
    ) -> tuple[dict[str, list[Link]], Unfit]:
        """Link our tensors to theirs.

        Args:
            shapes: Shapes of our tensors, by name.
            heads: Fallback for the file's heads.

        Returns:
            The links of each of our tensors, and the names that do not fit.

        Raises:
            UsageError: Needed heads are unknown, or do not fit a shape.
        """
        made = {name: found for name in shapes if (found := self._of_ours(name)) is not None}
        unfit = Unfit(
            tuple(name for name in shapes if name not in made),
            tuple(rule.ours for rule in self._unused(rule for rule, _ in made.values())),
        )
        known = self.heads.or_else(heads)
        links = {
            name: list(self._links(*found, name, shapes[name], known))
            for name, found in (made.items() if not unfit else ())
        }
        return links, unfit

    def from_theirs(
        self, shapes: Mapping[str, Shape], heads: Heads, *, is_local: bool = False
    ) -> tuple[dict[str, list[Link]], Unfit]:
        """Link their tensors to ours: the reverse of ``from_ours``.

        Args:
            is_local: Our layers are made of Megatron's own modules.

        Raises:
            UsageError: As ``from_ours``.
        """
        stored = self.stored(shapes)
        shapes = {full: shapes[name] for full, name in stored.items()}
        found = {name: self._of_theirs(name) for name in shapes}
        made = {rule.ours.format(**at): (rule, at) for rule, at in filter(None, found.values())}
        parts = {
            part: None
            for rule, at in made.values()
            for pattern in rule.theirs
            if (part := pattern.format(**at)) not in shapes
        }
        for rule in self._unused(rule for rule, _ in made.values()):
            parts.update((pattern, None) for pattern in rule.theirs)
        unfit = Unfit(tuple(stored[name] for name in shapes if found[name] is None), tuple(parts))
        links: dict[str, list[Link]] = {}
        for ours, (rule, at) in made.items() if not unfit else ():
            is_routed = not is_local and rule.routed and _ROUTER.format(**at) in made
            other = rule.local if is_local else rule.routed if is_routed else ""
            name = other.format(**at) or ours
            for link in self._fused(rule, at, name, shapes, heads):
                links.setdefault(stored[link.theirs], []).append(link.turned())
        return links, unfit

    def _unused(self, used: Iterable[NameRule]) -> Iterator[NameRule]:
        """Yield the rules that a whole model needs, without those used."""
        left = dict.fromkeys(rule for rule in self.rules if not rule.is_optional)
        for rule in used:
            left.pop(rule, None)
        yield from left

    def _fused(
        self, rule: NameRule, numbers: Numbers, ours: str, shapes: Mapping[str, Shape], heads: Heads
    ) -> Iterator[Link]:
        names = [pattern.format(**numbers) for pattern in rule.theirs]
        as_ours = [shapes[n][::-1] if rule.is_transposed else shapes[n] for n in names]
        first = as_ours[0]
        shape = (sum(one[0] for one in as_ours), *first[1:]) if first else first
        known = self._known(rule, [one[0] for one in as_ours if one], heads)
        for link in self._links(rule, numbers, ours, shape, known):
            if link.their_shape != shapes[link.theirs]:
                raise UsageError(
                    f"{link.theirs} is {list(shapes[link.theirs])}, and as a part of {ours} "
                    f"{list(shape)} it would be {list(link.their_shape)}. Correct the heads, or "
                    f"the rule in {self.where}."
                )
            yield link

    def in_order(self, theirs: Iterable[str]) -> list[str]:
        """Return their names in the order of their module's parameters.

        Layer by layer, in a layer module by module, each by its first mention in the file.
        """
        patterns = [pattern for rule in self.rules for pattern in rule.theirs]
        modules = list(dict.fromkeys(pattern.rpartition(".")[0] for pattern in patterns))
        sections = [0]
        for before, here in pairwise(patterns):
            sections.append(sections[-1] + (("{" in before) != ("{" in here)))

        def place(name: str) -> tuple[int, ...]:
            for at, pattern in enumerate(patterns):
                if match := _pattern(pattern).fullmatch(name):
                    numbers = map(int, match.groups())
                    module = modules.index(pattern.rpartition(".")[0])
                    return sections[at], *numbers, module, at
            return (len(patterns),)

        return sorted(theirs, key=place)

    def _full(self, name: str) -> str:
        full = f"{self.prefix}{name}"
        known = (*self.ignored, *(pattern for rule in self.rules for pattern in rule.theirs))
        return full if any(_pattern(pattern).fullmatch(full) for pattern in known) else name

    def _of_ours(self, name: str) -> tuple[NameRule, Numbers] | None:
        for rule in self.rules:
            for pattern in filter(None, (rule.ours, rule.routed, rule.local)):
                if match := _pattern(pattern).fullmatch(name):
                    return rule, match.groupdict()
        return None

    def _of_theirs(self, name: str) -> tuple[NameRule, Numbers] | None:
        for rule in self.rules:
            for pattern in rule.theirs:
                if match := _pattern(pattern).fullmatch(name):
                    return rule, match.groupdict()
        return None

    def _known(self, rule: NameRule, rows: Sequence[int], heads: Heads) -> Heads:
        """Return the heads; unknown query groups follow from the rows of queries and keys."""
        known = self.heads.or_else(heads)
        if known.heads is None or known.groups is not None or len(rows) != FUSED_PARTS["qkv"]:
            return known
        return Heads(known.heads, max(known.heads * rows[1] // rows[0], 1))

    def _links(
        self, rule: NameRule, numbers: Numbers, ours: str, shape: Shape, heads: Heads
    ) -> Iterator[Link]:
        names = [pattern.format(**numbers) for pattern in rule.theirs]
        if not shape:
            yield Link(ours, shape, whole(shape), names[0], shape, whole(shape))
            return
        parts = rows_of_parts(rule.fused, shape[0], heads, f"{ours} ({self.where})")
        if len(names) == 1:
            parts = [[rows for part in parts for rows in part]]
        for name, part in zip(names, parts, strict=True):
            count = sum(len(rows) for rows in part)
            their_shape, start = (count, *shape[1:]), 0
            for rows in part:
                box, their_box = (
                    Box((low, *[0] * (len(shape) - 1)), (len(rows), *shape[1:]))
                    for low in (rows.start, start)
                )
                link = Link(ours, shape, box, name, their_shape, their_box)
                yield _transposed(link) if rule.is_transposed else link
                start += len(rows)


def _transposed(link: Link) -> Link:
    box = Box(link.their_box.offset[::-1], link.their_box.shape[::-1])
    return Link(link.name, link.shape, link.box, link.theirs, link.their_shape[::-1], box, True)


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(text)))


_KEYS = {"extends", "prefix", "ignored", "attention", "tied", "classes", "arguments", "tensor"}
_RULE_KEYS = {"ours", "theirs", "fused", "transposed", "optional", "routed", "local"}


def find_mapping(text: str, kind: str = "names") -> Path:
    """Return the mapping file of this path, name or class; ``kind``: prefix of the shipped files.

    Raises:
        UsageError: There is none; lists the shipped ones.
    """
    folder = Path(str(files("scalai.configs")))
    for path in (Path(text), folder / f"{kind}_{text}.toml"):
        if path.is_file():
            return path
    shipped = sorted(folder.glob(f"{kind}_*.toml"))
    known = {path.stem.removeprefix(f"{kind}_") for path in shipped}
    for path in shipped:
        classes = tomllib.loads(path.read_text(encoding="utf-8")).get("classes", {})
        known |= classes.keys()
        if text in classes:
            return path
    raise UsageError(
        f"there is no file {text}, and none of that name among {sorted(known)} ({kind})."
    )


def named_mapping(text: str) -> NameMapping:
    """Return the mapping of this path, name or class, for that class alone.

    Raises:
        UsageError: As ``find_mapping`` and ``read_mapping``.
    """
    mapping = read_mapping(find_mapping(text))
    if text not in mapping.classes:
        return mapping
    return replace(mapping, classes={text: mapping.classes[text]})


def read_mapping(path: Path) -> NameMapping:
    """Read a mapping file.

    Raises:
        UsageError: It cannot be read, or has unknown keys.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no mapping file ({error}).") from error
    unknown = sorted(data.keys() - _KEYS)
    if unknown:
        raise UsageError(f"{path}: {unknown} mean nothing. A mapping file has {sorted(_KEYS)}.")
    rules = [_rule(entry, path) for entry in data.get("tensor", ())]
    base = None if "extends" not in data else read_mapping(find_mapping(data["extends"]))
    if base is not None:
        own = {rule.ours: rule for rule in rules}
        rules = [own.pop(rule.ours, rule) for rule in base.rules] + [*own.values()]
        data = {
            "prefix": base.prefix, "ignored": base.ignored, "tied": base.tied,
            "arguments": base.arguments, **data,
        }  # fmt: skip
    attention = data.get("attention", {})
    return NameMapping(
        rules=tuple(rules),
        heads=Heads(attention.get("num_attention_heads"), attention.get("num_query_groups")),
        tied=dict(data.get("tied", {})),
        ignored=tuple(data.get("ignored", ())),
        where=str(path),
        prefix=data.get("prefix", ""),
        classes=dict(data.get("classes", {})),
        arguments=dict(data.get("arguments", {})),
    )


def _rule(entry: Mapping[str, Any], path: Path) -> NameRule:
    theirs, fused = entry.get("theirs"), entry.get("fused", "")
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs or ())
    if (
        entry.keys() - _RULE_KEYS
        or not isinstance(entry.get("ours"), str)
        or fused not in FUSED_PARTS
        or len(names) not in (1, FUSED_PARTS[fused])
    ):
        raise UsageError(
            f"{path}: {dict(entry)} is no rule. Give ours, theirs (one name; or 3 with fused = "
            '"qkv", 2 with "gate_up"), fused, transposed, optional, routed and local.'
        )
    return NameRule(
        entry["ours"], names, fused, bool(entry.get("transposed", False)),
        bool(entry.get("optional", False)), entry.get("routed", ""), entry.get("local", ""),
    )  # fmt: skip
