"""The lease of a coordinator, and the owner of a durable directory: one holder of a term, renewed
in time or lost, in a folder and in etcd."""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scalai.core import actions
from scalai.core.errors import PeerError, RefusedError, StoreError, UsageError
from scalai.launch.coordinator import leases, process
from scalai.launch.coordinator.elected import NOBODY
from scalai.launch.coordinator.leases import Entry as LeaseEntry
from scalai.launch.coordinator.leases import (
    EtcdRegister,
    FolderRegister,
    Lease,
    Register,
    Watch,
    await_ownership,
    open_ownership,
    open_register,
)
from scalai.launch.coordinator.server import STOOD_DOWN
from scalai.store.lock import Owner
from scalai.store.secure import Folder
from support.coordinator_line import TOKEN, Line, wait_until
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


@pytest.mark.parametrize("torn", ["", '{"term": 3', "[3]", None])
def test_an_entry_that_is_torn_or_removed_is_written_anew_by_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: str | None
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    register = FolderRegister(tmp_path, "j")
    lease = Lease(register, entry(3))
    (path,) = (tmp_path / "j").iterdir()
    path.unlink() if torn is None else path.write_text(torn)

    def is_mended() -> bool:
        found = register.newest()
        return found is not None and (found.term, found.port) == (3, 29400)

    _until(is_mended)
    assert lease.is_held()
    lease.end(is_over=False)


def test_a_torn_entry_of_a_dead_holder_is_named_and_the_next_term_is_claimed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register, now = FolderRegister(tmp_path, "j"), [0.0]
    assert register.claim(entry(3))
    (path,) = (tmp_path / "j").iterdir()
    path.write_text("")
    watch = Watch(register, lambda: now[0])
    found, _ = watch.look()
    assert found is not None and (found.term, found.host) == (3, "")
    assert f"event=torn_lease {path}" in caplog.text
    now[0] = leases.LEASE_S + 1.0
    assert watch.look()[1] > leases.LEASE_S, "nobody renews it"
    assert register.claim(entry(4))


def test_an_entry_that_is_torn_twice_within_a_beat_is_named_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register = FolderRegister(tmp_path, "j")
    assert register.claim(entry(3))
    (path,) = (tmp_path / "j").iterdir()
    for _ in range(2):
        path.write_text("")
        register.newest()
        register.newest()
        register.renew(entry(3))
    assert caplog.text.count("event=torn_lease") == 2


def test_one_file_stays_and_a_late_claim_of_an_earlier_term_fails(tmp_path: Path) -> None:
    register = FolderRegister(tmp_path, "j")
    for term in range(1, 9):
        assert register.claim(entry(term))
    assert not register.claim(entry(5)), "its file was removed, and a later one is there"
    assert [path.name for path in (tmp_path / "j").iterdir()] == ["owner-000000000008.json"]


def test_on_a_full_disk_a_holder_renews_and_nobody_else_can_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    monkeypatch.setattr(leases, "HELD_S", 2.0)
    register = FolderRegister(tmp_path, "j")
    lease = Lease(register, entry())

    def full(self: Folder, name: str, content: bytes, *, is_durable: bool = False) -> None:
        raise StoreError(f"{self.path / name} cannot be used (No space left on device).")

    monkeypatch.setattr(Folder, "write", full)
    time.sleep(2.5)
    assert lease.is_held()
    with pytest.raises(PeerError, match=r"lease in .*/j cannot be claimed: .*No space left"):
        register.claim(entry(2))
    lease.end(is_over=False)


# ---------------------------------------------------------------------- a durable directory's owner


def owned(folder: Path) -> FolderRegister:
    found = open_ownership(None, folder, "j")
    assert found is not None
    return found


def test_a_second_living_run_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    first = Lease(owned(tmp_path), entry(4), lambda: "ab12")
    named = rf"{tmp_path} is in use by run ab12 .*coordinator 4, on machine .* at 127.0.0.1:29400"
    with pytest.raises(RefusedError, match=f"{named}.*it lives .* s ago"):
        await_ownership(owned(tmp_path), tmp_path, "j")
    first.end(is_over=True)
    assert await_ownership(owned(tmp_path), tmp_path, "j") == 4, "it has left"


def test_a_run_that_died_is_followed_at_once_on_its_machine_and_later_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 600.0)
    with subprocess.Popen(["true"]) as gone:
        pid = gone.pid
    died = replace(Owner.of_this_process(), pid=pid, started=1)
    here = replace(entry(2), process=json.dumps(asdict(died)))
    assert owned(tmp_path).claim(here)
    assert await_ownership(owned(tmp_path), tmp_path, "j") == 2
    elsewhere = replace(entry(3), process=json.dumps(asdict(replace(died, boot="another"))))
    assert owned(tmp_path).claim(elsewhere)
    monkeypatch.setattr(leases, "LEASE_S", 1.0)
    began = time.monotonic()
    assert await_ownership(owned(tmp_path), tmp_path, "j") == 3
    assert time.monotonic() - began >= 1.0


