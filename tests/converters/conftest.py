"""Support for the tests of converters: one server of DeepSpeed jobs for all."""

import importlib.util
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.training import deepspeed_jobs
from support.training.deepspeed_jobs import Job, Runner, Saver, as_line

ANSWER_S = 280
"""Of the server: the time of a job, and of an operator that it compiles before."""


@pytest.fixture(scope="session")
def run_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Run a job; return what each rank saw."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install -c constraints.txt deepspeed")
    log = tmp_path_factory.mktemp("deepspeed") / "log"
    with open(log, "w") as errors:
        server = subprocess.Popen(
            [sys.executable, deepspeed_jobs.__file__], stdin=-1, stdout=-1, stderr=errors, text=True
        )

    def run(job: Job) -> list[dict[str, Any]]:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(as_line(job))
        server.stdin.flush()
        ready, *_ = select.select([server.stdout], [], [], ANSWER_S)
        line = server.stdout.readline() if ready else ""
        assert line, f"the server ended, or hangs:\n{log.read_text()[-3000:]}"
        ranks: list[dict[str, Any]] = json.loads(line)
        for rank, seen in enumerate(ranks):
            assert "error" not in seen, f"rank {rank}:\n{seen['error']}"
        return ranks

    with server:
        yield run
        server.kill()
        server.wait(30)


@pytest.fixture(scope="session")
def save(run_deepspeed: Runner, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    """Train, save, train on; once for equal jobs."""
    done: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def run(job: Job) -> tuple[Path, list[dict[str, Any]]]:
        if repr(job) not in done:
            directory = tmp_path_factory.mktemp("saved")
            done[repr(job)] = directory, run_deepspeed(replace(job, save=str(directory)))
        return done[repr(job)]

    return run
