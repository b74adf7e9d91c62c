"""When the workers of a round are forked, and when they start cold."""

import threading
from pathlib import Path
from typing import Any

import pytest

from scalai.launch import crew
from scalai.launch.crew import Crews
from scalai.launch.flags import parse_options
from scalai.launch.job import JobSpec

DEADLINE_S = 60.0
COMMAND = {
    "round": 1, "group_rank": 0, "group_world_size": 1, "first_rank": 0, "local_world_size": 1,
    "world_size": 1, "master_addr": "127.0.0.1", "master_port": 1, "degrees": {},
    "micro_batch_size": None,
}  # fmt: skip


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
    monkeypatch.setattr(crew, "warm_up", lambda order: None)
    monkeypatch.setattr(crew, "wait_until_warm", lambda: imported.wait(DEADLINE_S))
    monkeypatch.setattr(crew, "worker_arguments", lambda spec, command: [])
    spec = JobSpec.read(parse_options(["--nproc-per-node", "1", "script.py"]))
    crews = Crews(spec, tmp_path, lambda: workers)  # type: ignore[arg-type, return-value]  # a stand-in
    beside: list[threading.Thread] = []

    def run_beside(work: Any) -> None:
        beside.append(threading.Thread(target=work, daemon=True))
        beside[-1].start()

    crews.start(COMMAND)
    crews.warm_up({"modules": [], "sys_path": []}, run_beside)
    crews.start({**COMMAND, "round": 2})
    imported.set()
    beside[0].join(DEADLINE_S)
    crews.start({**COMMAND, "round": 3})
    assert workers.warm == [False, False, True]
