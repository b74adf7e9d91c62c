"""How an agent finds the coordinator that takes the place of one that is gone."""

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from scalai.core.errors import PeerError, UsageError
from scalai.core.witness import Known
from scalai.launch.config.endpoint import join_endpoint, read_holder, write_card
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job import JobSpec
from scalai.launch.coordinator import discovery, succession
from scalai.launch.coordinator.discovery import Place, job_directory, next_term
from scalai.launch.coordinator.leases import Entry, FolderRegister
from scalai.launch.coordinator.process import serve
from scalai.launch.coordinator.succession import OverError, Succession
from scalai.runtime.calls import Server
from support.ports import free_port
from support.stranger import HTTP, Stranger, other_release

TOKEN = b"a token of the job"


def spec_of(folder: Path, *flags: str) -> JobSpec:
    given = ["--job", "j", "--nproc-per-node", "1", "--store-dir", str(folder), *flags]
    return JobSpec.read(parse_options([*given, "script.py"]))


def gone() -> Place:
    return Place(("127.0.0.1", free_port("127.0.0.1")), TOKEN, is_here=True)


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
        register.claim(Entry(7, "127.0.0.1", int(server.address[1])))
        place = Place(("192.0.2.1", 29400), TOKEN, is_here=False)
        found = Succession(spec, "127.0.0.1").find(place, 6, threading.Event())
        assert found.address == server.address
    finally:
        server.close()


def test_a_holder_that_answers_is_followed_though_its_register_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk hangs, and no more than that: nobody takes its place."""
    monkeypatch.setattr(succession, "LEASE_S", 0.2)
    spec, register = leased(tmp_path)
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    try:
        assert register.claim(Entry(7, "127.0.0.1", int(server.address[1])))
        place = Place(("192.0.2.1", 29400), TOKEN, is_here=False)
        found = Succession(spec, "127.0.0.1").find(place, 7, threading.Event())
        assert found.address == server.address
        newest = register.newest()
        assert newest is not None and newest.term == 7
    finally:
        server.close()


def test_a_lease_of_a_job_that_is_over_is_not_claimed(tmp_path: Path) -> None:
    spec, register = leased(tmp_path)
    register.claim(Entry(7, "127.0.0.1", 1, is_over=True))
    place = Place(("192.0.2.1", 29400), TOKEN, is_here=False)
    with pytest.raises(OverError, match="the job is over"):
        Succession(spec, "127.0.0.1").find(place, 6, threading.Event())


def test_terms_grow_over_cards_and_leases(tmp_path: Path) -> None:
    spec, register = leased(tmp_path)
    folder = job_directory(spec)
    assert next_term(spec, folder) == (1, False)
    write_card(folder, ("127.0.0.1", 1), TOKEN, 4)
    assert next_term(spec, folder) == (5, True)
    register.claim(Entry(9, "127.0.0.1", 1))
    assert next_term(spec, folder) == (10, True)
    register.renew(Entry(9, "127.0.0.1", 1, is_over=True))
    assert next_term(spec, folder) == (10, False), "the job had ended, and begins again"


def started_beside_another(
    spec: JobSpec, register: FolderRegister, winner: Entry, monkeypatch: pytest.MonkeyPatch
) -> Place:
    """Start the first coordinator of a job, of which another agent claims the lease meanwhile."""

    def numbered(spec: JobSpec, folder: Path, known: Known) -> tuple[int, bool]:
        found = next_term(spec, folder, known)
        assert register.claim(winner)
        return found

    monkeypatch.setattr(discovery, "next_term", numbered)
    return discovery.find_coordinator(spec, TOKEN.decode())


def both_here(folder: Path) -> tuple[JobSpec, FolderRegister]:
    root, port = folder / "leases", free_port("127.0.0.1")
    flags = ("--coordinator", f"127.0.0.1:{port}", "--coordinator-lease", f"file:{root}")
    return spec_of(folder, *flags), FolderRegister(root, "j")


def test_who_loses_the_first_claim_of_the_lease_joins_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, register = both_here(tmp_path)
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    try:
        winner = Entry(1, "127.0.0.1", int(server.address[1]))
        place = started_beside_another(spec, register, winner, monkeypatch)
        assert place.address == server.address and not place.is_new
        assert read_holder(job_directory(spec)) is None, "the loser leaves no card"
    finally:
        server.close()


def test_where_the_winner_of_the_first_claim_dies_the_loser_starts_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "LEASE_S", 1.0)
    spec, register = both_here(tmp_path)
    winner = Entry(1, "127.0.0.1", free_port("127.0.0.1"))
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


def once(claim: Callable[[Entry], bool]) -> Callable[[Entry], bool]:
    """Return what claims the first time it is asked to, and says then that all is well."""
    asked: list[Entry] = []

    def ask(entry: Entry) -> bool:
        asked.append(entry)
        return len(asked) > 1 or claim(entry)

    return ask


def test_a_job_that_begins_anew_takes_nobodys_place(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "--fresh")
    folder = job_directory(spec)
    write_card(folder, ("127.0.0.1", 1), TOKEN, 4)
    assert next_term(spec, folder) == (5, False)


def test_a_coordinator_by_hand_does_not_take_the_lease_of_one_that_lives(tmp_path: Path) -> None:
    spec, register = leased(tmp_path)
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    try:
        register.claim(Entry(7, "127.0.0.1", int(server.address[1])))
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
    monkeypatch.setattr(discovery, "LOOK_S", 0.05)
    register = FolderRegister(tmp_path, "j")
    assert register.claim(Entry(1, "127.0.0.1", free_port("127.0.0.1")))
    with pytest.raises(PeerError, match="renews its lease"):
        discovery.lease_holder(register, "127.0.0.1:1", "t" * 32)
