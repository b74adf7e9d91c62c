"""How an agent finds the coordinator that takes the place of one that is gone."""

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from scalai.core.errors import PeerError, UsageError
from scalai.launch.config.endpoint import join_endpoint, read_holder, write_card
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator import discovery, leases
from scalai.launch.coordinator import next_coordinator as succession
from scalai.launch.coordinator.discovery import Newest, Place, job_directory, next_term
from scalai.launch.coordinator.leases import Lease
from scalai.launch.coordinator.next_coordinator import OverError, Succession
from scalai.launch.coordinator.process import serve
from scalai.launch.coordinator.registers import FolderRegister, LeaseEntry
from scalai.runtime.calls import Server
from support.coordinator_line import wait_until
from support.ports import free_port
from support.stranger import HTTP, Stranger, other_release

TOKEN = b"a token of the job"


def spec_of(folder: Path, *flags: str) -> JobSpec:
    given = ["--job", "j", "--nproc-per-node", "1", "--store-dir", str(folder), *flags]
    return JobSpec.read(parse_options([*given, "script.py"]))


def gone() -> Place:
    return Place(("127.0.0.1", free_port("127.0.0.1")), TOKEN, is_here=True)


@pytest.mark.fault
def test_where_the_job_has_ended_nobody_follows(tmp_path: Path) -> None:
    """A coordinator that has ended with its job has taken its card away."""
    found = Succession(spec_of(tmp_path), "127.0.0.1")
    with pytest.raises(OverError, match="the job is over"):
        found.find(gone(), 1, threading.Event())


