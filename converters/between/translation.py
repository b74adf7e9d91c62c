"""A checkpoint under the names of another framework: its rows renamed, cut, fused and transposed.

Weights, masters and moments of a parameter are cut alike: each tensor of its shape goes through its
links; a scalar (a step) goes to every linked tensor. Layouts need no knowledge of it: with any
strides, a part of a fused tensor, or a transposed one, is a row of a source like others.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from scalai.converters.between.mapping import Link, NameMapping, Shape, Unfit
from scalai.converters.checkpoint import (
    CONFIG,
    Checkpoint,
    FilePiece,
    PlacedTensors,
    Values,
    parameters_of,
    place,
)
from scalai.converters.consistency import copy_differences
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.megatron.model_limits import Heads, argument_heads
from scalai.converters.megatron.modules import numbered_layer
from scalai.converters.opening import short_layers
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.region import Box

Links = dict[str, list[Link]]
"""Links of each parameter, by its name."""

LEFT_OUT = "left out: "
"""Prefix of notes on dropped values."""
INVENTED = "invented: "
"""Prefix of notes on values not from the source."""


def in_our_names(
    source: Checkpoint,
    mapping: NameMapping,
    heads: Heads | None = None,
    *,
    is_local: bool = False,
) -> tuple[Checkpoint, Links]:
    """Return a checkpoint under our names, and its links by their names.

    Args:
        source: The checkpoint, under their names.
        heads: Fallback for the heads of the mapping and the source.
        is_local: As in ``NameMapping.from_theirs``.

    Raises:
        RefusedError: Tensors have no name on the other side, or are missing; names all.
        UsageError: As ``NameMapping.from_theirs``.
    """
    link = partial(mapping.from_theirs, is_local=is_local)
    return _translated(source, mapping, link, heads, is_theirs=True)


def in_their_names(
    source: Checkpoint, mapping: NameMapping, heads: Heads | None = None
) -> tuple[Checkpoint, Links]:
    """Return a checkpoint under their names, and its links by ours: the reverse of
    ``in_our_names``."""
    return _translated(source, mapping, mapping.from_ours, heads, is_theirs=False)


def is_in_our_names(source: Checkpoint, mapping: NameMapping) -> bool:
    """Tell whether a checkpoint has our names of a mapping.

    Raises:
        UsageError: It has the names of neither side.
    """
    return mapping.is_ours(_shapes(source))


def heads_of(source: Checkpoint) -> Heads:
    """Return the attention heads by a checkpoint's arguments or ``config.json``."""
    config = source.values.extra.get(CONFIG, {})
    number = config.get("num_attention_heads", config.get("n_head"))
    return argument_heads(source.values.arguments or {}).or_else(
        Heads(number, config.get("num_key_value_heads"))
    )


def has_own_modules(values: Values) -> bool:
    """Tell whether Megatron's layers are made of its own modules (``--transformer-impl local``)."""
    given = (values.arguments or {}).get("transformer_impl") == "local"
    return bool(values.extra.get("is_local", given))


def _shapes(source: Checkpoint) -> dict[str, Shape]:
    return {name: tensor.shape for name, tensor in parameters_of(source).items()}


def _translated(
    source: Checkpoint,
    mapping: NameMapping,
    link: Callable[[Mapping[str, Shape], Heads], tuple[Links, Unfit]],
    heads: Heads | None,
    *,
    is_theirs: bool,
) -> tuple[Checkpoint, Links]:
    shapes, unneeded = _shapes(source), _unneeded(source, mapping)
    predicting = _predicting(source, shapes)
    ignored = {name for name in shapes if mapping.is_ignored(name) or name in unneeded}
    wanted = {n: shape for n, shape in shapes.items() if n not in ignored and n not in predicting}
    if source.values.framework == "" and is_theirs:
        _check_counts(source, mapping, wanted)
    links, unfit = link(wanted, heads_of(source).or_else(heads or Heads()))
    missing = dict.fromkeys((*unfit.missing, *short_layers(wanted)))
    if unfit.nameless or missing:
        faults = [
            f"{len(names)} tensors {what}: {_folded(names)}"
            for names, what in (
                (unfit.nameless, f"have no name in {mapping.where}"),
                (missing, "are missing"),
            )
            if names
        ]
        raise RefusedError(
            f"{source.directory}: {'. '.join(faults)}. Copy what is missing again; for another "
            "model copy the mapping file and add rules, or names under ignored for what may be "
            "left out."
        )
    links.update((name, []) for name in (*ignored, *predicting))
    notes = [f"{LEFT_OUT}{name}, which {mapping.where} has no use for" for name in sorted(ignored)]
    if predicting:
        notes.append(f"{LEFT_OUT}layers for further tokens (MTP): {_folded(predicting)}")
    if source.recorded is not None:
        notes.append("fingerprints of the source are not of these tensors: scalai verify it first")
    placed = _renamed(source.placed, links, shapes)
    return replace(
        source,
        placed=placed,
        recorded=None,
        stated={},
        duplicates=None
        if source.duplicates is None
        else _renamed(source.duplicates, links, shapes),
        notes=(*source.notes, *notes),
        changed=frozenset(tensor.name for tensor in placed.collection.tensors),
    ), links


