"""A vote among agents that listen: what a majority says counts, and who is not heard is named."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.core.electorate import Electorate, Witness
from scalai.core.errors import PeerError
from scalai.core.witness import Known
from scalai.launch.agent.data_plane import DataPlaneServer
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job import JobSpec
from scalai.launch.coordinator import elected, leases, succession
from scalai.launch.coordinator.calls import Moved
from scalai.launch.coordinator.desk import Desk
from scalai.launch.coordinator.discovery import Place
from scalai.launch.coordinator.elected import NOBODY, find_elected
from scalai.launch.coordinator.leases import Entry, Lease
from scalai.launch.coordinator.losses import Patience
from scalai.launch.coordinator.succession import OverError, Succession
from scalai.launch.coordinator.vote_file import (
    ELECTORATE,
    forget_electorate,
    keep_electorate,
    kept_electorate,
)
from scalai.launch.coordinator.votes import VoteRegister
from scalai.runtime.calls import Server
from scalai.store.host import HostStore
from support.ports import free_port

TOKEN = b"a token of the job"


class Witnesses:
    """Agents, as far as they are witnesses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stores: dict[str, HostStore] = {}
        self.servers: dict[str, DataPlaneServer] = {}

    def start(self, name: str, port: int = 0) -> Witness:
        """Start one, again where it was: with nothing that it had granted."""
        if name not in self._stores:
            self._stores[name] = HostStore("j", name, self._folder)
        server = DataPlaneServer(self._stores[name], TOKEN, port=port)
        self.servers[name] = server
        return Witness(name, server.address, server.votes.name)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        for store in self._stores.values():
            store.close()


@pytest.fixture
def witnesses(tmp_path: Path) -> Iterator[Witnesses]:
    found = Witnesses(tmp_path)
    yield found
    found.close()


def started(witnesses: Witnesses, names: str = "abc") -> Electorate:
    return Electorate(tuple(witnesses.start(name) for name in names))


def entry(term: int, port: int = 1) -> Entry:
    return Entry(term, "127.0.0.1", port)


def test_one_of_many_has_a_term(witnesses: Witnesses) -> None:
    known, has_it = Known(started(witnesses)), list[int]()

    def claim(number: int) -> None:
        if VoteRegister(known, TOKEN).claim(entry(1, number)):
            has_it.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(has_it) <= 1, "the votes may be split"
    register = VoteRegister(known, TOKEN)
    register.newest()
    assert register.claim(entry(register.known.term + 1, 99))
    newest = VoteRegister(known, TOKEN).newest()
    assert newest is not None and newest.port == 99


def test_a_majority_is_enough_and_without_one_those_that_are_not_heard_are_named(
    witnesses: Witnesses,
) -> None:
    known = Known(started(witnesses))
    holder, watcher = VoteRegister(known, TOKEN), VoteRegister(known, TOKEN)
    assert holder.claim(entry(1))
    witnesses.servers["a"].close()
    holder.renew(entry(1))
    newest = watcher.newest()
    assert newest is not None and newest.beat == 1
    witnesses.servers["b"].close()
    with pytest.raises(PeerError, match=r"no majority of the 3 witnesses.*: a at .*, b at"):
        holder.renew(entry(1))
    with pytest.raises(PeerError, match="says who is the coordinator"):
        watcher.newest()
    assert watcher.is_lost(), "nobody listens where two of three were"


