"""Parts of generations that come to a durable directory beside the training: hidden until all are
written, whatever dies, fills or interferes meanwhile."""

import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from scalai.core.errors import DamageError, StoreError
from scalai.core.tensors.collection import Collection
from scalai.store import archive
from scalai.store.archive import HiddenCopy, repair, retire, show
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest, read_manifest
from scalai.store.parts import snapshot_name
from scalai.store.places import find_generations
from support.steps import DEADLINE_S, Beside, with_another_between
from support.store_states import Opener, cut, generation, rot, size_of, two_ranks


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "job"


@pytest.fixture
def folder(disk: Path) -> Path:
    return disk / "generation-3"


@pytest.fixture
def a(open_store: Opener) -> HostStore:
    """A host that holds generation 3."""
    store = open_store(host="a")
    generation(store, 3, step=30)
    return store


def archived(
    open_store: Opener, disk: Path, host: str, held: dict[int, Collection] | None = None,
    snapshot: str = "r-1-30",
) -> HostManifest:  # fmt: skip
    """Have a host write its part of generation 3, hidden."""
    with open_store(host=host) as store:
        part = generation(store, 3, step=30, held=held, snapshot=snapshot)
        assert store.archive(3, disk, own_only=True) == size_of(part)
    return part


def half(rank: int) -> dict[int, Collection]:
    return {rank: two_ranks()[rank]}


def test_a_part_is_hidden_until_it_is_shown_and_is_the_same_then(
    a: HostStore, open_store: Opener, disk: Path, folder: Path
) -> None:
    written = a.manifest(3)
    assert a.archive(3, disk, own_only=True) == size_of(written)
    show(disk, 3, "another")
    assert find_generations(disk) == {} and names(folder) == [".a.archived"]
    show(disk, 3, snapshot_name(written))
    assert names(folder) == ["a"]
    assert a.archive(3, disk, own_only=True) == 0, "it is there"
    store = open_store(host="b")
    attached = store.attach([(folder / "a", read_manifest(folder / "a"))])
    assert sorted(attached.fingerprint.tolist()) == sorted(written.fingerprint.tolist())
    with store.open_rows(3) as rows:
        assert list(rows.damage()) == []


@pytest.mark.fault
@pytest.mark.parametrize("damage", [rot, cut])
def test_what_is_damaged_in_memory_does_not_come_to_the_disk(
    a: HostStore, disk: Path, folder: Path, damage: Callable[[Path], object]
) -> None:
    damage(a.generation_directory(3) / "rank-1.safetensors")
    with pytest.raises(DamageError, match="rank-1"):
        a.archive(3, disk, own_only=True)
    assert names(folder) == []


@pytest.mark.fault
def test_a_host_lets_the_part_of_another_appear_that_died(
    open_store: Opener, disk: Path, folder: Path
) -> None:
    archived(open_store, disk, "a", half(0))
    repair(disk, "b")
    assert names(folder) == [".a.archived"], "nobody knows whether all are written"
    shutil.copytree(folder / ".a.archived", folder / "b")
    for left in (folder / ".b.partial", folder / ".a.partial", disk / ".retired-1-x"):
        left.mkdir()
    repair(disk, "b")
    assert names(folder) == [".a.partial", "a", "b"], "a may still write"
    assert names(disk) == ["generation-3"]


