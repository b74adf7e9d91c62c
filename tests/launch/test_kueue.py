"""``scalai autoscale --kubernetes`` in a queue of Kueue: it asks for what the quota holds, and says
why a size waits."""

import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import RefusedError
from scalai.launch.commands import autoscaler
from scalai.launch.commands.autoscale_hands import Kubernetes
from scalai.launch.commands.autoscaler import Autoscaler
from scalai.launch.commands.kubernetes_job import scale_job
from scalai.launch.commands.kueue import pods_by_lane, quantity, read_shares, share_of
from support.kubernetes_api import Api
from support.kueue import FLAVOR, GATE, GPU, QUEUES, Kueue
from support.waiting import wait_until


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("100m", Fraction(1, 10)), ("36Gi", 36 << 30), ("1e3", 1000), ("1.5k", 1500),
     ("2E", 2 * 10**18), (4, 4), ("-1", -1)],
)  # fmt: skip
def test_quantities(text: str, value: Fraction) -> None:
    assert quantity(text) == value


@pytest.mark.fault
@pytest.mark.parametrize("text", ["", "x", "1ki2", "8 Gi"])
def test_what_is_no_quantity_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        quantity(text)


def queued(api: Api, pods: int, name: str = "gpt", **about: Any) -> Kueue:
    """The Job in a queue, and admitted if its quota holds it."""
    kueue = api.kueue = api.kueue or Kueue(**about)
    job = api.jobs[name] = deepcopy(api.jobs["gpt"])
    job["spec"] |= {"parallelism": pods, "completions": pods}
    kueue.take(name, job)
    return kueue


def test_a_share_is_what_has_quota_and_what_is_free(api: Api) -> None:
    kueue = queued(api, 2, nominal=48, others=8)
    (share,) = read_shares(api.seen_by_a_pod(), ["gpt", "absent"]).values()
    assert share is not None and (share.pods, share.more, share.waits) == (2, 3, "")
    scale_job("gpt", 5, is_dry=False)
    (share,) = read_shares(api.seen_by_a_pod(), ["gpt"]).values()
    assert share is not None and (share.pods, share.more) == (5, 0)
    scale_job("gpt", 3, is_dry=False)
    kueue.nominal = 24
    (share,) = read_shares(api.seen_by_a_pod(), ["gpt"]).values()
    assert share is not None and (share.pods, share.more) == (3, -1)


def test_replaced_slices_of_many_changes_are_passed_over(api: Api) -> None:
    queued(api, 1, nominal=48)
    for _ in range(30):
        scale_job("gpt", 2, is_dry=False)
        scale_job("gpt", 1, is_dry=False)
    (share,) = read_shares(api.seen_by_a_pod(), ["gpt"]).values()
    assert share is not None and (share.pods, share.more) == (1, 5)
    assert sum("continue=" in path for _, path in api.asked) == 1


@pytest.mark.parametrize(
    ("about", "more"),
    [
        ({"nominal": 16}, 0),
        ({"nominal": 16, "has_cohort": True, "limit": 8, "lent": 64}, 1),
        ({"nominal": 16, "has_cohort": True, "limit": 0}, 0),
        ({"nominal": 16, "has_cohort": True}, None),
        ({"nominal": 39}, 2),
    ],
)
def test_quota_is_borrowed_up_to_its_limit(
    about: dict[str, Any], more: int | None, api: Api
) -> None:
    queued(api, 2, **about)
    (share,) = read_shares(api.seen_by_a_pod(), ["gpt"]).values()
    assert share is not None and share.more == more


def test_a_job_without_quota_says_why_and_may_have_what_others_of_its_queue_give(api: Api) -> None:
    queued(api, 3, nominal=32)
    queued(api, 2, "new")
    shares = read_shares(api.seen_by_a_pod(), ["gpt", "new"])
    new = shares["new"]
    assert new is not None and (new.pods, new.more) == (0, 1)
    assert f"insufficient unused quota for {GPU} in flavor {FLAVOR}, 8 more needed" in new.waits
    assert list(pods_by_lane(each for each in shares.values() if each).values()) == [4]


@pytest.mark.parametrize("where", ["ClusterQueue", "LocalQueue"])
def test_a_queue_that_is_held_gives_nothing(where: str, api: Api) -> None:
    kueue = queued(api, 2, nominal=64)
    queue = kueue.queue()
    queue["spec"] |= {"stopPolicy": "Hold"} if where == "ClusterQueue" else {}
    share = share_of(kueue.workloads, queue, is_held=where == "LocalQueue")
    assert (share.pods, share.more) == (2, 0)


@pytest.mark.fault
def test_a_job_that_kueue_would_stop_keeps_its_size(api: Api) -> None:
    queued(api, 2, nominal=48)
    del api.jobs["gpt"]["spec"]["template"]["spec"]["schedulingGates"]
    with pytest.raises(RefusedError, match=f'annotation {GATE}: "true"'):
        scale_job("gpt", 3, is_dry=False)
    assert api.jobs["gpt"]["spec"]["parallelism"] == 2


@pytest.fixture
def turns(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., str]]:
    """Turns of an autoscaler over a job that wants 8 hosts, until it has so many pods and a
    decision says something; returns the newest that does."""
    monkeypatch.setattr(autoscaler, "ENGINE_S", 0.0)
    jobs, told = tmp_path / "jobs", list[str]()
    jobs.mkdir()
    scaler = Autoscaler(jobs, "8x8", "fixed", Kubernetes, lambda line, found: told.append(line))
    scaler.turn()

    def until(pods: int, says: str = "") -> str:
        if not (jobs / "gpt.toml").exists():
            (jobs / "gpt.toml").write_text(f'devices = [8, 64]\nstore_dir = "{tmp_path}"')

        def is_so() -> bool:
            scaler.turn()
            has = api.jobs["gpt"]["spec"]["parallelism"] == pods
            return has and any(says in line for line in told)

        wait_until(is_so, lambda: f"{pods} pods; {told}", 30.0)
        return next(line for line in reversed(told) if says in line)

    yield until
    scaler.close()


Turns = Callable[..., str]


def test_the_quota_is_the_number_of_devices(api: Api, turns: Turns) -> None:
    """24 of 32 devices, as 8 are another's. A change is an event, and nothing beyond is asked."""
    kueue = queued(api, 1, nominal=32, others=8)
    turns(3)
    kueue.others = 0
    turns(4, says="devices 24 -> 32")
    kueue.nominal = 16
    turns(2, says="devices 32 -> 16")
    assert kueue.reserved == 16
    assert not any("resourceRequests" in each["status"] for each in kueue.workloads)


def test_a_size_that_waits_for_a_lender_is_explained(api: Api, turns: Turns) -> None:
    kueue = queued(api, 1, nominal=8, has_cohort=True)
    said = turns(8, says="gpt waits for quota")
    assert "(waits for quota: couldn't assign flavors" in said and "56 more needed" in said
    kueue.lent = 64
    kueue.admit()
    assert "couldn't" not in turns(8, says="gpt has its quota")


@pytest.mark.fault
def test_without_a_right_to_the_quota_the_stated_devices_count(
    api: Api, turns: Turns, caplog: pytest.LogCaptureFixture
) -> None:
    queued(api, 1, nominal=8)
    api.forbidden = QUEUES
    with caplog.at_level(logging.WARNING):
        turns(8)
    assert "what='engine'" in caplog.text and "a Role to list workloads" in caplog.text
