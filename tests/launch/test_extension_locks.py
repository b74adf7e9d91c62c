"""Locks that killed workers leave in torch's extension folder, and those of others."""

import errno
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import F_DUPFD, fcntl
from pathlib import Path
from typing import NoReturn

import pytest
from torch.utils.cpp_extension import _get_build_directory

from scalai.launch.agent import extension_locks
from scalai.launch.agent.extension_locks import (
    LOCK,
    PATIENCE_S,
    Lock,
    WorkersLocks,
    extensions_root,
    find_locks,
)
from scalai.vfs.fuse import NAMES_S
from support.stopping import stop

pytestmark = pytest.mark.fault

DEADLINE_S = 60.0
HOLD = """
import os, sys, time
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Give a process that holds a lock as torch's FileBaton does."""
    lock.parent.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_what_a_killed_worker_held_is_removed_and_nothing_else(tmp_path: Path) -> None:
    mine, others, far = (tmp_path / name / "lock" for name in ("mine", "others", "far"))
    far.parent.mkdir()
    far.touch()  # another host builds there: no process of this one holds it
    locks = WorkersLocks(tmp_path)
    with holder(others), holder(mine) as worker:
        locks.look([worker.pid])
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        locks.look([worker.pid])  # it is dead, and nobody has waited for it
        locks.remove_left()
        assert (mine.exists(), others.exists(), far.exists()) == (False, True, True)


def test_a_lock_is_seen_beside_files_that_come_and_go(tmp_path: Path) -> None:
    """Its holder closes another file after its files were listed, and before they are looked at."""
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            for descriptor in [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]:
                os.close(descriptor)

    busy = threading.Thread(target=come_and_go, daemon=True)
    busy.start()
    try:
        with open(tmp_path / LOCK, "w") as held:
            descriptor = fcntl(held.fileno(), F_DUPFD, 500)  # behind those that are closed
        assert all(extension_locks._holder(tmp_path / LOCK) for _ in range(30))
    finally:
        over.set()
        busy.join(DEADLINE_S)
    os.close(descriptor)


@pytest.mark.skipif(
    not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None,
    reason="no /dev/fuse here, or no fuse3",
)
def test_what_others_read_from_a_silent_file_system_holds_nobody_up(tmp_path: Path) -> None:
    """A process of this host has a file open on a mount whose server has stopped."""
    scalai, point = Path(sys.executable).with_name("scalai"), tmp_path / "point"
    point.mkdir()
    (tmp_path / "x.jsonl").write_text("{}\n")
    command = [str(scalai), "mount", "job", str(point), f"--source=x={tmp_path / 'x.jsonl'}"]
    told = subprocess.run(
        [*command, f"--log={tmp_path / 'log'}"], stdout=subprocess.PIPE, text=True, check=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    found = re.search(r"by process (\d+)", told.stdout)
    assert found is not None
    root = tmp_path / "extensions"
    killed = root / "killed" / LOCK
    killed.parent.mkdir(parents=True)
    killed.touch()
    seen: list[Lock] = []
    looking = threading.Thread(target=lambda: seen.extend(find_locks(root)), daemon=True)
    server = int(found[1])
    try:
        descriptor = os.open(point / "dataset" / "x" / "source" / "x.jsonl", os.O_RDONLY)
        stop(server)
        time.sleep(1.5 * NAMES_S)  # until the kernel would ask for the names again
        looking.start()
        looking.join(DEADLINE_S)
        has_ended = not looking.is_alive()
        os.kill(server, signal.SIGKILL)  # it frees whoever waits for it
        with suppress(OSError):  # ENOTCONN: its server is gone
            os.close(descriptor)
        assert has_ended
        assert [(lock.path, lock.pid) for lock in seen] == [(killed, None)]
    finally:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        subprocess.run([scalai, "unmount", "--lazy", point], check=True, timeout=DEADLINE_S)


def test_a_lock_that_its_file_system_does_not_give_up_is_left_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The workers' end is not broken off by it, nor does a healthy round fail."""

    def stale(path: Path, *arguments: object, **named: object) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    def stale_lock(path: Path, *arguments: object, **named: object) -> os.stat_result:
        return stale(path) if path.name == LOCK else os.stat(path)

    path = tmp_path / "fused" / LOCK
    path.parent.mkdir()
    locks = WorkersLocks(tmp_path)
    with holder(path) as process:
        locks.look([process.pid])
        process.kill()
        process.wait(60)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", stale)
            locks.remove_left()
    assert path.exists() and "Stale file handle" in caplog.text
    for its_stat in (stale, stale_lock):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "stat", its_stat)
            assert list(find_locks(tmp_path)) == []


def test_a_lock_that_another_process_has_taken_since_stays(tmp_path: Path) -> None:
    lock = tmp_path / "op" / "lock"
    locks = WorkersLocks(tmp_path)
    with holder(lock) as worker:
        locks.look([worker.pid])
    lock.unlink()
    with holder(lock):
        locks.remove_left()
        assert lock.exists()


@pytest.mark.parametrize("variable", ["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME"])
def test_locks_are_looked_for_where_torch_builds(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    built = Path(_get_build_directory("op", verbose=False), "lock")
    assert extensions_root() in (built.parents[1], built.parents[2])


def test_a_long_wait_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "lock").touch()
    now = 0.0
    locks = WorkersLocks(tmp_path, lambda: now)
    with caplog.at_level(logging.INFO):
        locks.tell_of_waits()
        assert not caplog.messages
        now = PATIENCE_S
        locks.tell_of_waits()
        locks.tell_of_waits()
    (logged,) = caplog.messages
    assert f"{tmp_path}/op/lock no process of this host holds it" in logged
