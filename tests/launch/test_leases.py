"""The lease of a coordinator, and the owner of a durable directory: one holder of a term, renewed
in time or lost, in a folder, in etcd and in a Lease of Kubernetes."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import PeerError, RefusedError, StoreError, UsageError
from scalai.core.job.remembered import TakingOver, Underway
from scalai.core.messages import actions, commands
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator import api_servers, discovery, leases, process
from scalai.launch.coordinator.leases import (
    CLAIM_S,
    HELD_S,
    Lease,
    LeaseWatch,
    await_ownership,
)
from scalai.launch.coordinator.process import serve
from scalai.launch.coordinator.registers import (
    LEASE_FLAG,
    EtcdRegister,
    FolderRegister,
    KubernetesRegister,
    LeaseEntry,
    Register,
    open_register,
    registers_of,
)
from scalai.launch.coordinator.server import STOOD_DOWN
from scalai.runtime.calls import Server
from scalai.store.lock import Owner
from scalai.store.secure import Folder
from support.certificates import Authority
from support.coordinator_line import TOKEN, Line
from support.kept_registers import KINDS, Kept
from support.kubernetes_api import Api, kubernetes_api
from support.laws import but
from support.ports import free_port

from .conftest import OpenLine


class Time:
    """The time of leases and their watchers, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    with KINDS[request.param](tmp_path) as found:
        yield found


@pytest.fixture
def register(kept: Kept) -> Register:
    return kept.open()


def entry(term: int = 1, beat: int = 0, run: str = "") -> LeaseEntry:
    return LeaseEntry(term, "127.0.0.1", 29400, beat, run=run)


def newest_of(register: Register) -> LeaseEntry:
    found = register.newest()
    assert found is not None
    return found


# ---------------------------------------------------------------------- every kind of register


@pytest.mark.fault
def test_one_of_many_has_a_term(register: Register) -> None:
    assert register.newest() is None
    has_it = list[int]()

    def claim(number: int) -> None:
        if register.claim(LeaseEntry(1, f"host-{number}", number)):
            has_it.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert has_it == [newest_of(register).port]


def test_the_highest_term_counts_and_an_earlier_holder_loses(register: Register) -> None:
    first = Lease(register, entry(9))
    assert first.is_fresh()
    with pytest.raises(UsageError, match="has claimed term 9"):
        Lease(register, entry(9))
    second = Lease(register, entry(10))
    first.keep()
    assert not first.is_fresh() and second.is_fresh() and newest_of(register).term == 10
    second.end(is_over=True)
    assert newest_of(register).is_over
    second.keep()
    assert newest_of(register).is_over, "nothing is renewed behind the end"


def test_a_watcher_measures_the_time_since_a_renewal_by_its_own_clock(
    register: Register, clock: Time
) -> None:
    watch, lease = LeaseWatch(register, clock), Lease(register, entry())
    watch.look()
    clock.now = 100.0
    lease.keep()
    assert watch.look()[1] == 0.0, "it was renewed since"
    clock.now = 107.0
    assert watch.look()[1] == 7.0

    class Slow:
        def newest(self) -> LeaseEntry | None:
            clock.now += 100.0
            return register.newest()

    watch = LeaseWatch(Slow(), clock)  # type: ignore[arg-type]
    for _ in range(2):
        assert watch.look()[1] == 0.0, "its holder may have waited for a register that hangs, too"


@pytest.mark.fault
def test_a_holder_whose_register_hangs_knows_it_before_anybody_may_claim(
    kept: Kept, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_servers, "ASK_S", 1.0)
    lease = Lease(kept.open(), entry(), clock=clock)
    kept.stop()
    clock.now = HELD_S + 1.0
    lease.keep()
    assert not lease.is_fresh() and HELD_S + 1.0 < CLAIM_S
    kept.go()
    lease.keep()
    assert lease.is_fresh()


@pytest.mark.fault
@pytest.mark.parametrize("torn", ["", '{"term": 3', "[3]", None])
def test_an_entry_that_is_torn_or_removed_is_written_anew_by_its_holder(
    kept: Kept, clock: Time, torn: str | None
) -> None:
    """Without one the next term may be claimed."""
    lease, other = Lease(kept.open(), entry(3)), kept.open()
    kept.tear(torn)
    watch = LeaseWatch(other, clock)
    found, _ = watch.look()
    assert found == (None if torn is None else replace(found or entry(), term=3, host=""))
    clock.now = CLAIM_S + 1.0
    assert watch.look()[1] > CLAIM_S, "nobody renews it"
    lease.keep()
    assert (newest_of(other).term, newest_of(other).port) == (3, 29400)
    assert not lease.is_superseded
    kept.tear(torn)
    assert other.claim(entry(4))


