"""Manifests that no reader may take, by their fault: damaged ones, and those whose digest fits a
value that is not of its field's kind, as another program may write it. They are made of the text of
a manifest of step 1 with six pieces."""

import json
from collections.abc import Callable
from typing import Any

from scalai.core.fields import digest_of

Fault = Callable[[str], str]


def change(text: str, **changes: Any) -> str:
    """Return a manifest with other values and a digest that fits them."""
    data = {key: value for key, value in json.loads(text).items() if key != "digest"}
    data.update(changes)
    return json.dumps({"digest": digest_of(data), **data})


def columns(text: str, **changes: Any) -> str:
    """Return a manifest with other columns of its collection."""
    return change(text, collection=json.loads(text)["collection"] | changes)


def tensors(text: str, of: Callable[[list[Any]], list[Any]]) -> str:
    """Return a manifest with other tensors."""
    return columns(text, tensors=of(json.loads(text)["collection"]["tensors"]))


def first_tensor(*tensor: Any) -> Fault:
    return lambda text: tensors(text, lambda known: [tensor, *known[1:]])


def instead(old: str, new: str) -> Fault:
    """Other text: the digest does not fit."""
    return lambda text: text.replace(old, new)


def of_all(**values: Any) -> Fault:
    """The same value for each piece."""
    return lambda text: change(text, **{name: [value] * 6 for name, value in values.items()})


def of_boxes(**values: Any) -> Fault:
    return lambda text: columns(text, **{name: [value] * 6 for name, value in values.items()})


def field(**values: Any) -> Fault:
    return lambda text: change(text, **values)


BAD: dict[str, Fault] = {
    "not JSON": lambda text: text[: len(text) // 2],
    "not an object": lambda text: "[1, 2]",
    "a key twice": instead('"step":1', '"step":9,"step":1'),
    "a changed number": instead('"step":1', '"step":2'),
    "a missing key": instead('"begin"', '"began"'),
    "no digest": instead('"digest"', '"digested"'),
    "another format": field(format="other"),
    "another version": field(version=99),
    "fingerprints of another version": field(fingerprint_version=3),
    "fingerprints of no version": instead('"fingerprint_version"', '"print_version"'),
    "rows of unequal length": field(begin=[0]),
    "a piece beyond its file": of_all(begin=1 << 40),
    "a negative begin": of_all(begin=-1),
    "an unknown file": of_all(file=7),
    "a negative file": of_all(file=-7),
    "a file elsewhere": field(files=[["../x", 10]]),
    "a fingerprint that is no number": of_all(fingerprint="zz"),
    "a fingerprint too large": of_all(fingerprint="f" * 17),
    "a piece outside its tensor": of_boxes(offset=[0, 0, 0, 0, 0, 99]),
    "an unknown dtype": lambda text: tensors(text, lambda all: [[n, s, "F33"] for n, s, _ in all]),
    "version = true": field(version=True),
    "version 2.0": field(version=2.0),
    "version 1": field(version=1),
    "fingerprints of version 2.0": field(fingerprint_version=2.0),
    "generation 1.9": field(generation=1.9),
    "generation as text": field(generation="1"),
    "generation -5": field(generation=-5),
    "step true": field(step=True),
    "step below 0": field(step=-1),
    "a host that is no name": field(host=5),
    "a host elsewhere": field(host="../x"),
    "about as a list": field(about=[]),
    "tensors as text": field(about={"tensors": "5"}),
    "a degree of half": field(about={"degrees": {"tp": 0.5}}),
    "ranks as text": field(ranks="01"),
    "a rank twice": field(ranks=[0, 0]),
    "half a byte": field(files=[["rank-0.safetensors", 451.5]]),
    "a file twice": lambda text: change(text, files=json.loads(text)["files"] * 2),
    "offsets of half a byte": of_all(begin=320.5),
    "offsets as text": of_all(begin="320"),
    "offsets that wrap around": of_all(begin=2**63 - 1),
    "offsets that no number holds": of_all(begin=2**64),
    "files in rows": of_all(file=[0]),
    "half a tensor": of_boxes(tensor=0.7),
    "boxes that wrap around": of_boxes(offset=[2**63 - 1] * 6),
    "boxes of half an element": of_boxes(offset=[0, 0, 0, 0, 0.5, 0]),
    "boxes of five dims": of_boxes(offset=[0] * 5),
    "boxes in one row": lambda text: columns(text, offset=[0] * 36),
    "a box that is empty where its tensor has no dim": of_boxes(shape=[0, 1, 1, 1, 1, 1]),
    "a tensor without a name": first_tensor(7, [6, 8], "F32"),
    "a tensor twice": lambda text: tensors(text, lambda known: known * 2),
    "a shape of half": first_tensor("param/w", [6.5, 8], "F32"),
    "more than any disk": first_tensor("param/w", [2**33, 2**33], "F32"),
    "a fingerprint with a sign": of_all(fingerprint="-00000000000001f"),
    "a fingerprint that no sum is": of_all(fingerprint="f" * 16),
    "an unproven half": field(unproven=[0.5]),
    "nothing committed": field(committed=None),
    "committed by letters": field(committed={"hosts": "ab", "fingerprints": {}}),
    "scalars as a list": field(scalars=[]),
    "states of ranks as a list": field(rank_state=[]),
}