def test_who_takes_a_dead_coordinators_place_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The durable directory is its own once it answers; until then nothing there is removed."""
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    (tmp_path / "disk").write_text("no folder")
    lease = Lease(owned(tmp_path / "disk"), entry(3), waits_over=2)
    assert lease.is_held() and not lease.is_fresh()
    assert owned(tmp_path / "back").claim(entry(2))
    (tmp_path / "disk").unlink()
    (tmp_path / "back").rename(tmp_path / "disk")
    _until(lease.is_fresh)
    newest = owned(tmp_path / "disk").newest()
    assert newest is not None and newest.term == 3
    lease.end(is_over=False)


def test_where_another_run_has_taken_the_directory_meanwhile_the_successor_yields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    other, own = Lease(owned(tmp_path), entry(3), lambda: "other"), [""]
    successor = Lease(owned(tmp_path), entry(3), lambda: own[0], waits_over=2)
    time.sleep(0.5)
    assert not successor.is_superseded, "it may be of the same run, whose name agents bring"
    own[0] = "mine"
    _until(lambda: successor.is_superseded)
    assert "run other" in successor.problem and not successor.is_held()
    assert successor.has_another_run
    other.end(is_over=False)


def test_a_run_that_has_no_name_yet_is_not_taken_for_the_successors_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    other = Lease(owned(tmp_path), entry(3))
    successor = Lease(owned(tmp_path), entry(4), lambda: "mine", waits_over=3)
    _until(lambda: successor.is_superseded or other.is_superseded)
    assert successor.is_superseded and not successor.has_another_run and other.is_fresh()
    other.end(is_over=False)


def test_no_later_successor_takes_the_directory_from_another_run_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor of one that has yielded has a term that is higher than the other run's."""
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    monkeypatch.setattr(leases, "LEASE_S", 2.0)
    other = Lease(owned(tmp_path), entry(3), lambda: "other")
    successor = Lease(owned(tmp_path), entry(4), lambda: "mine", waits_over=3)
    _until(lambda: successor.is_superseded or other.is_superseded)
    assert successor.is_superseded and not other.is_superseded
    own = Lease(owned(tmp_path), entry(4), lambda: "other", waits_over=3)
    _until(own.is_fresh)
    own.end(is_over=False)


def test_the_folder_of_a_lease_has_no_second_owner(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert open_ownership(f"file:{tmp_path / 'link'}", tmp_path, "j") is None
    assert open_ownership("etcd:http://h:1", tmp_path, "j") is not None
    assert open_ownership(None, None, "j") is None


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    monkeypatch.setattr(leases, "HELD_S", 0.5)
    line = Line(tmp_path, "--nnodes", "1:3", "--durable-dir", str(tmp_path / "disk"))
    yield line
    line.end()


def test_a_register_that_hangs_takes_nobodys_place_while_all_hosts_are_heard(
    line: Line, tmp_path: Path
) -> None:
    staying, gone = line.join("a"), line.join("b")
    line.coordinator.lease = Lease(FolderRegister(tmp_path / "lease", "j"), entry())
    (tmp_path / "lease").rename(tmp_path / "away")
    (tmp_path / "lease").write_text("no folder")
    wait_until(lambda: any("event=lease_hangs" in text for text in line.log), "it is said")
    assert staying.error is None and not line.code
    gone.leave()  # it may have taken this one's place
    wait_until(lambda: line.code == [STOOD_DOWN], "it stands down")


def test_a_run_that_a_further_one_has_superseded_ends_as_refused(
    line: Line, tmp_path: Path
) -> None:
    """Its agents start no further coordinator, nor does a scheduler start it again."""
    agent, run = line.join("a"), line.coordinator.run_name
    line.coordinator.owns = Lease(owned(tmp_path / "disk"), entry(3), run)
    later = Lease(owned(tmp_path / "disk"), entry(4), lambda: "later")
    told = agent.wait_for("exit")
    assert told["code"] == RefusedError.exit_code and told["keeps_state"]
    assert "run later" in told["reason"] and "Do not start it again" in told["reason"]
    agent.leave()
    wait_until(lambda: line.code == [RefusedError.exit_code], "it ends")
    later.end(is_over=False)


def test_a_coordinator_that_another_one_of_its_run_has_followed_stands_down(
    line: Line, tmp_path: Path
) -> None:
    agent, run = line.join("a"), line.coordinator.run_name
    line.coordinator.owns = Lease(owned(tmp_path / "disk"), entry(3), run)
    later = Lease(owned(tmp_path / "disk"), entry(4), run)
    wait_until(lambda: line.code == [STOOD_DOWN], "it stands down")
    assert "--durable-dir is not held" in line.log[-1] and not agent.heard("exit")
    later.end(is_over=False)


def test_nothing_is_retired_that_another_run_may_read(line: Line, tmp_path: Path) -> None:
    agent, live = line.join("a"), line.coordinator._live
    (tmp_path / "disk").write_text("a disk that does not answer")
    line.coordinator.owns = Lease(owned(tmp_path / "disk"), entry(3), waits_over=2)
    with line.coordinator._lock:
        live._perform(actions.Retire(("a",), 5))
    (tmp_path / "disk").unlink()
    _until(line.coordinator.owns.is_fresh)
    with line.coordinator._lock:
        live._perform(actions.Retire(("a",), 6))
    assert agent.wait_for("retire")["before"] == 6
    assert any("event=not_retired" in text for text in line.log)


def test_the_coordinator_of_a_second_run_is_refused_before_it_listens(
    line: Line, tmp_path: Path
) -> None:
    first = Lease(owned(tmp_path / "disk"), entry(3), lambda: "first")
    with pytest.raises(RefusedError, match="run first"):
        process._open(
            line.spec, tmp_path, ("127.0.0.1", 0), TOKEN, 1, is_successor=False, known=NOBODY
        )
    first.end(is_over=True)
    second = process._open(
        line.spec, tmp_path, ("127.0.0.1", 0), TOKEN, 1, is_successor=False, known=NOBODY
    )
    assert second.term == 4 and second.owns is not None and second.owns.is_fresh()
    second.owns.end(is_over=True)
    second.close()


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
