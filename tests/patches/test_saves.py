"""Asynchronous saves around a stand-in for Megatron's queue of them. Imports no megatron."""

import json
import sys
from argparse import Namespace
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from scalai.patches.megatron import saves
from scalai.patches.megatron.saves import (
    JOURNAL,
    LAST_WRITTEN,
    QUEUE,
    TRACKER,
    AsyncSaves,
    SavedPlaces,
)


class FakeProcess:
    """What writes, by what is asked of it."""

    def __init__(self) -> None:
        self.exitcode: int | None = None

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self.exitcode = -9


class FakeQueue:
    """Megatron's queue: the oldest call ends when ``done`` says so."""

    def __init__(self) -> None:
        self.call_idx, self.done = -1, 0
        self.written: deque[int] = deque()
        self.persistent_caller = SimpleNamespace(
            process=FakeProcess(), cur_item=None, comp_q=SimpleNamespace(empty=self._is_empty)
        )
        self.async_calls: deque[Any] = deque()

    def _is_empty(self) -> bool:
        return not self.written

    def get_num_unfinalized_calls(self) -> int:
        return len(self.async_calls)

    def schedule(self) -> None:
        self.call_idx += 1
        self.async_calls.append(
            SimpleNamespace(idx=self.call_idx, async_caller=self.persistent_caller)
        )

    def look(self) -> None:
        while self.async_calls and self.done:
            self.done -= 1
            self.async_calls.popleft()


