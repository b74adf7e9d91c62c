"""The lease of a coordinator, and the owner of a durable directory: one holder of a term, renewed
in time or lost, in a folder, in etcd and in a Lease of Kubernetes."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scalai.core.errors import PeerError, RefusedError, StoreError, UsageError
from scalai.core.job.remembered import TakingOver, Underway
from scalai.core.messages import actions, commands
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator import discovery, leases, process, registers
from scalai.launch.coordinator.leases import Lease, LeaseWatch, await_ownership
from scalai.launch.coordinator.process import serve
from scalai.launch.coordinator.registers import (
    EtcdRegister,
    FolderRegister,
    KubernetesRegister,
    LeaseEntry,
    Register,
    open_register,
    registers_of,
)
from scalai.launch.coordinator.server import STOOD_DOWN, Coordinator
from scalai.runtime.calls import Server
from scalai.store.lock import Owner
from scalai.store.secure import Folder
from support.certificates import Authority
from support.coordinator_line import TOKEN, Line, wait_until
from support.kept_registers import KINDS, Kept
from support.kubernetes_api import Api, kubernetes_api
from support.law_jobs import but
from support.ports import free_port


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    with KINDS[request.param](tmp_path) as found:
        yield found


@pytest.fixture
def register(kept: Kept) -> Register:
    return kept.open()


def entry(term: int = 1, beat: int = 0) -> LeaseEntry:
    return LeaseEntry(term, "127.0.0.1", 29400, beat)


@pytest.mark.fault
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
    assert first.is_fresh()
    with pytest.raises(UsageError, match="has claimed term 9"):
        Lease(register, entry(9))
    second = Lease(register, entry(10))
    _until(lambda: not first.is_fresh())
    assert second.is_fresh()
    newest = register.newest()
    assert newest is not None and newest.term == 10
    second.end(is_over=True)
    newest = register.newest()
    assert newest is not None and newest.is_over
    _until(nobody_renews)
    newest = register.newest()
    assert newest is not None and newest.is_over, "nothing is renewed behind the end"


def test_a_lease_that_is_renewed_changes_and_one_that_is_not_does_not(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    now = [0.0]
    watch, lease = LeaseWatch(register, lambda: now[0]), Lease(register, entry())
    before, _ = watch.look()
    _until(lambda: register.newest() != before)
    now[0] = 100.0
    assert watch.look()[1] == 0.0, "it was renewed since"
    lease.end(is_over=False)
    _until(nobody_renews)
    watch.look()
    now[0] = 107.0
    assert watch.look()[1] == 7.0


@pytest.mark.fault
def test_a_holder_whose_register_hangs_knows_it_before_anybody_may_claim(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    monkeypatch.setattr(leases, "HELD_S", 3.0)
    monkeypatch.setattr(registers, "ASK_S", 2.0)
    lease, other = Lease(kept.open(), entry()), kept.open()
    kept.stop()
    _until(lambda: not lease.is_fresh())
    with pytest.raises(PeerError):
        other.newest()
    kept.go()
    _until(lease.is_fresh)
    lease.end(is_over=False)


def test_a_register_that_cannot_be_reached_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(PeerError, match="lease in"):
        FolderRegister(tmp_path / "file", "j").newest()
    address = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(PeerError, match="does not answer"):
        EtcdRegister(address, "j").newest()


def test_time_in_which_a_register_hangs_counts_for_nobody(register: Register) -> None:
    """Its holder may have waited for it, too."""
    now = [0.0]

    class Slow:
        def newest(self) -> LeaseEntry | None:
            now[0] += 100.0
            return register.newest()

    assert register.claim(entry())
    watch = LeaseWatch(Slow(), lambda: now[0])  # type: ignore[arg-type]
    watch.look()
    assert watch.look()[1] == 0.0


@pytest.mark.fault
@pytest.mark.parametrize("torn", ["", '{"term": 3', "[3]", None])
def test_an_entry_that_is_torn_or_removed_is_written_anew_by_its_holder(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, torn: str | None
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    lease, other = Lease(kept.open(), entry(3)), kept.open()
    kept.tear(torn)

    def is_mended() -> bool:
        found = other.newest()
        return found is not None and (found.term, found.port) == (3, 29400)

    _until(is_mended)
    assert not lease.is_superseded
    lease.end(is_over=False)


@pytest.mark.fault
@pytest.mark.parametrize("torn", ["", "[3]"])
def test_a_torn_entry_of_a_dead_holder_has_its_term_and_the_next_one_is_claimed(
    kept: Kept, torn: str
) -> None:
    register, now = kept.open(), [0.0]
    assert register.claim(entry(3))
    kept.tear(torn)
    watch = LeaseWatch(register, lambda: now[0])
    found, _ = watch.look()
    assert found is not None and (found.term, found.host) == (3, "")
    now[0] = leases.CLAIM_S + 1.0
    assert watch.look()[1] > leases.CLAIM_S, "nobody renews it"
    assert register.claim(entry(4))


def test_a_torn_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    register = FolderRegister(tmp_path, "j")
    assert register.claim(entry(3))
    (path,) = (tmp_path / "j").iterdir()
    for _ in range(2):  # said anew once it was mended
        path.write_text("")
        register.newest()
        register.newest()
        register.renew(entry(3))
    assert caplog.text.count(f"event=torn_lease {path}") == 2


def test_a_folder_without_hard_links_has_no_owner_and_is_used_all_the_same(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def link(*given: object, **named: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("scalai.launch.coordinator.registers.os.link", link)
    found = discovery_open(line, tmp_path)
    assert found.owns is None and found.lease is None and "event=no_owner" in caplog.text
    found.close()


def test_one_file_stays_and_a_late_claim_of_an_earlier_term_fails(tmp_path: Path) -> None:
    register = FolderRegister(tmp_path, "j")
    for term in range(1, 9):
        assert register.claim(entry(term))
    assert not register.claim(entry(5)), "its file was removed, and a later one is there"
    assert [path.name for path in (tmp_path / "j").iterdir()] == ["owner-000000000008.json"]


@pytest.mark.fault
def test_on_a_full_disk_a_holder_renews_and_nobody_else_can_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    register = FolderRegister(tmp_path, "j")
    lease = Lease(register, entry())

    def full(self: Folder, name: str, content: bytes, *, is_durable: bool = False) -> None:
        raise StoreError(f"{self.path / name} cannot be used (No space left on device).")

    monkeypatch.setattr(Folder, "write", full)
    for _ in range(2):  # the first one may have begun before the disk was full
        before = lease.renewed_at
        _until(lambda: lease.renewed_at > before)  # noqa: B023  # it is asked here and now
    with pytest.raises(PeerError, match=r"lease in .*/j cannot be claimed: .*No space left"):
        register.claim(entry(2))
    lease.end(is_over=False)


# ---------------------------------------------------------------------- a durable directory's owner


def owned(folder: Path) -> FolderRegister:
    return FolderRegister(folder, "j")


@pytest.mark.fault
def test_a_second_living_run_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    first = Lease(owned(tmp_path), entry(4), lambda: "ab12")
    named = rf"{tmp_path} is in use by run ab12 .*coordinator 4, on machine .* at 127.0.0.1:29400"
    with pytest.raises(RefusedError, match=f"{named}.*it lives .* s ago"):
        await_ownership(owned(tmp_path), tmp_path)
    first.end(is_over=True)
    assert term_of(await_ownership(owned(tmp_path), tmp_path)) == 4, "it has left"


@pytest.mark.fault
def test_a_run_that_died_is_followed_at_once_on_its_machine_and_later_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "CLAIM_S", 600.0)
    with subprocess.Popen(["true"]) as gone:
        pid = gone.pid
    died = replace(Owner.of_this_process(), pid=pid, started=1)
    here = replace(entry(2), process=json.dumps(asdict(died)))
    assert owned(tmp_path).claim(here)
    assert term_of(await_ownership(owned(tmp_path), tmp_path)) == 2
    elsewhere = replace(entry(3), process=json.dumps(asdict(replace(died, boot="another"))))
    assert owned(tmp_path).claim(elsewhere)
    monkeypatch.setattr(leases, "CLAIM_S", 1.0)
    began = time.monotonic()
    assert term_of(await_ownership(owned(tmp_path), tmp_path)) == 3
    assert time.monotonic() - began >= 1.0


@pytest.mark.fault
def test_who_takes_a_dead_coordinators_place_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The durable directory is its own once it answers; until then nothing there is removed."""
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    (tmp_path / "disk").write_text("no folder")
    lease = Lease(owned(tmp_path / "disk"), entry(3), lambda: "mine", waits_over=2)
    assert not lease.is_superseded and not lease.is_fresh()
    assert owned(tmp_path / "back").claim(replace(entry(2), run="mine"))
    (tmp_path / "disk").unlink()
    (tmp_path / "back").rename(tmp_path / "disk")
    _until(lease.is_fresh)
    newest = owned(tmp_path / "disk").newest()
    assert newest is not None and newest.term == 3
    lease.end(is_over=False)


