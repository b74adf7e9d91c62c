"""Is a checkpoint whole and in agreement with itself; and where do two differ?

Readers have already refused missing, truncated, foreign and mixed files.

A save may also repeat the content of an older one of the same job. An optimizer changes every
weight, master and moment at every step. A save of another step with the same numbers wrote stale
memory, as asynchronous ones did from buffers that were not ready (NVIDIA-NeMo/RL, issues 3312 and
4183). A few numbers of each tensor are compared; only on equality the whole.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import MAIN, PARAM, STEP, Checkpoint, PlacedTensors, ReadOptions
from scalai.converters.checksums import check_checksums
from scalai.converters.destination import check_auxiliary
from scalai.converters.forked import map_forked
from scalai.converters.layouts import open_checkpoint
from scalai.converters.recorded import (
    check_recorded,
    check_report,
    checked_fingerprints,
    fingerprints,
    parts_of,
    recorded_fingerprints,
    row_batches,
    row_fingerprints,
)
from scalai.converters.source_files import SourceFiles, rounds_to
from scalai.converters.work import HERE
from scalai.core.errors import ProofError, ScalaiError
from scalai.core.tensors.collection import MAX_NDIM, Collection, Tensor, split_name
from scalai.core.tensors.dtypes import HALF, Bits
from scalai.core.tensors.fingerprint import tensor_fingerprints
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import Copies, plan
from scalai.core.tensors.region import Box, box_text, whole

SAMPLED = 256
"""Elements of a row in a sample."""
REPLICATED = 1 << 16
"""The same for replicas: enough for tensors that tensor-parallel ranks share, as norms."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Unequal elements of a tensor, within a box of it."""

    tensor: str
    box: Box
    count: int

    def __str__(self) -> str:
        return f"{self.tensor}{box_text(self.box)}: {self.count} elements differ"


def verify(checkpoint: Checkpoint, workers: int) -> Mapping[str, int]:
    """Check one checkpoint: checksums, coverage, replicas, second copies, masters against weights,
    and the fingerprints of a conversion's report, also of files without tensors.

    Returns:
        The fingerprints of its tensors.

    Raises:
        LayoutError: It is not whole.
        ProofError: It contradicts itself or its records; names tensors and index ranges.
    """
    check_checksums(checkpoint, workers)
    found = checked_fingerprints(checkpoint, workers)
    _refuse(checkpoint, _duplicate_differences(checkpoint, workers))
    _refuse(checkpoint, _master_differences(checkpoint, workers))
    check_report(checkpoint, found)
    check_auxiliary(checkpoint)
    return found


def check_samples(checkpoint: Checkpoint) -> None:
    """Compare replicas and second copies with their tensors, and masters with weights, at the start
    of every piece: a mixed or wrongly saved checkpoint is found before its conversion. Pieces whose
    recorded fingerprints do not add up to their tensors' are compared whole.

    Raises:
        ProofError: They differ; names tensors and index ranges.
    """
    placed = checkpoint.placed
    check_recorded(checkpoint, recorded_fingerprints(checkpoint)[1], workers=0)
    _check_replicas(checkpoint)
    sample = replace(
        checkpoint,
        duplicates=None
        if checkpoint.duplicates is None
        else _starts(checkpoint.duplicates, REPLICATED),
    )
    _refuse(checkpoint, _duplicate_differences(sample, workers=0))
    _refuse(
        checkpoint, _master_differences(checkpoint, workers=0, masters=_starts(placed, SAMPLED))
    )


def _check_replicas(checkpoint: Checkpoint) -> None:
    """Compare the starts of pieces of equal boxes. Raises ``ProofError`` if two differ."""
    columns = checkpoint.placed.collection
    boxes = np.concatenate([columns.tensor[:, None], columns.offset, columns.shape], axis=1)
    _, number, count = np.unique(boxes, axis=0, return_inverse=True, return_counts=True)
    starts = _starts(checkpoint.placed, REPLICATED)
    rows = np.flatnonzero(count[number.ravel()] > 1).tolist()
    if rows:
        found = row_fingerprints(replace(checkpoint, placed=starts), rows, workers=0)
        tensor_fingerprints(starts.collection.select(np.array(rows)), found)


def _refuse(checkpoint: Checkpoint, differences: Iterable[Difference]) -> None:
    problems = [str(difference) for difference in differences]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ProofError(
            f"{checkpoint.directory} contradicts itself: {'; '.join(problems[:5])}{more}. Masters "
            "that are not the weights mean that files of two checkpoints are mixed, that it is "
            "damaged, or was saved wrongly (Megatron's fully_reshardable with several buckets, "
            "0.15.3 to 0.19): use another. Copies that differ mean the same, or that a parameter "
            "which DeepSpeed's tensor-parallel ranks cut or average is said to be whole on each."
        )


