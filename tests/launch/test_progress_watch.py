"""Which workers an agent shows as ones that make no steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from scalai.launch.agent import progress
from scalai.launch.agent.progress import KNOWN, Progress, ProgressWatch

pytestmark = pytest.mark.fault

STALL_S = 60.0


class Workers:
    """Ranks 2 and 3, whose round and steps the test sets; a clock that it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.now = {2: 41, 3: 41}, 1000.0
        self.is_within = False
        self.round: Any = SimpleNamespace(
            number=1,
            ranks=range(2, 4),
            stepped={2, 3},
            finished=set(),
            lost=set(),
            is_draining=False,
        )
        self.group: Any = SimpleNamespace(
            steps=lambda: dict(self.steps), pids=dict, are_within_steps=lambda: self.is_within
        )
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))
        present: Any = self
        stacks: Any = SimpleNamespace(ask=lambda pids: None, where=((2, "here"),))
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


def test_it_is_shown_whether_they_are_within_a_step_and_where_they_stand(workers: Workers) -> None:
    workers.is_within = True
    workers.shown(1.0)
    stalled = workers.watch.stalled
    assert stalled is not None and stalled.is_within and stalled.where == ((2, "here"),)
    assert stalled.usual_s == 0.0, "no step of the round is known"


def test_what_is_usual_is_known_after_some_steps_of_a_round_and_few_long_ones_change_nothing() -> (
    None
):
    progress, now = Progress(), 0.0
    progress.stalled_s({0: 0}, now)
    for step in range(1, 30):
        now += 400.0 if step in (1, 20) else 2.0 + 0.01 * (step % 3)
        progress.stalled_s({0: step}, now)
        assert (progress.usual_s > 0) == (step >= KNOWN)
    assert 2.0 <= progress.usual_s < 2.2 and progress.longest_s == 400.0
    progress.stalled_s({1: 30}, now)
    assert progress.usual_s == 0.0, "another round has other ranks"


def test_how_far_all_are_is_seen_by_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(monkeypatch)
    assert workers.watch.seen is None
    workers.steps[2] = 42
    workers.shown()
    assert workers.watch.seen == (1, 41)
    workers.round.stepped = set()
    workers.shown()
    assert workers.watch.seen is None, "none has stepped in this round"
    workers.round = None
    workers.shown()
    assert workers.watch.seen is None
