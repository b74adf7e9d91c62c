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
    Room,
    Standby,
    choose,
)

GB = 1_000_000_000
WIDE = Room(2, used=4 * GB, free=10 * GB, has_brink=True)
SHORT = replace(WIDE, free=9 * GB)
"""Room for two models with the reserve, and for less."""
DEVICE = replace(WIDE, on_devices=True, device_free=DEVICE_BYTES)


@pytest.mark.parametrize(
    ("policy", "room", "level", "words"),
    [
        (AUTO, WIDE, Standby.MODELS, ""),
        (AUTO, SHORT, Standby.BRINK, "2 models may take 10.0 GB, 9.0 GB are free"),
        (AUTO, replace(SHORT, has_brink=False), Standby.NOTHING, "the script cannot stop before"),
        (AUTO, replace(WIDE, free=2 * HOST_BYTES), Standby.BRINK, "2 models"),
        (AUTO, replace(WIDE, free=2 * HOST_BYTES - 1), Standby.NOTHING, "without models"),
        (AUTO, DEVICE, Standby.BRINK, "device memory holds one model"),
        (AUTO, replace(DEVICE, device_free=DEVICE_BYTES - 1), Standby.NOTHING, "a context"),
        (AUTO, replace(DEVICE, device_free=None), Standby.NOTHING, "is unknown"),
        (AUTO, replace(DEVICE, has_brink=False), Standby.NOTHING, "device memory holds one model"),
        (AUTO, Room(2, used=0, free=0), Standby.MODELS, ""),
        (ALWAYS, Room(2, used=4 * GB, free=0), Standby.MODELS, ""),
        (ALWAYS, replace(DEVICE, device_free=None), Standby.MODELS, ""),
        (BRINK, WIDE, Standby.BRINK, "standby is brink"),
        (BRINK, replace(WIDE, has_brink=False), Standby.NOTHING, "the script cannot stop before"),
        (NEVER, WIDE, Standby.NOTHING, "standby is never"),
    ],
)
def test_the_highest_level_with_room_is_chosen(
    policy: str, room: Room, level: Standby, words: str
) -> None:
    choice = choose(policy, room)
    assert choice.level is level and words in choice.reason
    assert bool(choice.reason) is (level is not Standby.MODELS)
