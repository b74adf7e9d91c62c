"""What a step has computed is told, and no device is waited for."""

import pytest
import torch

from scalai.runtime.session import MadeSteps

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
