"""What a crash between any two steps leaves, what the next owner finds, and what of it is damaged:
that counts no more, and nothing of it goes."""

import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from scalai.core.errors import DamageError, StoreError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import Box, whole
from scalai.launch.agent.holdings import Holdings
from scalai.launch.agent.leftovers import find_leftovers
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.store.files import slices
from scalai.store.host import HostStore
from scalai.store.parts import Staged, StoredRows
from scalai.store.places import MANIFEST
from support.steps import before_call
from support.store_states import (
    WEIGHT,
    Opener,
    cut,
    empty,
    generation,
    is_whole,
    rot,
    snapshot,
    two_ranks,
    values_of,
    write,
)


class Crash(BaseException):
    """The process ended here. Nothing in the product catches it."""


def crash() -> None:
    raise Crash


def test_a_crash_leaves_the_old_or_the_new_generation_whole(open_store: Opener) -> None:
    """At any call that changes the file system, while a generation takes the place of another."""
    crashed = True
    for step in count(1):
        store = open_store(job=f"job-{step}")
        generation(store, 1, step=1)
        with before_call(step, crash) as has_crashed:
            try:
                generation(store, 2, step=2)
                store.drop(1)
            except Crash:
                pass
            crashed = has_crashed()
        store.close()
        found = open_store(job=f"job-{step}")
        assert not found.damaged and found.generations(), step
        assert all(is_whole(found, number, step=number) for number in found.generations()), step
        for slot, sealed in found.sealed():
            assert sealed.step == 2
            found.commit(slot, 3)
            assert is_whole(found, 3, step=2)
        generation(found, 9, step=9)
        assert is_whole(found, 9, step=9)
        left = found.directory.glob("snapshot-*"), found.directory.glob("dropped-*")
        assert not any(map(list, left)), step
        if not crashed:
            break
    assert found.generations() == [2, 9] and step > 20


def test_a_torn_snapshot_is_removed_and_its_pages_are_reused(open_store: Opener) -> None:
    store, held = open_store(), two_ranks()
    slot = store.reserve(held)
    write(slot.orders[0], held[0])
    store.close()
    again = open_store()
    assert not slot.directory.exists()
    assert again.generations() == [] and again.sealed() == []
    assert list((again.directory / "recycled").iterdir())


def test_a_sealed_snapshot_survives_and_can_be_committed(open_store: Opener) -> None:
    store = open_store()
    snapshot(store, step=6)
    store.close()
    again = open_store()
    [(slot, manifest)] = again.sealed()
    assert manifest.step == 6
    again.commit(slot, 11)
    assert is_whole(again, 11, step=6)


def test_a_damaged_generation_is_named_and_left_alone(open_store: Opener) -> None:
    store = open_store()
    for number in (1, 2):
        generation(store, number, step=number)
    truncated = next(store.generation_directory(2).glob("*.safetensors"))
    os.truncate(truncated, truncated.stat().st_size - 1)
    store.close()
    again = open_store()
    assert again.generations() == [1] and is_whole(again, 1, step=1)
    assert str(truncated) in again.damaged[2] and "bytes long" in again.damaged[2]
    assert truncated.exists()


@pytest.mark.fault
def test_a_folder_that_was_renamed_is_not_taken_for_this_hosts_own(open_store: Opener) -> None:
    store = open_store(host="a")
    generation(store, 3, step=3)
    snapshot(store, 4)
    store.close()
    store.directory.rename(store.directory.with_name("b"))
    moved = open_store(host="b")
    assert moved.generations() == [] and moved.sealed() == []
    (reason,), (sealed,) = moved.damaged.values(), moved.damaged_snapshots.values()
    assert "generation 3 of host 'a'" in reason and "generation 3 of host 'b' belongs" in reason
    assert "--host-id a" in reason and "a snapshot of host 'b' belongs" in sealed
    assert (moved.directory / "generation-3").is_dir()
    moved.close()
    moved.directory.rename(store.directory)
    back = open_store(host="a")
    assert back.generations() == [3] and len(back.sealed()) == 1


