"""What a store and a durable directory trust: folders and files of this user alone, one owner, and
content that is written whole or not at all."""

import fcntl
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from scalai.core.errors import StoreError, UsageError
from scalai.launch.agent.durable import (
    attach_durable,
    check_writable,
    refuse_finished,
    write_finished,
)
from scalai.launch.config.endpoint import CARD, read_card
from scalai.launch.coordinator.discovery import one_at_a_time
from scalai.store import lock
from scalai.store.atomic import make_folder, partial_of, replace_file, write_new
from scalai.store.host import HostStore
from scalai.store.lock import LOCK, StoreLock, find_owner
from scalai.store.secure import Folder, open_below
from support.store_states import Opener, full_disk, generation

pytestmark = pytest.mark.fault

STRANGER = 23456
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


def as_stranger(code: str, *arguments: object) -> None:
    """Run Python as another user of this machine."""
    become = f"import os, sys; os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})\n"
    subprocess.run(
        [sys.executable, "-c", become + code, *map(str, arguments)], check=True, timeout=60
    )


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all may write to, like /dev/shm, that all can reach."""
    with tempfile.TemporaryDirectory(prefix="scalai-test-", dir="/dev/shm") as above:
        os.chmod(above, 0o711)
        folder = Path(above, "shm")
        folder.mkdir()
        folder.chmod(0o1777)
        yield folder


@needs_root
@pytest.mark.parametrize("level", ["root", "job", "host"])
def test_a_folder_that_a_stranger_made_first_is_refused(shared: Path, level: str) -> None:
    root = shared / "scalai"
    path = {"root": root, "job": root / "j", "host": root / "j" / "a"}[level]
    if path.parent != shared:
        path.parent.mkdir(mode=0o700, parents=True)
        os.chown(path.parent, STRANGER, STRANGER)
    as_stranger("os.makedirs(sys.argv[1]); os.chmod(sys.argv[1], 0o777)", path)
    for parent in path.parents:
        if parent.is_relative_to(root):
            os.chown(parent, 0, 0)
    with pytest.raises(StoreError, match=rf"{path} belongs to user {STRANGER}.*--store-dir"):
        HostStore("j", "a", root)
    assert os.listdir(path) == []


@needs_root
def test_a_link_of_a_stranger_does_not_cut_a_file(shared: Path) -> None:
    precious = shared.parent / "precious"
    precious.write_text("precious")
    job = shared / "scalai" / "default"
    as_stranger(
        "os.makedirs(sys.argv[1]); os.chmod(sys.argv[1], 0o777)\n"
        "os.chmod(os.path.dirname(sys.argv[1]), 0o777)\n"
        "os.symlink(sys.argv[2], sys.argv[1] + '/coordinator.lock')",
        job, precious,
    )  # fmt: skip
    with pytest.raises(StoreError, match="belongs to user"), one_at_a_time(job):
        pass
    assert precious.read_text() == "precious"


@needs_root
def test_a_card_of_a_stranger_is_not_believed(shared: Path) -> None:
    job = shared / "scalai" / "default"
    as_stranger(
        "os.makedirs(sys.argv[1])\n"
        'open(sys.argv[1] + \'/coordinator.json\', "w").write('
        '\'{"host": "127.0.0.1", "port": 1, "token": "00"}\')',
        job,
    )  # fmt: skip
    for owned in (job.parent, job):
        with pytest.raises(StoreError, match=f"{owned} belongs to user"):
            read_card(job)
        os.chown(owned, 0, 0)
    with pytest.raises(StoreError, match=r"coordinator\.json is no plain file of user 0"):
        read_card(job)


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(StoreError, match=r"link cannot be used .*symbolic link"):
        open_below(tmp_path / "link", make=True)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    job = tmp_path / "store" / "default"
    open_below(job.parent, job.name, make=True).close()
    for name in ("coordinator.lock", CARD):
        (job / name).symlink_to(precious)
    with pytest.raises(StoreError, match=r"coordinator.lock cannot be used"), one_at_a_time(job):
        pass
    with pytest.raises(StoreError, match=r"coordinator.json cannot be used"):
        read_card(job)
    assert precious.read_text() == "precious"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with Folder.open(tmp_path) as folder, pytest.raises(StoreError, match="no plain file"):
        folder.open_file("lock", os.O_RDWR)


@pytest.mark.parametrize("level", ["store", "store/j", "store/j/a"])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, level: str) -> None:
    (tmp_path / "store/j/a").mkdir(parents=True)
    for path in (tmp_path / "store", tmp_path / "store/j", tmp_path / "store/j/a"):
        path.chmod(0o755)
    (tmp_path / level).chmod(0o775)
    with pytest.raises(StoreError, match=rf"{level} may be written to .*mode is 775.*chmod go-w"):
        HostStore("j", "a", tmp_path / "store")


def test_a_root_may_be_a_shared_folder_with_the_sticky_bit(shared: Path) -> None:
    HostStore("j", "a", shared).close()
    assert stat.S_IMODE((shared / "j").stat().st_mode) == 0o700
    shared.chmod(0o777)
    with pytest.raises(StoreError, match="choose a folder below it"):
        HostStore("j", "a", shared)


@needs_root
def test_a_shared_root_of_a_stranger_is_refused(shared: Path) -> None:
    os.chown(shared, STRANGER, STRANGER)
    with pytest.raises(StoreError, match="belongs to user"):
        HostStore("j", "a", shared)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as folder:
        folder.write("card", b"first")
        (tmp_path / f".card.{os.getpid()}").symlink_to(tmp_path / "elsewhere")
        folder.write("card", b"second")
        assert folder.read("card") == b"second" and not (tmp_path / "elsewhere").exists()
        with pytest.raises(StoreError):
            folder.write("x" * 256, b"a name that is too long")
    assert sorted(os.listdir(tmp_path)) == ["card"]


@pytest.mark.parametrize("name", ["..", "../x", "", "a b", ".hidden", "a/b", "x" * 201, "a\n"])
def test_names_that_are_no_folders_are_refused_before_anything_is_made(
    tmp_path: Path, name: str
) -> None:
    for job, host in ((name, "a"), ("j", name)):
        with pytest.raises(UsageError, match="cannot name a directory"):
            HostStore(job, host, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@needs_root
@pytest.mark.parametrize("level", ["job", "generation", "part", "file", "mark"])
def test_a_durable_state_that_a_stranger_planted_is_not_gone_on_from(
    shared: Path, tmp_path: Path, level: str
) -> None:
    job = shared / "disk" / "j"
    with HostStore("j", "gone", tmp_path / "store") as store:
        generation(store, 3, step=30)
        store.copy_to(3, job)
    write_finished(job, 30, 3)
    (shared / "disk").chmod(0o1777)
    part = job / "generation-3" / "gone"
    paths = {
        "job": job, "generation": part.parent, "part": part, "file": part / "rank-0.safetensors",
        "mark": job / "finished.json",
    }  # fmt: skip
    os.chown(paths[level], STRANGER, STRANGER)
    with HostStore("j", "a", tmp_path / "store") as store:
        if level == "job":
            with pytest.raises(StoreError, match=rf"{job} belongs to user {STRANGER}.*--durable-d"):
                attach_durable(store, job)
            with pytest.raises(StoreError, match="belongs to user"):
                refuse_finished(job)
        elif level == "mark":
            with pytest.raises(StoreError, match=r"finished\.json is no plain file of user 0"):
                refuse_finished(job)
        else:
            assert f"user {STRANGER}" in attach_durable(store, job)[3]
            assert store.generations() == []


def test_what_others_may_write_to_is_no_state_and_no_durable_directory(tmp_path: Path) -> None:
    job = tmp_path / "disk" / "j"
    with HostStore("j", "gone", tmp_path / "store") as store:
        generation(store, 3, step=30)
        store.copy_to(3, job)
    file = job / "generation-3" / "gone" / "rank-0.safetensors"
    with HostStore("j", "a", tmp_path / "store") as store:
        file.chmod(0o620)
        assert "may be written to by other users" in attach_durable(store, job)[3]
        file.chmod(0o640)  # a group may read
        assert attach_durable(store, job) == {} and store.generations() == [3]
    check_writable(tmp_path / "disk")
    (tmp_path / "disk").chmod(0o770)
    with pytest.raises(StoreError, match=r"disk may be written to by other users.*--durable-dir"):
        check_writable(tmp_path / "disk")


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_all_that_a_store_makes_is_for_its_user_alone(tmp_path: Path, mask: int) -> None:
    """In memory and on a disk: weights as their manifest."""
    before = os.umask(mask)
    try:
        with HostStore("j", "a", tmp_path / "store") as store:
            generation(store, 3, step=30)
            store.copy_to(3, tmp_path / "disk" / "saved")
            store.archive(3, tmp_path / "disk" / "archived", own_only=True)
        write_finished(tmp_path / "disk" / "saved", 30, 3)
    finally:
        os.umask(before)
    roots = [tmp_path / "store", tmp_path / "disk"]
    made = [*roots, *(path for root in roots for path in root.rglob("*"))]
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    assert len(list(roots[1].rglob("*.safetensors"))) == 4


def test_a_file_server_that_knows_this_user_by_another_number_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS with ``root_squash``: whatever this process makes there belongs to that number."""
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with open_below(tmp_path / "disk", "j", make=True) as folder:
        folder.write("file", b"content")
        assert folder.read("file") == b"content" and os.listdir(folder.descriptor) == ["file"]