class Counted(FolderRegister):
    """Counts how often it was looked at."""

    looks = 0

    def newest(self) -> LeaseEntry | None:
        self.looks += 1
        return super().newest()


def test_where_another_run_has_taken_the_directory_meanwhile_the_successor_yields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    other, own = Lease(owned(tmp_path), entry(3), lambda: "other"), [""]
    register = Counted(tmp_path, "j")
    successor = Lease(register, entry(3), lambda: own[0], waits_over=2)
    _until(lambda: register.looks > 4)
    assert not successor.is_superseded, "it may be of the same run, whose name agents bring"
    own[0] = "mine"
    _until(lambda: successor.is_superseded)
    assert "run other" in successor.problem
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


@pytest.mark.fault
def test_no_later_successor_takes_the_directory_from_another_run_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor of one that has yielded has a term that is higher than the other run's."""
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    monkeypatch.setattr(leases, "CLAIM_S", 2.0)
    other = Lease(owned(tmp_path), entry(3), lambda: "other")
    successor = Lease(owned(tmp_path), entry(4), lambda: "mine", waits_over=3)
    _until(lambda: successor.is_superseded or other.is_superseded)
    assert successor.is_superseded and not other.is_superseded
    own = Lease(owned(tmp_path), entry(4), lambda: "other", waits_over=3)
    _until(own.is_fresh)
    own.end(is_over=False)


