"""Changes between frameworks before a layout writes: names, rows of the vocabulary, values.

Order: names become ours, the vocabulary gets new padding, the values become the target framework's,
names become theirs. A layout then writes as if the state were its own framework's.

Tensors that a script registered beside its model are left out, except in Scalai's own generations
and in dcp.

Megatron rounds the rows of the vocabulary up to a multiple of ``make_vocab_size_divisible_by *
tp``. Padding rows are trained and take part in every softmax, so another number of them changes the
losses. New rows are zeros, in weights, masters and moments, as in Megatron's own loader for a
``torch_dist`` checkpoint with fewer rows.

Source: ``_vocab_size_with_padding`` of megatron/training/tokenizer/tokenizer.py and
``allow_shape_mismatch`` of megatron/core/dist_checkpointing/strategies/torch.py (0.16.1).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scalai.converters.between.config_described import described_config
from scalai.converters.between.crossing import to_deepspeed, to_megatron, to_torch
from scalai.converters.between.mapping import NameMapping
from scalai.converters.between.megatron_described import shape_arguments
from scalai.converters.between.model_config import config_arguments, contradictions
from scalai.converters.between.reference import JobReference
from scalai.converters.between.translation import (
    INVENTED,
    LEFT_OUT,
    Links,
    has_own_modules,
    heads_of,
    in_our_names,
    in_their_names,
    is_in_our_names,
)
from scalai.converters.checkpoint import (
    CONFIG,
    USER,
    Checkpoint,
    CheckpointFile,
    FilePiece,
    PlacedTensors,
    Values,
    parameters_of,
    place,
)
from scalai.converters.layouts import layout_named
from scalai.converters.megatron.model_limits import DIVISOR, Heads, padded_rows
from scalai.converters.megatron.modules import EMBEDDING, OUTPUT
from scalai.converters.megatron.rules import INTERLEAVED
from scalai.core.errors import RefusedError, UsageError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.region import Box, whole

ZEROS = CheckpointFile("(zeros)", 8, bytes(8))
"""A file in memory for new rows, all at its first element."""

KEEP_REGISTERED = ("scalai", "dcp")
"""Layouts with tensors beside a model's."""

_PADDED = (EMBEDDING, OUTPUT, OUTPUT.replace("weight", "bias"))


def repadded(source: Checkpoint, rows: int, vocabulary: int | None) -> Checkpoint:
    """Return a checkpoint with the vocabulary padded to other rows.

    Args:
        source: The checkpoint, under our names.
        rows: Number of rows; keeps the existing ones, or drops the last.
        vocabulary: Number of tokens; None: unknown.

    Raises:
        RefusedError: The vocabulary is unknown, rows of tokens would be dropped, or there is no
            embedding.
    """
    named = parameters_of(source)
    if EMBEDDING not in named:
        raise RefusedError(f"{source.directory} has no {EMBEDDING}, whose rows --repad changes.")
    before = named[EMBEDDING].shape[0]
    if vocabulary is None:
        raise RefusedError(
            f"{source.directory} has {before} rows of the vocabulary and does not say how many are "
            "of tokens. Say it as vocab_size under [megatron] in a TOML file for --args-from."
        )
    if not vocabulary <= min(rows, before):
        raise RefusedError(
            f"--repad {rows}: the vocabulary has {vocabulary} tokens and {before} rows, so tokens "
            "would have none. Give more rows, or correct vocab_size."
        )
    if rows == before:
        return source
    note = (
        f"the vocabulary is padded to {rows} rows instead of {before} ({vocabulary} of tokens): "
        "losses will differ, for each row takes part in the softmax"
    )
    if rows > before:
        note += "; the new rows, their masters and moments are zeros"
    changed = {t.name for t in source.placed.collection.tensors if _is_padded(t)}
    return replace(
        source,
        placed=_cut(source.placed, rows),
        recorded=None,
        stated={},
        duplicates=None if source.duplicates is None else _cut(source.duplicates, rows),
        values=replace(
            source.values,
            arguments=_with_rows(source.values.arguments, rows),
            counters=_with_rows(source.values.counters, rows) or {},
        ),
        notes=(*source.notes, note),
        changed=source.changed | changed,
    )


def _is_padded(tensor: Tensor) -> bool:
    return split_name(tensor.name)[1] in _PADDED and len(tensor.shape) > 0


def _with_rows(values: Mapping[str, Any] | None, rows: int) -> Mapping[str, Any] | None:
    if values is None or "padded_vocab_size" not in values:
        return values
    return {**values, "padded_vocab_size": rows}


def _cut(placed: PlacedTensors, rows: int) -> PlacedTensors:
    padded = {tensor: replace(tensor, shape=(rows, *tensor.shape[1:]))
              for tensor in placed.collection.tensors if _is_padded(tensor)}  # fmt: skip
    pieces = [piece for row in range(len(placed.collection)) for piece in _kept(placed, row, rows)]
    for old, new in padded.items():
        if rows > old.shape[0]:
            box = Box(
                (old.shape[0], *[0] * (len(new.shape) - 1)),
                (rows - old.shape[0], *new.shape[1:]),
            )
            pieces.append(FilePiece(new, box, ZEROS.path, 0, (0,) * len(new.shape)))
    return place(pieces, [*placed.files, ZEROS])