@pytest.mark.fault
def test_a_generation_that_all_had_written_when_all_died_appears(
    open_store: Opener, disk: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archived(open_store, disk, "a", half(0))
    repair(disk, "c")
    assert names(folder) == [".a.archived"]
    assert "event=not_shown" in caplog.text and str(folder) in caplog.text
    archived(open_store, disk, "b", half(1))
    repair(disk, "c")
    assert names(folder) == ["a", "b"]


@pytest.mark.fault
def test_hidden_parts_of_two_snapshots_are_no_state(
    open_store: Opener, disk: Path, folder: Path
) -> None:
    for rank, host in enumerate("ab"):
        archived(open_store, disk, host, half(rank), snapshot=f"{host}-1-30")
    repair(disk, "c")
    assert names(folder) == [".a.archived", ".b.archived"]


def test_what_is_saved_at_the_end_meanwhile_is_the_same(
    a: HostStore, disk: Path, folder: Path
) -> None:
    a.archive(3, disk, own_only=True)
    a.copy_to(3, disk)
    show(disk, 3, snapshot_name(a.manifest(3)))
    assert names(folder) == ["a"]


@pytest.mark.fault
def test_several_hosts_show_the_same_parts_at_once(open_store: Opener, tmp_path: Path) -> None:
    """Each looks at parts that another one renames meanwhile, at any of its steps."""
    written = tmp_path / "written"
    for host in "ab":
        archived(open_store, written, host)
    for step in count(1):
        disk = tmp_path / f"disk-{step}"
        shutil.copytree(written, disk)
        run = partial(show, disk, 3, "r-1-30")
        has_more = with_another_between(run, run, step)
        assert names(disk / "generation-3") == ["a", "b"], step
        if not has_more:
            break
    assert step > 8


def saved(disk: Path, *numbers: int) -> None:
    for number in numbers:
        (disk / f"generation-{number}" / "a").mkdir(parents=True)


def test_generations_before_a_number_go_and_nothing_else(disk: Path) -> None:
    saved(disk, 2, 9, 10, 11)
    (disk / "finished.json").write_text("{}")
    (disk / "generation-x").mkdir()
    assert sorted(retire(disk, 10)) == [2, 9]
    assert names(disk) == ["finished.json", "generation-10", "generation-11", "generation-x"]
    assert retire(disk, 10) == []


def test_several_hosts_retire_at_once(tmp_path: Path) -> None:
    for step in count(1):
        disk, removed = tmp_path / f"disk-{step}", list[int]()
        saved(disk, 1, 2, 3)

        def run(disk: Path = disk, removed: list[int] = removed) -> None:
            removed.extend(retire(disk, 3))

        has_more = with_another_between(run, run, step)
        assert sorted(removed) == [1, 2] and names(disk) == ["generation-3"], step
        if not has_more:
            break
    assert step > 5


@pytest.mark.fault
def test_a_disk_that_cannot_be_written_is_said_and_leaves_nothing(
    a: HostStore, disk: Path, folder: Path
) -> None:
    disk.mkdir(parents=True)
    folder.write_text("in the way")
    with pytest.raises(StoreError, match=r"generation-3/a cannot be written"):
        a.archive(3, disk, own_only=True)
    assert names(disk) == ["generation-3"]


def test_another_state_under_its_number_is_refused(
    a: HostStore, open_store: Opener, disk: Path, folder: Path
) -> None:
    a.copy_to(3, disk)
    store = open_store(host="b")
    generation(store, 3, step=31)
    with pytest.raises(StoreError, match="holds another state under the same number"):
        store.archive(3, disk, own_only=True)
    assert names(folder) == ["a"]


def test_a_copy_may_be_given_up_and_leaves_nothing(
    a: HostStore, disk: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, fsync = list[int](), os.fsync
    folder.mkdir(parents=True)

    def slow(descriptor: int) -> None:
        written.append(descriptor)
        a.give_up_archive("nobody wants it.")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(archive, "STEP_BYTES", 16)
        patch.setattr(os, "fsync", slow)
        with pytest.raises(StoreError, match="generation 3 is not archived: nobody wants it"):
            a.archive(3, disk, own_only=True)
    assert len(written) == 1, "it ended with the block that it wrote"
    assert names(folder) == []
    assert a.archive(3, disk, own_only=True) == size_of(a.manifest(3))


@pytest.mark.fault
def test_a_snapshot_that_needs_its_room_does_not_wait_for_a_copy(
    a: HostStore, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation that is copied was dropped, and its bytes are what the next snapshot lacks."""
    begun, given_up = threading.Event(), threading.Event()
    fsync, give_up = os.fsync, HiddenCopy.give_up

    def slow(descriptor: int) -> None:
        begun.set()
        assert given_up.wait(DEADLINE_S)
        fsync(descriptor)

    def noted(copy: HiddenCopy, reason: str) -> None:
        give_up(copy, reason)
        given_up.set()

    monkeypatch.setattr(archive, "STEP_BYTES", 16)
    monkeypatch.setattr(HiddenCopy, "give_up", noted)
    budget = 2 * a.room().in_use + 100
    with HostStore("job", "b", tmp_path / "tight", budget_bytes=budget) as store:
        generation(store, 3, step=30)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", slow)
            copying = Beside(lambda: store.archive(3, disk, own_only=True))
            assert begun.wait(DEADLINE_S)
        generation(store, 4, step=40)
        store.drop(3)
        generation(store, 5, step=50)
        assert "a snapshot needed the room" in str(copying.end().errors[0])
        assert store.generations() == [4, 5]
