"""When the workers of a round are forked, and when they start cold."""

import threading
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import RefusedError
from scalai.core.messages.worker_messages import Imports
from scalai.launch.agent import worker_group
from scalai.launch.agent.extension_locks import WorkersLocks
from scalai.launch.agent.torch_elastic import Placement
from scalai.launch.agent.worker_group import NCCL_ERRORS, WorkerGroups
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from support.wire_words import workers as wanted

DEADLINE_S = 60.0
GPT = "pretrain_gpt.py --micro-batch-size 1 --num-attention-heads 4 --num-layers 4"


class Workers:
    """Notes how its processes would be started."""

    def __init__(self) -> None:
        self.warm: list[bool] = []
        self.places: list[Placement] = []

    def pids(self) -> dict[int, int]:
        return {}

    def poll(self) -> None:
        return None

    def start(self, place: Placement, arguments: Any, *, warm: bool) -> None:
        self.warm.append(warm)
        self.places.append(place)


def job(*flags: str, script: str = "script.py") -> JobSpec:
    return JobSpec.read(parse_options(["--nproc-per-node", "1", *flags, *script.split()]))


@pytest.mark.fault
def test_nobody_waits_for_a_fork_server_that_still_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    imported, workers = threading.Event(), Workers()
    monkeypatch.setattr(worker_group, "warm_up", lambda order: None)
    monkeypatch.setattr(worker_group, "wait_until_warm", lambda: imported.wait(DEADLINE_S))
    monkeypatch.setattr(worker_group, "worker_arguments", lambda spec, command: [])
    groups = WorkerGroups(job(), tmp_path, lambda: workers)  # type: ignore[arg-type, return-value]  # a stand-in
    beside: list[threading.Thread] = []

    def run_beside(work: Any) -> None:
        beside.append(threading.Thread(target=work, daemon=True))
        beside[-1].start()

    groups.start(wanted())
    groups.warm_up(Imports((), ()), run_beside)
    groups.start(wanted(2))
    imported.set()
    beside[0].join(DEADLINE_S)
    groups.start(wanted(3))
    assert workers.warm == [False, False, True]


def test_a_server_whose_forks_cannot_use_devices_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RefusedError("no fork can use CUDA")

    tmp_path.chmod(0o700)
    workers = Workers()
    monkeypatch.setattr(worker_group, "warm_up", lambda order: None)
    monkeypatch.setattr(worker_group, "wait_until_warm", refuse)
    monkeypatch.setattr(worker_group, "worker_arguments", lambda spec, command: [])
    groups = WorkerGroups(job(), tmp_path, lambda: workers)  # type: ignore[arg-type, return-value]  # a stand-in
    groups.warm_up(Imports((), ()), lambda work: work())
    groups.start(wanted())
    assert workers.warm == [False] and "event=cold" in caplog.text


@pytest.mark.parametrize("given", [None, *NCCL_ERRORS])
def test_workers_of_an_elastic_job_outlive_a_collective_that_fails(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a person has said what torch does then."""
    for name in NCCL_ERRORS:
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(given, "1")
    tmp_path.chmod(0o700)
    workers = Workers()
    monkeypatch.setattr(worker_group, "worker_arguments", lambda spec, command: [])
    config = tmp_path / "elastic.toml"
    config.write_text('[degrees]\n1 = "tp1"\n')
    for spec in (job("--elastic", str(config)), job()):
        groups = WorkerGroups(spec, tmp_path, lambda: workers)  # type: ignore[arg-type, return-value]  # a stand-in
        groups.start(wanted())
    elastic, plain = (place.environment for place in workers.places)
    assert elastic.get(NCCL_ERRORS[0]) == ("0" if given is None else None)
    assert NCCL_ERRORS[0] not in plain, "nobody writes the state of a plain job"


@pytest.mark.fault
def test_forks_see_the_devices_that_their_agent_sees_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    workers = Workers()
    monkeypatch.setattr(worker_group, "worker_arguments", lambda spec, command: [])
    groups = WorkerGroups(job(), tmp_path, lambda: workers)  # type: ignore[arg-type, return-value]  # a stand-in
    for number, devices in enumerate([None, "GPU-aa,GPU-bb", "GPU-bb"], 1):
        if devices is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        groups.start(wanted(number))
    found = [place.environment.get("CUDA_VISIBLE_DEVICES") for place in workers.places]
    assert found == [None, "GPU-aa,GPU-bb", "GPU-bb"]


@pytest.mark.parametrize(("script", "tells"), [("script.py", True), (GPT, False)])
def test_a_job_that_builds_no_extension_tells_of_no_others_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, tells: bool
) -> None:
    tmp_path.chmod(0o700)
    told: list[bool] = []
    monkeypatch.setattr(worker_group, "worker_arguments", lambda spec, command: [])
    monkeypatch.setattr(WorkersLocks, "tell_of_waits", lambda locks: told.append(True))
    groups = WorkerGroups(job(script=script), tmp_path, Workers)  # type: ignore[arg-type]  # a stand-in
    groups.start(wanted()).poll()
    assert bool(told) == tells