def _kept(placed: PlacedTensors, row: int, rows: int) -> Iterator[FilePiece]:
    piece = placed.piece(row)
    if not _is_padded(piece.tensor):
        yield piece
        return
    tensor = replace(piece.tensor, shape=(rows, *piece.tensor.shape[1:]))
    common = piece.box.intersect(whole(tensor.shape))
    if common is not None:
        # Rows are dropped at the end, so the rest begins at the same place.
        yield replace(piece, tensor=tensor, box=common)


def without_registered(source: Checkpoint) -> Checkpoint:
    """Return a source without a script's registered tensors, with a note on each."""
    placed, tensors = source.placed, source.placed.collection.tensors
    left = sorted(tensor.name for tensor in tensors if tensor.name.startswith(f"{USER}/"))
    if not left:
        return source
    rows = [
        row
        for row in range(len(placed.collection))
        if not placed.collection.box(row)[0].name.startswith(f"{USER}/")
    ]
    notes = [f"{LEFT_OUT}{name}, which is no parameter (scalai and dcp keep such)" for name in left]
    return replace(
        source,
        placed=place([placed.piece(row) for row in rows], placed.files),
        recorded=None if source.recorded is None else source.recorded[rows],
        notes=(*source.notes, *notes),
    )


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """The requested target of a source.

    Attributes:
        mapping: Names of another framework; None: names stay.
        reference: Values of ``--args-from``.
        repad: Rows of the vocabulary; 0: the target framework's number; None: they stay.
        tp: Tensor parallelism of the target, for Megatron's number of rows; None: unchanged, or
            between frameworks 1.
    """

    layout: str
    mapping: NameMapping | None = None
    reference: JobReference | None = None
    repad: int | None = None
    tp: int | None = None

    @property
    def framework(self) -> str:
        """The framework of the target's reader; empty: any."""
        if self.layout == "scalai" and self.mapping is not None:
            return "megatron"
        return layout_named(self.layout).framework


def adapted(source: Checkpoint, request: TargetRequest) -> tuple[Checkpoint, Values | None]:
    """Return a source in the form for the target's layout, and values for its gaps.

    Raises:
        RefusedError: Names, values or the vocabulary's size are unknown.
        UsageError: A mapping is missing, or does not fit.
    """
    target, mapping = request.framework, request.mapping
    if target == "megatron":
        request = _with_reference(source, request)
    if request.layout not in KEEP_REGISTERED or mapping is not None:
        source = without_registered(source)
    crosses = bool(target) and source.values.framework not in (target, "")
    if crosses and mapping is None:
        raise UsageError(
            f"{request.layout} is of {target} and {source.directory} of {source.values.framework}, "
            "whose names are others. Pass --mapping."
        )
    is_ours = mapping is None or is_in_our_names(source, mapping)
    wants_ours = mapping is None or target == "megatron"
    heads, links = _heads(source, request), Links()
    if mapping is not None:
        known = source.values.arguments if is_ours else _arguments_of(request)
        _check_supposed(mapping, known or {})
    if mapping is not None and not is_ours and (wants_ours or request.repad is not None):
        source, links = in_our_names(source, mapping, heads, is_local=_is_local(request.reference))
        is_ours = True
    if request.repad is not None:
        tp = request.tp or (1 if crosses else source.values.degrees.get("tp", 1))
        source = _repadded(source, request, tp)
    if mapping is not None and is_ours and not wants_ours:
        ours = source
        source, links = in_their_names(ours, mapping, heads)
        if request.layout == "safetensors":
            source = _with_config(source, ours, mapping)
    if target == "megatron" and source.values.extra.get(CONFIG):
        source = _as_configured(source, request)
    if crosses:
        cross = _to_megatron if target == "megatron" else _to_deepspeed
        source = cross(source, links, request)
    elif request.layout == "dcp" and links and source.values.framework == "megatron":
        reference = None if request.reference is None else request.reference.checkpoint
        source = to_torch(source, links, reference)
    return source, _lacking(source, request)


def _as_configured(source: Checkpoint, request: TargetRequest) -> Checkpoint:
    """Return a source with notes on its ``config.json`` for Megatron.

    Raises:
        RefusedError: Megatron computes no such model, or the checkpoint of ``--args-from`` has
            arguments of another one.
    """
    reference = request.reference
    shaped = shape_arguments(parameters_of(source), heads_of(source).heads)
    config = source.values.extra[CONFIG]
    said, notes = config_arguments(config, shaped, source.directory)
    known = {} if reference is None or reference.checkpoint is None else reference.arguments
    wrong = list(contradictions(said, known))
    if reference is not None and wrong:
        raise RefusedError(f"{reference.where}: {'; '.join(wrong)}. Name another --args-from.")
    return replace(source, notes=(*source.notes, *notes))


