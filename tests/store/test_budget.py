"""Whether a snapshot fits, by the room that there is."""

from pathlib import Path

import pytest

from scalai.core.errors import StoreError
from scalai.store.directory import Room, check_budget

FOLDER = Path("/dev/shm/j/a")


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (Room(in_use=0, reusable=0, free=200), 200),
        (Room(in_use=0, reusable=200, free=0), 200),
        (Room(in_use=100, reusable=0, free=100), 100),
        (Room(in_use=300, reusable=0, free=100), 100),  # an older one is still read
    ],
)
def test_what_fits_may_keep_the_files_of_one_more_generation(room: Room, kept: int) -> None:
    assert check_budget(100, room, None, "a", FOLDER) == kept


@pytest.mark.parametrize(
    "room",
    [
        Room(in_use=0, reusable=99, free=100),  # the next one would not fit beside this one
        Room(in_use=300, reusable=50, free=49),  # this one does not fit beside what is there
    ],
)
def test_what_does_not_fit_twice_is_refused_with_what_there_is(room: Room) -> None:
    found = f"need 200; {FOLDER} has {room.in_use} in use, {room.reusable} to reuse"
    with pytest.raises(StoreError, match=f"{found} and {room.free} free"):
        check_budget(100, room, None, "a", FOLDER)


def test_a_limit_holds_however_much_is_free() -> None:
    room = Room(in_use=0, reusable=0, free=1 << 40)
    assert check_budget(100, room, 200, "a", FOLDER) == 200
    with pytest.raises(StoreError, match="the store may take 199"):
        check_budget(100, room, 199, "a", FOLDER)


@pytest.mark.fault
def test_a_limit_counts_what_is_in_use() -> None:
    in_use = Room(in_use=120, reusable=0, free=1 << 40)  # the kept generation has fetched pieces
    assert check_budget(100, in_use, 220, "a", FOLDER) == 100
    with pytest.raises(StoreError, match="beside 120 in use; the store may take 219"):
        check_budget(100, in_use, 219, "a", FOLDER)
