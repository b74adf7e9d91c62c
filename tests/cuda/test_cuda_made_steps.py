"""What a step has computed is told, and no device is waited for."""

import pytest
import torch

from scalai.core.planner.meter import WARM_STEPS, WINDOW_STEPS
from scalai.runtime.session import MadeSteps
from scalai.runtime.step_passes import PassClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_numbers_of_a_device_that_is_at_work_are_told_later_in_their_order() -> None:
    told: list[tuple[int, float, float]] = []
    made = MadeSteps(lambda *step: told.append(step))
    # The device loads each kernel at its first use, and waits with that for all that is queued.
    made.note(0, torch.ones((), device="cuda"), 2.0)
    torch.cuda.synchronize()
    made.note(0, 1.0, 2.0)
    told.clear()
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    made.note(1, torch.ones((), device="cuda"), 2.0)
    made.note(2, 3.0, 2.0)
    assert not told, "it has waited for the device"
    torch.cuda.synchronize()
    made.note(3, 4.0, 2.0)
    assert told == [(1, 1.0, 2.0), (2, 3.0, 2.0), (3, 4.0, 2.0)]


def test_a_pass_takes_the_time_of_the_device_and_waits_for_none() -> None:
    torch.zeros((), device="cuda")
    told: list[tuple[int, float]] = []
    clock = PassClock(lambda *window: told.append(window))
    for _ in range(WARM_STEPS + WINDOW_STEPS):
        for number in range(3):
            clock.begin_pass(number, 3)
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        clock.step_ended()
        torch.cuda.synchronize()
    clock.step_ended()
    # A device of less than 5 GHz.
    assert [number for number, _ in told] == [1] and told[0][1] > 0.01
