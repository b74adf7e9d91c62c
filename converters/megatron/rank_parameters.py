"""The parameters of a model as one rank has them, in the model's own order.

The order of a layer's parameters is that of the keys in ``.metadata``; what a tensor-parallel rank
holds of one are the chunks that it wrote.

Source: ``sharded_state_dict`` of megatron-core 0.16.1: it visits modules in the order of
``named_parameters``, which is that of the buffers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from scalai.converters.megatron.names import PREDICTED, layer_of, leading_axes, name_at
from scalai.converters.megatron.torch_dist_metadata import Chunk, StoredKey
from scalai.core import region
from scalai.core.errors import RefusedError
from scalai.core.region import Box, row_major

ChunkBegin = Callable[[StoredKey, Chunk], tuple[int, tuple[int, ...], int]]
"""Tells where a chunk's elements lie in its file, their strides and the size of one."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a parameter in the flat memory of a rank, and the file that holds its weights."""

    piece: region.Piece
    file: str
    begin: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as one rank has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]
    is_copy: bool = False
    """Another stage has it too: the tied embedding of the last one."""

    @property
    def numel(self) -> int:
        return sum(part.piece.box.numel for part in self.parts)


@dataclass(frozen=True, eq=False)
class Model:
    """The model's parameters in its own order, as its keys tell."""

    before: tuple[StoredKey, ...]
    inside: tuple[StoredKey, ...]
    behind: tuple[StoredKey, ...]
    chunk_begin: ChunkBegin

    @classmethod
    def of(cls, model: Sequence[StoredKey], chunk_begin: ChunkBegin) -> "Model":
        inside = [at for at, key in enumerate(model) if _is_layer(key.key)]
        first = min(inside, default=len(model))
        return cls(
            tuple(key for key in model[:first]),
            tuple(model[at] for at in inside),
            tuple(key for key in model[first:] if not _is_layer(key.key)),
            chunk_begin,
        )

    @cached_property
    def layers(self) -> int:
        counts = [stored.shape[0] for stored in self.inside if leading_axes(stored.key)]
        counts += [(layer_of(stored.key) or 0) + 1 for stored in self.inside]
        return max(counts, default=0)

    @cached_property
    def tp(self) -> int:
        """Into how many shards the parameters are cut."""
        keys = (*self.before, *self.inside, *self.behind)
        return max(
            (self._shards(key) for key in keys if not _is_expert(key.key) and not _is_gate(key)),
            default=1,
        )

    @cached_property
    def expert_tp(self) -> int:
        keys = [key for key in self.inside if _is_expert(key.key) and not _is_gate(key)]
        return max((self._shards(key) for key in keys), default=1)

    @cached_property
    def experts(self) -> int:
        return max((key.shape[1] for key in self.inside if _is_expert(key.key)), default=1)

    @cached_property
    def has_experts(self) -> bool:
        return any(_is_expert(key.key) for key in self.inside)

    def _shards(self, stored: StoredKey) -> int:
        first = stored.chunks[0].box.offset[: leading_axes(stored.key)]
        return sum(chunk.box.offset[: len(first)] == first for chunk in stored.chunks)

    @cached_property
    def predicts(self) -> bool:
        """Whether it has layers that predict further tokens (MTP): in front of the output layer."""
        return any(key.key.startswith(PREDICTED) for key in self.behind)

    def head(self, rank: int) -> Iterator[Parameter]:
        """Yield what lies before the first layer, as a TP rank has it."""
        for stored in self.before:
            yield self._parameter(stored, (), rank, self.tp)

    def body(self, layers: range, rank: int, *, with_experts: bool) -> Iterator[Parameter]:
        """Yield the parameters of these layers."""
        for layer in layers:
            keys = [key for key in self.inside if layer_of(key.key) in (None, layer)]
            dense = [key for key in keys if not _is_expert(key.key)]
            first = next((at for at, key in enumerate(keys) if _is_expert(key.key)), len(keys))
            for stored in dense[:first]:
                yield self._parameter(stored, self._index(stored, layer), rank, self.tp)
            if with_experts:
                yield from self.expert_body(
                    range(layer, layer + 1), rank, range(self.experts), is_grouped=False
                )
            for stored in dense[first:]:
                yield self._parameter(stored, self._index(stored, layer), rank, self.tp)

    def expert_body(
        self, layers: range, rank: int, experts: range, *, is_grouped: bool
    ) -> Iterator[Parameter]:
        """Yield the parameters of these experts; grouped: all experts of a key together."""
        for layer in layers:
            keys = [
                key
                for key in self.inside
                if _is_expert(key.key) and layer_of(key.key) in (None, layer)
            ]
            pairs = [(key, expert) for expert in experts for key in keys]
            if is_grouped:
                pairs = [(key, expert) for key in keys for expert in experts]
            for key, expert in pairs:
                index = (*self._index(key, layer)[:1], expert)
                yield self._parameter(key, index[-leading_axes(key.key) :], rank, self.expert_tp)

    def tail(self, rank: int, *, is_copied: bool) -> Iterator[Parameter]:
        """Yield what lies behind the last layer; where the embedding is tied, its copy too."""
        for stored in self.behind:
            yield self._parameter(stored, (), rank, self.tp)
        is_tied = not any(key.key == "output_layer.weight" for key in self.behind)
        for stored in self.before if is_copied and is_tied else ():
            if stored.key.endswith("word_embeddings.weight"):
                yield self._parameter(stored, (), rank, self.tp, is_copy=True)

    def _index(self, stored: StoredKey, layer: int) -> tuple[int, ...]:
        return (layer,) if leading_axes(stored.key) else ()

    def _parameter(
        self,
        stored: StoredKey,
        index: tuple[int, ...],
        rank: int,
        tp: int,
        *,
        is_copy: bool = False,
    ) -> Parameter:
        """Return a parameter as a TP rank has it: by its chunks, of which each rank wrote its
        own."""
        axes = leading_axes(stored.key)
        chunks = sorted(
            (chunk for chunk in stored.chunks if chunk.box.offset[:axes] == index[:axes]),
            key=lambda chunk: chunk.box.offset,
        )
        if not chunks:
            raise RefusedError(
                f"{stored.key} has no chunk of layer and expert {list(index)} alone. Load the "
                "checkpoint in Megatron and save it with --dist-ckpt-optim-fully-reshardable."
            )
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
            parts.append(Part(piece, chunk.extent.file, begin))
            start += box.numel
        name = name_at(stored.key, index)
        return Parameter(name, stored.shape[axes:], stored.dtype, tuple(parts), is_copy)


def _is_layer(key: str) -> bool:
    return ".layers." in key and not key.startswith(PREDICTED)


def _is_expert(key: str) -> bool:
    return ".experts.experts." in key


def _is_gate(stored: StoredKey) -> bool:
    return "linear_fc1." in stored.key
