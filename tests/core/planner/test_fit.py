"""Calibration finds what is in measurements, no more, and says how sure it is."""

from dataclasses import replace

import numpy as np
import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.planner.columns import Cases, Layout, Workload, columns_of
from scalai.core.planner.devices import device_named
from scalai.core.planner.fit import calibrate, uncalibrated
from scalai.core.planner.step_time import DEFAULT, Coefficients, step_time
from support.model_shapes import gpt

A100 = device_named("a100")
SHAPES = [(24, 2_304, 24), (40, 6_144, 48), (48, 8_192, 64)]


def cases(number: int) -> Cases:
    """Return ``number`` different cases of three models."""
    found = []
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4):
            for micro in (1, 4):
                for layers, hidden, heads in SHAPES:
                    work = Workload(gpt(layers, hidden, heads, 51_200, 2_048), 512, "fp16", False)
                    degrees = Degrees(tp, pp, 64 // (tp * pp))
                    found.append((work, A100, Layout(degrees, micro, "full", 0)))
    step = len(found) / number
    return columns_of([found[int(place * step)] for place in range(number)])


SLOW = replace(DEFAULT, matrix=0.7, link=0.55, network=0.3, launch_s=5e-4)


def measured(x: Cases, truth: Coefficients, noise: float = 0.03) -> np.ndarray:
    scatter = np.random.default_rng(1).normal(0, noise, len(x.layout.tp))
    return step_time(x, truth).total * np.exp(scatter)


def test_many_measurements_of_another_cluster_are_followed() -> None:
    x = cases(36)
    found = calibrate(x, measured(x, SLOW))
    truth = step_time(x, SLOW).total
    assert np.abs(found.predict(x).seconds / truth - 1).mean() < 0.02
    assert np.abs(step_time(x).total / truth - 1).mean() > 0.15
    assert found.coefficients.matrix == pytest.approx(0.7, rel=0.1)
    assert found.noise < 0.06


def test_one_measurement_says_something_and_many_say_more() -> None:
    x = cases(24)
    seconds = measured(x, SLOW)
    few = calibrate(cases(1), measured(cases(1), SLOW))
    many = calibrate(x, seconds)
    assert few.predict(x).half_width.mean() > many.predict(x).half_width.mean()
    truth = step_time(x, SLOW).total
    errors = [
        np.abs(one.predict(x).seconds / truth - 1).mean() for one in (uncalibrated(), few, many)
    ]
    assert errors[2] < errors[1] < errors[0]


@pytest.mark.parametrize(("count", "has_neighbours"), [(24, False), (72, True)])
def test_a_row_that_contradicts_all_others_hardly_counts(count: int, has_neighbours: bool) -> None:
    x = cases(count)
    seconds = measured(x, SLOW)
    broken = seconds.copy()
    broken[5] *= 3
    one, other = (
        calibrate(x, each, has_neighbours=has_neighbours).predict(x).seconds
        for each in (broken, seconds)
    )
    change = np.abs(one / other - 1)
    assert np.delete(change, 5).max() < 0.05 and change[5] < 0.1


def test_the_interval_holds_about_as_often_as_it_says() -> None:
    known, new = cases(24), cases(70)
    found = calibrate(known, measured(known, SLOW, 0.08))
    said = found.predict(new)
    truth = measured(new, SLOW, 0.08)
    assert 0.8 <= ((said.low <= truth) & (truth <= said.high)).mean() <= 1
    assert np.all(said.low < said.seconds) and np.all(said.seconds < said.high)
    assert np.median(said.half_width) < 0.35


def test_without_measurements_the_interval_is_wide_and_nothing_was_seen() -> None:
    x = cases(6)
    said = uncalibrated()
    assert np.median(said.predict(x).half_width) > 0.25
    assert said.rows == 0
    assert "tp=1" in said.never_seen(x, 0)


def test_what_no_measurement_is_like_is_named() -> None:
    x = cases(72)
    found = calibrate(x, measured(x, DEFAULT))
    work = Workload(gpt(48, 8_192, 64, 51_200, 2_048), 512, "fp16", True)
    new = columns_of([(work, A100, Layout(Degrees(3, 2, 8), 2, "none", 1))])
    assert found.never_seen(new, 0) == ("recompute=0", "sharding=1", "is_attention_fused=1")
    beyond = columns_of([(work, A100, Layout(Degrees(16, 8, 1), 8, "full", 0))])
    assert {"tp=16", "pp=8", "dp=1", "micro_batch=8"} <= set(found.never_seen(beyond, 0))


def slower_in_shared_hosts(x: Cases) -> np.ndarray:
    """Return steps with what no coefficient has: pipelines that share hosts are slower by 30 %."""
    shared = (x.layout.pp > 1) & (x.layout.tp < x.device.per_host)
    return measured(x, SLOW, 0.03) * np.where(shared, 1.3, 1.0)


def of_model(x: Cases, hidden: int, *, is_it: bool) -> list[int]:
    return np.flatnonzero((x.model.hidden == hidden) == is_it).tolist()


def test_what_alike_layouts_have_in_common_is_told_of_another_model() -> None:
    x = cases(72)
    seconds, hidden = slower_in_shared_hosts(x), SHAPES[1][1]
    known, new = of_model(x, hidden, is_it=False), of_model(x, hidden, is_it=True)
    errors = {}
    for has_neighbours in (False, True):
        found = calibrate(x.select(known), seconds[known], has_neighbours=has_neighbours)
        said = found.predict(x.select(new))
        errors[has_neighbours] = np.abs(said.seconds / seconds[new] - 1).mean()
        assert np.array_equal(found.seconds(x.select(new)), said.seconds)
        assert np.all(said.low < said.seconds) and np.all(said.seconds < said.high)
    assert errors[True] < 0.6 * errors[False]


def test_far_from_all_measurements_neighbours_say_nothing() -> None:
    x = cases(72)
    found = calibrate(x, slower_in_shared_hosts(x), has_neighbours=True)
    work = Workload(gpt(8, 64, 4, 1_000, 64), 64, "fp16", False)
    far = columns_of([(work, A100, Layout(Degrees(1, 4, 1), 64, "none", 0))])
    assert found.seconds(far) == pytest.approx(step_time(far, found.coefficients).total, rel=1e-3)


def test_one_measurement_alone_may_have_neighbours() -> None:
    x = cases(1)
    found = calibrate(x, measured(x, SLOW), has_neighbours=True)
    assert np.isfinite(found.seconds(cases(24))).all()
