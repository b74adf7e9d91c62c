"""Facts behind the order of Megatron-LM's training data, to notice changed data between rounds.

Source: ``get_blend_and_blend_per_split`` of megatron/training/utils.py, ``get_blend_from_list`` of
megatron/core/datasets/utils.py, ``parse_and_normalize_split`` of
megatron/core/datasets/blended_megatron_dataset_config.py (0.16).
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from scalai.core.jsonable import Json

CONTENT = "content"
PIECES, PIECE_BYTES = 4, 4096
"""How much of each ``.bin`` is looked at, from its first to its last byte."""
LOOKED_AT = ("_MMapBinReader", "_FileBinReader", "SourceReader", "MountedReader")
"""Readers with cheap reads of a few bytes: Megatron's own, and Scalai's."""
_IN_A_TREE = re.compile(r".*/dataset/([^/]+)/source/")
PARTS = "samples of each part, in the whole training"
DIGITS = 9
"""To so many digits weights and shares are compared."""


def facts_of(flags: Mapping[str, Any], dataset: Any, size: int) -> dict[str, Json]:
    """Return the facts of newly built training data.

    A ``GPTDataset`` shuffles all its epochs together: a longer training with more epochs has
    another size, and another order. A blend of such keeps its order as it grows.

    Args:
        flags: Megatron-LM's parsed arguments. Data may have moved into another folder.
        dataset: The built data set; None: unknown.
        size: Its samples.
    """
    facts: dict[str, Json] = {name: flags.get(name) for name in ("seed", "dataloader_type")}
    facts["split"] = _split(flags.get("split"))
    with suppress(OSError, ValueError, KeyError):  # Megatron-LM has read them, or says why not
        facts["blend"] = _blend(stated_data(flags))
    if flags.get("mock_data"):
        return facts
    if dataset is None:
        wanted = flags.get("train_samples") or flags.get("train_iters")
        return {**facts, f"samples, for a training of {wanted}": size}
    # RandomSeedDataset has a data set inside, a GPTDataset its files.
    inside = getattr(dataset, "dataset", None)
    whole = inside if hasattr(inside, "dataset") or hasattr(inside, "datasets") else dataset
    parts = getattr(whole, "datasets", [whole])
    return {**facts, **_contents(parts), PARTS: [len(part) for part in parts]}


def _contents(parts: Sequence[Any]) -> dict[str, Json]:
    """Return the digests of each part's content, as far as known."""
    files = [part for part in parts if hasattr(getattr(part, "dataset", None), "path_prefix")]
    names = _names([part.dataset.path_prefix for part in files])
    found = (
        (f"{CONTENT} of {name}", _content(part)) for name, part in zip(names, files, strict=True)
    )
    return {fact: content for fact, content in found if content is not None}


def _content(part: Any) -> str | None:
    """Return a digest of a few pieces of a ``GPTDataset``'s tokens and of their number: the same at
    any place, by any reader. None: unknown. Raises ``OSError``.

    Source: ``IndexedDataset`` of megatron/core/datasets/indexed_dataset.py (0.14 to 0.20).
    """
    reader, index = part.dataset.bin_reader, part.dataset.index
    if type(reader).__name__ not in LOOKED_AT or not len(index.sequence_pointers):
        return None
    size = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
    if not size:
        return None
    piece = min(PIECE_BYTES, size)
    digest = hashlib.sha256(str(size).encode())
    for number in range(PIECES):
        digest.update(reader.read(np.uint8, piece, (size - piece) * number // (PIECES - 1)))
    return digest.hexdigest()[:16]


def stated_data(flags: Mapping[str, Any]) -> Sequence[str]:
    """Return weights and prefixes of the training data, as they are stated."""
    if (path := flags.get("data_args_path")) is not None:
        return Path(path).read_text().split()
    if (path := flags.get("per_split_data_args_path")) is not None:
        stated = json.loads(Path(path).read_text())["train"]
        return stated.split() if isinstance(stated, str) else list(map(str, stated))
    return flags.get("data_path") or flags.get("train_data_path") or ()


def _blend(words: Sequence[str]) -> list[Json]:
    """Return the prefixes without common folders, and their shares, None for shares by size."""
    weights: list[float] | None = None
    if len(words) % 2 == 0:
        with suppress(ValueError):
            weights = [float(word) for word in words[::2]]
    prefixes = list(words if weights is None else words[1::2])
    shares: list[Json] = [None] * len(prefixes)
    if weights is not None and len(weights) > 1:
        shares = [round(weight / (sum(weights) or 1.0), DIGITS) for weight in weights]
    return [[name, share] for name, share in zip(_names(prefixes), shares, strict=True)]


def _names(prefixes: Sequence[str]) -> list[str]:
    """Return the shortest distinct ends of paths. In a job's tree a source is ``<name>/…``, as
    before it was mounted."""
    parts = [Path(_IN_A_TREE.sub(r"/\1/", prefix)).parts for prefix in prefixes]
    most = max(map(len, parts), default=0)
    kept = next(
        (k for k in range(1, most) if len({p[-k:] for p in parts}) == len(set(parts))), most
    )
    return ["/".join(p[-kept:]) for p in parts]


def _split(stated: str | None) -> Json:
    numbers = [float(word) for word in re.findall(r"[.0-9]+", stated or "")]
    numbers += [0.0] * (3 - len(numbers))
    return [round(number / (sum(numbers) or 1.0), DIGITS) for number in numbers]
