"""What a crash between any two steps leaves, and what the next owner finds."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_states import Opener, deposit, generation, is_whole, two_ranks, write

from scalai.store.host import HostStore

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
    """Deposit, commit the new generation and drop the old one."""
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
    assert not list(found.directory.glob("deposit-*")) + list(found.directory.glob("dropped-*"))


def test_the_steps_that_are_crashed_at_are_all_there_are(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    generation(store, 1, step=1)
    with monkeypatch.context() as patch:
        has_crashed = crash_at(patch, 39)
        resize(store)
        assert not has_crashed()


def test_a_torn_deposit_is_removed_and_its_pages_are_reused(open_store: Opener) -> None:
    store = open_store()
    held = two_ranks()
    slot = store.reserve(held)
    write(slot.orders[0], held[0])
    store.close()
    again = open_store()
    assert not slot.directory.exists()
    assert again.generations() == [] and again.sealed() == []
    assert list((again.directory / "recycled").iterdir())


def test_a_sealed_deposit_survives_and_can_be_committed(open_store: Opener) -> None:
    store = open_store()
    deposit(store, step=6)
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
