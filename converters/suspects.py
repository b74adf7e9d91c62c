"""Warnings about a whole checkpoint: tensors of nothing but NaN, denormal numbers or zeros; moments
and steps that do not belong together; ownership that no comparison of bytes can prove.

Such tensors are legal, and travel as they are. Denormal moments of the optimizer are not named:
squares of small gradients are denormal.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from scalai.converters.checkpoint import (
    CONFIG,
    MAIN,
    PARAM,
    Checkpoint,
    PlacedTensors,
    parameters_of,
)
from scalai.converters.opening import layers_of, short_layers
from scalai.converters.sense import find_nonsense
from scalai.converters.source_files import SourceFiles
from scalai.core.errors import RefusedError
from scalai.core.tensors.dtypes import Bits
from scalai.core.tensors.region import Box
from scalai.store.files import blocks

PART_ELEMENTS = 1 << 20
"""Elements of the next look, if all before them were suspect."""
FIRST_ELEMENTS = 256
"""Elements of the first look: enough to clear nearly every tensor."""

NAN, DENORMAL, ZEROS = "NaN", "denormal numbers and zeros", "zeros"


@dataclass(frozen=True, slots=True)
class _Float:
    """The bits of a number's exponent and of its mantissa."""

    exponent: int
    mantissa: int


_FLOATS = {
    "F64": _Float(0x7FF << 52, (1 << 52) - 1), "F32": _Float(0xFF << 23, (1 << 23) - 1),
    "BF16": _Float(0xFF << 7, (1 << 7) - 1), "F16": _Float(0x1F << 10, (1 << 10) - 1),
}  # fmt: skip


def guess_text(checkpoint: Checkpoint) -> str:
    """Name the optimizer's states given to parameters by order alone."""
    first = " and ".join(sorted(checkpoint.guessed)[:2])
    return (
        f"nothing proves which of the optimizer's states belong to {len(checkpoint.guessed)} "
        f"parameters, as {first}: they are alike, and taken in the module's order"
    )


def refuse_guessed(checkpoint: Checkpoint, way_out: str) -> None:
    """Raise ``RefusedError`` if the optimizer's states would go to parameters by a guess: no proof
    finds a wrong one."""
    if checkpoint.guessed:
        raise RefusedError(
            f"{checkpoint.directory} does not name the optimizer's parameters, and "
            f"{guess_text(checkpoint)}. {way_out}"
        )


def find_suspects(checkpoint: Checkpoint, *, is_sample: bool = False) -> Iterator[str]:
    """Yield a line for each suspect tensor and for each guess. Reads only the start of the others.

    ``is_sample``: look at the start of every piece alone.
    """
    if checkpoint.guessed:
        yield guess_text(checkpoint)
    yield from _missing(checkpoint)
    yield from find_nonsense(checkpoint)
    placed = checkpoint.placed
    files = SourceFiles(checkpoint.directory, is_sampled=is_sample)
    rows_of: dict[int, list[int]] = {}
    for row, number in enumerate(placed.collection.tensor.tolist()):
        rows_of.setdefault(number, []).append(row)
    verb = "begins with" if is_sample else "holds"
    for number, rows in rows_of.items():
        tensor = placed.collection.tensors[number]
        if tensor.dtype not in _FLOATS or not tensor.numel:
            continue
        parts = (part for row in rows for part in _parts(files, placed, row, is_sample))
        what = _suspicion(parts, _FLOATS[tensor.dtype])
        is_weight = tensor.name.startswith((f"{PARAM}/", f"{MAIN}/"))
        # An embedding's first row is often zeros.
        is_empty = what == ZEROS and is_weight and len(tensor.shape) > 1 and not is_sample
        if what == NAN or (what == DENORMAL and is_weight) or is_empty:
            yield f"{tensor.name} {tensor.dtype}{list(tensor.shape)} {verb} nothing but {what}"


def _missing(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield tensors a model seems to lack, if no list of its parameters says it."""
    if checkpoint.values.framework == "deepspeed":
        return
    names = [*parameters_of(checkpoint)]
    short = next(short_layers(names, is_usual=True), None)
    if short is not None:
        yield f"{short} is not there, and other layers have it"
    config = checkpoint.values.extra.get(CONFIG, {})
    count = config.get("num_hidden_layers", config.get("n_layer"))
    most = max(map(len, layers_of(names).values()), default=0)
    if isinstance(count, int) and 0 < most < count:
        yield f"there are {most} layers, and config.json says {count}"


def _suspicion(parts: Iterator[Bits], form: _Float) -> str | None:
    """Return the suspect kind of all elements; None: they are fine."""
    is_nan = is_tiny = True
    is_zero = True
    for bits in parts:
        exponent, mantissa = bits & form.exponent, (bits & form.mantissa) != 0
        is_nan &= bool(((exponent == form.exponent) & mantissa).all())
        is_tiny &= not exponent.any()
        is_zero &= not mantissa.any()
        if not is_nan and not is_tiny:
            return None
    if is_nan:
        return NAN
    return ZEROS if is_zero else DENORMAL


def _parts(files: SourceFiles, placed: PlacedTensors, row: int, is_sample: bool) -> Iterator[Bits]:
    """Yield the start of a piece, and then all of it in parts."""
    _, box = placed.collection.box(row)
    if not box.numel:
        return
    sizes = (FIRST_ELEMENTS,) if is_sample else (FIRST_ELEMENTS, PART_ELEMENTS)
    for size in sizes:
        for block in blocks(box.shape, size):
            offset = tuple(a + b for a, b in zip(box.offset, block.offset, strict=True))
            part = Box(offset, block.shape)
            yield files.view(placed, row, part)
            if size == FIRST_ELEMENTS:
                break
