"""Parts of generations that come to a durable directory beside the training: hidden until all are
written, whatever dies, fills or interferes meanwhile."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from scalai.core.errors import DamageError, StoreError
from scalai.store import archive
from scalai.store.archive import repair, retire, show
from scalai.store.manifest import HostManifest, read_manifest
from scalai.store.parts import snapshot_name
from scalai.store.places import find_generations
from support.store_states import Opener, generation, two_ranks


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def size_of(part: HostManifest) -> int:
    return sum(file.size_bytes for file in part.files)


def test_a_part_is_hidden_until_it_is_shown_and_is_the_same_then(
    open_store: Opener, tmp_path: Path
) -> None:
    disk = tmp_path / "disk" / "job"
    with open_store(host="a") as store:
        generation(store, 3, step=30)
        written = store.manifest(3)
        assert store.archive(3, disk, own_only=True) == size_of(written)
        assert find_generations(disk) == {} and names(disk / "generation-3") == [".a.archived"]
        show(disk, 3, snapshot_name(written))
        assert names(disk / "generation-3") == ["a"]
        assert store.archive(3, disk, own_only=True) == 0, "it is there"
    shown = disk / "generation-3" / "a"
    with open_store(host="b") as store:
        attached = store.attach([(shown, read_manifest(shown))])
        assert sorted(attached.fingerprint.tolist()) == sorted(written.fingerprint.tolist())
        with store.open_rows(3) as rows:
            assert list(rows.damage()) == []


@pytest.mark.fault
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_is_damaged_in_memory_does_not_come_to_the_disk(
    open_store: Opener, tmp_path: Path, is_cut: bool
) -> None:
    disk = tmp_path / "disk"
    with open_store(host="a") as store:
        generation(store, 3, step=30)
        path = store.generation_directory(3) / "rank-1.safetensors"
        if is_cut:
            os.truncate(path, 10)
        else:
            data = bytearray(path.read_bytes())
            data[-1] ^= 0xFF
            path.write_bytes(data)
        with pytest.raises(DamageError, match="rank-1"):
            store.archive(3, disk, own_only=True)
        assert names(disk / "generation-3") == []


def test_of_another_snapshot_nothing_is_shown(open_store: Opener, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with open_store(host="a") as store:
        generation(store, 3, step=30)
        store.archive(3, disk, own_only=True)
    show(disk, 3, "another")
    assert names(disk / "generation-3") == [".a.archived"]


@pytest.mark.fault
def test_a_host_lets_the_part_of_another_appear_that_died(
    open_store: Opener, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    name = archive_half(open_store, disk, "a", 0)
    repair(disk, "b")
    assert names(disk / "generation-3") == [".a.archived"], "nobody knows whether all are written"
    shutil.copytree(disk / "generation-3" / ".a.archived", disk / "generation-3" / "b")
    (disk / "generation-3" / ".b.partial").mkdir()
    (disk / "generation-3" / ".a.partial").mkdir()
    (disk / ".retired-1-x").mkdir()
    repair(disk, "b")
    assert names(disk / "generation-3") == [".a.partial", "a", "b"], "a may still write"
    assert names(disk) == ["generation-3"]
    show(disk, 3, name)


def archive_half(open_store: Opener, disk: Path, host: str, rank: int) -> str:
    """Have a host write its half of generation 3; return the snapshot's name."""
    with open_store(host=host) as store:
        generation(store, 3, step=30, held={rank: two_ranks()[rank]})
        store.archive(3, disk, own_only=True)
        return snapshot_name(store.manifest(3))


