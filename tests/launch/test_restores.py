"""The agent's part in a restore."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.errors import ProofError
from scalai.core.reports import Moved, Report
from scalai.launch import restores
from scalai.launch.restores import Restores
from support.wire_words import start


def test_bytes_that_come_are_told_of_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they do, the coordinator does not take the start for one that hangs."""
    told: list[Report] = []
    fetching: list[Callable[[int], None]] = []
    monkeypatch.setattr(restores, "prepare_restore", lambda *args: fetching.append(args[-1]))
    monkeypatch.setattr(restores, "TELL_EVERY_S", 0.0)
    background: Any = SimpleNamespace(run=lambda work, *rest: work())
    store: Any = SimpleNamespace()
    made = Restores(store, b"token", told.append, background)
    current: Any = SimpleNamespace(number=7, published={}, command=start(7))
    made._prepare(current)
    made.watch(current)
    assert not told, "nothing has come"
    threads = [threading.Thread(target=fetching[0], args=(1 << 20,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    made.watch(None)
    for _ in range(3):
        made.watch(current)
    assert told == [Moved(7, 8 << 20)]
    fetching[0](1)
    made._prepared(SimpleNamespace(number=6), ProofError("of an earlier round"))  # type: ignore[arg-type]
    made.watch(current)
    assert told[-1] == Moved(7, (8 << 20) + 1)


def test_no_bytes_are_told_of_behind_what_was_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a start hangs, the last that was told says where it stands."""
    told: list[Report] = []
    restore = SimpleNamespace(
        plan_s=0.0, move_s=0.0, bytes_local=0, bytes_remote=1, grown=None, sources={}
    )

    def fetch(*given: Any) -> Any:
        given[-1](1 << 20)
        return restore

    monkeypatch.setattr(restores, "prepare_restore", fetch)
    background: Any = SimpleNamespace(run=lambda work, then, *rest: then(work()))
    made = Restores(SimpleNamespace(), b"", told.append, background)  # type: ignore[arg-type]
    current: Any = SimpleNamespace(number=7, published={}, command=start(7), seconds={})
    made._prepare(current)
    made.watch(current)
    assert not told