def compare(one: Checkpoint, two: Checkpoint, workers: int) -> Iterator[str]:
    """Yield a line for each differing tensor: by name, dtype, shape, or index ranges. Every element
    is compared; the fingerprints find differing replicas (``ProofError``)."""
    left = {tensor.name: tensor for tensor in one.placed.collection.tensors}
    right = {tensor.name: tensor for tensor in two.placed.collection.tensors}
    for name in sorted(left.keys() ^ right.keys()):
        where = one.directory if name in left else two.directory
        yield f"{name} is in {where} only"
    both = sorted(left.keys() & right.keys())
    for name in both:
        if left[name] != right[name]:
            yield (
                f"{name} is {left[name].dtype}{list(left[name].shape)} and "
                f"{right[name].dtype}{list(right[name].shape)}"
            )
    alike = {name for name in both if left[name] == right[name]}
    prints = fingerprints(one, workers), fingerprints(two, workers)
    placed = _only(two.placed, alike)
    unequal = list(_differences(one, two.directory, placed, workers))
    yield from map(str, unequal)
    named = {difference.tensor for difference in unequal}
    for name in sorted(alike - named):
        if prints[0][name] != prints[1][name]:
            yield f"{name} has pieces that overlap and differ, or the memory is not sound"


def copy_differences(checkpoint: Checkpoint, name: str, owner: str) -> Iterator[Difference]:
    """Yield differences between a parameter and its original of the same shape; all of it if their
    dtypes differ."""
    tensors = {tensor.name: tensor for tensor in checkpoint.placed.collection.tensors}
    mine, theirs = tensors[f"{PARAM}/{name}"], tensors[f"{PARAM}/{owner}"]
    if mine.dtype != theirs.dtype:
        yield Difference(mine.name, whole(mine.shape), mine.numel)
        return
    rows = _only(checkpoint.placed, [mine.name])
    boxes = map(rows.collection.box, range(len(rows.collection)))
    collection = Collection.of((theirs, box) for _, box in boxes)
    renamed = replace(rows, collection=collection)
    yield from _differences(checkpoint, checkpoint.directory, renamed, workers=0)


def equal_tensors(one: Checkpoint, two: Checkpoint, names: Iterable[str], workers: int) -> set[str]:
    """Return the named tensors that are alike in two checkpoints, byte by byte."""
    left = {tensor.name: tensor for tensor in one.placed.collection.tensors}
    right = {tensor.name: tensor for tensor in two.placed.collection.tensors}
    alike = {name for name in names if name in left and left[name] == right.get(name)}
    found = _differences(one, two.directory, _only(two.placed, alike), workers)
    return alike - {difference.tensor for difference in found}


def _only(placed: PlacedTensors, names: Iterable[str]) -> PlacedTensors:
    """Return the rows of the named tensors, with a table of these alone: in another model some have
    other shapes."""
    wanted = set(names)
    collection = placed.collection
    is_wanted = np.array([tensor.name in wanted for tensor in collection.tensors], dtype=bool)
    rows = np.flatnonzero(is_wanted[collection.tensor]) if len(collection) else collection.tensor
    number = np.cumsum(is_wanted) - 1
    own = Collection(
        tuple(tensor for tensor in collection.tensors if tensor.name in wanted),
        number[collection.tensor[rows]].astype(collection.tensor.dtype),
        collection.offset[rows],
        collection.shape[rows],
    )
    return PlacedTensors(
        own, placed.file[rows], placed.begin[rows], placed.stride[rows],
        placed.files, placed.rounded()[rows],
    )  # fmt: skip


def _starts(placed: PlacedTensors, elements: int) -> PlacedTensors:
    """Return the rows cut to the first elements of their first line."""
    shape = np.minimum(placed.collection.shape, 1)
    shape[:, -1] = np.minimum(placed.collection.shape[:, -1], elements)
    collection = replace(placed.collection, shape=shape)
    return replace(placed, collection=collection)


def _duplicate_differences(checkpoint: Checkpoint, workers: int) -> Iterator[Difference]:
    if checkpoint.duplicates is not None:
        yield from _differences(checkpoint, checkpoint.directory, checkpoint.duplicates, workers)