class FakeTraining:
    """Names of megatron/training/training.py that are hooked."""

    def __init__(self, queue: FakeQueue) -> None:
        self.queue = queue
        self.looks: list[bool] = []
        self.saved: list[int] = []
        self.calls_per_save = 1

    def get_args(self) -> Namespace:
        return Namespace(rank=0, save=None)

    def maybe_finalize_async_save(self, blocking: bool = False, terminate: bool = False) -> None:
        self.looks.append(blocking)
        assert not (blocking and self.queue.async_calls), "Megatron would wait without an end"
        self.queue.look()

    def save_checkpoint(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        self.saved.append(iteration)
        for _ in range(self.calls_per_save):
            self.queue.schedule()


class FakeSession:
    def __init__(self) -> None:
        self.stop_urgency = 0
        self.noted: list[int | None] = []

    def note_save(self, iteration: int | None) -> None:
        self.noted.append(iteration)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    module: Any = ModuleType(QUEUE)
    module._async_calls_queue = FakeQueue()
    monkeypatch.setitem(sys.modules, QUEUE, module)
    monkeypatch.setattr(saves, "LOOK_S", 0.0)
    monkeypatch.setattr("atexit.register", lambda call: None)
    # One rank: what all ranks tell is what it tells.
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(torch.distributed, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    found: FakeQueue = module._async_calls_queue
    return found


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def training(queue: FakeQueue, session: FakeSession) -> FakeTraining:
    framework = FakeTraining(queue)
    framework.hooks = AsyncSaves()  # type: ignore[attr-defined]
    framework.hooks.hook(framework)  # type: ignore[attr-defined]
    framework.hooks.begin(session)  # type: ignore[attr-defined]
    return framework


def boundary(training: Any) -> None:
    training.hooks.at_boundary(training.maybe_finalize_async_save)


def test_a_save_is_in_flight_until_all_ranks_have_finished_it(
    training: FakeTraining, queue: FakeQueue, session: FakeSession
) -> None:
    training.save_checkpoint(8)
    assert session.noted[-1] == 8
    training.maybe_finalize_async_save(blocking=False)
    boundary(training)
    assert session.noted[-1] == 8
    queue.done = 1
    training.maybe_finalize_async_save(blocking=False)
    assert session.noted[-1] is None


def test_of_several_saves_the_oldest_is_named_and_a_save_may_have_several_calls(
    training: FakeTraining, queue: FakeQueue, session: FakeSession
) -> None:
    training.calls_per_save = 2
    training.save_checkpoint(8)
    training.save_checkpoint(16)
    queue.done = 1
    training.maybe_finalize_async_save()
    assert session.noted[-1] == 8
    queue.done = 1
    training.maybe_finalize_async_save()
    assert session.noted[-1] == 16


@pytest.mark.fault
def test_the_training_waits_for_saves_that_overlap_only_where_a_change_does(
    training: FakeTraining, queue: FakeQueue, session: FakeSession
) -> None:
    training.save_checkpoint(8)
    session.stop_urgency = 1
    boundary(training)
    assert not training.looks, "one save ends by itself, and the training goes on"
    training.save_checkpoint(16)
    session.stop_urgency = 0
    boundary(training)
    assert not training.looks
    session.stop_urgency, queue.done = 1, 2
    boundary(training)
    assert session.noted[-1] is None and not queue.async_calls


def test_where_every_step_saves_a_stop_that_was_put_off_is_come_to(
    training: FakeTraining, queue: FakeQueue, session: FakeSession
) -> None:
    session.stop_urgency, queue.done = 2, 1
    training.save_checkpoint(8)
    boundary(training)
    assert session.noted[-1] is None and not queue.async_calls


def test_the_same_iteration_in_flight_is_not_written_by_two(
    training: FakeTraining, queue: FakeQueue
) -> None:
    """A growing batch saves before the step, and the step before has saved already."""
    training.save_checkpoint(8)
    training.save_checkpoint(8)
    assert training.saved == [8] and len(queue.async_calls) == 1


@pytest.mark.fault
@pytest.mark.parametrize("blocking", [False, True])
def test_a_dead_writer_ends_the_worker_instead_of_being_waited_for(
    training: FakeTraining, queue: FakeQueue, blocking: bool
) -> None:
    training.save_checkpoint(8)
    queue.persistent_caller.process.kill()
    with pytest.raises(RuntimeError, match=r"write the save of iteration 8 has ended .*-9"):
        training.maybe_finalize_async_save(blocking=blocking)
    queue.async_calls.clear()
    with pytest.raises(RuntimeError, match="has ended"):
        training.save_checkpoint(16)
    assert training.saved == [8]


def test_what_a_writer_had_written_before_it_died_is_finished(
    training: FakeTraining, queue: FakeQueue, session: FakeSession
) -> None:
    training.save_checkpoint(8)
    queue.written.append(0)
    queue.persistent_caller.process.kill()
    queue.done = 1
    training.maybe_finalize_async_save(blocking=True, terminate=True)
    assert not queue.async_calls


def test_who_leaves_leaves_no_writer(training: Any, queue: FakeQueue) -> None:
    process = queue.persistent_caller.process
    training.hooks.leave()
    assert not process.is_alive() and queue.persistent_caller.process is None


# ---------------------------------------------------------------- what lies in the place of a save


def make(root: Path, iteration: int, *, is_whole: bool) -> Path:
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", "__3_0.distcp", "common.pt", *(LAST_WRITTEN if is_whole else ())):
        (folder / name).write_text("x")
    return folder


def job(root: Path) -> Namespace:
    return Namespace(rank=0, save=str(root), ckpt_format="torch_dist")


@pytest.fixture
def places(queue: FakeQueue) -> SavedPlaces:
    return SavedPlaces()


def test_a_new_place_is_recorded_and_left_alone(places: SavedPlaces, tmp_path: Path) -> None:
    assert not places.is_done(job(tmp_path / "new"), 8)
    noted = json.loads((tmp_path / "new" / JOURNAL).read_text())
    assert noted == {"run": places.run, "iterations": [8]}


@pytest.mark.fault
def test_what_this_training_has_saved_wholly_is_not_written_again(
    places: SavedPlaces, tmp_path: Path
) -> None:
    assert not places.is_done(job(tmp_path), 8)
    folder = make(tmp_path, 8, is_whole=True)
    (tmp_path / TRACKER).write_text("8")
    again = SavedPlaces()
    again.run = places.run  # of a later round
    assert again.is_done(job(tmp_path), 8)
    assert len(list(folder.iterdir())) == 5


@pytest.mark.fault
def test_what_another_training_has_left_is_never_named_while_it_is_written_over(
    places: SavedPlaces, tmp_path: Path
) -> None:
    older, folder = make(tmp_path, 4, is_whole=True), make(tmp_path, 8, is_whole=True)
    make(tmp_path, 6, is_whole=False)
    (tmp_path / TRACKER).write_text("8")
    assert not places.is_done(job(tmp_path), 8)
    assert (tmp_path / TRACKER).read_text() == "4"
    assert not list(folder.iterdir()) and len(list(older.iterdir())) == 5
    (tmp_path / TRACKER).write_text("4")
    assert not places.is_done(job(tmp_path), 4)
    assert not (tmp_path / TRACKER).exists(), "no other is whole"


@pytest.mark.fault
def test_what_a_kill_has_left_goes_before_it_is_saved_again(
    places: SavedPlaces, tmp_path: Path
) -> None:
    """Of another layout, there may be files that nobody writes over."""
    assert not places.is_done(job(tmp_path), 8)
    folder = make(tmp_path, 8, is_whole=False)
    (folder / "notes.txt").write_text("a person's own")
    (tmp_path / TRACKER).write_text("4")
    assert not places.is_done(job(tmp_path), 8)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (tmp_path / TRACKER).read_text() == "4"


@pytest.mark.parametrize(
    "other", [{"save": None}, {"ckpt_format": "torch"}, {"save": "msc://bucket/job"}]
)
def test_other_places_are_not_looked_at(
    places: SavedPlaces, tmp_path: Path, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not places.is_done(Namespace(**{**vars(job(tmp_path)), **other}), 8)
    assert not list(tmp_path.iterdir())