def _with_reference(source: Checkpoint, request: TargetRequest) -> TargetRequest:
    """Return a request with what ``config.json`` and the mapping say of Megatron's arguments."""
    reference = request.reference
    if reference is None and source.values.extra.get(CONFIG):
        reference = JobReference(source.directory / "config.json", None, {})
    supposed = {} if request.mapping is None else request.mapping.arguments
    if reference is not None and reference.checkpoint is None and supposed:
        given = {**supposed, **reference.given.get("megatron", {})}
        reference = replace(reference, given={**reference.given, "megatron": given})
    return replace(request, reference=reference)


def _arguments_of(request: TargetRequest) -> Mapping[str, Any] | None:
    return None if request.reference is None else request.reference.arguments


def _check_supposed(mapping: NameMapping, arguments: Mapping[str, Any]) -> None:
    """Refuse Megatron's arguments with which the tensors would be another model."""
    for name, value in mapping.arguments.items():
        if name in arguments and arguments[name] != value:
            raise RefusedError(
                f"{name} is {arguments[name]} by Megatron's arguments, and tensors by "
                f"{mapping.where} are of a model with {value}. Use another mapping."
            )
    for name in INTERLEAVED:
        if arguments.get(name):
            raise RefusedError(
                f"{name} is {arguments[name]} by Megatron's arguments: rows of the experts' gate "
                f"and up projections alternate, and {mapping.where} takes halves. Megatron-Bridge "
                "saves them as halves: load it there and save it again."
            )


def _with_config(source: Checkpoint, ours: Checkpoint, mapping: NameMapping) -> Checkpoint:
    """Return a source with the ``config.json`` of Megatron's state, and notes on its vocabulary."""
    config, notes = described_config(ours, mapping)
    embedding = parameters_of(ours).get(EMBEDDING)
    rows = None if embedding is None else embedding.shape[0]
    tokens = (ours.values.arguments or {}).get("vocab_size")
    if None not in (tokens, rows) and tokens != rows:
        notes.append(f"the vocabulary has {rows} rows for {tokens} tokens: --repad drops the rest")
    extra = {**source.values.extra, CONFIG: config}
    values = replace(source.values, extra=extra)
    return replace(source, values=values, notes=(*source.notes, *notes))


def _is_local(reference: JobReference | None) -> bool:
    """Tell whether the target's layers are made of Megatron's own modules."""
    if reference is not None and reference.checkpoint is not None:
        return has_own_modules(reference.checkpoint.values)
    return reference is not None and reference.arguments.get("transformer_impl") == "local"


def _heads(source: Checkpoint, request: TargetRequest) -> Heads:
    stated = heads_of(source)
    return stated if request.reference is None else stated.or_else(request.reference.heads)


def _to_megatron(source: Checkpoint, links: Links, request: TargetRequest) -> Checkpoint:
    if request.reference is None:
        raise RefusedError(
            f"{source.directory} has no Megatron arguments and no schedule. Pass --args-from with "
            "a Megatron checkpoint of the job, or with a TOML file."
        )
    notes: list[str] = []
    values = request.reference.megatron(source, notes)
    return to_megatron(replace(source, notes=(*source.notes, *notes)), links, values)


def _to_deepspeed(source: Checkpoint, links: Links, request: TargetRequest) -> Checkpoint:
    assert request.mapping is not None
    if request.reference is None:
        raise RefusedError(
            f"{source.directory} does not say in which order a DeepSpeed engine keeps its "
            "parameters. Pass --args-from with a DeepSpeed checkpoint of the job, or with a TOML "
            "file."
        )
    notes: list[str] = []
    job, groups = request.reference.deepspeed(source, request.mapping, notes)
    source = replace(source, notes=(*source.notes, *notes))
    return to_deepspeed(source, links, job, groups, request.reference.checkpoint)


def _lacking(source: Checkpoint, request: TargetRequest) -> Values | None:
    """Return values of ``--args-from`` for a state of the target's own framework."""
    reference, values = request.reference, source.values
    if reference is None:
        return None
    if reference.checkpoint is not None:
        return reference.checkpoint.values
    has_all = values.arguments is not None and all("betas" in g for g in values.param_groups)
    return None if has_all or request.framework != "megatron" else reference.megatron(source, [])


def _repadded(source: Checkpoint, request: TargetRequest, tp: int) -> Checkpoint:
    stated: Mapping[str, object] = {} if request.reference is None else request.reference.arguments
    known = {
        **(source.values.arguments or {}),
        **{n: v for n, v in stated.items() if v is not None},
    }
    config = source.values.extra.get(CONFIG) or {}
    vocabulary = known.get("vocab_size", config.get("vocab_size"))
    rows = request.repad or vocabulary or 0
    if not request.repad and vocabulary and request.framework == "megatron":
        divisor = known.get("make_vocab_size_divisible_by")
        if divisor is None:
            note = f"{INVENTED}make_vocab_size_divisible_by {DIVISOR}, Megatron's default"
            source, divisor = replace(source, notes=(*source.notes, note)), DIVISOR
        rows = padded_rows(vocabulary, divisor, tp)
    return repadded(source, rows, vocabulary)