def _master_differences(
    checkpoint: Checkpoint, workers: int, masters: PlacedTensors | None = None
) -> Iterator[Difference]:
    """Yield masters (of these rows, a sample, or all) that do not round to the weights."""
    collection = checkpoint.placed.collection
    weights = {t.name: t for t in collection.tensors if t.name.startswith(f"{PARAM}/")}
    names = {
        tensor.name
        for tensor in collection.tensors
        if tensor.name.startswith(f"{MAIN}/") and _weight(tensor.name) in weights
    }
    is_sampled = masters is not None
    masters = _only(masters or checkpoint.placed, names)
    as_weights = [
        (weights[_weight(tensor.name)], box)
        for tensor, box in map(masters.collection.box, range(len(masters.collection)))
    ]
    renamed = PlacedTensors(
        Collection.of(as_weights), masters.file, masters.begin, masters.stride, masters.files
    )
    yield from _differences(
        checkpoint, checkpoint.directory, renamed, workers, masters=masters, is_sampled=is_sampled
    )


def _weight(name: str) -> str:
    return f"{PARAM}/{split_name(name)[1]}"


def _differences(
    one: Checkpoint,
    directory: Path,
    two: PlacedTensors,
    workers: int,
    *,
    masters: PlacedTensors | None = None,
    is_sampled: bool = False,
) -> Iterator[Difference]:
    """Yield differences between the rows of ``two`` and the same boxes in ``one``.

    ``masters``: the same rows with the masters' dtype; they must round to the content of ``one``.
    """
    if not len(two.collection):
        return
    copies = plan([Holder(HERE, one.placed.collection)], [Holder(HERE, two.collection)]).copies
    files = (
        SourceFiles(one.directory, is_sampled=is_sampled),
        SourceFiles(directory, is_sampled=is_sampled),
    )

    def compare_copies(numbers: range) -> list[Difference]:
        return [
            difference
            for number in numbers
            for difference in _compare_copy(files, one.placed, two, masters, copies, number)
        ]

    found: dict[str, list[Difference]] = {}
    for _, differences in map_forked(compare_copies, row_batches(len(copies)), workers):
        for difference in differences:
            found.setdefault(difference.tensor, []).append(difference)
    for name in sorted(found):
        yield _united(found[name])


def _compare_copy(
    files: tuple[SourceFiles, SourceFiles],
    one: PlacedTensors,
    two: PlacedTensors,
    masters: PlacedTensors | None,
    copies: Copies,
    number: int,
) -> Iterator[Difference]:
    row = int(copies.target_row[number])
    tensor, box = two.collection.box(row)
    skip = MAX_NDIM - len(box.shape)
    copied = Box(
        tuple(copies.offset[number, skip:].tolist()), tuple(copies.shape[number, skip:].tolist())
    )
    for part in parts_of(copied):
        left = files[0].view(one, int(copies.source_row[number]), part)
        if masters is None:
            right = files[1].view(two, row, part)
            unequal = np.asarray(left != right)
        else:
            right = files[1].view(masters, row, part)
            unequal = _unrounded(left, tensor, right, masters.collection.box(row)[0])
        if unequal.any():
            yield Difference(tensor.name, _bounds(unequal, part), int(unequal.sum()))


def _unrounded(
    weights: Bits, tensor: Tensor, masters: Bits, master: Tensor
) -> npt.NDArray[np.bool_]:
    """Return the masters that do not round to weights, [weights.shape]; all if some do not."""
    is_equal = rounds_to(masters.tobytes(), master.dtype, weights.tobytes(), tensor.dtype)
    return np.full(weights.shape, not is_equal)


def _bounds(unequal: npt.NDArray[np.bool_], part: Box) -> Box:
    low, high = [], []
    for axis in range(unequal.ndim):
        others = tuple(other for other in range(unequal.ndim) if other != axis)
        hits = np.flatnonzero(unequal.any(axis=others))
        low.append(part.offset[axis] + int(hits[0]))
        high.append(part.offset[axis] + int(hits[-1]) + 1)
    return Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))


def _united(differences: Sequence[Difference]) -> Difference:
    boxes = [difference.box for difference in differences]
    low = tuple(min(at) for at in zip(*(box.offset for box in boxes), strict=True))
    ends = ([a + n for a, n in zip(box.offset, box.shape, strict=True)] for box in boxes)
    high = tuple(max(at) for at in zip(*ends, strict=True))
    extent = tuple(b - a for a, b in zip(low, high, strict=True))
    return Difference(differences[0].tensor, Box(low, extent), sum(d.count for d in differences))


MAX_SAVES = 8
"""The newest ones are compared."""
SAMPLED_ELEMENTS = 64
NAMED = 5

