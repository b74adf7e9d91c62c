"""Manifests: what is damaged is named before any number in it is believed."""

from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import LayoutError, StoreError
from scalai.store.generation import load_generation, unite, unite_hosts
from scalai.store.host import HostStore
from scalai.store.manifest import (
    NEEDED,
    HostManifest,
    manifest_bytes,
    manifest_of_bytes,
    read_manifest,
    read_saved_manifest,
)
from scalai.store.places import MANIFEST
from support.bad_manifests import DAMAGES, UNFIT, change
from support.store_states import Opener, generation


def test_a_manifest_survives_its_way_through_json(store: HostStore) -> None:
    manifest = generation(store, 1, step=1)
    message = manifest_bytes(manifest)
    assert manifest_of_bytes(message, "here").digest() == manifest.digest()
    assert read_manifest(store.generation_directory(1)).digest() == manifest.digest()


@pytest.mark.parametrize("message", [b"[]", b"\xff", b"{}", b'{"format": 1, "format": 2}'])
def test_what_travels_and_is_no_manifest_is_refused_by_its_host(message: bytes) -> None:
    with pytest.raises(StoreError, match="node-7 is"):
        manifest_of_bytes(message, "node-7")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_manifest_is_refused_by_name(store: HostStore, damage: Any) -> None:
    generation(store, 1, step=1)
    path = store.generation_directory(1) / MANIFEST
    path.write_text(damage(path.read_text()))
    with pytest.raises(StoreError, match=str(path)):
        read_manifest(path.parent)


@pytest.mark.fault
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


@pytest.mark.fault
def test_a_folder_that_was_renamed_is_refused_by_both_numbers(open_store: Opener) -> None:
    first, second = two_hosts(open_store)
    places = [first.generation_directory(1), second.generation_directory(1)]
    assert load_generation(places, 1).generation == 1
    with pytest.raises(StoreError, match=r"says that it is generation 1.*generation 2 belongs"):
        load_generation(places, 2)
    rewritten(second, generation=3)
    with pytest.raises(StoreError, match=f"{places[1]} says that it is generation 3"):
        load_generation(places, 1)


@pytest.mark.fault
def test_parts_of_two_snapshots_are_never_one_state(open_store: Opener) -> None:
    first, second = two_hosts(open_store)
    about = first.manifest(1).about
    places = [
        rewritten(store, about={**about, "snapshot": name})
        for store, name in ((first, "r-1-9"), (second, "s-1-9"))
    ]
    with pytest.raises(StoreError, match=r"several jobs or rounds \(a: r-1-9, b: s-1-9\)"):
        load_generation(places)
    says = [{"hosts": ["a", "b"], "fingerprints": {"param/w": f"{n:016x}"}} for n in (1, 2)]
    places = [
        rewritten(store, about=about, committed=logged)
        for store, logged in zip((first, second), says, strict=True)
    ]
    with pytest.raises(StoreError, match=r"'a' and 'b'.*other fingerprints of 1 tensors \(param/w"):
        load_generation(places)


@pytest.mark.fault
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