# ---------------------------------------------------------------------- a folder


def owned(folder: Path) -> FolderRegister:
    return FolderRegister(folder, "j")


def hang(folder: Path) -> Callable[[], None]:
    """Have a disk answer nobody. Returns what mends it."""
    folder.rename(folder.with_name("away"))
    folder.write_text("no folder")

    def mend() -> None:
        folder.unlink()
        folder.with_name("away").rename(folder)

    return mend


def test_a_register_that_cannot_be_reached_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(PeerError, match="lease in"):
        owned(tmp_path / "file").newest()
    with pytest.raises(PeerError, match="does not answer"):
        EtcdRegister(f"http://127.0.0.1:{free_port('127.0.0.1')}", "j").newest()


def test_a_torn_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    register = owned(tmp_path)
    assert register.claim(entry(3))
    (path,) = (tmp_path / "j").iterdir()
    for _ in range(2):  # said anew once it was mended
        path.write_text("")
        register.newest()
        register.newest()
        register.renew(entry(3))
    assert caplog.text.count(f"event=torn_lease {path}") == 2


def test_one_file_stays_and_a_late_claim_of_an_earlier_term_fails(tmp_path: Path) -> None:
    register = owned(tmp_path)
    for term in range(1, 9):
        assert register.claim(entry(term))
    assert not register.claim(entry(5)), "its file was removed, and a later one is there"
    assert [path.name for path in (tmp_path / "j").iterdir()] == ["owner-000000000008.json"]