def _unneeded(source: Checkpoint, mapping: NameMapping) -> set[str]:
    """Return tensors of no use to another framework: module buffers, second copies of shared
    tensors."""
    job = source.values.extra.get(STATE)
    found = set(job.buffers) if isinstance(job, DeepSpeedJob) else set()
    if _config(source).get("tie_word_embeddings"):
        stored = mapping.stored(parameters_of(source))
        tied = {
            stored[head]: stored.get(of, of) for head, of in mapping.tied.items() if head in stored
        }
        _check_copies(source, tied)
        found.update(tied)
    return found


def _predicting(source: Checkpoint, names: Iterable[str]) -> list[str]:
    """Return tensors of the layers behind the decoder's, which no class of Hugging Face loads."""
    config = _config(source)
    count, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(count, int) or not isinstance(more, int):
        return []
    behind = range(count, count + more)
    return sorted(name for name in names if numbered_layer(name) in behind)


def _config(source: Checkpoint) -> Mapping[str, Any]:
    config: Mapping[str, Any] = source.values.extra.get(CONFIG, {})
    return config


def _check_copies(source: Checkpoint, tied: Mapping[str, str]) -> None:
    """Refuse unequal tensors that ``config.json`` declares shared."""
    tensors = parameters_of(source)
    for name, owner in tied.items():
        differences: list[object] = [f"{name} is {tensors[name].shape}, {owner} is not there"]
        if owner in tensors and tensors[owner].shape == tensors[name].shape:
            differences = list(copy_differences(source, name, owner))
        if differences:
            raise RefusedError(
                f"{source.directory}/config.json says tie_word_embeddings, and {name} is not "
                f"{owner}: {differences[0]}. Say false there to keep both; or, if the files are of "
                "two models, use others."
            )


def _folded(names: Iterable[str]) -> str:
    """Return all names in one text: those that differ in numbers alone as one, with their count."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\b[0-9]+\b", "*", name), []).append(name)
    return ", ".join(of[0] if len(of) == 1 else f"{form} ({len(of)})" for form, of in alike.items())


def _check_counts(source: Checkpoint, mapping: NameMapping, shapes: Mapping[str, Shape]) -> None:
    """Refuse a model without a layer, an expert or its head; nothing else would notice."""
    config = _config(source)
    count = config.get("num_hidden_layers", config.get("n_layer"))
    numbers = set(mapping.numbers(shapes, "layer"))
    if isinstance(count, int) and numbers and numbers != set(range(count)):
        missing = sorted(set(range(count)) - numbers)[:5]
        raise RefusedError(
            f"{source.directory} has {len(numbers)} layers, and config.json says {count} (missing: "
            f"{missing or 'none'}). It is not whole, or of another model: copy it again."
        )
    kinds = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[name] for name in kinds if name in config), None)
    for layer, found in mapping.numbers(shapes, "expert").items():
        if found != set(range(len(found))) or experts not in (None, len(found)):
            raise RefusedError(
                f"{source.directory} has {len(found)} experts in layer {layer}, up to number "
                f"{max(found)}, and config.json says {experts}. It is not whole: copy it again."
            )
    stored = mapping.stored(shapes)
    for head, owner in mapping.tied.items():
        is_missing = owner in stored and head not in stored
        if config.get("tie_word_embeddings") is False and is_missing:
            raise RefusedError(
                f"{source.directory}/config.json says that {head} is not tied, and there is none. "
                "Copy the missing file, or say tie_word_embeddings true."
            )


def _renamed(placed: PlacedTensors, links: Links, shapes: Mapping[str, Shape]) -> PlacedTensors:
    pieces = [
        piece
        for row in range(len(placed.collection))
        for piece in _pieces(placed, row, links, shapes)
    ]
    return place(pieces, placed.files)


def _pieces(
    placed: PlacedTensors, row: int, links: Links, shapes: Mapping[str, Shape]
) -> Iterator[FilePiece]:
    piece = placed.piece(row)
    tensor, box, stride = piece.tensor, piece.box, piece.stride or ()
    kind, name = split_name(tensor.name)
    if tensor.shape not in ((), shapes.get(name)):
        raise RefusedError(
            f"{tensor.name} is {list(tensor.shape)}, and its parameter "
            f"{list(shapes.get(name, ()))}: it cannot be cut by a mapping. Train with an Adam."
        )
    if tensor.shape == ():
        for theirs in dict.fromkeys(link.theirs for link in links.get(name, ())):
            yield replace(piece, tensor=Tensor(f"{kind}/{theirs}", (), tensor.dtype))
        return
    for link in links[name]:
        common = box.intersect(link.box)
        if common is None:
            continue
        turn = slice(None, None, -1 if link.is_transposed else None)
        inside = tuple(a - b for a, b in zip(common.offset, link.box.offset, strict=True))[turn]
        offset = tuple(a + b for a, b in zip(inside, link.their_box.offset, strict=True))
        shift = zip(common.offset, box.offset, stride, strict=True)
        steps = sum((low - at) * step for low, at, step in shift)
        yield replace(
            piece,
            tensor=Tensor(f"{kind}/{link.theirs}", link.their_shape, tensor.dtype),
            box=Box(offset, common.shape[turn]),
            begin=piece.begin + piece.item_bytes * steps,
            stride=stride[turn],
        )
