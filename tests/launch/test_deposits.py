"""An agent that finds no room for its workers' next deposit."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from scalai.core.errors import StoreError
from scalai.core.messages import JsonText
from scalai.core.worker_messages import BeginDeposit, RankDeposited
from scalai.launch import deposits as deposits_module
from scalai.launch.background import Background
from scalai.launch.deposits import Deposits
from scalai.launch.round import DepositUnderWay, Published, Round
from scalai.store.host import HostStore
from support.store_states import two_ranks
from support.wire_words import Told, start

NONE = JsonText.of(None)


class Host:
    """A round whose two workers train, and the loop that its agent would run."""

    def __init__(self, store: HostStore) -> None:
        held = two_ranks()
        self.round = Round(start(local_world_size=2))
        self.round.published = {
            rank: Published(held[rank], held[rank], False, Future()) for rank in held
        }
        self.round.stepped = {0, 1}
        self.failed: list[str] = []
        self.due: list[Callable[[], None]] = []
        background = Background(self, self.due.append)  # type: ignore[arg-type]
        self.deposits = Deposits(store, Told(), background)
        self._background = background

    def fail(self, reason: str) -> None:
        self.failed.append(reason)

    def work(self) -> None:
        """Let what blocks end, and take its result."""
        self._background._threads.shutdown(wait=True)
        self._background._threads = type(self._background._threads)(4)
        for deliver in self.due:
            deliver()
        self.due.clear()


def test_a_round_that_trains_goes_on_without_room_and_takes_it_when_it_is_there(
    store: HostStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reserve, is_full = store.reserve, [True]

    def tried(held: Any) -> Any:
        if is_full:
            raise StoreError("no room.")
        return reserve(held)

    monkeypatch.setattr(store, "reserve", tried)
    monkeypatch.setattr(deposits_module, "AGAIN_S", 1e-9)
    host = Host(store)
    host.deposits.reserve(host.round)
    host.work()
    assert not host.failed and "no room. Until there is room the training goes on" in caplog.text
    is_full.clear()
    host.deposits.retry(host.round)
    host.work()
    assert host.round.reserved is not None and not host.failed


def test_a_deposit_that_is_wanted_and_finds_no_room_fails_the_round(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(held: Any) -> Any:
        raise StoreError("no room.")

    monkeypatch.setattr(store, "reserve", tried)
    host = Host(store)
    host.deposits.reserve(host.round)
    host.work()
    assert not host.failed and host.round.reserve_wait_s == 5.0
    host.deposits.retry(host.round)  # not yet
    assert not host.round.is_reserving
    host.deposits.begin(host.round, Future(), BeginDeposit(0, 1, "snapshot", 7))
    host.work()
    assert host.failed == ["making room for a deposit: no room."]


@pytest.mark.parametrize("is_expelled", [False, True])
def test_what_is_sealed_after_its_round_is_kept_where_the_host_joins_again(
    store: HostStore, monkeypatch: pytest.MonkeyPatch, is_expelled: bool
) -> None:
    """It may have been told of to the coordinator, which may count on it."""
    host, discarded = Host(store), list[object]()
    monkeypatch.setattr(store, "seal", lambda *_, **__: None)
    monkeypatch.setattr(store, "discard", discarded.append)
    monkeypatch.setattr(deposits_module, "manifest_bytes", lambda manifest: b"")
    ended = host.round
    reserved = ended.reserved = store.reserve(ended.held())
    ended.deposit = DepositUnderWay("snapshot", 7)
    part: Any = None
    ended.deposit.parts = {0: part, 1: part}
    host.deposits.seal_if_complete(ended)
    ended.is_expelled = is_expelled
    host.round = None  # type: ignore[assignment]
    host.work()
    assert discarded == ([] if is_expelled else [reserved])


def test_a_deposit_that_cannot_be_sealed_gives_its_room_back(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round fails; without that room no later one would find any."""

    def full(*_: Any, **__: Any) -> Any:
        raise StoreError("no room for the manifest.")

    host = Host(store)
    monkeypatch.setattr(store, "seal", full)
    current = host.round
    reserved = current.reserved = store.reserve(current.held())
    current.deposit = DepositUnderWay("snapshot", 7)
    part: Any = None
    current.deposit.parts = {0: part, 1: part}
    host.deposits.seal_if_complete(current)
    host.work()
    assert host.failed == ["sealing the deposit: no room for the manifest."]
    host.deposits.give_back(current)
    assert not reserved.directory.exists() and not store._is_giving_back()


def test_what_a_worker_says_when_its_deposit_was_sealed_without_it_ends_no_agent(
    store: HostStore,
) -> None:
    """Its last word may wait in a thread while it is found dead."""
    host, answer = Host(store), Future[Any]()
    host.deposits.deposited(host.round, answer, RankDeposited(0, 1, (), "", NONE, NONE, 7, {}))
    assert answer.done() and answer.result() is None
