"""A rank's parameters of a model, in the model's own order.

``.metadata`` lists keys in the order of the ranks that wrote them first, under Megatron's fully
parallel save another order than the modules'. So the order follows the names
(``modules.in_order``); for unknown names the list, which is the modules' order if one rank wrote
all. A tensor-parallel rank holds the chunks of its shard of a parameter.

Source: ``sharded_state_dict`` of megatron-core 0.16.1: it visits modules in the order of
``named_parameters``, which is that of the buffers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from scalai.converters.dcp_metadata import Chunk, StoredKey
from scalai.converters.megatron.modules import (
    PREDICTED,
    Naming,
    Order,
    expert_of,
    in_order,
    is_trained,
    leading_axes,
    name_at,
    numbered_layer,
    stack_of,
)
from scalai.core.errors import RefusedError
from scalai.core.tensors import region
from scalai.core.tensors.region import Box, row_major

ChunkBegin = Callable[[StoredKey, Chunk], tuple[int, tuple[int, ...], int]]
"""Returns a chunk's offset in its file, its strides and the size of an element."""

_TWICE = (
    ("position_embeddings.", "embedding.position_embeddings."),
    ("output_layer.", "lm_head.output_layer."),
)
_EMBEDDING = "embedding."
_WORDS, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True)
class ShardBox:
    """A box of a parameter in the flat memory of a rank, and the file of its weights."""

    piece: region.Piece
    file: str
    begin: int


