"""A checkpoint's tensors under the names and dtypes that an engine has.

Names of parameters are the same. Kinds and dtypes differ with the precision: fp32 weights are their
own masters (``param``), 16-bit ones have masters beside them (``main``). So what an engine computes
with comes, where its dtype is not that of the checkpoint, from the fp32 values, rounded where it is
16 bits: as ZeRO's own load makes the weights from the masters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import MAIN, PARAM, Placed
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Collection, Tensor, split_name
from scalai.core.tensors.dtypes import HALF

NAMED = 5
"""Tensors named in an error."""

_FP32 = "F32"


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor of a checkpoint that fills one of an engine; rounded to that one's dtype."""

    tensor: Tensor
    is_rounded: bool = False


def origins(source: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Origin]:
    """Return by an engine's tensor what fills it. Those that nothing fills are left out.

    Raises:
        RefusedError: Shapes differ, or dtypes that do not follow from fp32.
    """
    found, unfit = {}, []
    for name, tensor in wanted.items():
        origin = _origin(source, tensor)
        if origin is None:
            continue
        found[name] = origin
        if origin.tensor.shape != tensor.shape:
            unfit.append((origin.tensor, tensor))
        elif origin.tensor.dtype != tensor.dtype and not origin.is_rounded:
            unfit.append((origin.tensor, tensor))
    if unfit:
        texts = (
            f"{saved.name} {saved.dtype}{list(saved.shape)} for {tensor.name} "
            f"{tensor.dtype}{list(tensor.shape)}"
            for saved, tensor in unfit
        )
        raise RefusedError(
            f"the checkpoint holds {listed(texts)}. Build the model with the sizes that were "
            "saved; where it has no fp32 values of a tensor, also with its precision."
        )
    return found


def fitted(source: Placed, found: Mapping[str, Origin], wanted: Mapping[str, Tensor]) -> Placed:
    """Return the pieces of what fills an engine's tensors, under its names and dtypes.

    Pieces that lie there rounded already stay as they are.
    """
    number = {tensor.name: at for at, tensor in enumerate(source.collection.tensors)}
    by_tensor = np.argsort(source.collection.tensor, kind="stable")
    ends = np.searchsorted(source.collection.tensor[by_tensor], np.arange(len(number) + 1))
    rows, of, is_rounded = [np.zeros(0, np.int64)], [0], [False]
    for origin in found.values():
        at = number[origin.tensor.name]
        rows.append(by_tensor[ends[at] : ends[at + 1]])
        of.append(len(rows[-1]))
        is_rounded.append(origin.is_rounded)
    row, counts = np.concatenate(rows), np.array(of)
    collection = Collection(
        tuple(wanted[name] for name in found),
        np.repeat(np.arange(len(found)), counts[1:]),
        source.collection.offset[row],
        source.collection.shape[row],
    )
    rounded = source.rounded()[row] | np.repeat(np.array(is_rounded), counts)
    return Placed(
        collection, source.file[row], source.begin[row], source.stride[row], source.files, rounded
    )


def used(source: Collection, found: Mapping[str, Origin]) -> npt.NDArray[np.bool_]:
    """Return which tensors of a checkpoint belong to something that this rank takes: of a weight
    all that follows from it, [tensors]."""
    names = {origin.tensor.name for origin in found.values()}
    weights = {split_name(name)[1] for name in names if _is_weight(name)}
    return np.array(
        [
            t.name in names or (_is_weight(t.name) and split_name(t.name)[1] in weights)
            for t in source.tensors
        ],
        dtype=bool,
    )


def listed(texts: Iterable[str]) -> str:
    """Return the first few of some texts, and how many more there are."""
    found = list(texts)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


def _origin(source: Mapping[str, Tensor], tensor: Tensor) -> Origin | None:
    exact = source.get(tensor.name)
    if not _is_weight(tensor.name) or (exact is not None and exact.dtype == tensor.dtype):
        return None if exact is None else Origin(exact)
    name = split_name(tensor.name)[1]
    full = source.get(f"{MAIN}/{name}", source.get(f"{PARAM}/{name}"))
    if full is not None and full.dtype == _FP32 and tensor.dtype in (_FP32, *HALF):
        return Origin(full, is_rounded=tensor.dtype != _FP32)
    return None if exact is None else Origin(exact)


def _is_weight(name: str) -> bool:
    return name.startswith((f"{PARAM}/", f"{MAIN}/"))
