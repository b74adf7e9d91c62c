"""Asynchronous saves around a stand-in for Megatron's queue of them; and what a rank starts for
them ends with it, however the rank ends: the real processes of megatron-core's persistent caller
and of its queue of results."""

import json
import os
import signal
import subprocess
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
from support.waiting import wait_until


class FakeProcess:
    """What writes, by what is asked of it."""

    exitcode: int | None = None

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self.exitcode = -9


class FakeQueue:
    """Megatron's queue: the oldest call ends when ``done`` says so."""

    def __init__(self) -> None:
        self.call_idx, self.done = -1, 0
        self.written: deque[int] = deque()
        answers = SimpleNamespace(empty=lambda: not self.written)
        self.persistent_caller = SimpleNamespace(
            process=FakeProcess(), cur_item=None, comp_q=answers
        )
        self.async_calls: deque[Any] = deque()

    def get_num_unfinalized_calls(self) -> int:
        return len(self.async_calls)


class FakeTraining:
    """Names of megatron/training/training.py that are hooked, and a job with them."""

    calls_per_save = 1

    def __init__(self, queue: FakeQueue) -> None:
        self.queue, self.hooks = queue, AsyncSaves()
        self.looks: list[bool] = []
        self.saved: list[int] = []
        self.noted: list[int | None] = []
        session: Any = SimpleNamespace(stop_urgency=0, note_save=self.noted.append)
        self.session = session
        self.hooks.hook(self)
        self.hooks.begin(session)

    def get_args(self) -> Namespace:
        return Namespace(rank=0, save=None)

    def maybe_finalize_async_save(self, blocking: bool = False, terminate: bool = False) -> None:
        self.looks.append(blocking)
        assert not (blocking and self.queue.async_calls), "Megatron would wait without an end"
        while self.queue.async_calls and self.queue.done:
            self.queue.done -= 1
            self.queue.async_calls.popleft()

    def save_checkpoint(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        self.saved.append(iteration)
        for _ in range(self.calls_per_save):
            self.queue.call_idx += 1
            call = {"idx": self.queue.call_idx, "async_caller": self.queue.persistent_caller}
            self.queue.async_calls.append(SimpleNamespace(**call))

    def boundary(self) -> None:
        self.hooks.at_boundary(self.maybe_finalize_async_save)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    module: Any = ModuleType(QUEUE)
    found = module._async_calls_queue = FakeQueue()
    monkeypatch.setitem(sys.modules, QUEUE, module)
    monkeypatch.setattr(saves, "LOOK_S", 0.0)
    monkeypatch.setattr("atexit.register", lambda call: None)
    # One rank: what all ranks tell is what it tells.
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(torch.distributed, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return found


@pytest.fixture
def training(queue: FakeQueue) -> FakeTraining:
    return FakeTraining(queue)


def test_a_save_is_in_flight_until_all_ranks_have_finished_it(
    training: FakeTraining, queue: FakeQueue
) -> None:
    training.save_checkpoint(8)
    training.maybe_finalize_async_save(blocking=False)
    training.boundary()
    assert training.noted == [8, 8, 8]
    queue.done = 1
    training.maybe_finalize_async_save(blocking=False)
    assert training.noted[-1] is None


def test_of_several_saves_the_oldest_is_named_and_a_save_may_have_several_calls(
    training: FakeTraining, queue: FakeQueue
) -> None:
    training.calls_per_save = 2
    training.save_checkpoint(8)
    training.save_checkpoint(16)
    for oldest in (8, 16):
        queue.done = 1
        training.maybe_finalize_async_save()
        assert training.noted[-1] == oldest


@pytest.mark.fault
def test_the_training_waits_for_saves_that_overlap_only_where_a_change_does(
    training: FakeTraining, queue: FakeQueue
) -> None:
    training.save_checkpoint(8)
    training.session.stop_urgency = 1
    training.boundary()
    assert not training.looks, "one save ends by itself, and the training goes on"
    training.save_checkpoint(16)
    training.session.stop_urgency = 0
    training.boundary()
    assert not training.looks
    training.session.stop_urgency, queue.done = 1, 2
    training.boundary()
    assert training.noted[-1] is None and not queue.async_calls


def test_where_every_step_saves_a_stop_that_was_put_off_is_come_to(
    training: FakeTraining, queue: FakeQueue
) -> None:
    training.session.stop_urgency, queue.done = 2, 1
    training.save_checkpoint(8)
    training.boundary()
    assert training.noted[-1] is None and not queue.async_calls


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
    training: FakeTraining, queue: FakeQueue
) -> None:
    training.save_checkpoint(8)
    queue.written.append(0)
    queue.persistent_caller.process.kill()
    queue.done = 1
    training.maybe_finalize_async_save(blocking=True, terminate=True)
    assert not queue.async_calls


def test_who_leaves_leaves_no_writer(training: FakeTraining, queue: FakeQueue) -> None:
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


# ---------------------------------------------------------------- the processes of a save

RANK = """
import json, os, sys
from multiprocessing import active_children
from scalai.patches.megatron import cpu_emulation, save_process
save_process.install()
cpu_emulation.install_training()
import torch.distributed
torch.distributed.get_rank = lambda: 0
from megatron.core.dist_checkpointing.strategies import async_utils
save_process.tie_children()
from slow_save import Slow
from support.waiting import stay

if __name__ == "__main__":
    from multiprocessing import get_context
    folder = sys.argv[1]
    queue = async_utils.AsyncCallsQueue(persistent=sys.argv[2] == "persistent")
    request = async_utils.AsyncRequest(Slow(folder), (0, None), [])
    queue.schedule_async_request(request)
    before = {*active_children()}
    manager = get_context("spawn").Manager()
    (its_process,) = {*active_children()} - before
    print(json.dumps([os.getpid(), its_process.pid]), flush=True)
    stay()
"""
SLOW = """
import os
from multiprocessing import get_context
from support.waiting import stay

def write(folder, name):
    with open(os.path.join(folder, name), "w") as file:
        file.write(f"{os.getpid()}\\n")
        file.flush()
        stay()

class Slow:
    '''A save that never ends, half of it in a process of its own as megatron-core's to 0.16.'''

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, rank, buckets):
        get_context("fork").Process(target=write, args=(self.folder, "half")).start()
        write(self.folder, "other")
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.fault
@pytest.mark.parametrize(
    "kind", ["persistent", pytest.param("temporal", marks=pytest.mark.campaign)]
)
def test_whoever_writes_a_save_ends_with_its_rank(kind: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "slow_save.py").write_text(SLOW)
    files = [tmp_path / "half", tmp_path / "other"]
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "rank.py"), str(tmp_path), kind],
        stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            rank, manager = json.loads(process.stdout.readline())

            def has_begun(file: Path) -> bool:
                return file.is_file() and file.stat().st_size > 0

            wait_until(lambda: all(map(has_begun, files)), "both write", 120.0)
            writers = [int(file.read_text().split()[0]) for file in files]
            assert len({*writers, rank, manager}) == 4 and all(map(is_alive, writers))
            os.kill(rank, signal.SIGKILL)
            wait_until(
                lambda: not any(map(is_alive, [*writers, manager])),
                "what the rank had started ends with it",
                120.0,
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)
