"""Outside of an elastic job a session is inert, and says what is wrong all the same."""

import math
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from scalai.core.errors import UsageError
from scalai.core.messages.worker_messages import RankFinished
from scalai.core.planner.meter import WARM_STEPS, WINDOW_STEPS
from scalai.runtime.agent_folder import AGENT_DIRECTORY
from scalai.runtime.consumption import Consumption
from scalai.runtime.live import Registered
from scalai.runtime.rank_snapshots import Snapshots
from scalai.runtime.session import MadeSteps, Session, _Link
from scalai.runtime.step_passes import PassClock
from support.tiny_job import TinyState


def test_without_an_agent_nothing_is_restored_and_nothing_stops() -> None:
    session = Session(tp=2)
    assert (session.tp, session.facts, session.is_elastic) == (2, {}, False)
    assert not session.attach(TinyState(0, 1, 0), step=3, samples=9)
    assert not session.boundary(samples=3)
    assert (session.step, session.consumed_samples) == (4, 12)


def test_a_checkpoint_of_the_frameworks_own_says_how_far_the_state_is() -> None:
    session = Session()
    session.attach(TinyState(0, 1, 0))
    session.renew(TinyState(0, 1, 0), step=7, samples=21)
    assert (session.step, session.consumed_samples) == (7, 21)


def test_a_process_has_one_state() -> None:
    session = Session()
    session.attach(TinyState(0, 1, 0))
    with pytest.raises(UsageError, match="remove the script's call"):
        session.attach(TinyState(0, 1, 0))


@pytest.mark.fault
def test_where_no_thread_can_begin_the_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread only maps a file ahead of time, the other waits for a failure of others."""

    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    nobody: Any = None
    snapshots = Snapshots(
        nobody, 0, 1, TinyState(0, 1, 0), [], {}, Registered(), Consumption("r-1", {})
    )
    monkeypatch.setenv(AGENT_DIRECTORY, "nowhere")
    monkeypatch.setattr(threading.Thread, "start", full)
    snapshots.map_next()
    snapshots.watch_for_failures()
    assert not snapshots.are_watched
    snapshots.step_ended(1, 3)


def test_the_end_of_a_fork_is_not_that_of_the_training() -> None:
    """It would be told as the rank's, under the numbers of the rank's own connection."""
    session = Session()
    asked: list[object] = []
    agent: Any = type("Agent", (), {"call": lambda self, request: asked.append(request)})()
    page: Any = None  # a session that ends reads no page
    session._link = _Link(agent, page, MadeSteps(lambda *made: None), 1, 0)
    pid = os.fork()
    if not pid:
        session.finish()
        os._exit(len(asked))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    session.finish()
    assert asked == [RankFinished(0, 1, 0)]


def test_who_cannot_be_rescued_ends_by_a_collective_that_failed() -> None:
    """It would hang in it for good."""
    text = "import scalai\nwith scalai.elastic() as job: job.end_by_collective('it has failed')"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, "scalai: it has failed\n")


def test_numbers_that_are_there_are_told_with_their_step() -> None:
    told: list[tuple[int, float, float]] = []
    made = MadeSteps(lambda *step: told.append(step))
    made.note(1, 5.0, torch.tensor(2.0))
    made.note(2, torch.tensor([4.5]), None)
    assert told[0] == (1, 5.0, 2.0)
    assert told[1][:2] == (2, 4.5) and math.isnan(told[1][2])


def test_a_pass_takes_the_time_between_two_begins_by_windows_of_steps() -> None:
    told: list[tuple[int, float]] = []
    clock = PassClock(lambda *window: told.append(window))

    def make_steps(count: int, passes: int) -> None:
        for _ in range(count):
            for number in range(passes):
                clock.begin_pass(number, passes)
                time.sleep(0.002)
            clock.step_ended()

    make_steps(WARM_STEPS + WINDOW_STEPS - 1, 3)
    assert told == []
    make_steps(1 + WINDOW_STEPS, 3)
    assert [number for number, _ in told] == [1, 2]
    assert all(seconds >= 0.002 for _, seconds in told)
    make_steps(3 * WINDOW_STEPS, 1)  # of one pass nothing is known
    assert len(told) == 2