@pytest.mark.fault
def test_a_generation_under_another_number_is_not_used(open_store: Opener) -> None:
    store = open_store()
    generation(store, 3, step=3)
    store.close()
    (store.directory / "generation-3").rename(store.directory / "generation-5")
    assert "holds generation 3" in open_store().damaged[5]


@pytest.mark.fault
def test_a_damaged_snapshot_is_told_and_left(open_store: Opener) -> None:
    store = open_store()
    slot, _ = snapshot(store, 2)
    store.close()
    (slot.directory / MANIFEST).write_text("{}")
    again = open_store()
    assert again.sealed() == [] and slot.directory.is_dir()
    assert "is damaged" in again.damaged_snapshots[slot.directory.name]
    spec, beside = JobSpec.read(parse_options(["--job", "job", "script.py"])), None
    found = Holdings(spec, again, print, beside, lambda due: None).found()  # type: ignore[arg-type]
    ((number, why),) = found.damaged
    assert number == -1 and str(slot.directory) in why
    again.set_damaged_aside()  # the job goes on without it
    again.close()
    later = open_store()
    assert not later.damaged_snapshots
    assert [each.is_resumable for each in find_leftovers(later.directory)] == [True]


@pytest.mark.fault
def test_the_number_of_a_damaged_generation_is_not_used_again(open_store: Opener) -> None:
    store = open_store()
    generation(store, 2, step=2)
    store.close()
    (store.directory / "generation-2" / MANIFEST).write_text("{}")
    again = open_store()
    slot, _ = snapshot(again, 3)
    with pytest.raises(StoreError, match="Numbers are never used twice"):
        again.commit(slot, 2)
    assert again.commit(slot, 3).step == 3


# ------------------------------------------------------------------ what is examined


@pytest.mark.fault
@pytest.mark.parametrize("damage", [rot, cut, empty, Path.unlink])
def test_what_is_damaged_counts_no_more_until_the_manifest_is_read_anew(
    open_store: Opener, damage: Callable[[Path], None]
) -> None:
    store = open_store()
    before = generation(store, 3, step=2)
    assert store.examine(3) == [] and store.manifest(3) is before
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
    assert again.damage_found() == {} and again.examine(3) == []
    damage(again.generation_directory(3) / "rank-0.safetensors")
    assert again.examine(3)
    again.drop(3)
    assert again.damage_found() == {}
    with pytest.raises(StoreError, match="not committed here"):
        again.examine(3)


def fetched(store: HostStore, tensor: Tensor, box: Box) -> Staged:
    """Return a piece of step 2 that has come from another host."""
    staged = store.stage(Collection.of([(tensor, box)]))
    head = staged.path.read_bytes()[: int(staged.begins[0])]
    staged.path.write_bytes(head + values_of(tensor, 2)[slices(box)].tobytes())
    return staged


@pytest.mark.fault
def test_what_has_come_whole_again_is_damaged_no_more(store: HostStore) -> None:
    before = generation(store, 3, step=2)
    empty(store.generation_directory(3) / "rank-1.safetensors")
    found = store.examine(3)
    lost = [before.collection.box(row) for row in np.flatnonzero(before.file == 1).tolist()]
    assert len(found) == len(lost) > 1
    for done, (tensor, box) in enumerate(lost, 1):
        store.extend(3, fetched(store, tensor, box))
        assert len(store.damage_found().get(3, [])) == len(lost) - done
    assert store.examine(3) == [] and len(store.manifest(3).collection) == len(before.collection)


@pytest.mark.fault
def test_what_has_come_meanwhile_stays(store: HostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = generation(store, 3, step=2)
    rot(store.generation_directory(3) / "rank-0.safetensors")
    staged = fetched(store, WEIGHT, whole(WEIGHT.shape))
    damage = StoredRows.damage

    def grows(rows: StoredRows) -> Iterator[tuple[int, str]]:
        store.extend(3, staged)
        yield from damage(rows)

    monkeypatch.setattr(StoredRows, "damage", grows)
    found = store.examine(3)
    left = store.manifest(3)
    assert found and len(left.collection) == len(before.collection) - len(found) + 1
    assert left.files[-1].name.startswith("fetched-") and (left.file == len(left.files) - 1).any()


@pytest.mark.fault
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
