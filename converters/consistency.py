"""Is a checkpoint whole and in agreement with itself; and where do two differ?

Readers have already refused missing, truncated, foreign and mixed files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import MAIN, PARAM, Checkpoint, PlacedTensors
from scalai.converters.checksums import check_checksums
from scalai.converters.destination import check_auxiliary
from scalai.converters.forked import map_forked
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
from scalai.core.errors import ProofError
from scalai.core.tensors.collection import MAX_NDIM, Collection, Tensor, split_name
from scalai.core.tensors.dtypes import Bits
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
    """Yield masters (of these rows, or all) that do not round to the weights."""
    collection = checkpoint.placed.collection
    weights = {t.name: t for t in collection.tensors if t.name.startswith(f"{PARAM}/")}
    names = {
        tensor.name
        for tensor in collection.tensors
        if tensor.name.startswith(f"{MAIN}/") and _weight(tensor.name) in weights
    }
    masters = _only(masters or checkpoint.placed, names)
    as_weights = [
        (weights[_weight(tensor.name)], box)
        for tensor, box in map(masters.collection.box, range(len(masters.collection)))
    ]
    renamed = PlacedTensors(
        Collection.of(as_weights), masters.file, masters.begin, masters.stride, masters.files
    )
    yield from _differences(checkpoint, checkpoint.directory, renamed, workers, masters=masters)


def _weight(name: str) -> str:
    return f"{PARAM}/{split_name(name)[1]}"


def _differences(
    one: Checkpoint,
    directory: Path,
    two: PlacedTensors,
    workers: int,
    *,
    masters: PlacedTensors | None = None,
) -> Iterator[Difference]:
    """Yield differences between the rows of ``two`` and the same boxes in ``one``.

    ``masters``: the same rows with the masters' dtype; they must round to the content of ``one``.
    """
    if not len(two.collection):
        return
    copies = plan([Holder(HERE, one.placed.collection)], [Holder(HERE, two.collection)]).copies
    files = SourceFiles(one.directory), SourceFiles(directory)

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
