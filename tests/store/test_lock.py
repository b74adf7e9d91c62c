"""One owner a directory: refused while it lives, taken over when it is dead."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalai.core.errors import StoreError
from scalai.store import lock
from scalai.store.host import HostStore
from scalai.store.lock import LOCK, StoreLock, find_owner
from scalai.store.secure import Folder
from support.store_states import Opener

HOLD = """
import sys, os
from pathlib import Path
from scalai.store.lock import StoreLock
from scalai.store.secure import Folder
lock = StoreLock.acquire(Folder.open(Path(sys.argv[1])))
if sys.argv[2] == "orphan":
    # A child that inherits the descriptor, as a forked worker does, outlives its parent.
    if os.fork():
        print("held", flush=True)
        sys.stdin.read()
        os._exit(0)
else:
    print("held", flush=True)
sys.stdin.read(1 if sys.argv[2] == "orphan" else -1)
"""


def holder(directory: Path, kind: str) -> "subprocess.Popen[str]":
    """Start a process that holds the lock; returns once it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait(30)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """The open folder that ``tmp_path`` is."""
    with Folder.open(tmp_path) as opened:
        yield opened


def test_a_live_owner_is_refused_and_named(tmp_path: Path, folder: Folder) -> None:
    process = holder(tmp_path, "plain")
    with pytest.raises(StoreError, match=rf"in use by process {process.pid}.*--store-dir"):
        StoreLock.acquire(folder)
    owner = find_owner(folder)
    assert owner is not None and owner.pid == process.pid
    end(process)
    assert find_owner(folder) is None
    StoreLock.acquire(folder).release()


def test_a_second_store_in_this_process_is_refused(open_store: Opener) -> None:
    store = open_store()
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        open_store()
    store.close()
    open_store()


def test_an_orphan_that_inherited_the_lock_does_not_keep_it(tmp_path: Path, folder: Folder) -> None:
    process = holder(tmp_path, "orphan")
    process.kill()
    process.wait(30)
    try:
        assert find_owner(folder) is None
        lock = StoreLock.acquire(folder)
        # The new owner's lock holds, whatever the orphan has.
        with pytest.raises(StoreError, match=f"process {os.getpid()}"):
            StoreLock.acquire(folder)
        lock.release()
    finally:
        end(process)


@pytest.mark.parametrize("change", [{"boot": "another-boot"}, {"started": 1}, {"pid": 1 << 22}])
def test_an_owner_of_another_boot_or_a_reused_pid_is_gone(
    tmp_path: Path, folder: Folder, change: dict[str, object]
) -> None:
    lock = StoreLock.acquire(folder)
    text = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps(text | change))
    assert find_owner(folder) is None
    StoreLock.acquire(folder).release()
    lock.release()


def test_an_owner_in_another_pid_namespace_cannot_be_judged_and_is_respected(
    tmp_path: Path, folder: Folder
) -> None:
    lock = StoreLock.acquire(folder)
    text = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps(text | {"namespace": "pid:[1]", "pid": 1 << 22}))
    with pytest.raises(StoreError, match="in use"):
        StoreLock.acquire(folder)
    lock.release()


def test_a_lock_file_without_content_is_no_obstacle(tmp_path: Path, folder: Folder) -> None:
    (tmp_path / LOCK).touch()
    StoreLock.acquire(folder).release()


def test_opening_a_locked_store_changes_nothing(open_store: Opener) -> None:
    store = open_store()
    slot = store.directory / "snapshot-5"
    slot.mkdir()
    with pytest.raises(StoreError):
        HostStore("job", "a", store.directory.parent.parent)
    assert slot.exists()


@pytest.mark.fault
def test_a_process_that_stands_still_while_it_looks_at_a_lock_is_named_and_not_waited_for(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "GUARD_S", 0.1)
    stopped = folder.open_file(lock.GUARD, os.O_RDWR | os.O_CREAT)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    with pytest.raises(StoreError, match="Is an agent stopped"):
        StoreLock.acquire(folder)
    os.close(stopped)
    StoreLock.acquire(folder).release()
