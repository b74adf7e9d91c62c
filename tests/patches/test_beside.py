"""What a script adds to the optimizer or to its checkpoints on the way is refused or told of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalai.core.errors import RefusedError
from scalai.patches.accelerate.training import LoopHooks
from scalai.patches.data.clock import Clocks
from scalai.patches.deepspeed.beside import Beside
from scalai.patches.deepspeed.replay import Replay


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["ZeRO", "stage 0"])
def test_parameters_that_join_on_the_way_are_refused(is_wrapped: bool) -> None:
    """Their moments would be in no deposit, and begin anew at each change."""
    clocks = Clocks()
    beside = Beside(clocks, Replay(clocks))
    base: Any = torch.optim.AdamW([weight()])
    base.add_param_group({"params": [weight()]})
    optimizer = SimpleNamespace(optimizer=base) if is_wrapped else base
    beside.start(SimpleNamespace(optimizer=optimizer), SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match=r"add_param_group .* before deepspeed\.initialize"):
        base.add_param_group({"params": [weight()]})
    assert len(base.param_groups) == 2


class Ema:
    """What a script registers."""


class AcceleratedScheduler:
    """What Accelerate has prepared, by its name."""


@pytest.mark.parametrize(
    ("registered", "has_engine", "objects", "is_told"),
    [
        (("accelerate", "data"), True, [AcceleratedScheduler(), Ema()], True),
        (("accelerate", "ema"), True, [Ema()], False),
        ((), True, [AcceleratedScheduler()], False),
        ((), False, [Ema()], False),
    ],
    ids=["not carried", "the script's", "prepared", "no engine"],
)
def test_what_only_checkpoints_keep_is_told_of(
    registered: tuple[str, ...], has_engine: bool, objects: list[Any], is_told: bool
) -> None:
    said: list[tuple[str, str]] = []
    schedules = SimpleNamespace(stepped_elsewhere=[])
    beside = SimpleNamespace(schedules=schedules, say=lambda *words: said.append(words))
    session = SimpleNamespace(registered=registered)
    hooks = LoopHooks(lambda: session, SimpleNamespace(beside=beside))  # type: ignore[arg-type, return-value]
    plugin = object() if has_engine else None
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    kept: list[Any] = []
    hooks.notice_objects(lambda *given: kept.extend(given), accelerator, tuple(objects), {})
    assert kept == objects
    assert [event for event, _ in said] == ["not_carried"] * is_told
    assert all("(Ema)" in detail and "register_state" in detail for _, detail in said)
