"""The level of standby follows from the room that was measured, and says its reason."""

from dataclasses import replace

import pytest

from scalai.core.host.standby import (
    ALWAYS,
    AUTO,
    BRINK,
    DEVICE_BYTES,
    HOST_BYTES,
    NEVER,
    RoomBeside,
    Standby,
    bytes_ahead,
    choose,
)
from scalai.core.messages.worker_messages import AtBrink, Beside

GB = 1_000_000_000
WIDE = RoomBeside(2, used=4 * GB, free=10 * GB, brink=AtBrink(0, 0))
SHORT = replace(WIDE, free=9 * GB)
"""Room for two models with the reserve, and for less."""
HOST_COPY = replace(SHORT, free=5 * GB, brink=AtBrink(2 * GB, 0))
"""Room for what two scripts build in host memory before the brink, with the reserve."""
DEVICE = replace(WIDE, on_devices=True, device_free=DEVICE_BYTES)


@pytest.mark.parametrize(
    ("policy", "room", "level", "words"),
    [
        (AUTO, WIDE, Standby.MODELS, ""),
        (AUTO, SHORT, Standby.BRINK, "2 models may take 10.0 GB, 9.0 GB are free"),
        (AUTO, replace(SHORT, brink=None), Standby.NOTHING, "the script cannot stop before"),
        (AUTO, replace(WIDE, free=2 * HOST_BYTES), Standby.BRINK, "2 models"),
        (AUTO, replace(WIDE, free=2 * HOST_BYTES - 1), Standby.NOTHING, "at the brink may take"),
        (AUTO, HOST_COPY, Standby.BRINK, "2 models"),
        (AUTO, replace(HOST_COPY, free=5 * GB - 1), Standby.NOTHING, "may take 5.0 GB"),
        (AUTO, DEVICE, Standby.BRINK, "device memory holds one model"),
        (AUTO, replace(DEVICE, device_free=DEVICE_BYTES - 1), Standby.NOTHING, "of a device"),
        (AUTO, replace(DEVICE, brink=AtBrink(0, GB)), Standby.NOTHING, "may take 3.4 GB of a"),
        (AUTO, replace(DEVICE, device_free=None), Standby.NOTHING, "is unknown"),
        (AUTO, replace(DEVICE, brink=None), Standby.NOTHING, "device memory holds one model"),
        (AUTO, RoomBeside(2, used=0, free=0), Standby.MODELS, ""),
        (ALWAYS, RoomBeside(2, used=4 * GB, free=0), Standby.MODELS, ""),
        (ALWAYS, replace(DEVICE, device_free=None), Standby.MODELS, ""),
        (BRINK, WIDE, Standby.BRINK, "standby is brink"),
        (BRINK, replace(WIDE, brink=None), Standby.NOTHING, "the script cannot stop before"),
        (NEVER, WIDE, Standby.NOTHING, "standby is never"),
    ],
)
def test_the_highest_level_with_room_is_chosen(
    policy: str, room: RoomBeside, level: Standby, words: str
) -> None:
    choice = choose(policy, room)
    assert choice.level is level and words in choice.reason
    assert bool(choice.reason) is (level is not Standby.MODELS)


@pytest.mark.parametrize(
    ("needed", "beside", "expected"),
    [
        (30 * GB, Beside(20 * GB, 100 * GB), 11.5),
        (20 * GB, Beside(20 * GB, 100 * GB), 1),
        (1 * GB, Beside(20 * GB, 100 * GB), 1),
        (30 * GB, Beside(20 * GB, 15 * GB + HOST_BYTES), 10),
        (30 * GB, Beside(20 * GB, 5 * GB), 0),
    ],
    ids=["larger", "equal", "smaller", "as much as is free", "nothing is free"],
)
def test_both_rounds_take_little_more_than_the_larger_one(
    needed: int, beside: Beside, expected: float
) -> None:
    assert bytes_ahead(needed, beside) == pytest.approx(expected * GB)
