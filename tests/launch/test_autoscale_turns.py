"""Turns of ``scalai autoscale`` over files of jobs and a live coordinator, and its requests."""

import json
import logging
import os
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import PeerError, ScalaiError
from scalai.core.job.membership import Phase
from scalai.core.jsonable import Json
from scalai.launch.commands import autoscale_jobs
from scalai.launch.commands.autoscale import _Metrics
from scalai.launch.commands.autoscale_hands import (
    GIVE_UP_S,
    REFUSED_S,
    REPEAT_S,
    Hand,
    Hosts,
    Kubernetes,
    Requests,
    Slots,
)
from scalai.launch.commands.autoscale_jobs import (
    Jobs,
    JobWatch,
    Known,
    Problems,
    Seen,
    State,
    read_job,
)
from scalai.launch.commands.autoscaler import Autoscaler
from scalai.launch.config.endpoint import write_card
from scalai.launch.coordinator.leases import CLAIM_S, LeaseWatch
from scalai.launch.coordinator.registers import LeaseEntry, open_register
from scalai.runtime.handshake import job_key
from support import coordinator_line
from support.coordinator_line import TOKEN, Line
from support.kubernetes_api import Api
from support.ports import free_port
from support.waiting import wait_until

from .conftest import OpenLine

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _long_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscale_jobs, "GRACE_S", 0.0)
    monkeypatch.setattr(autoscale_jobs, "LOOK_S", 0.02)


def with_four_workers(line: Line) -> Line:
    """Two hosts of two workers each."""
    for host in ("a", "b"):
        line.join(host)
    line.until(lambda: line.phase is Phase.RUNNING and line.status()["world_size"] == 4, "it runs")
    return line


class Scaled:
    """An autoscaler over a folder of jobs, turned by the test; what it says."""

    def __init__(
        self, folder: Path, devices: str, policy: str, hand: Callable[[int], Hand], **how: Any
    ) -> None:
        self.folder, self.jobs = folder, folder / "jobs"
        self.jobs.mkdir(exist_ok=True)
        self.told = list[Mapping[str, Any]]()
        self._made = lambda: Autoscaler(self.jobs, devices, policy, hand, self._tell, **how)
        self._scaler: Autoscaler | None = None

    def _tell(self, line: str, found: Json) -> None:
        self.told.append(json.loads(json.dumps(found)))

    def describe(self, text: str, name: str = "gpt") -> Path:
        """A job's file; by default its coordinator is found by a card."""
        path = self.jobs / f"{name}.toml"
        path.with_suffix(".new").write_text(f'store_dir = "{self.folder}"\n{text}\n')
        return path.with_suffix(".new").rename(path)

    def turn(self) -> bool:
        self._scaler = self._scaler or self._made()
        return self._scaler.turn()

    def turn_until(self, is_so: Callable[[], object]) -> None:
        def is_found() -> object:
            self.turn()
            return is_so()

        wait_until(is_found, lambda: f"it never came to this; {self.told}")

    def turn_until_heard(self, name: str = "gpt") -> None:
        """A decision knows the four workers of a job."""
        self.turn_until(
            lambda: self.told and self.told[-1]["jobs"].get(name, {}).get("before") == 4
        )

    def close(self) -> None:
        if self._scaler is not None:
            self._scaler.close()


Scale = Callable[..., Scaled]


@pytest.fixture
def scale(tmp_path: Path) -> Iterator[Scale]:
    made = list[Scaled]()

    def opener(*about: Any, **how: Any) -> Scaled:
        made.append(Scaled(tmp_path, *about, **how))
        return made[-1]

    yield opener
    for each in made:
        each.close()


@pytest.fixture
def card(line: Line, tmp_path: Path) -> Path:
    """The card of a job with four workers, whose name is j."""
    (tmp_path / "j").mkdir(mode=0o700)
    write_card(tmp_path / "j", with_four_workers(line).address, TOKEN)
    return tmp_path / "j"


def pods(api: Api, name: str = "gpt", count: int | None = None) -> int:
    spec = api.jobs.setdefault(name, json.loads(json.dumps(api.jobs["gpt"])))["spec"]
    if count is not None:
        spec |= {"parallelism": count, "completions": count}
    return int(spec["parallelism"])


@pytest.mark.fault
@pytest.mark.parametrize("how", ["touched", "changed", "returned", "renamed"])
def test_a_file_that_is_written_anew_leaves_its_job_as_it_is(
    how: str, card: Path, api: Api, scale: Scale
) -> None:
    """A volume of a ConfigMap has all files anew where one has changed."""
    text = 'job = "j"\nengine = "gpt"\ndevices = [2, 4]'
    scaler, _ = scale("4x2", "goodput", Kubernetes), pods(api, count=2)
    path = scaler.describe(text)
    scaler.turn_until_heard()
    name = "gpt"
    match how:
        case "touched":
            os.utime(path, (1, 1))
        case "changed":
            scaler.describe(f"{text}\npriority = 2")
        case "returned":
            path.unlink()
            scaler.turn()
            scaler.describe(text)
        case "renamed":
            name, _ = "new", path.rename(path.with_name("new.toml"))
    before = len(scaler.told)

    def is_known_again() -> bool:
        assert pods(api) == 2
        news = scaler.told[before:]
        return how == "touched" or any(name in each["jobs"] for each in news)

    scaler.turn_until(is_known_again)
    scaler.turn()
    assert pods(api) == 2 and scaler.told[-1]["jobs"][name]["before"] == 4
    assert all(each["jobs"].get(name, {"after": 4})["after"] == 4 for each in scaler.told)
    assert how != "touched" or len(scaler.told) == before


