"""What a crash between any two steps leaves, and what the next owner finds."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import StoreError
from scalai.launch.agent.holdings import Holdings
from scalai.launch.agent.leftovers import find_leftovers
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.store.host import HostStore
from support.store_states import Opener, generation, is_whole, snapshot, two_ranks, write

CALLS = ("rename", "replace", "fsync", "unlink", "ftruncate", "posix_fallocate", "mkdir", "rmdir")


class Crash(BaseException):
    """The process ended here. Nothing in the product catches it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Callable[[], bool]:
    """Let the ``step``-th call that changes a file system end the process; tell whether it came."""
    count = 0

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count >= step:
                raise Crash(name)
            return call(*args, **kwargs)

        return wrapper

    for name in CALLS:
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    return lambda: count >= step


def resize(store: HostStore) -> None:
    """Snapshot, commit the new generation and drop the old one."""
    generation(store, 2, step=2)
    store.drop(1)


@pytest.mark.parametrize("step", range(1, 40))
def test_a_crash_leaves_the_old_or_the_new_generation_whole(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    store = open_store()
    generation(store, 1, step=1)
    with monkeypatch.context() as patch:
        has_crashed = crash_at(patch, step)
        try:
            resize(store)
        except Crash:
            pass
        crashed = has_crashed()
    store.close()
    found = open_store()
    assert not found.damaged
    assert found.generations()
    for number in found.generations():
        assert is_whole(found, number, step=number)
    assert crashed or found.generations() == [2]
    for slot, sealed in found.sealed():
        assert sealed.step == 2
        found.commit(slot, 3)
        assert is_whole(found, 3, step=2)
    generation(found, 9, step=9)
    assert is_whole(found, 9, step=9)
    assert not list(found.directory.glob("snapshot-*")) + list(found.directory.glob("dropped-*"))


def test_the_steps_that_are_crashed_at_are_all_there_are(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    generation(store, 1, step=1)
    with monkeypatch.context() as patch:
        has_crashed = crash_at(patch, 39)
        resize(store)
        assert not has_crashed()


def test_a_torn_snapshot_is_removed_and_its_pages_are_reused(open_store: Opener) -> None:
    store = open_store()
    held = two_ranks()
    slot = store.reserve(held)
    write(slot.orders[0], held[0])
    store.close()
    again = open_store()
    assert not slot.directory.exists()
    assert again.generations() == [] and again.sealed() == []
    assert list((again.directory / "recycled").iterdir())


def test_a_sealed_snapshot_survives_and_can_be_committed(open_store: Opener) -> None:
    store = open_store()
    snapshot(store, step=6)
    store.close()
    again = open_store()
    [(slot, manifest)] = again.sealed()
    assert manifest.step == 6
    again.commit(slot, 11)
    assert is_whole(again, 11, step=6)


def test_a_damaged_generation_is_named_and_left_alone(open_store: Opener, tmp_path: Path) -> None:
    store = open_store()
    for number in (1, 2):
        generation(store, number, step=number)
    truncated = next(store.generation_directory(2).glob("*.safetensors"))
    os.truncate(truncated, truncated.stat().st_size - 1)
    store.close()
    again = open_store()
    assert again.generations() == [1]
    assert str(truncated) in again.damaged[2] and "bytes long" in again.damaged[2]
    assert truncated.exists()
    assert is_whole(again, 1, step=1)


@pytest.mark.fault
def test_a_folder_that_was_renamed_is_not_taken_for_this_hosts_own(open_store: Opener) -> None:
    store = open_store("job", "a")
    generation(store, 3, step=3)
    snapshot(store, 4)
    store.close()
    store.directory.rename(store.directory.with_name("b"))
    moved = open_store("job", "b")
    assert moved.generations() == [] and moved.sealed() == []
    (reason,), (sealed,) = moved.damaged.values(), moved.damaged_snapshots.values()
    assert "generation 3 of host 'a'" in reason and "generation 3 of host 'b' belongs" in reason
    assert "--host-id a" in reason and "a snapshot of host 'b' belongs" in sealed
    assert (moved.directory / "generation-3").is_dir()
    moved.close()
    moved.directory.rename(store.directory)
    back = open_store("job", "a")
    assert back.generations() == [3] and len(back.sealed()) == 1


@pytest.mark.fault
def test_a_generation_under_another_number_is_not_used(open_store: Opener) -> None:
    store = open_store()
    generation(store, 3, step=3)
    store.close()
    (store.directory / "generation-3").rename(store.directory / "generation-5")
    assert "holds generation 3" in open_store().damaged[5]


@pytest.mark.fault
def test_a_damaged_snapshot_is_told_and_left(open_store: Opener) -> None:
    store = open_store()
    slot, _ = snapshot(store, 2)
    store.close()
    (slot.directory / "manifest.json").write_text("{}")
    again = open_store()
    assert again.sealed() == [] and slot.directory.is_dir()
    assert "is damaged" in again.damaged_snapshots[slot.directory.name]
    spec = JobSpec.read(parse_options(["--job", "job", "script.py"]))
    beside: Any = None
    reported = Holdings(spec, again, lambda *logged: None, beside, lambda due: None).found()
    ((number, why),) = reported.damaged
    assert number == -1 and str(slot.directory) in why
    again.set_damaged_aside()  # the job goes on without it
    again.close()
    later = open_store()
    assert not later.damaged_snapshots and [each.is_resumable for each in find_leftovers(
        later.directory)] == [True]  # fmt: skip


@pytest.mark.fault
def test_the_number_of_a_damaged_generation_is_not_used_again(open_store: Opener) -> None:
    store = open_store()
    generation(store, 2, step=2)
    store.close()
    (store.directory / "generation-2" / "manifest.json").write_text("{}")
    again = open_store()
    slot, _ = snapshot(again, 3)
    with pytest.raises(StoreError, match="Numbers are never used twice"):
        again.commit(slot, 2)
    assert again.commit(slot, 3).step == 3
