"""The control page: a stop is seen by all workers or taken back."""

import ctypes
import math
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.errors import StoreError
from scalai.core.job.spacing import MOST_STEPS, Schedule
from scalai.runtime import control
from scalai.runtime.control import MAX_WORKERS, ControlPage
from support.steps import Beside
from support.store_states import full_disk


@pytest.fixture
def agent(tmp_path: Path) -> ControlPage:
    page = ControlPage(tmp_path / "control", create=True)
    page.clear()
    return page


@pytest.fixture
def worker(agent: ControlPage, tmp_path: Path) -> ControlPage:
    return ControlPage(tmp_path / "control")


def test_the_newest_step_is_that_of_the_furthest_worker_of_the_round(
    agent: ControlPage, worker: ControlPage
) -> None:
    assert agent.newest_step(MAX_WORKERS) == -1
    assert not worker.must_stop(0) and not worker.must_stop(10**9)
    for local_rank, step in enumerate([4, 7, 5, 99]):
        worker.report(local_rank, step)
    assert agent.newest_step(3) == 7 and agent.newest_step(0) == -1
    worker.report(MAX_WORKERS - 1, 101)  # the last possible one has a cell
    worker.report_within(MAX_WORKERS - 1, is_within=True)
    assert agent.newest_step(MAX_WORKERS) == 101
    agent.prepare(5)
    agent.agree(5)
    agent.clear()  # a new round knows nothing of the old one
    assert agent.newest_step(MAX_WORKERS) == -1 and not worker.must_stop(5)


def test_the_pace_of_a_host_is_that_of_its_slowest_worker_once_all_know_theirs(
    agent: ControlPage, worker: ControlPage
) -> None:
    last = MAX_WORKERS - 1
    for local_rank in range(last):
        worker.report_pace(local_rank, 7, 0.25)
    assert agent.pace(MAX_WORKERS) is None
    worker.report_pace(last, 6, 1e9)  # longer than its cell can say
    window, seconds = agent.pace(MAX_WORKERS) or (0, 0.0)
    assert window == 6 and 1e6 < seconds < 1e9
    worker.report_pace(last, 8, 0.0)
    assert agent.pace(MAX_WORKERS) == (7, 0.25)
    agent.clear()
    assert agent.pace(MAX_WORKERS) is None


@pytest.mark.parametrize("has_kernels", [True, False], ids=["by the kernel", "by waiting"])
def test_what_the_agent_reads_is_ordered_behind_what_it_has_written(
    agent: ControlPage, worker: ControlPage, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every processor: by a barrier on all of them, else by waiting until writes are visible."""
    waited: list[float] = []
    monkeypatch.setattr("scalai.runtime.control.time.sleep", waited.append)
    if not has_kernels:
        monkeypatch.setattr(control, "MEMBARRIER", {})
    elif ctypes.CDLL(None).syscall(control.MEMBARRIER.get(platform.machine(), -1), 0, 0, 0) < 1:
        pytest.skip("this kernel has no barrier for all threads")  # it refuses (-1), or knows none
    agent.prepare(5)
    agent.space(Schedule(4, 2))
    assert waited == ([] if has_kernels else [control.VISIBLE_S] * 2)


def test_the_word_of_an_earlier_stop_is_none_of_the_next_one(
    agent: ControlPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order the writes of the agent become visible in, between two barriers."""
    agent.prepare(5)
    agent.agree(5)
    agent.withdraw()
    seen: list[tuple[int, int]] = []

    def look() -> None:
        stop, agreed = np.fromfile(tmp_path / "control", np.int64, count=2).tolist()
        seen.append((stop, agreed))

    monkeypatch.setattr(control, "order", look)
    agent.prepare(5)
    assert seen == [(0, 0), (5, 0)], "the stop is written once the earlier word is gone for all"


@settings(max_examples=30)
@given(st.integers(0, 1 << 42), st.integers(0, MOST_STEPS))
def test_the_steps_with_snapshots_are_read_as_they_were_written(begin: int, every: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = ControlPage(Path(folder) / "control", create=True)
        page.clear()
        assert page.spaced() is None, "it is as the workers were told at first"
        page.space(Schedule(every, begin))
        found = ControlPage(Path(folder) / "control").spaced()
        assert found == (Schedule(every, begin) if begin or every else None)


@pytest.mark.fault
def test_workers_are_within_steps_where_each_of_them_says_so(
    agent: ControlPage, worker: ControlPage
) -> None:
    assert not agent.are_within_steps(2), "who says nothing may be anywhere"
    for local_rank in range(2):
        assert not agent.are_within_steps(2)
        worker.report_within(local_rank, is_within=True)
    assert agent.are_within_steps(2) and agent.newest_step(2) == -1
    with worker.between_steps(0):
        assert not agent.are_within_steps(2), "a wait within a step is no part of it"
    assert agent.are_within_steps(2)
    worker.report_within(0, is_within=False)
    with worker.between_steps(0):
        pass
    assert not agent.are_within_steps(2)


@pytest.mark.parametrize(
    ("then", "leaves"),
    [
        (lambda page: page.agree(5), True),
        (lambda page: page.withdraw(), False),
        (lambda page: (page.withdraw(), page.prepare(7)), False),
    ],
    ids=["agreed", "taken back", "later"],
)
def test_a_worker_waits_at_a_prepared_stop_and_leaves_at_the_word(
    agent: ControlPage, worker: ControlPage, then: Callable[[ControlPage], object], leaves: bool
) -> None:
    agent.prepare(5)
    waiting = Beside(lambda: worker.must_stop(5))
    then(agent)
    assert waiting.end().result == [leaves]


def test_a_stop_counts_once_it_is_agreed_and_for_who_has_reached_it(
    agent: ControlPage, worker: ControlPage
) -> None:
    agent.prepare(5)
    assert not worker.must_stop(4)
    worker.report(0, 5)
    assert not agent.has_reached_stop(0), "nobody has agreed on it yet"
    agent.agree(5)
    worker.report(1, 4)
    assert agent.has_reached_stop(0) and not agent.has_reached_stop(1)
    agent.prepare(9)
    assert not worker.must_stop(8) and not agent.has_reached_stop(0), "of an earlier stop"
    agent.agree(9)
    assert worker.must_stop(9)


@pytest.mark.fault
def test_a_page_that_there_is_no_room_for_is_refused_and_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    with pytest.raises(StoreError, match="control-1 needs 8192 bytes, but No space left"):
        ControlPage(tmp_path / "control-1", create=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.fault
def test_a_page_replaces_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "control").symlink_to(tmp_path / "precious")
    ControlPage(tmp_path / "control", create=True).clear()
    assert (tmp_path / "precious").read_text() == "precious"


def test_what_the_newest_steps_have_computed_is_read_once_and_the_table_has_an_end(
    agent: ControlPage, worker: ControlPage
) -> None:
    for step in range(1, 101):
        worker.report_made(step, 5.0 / step, math.nan if step == 100 else 2.0)
    assert [made[0] for made in agent.made(0)] == list(range(37, 101))
    ((step, loss, norm),) = agent.made(99)
    assert (step, loss) == (100, 0.05) and math.isnan(norm)
    assert agent.made(100) == [] and agent.newest_step(MAX_WORKERS) == -1