@dataclass(frozen=True, slots=True)
class RankParameter:
    """A parameter as one rank has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[ShardBox, ...]
    is_copy: bool = False
    """Another stage has it too: the tied embedding of the last one."""

    @property
    def numel(self) -> int:
        return sum(part.piece.box.numel for part in self.parts)


@dataclass(frozen=True, slots=True)
class OrderRule:
    """An order of parameters.

    Attributes:
        naming: A rank's names of its modules. ``is_grouped``: all experts' tensors of a kind stand
            together, else each expert's do.
        is_stored: By the keys' order in ``.metadata``, not by the names of modules.
    """

    naming: Naming
    is_stored: bool = False

    def __str__(self) -> str:
        return "the order of the keys" if self.is_stored else "the order of Megatron's modules"


@dataclass(frozen=True, slots=True)
class _KeyEntry:
    """One parameter of a key: its name and its index on the key's leading axes."""

    order: Order
    name: str
    stored: StoredKey
    index: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class OrderedModel:
    """The model's parameters in its own order.

    Attributes:
        keys: Keys of parameters, in the order of ``.metadata``.
        rule: Their order.
        chunk_begin: Place of a chunk's elements.
        again: Keys of parameters with a second key, which has their state.
    """

    keys: tuple[StoredKey, ...]
    rule: OrderRule
    chunk_begin: ChunkBegin
    again: frozenset[str] = frozenset()
    _built: dict[tuple[str, int, bool], RankParameter] = field(default_factory=dict)
    _chunks: dict[str, dict[tuple[int, ...], list[Chunk]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Sequence[StoredKey], rule: OrderRule, chunk_begin: ChunkBegin
    ) -> "OrderedModel":
        """Take the parameters out of all of a model's tensors; others are its modules' buffers.

        Raises:
            RefusedError: The rule does not know a module's place.
        """
        names = {key.key for key in model}
        again = {old for name in names if (old := _first_name(name)) != name and old in names}
        parameters = (key for key in model if is_trained(key.key) and key.key not in again)
        made = cls(tuple(parameters), rule, chunk_begin, frozenset(again))
        assert made._entries is not None
        return made

    @cached_property
    def stacks(self) -> tuple[str, ...]:
        """Modules of layers, without those that predict further tokens (MTP)."""
        found = dict.fromkeys(stack_of(stored.key) for stored in self.keys)
        return tuple(stack for stack in found if stack and not stack.startswith(PREDICTED))

    @cached_property
    def layers(self) -> int:
        """Number of layers shared by the stages."""
        return max((layer + 1 for layer in self._inside), default=0)

    @cached_property
    def tp(self) -> int:
        """Number of shards of the parameters."""
        return max(
            (self._shards(k) for k in self.keys if not _is_expert(k.key) and not _is_gate(k)),
            default=1,
        )

    @cached_property
    def expert_tp(self) -> int:
        keys = [key for key in self.keys if _is_expert(key.key) and not _is_gate(key)]
        return max((self._shards(key) for key in keys), default=1)

    @cached_property
    def experts(self) -> int:
        counts = (k.shape[leading_axes(k.key) - 1] for k in self.keys if _is_expert(k.key))
        return max(counts, default=1)

    @cached_property
    def has_experts(self) -> bool:
        return any(_is_expert(key.key) for key in self.keys)

    def stage(
        self,
        layers: range,
        rank: int,
        *,
        is_first: bool,
        is_last: bool,
        with_experts: bool = True,
    ) -> list[RankParameter]:
        """Return the parameters of a pipeline stage, with or without those of experts.

        Args:
            layers: Layers of the stack shared by the stages.
            rank: Tensor-parallel rank.
            is_first, is_last: The stage has the modules before the layers, and those behind them.
        """
        copies = self._copies if is_last and not is_first else ()
        behind = [*self._behind, *(entry for entry in copies if entry.order > self._last_order)]
        entries = chain(
            self._before if is_first else (),
            (entry for entry in copies if entry.order <= self._last_order),
            *(self._inside.get(layer, ()) for layer in layers),
            sorted(behind, key=lambda entry: entry.order) if is_last else (),
        )
        copied = {entry.name for entry in copies}
        return [
            self._parameter(entry, rank, is_copy=entry.name in copied)
            for entry in entries
            if with_experts or not _is_expert(entry.stored.key)
        ]

    def expert_stage(
        self, layers: range, rank: int, experts: range, *, is_last: bool
    ) -> list[RankParameter]:
        inside = chain(
            *(self._inside.get(layer, ()) for layer in layers), self._behind if is_last else ()
        )
        return [
            self._parameter(entry, rank)
            for entry in inside
            if _is_expert(entry.stored.key) and expert_of(entry.name) in experts
        ]

    @cached_property
    def _entries(self) -> tuple[_KeyEntry, ...]:
        first: dict[str | None, int] = {}
        for at, stored in enumerate(self.keys):
            first.setdefault(stack_of(stored.key), at)
        found = []
        for at, stored in enumerate(self.keys):
            axes = leading_axes(stored.key)
            for index in np.ndindex(*stored.shape[:axes]):
                name = name_at(stored.key, index)
                stack = stack_of(stored.key)
                order = self._order(name, at, first[stack] if stack else at)
                found.append(_KeyEntry(order, name, stored, index))
        return tuple(sorted(found, key=lambda entry: entry.order))

    def _order(self, name: str, at: int, stack_at: int) -> Order:
        expert = expert_of(name)
        if (first := _first_name(name)) in self.again:
            name = first
        if not self.rule.is_stored:
            by_name = in_order(self.rule.naming.to_rank(name, 0, 0))
            return (*by_name, (0, expert or 0))
        layer = numbered_layer(name)
        if expert is None:
            return ((stack_at, 0 if layer is None else layer), (at, 0))
        own = self._first_expert_keys[stack_of(name), layer]
        pair = (at, expert) if self.rule.naming.is_grouped else (expert, at)
        return ((stack_at, layer or 0), (own, 1), pair)

    @cached_property
    def _first_expert_keys(self) -> dict[tuple[str | None, int | None], int]:
        """The place of the first key of a stack's layer with experts."""
        found: dict[tuple[str | None, int | None], int] = {}
        for at, stored in enumerate(self.keys):
            if _is_expert(stored.key):
                here, own = stack_of(stored.key), numbered_layer(stored.key)
                # A key without a number is of as many layers as its first axis has.
                for layer in range(stored.shape[0]) if own is None else (own,):
                    found.setdefault((here, layer), at)
        return found

    @cached_property
    def _main(self) -> str | None:
        """The stack of layers shared by the stages."""
        return next((s for s in ("decoder.", *self.stacks) if s in self.stacks), None)

    @cached_property
    def _inside(self) -> dict[int, list[_KeyEntry]]:
        """The parameters of every shared layer."""
        found: dict[int, list[_KeyEntry]] = {}
        for entry in self._entries:
            if self._main is not None and stack_of(entry.stored.key) == self._main:
                found.setdefault(numbered_layer(entry.name) or 0, []).append(entry)
        return found

    @cached_property
    def _last_order(self) -> Order:
        orders = [entry.order for entries in self._inside.values() for entry in entries]
        return max(orders, default=())

    @cached_property
    def _before(self) -> list[_KeyEntry]:
        return [e for e in self._outside if e.order < self._last_order]

    @cached_property
    def _behind(self) -> list[_KeyEntry]:
        return [e for e in self._outside if e.order > self._last_order]

    @cached_property
    def _outside(self) -> list[_KeyEntry]:
        return [e for e in self._entries if stack_of(e.stored.key) != self._main or not self._main]

    @cached_property
    def _copies(self) -> list[_KeyEntry]:
        """Parameters of the first stage with copies on another last one: the embedding for layers
        that predict further tokens (MTP), else the tied output layer."""
        of_embedding = [entry for entry in self._before if entry.name.startswith(_EMBEDDING)]
        if any(key.key.startswith(PREDICTED) for key in self.keys):
            return of_embedding
        if any(key.key == _OUTPUT for key in self.keys):
            return []
        order = (1 << 60, 0) if self.rule.is_stored else in_order(_OUTPUT)[0]
        return [
            _KeyEntry((order,), entry.name, entry.stored, entry.index)
            for entry in of_embedding
            if entry.name == _WORDS
        ]

    def _shards(self, stored: StoredKey) -> int:
        first = stored.chunks[0].box.offset[: leading_axes(stored.key)]
        return sum(chunk.box.offset[: len(first)] == first for chunk in stored.chunks)

    def _parameter(self, entry: _KeyEntry, rank: int, *, is_copy: bool = False) -> RankParameter:
        at = entry.name, rank, is_copy
        if at not in self._built:
            self._built[at] = self._build(entry, rank, is_copy=is_copy)
        return self._built[at]

    def _build(self, entry: _KeyEntry, rank: int, *, is_copy: bool) -> RankParameter:
        """Return a parameter as a TP rank has it: by its chunks, one a shard."""
        stored, index = entry.stored, entry.index
        axes = leading_axes(stored.key)
        tp = self.expert_tp if _is_expert(stored.key) else self.tp
        if stored.key not in self._chunks:
            by_index = self._chunks.setdefault(stored.key, {})
            for chunk in sorted(stored.chunks, key=lambda chunk: chunk.box.offset):
                by_index.setdefault(chunk.box.offset[:axes], []).append(chunk)
        chunks = self._chunks[stored.key].get(index)
        if not chunks:
            raise RefusedError(f"{stored.key} has no chunk of layer and expert {list(index)} alone")
        mine = chunks
        if len(chunks) == tp:
            mine = [chunks[rank]]
        elif len(chunks) == 2 * tp:  # gate and up projection: one half of the tensor each
            mine = [chunks[rank], chunks[tp + rank]]
        parts, start = [], 0
        for chunk in mine:
            box = Box(chunk.box.offset[axes:], chunk.box.shape[axes:])
            begin, _, _ = self.chunk_begin(stored, chunk)
            piece = region.Piece(box, start, row_major(box.shape))
            parts.append(ShardBox(piece, chunk.extent.file, begin))
            start += box.numel
        return RankParameter(entry.name, stored.shape[axes:], stored.dtype, tuple(parts), is_copy)


def _first_name(name: str) -> str:
    """Return the first name of a parameter with two in a T5. Megatron keeps its optimizer's state
    under the second one."""
    for second, first in _TWICE:
        if name.startswith(second):
            return f"{first}{name.removeprefix(second)}"
    return name


def _is_expert(key: str) -> bool:
    return ".experts.experts." in key


def _is_gate(stored: StoredKey) -> bool:
    return "linear_fc1." in stored.key
