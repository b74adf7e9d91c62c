"""Manifests: what is damaged is named before any number in it is believed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from older_release import saved_by_an_older_release
from store_states import Opener, generation

from scalai.core.errors import LayoutError, StoreError
from scalai.store.host import HostStore
from scalai.store.manifest import (
    HostManifest,
    _digest,
    load_generation,
    manifest_bytes,
    manifest_of_bytes,
    read_manifest,
    unite,
    unite_hosts,
)
from scalai.store.places import MANIFEST
from scalai.store.rows import StoredRows


def test_a_manifest_survives_its_way_through_json(store: HostStore) -> None:
    manifest = generation(store, 1, step=1)
    message = manifest_bytes(manifest)
    assert manifest_of_bytes(message, "here").digest() == manifest.digest()
    assert read_manifest(store.generation_directory(1)).digest() == manifest.digest()


def change(text: str, **changes: Any) -> str:
    """Return a manifest with other values and a digest that fits them."""
    data = {key: value for key, value in json.loads(text).items() if key != "digest"}
    data.update(changes)
    return json.dumps({"digest": _digest(data), **data})


def test_what_an_older_release_saved_is_read_and_stays_of_its_version(store: HostStore) -> None:
    generation(store, 1, step=1)
    new = store.manifest(1)
    directory = store.generation_directory(1)
    saved_by_an_older_release([directory])
    assert "fingerprint_version" not in json.loads((directory / MANIFEST).read_text())
    old = read_manifest(directory)
    assert (old.fingerprint_version, new.fingerprint_version) == (1, 2)
    assert not np.array_equal(old.fingerprint, new.fingerprint)
    assert not list(StoredRows(directory, old).damage())
    again = manifest_of_bytes(manifest_bytes(old), "here")
    assert again.fingerprint_version == 1 and again.digest() == old.digest()
    # Damage is found by the function that made them.
    path = next(directory.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert len(list(StoredRows(directory, old).damage())) == 1


def test_fingerprints_of_two_versions_are_never_one_state(open_store: Opener) -> None:
    first, second = two_hosts(open_store)
    saved_by_an_older_release([second.generation_directory(1)])
    older = read_manifest(second.generation_directory(1))
    with pytest.raises(StoreError, match=r"'b' and 'a' have fingerprints of versions 1 and 2"):
        unite_hosts([parts_of(first, 1), older])


LARGEST = (1 << 63) - 1
DAMAGES = {
    "not JSON": lambda text: text[: len(text) // 2],
    "not an object": lambda text: "[1, 2]",
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
    "a piece whose end is no number": lambda text: change(text, begin=[LARGEST] * 6),
    "a negative begin": lambda text: change(text, begin=[-1] * 6),
    "an unknown file": lambda text: change(text, file=[7] * 6),
    "a file elsewhere": lambda text: change(text, files=[["../x", 10]]),
    "a fingerprint that is no number": lambda text: change(text, fingerprint=["zz"] * 6),
    "a fingerprint too large": lambda text: change(text, fingerprint=["f" * 17] * 6),
    "a piece outside its tensor": lambda text: change(
        text,
        collection=json.loads(text)["collection"] | {"offset": [[0, 0, 0, 0, 0, 99]] * 6},
    ),
    "a box whose end is no number": lambda text: change(
        text,
        collection=json.loads(text)["collection"] | {"offset": [[0, 0, 0, 0, 0, LARGEST]] * 6},
    ),
    "a tensor whose size is no number": lambda text: change(
        text,
        collection=json.loads(text)["collection"]
        | {"tensors": [[f"t{n}", [1 << 40] * 2, "F32"] for n in range(5)]},
    ),
    "an unknown dtype": lambda text: change(
        text,
        collection=json.loads(text)["collection"]
        | {"tensors": [[n, s, "F33"] for n, s, _ in json.loads(text)["collection"]["tensors"]]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_manifest_is_refused_by_name(store: HostStore, damage: Any) -> None:
    generation(store, 1, step=1)
    path = store.generation_directory(1) / MANIFEST
    path.write_text(damage(path.read_text()))
    with pytest.raises(StoreError, match=str(path)):
        read_manifest(path.parent)


def test_a_missing_manifest_or_file_is_refused_by_name(store: HostStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=str(tmp_path / MANIFEST)):
        read_manifest(tmp_path)
    generation(store, 1, step=1)
    victim = next(store.generation_directory(1).glob("*.safetensors"))
    victim.unlink()
    with pytest.raises(StoreError, match=f"{victim} is missing"):
        read_manifest(store.generation_directory(1))


def two_hosts(open_store: Opener) -> tuple[HostStore, HostStore]:
    stores = open_store(host="a"), open_store(host="b")
    for store in stores:
        generation(store, 1, step=1)
    return stores


def test_hosts_are_united_in_the_order_of_their_ranks(open_store: Opener) -> None:
    stores = two_hosts(open_store)
    union = load_generation([store.generation_directory(1) for store in reversed(stores)])
    assert [part.host for part in union.hosts] == ["a", "b"]
    assert union.step == 1 and union.scalars == union.hosts[0].scalars
    assert union.rank_state == {"tp0": [0], "tp1": [1]}


def parts_of(store: HostStore, number: int) -> HostManifest:
    return store.manifest(number)


def test_steps_are_never_mixed(open_store: Opener) -> None:
    first, second = two_hosts(open_store)
    generation(second, 2, step=2)
    with pytest.raises(StoreError, match="Never mix"):
        unite_hosts([parts_of(first, 1), parts_of(second, 2)])
    with pytest.raises(StoreError, match="two parts are of host"):
        unite_hosts([parts_of(first, 1), parts_of(first, 1)])
    with pytest.raises(StoreError, match="at least one"):
        unite_hosts([])


def test_tensors_of_one_name_must_be_one_tensor(open_store: Opener) -> None:
    from dataclasses import replace

    first, second = two_hosts(open_store)
    part = parts_of(second, 1)
    other = replace(part.collection.tensors[0], dtype="I32")
    changed = replace(
        part, collection=replace(part.collection, tensors=(other, *part.collection.tensors[1:]))
    )
    with pytest.raises(LayoutError, match="not parts of one state"):
        unite_hosts([parts_of(first, 1), changed])


def test_the_lowest_ranks_value_stays() -> None:
    assert unite([{"a": 1, "n": {"x": 1}}, {"a": 2, "b": 3, "n": {"x": 2, "y": 4}}]) == {
        "a": 1,
        "b": 3,
        "n": {"x": 1, "y": 4},
    }