def spec_of(folder: Path, *flags: str) -> JobSpec:
    config = folder / "elastic.toml"
    config.write_text("[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n")
    given = ["--job", "j", "--elastic", str(config), "--store-dir", str(folder / "store"), *flags]
    return JobSpec.read(parse_options([*given, "script.py"]))


AT = "--coordinator", "192.0.2.1:29400"


def test_the_folder_of_a_durable_directory_says_which_coordinator_a_job_of_several_hosts_has(
    tmp_path: Path,
) -> None:
    durable = "--durable-dir", str(tmp_path)
    register, owned_by = registers_of(spec_of(tmp_path, *AT, *durable))
    assert register is not None and register is owned_by
    assert registers_of(spec_of(tmp_path, *AT)) == (None, None)
    for flags in ((), (*AT, "--coordinator-lease", "none")):
        register, owned_by = registers_of(spec_of(tmp_path, *durable, *flags))
        assert register is None and owned_by is not None


def test_the_folder_of_a_lease_has_no_second_owner(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    durable = *AT, "--durable-dir", str(tmp_path), "--coordinator-lease"
    register, owned_by = registers_of(spec_of(tmp_path, *durable, f"file:{tmp_path / 'link'}"))
    assert register is not None and register is owned_by
    register, owned_by = registers_of(spec_of(tmp_path, *durable, "etcd:http://h:1"))
    assert isinstance(register, EtcdRegister) and isinstance(owned_by, FolderRegister)


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    monkeypatch.setattr(leases, "HELD_S", 0.5)
    line = Line(tmp_path, "--nnodes", "1:3", "--durable-dir", str(tmp_path / "disk"))
    yield line
    line.end()


@pytest.mark.fault
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


def takes_over(line: Line, register: Register, within_s: float, *members: str) -> Lease:
    """Have the coordinator be one that follows another of its machine, whose round had these
    hosts. It waits ``within_s`` for them."""
    its = Underway(
        "run", 3, tuple((host, 2) for host in members), {"tp": 1, "pp": 1, "dp": 2 * len(members)},
        None, None, 5, True, True, True, None, False, False, False, False, False, 0,
    )  # fmt: skip
    live = line.coordinator._live
    with line.coordinator._lock:
        over = TakingOver(time.monotonic() + within_s, {members[0]: its})
        live.state = but(live.state, pending=over)
        line.coordinator.lease = Lease(register, entry(3), waits_over=2)
    return line.coordinator.lease


def test_who_follows_a_dead_coordinator_while_the_register_hangs_waits_for_its_hosts(
    line: Line, tmp_path: Path
) -> None:
    (tmp_path / "lease").write_text("no folder")
    lease = takes_over(line, FolderRegister(tmp_path / "lease", "j"), 600.0, "a")
    wait_until(lambda: "lease in" in lease.problem, "the register has not answered")
    looked = line.coordinator.tick_s() * 3
    time.sleep(looked)
    agent = line.join("a")
    assert agent.error is None and not line.code
    line.coordinator._live.state = but(line.coordinator._live.state, pending=None)
    wait_until(lambda: any("event=lease_hangs" in text for text in line.log), "it is said")


def test_where_a_host_does_not_come_it_stands_down(line: Line, tmp_path: Path) -> None:
    """That one may be the next coordinator's by now."""
    (tmp_path / "lease").write_text("no folder")
    line.join("a")
    takes_over(line, FolderRegister(tmp_path / "lease", "j"), 2.0, "a", "b")
    wait_until(lambda: line.code == [STOOD_DOWN], "it stands down")
    assert any("event=adopted" in text for text in line.log), "not before they had the time"


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


@pytest.mark.fault
def test_a_coordinator_that_another_one_of_its_run_has_followed_stands_down(
    line: Line, tmp_path: Path
) -> None:
    agent, run = line.join("a"), line.coordinator.run_name
    line.coordinator.owns = Lease(owned(tmp_path / "disk"), entry(3), run)
    later = Lease(owned(tmp_path / "disk"), entry(4), run)
    wait_until(lambda: line.code == [STOOD_DOWN], "it stands down")
    assert "--durable-dir is not held" in line.log[-1] and not agent.heard("exit")
    later.end(is_over=False)


@pytest.mark.fault
def test_nothing_is_retired_that_another_run_may_read(line: Line, tmp_path: Path) -> None:
    agent, live = line.join("a"), line.coordinator._live
    (tmp_path / "disk").write_text("a disk that does not answer")
    line.coordinator.owns = Lease(owned(tmp_path / "disk"), entry(3), waits_over=2)
    with line.coordinator._lock:
        live._perform(actions.Send(("a",), commands.Retire(5)))
    (tmp_path / "disk").unlink()
    _until(line.coordinator.owns.is_fresh)
    with line.coordinator._lock:
        live._perform(actions.Send(("a",), commands.Retire(6)))
    assert agent.wait_for("retire")["before"] == 6
    assert any("event=not_retired" in text for text in line.log)


@pytest.mark.fault
def test_the_coordinator_of_a_second_run_is_refused_before_it_listens(
    line: Line, tmp_path: Path
) -> None:
    first = Lease(owned(tmp_path / "disk"), entry(3), lambda: "first")
    with pytest.raises(RefusedError, match="run first"):
        serve(line.spec, tmp_path / "job", "127.0.0.1", 0, TOKEN)
    first.end(is_over=True)
    _, newest = discovery.await_turn(line.spec, None, None)
    term, _ = discovery.next_term(line.spec, tmp_path, newest)
    assert term == 4


@pytest.mark.parametrize("is_named", [True, False])
def test_a_host_that_names_another_coordinator_is_a_second_run(
    tmp_path: Path, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who names the one that the job has named, or has now, takes part in it."""
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    port, another = free_port("127.0.0.1"), free_port("127.0.0.1")
    named = f"127.0.0.1:{port}"
    spec = spec_of(tmp_path, "--coordinator", named, "--durable-dir", str(tmp_path / "disk"))
    by = replace(entry(4), port=another, named=named if is_named else "127.0.0.1:1")
    with answering(another):
        first = Lease(owned(tmp_path / "disk"), by, lambda: "ab12")
        if is_named:
            place, _ = discovery.await_turn(spec, named, TOKEN.decode())
            assert place is not None and place.address == by.address
        else:
            with pytest.raises(RefusedError, match="in use by run ab12"):
                discovery.await_turn(spec, named, TOKEN.decode())
        first.end(is_over=True)


@contextmanager
def answering(port: int) -> Iterator[None]:
    server = Server(("127.0.0.1", port), TOKEN, object, lambda peer, request: None)
    yield
    server.close()


def discovery_open(line: Line, folder: Path) -> Coordinator:
    spec = replace(line.spec, options=replace(line.spec.options, coordinator="127.0.0.1:1"))
    return process._open(spec, folder, ("127.0.0.1", 0), TOKEN, 1, is_successor=False)


@pytest.mark.parametrize(
    "text",
    ["/folder", "file:folder", "etcd:host:1", "zk:http://a:1", "votes", "", "kubernetes:ns/x"],
)
def test_what_names_no_register_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is neither"):
        open_register(text, "j")


def test_a_vote_is_refused_with_the_way_out() -> None:
    for words in (["--coordinator-lease", "vote"], ["--coordinator_lease=vote"]):
        with pytest.raises(UsageError, match=r"vote is not known any more.*file:/"):
            parse_options([*words, "script.py"])


def term_of(found: LeaseEntry | None) -> int:
    assert found is not None
    return found.term


# ---------------------------------------------------------------------- Kubernetes alone


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with kubernetes_api(tmp_path / "api") as found:
        yield found


def in_pod(api: Api, job: str = "j") -> KubernetesRegister:
    return KubernetesRegister(api.url, job, api.account)


def test_a_token_that_has_ended_is_read_anew_from_its_file(api: Api) -> None:
    register = in_pod(api)
    assert register.claim(entry())
    api.renew_token()
    register.renew(entry(beat=1))
    api.token = "another"
    with pytest.raises(PeerError, match="401 Unauthorized"):
        register.renew(entry(beat=2))


def test_an_api_server_that_fails_says_so_and_changes_nothing(api: Api) -> None:
    register = in_pod(api)
    assert register.claim(entry())
    api.status = 500
    for call in (register.newest, lambda: register.renew(entry()), lambda: register.claim(entry())):
        with pytest.raises(PeerError, match="500 a failure"):
            call()
    api.status = None
    assert register.newest() == entry()


def test_a_lease_that_another_one_has_changed_meanwhile_is_looked_at_anew(api: Api) -> None:
    holder, other = in_pod(api), in_pod(api)
    assert holder.claim(entry(1))
    (name,) = api.leases
    api.leases[name]["metadata"]["labels"] = {"team": "a person's"}
    api.keep(name, api.leases[name])
    holder.renew(entry(1, beat=7))
    assert other.newest() == entry(1, beat=7) and api.conflicts == 1
    assert api.leases[name]["metadata"]["labels"], "it keeps what others have written"
    assert other.claim(entry(2))
    with pytest.raises(PeerError, match="is not of coordinator 1"):
        holder.renew(entry(1, beat=8))
    assert other.newest() == entry(2)


def test_of_two_claims_over_one_version_one_fails(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = in_pod(api), in_pod(api)
    assert first.claim(entry(1))
    monkeypatch.setattr(second, "newest", lambda: entry(1))
    second._found = json.loads(json.dumps(first._found))
    assert first.claim(entry(2))
    assert not second.claim(entry(2)), "another version is there by then"


def test_jobs_have_leases_of_their_own(api: Api) -> None:
    for job in ("gpt", "GPT", "g_pt", "g-pt", "gpt-"):
        assert in_pod(api, job).claim(entry()), job
    assert len(api.leases) == 5


def test_who_is_no_pod_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="KUBERNETES_SERVICE_HOST is not set"):
        open_register("kubernetes:", "j")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    with pytest.raises(UsageError, match="needs a pod's service account"):
        open_register("kubernetes:", "j")


def test_another_authority_than_the_pods_is_not_talked_to(api: Api, tmp_path: Path) -> None:
    Authority(tmp_path, "other")
    register, own = in_pod(api), (api.account / "ca.crt").read_bytes()
    (api.account / "ca.crt").write_bytes((tmp_path / "other.pem").read_bytes())
    with pytest.raises(PeerError, match="CERTIFICATE_VERIFY_FAILED"):
        register.newest()
    assert not api.asked, "it has not been shown the token"
    (api.account / "ca.crt").write_bytes(own)
    assert register.newest() is None, "it is read anew"


def nobody_renews() -> bool:
    """Whether no thread of a lease runs."""
    return not any(thread.name == "lease" for thread in threading.enumerate())


def _until(is_so: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)
