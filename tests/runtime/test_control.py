"""The control page: a stop is seen by all workers or taken back."""

import ctypes
import errno
import math
import os
import platform
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.errors import StoreError
from scalai.core.job.spacing import MOST_STEPS, Schedule
from scalai.runtime import control
from scalai.runtime.control import MAX_WORKERS, ControlPage


@pytest.fixture
def agent(tmp_path: Path) -> ControlPage:
    page = ControlPage(tmp_path / "control", create=True)
    page.clear()
    return page


@pytest.fixture
def worker(agent: ControlPage, tmp_path: Path) -> ControlPage:
    return ControlPage(tmp_path / "control")


def test_nobody_has_made_a_step_and_there_is_no_stop(
    agent: ControlPage, worker: ControlPage
) -> None:
    assert agent.newest_step(8) == -1
    assert not worker.must_stop(0) and not worker.must_stop(10**9)


def test_the_newest_step_is_that_of_the_furthest_worker_of_the_round(
    agent: ControlPage, worker: ControlPage
) -> None:
    for local_rank, step in enumerate([4, 7, 5, 99]):
        worker.report(local_rank, step)
    assert agent.newest_step(3) == 7
    assert agent.newest_step(0) == -1


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
    agent: ControlPage, worker: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order the writes of the agent become visible in, between two barriers."""
    agent.prepare(5)
    agent.agree(5)
    agent.withdraw()
    seen: list[tuple[int, int]] = []
    cells = agent._cells
    monkeypatch.setattr(control, "order", lambda: seen.append((int(cells[0]), int(cells[1]))))
    agent.prepare(5)
    assert seen == [(0, 0), (5, 0)], "the stop is written once the earlier word is gone for all"


def test_the_last_possible_worker_has_a_cell(agent: ControlPage, worker: ControlPage) -> None:
    worker.report(MAX_WORKERS - 1, 3)
    worker.report_within(MAX_WORKERS - 1, is_within=True)
    assert agent.newest_step(MAX_WORKERS) == 3


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


def test_a_worker_below_the_stop_goes_on(agent: ControlPage, worker: ControlPage) -> None:
    agent.prepare(5)
    assert not worker.must_stop(4)


def test_a_worker_waits_at_a_prepared_stop_and_leaves_at_the_word(
    agent: ControlPage, worker: ControlPage
) -> None:
    agent.prepare(5)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(worker.must_stop(5)), daemon=True)
    waiting.start()
    agent.agree(5)
    waiting.join(30)
    assert answers == [True]


def test_a_stop_that_is_taken_back_lets_the_waiting_worker_go_on(
    agent: ControlPage, worker: ControlPage
) -> None:
    agent.prepare(5)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(worker.must_stop(5)), daemon=True)
    waiting.start()
    agent.withdraw()
    waiting.join(30)
    assert answers == [False]


def test_a_later_stop_takes_the_place_of_an_earlier_one(
    agent: ControlPage, worker: ControlPage
) -> None:
    agent.prepare(5)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(worker.must_stop(5)), daemon=True)
    waiting.start()
    agent.withdraw()
    agent.prepare(7)
    waiting.join(30)
    assert answers == [False], "step 5 is below the new stop"
    agent.agree(7)
    assert worker.must_stop(7)


def test_the_word_of_an_earlier_stop_does_not_hold_for_a_later_one(
    agent: ControlPage, worker: ControlPage
) -> None:
    agent.prepare(5)
    agent.agree(5)
    agent.prepare(9)
    assert not worker.must_stop(8)
    assert not agent.has_reached_stop(0)


def test_who_has_reached_the_stop_is_known(agent: ControlPage, worker: ControlPage) -> None:
    agent.prepare(5)
    worker.report(0, 5)
    assert not agent.has_reached_stop(0), "nobody has agreed on it yet"
    agent.agree(5)
    worker.report(1, 4)
    assert agent.has_reached_stop(0) and not agent.has_reached_stop(1)


def test_a_new_round_knows_nothing_of_the_old_one(agent: ControlPage, worker: ControlPage) -> None:
    agent.prepare(5)
    agent.agree(5)
    worker.report(0, 5)
    agent.clear()
    assert agent.newest_step(1) == -1 and not worker.must_stop(5)


@pytest.mark.fault
def test_a_page_that_there_is_no_room_for_is_refused_and_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
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
