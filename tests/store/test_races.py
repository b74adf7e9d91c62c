"""What the agent's loop, its background and its data plane do to one store at once."""

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.errors import StoreError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import whole
from scalai.store import directory as directory_module
from scalai.store import pool as pool_module
from scalai.store.files import prefault
from scalai.store.host import HostStore
from support.store_states import Opener, generation, is_whole, snapshot, two_ranks

pytestmark = pytest.mark.fault

DEADLINE_S = 60.0


class Beside:
    """Something that another thread does; what it raised is kept."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.result: list[object] = []
        self.errors: list[BaseException] = []

        def run() -> None:
            try:
                self.result.append(work())
            except BaseException as error:
                self.errors.append(error)

        self.thread = threading.Thread(target=run, name="beside", daemon=True)
        self.thread.start()

    def end(self) -> "Beside":
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        return self

    def may_end(self) -> None:
        """Leave it the time that it needs where nothing holds it up."""
        self.thread.join(0.3)


def test_a_folder_that_goes_while_room_is_counted_is_no_error(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation(store, 1, step=1)
    drops: list[Beside] = []
    real = Path.glob

    def glob(self: Path, pattern: str) -> Any:
        found = list(real(self, pattern))
        if not drops and pattern == "generation-*/*":
            drops.append(Beside(lambda: store.drop(1)))
            drops[0].may_end()
        return found

    monkeypatch.setattr(Path, "glob", glob)
    store.discard(store.reserve(two_ranks()))
    assert drops and not drops[0].end().errors


def test_a_pooled_file_that_goes_while_it_is_looked_at_is_no_error(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation(store, 1, step=1)
    store.drop(1)
    trims: list[Beside] = []

    def scandir(path: Any) -> Any:
        found = list(os.scandir(path))
        if not trims:
            trims.append(Beside(lambda: store._folders.trim(0)))
            trims[0].may_end()
        return found

    monkeypatch.setattr(pool_module, "os", SimpleNamespace(**{**vars(os), "scandir": scandir}))
    store.discard(store.reserve(two_ranks()))
    assert trims and not trims[0].end().errors


def test_a_reader_and_a_drop_at_one_moment_give_the_files_back_once(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation(store, 1, step=1)
    at_the_gap, go = threading.Event(), threading.Event()
    both = threading.Barrier(2)
    is_dir, recycle = Path.is_dir, store._folders.recycle

    def held_is_dir(self: Path) -> bool:
        if self.name == "dropped-1" and threading.current_thread().name == "beside":
            at_the_gap.set()
            go.wait(1)
        return is_dir(self)

    def met(folder: Path) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)
        recycle(folder)

    monkeypatch.setattr(Path, "is_dir", held_is_dir)
    monkeypatch.setattr(store._folders, "recycle", met)

    def read() -> None:
        with store.open_rows(1):
            pass

    reader = Beside(read)
    assert at_the_gap.wait(DEADLINE_S)
    drop = Beside(lambda: store.drop(1))
    drop.may_end()
    go.set()
    assert not reader.end().errors and not drop.end().errors
    assert store._folders.room().in_use == 0 and store._folders.room().reusable > 0


BIG = Tensor("param/w", (1024, 1024), "F32")
HELD = {0: Collection.of([(BIG, whole(BIG.shape))])}


@pytest.fixture
def narrow(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> HostStore:
    """A store with room for two snapshots of ``HELD``, of which one is a generation."""
    store = open_store()
    generation(store, 1, step=1, held=HELD)
    total = 2 * store.manifest(1).files[0].size_bytes + (1 << 20)

    def free(path: Path) -> int:
        files = [p for p in store.directory.rglob("*.safetensors") if p.is_file()]
        return total - sum(p.stat().st_size for p in files)

    monkeypatch.setattr(directory_module, "free_bytes", free)
    return store


def make_slowly(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have pages of files be made a second later. Returns what is set when some are to be made."""
    is_making = threading.Event()

    def held(*arguments: Any) -> None:
        is_making.set()
        time.sleep(1)
        prefault(*arguments)

    monkeypatch.setattr(pool_module, "prefault", held)
    return is_making


def test_a_snapshot_takes_the_room_of_one_that_an_ended_round_still_makes(
    narrow: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_making = make_slowly(monkeypatch)
    stale = Beside(lambda: narrow.reserve(HELD))
    assert is_making.wait(DEADLINE_S)
    narrow.discard(narrow.reserve(HELD))
    (error,) = stale.end().errors
    assert isinstance(error, StoreError) and "the round they were made for has ended" in str(error)
    assert [p.name for p in narrow.directory.glob("snapshot-*")] == []


def test_a_round_that_ends_stops_what_is_made_for_it(
    narrow: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "STEP_BYTES", 4096)
    is_making = threading.Event()
    steps: list[int] = []

    def slow(descriptor: int, low: int, high: int) -> None:
        steps.append(low)
        if len(steps) == 3:
            is_making.set()
            assert stopped.wait(DEADLINE_S)
        prefault(descriptor, low, high)

    stopped = threading.Event()
    monkeypatch.setattr(pool_module, "prefault", slow)
    stale = Beside(lambda: narrow.reserve(HELD))
    assert is_making.wait(DEADLINE_S)
    narrow.stop_reserving()
    stopped.set()
    assert "has ended" in str(stale.end().errors[0])
    assert len(steps) == 3 and narrow._folders.room().reusable > 0  # its pages are used again


def test_a_snapshot_waits_for_room_that_an_ended_round_gives_back(narrow: HostStore) -> None:
    stale = narrow.reserve(HELD)
    following = Beside(lambda: narrow.reserve(HELD))
    following.may_end()
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
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    is_making = make_slowly(monkeypatch)
    making = Beside(lambda: store.reserve(two_ranks()))
    assert is_making.wait(DEADLINE_S)
    store.remove()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not store.directory.exists() and not warnings
    assert isinstance(making.end().errors[0], StoreError)
    with pytest.raises(StoreError, match="closed"):
        store.reserve(two_ranks())


def test_a_finished_jobs_store_goes_although_a_reader_comes(
    store: HostStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generation(store, 1, 3)
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
    for number in range(1, 40):
        with one_at_a_time:
            slot, _ = snapshot(store, number)
        store.commit(slot, number)
        assert is_whole(store, number, step=number)
        store.drop(number)
    assert not beside.end().errors