@pytest.mark.fault
def test_a_generation_that_all_had_written_when_all_died_appears(
    open_store: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    archive_half(open_store, disk, "a", 0)
    repair(disk, "c")
    assert names(disk / "generation-3") == [".a.archived"]
    assert "event=not_shown" in caplog.text and str(disk / "generation-3") in caplog.text
    archive_half(open_store, disk, "b", 1)
    repair(disk, "c")
    assert names(disk / "generation-3") == ["a", "b"]


@pytest.mark.fault
def test_hidden_parts_of_two_snapshots_are_no_state(open_store: Opener, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    for rank, host in enumerate("ab"):
        with open_store(host=host) as store:
            held = {rank: two_ranks()[rank]}
            generation(store, 3, step=30, held=held, snapshot=f"{host}-1-30")
            store.archive(3, disk, own_only=True)
    repair(disk, "c")
    assert names(disk / "generation-3") == [".a.archived", ".b.archived"]


def test_what_is_saved_at_the_end_meanwhile_is_the_same(open_store: Opener, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with open_store(host="a") as store:
        generation(store, 3, step=30)
        store.archive(3, disk, own_only=True)
        store.copy_to(3, disk)
        show(disk, 3, snapshot_name(store.manifest(3)))
    assert names(disk / "generation-3") == ["a"]


@pytest.mark.fault
def test_several_hosts_show_the_same_parts_at_once(open_store: Opener, tmp_path: Path) -> None:
    """Each looks at parts that another one renames meanwhile."""
    written, hosts, problems = tmp_path / "written", "abcdef", list[BaseException]()
    for host in hosts:
        with open_store(host=host) as store:
            generation(store, 3, step=30)
            name = snapshot_name(store.manifest(3))
            store.archive(3, written, own_only=True)

    def run(disk: Path) -> None:
        try:
            show(disk, 3, name)
        except BaseException as error:
            problems.append(error)

    for number in range(30):
        disk = tmp_path / f"disk-{number}"
        shutil.copytree(written, disk)
        threads = [threading.Thread(target=run, args=(disk,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not problems, problems
        assert names(disk / "generation-3") == list(hosts)


def test_generations_before_a_number_go_and_nothing_else(
    open_store: Opener, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with open_store(host="a") as store:
        for number in (2, 9, 10, 11):
            generation(store, number, step=number)
            store.copy_to(number, disk)
            store.drop(number)
    (disk / "finished.json").write_text("{}")
    (disk / "generation-x").mkdir()
    assert sorted(retire(disk, 10)) == [2, 9]
    assert names(disk) == ["finished.json", "generation-10", "generation-11", "generation-x"]
    assert retire(disk, 10) == []


def test_several_hosts_retire_at_once(open_store: Opener, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with open_store(host="a") as store:
        for number in range(1, 9):
            generation(store, number, step=number)
            store.copy_to(number, disk)
            store.drop(number)
    removed: list[int] = []
    threads = [threading.Thread(target=lambda: removed.extend(retire(disk, 8))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(removed) == list(range(1, 8)) and names(disk) == ["generation-8"]


@pytest.mark.fault
def test_a_disk_that_cannot_be_written_is_said_and_leaves_nothing(
    open_store: Opener, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with open_store(host="a") as store:
        generation(store, 3, step=30)
        disk.mkdir()
        (disk / "generation-3").write_text("in the way")
        with pytest.raises(StoreError, match=r"generation-3/a cannot be written"):
            store.archive(3, disk, own_only=True)
        assert names(disk) == ["generation-3"]


def test_another_state_under_its_number_is_refused(open_store: Opener, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with open_store(host="a") as store:
        generation(store, 3, step=30)
        store.copy_to(3, disk)
    with open_store(host="b") as store:
        generation(store, 3, step=31)
        with pytest.raises(StoreError, match="holds another state under the same number"):
            store.archive(3, disk, own_only=True)
    assert names(disk / "generation-3") == ["a"]


def test_a_copy_may_be_given_up_and_leaves_nothing(
    open_store: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "STEP_BYTES", 16)
    disk = tmp_path / "disk"
    with open_store(host="a") as store:
        generation(store, 3, step=30)
        written, fsync = list[int](), os.fsync
        (disk / "generation-3").mkdir(parents=True)

        def slow(descriptor: int) -> None:
            written.append(descriptor)
            store.give_up_archive("nobody wants it.")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", slow)
        with pytest.raises(StoreError, match="generation 3 is not archived: nobody wants it"):
            store.archive(3, disk, own_only=True)
        assert len(written) == 1, "it ended with the block that it wrote"
        assert names(disk / "generation-3") == []
        monkeypatch.undo()
        assert store.archive(3, disk, own_only=True) == size_of(store.manifest(3))


@pytest.mark.fault
def test_a_snapshot_that_needs_its_room_does_not_wait_for_a_copy(
    open_store: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation that is copied was dropped, and its bytes are what the next snapshot lacks."""
    disk, begun, told = tmp_path / "disk", threading.Event(), list[str]()
    with open_store(host="a") as store:
        generation(store, 3, step=30)
        store._budget_bytes = 2 * store._folders.room().in_use + 100
        fsync = os.fsync

        def slow(descriptor: int) -> None:
            begun.set()
            deadline = threading.Event()
            while store._archive is not None and store._archive._reason is None:
                assert not deadline.wait(0.01)
            fsync(descriptor)

        monkeypatch.setattr(archive, "STEP_BYTES", 16)

        def copy() -> None:
            try:
                store.archive(3, disk, own_only=True)
            except StoreError as error:
                told.append(str(error))

        thread = threading.Thread(target=copy, daemon=True)
        monkeypatch.setattr(os, "fsync", slow)
        thread.start()
        assert begun.wait(60)
        monkeypatch.undo()
        generation(store, 4, step=40)
        store.drop(3)
        generation(store, 5, step=50)
        thread.join(60)
        assert told and "a snapshot needed the room" in told[0]
        assert store.generations() == [4, 5]
