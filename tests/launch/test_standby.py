"""When the next round's workers may be built beside the present ones."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalai.launch.agent.standby import obstacle, offer, private_bytes
from scalai.store.pool import available_memory

MEGABYTES = 200


@pytest.fixture
def worker() -> Iterator[int]:
    """Give a process that has some memory of its own."""
    script = f"block = bytearray(b'1') * ({MEGABYTES} << 20); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_workers_are_built_where_memory_holds_them_beside_the_present_ones(worker: int) -> None:
    used = private_bytes(worker)
    assert MEGABYTES << 20 <= used < (MEGABYTES + 50) << 20
    assert obstacle("auto", 2, [worker, os.getpid()], on_devices=False) is None
    many = available_memory() // used + 1
    found = obstacle("auto", many, [worker], on_devices=False)
    assert found is not None and f"{many} workers may take" in found and "GB are free" in found
    assert obstacle("always", many, [worker], on_devices=False) is None


def test_device_memory_is_not_asked_to_hold_two_models_unless_somebody_says_so(worker: int) -> None:
    found = obstacle("auto", 1, [worker], on_devices=True)
    assert found is not None and "standby = 'always'" in found
    assert obstacle("always", 1, [worker], on_devices=True) is None


def test_a_host_on_which_nothing_trains_has_nothing_to_lose() -> None:
    assert obstacle("auto", 10**9, [], on_devices=False) is None
    assert obstacle("auto", 10**9, [2**22 + 1], on_devices=False) is None  # it has just died
    assert obstacle("never", 1, [], on_devices=False) is not None


def test_what_is_on_standby_is_the_first_to_go_when_memory_runs_out(worker: int) -> None:
    adjustment = Path(f"/proc/{worker}/oom_score_adj")
    before = adjustment.read_text()
    offer([worker, 2**22 + 1], is_standby=True)
    assert adjustment.read_text().strip() == "1000" and before.strip() != "1000"
    offer([worker], is_standby=False)
    assert adjustment.read_text() == before


def test_what_a_worker_has_started_for_its_saves_is_offered_and_taken_back_with_it() -> None:
    script = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert process.pid in pids
        adjustments = [Path(f"/proc/{pid}/oom_score_adj") for pid in pids]
        before = [path.read_text() for path in adjustments]
        offer([process.pid], is_standby=True)
        assert [path.read_text().strip() for path in adjustments] == ["1000", "1000"]
        offer([process.pid], is_standby=False)
        assert [path.read_text() for path in adjustments] == before
        os.killpg(process.pid, signal.SIGKILL)