# ------------------------------------------------------------------ one owner

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


@contextmanager
def holder(directory: Path, kind: str) -> "Iterator[subprocess.Popen[str]]":
    """Have a process hold the lock; an orphan of it ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """The open folder that ``tmp_path`` is."""
    with Folder.open(tmp_path) as opened:
        yield opened


def test_a_live_owner_is_refused_and_named(tmp_path: Path, folder: Folder) -> None:
    (tmp_path / LOCK).touch()  # of an owner that died before it signed
    with holder(tmp_path, "plain") as process:
        with pytest.raises(StoreError, match=rf"in use by process {process.pid}.*--store-dir"):
            StoreLock.acquire(folder)
        owner = find_owner(folder)
        assert owner is not None and owner.pid == process.pid
    assert find_owner(folder) is None
    StoreLock.acquire(folder).release()


def test_an_orphan_that_inherited_the_lock_does_not_keep_it(tmp_path: Path, folder: Folder) -> None:
    with holder(tmp_path, "orphan") as process:
        process.kill()
        process.wait(30)
        assert find_owner(folder) is None
        held = StoreLock.acquire(folder)
        # The new owner's lock holds, whatever the orphan has.
        with pytest.raises(StoreError, match=f"process {os.getpid()}"):
            StoreLock.acquire(folder)
        held.release()


def sign_otherwise(folder: Path, **change: object) -> None:
    """Change what the owner of a lock has said of itself."""
    told = json.loads((folder / LOCK).read_text())
    (folder / LOCK).write_text(json.dumps(told | change))


@pytest.mark.parametrize("change", [{"boot": "another-boot"}, {"started": 1}, {"pid": 1 << 22}])
def test_an_owner_of_another_boot_or_a_reused_pid_is_gone(
    tmp_path: Path, folder: Folder, change: dict[str, object]
) -> None:
    held = StoreLock.acquire(folder)
    sign_otherwise(tmp_path, **change)
    assert find_owner(folder) is None
    StoreLock.acquire(folder).release()
    held.release()


def test_an_owner_in_another_pid_namespace_cannot_be_judged_and_is_respected(
    tmp_path: Path, folder: Folder
) -> None:
    held = StoreLock.acquire(folder)
    sign_otherwise(tmp_path, namespace="pid:[1]", pid=1 << 22)
    with pytest.raises(StoreError, match="in use"):
        StoreLock.acquire(folder)
    held.release()


def test_opening_a_locked_store_is_refused_and_changes_nothing(open_store: Opener) -> None:
    store = open_store()
    slot = store.directory / "snapshot-5"
    slot.mkdir()
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        open_store()
    assert slot.exists()
    store.close()
    open_store()


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


# ------------------------------------------------------------------ whole or not at all


def test_a_replacement_that_fails_leaves_the_old_content_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    replace_file(path, b"the old content, and longer")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", full_disk)
        replace_file(path, b"the new content, which is the longest of them all")
    assert path.read_bytes() == b"the old content, and longer"
    assert partial_of(path).exists()
    replace_file(path, b"short")
    assert path.read_bytes() == b"short" and os.listdir(tmp_path) == ["state"]


def test_room_that_was_made_beforehand_is_used(tmp_path: Path) -> None:
    path = tmp_path / "state"
    partial_of(path).write_bytes(bytes(4096))
    number = partial_of(path).stat().st_ino
    replace_file(path, b"content", mode=0o600)
    assert path.read_bytes() == b"content" and path.stat().st_ino == number


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_new_file_has_the_mode_that_is_asked_for(tmp_path: Path, mode: int) -> None:
    replace_file(tmp_path / "state", b"", mode=mode)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == mode & ~0o022


def test_what_is_not_durable_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fsync")
    replace_file(tmp_path / "state", b"content", is_durable=False)
    assert (tmp_path / "state").read_bytes() == b"content"


def test_several_writers_of_one_file_leave_the_content_of_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda n: replace_file(path, b"%d" % n * 4096, is_shared=True), range(8)))
    assert len(set(path.read_bytes())) == 1 and len(path.read_bytes()) == 4096
    assert os.listdir(tmp_path) == ["state"]


def test_a_shared_write_that_fails_leaves_nothing_beside(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "state", b"content", is_shared=True)
    assert os.listdir(tmp_path) == ["state"]


def test_a_new_file_is_never_written_over(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    write_new(tmp_path / "a" / "b" / "c", b"first")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a" / "b" / "c", b"second")
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"first"