@pytest.mark.fault
@pytest.mark.parametrize("policy", ["goodput", "fixed"])
def test_a_job_that_has_never_answered_and_may_run_keeps_its_size(
    policy: str, api: Api, scale: Scale
) -> None:
    """Its token cannot be read. What it may have is given to nobody, and nobody gives for it."""
    scaler = scale("4x2", policy, Kubernetes)
    pods(api, "other", 4)
    pods(api, count=2)
    scaler.describe('coordinator = "127.0.0.1:1"\ntoken_file = "/none"\ndevices = [2, 4]')
    scaler.describe("devices = [2, 8]", "other")
    scaler.turn_until(lambda: any(each["jobs"] for each in scaler.told))
    scaler.turn_until(lambda: pods(api, "other") <= 2)
    assert pods(api) == 2
    assert all(each["silent"] == ["gpt"] for each in scaler.told)
    assert all(each["jobs"]["other"]["after"] <= 4 for each in scaler.told)


@pytest.mark.fault
def test_a_silent_job_with_all_devices_leaves_none_to_others(
    card: Path, line: Line, scale: Scale
) -> None:
    scaler = scale("4", "goodput", lambda per_host: Slots())
    scaler.describe('job = "j"\ndevices = [1, 4]')
    scaler.describe("devices = [1, 4]", "other")
    scaler.turn_until_heard()
    line.close()
    scaler.turn_until(lambda: scaler.told[-1]["silent"])
    assert scaler.told[-1]["jobs"]["other"]["after"] == 0


