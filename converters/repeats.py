"""Does a save repeat the content of an older one of the same job?

An optimizer changes every weight, master and moment at every step. A save of another step with the
same numbers wrote stale memory, as asynchronous ones did from buffers that were not ready
(NVIDIA-NeMo/RL, issues 3312 and 4183). A few numbers of each tensor are compared; only on equality
the whole.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from scalai.converters.checkpoint import MAIN, PARAM, STEP, Checkpoint, ReadOptions
from scalai.converters.consistency import equal_tensors
from scalai.converters.layouts import open_checkpoint
from scalai.converters.recorded import parts_of
from scalai.converters.source_files import SourceFiles
from scalai.core.errors import ScalaiError
from scalai.core.tensors.collection import split_name
from scalai.core.tensors.dtypes import HALF
from scalai.core.tensors.region import Box

MAX_SAVES = 8
"""The newest ones are compared."""
SAMPLED = 64
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
    files = SourceFiles(checkpoint.directory)
    for row in np.flatnonzero(at_origin).tolist():
        tensor, box = collection.box(row)
        if tensor.name in moving and tensor.name not in found:
            shape = (*(1 for _ in box.shape[:-1]), *(min(n, SAMPLED) for n in box.shape[-1:]))
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
