"""Predicted service, the queue by it, and hosts that are switched."""

import pytest

from scalai.core.cluster.history import Forecast, PowerRule, QueuedJob, hosts_on, serve
from scalai.core.cluster.question import Ended
from scalai.core.errors import RefusedError


def test_the_narrowest_history_with_enough_jobs_counts() -> None:
    past = [*[Ended("gpt", 8, 100.0, "ada")] * 3, *[Ended("gpt", 1, 10.0, "ada")] * 3]
    forecast = Forecast([*past, Ended("bert", 1, 1000.0, "bob")])
    assert forecast.seconds("gpt", "ada", 8) == 100
    assert forecast.seconds("gpt", "ada", 4) == 55
    assert forecast.seconds("other", "ada", 1) == 55
    assert forecast.seconds("other", "eve", 1) == pytest.approx((6 * 55 + 1000) / 7)
    assert Forecast().seconds("gpt", "ada", 1) is None


def test_a_queue_serves_in_order_or_by_predicted_service_and_sees_no_future() -> None:
    past = [QueuedJob(0.0, 1, 1.0, "short")] * 3 + [QueuedJob(0.0, 1, 50.0, "long")] * 3
    late = [QueuedJob(60.0, 4, 50.0, "long"), QueuedJob(61.0, 4, 50.0, "long"),
            QueuedJob(62.0, 4, 1.0, "short")]  # fmt: skip
    jobs = [*past, *late]
    first = serve(jobs, 4, by_service=False)
    assert first.begin_s[6:] == (60.0, 110.0, 160.0)
    by_service = serve(jobs, 4, by_service=True)
    assert by_service.begin_s[6:] == (60.0, 111.0, 110.0)
    assert by_service.predicted_s[:3] == (None, None, None)
    assert by_service.predicted_s[8] == 1.0
    assert max(busy for _, busy in first.busy) == 4 and first.busy[-1][1] == 0


def test_a_job_beyond_all_devices_is_refused_and_does_not_wait_for_ever() -> None:
    with pytest.raises(RefusedError, match="5 devices of 4"):
        serve([QueuedJob(0.0, 5, 1.0)], 4, by_service=False)


def test_hosts_go_on_at_once_and_off_after_a_rest() -> None:
    rule = PowerRule(spare=2, rest_steps=3, ahead_steps=3)
    assert hosts_on([5, 5, 9], on=8, rested=0, rule=rule) == 11
    assert hosts_on([5, 5, 5, 5, 5], on=20, rested=2, rule=rule) == 20
    assert hosts_on([5, 5, 5, 5, 5], on=20, rested=3, rule=rule) == 7
    assert hosts_on([5, 5, 5, 6, 8], on=20, rested=9, rule=rule) == 20
