"""Measured tables of a kind of job."""

import pytest

from scalai.core.cluster.application import Application, read_application
from scalai.core.errors import RefusedError

PLACED = ["placement,local_bsz,step_time,sync_time", "1,8,1.0,0.0", "1,16,2.0,0.0",
          "12,8,1.4,0.4", "12,16,2.4,0.4", "2,8,1.2,0.2", "2,16,2.2,0.2"]  # fmt: skip
SCALED = ["num_nodes,num_replicas,local_bsz,step_time,sync_time", "4,4,8,1.8,0.8",
          "4,4,16,2.8,0.8", "4,8,8,2.0,1.0", "4,8,16,3.0,1.0"]  # fmt: skip


def kind() -> Application:
    tables = {
        8: ["progress,iteration,grad_sqr,grad_var", "10,10,1,8", "20,20,1,8"],
        32: ["progress,iteration,grad_sqr,grad_var", "11,4,2,16", "22,8,2,16"],
    }
    return read_application("small", PLACED, SCALED, tables, epochs=2)


def test_measured_points_are_exact_in_any_rotation_and_linear_between() -> None:
    assert kind().step_s((1,), 8) == (1.0, 0.0)
    assert kind().step_s((2, 1), 16) == kind().step_s((1, 2), 16) == (2.4, 0.4)
    assert kind().step_s((2,), 12) == pytest.approx((1.7, 0.2))


def test_placements_that_were_not_measured_lie_between_hosts_and_devices() -> None:
    step, sync = kind().step_s((1, 1, 1), 8)
    assert 1.4 < step < 1.8 + 1e-9 and 0.4 < sync < 0.8 + 1e-9
    assert kind().step_s((1, 1, 2, 2), 8) == pytest.approx((1.9, 0.9))


def test_a_job_ends_with_its_last_epoch_and_noise_lies_between_batches() -> None:
    assert kind().ends == (10.0, 20.0) and kind().length == 20.0
    assert kind().noise(8, 0) == (1.0, 8.0)
    assert kind().noise(20, 1) == pytest.approx((1.5, 12.0))
    assert kind().steps_until(20, 0) == pytest.approx(7.0)


def test_nothing_is_said_beyond_the_measured_range() -> None:
    with pytest.raises(RefusedError, match="batch of 64"):
        kind().noise(64, 0)
    with pytest.raises(RefusedError, match="17 samples"):
        kind().step_s((1,), 17)
    assert not kind().has((2,), 4)
    with pytest.raises(RefusedError, match="3 epochs"):
        read_application("small", PLACED, SCALED, {8: ["progress", "1"]}, epochs=3)
