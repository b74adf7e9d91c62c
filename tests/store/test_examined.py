"""A host reads its part of a generation again: what is damaged counts no more, and nothing goes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from scalai.core.errors import DamageError, StoreError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import Box, whole
from scalai.store.files import slices
from scalai.store.host import HostStore
from scalai.store.parts import StoredRows
from scalai.store.places import MANIFEST
from support.store_states import WEIGHT, Opener, generation, values_of

pytestmark = pytest.mark.fault


def rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


DAMAGE: list[Callable[[Path], None]] = [rot, cut, empty, Path.unlink]


def test_of_a_whole_part_nothing_is_found(store: HostStore) -> None:
    before = generation(store, 3, step=2)
    assert store.examine(3) == [] and store.manifest(3) is before


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_counts_no_more_until_the_manifest_is_read_anew(
    open_store: Opener, damage: Callable[[Path], None]
) -> None:
    store = open_store()
    before = generation(store, 3, step=2)
    path = store.generation_directory(3) / "rank-1.safetensors"
    stated = path.with_name(MANIFEST)
    content, said = path.read_bytes(), stated.read_bytes()
    damage(path)
    found = store.examine(3)
    left = store.manifest(3)
    assert found and all(str(path) in line for line in found)
    assert len(left.collection) == len(before.collection) - len(found)
    assert (left.file == 0).sum() == (before.file == 0).sum(), "what is whole stays"
    assert store.examine(3) == [], "it was told"
    assert store.damage_found() == {3: found}, "and is told to the next coordinator"
    assert stated.read_bytes() == said
    store.close()
    path.write_bytes(content)  # a person mends it
    again = open_store()
    assert len(again.manifest(3).collection) == len(before.collection)
    assert again.damage_found() == {}
    assert again.examine(3) == []


def fetch(store: HostStore, tensor: Tensor, box: Box) -> None:
    """Make a piece of generation 3 of step 2 this host's own."""
    staged = store.stage(Collection.of([(tensor, box)]))
    head = staged.path.read_bytes()[: int(staged.begins[0])]
    staged.path.write_bytes(head + values_of(tensor, 2)[slices(box)].tobytes())
    store.extend(3, staged)


def test_what_has_come_whole_again_is_damaged_no_more(store: HostStore) -> None:
    before = generation(store, 3, step=2)
    empty(store.generation_directory(3) / "rank-1.safetensors")
    found = store.examine(3)
    lost = [before.collection.box(row) for row in np.flatnonzero(before.file == 1).tolist()]
    assert len(found) == len(lost) > 1
    for done, (tensor, box) in enumerate(lost, 1):
        fetch(store, tensor, box)
        assert len(store.damage_found().get(3, [])) == len(lost) - done
    assert store.examine(3) == [] and len(store.manifest(3).collection) == len(before.collection)


def test_what_is_dropped_is_damaged_no_more(store: HostStore) -> None:
    generation(store, 3, step=2)
    rot(store.generation_directory(3) / "rank-0.safetensors")
    assert store.examine(3)
    store.drop(3)
    assert store.damage_found() == {}


def test_what_has_come_meanwhile_stays(store: HostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = generation(store, 3, step=2)
    rot(store.generation_directory(3) / "rank-0.safetensors")
    pieces = Collection.of([(WEIGHT, whole(WEIGHT.shape))])
    staged = store.stage(pieces)
    head = staged.path.read_bytes()[: int(staged.begins[0])]
    staged.path.write_bytes(head + values_of(WEIGHT, 2).tobytes())
    damage = StoredRows.damage

    def grows(rows: StoredRows) -> Iterator[tuple[int, str]]:
        store.extend(3, staged)
        yield from damage(rows)

    monkeypatch.setattr(StoredRows, "damage", grows)
    found = store.examine(3)
    left = store.manifest(3)
    assert found and len(left.collection) == len(before.collection) - len(found) + 1
    assert left.files[-1].name.startswith("fetched-") and (left.file == len(left.files) - 1).any()


def test_a_short_file_is_damage_wherever_it_is_read(store: HostStore) -> None:
    manifest = generation(store, 3, step=2)
    path = store.generation_directory(3) / "rank-0.safetensors"
    empty(path)
    row = int(np.flatnonzero(manifest.file == 0)[0])
    with store.open_rows(3) as rows, pytest.raises(DamageError, match="the file has 0 bytes"):
        rows.view(row)
    path.unlink()
    with pytest.raises(DamageError, match="cannot be mapped"), store.open_rows(3):
        pass


def test_what_is_not_there_is_not_examined(store: HostStore) -> None:
    with pytest.raises(StoreError, match="not committed here"):
        store.examine(3)
