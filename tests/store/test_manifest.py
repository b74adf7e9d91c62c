"""Manifests: what is damaged is named before any number in it is believed, and what a coordinator
is told of a host's part."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.core.errors import LayoutError, StoreError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.fingerprint import CommitStatement
from scalai.core.tensors.holders import used_only
from scalai.core.tensors.region import Box
from scalai.store.generation import load_generation, unite, unite_hosts
from scalai.store.host import HostStore
from scalai.store.manifest import (
    NEEDED,
    HostManifest,
    StoredFile,
    manifest_bytes,
    manifest_of_bytes,
    read_manifest,
    read_saved_manifest,
)
from scalai.store.parts import Extras, extended, pieces_of, reference_of, summary
from scalai.store.places import MANIFEST
from support.bad_manifests import BAD, change
from support.store_states import Opener, generation

TWO_STATES = [{"hosts": ["a", "b"], "fingerprints": {"param/w": f"{n:016x}"}} for n in (1, 2)]


@pytest.fixture
def part(store: HostStore) -> HostManifest:
    """A part of generation 1 of step 1."""
    return generation(store, 1, step=1)


@pytest.fixture
def path(store: HostStore, part: HostManifest) -> Path:
    """The file of its manifest."""
    return store.generation_directory(1) / MANIFEST


def test_a_manifest_survives_its_way_through_json(part: HostManifest, path: Path) -> None:
    assert manifest_of_bytes(manifest_bytes(part), "here").digest() == part.digest()
    assert read_manifest(path.parent).digest() == part.digest()


@pytest.mark.parametrize("message", [b"[]", b"\xff", b"{}", b'{"format": 1, "format": 2}'])
def test_what_travels_and_is_no_manifest_is_refused_by_its_host(message: bytes) -> None:
    with pytest.raises(StoreError, match="node-7 is"):
        manifest_of_bytes(message, "node-7")


@pytest.mark.fault
@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_a_damaged_manifest_is_refused_by_name_and_nothing_in_it_converted(
    path: Path, bad: Any
) -> None:
    path.write_text(bad(path.read_text()))
    with pytest.raises(StoreError, match=str(path)):
        read_manifest(path.parent)


def test_a_key_of_a_later_release_is_passed_over(part: HostManifest, path: Path) -> None:
    path.write_text(change(path.read_text(), later={"a": 1}))
    assert read_manifest(path.parent).digest() == part.digest()


def test_a_missing_manifest_or_file_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=str(tmp_path / MANIFEST)):
        read_manifest(tmp_path)
    victim = next(path.parent.glob("*.safetensors"))
    victim.unlink()
    with pytest.raises(StoreError, match=f"{victim} is missing"):
        read_manifest(path.parent)


@pytest.fixture
def two(open_store: Opener) -> tuple[HostStore, HostStore]:
    """Two hosts with generation 1."""
    stores = open_store(host="a"), open_store(host="b")
    for store in stores:
        generation(store, 1, step=1)
    return stores


def test_hosts_are_united_in_the_order_of_their_ranks(two: tuple[HostStore, HostStore]) -> None:
    union = load_generation([store.generation_directory(1) for store in reversed(two)])
    assert [part.host for part in union.hosts] == ["a", "b"]
    assert union.step == 1 and union.scalars == union.hosts[0].scalars
    assert union.rank_state == {"tp0": [0], "tp1": [1]}
    assert unite([{"a": 1, "n": {"x": 1}}, {"a": 2, "b": 3, "n": {"x": 2, "y": 4}}]) == {
        "a": 1, "b": 3, "n": {"x": 1, "y": 4},
    }, "the lowest rank's value stays"  # fmt: skip


def rewritten(store: HostStore, **changes: Any) -> Path:
    """Change a host's manifest of generation 1, with a digest that fits; return its folder."""
    path = store.generation_directory(1) / MANIFEST
    path.write_text(change(path.read_text(), **changes))
    return path.parent


@pytest.mark.fault
def test_a_folder_that_was_renamed_is_refused_by_both_numbers(
    two: tuple[HostStore, HostStore],
) -> None:
    places = [store.generation_directory(1) for store in two]
    assert load_generation(places, 1).generation == 1
    with pytest.raises(StoreError, match=r"says that it is generation 1.*generation 2 belongs"):
        load_generation(places, 2)
    rewritten(two[1], generation=3)
    with pytest.raises(StoreError, match=f"{places[1]} says that it is generation 3"):
        load_generation(places, 1)


@pytest.mark.fault
def test_parts_of_two_snapshots_are_never_one_state(two: tuple[HostStore, HostStore]) -> None:
    about = two[0].manifest(1).about
    for key, of_both, why in (
        ("snapshot", ("r-1-9", "s-1-9"), r"several jobs or rounds \(a: r-1-9, b: s-1-9\)"),
        ("committed", TWO_STATES, r"'a' and 'b'.*other fingerprints of 1 tensors \(param/w"),
    ):
        places = []
        for store, value in zip(two, of_both, strict=True):
            more = {"about": {**about, key: value}} if key == "snapshot" else {key: value}
            places.append(rewritten(store, **{"about": about, **more}))
        with pytest.raises(StoreError, match=why):
            load_generation(places)


