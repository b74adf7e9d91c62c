"""Fields of a manifest in JSON: values of another kind are refused, not converted, so that all
readers agree on a manifest (``docs/format.md``).

Every function raises ``ValueError`` with the field, the finding and the expectation.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from scalai.core.jsonable import Json
from scalai.core.tensors.collection import MAX_NDIM, Collection, Columns

_FINGERPRINT = re.compile("[0-9a-f]{16}")
_DIGITS = re.compile("[0-9a-f]*")


def digest_of(data: Mapping[str, Json]) -> str:
    """Return the SHA-256 of fields, in hex."""
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def whole_number(value: Json, name: str, least: int = 0) -> int:
    """Return a whole number of ``least`` or more; neither 1.0 nor true is one."""
    if type(value) is not int or not least <= value < 1 << 63:
        raise _unfit(name, value, f"a whole number of {least} or more, below 2^63")
    return value


def digest(value: Json, name: str) -> str:
    """Return a SHA-256 in hex."""
    if not isinstance(value, str) or re.fullmatch("[0-9a-f]{64}", value) is None:
        raise _unfit(name, value, "64 hexadecimal digits")
    return value


def text(value: Json, name: str) -> str:
    """Return a non-empty text."""
    if not isinstance(value, str) or not value:
        raise _unfit(name, value, "a text")
    return value


def file_name(value: Json, name: str) -> str:
    """Return a name of one path component, not hidden."""
    if "/" in text(value, name) or "\0" in value or value.startswith("."):
        raise ValueError(f"{name} = {value!r} is not a file name")
    return str(value)


def listed(value: Json, name: str) -> list[Json]:
    """Return a list."""
    if not isinstance(value, list):
        raise _unfit(name, value, "a list")
    return value


def mapped(value: Json, name: str) -> dict[str, Json]:
    """Return an object; its keys are texts, as JSON's are."""
    if not isinstance(value, Mapping):
        raise _unfit(name, value, "an object")
    return dict(value)


def column(value: Json, name: str) -> Columns:
    """Return a list of whole numbers, [rows]."""
    numbers = listed(value, name)
    _expect_whole(numbers, name)
    return _array(numbers, name)


def boxes(value: Json, name: str) -> Columns:
    """Return a list of rows of ``MAX_NDIM`` whole numbers, [rows, MAX_NDIM]."""
    rows = listed(value, name)
    for row in rows:
        if not isinstance(row, list) or len(row) != MAX_NDIM:
            raise _unfit(f"a row of {name}", row, f"{MAX_NDIM} whole numbers")
    _expect_whole(chain.from_iterable(rows), name)
    return _array(rows, name).reshape(-1, MAX_NDIM)


def _expect_whole(numbers: Iterable[Json], name: str) -> None:
    others = set(map(type, numbers)) - {int}
    if others:
        raise ValueError(
            f"{name} has values of kind {', '.join(sorted(kind.__name__ for kind in others))}, not "
            "whole numbers alone"
        )


def _array(numbers: Sequence[Json], name: str) -> Columns:
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"{name} has a number beyond 2^63") from None


def fingerprint(value: Json, name: str) -> int:
    """Return a fingerprint: 16 hexadecimal digits, small letters."""
    if not isinstance(value, str) or not _FINGERPRINT.fullmatch(value):
        raise _unfit(name, value, "16 hexadecimal digits")
    return int(value, 16)


def fingerprints(value: Json, name: str) -> npt.NDArray[np.uint64]:
    """Return a list of fingerprints, [rows]."""
    values = listed(value, name)
    are_texts = not set(map(type, values)) - {str} and not set(map(len, values)) - {16}
    if not are_texts or not _DIGITS.fullmatch("".join(values)):  # one check for thousands of values
        for each in values:
            fingerprint(each, f"a value of {name}")
    return np.frombuffer(bytes.fromhex("".join(values)), dtype=">u8").astype(np.uint64)


def about(value: Json) -> dict[str, Json]:
    """Return a manifest's ``about``, with the kinds of its known keys checked.

    Missing keys are no error here: ``read_saved_manifest`` checks them.
    """
    table = mapped(value, "about")
    for name in ("tensors", "world_size"):
        if name in table:
            whole_number(table[name], f"about.{name}")
    if "snapshot" in table:
        text(table["snapshot"], "about.snapshot")
    for axis, size in mapped(table.get("degrees", {}), "about.degrees").items():
        whole_number(size, f"about.degrees.{axis}", 1)
    mapped(table.get("facts", {}), "about.facts")
    mapped(table.get("dataset", {}), "about.dataset")
    for entry in listed(table.get("lineage", []), "about.lineage"):
        run, number = listed(entry, "a run in about.lineage")
        text(run, "a run in about.lineage")
        whole_number(number, f"about.lineage of {run}")
    attached = mapped(table.get("attached", {}), "about.attached")
    for hosts in (table.get("hosts", []), attached.get("hosts", [])):
        named = listed(hosts, "hosts in about")
        if set(map(type, named)) - {str} or not all(named):  # one check for thousands of names
            for host in named:
                text(host, "a host in about")
    return table


def collection(value: Json) -> Collection:
    """Return the collection of these values. ``LayoutError`` is a ``ValueError`` too."""
    data = mapped(value, "collection")
    tensors = []
    for name, shape, dtype in listed(data["tensors"], "tensors"):
        sizes = column(shape, f"shape of {text(name, 'name of a tensor')}").tolist()
        tensors.append([name, sizes, text(dtype, f"dtype of {name}")])
    columns = {
        "tensor": column(data["tensor"], "tensor"),
        "offset": boxes(data["offset"], "offset"),
        "shape": boxes(data["shape"], "shape"),
    }
    return Collection.from_json({"tensors": tensors, **columns})


def _unfit(name: str, value: Json, expected: str) -> ValueError:
    found = repr(value)
    return ValueError(f"{name} = {found[:60]}{'…' * (len(found) > 60)}, not {expected}")
