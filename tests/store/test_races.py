"""What the agent's loop, its background and its data plane do to one store at once."""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.errors import StoreError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import whole
from scalai.store import directory as directory_module
from scalai.store import pool as pool_module
from scalai.store.directory import HostDirectory
from scalai.store.files import prefault
from scalai.store.host import HostStore
from support.steps import DEADLINE_S, Beside, SeenLock
from support.store_states import Opener, generation, is_whole, snapshot, two_ranks

pytestmark = pytest.mark.fault

BIG = Tensor("param/w", (1024, 1024), "F32")
HELD = {0: Collection.of([(BIG, whole(BIG.shape))])}


@pytest.fixture
def store(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> HostStore:
    """A store with generation 1, of which a thread beside is seen to wait."""
    monkeypatch.setattr(threading, "RLock", SeenLock)
    store = open_store()
    monkeypatch.undo()
    generation(store, 1, step=1)
    return store


def once_beside(work: Callable[[], object], found: list[Beside]) -> None:
    """Let another thread do something as far as it comes, once."""
    if not found:
        found.append(Beside(work).until_it_stands())


def test_a_folder_that_goes_while_room_is_counted_is_no_error(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops: list[Beside] = []
    real = Path.glob

    def glob(self: Path, pattern: str) -> Any:
        found = list(real(self, pattern))
        if pattern == "generation-*/*":
            once_beside(lambda: store.drop(1), drops)
        return found

    monkeypatch.setattr(Path, "glob", glob)
    store.discard(store.reserve(two_ranks()))
    assert drops and not drops[0].end().errors


def test_a_pooled_file_that_goes_while_it_is_looked_at_is_no_error(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.drop(1)
    takes: list[Beside] = []

    def scandir(path: Any) -> Any:
        found = list(os.scandir(path))
        once_beside(lambda: store.stage(two_ranks()[0]), takes)
        return found

    monkeypatch.setattr(pool_module, "os", SimpleNamespace(**{**vars(os), "scandir": scandir}))
    store.discard(store.reserve(two_ranks()))
    assert takes and not takes[0].end().errors


def test_a_reader_and_a_drop_at_one_moment_give_the_files_back_once(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drop comes as the reader looks whether it was dropped, and neither gives back alone."""
    drops: list[Beside] = []
    gives_back = threading.Event()
    is_dir, recycle = Path.is_dir, HostDirectory.recycle

    def held_is_dir(self: Path) -> bool:
        if self.name == "dropped-1":
            once_beside(lambda: store.drop(1), drops)
        return is_dir(self)

    def met(folders: HostDirectory, folder: Path) -> None:
        thread = threading.current_thread()
        if isinstance(thread, Beside):
            thread.stand()
            assert gives_back.wait(DEADLINE_S)
        gives_back.set()
        recycle(folders, folder)

    monkeypatch.setattr(Path, "is_dir", held_is_dir)
    monkeypatch.setattr(HostDirectory, "recycle", met)
    with store.open_rows(1):
        pass
    gives_back.set()
    assert not drops[0].end().errors
    assert store.room().in_use == 0 and store.room().reusable > 0


@pytest.fixture
def narrow(store: HostStore, monkeypatch: pytest.MonkeyPatch) -> HostStore:
    """A store with room for two snapshots of ``HELD``, of which one is a generation."""
    store.drop(1)
    generation(store, 2, step=1, held=HELD)
    total = 2 * store.manifest(2).files[0].size_bytes + (1 << 20)

    def free(path: Path) -> int:
        files = [p for p in store.directory.rglob("*.safetensors") if p.is_file()]
        return total - sum(p.stat().st_size for p in files)

    monkeypatch.setattr(directory_module, "free_bytes", free)
    return store


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The making of files' pages waits in its third step: ``reached``, until ``go`` is set."""
    found = SimpleNamespace(reached=threading.Event(), go=threading.Event(), steps=0)

    def held(*arguments: Any) -> None:
        found.steps += 1
        if found.steps == 3:
            found.reached.set()
            assert found.go.wait(DEADLINE_S)
        prefault(*arguments)

    monkeypatch.setattr(pool_module, "STEP_BYTES", 1 << 20)
    monkeypatch.setattr(pool_module, "prefault", held)
    yield found
    found.go.set()


def made_as_far(store: HostStore, pages: SimpleNamespace) -> Beside:
    """Have a snapshot made up to its third step."""
    making = Beside(lambda: store.reserve(HELD))
    assert pages.reached.wait(DEADLINE_S)
    return making


def test_a_snapshot_takes_the_room_of_one_that_an_ended_round_still_makes(
    narrow: HostStore, pages: SimpleNamespace
) -> None:
    stale = made_as_far(narrow, pages)
    following = Beside(lambda: narrow.discard(narrow.reserve(HELD))).until_it_stands()
    pages.go.set()
    assert not following.end().errors
    (error,) = stale.end().errors
    assert isinstance(error, StoreError) and "the round they were made for has ended" in str(error)
    assert list(narrow.directory.glob("snapshot-*")) == []


def test_a_round_that_ends_stops_what_is_made_for_it(
    narrow: HostStore, pages: SimpleNamespace
) -> None:
    stale = made_as_far(narrow, pages)
    narrow.stop_reserving()
    pages.go.set()
    assert "has ended" in str(stale.end().errors[0])
    assert pages.steps == 3 and narrow.room().reusable > 0  # its pages are used again


def test_a_snapshot_waits_for_room_that_an_ended_round_gives_back(narrow: HostStore) -> None:
    stale = narrow.reserve(HELD)
    following = Beside(lambda: narrow.reserve(HELD)).until_it_stands()
    assert not following.result and not following.errors
    narrow.discard(stale)
    assert following.end().result


def test_room_that_nobody_gives_back_is_waited_for_only_so_long(
    narrow: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "GIVEN_BACK_S", 0.1)
    narrow.reserve(HELD)
    with pytest.raises(StoreError, match="two generations of them need"):
        narrow.reserve(HELD)


def test_a_finished_jobs_store_goes_although_files_are_being_made(
    narrow: HostStore, pages: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    making = made_as_far(narrow, pages)
    removing = Beside(narrow.remove).until_it_stands()
    pages.go.set()
    assert not removing.end().errors and not narrow.directory.exists()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert isinstance(making.end().errors[0], StoreError)
    with pytest.raises(StoreError, match="closed"):
        narrow.reserve(two_ranks())


def test_a_finished_jobs_store_goes_although_a_reader_comes(
    store: HostStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = shutil.rmtree

    def remove_beside_a_reader(path: Path, ignore_errors: bool = False) -> None:
        """As where the reader makes its folder after the names were listed, once."""
        monkeypatch.setattr("shutil.rmtree", remove)
        remove(path, ignore_errors=ignore_errors)
        (path / "pinned-1-x").mkdir(parents=True)
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr("shutil.rmtree", remove_beside_a_reader)
    store.remove()
    assert not store.directory.parent.exists() and "event=left" not in caplog.text


def test_a_store_that_cannot_be_removed_is_left_with_a_warning(
    store: HostStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr("shutil.rmtree", fail)
    store.remove()
    assert "event=left" in caplog.text and "scalai clean" in caplog.text


def test_commits_and_drops_beside_reserves(store: HostStore) -> None:
    """As in an agent: snapshots are made by one thread, committed and dropped by another."""
    one_at_a_time = threading.Lock()

    def reserve() -> None:
        for _ in range(60):
            with one_at_a_time:
                slot = store.reserve(two_ranks())
            store.discard(slot)

    beside = Beside(reserve)
    for number in range(2, 40):
        with one_at_a_time:
            slot, _ = snapshot(store, number)
        store.commit(slot, number)
        assert is_whole(store, number, step=number)
        store.drop(number)
    assert not beside.end().errors
