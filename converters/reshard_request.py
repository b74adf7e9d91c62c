"""A person's request for one conversion, made into a checked ``engine.Conversion``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from scalai.converters.between.adapting import TargetRequest, adapted
from scalai.converters.between.mapping import named_mapping
from scalai.converters.between.reference import read_reference
from scalai.converters.checkpoint import Checkpoint, ReadOptions, Values, WriteOptions
from scalai.converters.engine import WHOLE, Conversion, Limits, table_bytes_of
from scalai.converters.journal import RunPart
from scalai.converters.layouts import READ_ALONE, layout_named, open_checkpoint
from scalai.converters.megatron.model_limits import limits_of
from scalai.converters.megatron.modules import expert_of
from scalai.converters.merging import merged, with_model_files
from scalai.converters.suspects import find_suspects
from scalai.converters.trainer_files import accompanied
from scalai.core.degrees.degrees import Degrees, refusal
from scalai.core.errors import RefusedError
from scalai.store.pool import available_memory

AXES = ("tp", "pp", "dp", "vpp", "ep", "etp", "cp")
FALLBACK_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True)
class ReshardRequest:
    """The request, as given.

    Attributes:
        degrees: Degrees of the target by axis; an axis without one keeps the source's.
        read: Options for the source.
        layout: Name of the target's layout; None: the source's, or that in its place.
        is_split: Whether ranks will share the optimizer's state; None: as in the source.
        args_from: Another checkpoint of the target's job, or a TOML file about it.
        mapping: Name or path of another framework's names.
        adapter: Directory of a PEFT adapter, to be merged into the source.
        repad: Rows of the vocabulary; 0: as the target's framework pads; None: unchanged.
        memory_bytes: Memory of the run; None: a quarter of the free memory.
    """

    source: Path
    destination: Path
    degrees: Mapping[str, int] = field(default_factory=dict)
    read: ReadOptions = field(default_factory=ReadOptions)
    layout: str | None = None
    is_split: bool | None = None
    args_from: Path | None = None
    mapping: str | None = None
    adapter: Path | None = None
    repad: int | None = None
    memory_bytes: int | None = None
    workers: int = 1
    part: RunPart = WHOLE
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class PreparedReshard:
    """The source as it was found, the target's degrees, and the conversion; nothing is written."""

    found: Checkpoint
    degrees: Mapping[str, int]
    conversion: Conversion

    def notes(self) -> Iterator[str]:
        """Yield a line for each loss, invention and suspect tensor. Reads starts of tensors."""
        yield from self.conversion.target.notes
        yield from find_suspects(self.conversion.source, is_sample=True)


def prepare(request: ReshardRequest) -> PreparedReshard:
    """Read the source's metadata and lay out the target.

    Raises:
        UsageError, RefusedError: The request cannot be met; names the reason and the way out.
    """
    reference = None
    if request.args_from:
        reference = read_reference(request.args_from, replace(request.read, iteration=None))
    order = None if reference is None else reference.order
    found = open_checkpoint(request.source, replace(request.read, order=order))
    if request.adapter is not None:
        found = merged(found, request.adapter)
    layout = layout_named(request.layout or READ_ALONE.get(found.layout, found.layout))
    mapping = named_mapping(request.mapping) if request.mapping else None
    wanted = TargetRequest(
        layout.name, mapping, reference, request.repad, request.degrees.get("tp")
    )
    source, values = adapted(found, wanted)
    degrees = _target_degrees(source, request.degrees)
    _check_degrees(source, degrees, values)
    options = WriteOptions(degrees, request.is_split, values, request.read.cuts)
    target = accompanied(source, layout.lay_out(source, options), degrees)
    if request.adapter is not None:
        target = with_model_files(found, target)
    free = available_memory(unknown=4 * FALLBACK_MEMORY)
    overlays = [overlay for file in source.placed.files for overlay in file.overlays]
    adapter_bytes = sum(overlay.left.nbytes + overlay.right.nbytes for overlay in overlays)
    tables = table_bytes_of(source, target) + adapter_bytes
    limits = Limits(free // 4, request.workers, tables)
    memory = request.memory_bytes
    if memory is None:
        memory = max(limits.memory_bytes, limits.least_bytes)
    conversion = Conversion(
        source, target, request.destination, replace(limits, memory_bytes=memory),
        overwrite=request.overwrite, part=request.part,
    )  # fmt: skip
    return PreparedReshard(found, degrees, conversion)


def _target_degrees(source: Checkpoint, given: Mapping[str, int]) -> dict[str, int]:
    degrees = {**source.values.degrees, **given}
    if "pp" in given and "vpp" not in given:
        degrees["vpp"] = 1
    names = (tensor.name for tensor in source.placed.collection.tensors)
    if "etp" in degrees and "etp" not in given and all(expert_of(name) is None for name in names):
        degrees["etp"] = degrees.get("tp", 1)  # Megatron states it of models without experts too
    return degrees


def _check_degrees(
    source: Checkpoint, degrees: Mapping[str, int], reference: Values | None
) -> None:
    """Raise ``RefusedError`` where the model cannot be cut so."""
    known = {axis: degrees.get(axis, 1) for axis in ("tp", "pp", "vpp", "cp", "ep")}
    # Without --dp enough ranks for the experts: the batch is the job's, not the checkpoint's.
    ranks = degrees.get("dp") or known["ep"] * degrees.get("etp", 1)
    values = source.values if source.values.arguments or reference is None else reference
    limits = limits_of(values, source.placed.collection.tensors)
    limits = replace(limits, expert_tp=degrees.get("etp", limits.expert_tp))
    reason = refusal(Degrees(dp=ranks, **known), limits)
    if reason is None:
        return
    rows, tp = limits.padded_vocab_size, known["tp"]
    if rows is not None and rows % tp and f"vocabulary of {rows} rows" in reason:
        raise RefusedError(
            f"tp={tp} does not divide the padded vocabulary of {rows} rows. Give --repad, which "
            "pads it anew (losses will differ), or choose another --tp."
        )
    raise RefusedError(f"{reason}. Choose other degrees.")
