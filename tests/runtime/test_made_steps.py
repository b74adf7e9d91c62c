"""What a step has computed is told, and nothing waits for a device."""

import math

import torch

from scalai.runtime.session import MadeSteps

Told = list[tuple[int, float, float]]


def test_numbers_that_are_there_are_told_with_their_step() -> None:
    told: Told = []
    made = MadeSteps(lambda *step: told.append(step))
    made.note(1, 5.0, torch.tensor(2.0))
    made.note(2, torch.tensor([4.5]), None)
    assert told[0] == (1, 5.0, 2.0)
    assert told[1][:2] == (2, 4.5) and math.isnan(told[1][2])