@pytest.mark.fault
def test_a_wrong_file_is_named_and_the_others_count(
    scale: Scale, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = scale("4", "fixed", lambda per_host: Slots())
    scaler.describe('devices = [1, 4]\nasked = "4"')
    scaler.describe("devices = [1, 4]", "other")
    scaler.turn_until(lambda: scaler.told)
    assert set(scaler.told[-1]["jobs"]) == {"other"}
    assert "gpt.toml: asked = '4'; expected a whole number from 1 to 4" in caplog.text


@pytest.mark.fault
@pytest.mark.parametrize("mark", ['job = "j"', 'engine = "gpt"'])
def test_the_second_file_of_one_job_is_refused(
    mark: str, scale: Scale, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = scale("4", "fixed", lambda per_host: Slots())
    scaler.describe('job = "j"\ndevices = [1, 4]')
    scaler.turn_until(lambda: scaler.told)
    scaler.describe(f"{mark}\ndevices = [1, 4]", "a")
    scaler.turn()
    scaler.turn()
    assert set(scaler.told[-1]["jobs"]) == {"gpt"}
    assert "a.toml and gpt.toml name one job" in caplog.text


@pytest.mark.fault
def test_a_vanished_folder_removes_no_job(scale: Scale, caplog: pytest.LogCaptureFixture) -> None:
    scaler = scale("4", "fixed", lambda per_host: Slots())
    scaler.describe("devices = [1, 4]")
    scaler.turn_until(lambda: scaler.told)
    scaler.jobs.rename(scaler.jobs.with_name("away"))
    scaler.turn()
    assert len(scaler.told) == 1 and "jobs cannot be read" in caplog.text
    scaler.jobs.with_name("away").rename(scaler.jobs)
    with caplog.at_level(logging.INFO):
        scaler.turn()
    assert len(scaler.told) == 1 and "event=problem_over what='jobs'" in caplog.text


def test_a_removed_job_has_no_metrics(scale: Scale) -> None:
    port = free_port("127.0.0.1")
    metrics = _Metrics(str(port), None)
    scaler = scale("4", "fixed", lambda per_host: Slots(), meter=metrics.note)
    path = scaler.describe("devices = [1, 4]")

    def text() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as found:
            return str(found.read().decode())

    scaler.turn_until(lambda: scaler.told)
    assert 'scalai_autoscale_job_silent{job="gpt"} 0.0' in text()
    path.unlink()
    scaler.turn()
    wait_until(lambda: 'job="gpt"' not in text(), "it is forgotten", every_s=0.5)
    metrics.close()


def test_a_lease_says_that_a_job_has_ended_and_that_it_goes_on(
    open_line: OpenLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anybody holds it, the job waits; so does one that was over before, and one whose lease
    nobody has renewed. While a lost coordinator's lease is fresh, the job may run."""
    lease, token = f"file:{tmp_path / 'lease'}", tmp_path / "token"
    (tmp_path / "lease").mkdir()
    token.write_text(SECRET)
    monkeypatch.setattr(coordinator_line, "TOKEN", job_key(SECRET, "j").encode())
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    text = f'job = "j"\nlease = "{lease}"\ntoken_file = "{token}"\ndevices = [1, 4]'
    (jobs / "gpt.toml").write_text(text)
    register, later = open_register(lease, "j"), [0.0]
    monkeypatch.setattr(autoscale_jobs, "LeaseWatch", lambda of: LeaseWatch(of, lambda: later[0]))

    def until(state: State, why: str = "") -> None:
        def is_so() -> bool:
            known = watched.look()["gpt"]
            return known.state == state and why in f"{known.seen.ending} {known.seen.problem}"

        wait_until(is_so, lambda: f"{state}; {watched.look()}")

    watched = Jobs(jobs, None, Problems(), asks_sizes=False)
    until("waits", "nobody holds")
    register.claim(LeaseEntry(1, "127.0.0.1", 1, is_over=True))
    until("waits", "is over")
    register.claim(LeaseEntry(2, "127.0.0.1", 1))
    until("silent", "nobody answers there")
    later[0] += 2 * CLAIM_S
    until("waits", "nobody answers there")
    for term in (3, 4):
        served = with_four_workers(open_line())
        entry = LeaseEntry(term, *served.address)
        register.claim(entry)
        until("runs")
        served.close()
        until("silent")
        register.renew(replace(entry, is_over=True))
        until("ended", "is over")
    watched.close()


# ------------------------------------------------------------------ requests


class Noted(Slots):
    """Notes requests, and answers as the test says."""

    def __init__(self, is_engine: bool = False) -> None:
        self.is_engine = is_engine
        self.given = list[int]()
        self.error: ScalaiError | None = None

    def give(self, watch: JobWatch, devices: int, *, is_dry: bool) -> str:
        self.given.append(devices)
        if self.error is not None:
            raise self.error
        return "asked"


class Asking:
    """Requests for one job, whose devices and time are the test's."""

    def __init__(self, hand: Noted, folder: Path) -> None:
        path = folder / "gpt.toml"
        path.write_text("devices = [1, 8]")
        self.hand, self.file, self.now = hand, read_job(path), 0.0
        jobs: Any = {"gpt": None}
        self.requests = Requests(hand, jobs, Problems(), lambda: True, lambda *about: None)

    def known(self, devices: int) -> Known:
        status = {"workers": {"h": devices}, "phase": "running", "hosts": {"h": {"slots": 8}}}
        return Known(self.file, Seen(status=status, sizes=frozenset(range(1, 9))), "runs")

    def turn(self, target: int, devices: int, passes: float = 2.0) -> None:
        self.now += passes
        jobs = {"gpt": self.known(devices)}
        self.requests.settle(jobs, self.now)
        self.requests.pursue({"gpt": target}, jobs, 8, self.now)

    def turn_until(self, can_have: bool, target: int, passes: float) -> None:
        """Turns until four devices may be had, or not."""
        for _ in range(100):
            if self.requests.can_have(self.known(2), 4) == can_have:
                return
            self.turn(target, devices=2, passes=passes)
        raise AssertionError(f"never, until {self.now} s")


def test_a_growth_under_way_is_withdrawn_and_a_successor_asks_for_nothing(tmp_path: Path) -> None:
    asking = Asking(Noted(), tmp_path)
    asking.turn(4, devices=2)
    for _ in range(3):
        asking.turn(2, devices=2)
    assert asking.hand.given == [4, 2]
    successor = Asking(Noted(), tmp_path)
    successor.turn(2, devices=2)
    assert successor.hand.given == []


@pytest.mark.fault
@pytest.mark.parametrize("error", [PeerError("no answer"), ScalaiError("refused")])
def test_a_failed_request_is_not_repeated_at_once(error: ScalaiError, tmp_path: Path) -> None:
    asking = Asking(Noted(), tmp_path)
    asking.hand.error = error
    for _ in range(5):
        asking.turn(4, devices=2)
    assert asking.hand.given == [4]
    asking.turn(4, devices=2, passes=REPEAT_S)
    assert asking.hand.given == [4, 4]


def test_a_size_that_does_not_come_rests_longer_each_time(tmp_path: Path) -> None:
    asking, rests = Asking(Noted(is_engine=True), tmp_path), []
    for _ in range(3):
        asking.turn(4, devices=2)
        asking.turn_until(False, 4, GIVE_UP_S / 2)
        began = asking.now
        asking.turn_until(True, 2, REFUSED_S / 4)
        rests.append(asking.now - began)
    assert rests == [REFUSED_S, 2 * REFUSED_S, 4 * REFUSED_S]


def test_workers_that_fill_no_host_keep_all_of_their_hosts() -> None:
    """12 workers stay on two hosts of eight."""

    class Told(Hosts):
        def give(self, watch: JobWatch, devices: int, *, is_dry: bool) -> str:
            return str(self._hosts(devices))

    watch: Any = None
    assert [Told(8).give(watch, n, is_dry=True) for n in (4, 8, 12, 16)] == ["1", "1", "2", "2"]