_SAVE = re.compile(r"(iter_|global_step)(\d{1,18})")


def saves_beside(checkpoint: Checkpoint) -> list[Path]:
    """Return the older saves beside a checkpoint, the oldest first."""
    own = _SAVE.fullmatch(checkpoint.directory.name)
    if own is None:
        return []
    found = {}
    for path in checkpoint.directory.parent.iterdir():
        other = _SAVE.fullmatch(path.name)
        if other and other[1] == own[1] and int(other[2]) < int(own[2]) and path.is_dir():
            found[int(other[2])] = path
    return [found[step] for step in sorted(found)][-MAX_SAVES + 1 :]


def find_repeats(checkpoint: Checkpoint, options: ReadOptions, workers: int) -> Iterator[str]:
    """Yield a line for each save that repeats tensors of an older one, among a checkpoint and its
    neighbours, and for each unreadable one."""
    opened: list[Checkpoint] = []
    for path in saves_beside(checkpoint):
        try:
            opened.append(open_checkpoint(path, options))
        except ScalaiError as error:
            yield f"{path} is not compared: {error}"
    opened.append(checkpoint)
    samples = [_samples(one) for one in opened]
    for newer in range(len(opened)):
        left = set(samples[newer])
        for older in reversed(range(newer)):
            if opened[newer].values.step == opened[older].values.step:
                continue
            alike = {n for n in left & samples[older].keys()
                     if _starts_alike(samples[newer][n], samples[older][n])}  # fmt: skip
            equal = equal_tensors(opened[newer], opened[older], alike, workers)
            repeated = sorted(name for name in equal if not _is_uniform(opened[newer], name))
            left -= set(repeated)
            if repeated:
                yield _line(opened[newer], opened[older], repeated, len(samples[newer]))


def _line(newer: Checkpoint, older: Checkpoint, names: Sequence[str], of: int) -> str:
    named = ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
    is_weights = all(name.startswith((f"{PARAM}/", f"{MAIN}/")) for name in names)
    but = ", unless the learning rate was 0" if is_weights else ""
    return (
        f"{newer.directory.name} repeats {len(names)} of {of} trained tensors of "
        f"{older.directory.name}: {named}. Each step changes them{but}, so this save has memory of "
        f"before. Go on from {older.directory.name}, or from another one that repeats nothing."
    )


def _samples(checkpoint: Checkpoint) -> dict[str, bytes]:
    collection = checkpoint.placed.collection
    moving = _moving({tensor.name: tensor.dtype for tensor in collection.tensors})
    at_origin = (collection.offset == 0).all(axis=1) & (collection.numel() > 0)
    found: dict[str, bytes] = {}
    files = SourceFiles(checkpoint.directory, is_sampled=True)
    for row in np.flatnonzero(at_origin).tolist():
        tensor, box = collection.box(row)
        if tensor.name in moving and tensor.name not in found:
            shape = (
                *(1 for _ in box.shape[:-1]),
                *(min(n, SAMPLED_ELEMENTS) for n in box.shape[-1:]),
            )
            part = Box(box.offset, shape)
            found[tensor.name] = files.view(checkpoint.placed, row, part).tobytes()
    return found


def _moving(dtypes: Mapping[str, str]) -> set[str]:
    """Return the tensors changed by every step: moments, and weights with moments. 16-bit weights
    may stay while their masters move."""
    moments = {
        name for name in dtypes if not name.startswith((f"{PARAM}/", f"{MAIN}/", f"{STEP}/"))
    }
    trained = {split_name(name)[1] for name in moments}
    weights = {
        name
        for name, dtype in dtypes.items()
        if name.startswith((f"{PARAM}/", f"{MAIN}/"))
        and split_name(name)[1] in trained
        and dtype not in HALF
    }
    return moments | weights


def _starts_alike(one: bytes, two: bytes) -> bool:
    size = min(len(one), len(two))
    return one[:size] == two[:size]


def _is_uniform(checkpoint: Checkpoint, name: str) -> bool:
    """Whether all elements of a tensor are one number, as moments without gradients are."""
    placed, files = checkpoint.placed, SourceFiles(checkpoint.directory)
    number = next(n for n, t in enumerate(placed.collection.tensors) if t.name == name)
    first = None
    for row in np.flatnonzero(placed.collection.tensor == number).tolist():
        for part in parts_of(placed.collection.box(row)[1]):
            bits = files.view(placed, row, part)
            if not bits.size:
                continue
            first = bits.flat[0] if first is None else first
            if (bits != first).any():
                return False
    return True
