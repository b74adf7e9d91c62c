"""The lease of a coordinator: one holder of a term, renewed in time or lost, in a folder and in
etcd."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalai.core.errors import PeerError, UsageError
from scalai.launch.coordinator import leases
from scalai.launch.coordinator.leases import Entry as LeaseEntry
from scalai.launch.coordinator.leases import (
    EtcdRegister,
    FolderRegister,
    Lease,
    Register,
    Watch,
    open_register,
)
from support.ports import free_port

ETCD = shutil.which("etcd")


@pytest.fixture(params=["file", "etcd"])
def register(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Register]:
    if request.param == "file":
        yield FolderRegister(tmp_path / "lease", "j")
        return
    if ETCD is None:
        pytest.skip("no etcd here (Debian: apt-get install etcd-server)")
    client, peer = (f"http://127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
    command = [
        ETCD, "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", client,
        "--advertise-client-urls", client, "--listen-peer-urls", peer,
        "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
    ]  # fmt: skip
    with (tmp_path / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    found = EtcdRegister(client, "j")
    try:
        end = time.monotonic() + 60.0
        while True:
            try:
                found.newest()
                break
            except PeerError:
                assert time.monotonic() < end, (tmp_path / "etcd.log").read_text()
                time.sleep(0.2)
        yield found
    finally:
        process.kill()
        process.wait(10)


def entry(term: int = 1, beat: int = 0) -> LeaseEntry:
    return LeaseEntry(term, "127.0.0.1", 29400, beat)


def test_one_of_many_has_a_term(register: Register) -> None:
    assert register.newest() is None
    has_it, mutex = list[int](), threading.Lock()

    def claim(number: int) -> None:
        if register.claim(LeaseEntry(1, f"host-{number}", number)):
            with mutex:
                has_it.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(has_it) == 1
    found = register.newest()
    assert found is not None and found.port == has_it[0]


def test_the_highest_term_counts_and_an_earlier_holder_loses(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    first = Lease(register, entry(9))
    assert first.is_held()
    with pytest.raises(UsageError, match="has claimed term 9"):
        Lease(register, entry(9))
    second = Lease(register, entry(10))
    _until(lambda: not first.is_held())
    assert second.is_held()
    newest = register.newest()
    assert newest is not None and newest.term == 10
    second.end(is_over=True)
    newest = register.newest()
    assert newest is not None and newest.is_over
    time.sleep(0.2)
    newest = register.newest()
    assert newest is not None and newest.is_over, "nothing is renewed behind the end"


def test_a_lease_that_is_renewed_changes_and_one_that_is_not_does_not(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    now = [0.0]
    watch, lease = Watch(register, lambda: now[0]), Lease(register, entry())
    before, _ = watch.look()
    _until(lambda: register.newest() != before)
    now[0] = 100.0
    assert watch.look()[1] == 0.0, "it was renewed since"
    lease.end(is_over=False)
    time.sleep(0.2)
    watch.look()
    now[0] = 107.0
    assert watch.look()[1] == 7.0


def test_a_holder_that_cannot_renew_knows_it_before_anybody_may_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    monkeypatch.setattr(leases, "HELD_S", 0.6)
    assert leases.LEASE_S > 0.6
    root = tmp_path / "lease"
    lease = Lease(FolderRegister(root, "j"), entry())
    time.sleep(1.0)
    assert lease.is_held()
    root.rename(tmp_path / "away")
    root.write_text("no folder")
    _until(lambda: not lease.is_held())
    root.unlink()
    (tmp_path / "away").rename(root)
    _until(lease.is_held)
    lease.end(is_over=False)


def test_a_register_that_cannot_be_reached_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(PeerError, match="lease in"):
        FolderRegister(tmp_path / "file", "j").newest()
    address = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(PeerError, match="does not answer"):
        EtcdRegister(address, "j").newest()


def test_a_torn_entry_is_no_entry(tmp_path: Path) -> None:
    register = FolderRegister(tmp_path, "j")
    assert register.claim(entry(3))
    (path,) = (tmp_path / "j").iterdir()
    path.write_text('{"term": 3')
    with pytest.raises(PeerError, match="cannot be read"):
        register.newest()


def test_few_files_stay(tmp_path: Path) -> None:
    register = FolderRegister(tmp_path, "j")
    for term in range(1, 9):
        assert register.claim(entry(term))
    assert len(list((tmp_path / "j").iterdir())) == leases.KEPT


@pytest.mark.parametrize(
    "text", ["/folder", "file:folder", "etcd:host:1", "zk:http://a:1", "votes", ""]
)
def test_what_names_no_register_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is neither"):
        open_register(text, "j")


def _until(is_so: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)
