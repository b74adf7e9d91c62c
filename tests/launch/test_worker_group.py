"""When the workers of a round are forked, and when they start cold."""

import threading
from pathlib import Path
from typing import Any

import pytest

from scalai.core.worker_messages import Imports
from scalai.launch.agent import worker_group
from scalai.launch.agent.worker_group import WorkerGroups
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job import JobSpec
from support.wire_words import workers as wanted

DEADLINE_S = 60.0


class Workers:
    """Notes how its processes would be started."""

    def __init__(self) -> None:
        self.warm: list[bool] = []

    def start(self, place: Any, arguments: Any, *, warm: bool) -> None:
        self.warm.append(warm)


def test_nobody_waits_for_a_fork_server_that_still_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    imported, workers = threading.Event(), Workers()
    monkeypatch.setattr(worker_group, "warm_up", lambda order: None)
    monkeypatch.setattr(worker_group, "wait_until_warm", lambda: imported.wait(DEADLINE_S))
    monkeypatch.setattr(worker_group, "worker_arguments", lambda spec, command: [])
    spec = JobSpec.read(parse_options(["--nproc-per-node", "1", "script.py"]))
    groups = WorkerGroups(spec, tmp_path, lambda: workers)  # type: ignore[arg-type, return-value]  # a stand-in
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
