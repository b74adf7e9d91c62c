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
    NEEDED,
    HostManifest,
    _digest,
    load_generation,
    manifest_from_message,
    manifest_message,
    read_manifest,
    read_saved_manifest,
    unite,
    unite_hosts,
)
from scalai.store.places import MANIFEST
from scalai.store.rows import StoredRows


def test_a_manifest_survives_its_way_through_json(store: HostStore) -> None:
    manifest = generation(store, 1, step=1)
    message = json.loads(json.dumps(manifest_message(manifest)))
    assert manifest_from_message(message, "here").digest() == manifest.digest()
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
    again = manifest_from_message(json.loads(json.dumps(manifest_message(old))), "here")
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


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_manifest_is_refused_by_name(store: HostStore, damage: Any) -> None:
    generation(store, 1, step=1)
    path = store.generation_directory(1) / MANIFEST
    path.write_text(damage(path.read_text()))
    with pytest.raises(StoreError, match=str(path)):
        read_manifest(path.parent)


def columns(text: str, **changes: Any) -> str:
    """Return a manifest with other columns of its collection."""
    return change(text, collection=json.loads(text)["collection"] | changes)


def first_tensor(text: str, tensor: Any) -> str:
    """Return a manifest with another first tensor."""
    return columns(text, tensors=[tensor, *json.loads(text)["collection"]["tensors"][1:]])


UNFIT = {
    "version = true": lambda text: change(text, version=True),
    "version 2.0": lambda text: change(text, version=2.0),
    "version 1 with fingerprints of a version": lambda text: change(text, version=1),
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


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=list(UNFIT))
def test_a_value_of_another_kind_is_refused_and_not_converted(store: HostStore, unfit: Any) -> None:
    generation(store, 1, step=1)
    path = store.generation_directory(1) / MANIFEST
    path.write_text(unfit(path.read_text()))
    with pytest.raises(StoreError, match=str(path)):
        read_manifest(path.parent)


def test_a_key_of_a_later_release_is_passed_over(store: HostStore) -> None:
    manifest = generation(store, 1, step=1)
    path = store.generation_directory(1) / MANIFEST
    path.write_text(change(path.read_text(), later={"a": 1}))
    assert read_manifest(path.parent).digest() == manifest.digest()


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


def rewritten(store: HostStore, **changes: Any) -> Path:
    """Change a host's manifest of generation 1, with a digest that fits; return its folder."""
    path = store.generation_directory(1) / MANIFEST
    path.write_text(change(path.read_text(), **changes))
    return path.parent


def test_a_folder_that_was_renamed_is_refused_by_both_numbers(open_store: Opener) -> None:
    first, second = two_hosts(open_store)
    places = [first.generation_directory(1), second.generation_directory(1)]
    assert load_generation(places, 1).generation == 1
    with pytest.raises(StoreError, match=r"says that it is generation 1.*generation 2 belongs"):
        load_generation(places, 2)
    rewritten(second, generation=3)
    with pytest.raises(StoreError, match=f"{places[1]} says that it is generation 3"):
        load_generation(places, 1)


def test_parts_of_two_deposits_are_never_one_state(open_store: Opener) -> None:
    first, second = two_hosts(open_store)
    about = first.manifest(1).about
    places = [
        rewritten(store, about={**about, "deposit": name})
        for store, name in ((first, "r-1-9"), (second, "s-1-9"))
    ]
    with pytest.raises(StoreError, match=r"several jobs or rounds \(a: r-1-9, b: s-1-9\)"):
        load_generation(places)
    says = [{"hosts": ["a", "b"], "fingerprints": {"param/w": f"{n:016x}"}} for n in (1, 2)]
    places = [
        rewritten(store, about=about, committed=said)
        for store, said in zip((first, second), says, strict=True)
    ]
    with pytest.raises(StoreError, match=r"'a' and 'b'.*other fingerprints of 1 tensors \(param/w"):
        load_generation(places)


@pytest.mark.parametrize("missing", NEEDED)
def test_a_saved_part_that_says_too_little_is_refused(store: HostStore, missing: str) -> None:
    about = dict(generation(store, 1, step=1).about)
    assert load_generation([store.generation_directory(1)]).step == 1
    del about[missing]
    place = rewritten(store, about=about)
    with pytest.raises(StoreError, match=f"{place / MANIFEST} is damaged: about says no {missing}"):
        read_saved_manifest(place)


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