def test_who_has_taken_over_on_this_machine_is_followed(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    try:
        address = ("127.0.0.1", int(server.address[1]))
        write_card(job_directory(spec), address, TOKEN, 2)
        place = Succession(spec, "127.0.0.1").find(gone(), 1, threading.Event())
        assert place.address == address
    finally:
        server.close()


@pytest.mark.fault
@pytest.mark.parametrize("answer", [other_release(), HTTP, b""], ids=["v9", "http", "silent"])
def test_a_stranger_on_the_port_of_a_dead_coordinator_holds_up_nobody_of_this_machine(
    tmp_path: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says, or does not say, before it has proven to know the token."""
    with Stranger(answer) as stranger, subprocess.Popen(["true"]) as dead:
        dead.wait(30)
        spec = spec_of(tmp_path, "--coordinator", join_endpoint(*stranger.address))
        monkeypatch.setattr("scalai.launch.config.endpoint.os.getpid", lambda: dead.pid)
        write_card(job_directory(spec), stranger.address, TOKEN, 1)
        monkeypatch.undo()
        gone = Place(stranger.address, TOKEN, is_here=True)
        place = Succession(spec, "127.0.0.1").find(gone, 1, threading.Event())
        assert place.started is not None and place.address[1] != stranger.address[1]
        place.started.kill()
        place.started.wait(30)


def test_what_a_stranger_says_does_not_end_the_search_for_a_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "SEARCH_S", 1.0)
    with Stranger(other_release()) as stranger:
        place = Place(stranger.address, TOKEN, is_here=False)
        with pytest.raises(PeerError, match=r"nobody takes its place within 1 s.*versions up to 9"):
            Succession(spec_of(tmp_path), "127.0.0.1").find(place, 1, threading.Event())


def test_who_waits_for_another_hosts_coordinator_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "SEARCH_S", 1.0)
    found = Succession(spec_of(tmp_path), "127.0.0.1")
    place = Place(("127.0.0.1", free_port("127.0.0.1")), TOKEN, is_here=False)
    with pytest.raises(PeerError, match="nobody takes its place within 1 s"):
        found.find(place, 1, threading.Event())
    assert read_holder(job_directory(spec_of(tmp_path))) is None


def test_who_ends_meanwhile_waits_no_longer(tmp_path: Path) -> None:
    place = Place(("127.0.0.1", free_port("127.0.0.1")), TOKEN, is_here=False)
    is_over = threading.Event()
    is_over.set()
    with pytest.raises(PeerError):
        Succession(spec_of(tmp_path), "127.0.0.1").find(place, 1, is_over)


def leased(folder: Path) -> tuple[JobSpec, FolderRegister]:
    root = folder / "leases"
    flags = ("--coordinator", "192.0.2.1:29400", "--coordinator-lease", f"file:{root}")
    return spec_of(folder, *flags), FolderRegister(root, "j")


def test_who_holds_the_lease_on_another_host_is_followed(tmp_path: Path) -> None:
    spec, register = leased(tmp_path)
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    try:
        register.claim(LeaseEntry(7, "127.0.0.1", int(server.address[1])))
        place = Place(("192.0.2.1", 29400), TOKEN, is_here=False)
        found = Succession(spec, "127.0.0.1").find(place, 6, threading.Event())
        assert found.address == server.address
    finally:
        server.close()


@pytest.mark.fault
def test_a_holder_that_answers_is_followed_though_its_register_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk hangs, and no more than that: nobody takes its place."""
    monkeypatch.setattr(succession, "CLAIM_S", 0.2)
    spec, register = leased(tmp_path)
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    try:
        assert register.claim(LeaseEntry(7, "127.0.0.1", int(server.address[1])))
        place = Place(("192.0.2.1", 29400), TOKEN, is_here=False)
        found = Succession(spec, "127.0.0.1").find(place, 7, threading.Event())
        assert found.address == server.address
        newest = register.newest()
        assert newest is not None and newest.term == 7
    finally:
        server.close()


def dead(
    folder: Path, term: int, address: tuple[str, int] = ("192.0.2.1", 29400)
) -> FolderRegister:
    """Return the register of a durable directory, with the entry of a coordinator of another
    machine that has died."""
    register = FolderRegister(folder / "disk", "j")
    assert register.claim(LeaseEntry(term, "192.0.2.1", 29400))
    return register


def durable(folder: Path, *flags: str) -> JobSpec:
    config = folder / "elastic.toml"
    config.write_text("[model]\nglobal_batch_size = 12\n[resize]\ncoordinator_timeout_s = 2.0\n")
    at = "--coordinator", "192.0.2.1:29400", "--durable-dir", str(folder / "disk")
    return spec_of(folder, "--elastic", str(config), *at, *flags)


def test_where_its_machine_is_gone_a_host_that_has_seen_its_entry_renewed_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the durable directory says it, without a flag."""
    for module, name, seconds in (
        (succession, "CLAIM_S", 1.0), (succession, "JITTER_S", 0.0), (succession, "RENEW_S", 0.2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    spec, register = durable(tmp_path), dead(tmp_path, 7)
    place = Place(("192.0.2.1", 29400), TOKEN)
    found = Succession(spec, "127.0.0.1")
    found.watch_while(lambda: False)
    wait_until(lambda: _renewed(register, 7) and found.has_lease, "it knows whose register it is")
    begun = found.find(place, 7, threading.Event())
    assert begun.started is not None
    try:
        newest = register.newest()
        assert newest is not None and (newest.term, newest.address) == (8, begun.address)
    finally:
        begun.started.kill()
        begun.started.wait(30)


def _renewed(register: FolderRegister, term: int) -> bool:
    register.renew(LeaseEntry(term, "192.0.2.1", 29400))
    return True


@pytest.mark.parametrize("is_over", [False, True])
def test_a_durable_directory_of_ones_own_says_nothing_of_another_hosts_coordinator(
    tmp_path: Path,
    is_over: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What an earlier run has left there is neither claimed nor believed."""
    for name, seconds in (("CLAIM_S", 0.2), ("SEARCH_S", 2.0), ("SEEN_S", 0.1), ("RENEW_S", 0.2)):
        monkeypatch.setattr(succession, name, seconds)
    spec, register = durable(tmp_path), dead(tmp_path, 7)
    register.renew(LeaseEntry(7, "192.0.2.1", 29400, is_over=is_over))
    found = Succession(spec, "127.0.0.1")
    with pytest.raises(PeerError, match="nobody takes its place"):
        found.find(Place(("127.0.0.1", 1), TOKEN), 1, threading.Event())
    newest = register.newest()
    assert newest is not None and newest.term == 7
    assert "is not seen there" in caplog.text


def test_a_host_that_leaves_leaves_it_to_others_to_have_the_next_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go with that host."""
    for name, seconds in (("CLAIM_S", 0.2), ("JITTER_S", 0.0), ("LEAVING_S", 600.0)):
        monkeypatch.setattr(succession, name, seconds)
    spec, register = leased(tmp_path)
    assert register.claim(LeaseEntry(7, "192.0.2.1", 29400))
    place = Place(("192.0.2.1", 29400), TOKEN)
    found = list[Place]()
    one = Succession(spec, "127.0.0.1", lambda: True)
    search = threading.Thread(
        target=lambda: found.append(one.find(place, 7, threading.Event())), daemon=True
    )
    search.start()
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    try:
        assert register.claim(LeaseEntry(8, "127.0.0.1", int(server.address[1])))
        search.join(60.0)
        assert [each.address for each in found] == [server.address]
    finally:
        server.close()


def test_a_silent_coordinator_is_watched_also_behind_a_first_one_that_was_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody has to wait anew for what was seen while it was silent."""
    monkeypatch.setattr(succession, "RENEW_S", 0.05)
    spec, register = leased(tmp_path)
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    looks, newest = list[int](), FolderRegister.newest

    def look(self: FolderRegister) -> LeaseEntry | None:
        looks.append(1)
        return newest(self)

    monkeypatch.setattr(FolderRegister, "newest", look)
    try:
        assert register.claim(LeaseEntry(7, "127.0.0.1", int(server.address[1])))
        found = Succession(spec, "127.0.0.1")
        found.watch_while(lambda: True)
        found.find(Place(("192.0.2.1", 29400), TOKEN), 6, threading.Event())
        before = len(looks)
        wait_until(lambda: len(looks) > before + 3, "it looks on")
    finally:
        server.close()


def test_where_the_register_hangs_nobody_takes_the_place_of_another_machines_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody who looks for it hangs with it."""
    for name, seconds in (("CLAIM_S", 0.2), ("RENEW_S", 0.2)):
        monkeypatch.setattr(succession, name, seconds)
    spec, is_over = durable(tmp_path, "--coordinator-lease", f"file:{tmp_path}"), threading.Event()
    monkeypatch.setattr(FolderRegister, "newest", lambda self: is_over.wait(60.0) and None)
    with pytest.raises(PeerError, match=r"nobody takes its place within 2 s"):
        Succession(spec, "127.0.0.1").find(Place(("127.0.0.1", 1), TOKEN), 1, threading.Event())
    is_over.set()


def test_where_the_register_hangs_the_coordinator_of_a_machine_is_followed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()

    def start(*given: object, **named: object) -> Place:
        asked.append((given[4], named))
        return Place(("127.0.0.1", 1), TOKEN)

    is_over = threading.Event()
    monkeypatch.setattr(FolderRegister, "newest", lambda self: is_over.wait(60.0) and None)
    monkeypatch.setattr(succession, "start_coordinator", start)
    spec = durable(tmp_path)
    write_card(job_directory(spec), gone().address, TOKEN, 4)
    Succession(spec, "127.0.0.1").find(gone(), 4, threading.Event())
    assert asked == [(5, {"is_successor": True, "succeeds": "here"})]
    is_over.set()


def test_a_lease_of_a_job_that_is_over_is_not_claimed(tmp_path: Path) -> None:
    spec, register = leased(tmp_path)
    register.claim(LeaseEntry(7, "127.0.0.1", 1, is_over=True))
    place = Place(("192.0.2.1", 29400), TOKEN, is_here=False)
    with pytest.raises(OverError, match="the job is over"):
        Succession(spec, "127.0.0.1").find(place, 6, threading.Event())


def test_terms_grow_over_cards_and_leases(tmp_path: Path) -> None:
    spec, _ = leased(tmp_path)
    folder = job_directory(spec)
    assert next_term(spec, folder, (None, None)) == (1, False)
    write_card(folder, ("127.0.0.1", 1), TOKEN, 4)
    assert next_term(spec, folder, (None, None)) == (5, True)
    assert next_term(spec, folder, (None, LeaseEntry(7, "127.0.0.1", 1))) == (8, True)
    assert next_term(spec, folder, (LeaseEntry(9, "127.0.0.1", 1), None)) == (10, True)
    over = LeaseEntry(9, "127.0.0.1", 1, is_over=True)
    assert next_term(spec, folder, (over, over)) == (10, False), "it had ended, and begins again"


def started_beside_another(
    spec: JobSpec, register: FolderRegister, winner: LeaseEntry, monkeypatch: pytest.MonkeyPatch
) -> Place:
    """Start the first coordinator of a job, of which another agent claims the lease meanwhile."""

    def numbered(spec: JobSpec, folder: Path, newest: Newest) -> tuple[int, bool]:
        found = next_term(spec, folder, newest)
        assert register.claim(winner)
        return found

    monkeypatch.setattr(discovery, "next_term", numbered)
    return discovery.find_coordinator(spec, TOKEN.decode())


def both_here(folder: Path) -> tuple[JobSpec, FolderRegister]:
    root, port = folder / "leases", free_port("127.0.0.1")
    flags = ("--coordinator", f"127.0.0.1:{port}", "--coordinator-lease", f"file:{root}")
    return spec_of(folder, *flags), FolderRegister(root, "j")


@pytest.mark.fault
def test_who_loses_the_first_claim_of_the_lease_joins_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, register = both_here(tmp_path)
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    try:
        winner = LeaseEntry(1, "127.0.0.1", int(server.address[1]))
        place = started_beside_another(spec, register, winner, monkeypatch)
        assert place.address == server.address and not place.is_new
        assert read_holder(job_directory(spec)) is None, "the loser leaves no card"
    finally:
        server.close()


@pytest.mark.fault
def test_where_the_winner_of_the_first_claim_dies_the_loser_starts_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "CLAIM_S", 1.0)
    spec, register = both_here(tmp_path)
    winner = LeaseEntry(1, "127.0.0.1", free_port("127.0.0.1"))
    monkeypatch.setattr(register, "claim", once(register.claim))
    place = started_beside_another(spec, register, winner, monkeypatch)
    try:
        newest = register.newest()
        assert place.is_new and newest is not None
        assert newest.term == 2 and newest.address == place.address
    finally:
        assert place.started is not None
        place.started.kill()
        place.started.wait(30)


def once(claim: Callable[[LeaseEntry], bool]) -> Callable[[LeaseEntry], bool]:
    """Return what claims the first time it is asked to, and says then that all is well."""
    asked: list[LeaseEntry] = []

    def ask(entry: LeaseEntry) -> bool:
        asked.append(entry)
        return len(asked) > 1 or claim(entry)

    return ask


def test_a_job_that_begins_anew_takes_nobodys_place(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "--fresh")
    folder = job_directory(spec)
    write_card(folder, ("127.0.0.1", 1), TOKEN, 4)
    assert next_term(spec, folder, (None, None)) == (5, False)


def test_a_coordinator_by_hand_does_not_take_the_lease_of_one_that_lives(tmp_path: Path) -> None:
    spec, register = leased(tmp_path)
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    try:
        register.claim(LeaseEntry(7, "127.0.0.1", int(server.address[1])))
        with pytest.raises(UsageError, match="holds the lease"):
            serve(spec, job_directory(spec), "127.0.0.1", 0, TOKEN)
        newest = register.newest()
        assert newest is not None and newest.term == 7
    finally:
        server.close()


def test_who_succeeds_in_a_job_that_had_begun_anew_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next coordinator would give up what the job has made since."""
    heard = tmp_path / "order.json"
    text = f"import sys; open({str(heard)!r}, 'w').write(sys.stdin.read()); sys.exit(2)"
    monkeypatch.setattr(discovery, "COORDINATOR", ["-c", text])
    monkeypatch.setattr(succession, "SEARCH_S", 1.0)
    spec = spec_of(tmp_path, "--fresh")
    write_card(job_directory(spec), gone().address, TOKEN, 4)
    with pytest.raises(PeerError):
        Succession(spec, "127.0.0.1").find(gone(), 4, threading.Event())
    order = json.loads(heard.read_text())
    assert order["is_successor"] is True and order["term"] == 5


def test_who_cannot_reach_the_holder_of_a_lease_says_so_within_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is renewed all the time, and this host is cut off from it, not from the register."""
    monkeypatch.setattr(discovery, "JOIN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(leases, "LOOK_S", 0.05)
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    spec, register = leased(tmp_path)
    lease = Lease(register, LeaseEntry(1, "127.0.0.1", free_port("127.0.0.1")))
    with pytest.raises(PeerError, match="renews its lease"):
        discovery.lease_holder(spec, register, "127.0.0.1:1", "t" * 32)
    lease.end(is_over=False)
