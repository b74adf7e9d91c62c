"""Which workers an agent shows as ones that make no steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from scalai.launch.agent import progress
from scalai.launch.agent.progress import ProgressWatch

STALL_S = 60.0


class Workers:
    """Ranks 2 and 3, whose round and steps the test sets; a clock that it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.now = {2: 41, 3: 41}, 1000.0
        self.round: Any = SimpleNamespace(
            ranks=range(2, 4), stepped={2, 3}, finished=set(), lost=set(), is_draining=False
        )
        self.group: Any = SimpleNamespace(steps=lambda: dict(self.steps), pids=dict)
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))
        present: Any = self
        stacks: Any = SimpleNamespace(ask=lambda pids: None)
        self.watch = ProgressWatch("a", present, stacks, STALL_S)

    def shown(self, wait_s: float = 0.0) -> tuple[list[int], int] | None:
        self.now += wait_s
        self.watch.watch()
        stalled = self.watch.stalled
        return None if stalled is None else (list(stalled.ranks), stalled.step)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    workers = Workers(monkeypatch)
    assert workers.shown() is None
    assert workers.shown(STALL_S + 1) == ([2, 3], 41)
    return workers


@pytest.mark.parametrize("is_draining", [False, True])
def test_who_goes_on_is_shown_no_longer(workers: Workers, *, is_draining: bool) -> None:
    """On the way to a stop, too: who stands at it does not stand still."""
    workers.round.is_draining = is_draining
    assert workers.shown(1.0) == ([2, 3], 41)
    workers.steps[3] = 42
    assert workers.shown(1.0) == ([2], 41)
    workers.steps[2] = 42
    assert workers.shown(1.0) is None


@pytest.mark.parametrize("is_draining", [False, True])
def test_who_is_gone_is_shown_no_longer(workers: Workers, *, is_draining: bool) -> None:
    workers.round.is_draining = is_draining
    workers.round.lost = {3}
    assert workers.shown(1.0) == ([2], 41)
    workers.round = None
    assert workers.shown(1.0) is None
