"""Standalone jobs of one machine do not meet, and jobs of one name do not mix."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.agents import SCALAI_RUN
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

TINY_JOB = Path(__file__).parents[1] / "support" / "tiny_job.py"
DEADLINE_S = 120.0


def start(folder: Path, name: str, *flags: str) -> subprocess.Popen[str]:
    config = folder / "elastic.toml"
    config.write_text("[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n")
    script = [str(TINY_JOB), "--steps", "100000", "--metrics", str(folder / f"{name}.jsonl")]
    return subprocess.Popen(
        [str(SCALAI_RUN), "--nproc-per-node", "1",
         "--store-dir", str(store_of(folder)), "--durable-dir", str(folder / "disk"),
         "--elastic", str(config), *flags, *script],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def store_of(folder: Path) -> Path:
    return Path(f"/dev/shm/scalai-test-{os.getpid()}-{folder.name}")


def steps(path: Path) -> list[dict[str, int]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


@pytest.mark.turns
def test_a_second_standalone_job_runs_beside_the_first_and_each_leaves_nothing_in_memory(
    tmp_path: Path,
) -> None:
    jobs = {name: start(tmp_path, name, "--standalone") for name in ("one", "two")}
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not all(len(steps(tmp_path / f"{name}.jsonl")) > 5 for name in jobs):
            assert time.monotonic() < deadline, "the two jobs do not both train"
            assert all(job.poll() is None for job in jobs.values()), "a job has ended"
            time.sleep(0.05)
        for job in jobs.values():
            job.send_signal(signal.SIGTERM)
        for name, job in jobs.items():
            logged, _ = job.communicate(timeout=DEADLINE_S)
            assert (job.returncode, logged.count("--job standalone-")) == (75, 1), logged
            assert check_steps(steps(tmp_path / f"{name}.jsonl"))[0] == 1
        while list(store_of(tmp_path).iterdir()):
            assert time.monotonic() < deadline, list(store_of(tmp_path).rglob("*"))
            time.sleep(0.05)
    finally:
        for job in jobs.values():
            job.kill()
            job.wait(30)
        shutil.rmtree(store_of(tmp_path), ignore_errors=True)
