"""How an agent finds the first coordinator, and one that takes the place of another."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

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
from support.coordinator_line import address_of
from support.ports import free_port
from support.stranger import HTTP, Stranger, other_release
from support.waiting import wait_until

TOKEN = b"a token of the job"
ELSEWHERE = Place(("192.0.2.1", 29400), TOKEN)
"""A coordinator of another machine, which answers nobody."""
SCALAI = Path(sys.executable).with_name("scalai")


def spec_of(folder: Path, *flags: str) -> JobSpec:
    given = ["--job", "j", "--nproc-per-node", "1", "--store-dir", str(folder), *flags]
    return JobSpec.read(parse_options([*given, "script.py"]))


def leased(folder: Path, at: str = "192.0.2.1:29400") -> tuple[JobSpec, FolderRegister]:
    """A job with a register of its own."""
    root = folder / "leases"
    flags = ("--coordinator", at, "--coordinator-lease", f"file:{root}")
    return spec_of(folder, *flags), FolderRegister(root, "j")


def durable(folder: Path, *flags: str, timeout_s: float = 2.0) -> tuple[JobSpec, FolderRegister]:
    """A job whose durable directory is its register."""
    config = folder / "elastic.toml"
    resize = f"[resize]\ncoordinator_timeout_s = {timeout_s}\n"
    config.write_text(f"[model]\nglobal_batch_size = 12\n{resize}")
    at = "--coordinator", "192.0.2.1:29400", "--durable-dir", str(folder / "disk")
    spec = spec_of(folder, "--elastic", str(config), *at, *flags)
    return spec, FolderRegister(folder / "disk", "j")


def gone(*, is_here: bool = True) -> Place:
    return Place(("127.0.0.1", free_port("127.0.0.1")), TOKEN, is_here=is_here)


def find(
    spec: JobSpec, place: Place, term: int = 1, is_leaving: Callable[[], bool] = lambda: False,
    is_over: threading.Event | None = None,
) -> Place:  # fmt: skip
    with closing(Succession(spec, "127.0.0.1", is_leaving)) as found:
        return found.find(place, term, is_over or threading.Event())


def newest_of(register: FolderRegister) -> LeaseEntry:
    found = register.newest()
    assert found is not None
    return found


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """The address of a coordinator that answers."""
    handle: Any = lambda peer, request: None  # noqa: E731
    with closing(Server(("127.0.0.1", 0), TOKEN, object, handle)) as server:
        yield address_of(server)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Shorten waits of the search by name."""

    def shorten(**seconds: float) -> None:
        for name, value in seconds.items():
            monkeypatch.setattr(succession, name, value)

    return shorten


def end(place: Place) -> None:
    """End a coordinator that was started."""
    assert place.started is not None
    with place.started:
        place.started.kill()


# ---------------------------------------------------------------------- on one machine


@pytest.mark.fault
def test_where_the_job_has_ended_nobody_follows(tmp_path: Path) -> None:
    """A coordinator that has ended with its job has taken its card away, or its lease says so."""
    with pytest.raises(OverError, match="the job is over"):
        find(spec_of(tmp_path), gone())
    spec, register = leased(tmp_path)
    register.claim(LeaseEntry(7, "127.0.0.1", 1, is_over=True))
    with pytest.raises(OverError, match="the job is over"):
        find(spec, ELSEWHERE, 6)


def test_who_has_taken_over_on_this_machine_is_followed(
    tmp_path: Path, address: tuple[str, int]
) -> None:
    spec = spec_of(tmp_path)
    write_card(job_directory(spec), address, TOKEN, 2)
    assert find(spec, gone()).address == address


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
        place = find(spec, Place(stranger.address, TOKEN, is_here=True))
        assert place.address[1] != stranger.address[1]
        end(place)


def test_what_a_stranger_says_does_not_end_the_search_for_a_coordinator(
    tmp_path: Path, waits: Callable[..., None]
) -> None:
    waits(SEARCH_S=1.0)
    with Stranger(other_release()) as stranger:
        place = Place(stranger.address, TOKEN, is_here=False)
        with pytest.raises(PeerError, match=r"nobody takes its place within 1 s.*versions up to 9"):
            find(spec_of(tmp_path), place)