@pytest.mark.fault
def test_on_a_full_disk_a_holder_renews_and_nobody_else_can_claim(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(owned(tmp_path), entry(), clock=clock)

    def full(self: Folder, name: str, content: bytes, *, is_durable: bool = False) -> None:
        raise StoreError(f"{self.path / name} cannot be used (No space left on device).")

    lease.keep()  # its content names this process from now on
    monkeypatch.setattr(Folder, "write", full)
    clock.now = 5.0
    lease.keep()
    assert lease.renewed_at == 5.0
    with pytest.raises(PeerError, match=r"lease in .*/j cannot be claimed: .*No space left"):
        owned(tmp_path).claim(entry(2))


def test_a_folder_without_hard_links_has_no_owner_and_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def link(*given: object, **named: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("scalai.launch.coordinator.registers.os.link", link)
    spec = spec_of(tmp_path, *AT, "--durable-dir", str(tmp_path / "disk"))
    found = process.open_coordinator(spec, tmp_path, ("127.0.0.1", 0), TOKEN, 1)
    assert found.owns is None and found.lease is None and "event=no_owner" in caplog.text
    found.close()


# ---------------------------------------------------------------------- a durable directory's owner


@pytest.mark.fault
def test_a_second_living_run_is_refused_by_name(tmp_path: Path, clock: Time) -> None:
    first = Lease(owned(tmp_path), entry(4), lambda: "ab12")
    named = rf"{tmp_path} is in use by run ab12 .*coordinator 4, on machine .* at 127.0.0.1:29400"
    with pytest.raises(RefusedError, match=f"{named}.*it lives .* s ago"):
        await_ownership(owned(tmp_path), tmp_path, clock, lambda seconds: first.keep())
    first.end(is_over=True)
    _, found = await_ownership(owned(tmp_path), tmp_path)
    assert found is not None and found.term == 4, "it has left"


@pytest.mark.fault
def test_a_run_that_died_is_followed_at_once_on_its_machine_and_later_elsewhere(
    tmp_path: Path, clock: Time
) -> None:
    with subprocess.Popen(["true"]) as gone:
        pid = gone.pid
    died = replace(Owner.of_this_process(), pid=pid, started=1)

    def pause(seconds: float) -> None:
        clock.now += seconds

    for term, owner in ((2, died), (3, replace(died, boot="another"))):
        assert owned(tmp_path).claim(replace(entry(term), process=json.dumps(asdict(owner))))
        _, found = await_ownership(owned(tmp_path), tmp_path, clock, pause)
        assert found is not None and found.term == term
        assert (clock.now > CLAIM_S) == (owner is not died)


@pytest.mark.fault
def test_who_takes_a_dead_coordinators_place_waits_for_no_disk(tmp_path: Path) -> None:
    """The durable directory is its own once it answers; until then nothing there is removed."""
    disk = tmp_path / "disk"
    assert owned(disk).claim(entry(2, run="mine"))
    mend = hang(disk)
    lease = Lease(owned(disk), entry(3), lambda: "mine", waits_over=2)
    lease.keep()
    assert not lease.is_superseded and not lease.is_fresh()
    mend()
    lease.keep()
    assert lease.is_fresh() and newest_of(owned(disk)).term == 3


@pytest.mark.fault
@pytest.mark.parametrize("theirs", ["other", ""], ids=["another run", "a run without a name yet"])
def test_where_another_run_has_taken_the_directory_meanwhile_the_successor_yields(
    tmp_path: Path, theirs: str
) -> None:
    """Whichever term its coordinator has, and the next successor's."""
    other, own = Lease(owned(tmp_path), entry(3), lambda: theirs), [""]
    successor = Lease(owned(tmp_path), entry(4), lambda: own[0], waits_over=3 if theirs else 2)

    def look() -> None:
        other.keep()
        successor.keep()

    look()
    look()
    assert not successor.is_superseded, "it may be of the same run, whose name agents bring"
    own[0] = "mine"
    look()
    assert successor.is_superseded and successor.has_another_run == bool(theirs)
    assert f"run {theirs or 'unknown'}" in successor.problem and other.is_fresh()
    own_next = Lease(owned(tmp_path), entry(4), lambda: theirs or "its", waits_over=3)
    own_next.keep()
    assert own_next.is_fresh() == bool(theirs), "its own successor takes it at once"


def spec_of(folder: Path, *flags: str) -> JobSpec:
    config = folder / "elastic.toml"
    config.write_text("[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n")
    given = ["--job", "j", "--elastic", str(config), "--store-dir", str(folder / "store"), *flags]
    return JobSpec.read(parse_options([*given, "script.py"]))


AT = "--coordinator", "192.0.2.1:29400"


@pytest.mark.parametrize(
    ("flags", "kind", "is_one"),
    [
        ((*AT, "--durable-dir", "D"), FolderRegister, True),
        (AT, None, True),
        (("--durable-dir", "D"), None, False),
        ((*AT, "--durable-dir", "D", LEASE_FLAG, "none"), None, False),
        ((*AT, "--durable-dir", "D", LEASE_FLAG, "file:D/link"), FolderRegister, True),
        ((*AT, "--durable-dir", "D", LEASE_FLAG, "etcd:http://h:1"), EtcdRegister, False),
    ],
)
def test_the_folder_of_a_durable_directory_is_the_register_where_no_other_is_named(
    tmp_path: Path, flags: tuple[str, ...], kind: type | None, is_one: bool
) -> None:
    """And has an owner in any case: the same entry, not a second one."""
    (tmp_path / "link").symlink_to(tmp_path)
    spec = spec_of(tmp_path, *(flag.replace("D", str(tmp_path)) for flag in flags))
    register, owner = registers_of(spec)
    assert type(register) is (kind or type(None)) and (register is owner) == is_one
    assert (owner is not None) == ("--durable-dir" in flags)


# ---------------------------------------------------------------------- the coordinator's place


@pytest.fixture
def line(open_line: OpenLine, tmp_path: Path) -> Line:
    return open_line("--nnodes", "1:3", "--durable-dir", str(tmp_path / "disk"))


def lease_of(line: Line, root: Path, **how: int) -> Lease:
    def now() -> float:
        return line.now

    return Lease(owned(root), entry(3), line.coordinator.run_name, clock=now, **how)


@pytest.mark.fault
def test_a_register_that_hangs_takes_nobodys_place_while_all_hosts_are_heard(
    line: Line, tmp_path: Path
) -> None:
    staying, gone = line.join("a"), line.join("b")
    line.coordinator.lease = lease_of(line, tmp_path / "lease")
    hang(tmp_path / "lease")
    line.pass_time(HELD_S + 5.0)
    assert len(line.logged("event=lease_hangs")) == 1
    assert staying.error is None and line.code is None
    gone.die()  # it may have taken this one's place
    line.pass_time(1.0)
    assert line.code == STOOD_DOWN


def takes_over(line: Line, root: Path, within_s: float, *members: str) -> None:
    """Have the coordinator be one that follows another of its machine, whose round had these
    hosts, with a register that hangs. It waits ``within_s`` for them."""
    root.write_text("no folder")
    its = Underway(
        "run", 3, tuple((host, 2) for host in members), {"tp": 1, "pp": 1, "dp": 2 * len(members)},
        None, None, 5, True, True, True, None, False, False, False, False, False, 0,
    )  # fmt: skip
    over = TakingOver(line.now + within_s, {members[0]: its})
    line.live.state = but(line.live.state, pending=over)
    line.coordinator.lease = lease_of(line, root, waits_over=2)
    line.pass_time(1.0)


def test_who_follows_a_dead_coordinator_while_the_register_hangs_waits_for_its_hosts(
    line: Line, tmp_path: Path
) -> None:
    takes_over(line, tmp_path / "lease", 600.0, "a")
    agent = line.join("a")
    line.pass_time(HELD_S)
    assert agent.error is None and line.code is None
    line.live.state = but(line.live.state, pending=None)
    line.pass_time(1.0)
    assert line.logged("event=lease_hangs") and line.code is None


def test_where_a_host_does_not_come_it_stands_down(line: Line, tmp_path: Path) -> None:
    """That one may be the next coordinator's by now."""
    line.join("a")
    takes_over(line, tmp_path / "lease", 20.0, "a", "b")
    line.pass_time(18.0)
    assert line.code is None, "not before they had the time"
    line.pass_time(5.0)
    assert line.logged("event=adopted") and line.code == STOOD_DOWN


@pytest.mark.fault
@pytest.mark.parametrize("is_named", [True, False])
def test_a_coordinator_whose_own_hosts_are_drained_leaves_its_place_where_others_can_have_it(
    open_line: OpenLine, tmp_path: Path, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known only of a register that a person has named."""
    monkeypatch.setattr(leases, "FOLLOWED_S", 0.1)  # nobody follows here
    flags = (LEASE_FLAG, f"file:{tmp_path / 'lease'}") if is_named else ()
    line = open_line("--nnodes", "1:3", "--settle-s", "0.2", *flags)
    here = line.join("a", address=("127.0.0.1", 1))
    there = line.join("b", address=("192.0.2.7", 1))
    line.coordinator.lease = lease_of(line, tmp_path / "lease")
    here.tell("leaving")
    line.pass_time(10.0)
    assert here.heard("exit") and there.heard("start") and not there.heard("exit")
    assert (line.code == STOOD_DOWN) == is_named, line.log
    found = owned(tmp_path / "lease").newest()
    assert found is not None and found.is_free == is_named
    assert len(line.logged("event=handed_over")) == is_named


@pytest.mark.fault
@pytest.mark.parametrize("is_of_another_run", [True, False])
def test_a_coordinator_that_another_one_has_followed_ends(
    line: Line, tmp_path: Path, is_of_another_run: bool
) -> None:
    """With a job of another run: no agent starts a further coordinator, nor does a scheduler start
    it again. One of its own run has its agents from now on."""
    agent, run = line.join("a"), line.coordinator.run_name
    line.coordinator.owns = lease_of(line, tmp_path / "disk")
    Lease(owned(tmp_path / "disk"), entry(4), (lambda: "later") if is_of_another_run else run)
    line.coordinator.owns.keep()
    line.pass_time(1.0)
    if not is_of_another_run:
        assert line.code == STOOD_DOWN and not agent.heard("exit")
        assert "--durable-dir is not held" in line.log[-1]
        return
    told = agent.wait_for("exit")
    assert told["code"] == RefusedError.exit_code and told["keeps_state"]
    assert "run later" in told["reason"] and "Do not start it again" in told["reason"]
    agent.leave()
    line.pass_time(60.0)
    assert line.code == RefusedError.exit_code


@pytest.mark.fault
def test_nothing_is_retired_that_another_run_may_read(line: Line, tmp_path: Path) -> None:
    agent, disk = line.join("a"), tmp_path / "disk"
    disk.mkdir()
    mend = hang(disk)
    line.coordinator.owns = lease_of(line, disk, waits_over=2)
    for number in (5, 6):
        line.coordinator.owns.keep()
        with line.coordinator.lock:
            line.live.perform(actions.Send(("a",), commands.Retire(number)))
        if number == 5:
            mend()
    assert agent.wait_for("retire")["before"] == 6 and len(line.logged("event=not_retired")) == 1


@pytest.mark.fault
def test_the_coordinator_of_a_second_run_is_refused_before_it_listens(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    first = Lease(owned(tmp_path / "disk"), entry(3), lambda: "first")
    first.start()
    with pytest.raises(RefusedError, match="run first"):
        serve(line.spec, tmp_path / "job", "127.0.0.1", 0, TOKEN)
    first.end(is_over=True)
    _, newest = discovery.await_turn(line.spec, None, None)
    assert discovery.next_term(line.spec, tmp_path, newest)[0] == 4


@pytest.mark.parametrize("is_named", [True, False])
def test_a_host_that_names_another_coordinator_is_a_second_run(
    tmp_path: Path, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who names the one that the job has named, or has now, takes part in it."""
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    named = f"127.0.0.1:{free_port('127.0.0.1')}"
    spec = spec_of(tmp_path, "--coordinator", named, "--durable-dir", str(tmp_path / "disk"))
    with closing(Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)) as server:
        by = replace(entry(4), port=int(server.address[1]))
        by = replace(by, named=named if is_named else "127.0.0.1:1")
        first = Lease(owned(tmp_path / "disk"), by, lambda: "ab12")
        first.start()
        if is_named:
            place, _ = discovery.await_turn(spec, named, TOKEN.decode())
            assert place is not None and place.address == by.address
        else:
            with pytest.raises(RefusedError, match="in use by run ab12"):
                discovery.await_turn(spec, named, TOKEN.decode())
        first.end(is_over=True)


@pytest.mark.fault
def test_who_is_overtaken_during_the_wait_for_the_durable_directory_joins_the_faster_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the pod that replaces the lost coordinator's: the folder is of the job's own run."""
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    flags = f"--coordinator-lease file:{tmp_path / 'lease'} --durable-dir {tmp_path / 'disk'}"
    spec = spec_of(tmp_path, *AT, *flags.split())
    with closing(Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)) as server:
        faster = replace(entry(2), port=int(server.address[1]))
        held = [Lease(open_register(f"file:{tmp_path / 'lease'}", spec.job), faster),
                Lease(owned(tmp_path / "disk"), faster, lambda: "ab12")]  # fmt: skip
        for lease in held:
            lease.start()
        monkeypatch.setattr(discovery, "lease_holder", lambda *asked: (None, entry(1)))
        place, _ = discovery.await_turn(spec, AT[1], TOKEN.decode())
        assert place is not None and place.address == faster.address
        for lease in held:
            lease.end(is_over=True)


def test_where_another_machine_can_have_the_next_one_nothing_is_to_be_kept_up(
    line: Line, tmp_path: Path
) -> None:
    line.coordinator.lease = lease_of(line, tmp_path / "lease")
    agent, _ = line.join("a"), line.join("b", address=("192.0.2.2", 1))
    agent.tell("leaving")
    assert agent.wait_for("exit")["reason"] == "drained: the job goes on without this host"


# ---------------------------------------------------------------------- what names a register


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


def test_who_is_no_pod_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="KUBERNETES_SERVICE_HOST is not set"):
        open_register("kubernetes:", "j")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    with pytest.raises(UsageError, match="needs a pod's service account"):
        open_register("kubernetes:", "j")


# ---------------------------------------------------------------------- Kubernetes alone


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with kubernetes_api(tmp_path / "api") as found:
        yield found


def in_pod(api: Api, job: str = "j") -> KubernetesRegister:
    return KubernetesRegister(api.seen_by_a_pod(), job)


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


def test_of_two_claims_over_one_version_one_fails(api: Api) -> None:
    first, second = in_pod(api), in_pod(api)
    assert first.claim(entry(1))
    served: Any = api
    answer = served.answer

    def claimed_first(method: str, *asked: object) -> object:
        if method == "PUT":
            served.answer = answer
            (name,) = api.leases
            api.keep(name, api.leases[name])  # another version is there by then
        return answer(method, *asked)

    served.answer = claimed_first
    assert not second.claim(entry(2))


def test_jobs_have_leases_of_their_own(api: Api) -> None:
    for job in ("gpt", "GPT", "g_pt", "g-pt", "gpt-"):
        assert in_pod(api, job).claim(entry()), job
    assert len(api.leases) == 5


def test_another_authority_than_the_pods_is_not_talked_to(api: Api, tmp_path: Path) -> None:
    Authority(tmp_path, "other")
    register, own = in_pod(api), (api.account / "ca.crt").read_bytes()
    (api.account / "ca.crt").write_bytes((tmp_path / "other.pem").read_bytes())
    with pytest.raises(PeerError, match="CERTIFICATE_VERIFY_FAILED"):
        register.newest()
    assert not api.asked, "it has not been shown the token"
    (api.account / "ca.crt").write_bytes(own)
    assert register.newest() is None, "it is read anew"