def test_a_witness_that_still_answers_the_last_question_is_waited_for(
    witnesses: Witnesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three were enough for it; then one of these two is gone."""
    known, may_answer = Known(started(witnesses)), threading.Event()
    desk = witnesses.servers["c"].votes
    answer = desk.answer

    def slowly(request: Any) -> Any:
        may_answer.wait(60.0)
        return answer(request)

    monkeypatch.setattr(desk, "answer", slowly)
    holder = VoteRegister(known, TOKEN)
    assert holder.claim(entry(1))
    witnesses.servers["a"].close()
    threading.Timer(0.5, may_answer.set).start()
    holder.renew(entry(1))


def test_a_witness_that_never_answers_is_outvoted(witnesses: Witnesses) -> None:
    """As one that is stopped, or whose packets are swallowed."""
    electorate = started(witnesses, "ab")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = int(silent.getsockname()[1])
        stopped = Witness("c", ("127.0.0.1", port), "its memory")
        known = Known(Electorate((*electorate.witnesses, stopped)))
        holder = VoteRegister(known, TOKEN)
        assert holder.claim(entry(1))
        holder.renew(entry(1))
        witnesses.servers["b"].close()
        with pytest.raises(PeerError, match=r"b at .*, c at"):
            holder.renew(entry(1))
        assert not holder.is_lost(), "who is silent may live"


def test_a_witness_that_was_started_again_counts_once_it_is_taken_in_anew(
    witnesses: Witnesses,
) -> None:
    electorate = started(witnesses)
    next_one: list[tuple[Witness, ...]] = [electorate.witnesses]
    agreed: list[Electorate] = []
    holder = VoteRegister(
        Known(electorate), TOKEN, wanted=lambda now, unfit: next_one[0], agreed=agreed.append
    )
    assert holder.claim(entry(1))
    witnesses.servers["c"].close()
    again = witnesses.start("c", electorate.witnesses[2].address[1])
    witnesses.servers["b"].close()
    with pytest.raises(PeerError, match="no majority"):
        holder.renew(entry(1))  # c listens there, and has forgotten that it was asked
    back = witnesses.start("b", electorate.witnesses[1].address[1])
    with pytest.raises(PeerError, match="no majority"):
        holder.renew(entry(1))
    assert holder.is_lost()
    assert {again.memory, back.memory}.isdisjoint({w.memory for w in electorate.witnesses})


def test_an_electorate_changes_while_it_is_renewed_and_who_looks_by_the_one_before_learns_it(
    witnesses: Witnesses,
) -> None:
    electorate = started(witnesses)
    after = (*electorate.witnesses[1:], witnesses.start("d"))
    agreed: list[Electorate] = []
    holder = VoteRegister(
        Known(electorate), TOKEN, wanted=lambda now, unfit: after, agreed=agreed.append
    )
    assert holder.claim(entry(1))
    holder.renew(entry(1))
    assert holder.is_changing
    holder.renew(entry(1))
    assert agreed[-1] == Electorate(after)
    witnesses.servers["a"].close()
    watcher = VoteRegister(Known(electorate), TOKEN)
    watcher.newest()
    assert watcher.known.electorate == Electorate(after)


def test_a_broken_connection_costs_no_vote(witnesses: Witnesses) -> None:
    electorate = started(witnesses)
    holder = VoteRegister(Known(electorate), TOKEN)
    assert holder.claim(entry(1))
    for name, witness in zip("abc", electorate.witnesses, strict=True):
        votes = witnesses.servers[name].votes
        witnesses.servers[name].close()  # with its connections
        witnesses.start(name, witness.address[1])
        witnesses.servers[name].votes = votes
    holder.renew(entry(1))


def test_whoever_claims_without_having_seen_the_newest_record_is_refused(
    witnesses: Witnesses,
) -> None:
    known = Known(started(witnesses))
    holder = VoteRegister(known, TOKEN)
    assert holder.claim(entry(1))
    late = VoteRegister(known, TOKEN)
    late.newest()
    holder.renew(entry(1))
    assert not late.claim(entry(2))
    holder.renew(entry(1))


def test_a_lease_of_a_vote_is_held_and_left_when_the_job_is_over(witnesses: Witnesses) -> None:
    known = Known(started(witnesses))
    lease = Lease(VoteRegister(known, TOKEN), entry(1))
    assert lease.is_held()
    lease.end(is_over=True)
    newest = VoteRegister(known, TOKEN).newest()
    assert newest is not None and newest.is_over


def test_where_there_is_no_vote_a_coordinator_that_stood_still_stays_one(
    witnesses: Witnesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "HELD_S", 0.0)
    alone = Lease(VoteRegister(NOBODY, TOKEN), entry(1))
    assert alone.is_held()
    elected_one = Lease(VoteRegister(Known(started(witnesses)), TOKEN), entry(1))
    assert not elected_one.is_held()
    for lease in (alone, elected_one):
        lease.end(is_over=False)


# ------------------------------------------------------------------ who looks for a successor


def spec_of(folder: Path, *flags: str) -> JobSpec:
    given = ["--job", "j", "--nproc-per-node", "1", "--store-dir", str(folder), *flags]
    return JobSpec.read(parse_options([*given, "script.py"]))


def test_who_was_elected_is_followed_also_by_agents_that_are_no_witnesses(
    witnesses: Witnesses, tmp_path: Path
) -> None:
    known = Known(started(witnesses))
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    place = Place(("192.0.2.1", 29400), TOKEN)
    try:
        assert VoteRegister(known, TOKEN).claim(entry(7, int(server.address[1])))
        for memory in ("none of them", known.electorate.witnesses[0].memory):
            found = Succession(spec_of(tmp_path), "127.0.0.1", memory)
            found.learn(known, TOKEN)
            assert found.has_lease
            assert found.find(place, 6, threading.Event()).address == server.address
    finally:
        server.close()


def test_where_the_witnesses_know_that_the_job_is_over_nobody_follows(
    witnesses: Witnesses, tmp_path: Path
) -> None:
    known = Known(started(witnesses))
    assert VoteRegister(known, TOKEN).claim(replace(entry(7), is_over=True))
    found = Succession(spec_of(tmp_path), "127.0.0.1", known.electorate.witnesses[0].memory)
    found.learn(known, TOKEN)
    with pytest.raises(OverError, match="the job is over"):
        found.find(Place(("192.0.2.1", 29400), TOKEN), 6, threading.Event())


def test_a_host_that_leaves_leaves_it_to_others_to_have_the_next_coordinator(
    witnesses: Witnesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go with that host."""
    for name, seconds in (("LEASE_S", 0.2), ("JITTER_S", 0.0), ("WITNESS_LOOK_S", 0.05)):
        monkeypatch.setattr(succession, name, seconds)
    monkeypatch.setattr(succession, "LEAVING_TURN_S", 3.0)
    known = Known(started(witnesses))
    assert VoteRegister(known, TOKEN).claim(Entry(1, "192.0.2.1", 29400))
    server = Server(("127.0.0.1", 0), TOKEN, object, lambda peer, request: None)
    begun: list[str] = []

    def start_coordinator(spec: JobSpec, folder: Path, *given: Any, **known: Any) -> Place:
        begun.append(folder.parent.name)
        host, port = str(server.address[0]), int(server.address[1])
        assert VoteRegister(known["known"], TOKEN).claim(Entry(2, host, port))
        return Place((host, port), TOKEN)

    monkeypatch.setattr(succession, "start_coordinator", start_coordinator)

    def find(name: str) -> Place:
        memory = witnesses.servers[name].votes.name
        is_leaving = name == "a"
        one = Succession(spec_of(tmp_path / name), "127.0.0.1", memory, lambda: is_leaving)
        one.learn(known, TOKEN)
        return one.find(Place(("192.0.2.1", 29400), TOKEN), 1, threading.Event())

    try:
        with ThreadPoolExecutor() as both:
            found = [both.submit(find, name) for name in "ab"]
            assert {each.result(30.0).address for each in found} == {server.address}
        assert begun == ["b"], "though a comes first in the order of the witnesses"
    finally:
        server.close()


def test_nobody_votes_where_a_person_says_so(witnesses: Witnesses, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "--coordinator-lease", "none")
    found = Succession(spec, "127.0.0.1")
    found.learn(Known(started(witnesses)), TOKEN)
    assert not spec.may_vote and not found.has_lease
    assert spec_of(tmp_path, "--coordinator-lease", "vote").may_vote and spec_of(tmp_path).may_vote
    assert not spec_of(tmp_path, "--standalone").may_vote


def test_a_host_that_was_cut_off_begins_nothing_while_no_majority_can_be_asked(
    witnesses: Witnesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elected, "SEARCH_S", 0.5)
    (only,) = started(witnesses, "a").witnesses
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = int(silent.getsockname()[1])
        others = (Witness(name, ("127.0.0.1", port), name) for name in "bc")
        known = Known(Electorate((only, *others)))
        with pytest.raises(PeerError, match="--coordinator-lease none"):
            find_elected(known, TOKEN, "the note", lambda host: False)


def test_a_job_whose_agents_have_all_ended_begins_again(witnesses: Witnesses) -> None:
    known = Known(started(witnesses))
    witnesses.close()
    assert find_elected(known, TOKEN, "the note", lambda host: False) == (None, NOBODY)


def test_who_has_begun_without_a_vote_gives_way_to_who_was_elected_with_the_same_term(
    tmp_path: Path,
) -> None:
    """The agents that its machine had noted were started again meanwhile, and were not asked."""
    stores: Any = None
    desk = Desk(spec_of(tmp_path), "127.0.0.1", stores, print, Patience(), 2)
    peer: Any = None
    desk.handle(peer, Moved("j", 1, "elsewhere", 6))
    assert desk.moved is None
    desk.handle(peer, Moved("j", 2, "elsewhere", 6))
    assert desk.moved is not None


def test_who_cannot_reach_a_coordinator_that_others_have_says_so_within_the_time(
    witnesses: Witnesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is renewed all the time, and this host is cut off from it, not from its witnesses."""
    monkeypatch.setattr(elected, "SEARCH_S", 0.5)
    monkeypatch.setattr(elected, "LOOK_S", 0.05)
    known, is_over = Known(started(witnesses)), threading.Event()
    holder = VoteRegister(known, TOKEN)
    absent = entry(7, free_port("127.0.0.1"))
    assert holder.claim(absent)

    def renew() -> None:
        beat = 0
        while not is_over.wait(0.1):
            beat += 1
            holder.renew(replace(absent, beat=beat))

    found: list[object] = []

    def find() -> None:
        try:
            found.append(find_elected(known, TOKEN, "the note", lambda host: False))
        except PeerError as error:
            found.append(error)

    threads = [threading.Thread(target=work, daemon=True) for work in (renew, find)]
    for thread in threads:
        thread.start()
    threads[1].join(10.0)
    is_over.set()
    threads[0].join(10.0)
    assert found and "does not answer here" in str(found[0])


def test_whom_to_ask_is_kept_for_the_next_coordinator_of_a_machine(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir(0o700)
    assert kept_electorate(folder) is None
    electorate = Electorate((Witness("a", ("h", 1), "m"),))
    keep_electorate(folder, electorate)
    assert kept_electorate(folder) == Known(electorate)
    (folder / ELECTORATE).write_text("{torn")
    assert kept_electorate(folder) is None
    forget_electorate(folder)
    forget_electorate(folder)