@pytest.mark.fault
@pytest.mark.parametrize("missing", NEEDED)
def test_a_saved_part_that_says_too_little_is_refused(
    store: HostStore, path: Path, missing: str
) -> None:
    assert load_generation([path.parent]).step == 1
    rest = {key: value for key, value in store.manifest(1).about.items() if key != missing}
    place = rewritten(store, about=rest)
    with pytest.raises(StoreError, match=f"{path} is damaged: about says no {missing}"):
        read_saved_manifest(place)


def test_parts_that_are_not_of_one_step_tensor_or_host_are_never_united(
    two: tuple[HostStore, HostStore],
) -> None:
    generation(two[1], 2, step=2)
    first, other = two[0].manifest(1), two[1].manifest(1)
    tensors = other.collection.tensors
    changed = replace(
        other,
        collection=replace(
            other.collection, tensors=(replace(tensors[0], dtype="I32"), *tensors[1:])
        ),
    )
    for parts, error, why in (
        ([first, two[1].manifest(2)], StoreError, "Never mix"),
        ([first, first], StoreError, "two parts are of host"),
        ([], StoreError, "at least one"),
        ([first, changed], LayoutError, "not parts of one state"),
    ):
        with pytest.raises(error, match=why):
            unite_hosts(parts)


# ------------------------------------------------------------------ what a coordinator is told


@pytest.fixture
def stated(part: HostManifest) -> HostManifest:
    """A committed part that states its tensors."""
    names = [tensor.name for tensor in part.collection.tensors]
    return replace(part, committed=CommitStatement((part.host,), dict.fromkeys(names, 7)))


def grown(part: HostManifest) -> HostManifest:
    """Return a part with row after row of a tensor that it had not, as they come from others."""
    other = Tensor("param/other", (40, 4), "F32")
    rows = type(part.collection).of((other, Box((row, 0), (1, 4))) for row in range(40))
    more = CommitStatement((part.host, "b"), {other.name: 9})
    return extended(
        part, StoredFile("fetched-0.safetensors", 640), rows, 16 * np.arange(40),
        np.arange(40, dtype=np.uint64), Extras({}, {"tp7": "x"}, (7,), more),
    )  # fmt: skip


def test_a_summary_arrives_as_it_was_sent_and_names_what_it_stands_for(
    part: HostManifest, stated: HostManifest
) -> None:
    short = summary(stated)
    again = manifest_of_bytes(manifest_bytes(short), "it")
    assert again.digest() == short.digest()
    assert reference_of(again) == reference_of(stated) == reference_of(short)
    assert reference_of(stated).digest == pieces_of(stated).digest().hex()
    assert set(again.rank_state) == set(stated.rank_state)
    assert not any(again.rank_state.values())
    assert (summary(part).fingerprint == part.fingerprint).all(), "what states nothing keeps all"


def test_pieces_that_were_fetched_are_few_and_stay_apart_while_they_are_unproven(
    stated: HostManifest,
) -> None:
    more = grown(stated)
    short = summary(more)
    names = [short.collection.tensors[number].name for number in short.collection.tensor]
    assert names.count("param/other") == 1 and short.unproven == (1,)
    assert short.file[names.index("param/other")] == 1
    assert short.size_bytes == more.size_bytes
    assert short.committed is not None and short.committed.fingerprints["param/other"] == 9
    known = reference_of(stated)
    assert pieces_of(more, known.rows).digest().hex() == known.digest, "others came behind them"
    assert reference_of(more).digest != known.digest
    assert len(pieces_of(more)) == known.rows + 40


@pytest.mark.parametrize("what", ["snapshot", "step", "fingerprint", "offset", "tensors"])
def test_a_digest_is_of_all_of_it(part: HostManifest, what: str) -> None:
    held = pieces_of(part)
    rows = held.collection
    cases: dict[str, dict[str, Any]] = {
        "snapshot": {"snapshot": "other"},
        "step": {"step": 3},
        "fingerprint": {"fingerprint": held.fingerprint[::-1]},
        "offset": {"collection": replace(rows, offset=rows.offset + 1)},
        "tensors": {"collection": replace(rows, tensors=rows.tensors[::-1])},
    }
    assert replace(held, **cases[what]).digest() != held.digest()


def test_a_table_of_used_tensors_does_not_depend_on_what_else_is_in_it(part: HostManifest) -> None:
    rows = part.collection.select(np.array([2, 1, 2]))
    found = used_only(rows)
    assert [found.box(row) for row in range(3)] == [rows.box(row) for row in range(3)]
    assert len(found.tensors) == 2 and not used_only(rows.select(np.zeros(0, np.int64))).tensors
