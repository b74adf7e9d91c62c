"""Rates that a job's own steps predict."""

import numpy as np
import pytest

from scalai.core.cluster.application import Limits
from scalai.core.cluster.speeds import Noise, Rows, Speeds, StepModel, first_rates, fit, form_of

LIMITS = Limits((1, 16), (32, 1024), (8, 64))
TRUE = StepModel(0.02, 0.004, (0.03, 0.001), (0.08, 0.002), 1.0)


def rows(*keys: tuple[int, int, float]) -> Rows:
    found = {}
    for hosts, devices, local in keys:
        each = np.array([float(local)])
        step = float(TRUE.step(np.array([hosts]), np.array([devices]), each)[0])
        found[hosts, devices, local] = step, step - float(TRUE.compute(each)[0])
    return found


def test_steps_that_were_measured_are_predicted_and_so_are_those_between() -> None:
    seen = rows((1, 1, 16), (1, 1, 64), (1, 2, 32), (1, 4, 16), (2, 8, 16), (3, 12, 32))
    model = fit(seen, 8, 4, (64, 1))
    for key, (step, _) in rows(*seen, (1, 3, 24), (4, 16, 8)).items():
        hosts, devices, local = key
        said = model.step(np.array([hosts]), np.array([devices]), np.array([float(local)]))
        assert float(said[0]) == pytest.approx(step, rel=0.02)


def test_one_step_on_one_device_is_enough_for_a_prediction_of_all_sizes() -> None:
    model = fit(rows((1, 1, 32)), 8, 4, (64, 1))
    rates = Speeds(model, Noise(1.0, 100.0, 32), LIMITS).rates(4)
    assert len(rates) == 17 and rates[0] == 0 and (rates[1:] > 0).all()


def test_a_batch_without_noise_gains_nothing_and_one_of_noise_alone_all() -> None:
    batch = np.array([32.0, 64.0, 320.0])
    assert Noise(1.0, 0.0, 32).gain(batch) == pytest.approx([1, 1, 1])
    assert Noise(0.0, 1.0, 32).gain(batch) == pytest.approx([1, 2, 10])
    assert Noise(1.0, 1.0, 32).gain(batch[:1]) == pytest.approx([1])


@pytest.mark.parametrize("devices", range(1, 17))
def test_the_chosen_form_is_within_the_limits(devices: int) -> None:
    speeds = Speeds(TRUE, Noise(1.0, 50.0, 32), LIMITS)
    form = speeds.form(-(-devices // 4), devices)
    assert 8 <= form.local <= 64
    assert 32 <= form.local * form.passes * devices <= 1024


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
def test_a_constant_batch_stays_constant(devices: int) -> None:
    speeds = Speeds(TRUE, Noise(1.0, 50.0, 32), LIMITS, batch=512)
    form = speeds.form(-(-devices // 4), devices)
    assert form == form_of(512, devices, LIMITS, 32)
    assert form.local * form.passes * devices == 512


def test_sizes_outside_of_the_stated_ones_have_no_rate() -> None:
    limits = Limits((2, 4), (32, 1024), (8, 64))
    assert first_rates(4, limits.devices).tolist()[:2] == [0, 0]
    rates = Speeds(TRUE, Noise(1.0, 50.0, 32), limits).rates(4)
    assert len(rates) == 5 and rates[1] == 0 and rates[2] > 0
