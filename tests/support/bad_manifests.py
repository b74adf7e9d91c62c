"""Manifests that no reader may take: damaged ones, and those whose digest fits a wrong value."""

import json
from typing import Any

from scalai.store.manifest import _digest


def change(text: str, **changes: Any) -> str:
    """Return a manifest with other values and a digest that fits them."""
    data = {key: value for key, value in json.loads(text).items() if key != "digest"}
    data.update(changes)
    return json.dumps({"digest": _digest(data), **data})


DAMAGES = {
    "not JSON": lambda text: text[: len(text) // 2],
    "not an object": lambda text: "[1, 2]",
    "a key twice": lambda text: text.replace('"step":1', '"step":9,"step":1'),
    "a changed number": lambda text: text.replace('"step":1', '"step":2'),
    "a missing key": lambda text: text.replace('"begin"', '"began"'),
    "no digest": lambda text: text.replace('"digest"', '"digested"'),
    "another format": lambda text: change(text, format="other"),
    "another version": lambda text: change(text, version=99),
    "fingerprints of another version": lambda text: change(text, fingerprint_version=3),
    "fingerprints of no version": lambda text: text.replace(
        '"fingerprint_version"', '"print_version"'
    ),
    "rows of unequal length": lambda text: change(text, begin=[0]),
    "a piece beyond its file": lambda text: change(text, begin=[1 << 40] * 6),
    "a negative begin": lambda text: change(text, begin=[-1] * 6),
    "an unknown file": lambda text: change(text, file=[7] * 6),
    "a file elsewhere": lambda text: change(text, files=[["../x", 10]]),
    "a fingerprint that is no number": lambda text: change(text, fingerprint=["zz"] * 6),
    "a fingerprint too large": lambda text: change(text, fingerprint=["f" * 17] * 6),
    "a piece outside its tensor": lambda text: change(
        text,
        collection=json.loads(text)["collection"] | {"offset": [[0, 0, 0, 0, 0, 99]] * 6},
    ),
    "an unknown dtype": lambda text: change(
        text,
        collection=json.loads(text)["collection"]
        | {"tensors": [[n, s, "F33"] for n, s, _ in json.loads(text)["collection"]["tensors"]]},
    ),
}  # fmt: skip
"""What a reader refuses, by what is wrong with the text of a manifest of step 1 with six pieces."""


def columns(text: str, **changes: Any) -> str:
    """Return a manifest with other columns of its collection."""
    return change(text, collection=json.loads(text)["collection"] | changes)


def first_tensor(text: str, tensor: Any) -> str:
    """Return a manifest with another first tensor."""
    return columns(text, tensors=[tensor, *json.loads(text)["collection"]["tensors"][1:]])


UNFIT = {
    "version = true": lambda text: change(text, version=True),
    "version 2.0": lambda text: change(text, version=2.0),
    "version 1": lambda text: change(text, version=1),
    "fingerprints of version 2.0": lambda text: change(text, fingerprint_version=2.0),
    "generation 1.9": lambda text: change(text, generation=1.9),
    "generation as text": lambda text: change(text, generation="1"),
    "generation -5": lambda text: change(text, generation=-5),
    "step true": lambda text: change(text, step=True),
    "step below 0": lambda text: change(text, step=-1),
    "a host that is no name": lambda text: change(text, host=5),
    "a host elsewhere": lambda text: change(text, host="../x"),
    "about as a list": lambda text: change(text, about=[]),
    "tensors as text": lambda text: change(text, about={"tensors": "5"}),
    "a degree of half": lambda text: change(text, about={"degrees": {"tp": 0.5}}),
    "ranks as text": lambda text: change(text, ranks="01"),
    "a rank twice": lambda text: change(text, ranks=[0, 0]),
    "half a byte": lambda text: change(text, files=[["rank-0.safetensors", 451.5]]),
    "a file twice": lambda text: change(text, files=json.loads(text)["files"] * 2),
    "offsets of half a byte": lambda text: change(text, begin=[320.5] * 6),
    "offsets as text": lambda text: change(text, begin=["320"] * 6),
    "offsets that wrap around": lambda text: change(text, begin=[2**63 - 1] * 6),
    "offsets that no number holds": lambda text: change(text, begin=[2**64] * 6),
    "files in rows": lambda text: change(text, file=[[0]] * 6),
    "half a tensor": lambda text: columns(text, tensor=[0.7] * 6),
    "boxes that wrap around": lambda text: columns(text, offset=[[2**63 - 1] * 6] * 6),
    "boxes of half an element": lambda text: columns(text, offset=[[0, 0, 0, 0, 0.5, 0]] * 6),
    "boxes of five dims": lambda text: columns(text, offset=[[0] * 5] * 6),
    "boxes in one row": lambda text: columns(text, offset=[0] * 36),
    "a box that is empty where its tensor has no dim": lambda text: columns(
        text, shape=[[0, 1, 1, 1, 1, 1]] * 6
    ),
    "a tensor without a name": lambda text: first_tensor(text, [7, [6, 8], "F32"]),
    "a tensor twice": lambda text: columns(
        text, tensors=json.loads(text)["collection"]["tensors"] * 2
    ),
    "a shape of half": lambda text: first_tensor(text, ["param/w", [6.5, 8], "F32"]),
    "more than any disk": lambda text: first_tensor(text, ["param/w", [2**33, 2**33], "F32"]),
    "a fingerprint with a sign": lambda text: change(text, fingerprint=["-00000000000001f"] * 6),
    "a fingerprint that no sum is": lambda text: change(text, fingerprint=["f" * 16] * 6),
    "an unproven half": lambda text: change(text, unproven=[0.5]),
    "nothing committed": lambda text: change(text, committed=None),
    "committed by letters": lambda text: change(
        text, committed={"hosts": "ab", "fingerprints": {}}
    ),
    "scalars as a list": lambda text: change(text, scalars=[]),
    "states of ranks as a list": lambda text: change(text, rank_state=[]),
}
"""What another program may write: the digest fits, and a value is not of its field's kind."""
