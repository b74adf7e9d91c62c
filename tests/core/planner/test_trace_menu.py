"""What changes of a trace cost where the state does not go from host to host."""

import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError
from scalai.core.planner import trace_menu
from scalai.core.planner.columns import Layout, Workload
from scalai.core.planner.devices import device_named
from scalai.core.planner.reconfiguration import RELAUNCH_S
from scalai.core.planner.trace_menu import STATE_BYTES, Prices, change_cost
from support.model_shapes import gpt


def test_a_model_that_is_not_cut_comes_from_storage_at_its_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uncut(*_: object, **__: object) -> None:
        raise RefusedError("it is not cut")

    monkeypatch.setattr(trace_menu, "reconfiguration", uncut)
    work = Workload(gpt(24, 2048, 16, 51200, 1024), 96)
    size = work.shape.total_parameters * STATE_BYTES
    before, after = Layout(Degrees(2, 2, 2), 1), Layout(Degrees(2, 2, 1), 1)
    for storage in (1e9, 4e9):
        cost = change_cost(work, device_named("a100"), Prices(storage=storage))
        assert cost(before, after) == pytest.approx(RELAUNCH_S + size / storage)