def test_who_waits_for_another_hosts_coordinator_starts_none(
    tmp_path: Path, waits: Callable[..., None]
) -> None:
    spec, is_over = spec_of(tmp_path), threading.Event()
    is_over.set()
    with pytest.raises(PeerError):  # who ends meanwhile waits no longer
        find(spec, gone(is_here=False), is_over=is_over)
    waits(SEARCH_S=1.0)
    with pytest.raises(PeerError, match="nobody takes its place within 1 s"):
        find(spec, gone(is_here=False))
    assert read_holder(job_directory(spec)) is None


def test_who_succeeds_in_a_job_that_had_begun_anew_says_so(
    tmp_path: Path, waits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next coordinator would give up what the job has made since."""
    heard = tmp_path / "order.json"
    text = f"import sys; open({str(heard)!r}, 'w').write(sys.stdin.read()); sys.exit(2)"
    monkeypatch.setattr(discovery, "COORDINATOR", ["-c", text])
    waits(SEARCH_S=1.0)
    spec = spec_of(tmp_path, "--fresh")
    write_card(job_directory(spec), gone().address, TOKEN, 4)
    with pytest.raises(PeerError):
        find(spec, gone(), 4)
    order = json.loads(heard.read_text())
    assert order["is_successor"] is True and order["term"] == 5


# ---------------------------------------------------------------------- by a register


@pytest.mark.fault
@pytest.mark.parametrize("term", [6, 7], ids=["a later one", "whose register stands still"])
def test_who_holds_the_lease_on_another_host_and_answers_is_followed(
    tmp_path: Path, waits: Callable[..., None], address: tuple[str, int], term: int
) -> None:
    """Where a disk hangs, and no more than that, nobody takes its place."""
    waits(CLAIM_S=0.2)
    spec, register = leased(tmp_path)
    assert register.claim(LeaseEntry(7, *address))
    assert find(spec, ELSEWHERE, term).address == address
    assert newest_of(register).term == 7


def test_where_its_machine_is_gone_a_host_that_has_seen_its_entry_renewed_takes_its_place(
    tmp_path: Path, waits: Callable[..., None]
) -> None:
    """The folder of the durable directory says it, without a flag."""
    waits(CLAIM_S=1.0, JITTER_S=0.0, RENEW_S=0.2)
    # Where nothing refuses a connection to that address, one takes seconds to fail.
    spec, register = durable(tmp_path, timeout_s=60.0)
    entry = LeaseEntry(7, *ELSEWHERE.address)
    assert register.claim(entry)
    with closing(Succession(spec, "127.0.0.1")) as found:
        found.watch_while(lambda: False)

        def has_lease() -> bool:
            register.renew(entry)
            return found.has_lease

        wait_until(has_lease, "it knows whose register it is")
        begun = found.find(ELSEWHERE, 7, threading.Event())
    newest = newest_of(register)
    end(begun)
    assert (newest.term, newest.address) == (8, begun.address)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_durable_directory_of_ones_own_says_nothing_of_another_hosts_coordinator(
    tmp_path: Path, is_over: bool, waits: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """What an earlier run has left there is neither claimed nor believed."""
    waits(CLAIM_S=0.2, SEARCH_S=2.0, SEEN_S=0.1, RENEW_S=0.2)
    spec, register = durable(tmp_path)
    assert register.claim(LeaseEntry(7, *ELSEWHERE.address, is_over=is_over))
    with pytest.raises(PeerError, match="nobody takes its place"):
        find(spec, Place(("127.0.0.1", 1), TOKEN))
    assert newest_of(register).term == 7
    assert "is not seen there" in caplog.text


def test_a_place_that_its_holder_has_left_is_taken_at_once(
    tmp_path: Path, waits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "start_coordinator", lambda *given, **how: ELSEWHERE)
    waits(CLAIM_S=600.0, JITTER_S=0.0)
    spec, register = leased(tmp_path)
    assert register.claim(LeaseEntry(7, *ELSEWHERE.address, is_free=True))
    assert find(spec, ELSEWHERE, 7) is ELSEWHERE


def test_a_host_that_leaves_leaves_it_to_others_to_have_the_next_coordinator(
    tmp_path: Path,
    waits: Callable[..., None],
    address: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would go with that host."""
    started = list[object]()
    monkeypatch.setattr(succession, "start_coordinator", lambda *given, **how: started.append(1))
    waits(CLAIM_S=0.2, JITTER_S=0.0, LEAVING_S=600.0)
    spec, register = leased(tmp_path)
    assert register.claim(LeaseEntry(7, *ELSEWHERE.address))
    found, asked = list[Place](), threading.Event()

    def is_leaving() -> bool:
        asked.set()
        return True

    def search() -> None:
        found.append(find(spec, ELSEWHERE, 7, is_leaving))

    thread = threading.Thread(target=search, daemon=True)
    thread.start()
    assert asked.wait(60.0), "it could claim the lease"
    assert register.claim(LeaseEntry(8, *address))
    thread.join(60.0)
    assert [each.address for each in found] == [address] and not started


def test_a_silent_coordinator_is_watched_also_behind_a_first_one_that_was_gone(
    tmp_path: Path,
    address: tuple[str, int],
    waits: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that nobody has to wait anew for what was seen while it was silent."""
    waits(RENEW_S=0.05)
    spec, register = leased(tmp_path)
    assert register.claim(LeaseEntry(7, *address))
    looks, newest = list[int](), FolderRegister.newest

    def look(self: FolderRegister) -> LeaseEntry | None:
        looks.append(1)
        return newest(self)

    monkeypatch.setattr(FolderRegister, "newest", look)
    with closing(Succession(spec, "127.0.0.1")) as found:
        found.watch_while(lambda: True)
        found.find(ELSEWHERE, 6, threading.Event())
        before = len(looks)
        wait_until(lambda: len(looks) > before + 3, "it looks on")
    wait_until(
        lambda: "lease-watch" not in {each.name for each in threading.enumerate()},
        "it looks no more",
    )


@pytest.mark.parametrize("is_here", [False, True])
def test_where_the_register_hangs_only_the_coordinator_of_this_machine_is_followed(
    tmp_path: Path, is_here: bool, waits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes the place of another machine's, and nobody who looks for it hangs with it."""
    waits(CLAIM_S=0.2, RENEW_S=0.2)
    is_over, asked = threading.Event(), list[object]()

    def start(*given: object, **named: object) -> Place:
        asked.append((given[4], named))
        return Place(("127.0.0.1", 1), TOKEN)

    monkeypatch.setattr(FolderRegister, "newest", lambda self: is_over.wait(60.0) and None)
    monkeypatch.setattr(succession, "start_coordinator", start)
    spec, _ = durable(tmp_path, "--coordinator-lease", f"file:{tmp_path}")
    write_card(job_directory(spec), gone().address, TOKEN, 4)
    if is_here:
        find(spec, gone(), 4)
        assert asked == [(5, {"is_successor": True, "succeeds": "here"})]
    else:
        with pytest.raises(PeerError, match="nobody takes its place within 2 s"):
            find(spec, Place(("127.0.0.1", 1), TOKEN), 4)
        assert not asked
    is_over.set()


# ---------------------------------------------------------------------- the first coordinator


@pytest.mark.parametrize("is_fresh", [False, True])
def test_terms_grow_over_cards_and_leases(tmp_path: Path, is_fresh: bool) -> None:
    """And a job that begins anew takes nobody's place."""
    spec = spec_of(tmp_path, *(["--fresh"] if is_fresh else []))
    folder, follows = job_directory(spec), not is_fresh
    assert next_term(spec, folder, (None, None)) == (1, False)
    write_card(folder, ("127.0.0.1", 1), TOKEN, 4)
    assert next_term(spec, folder, (None, None)) == (5, follows)
    assert next_term(spec, folder, (None, LeaseEntry(7, "127.0.0.1", 1))) == (8, follows)
    assert next_term(spec, folder, (LeaseEntry(9, "127.0.0.1", 1), None)) == (10, follows)
    over = LeaseEntry(9, "127.0.0.1", 1, is_over=True)
    assert next_term(spec, folder, (over, over)) == (10, False), "it had ended, and begins again"


@pytest.mark.fault
@pytest.mark.parametrize("has_died", [False, True])
def test_who_loses_the_first_claim_of_the_lease_joins_the_winner_or_follows_it(
    tmp_path: Path, address: tuple[str, int], has_died: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "CLAIM_S", 1.0)
    spec, register = leased(tmp_path, f"127.0.0.1:{free_port('127.0.0.1')}")
    winner = LeaseEntry(1, *(gone().address if has_died else address))

    def numbered(spec: JobSpec, folder: Path, newest: Newest) -> tuple[int, bool]:
        found = next_term(spec, folder, newest)
        register.claim(winner)  # meanwhile, and only once
        return found

    monkeypatch.setattr(discovery, "next_term", numbered)
    place = discovery.find_coordinator(spec, TOKEN.decode())
    if not has_died:
        assert place.address == address and not place.is_new
        assert read_holder(job_directory(spec)) is None, "the loser leaves no card"
        return
    newest = newest_of(register)
    end(place)
    assert (newest.term, newest.address) == (2, place.address)


def test_a_coordinator_by_hand_does_not_take_the_lease_of_one_that_lives(
    tmp_path: Path, address: tuple[str, int]
) -> None:
    spec, register = leased(tmp_path)
    register.claim(LeaseEntry(7, *address))
    with pytest.raises(UsageError, match="holds the lease"):
        serve(spec, job_directory(spec), "127.0.0.1", 0, TOKEN)
    assert newest_of(register).term == 7


def test_who_cannot_reach_the_holder_of_a_lease_says_so_within_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is renewed all the time, and this host is cut off from it, not from the register."""
    monkeypatch.setattr(discovery, "JOIN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(leases, "LOOK_S", 0.05)
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    spec, register = leased(tmp_path)
    lease = Lease(register, LeaseEntry(1, *gone().address))
    lease.start()
    with pytest.raises(PeerError, match="renews its lease"):
        discovery.lease_holder(spec, register, "127.0.0.1:1", "t" * 32)
    lease.end(is_over=False)


@pytest.mark.fault
def test_a_coordinator_that_does_not_answer_in_time_is_ended_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not begin later, nor stay as a zombie of its agent."""
    begun = tmp_path / "pid"
    text = f"import os; from support.waiting import stay; open({str(begun)!r}, 'w')"
    text += ".write(str(os.getpid())); stay()"
    monkeypatch.setattr(discovery, "COORDINATOR", ["-c", text])
    monkeypatch.setattr(discovery, "JOIN_TIMEOUT_S", 2.0)
    spec = spec_of(tmp_path)
    with pytest.raises(PeerError, match=r"does not answer at 127\.0\.0\.1:0 after 2 s"):
        discovery.start_coordinator(spec, job_directory(spec), None, None)
    assert not Path(f"/proc/{begun.read_text()}").exists()


@pytest.mark.fault
def test_a_coordinator_without_agents_ends_at_the_first_signal_and_says_so(tmp_path: Path) -> None:
    at, log = join_endpoint(*gone().address), tmp_path / "coordinator.log"
    command = [
        str(SCALAI), "coordinator", "--listen", at, "--", "--job", "j",
        "--nproc-per-node", "1", "--store-dir", str(tmp_path), "script.py",
    ]  # fmt: skip
    environment = {**os.environ, "SCALAI_JOB_TOKEN": "ab" * 16}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as coordinator,
    ):
        try:
            wait_until(lambda: b"event=coordinator" in log.read_bytes(), "it listens")
            coordinator.send_signal(signal.SIGTERM)
            assert coordinator.wait(120) == 75
        finally:
            coordinator.kill()
    assert "event=exit code=75 reason='SIGTERM, and no agent is in the job" in log.read_text()
