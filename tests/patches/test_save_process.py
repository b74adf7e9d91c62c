"""What a rank starts for its saves ends with it, however the rank ends: the real processes of
megatron-core's persistent caller and of its queue of results."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

RANK = """
import json, os, sys, time
from scalai.patches.megatron import cpu_emulation, save_process
save_process.install()
cpu_emulation.install_training()
import torch.distributed
torch.distributed.get_rank = lambda: 0
from megatron.core.dist_checkpointing.strategies import async_utils
save_process.tie_children()
from slow_save import Slow

if __name__ == "__main__":
    from multiprocessing import get_context
    folder = sys.argv[1]
    queue = async_utils.AsyncCallsQueue(persistent=sys.argv[2] == "persistent")
    request = async_utils.AsyncRequest(Slow(folder), (0, None), [])
    queue.schedule_async_request(request)
    manager = get_context("spawn").Manager()
    print(json.dumps([os.getpid(), manager._process.pid]), flush=True)
    time.sleep(600)
"""
SLOW = """
import os, time
from multiprocessing import get_context

def write(folder, name):
    with open(os.path.join(folder, name), "w") as file:
        while True:
            file.write(f"{os.getpid()}\\n")
            file.flush()
            time.sleep(0.05)

class Slow:
    '''A save that never ends, half of it in a process of its own as megatron-core's to 0.16.'''

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, rank, buckets):
        get_context("fork").Process(target=write, args=(self.folder, "half")).start()
        write(self.folder, "other")
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until(is_so: "Iterator[bool]", what: str) -> None:
    deadline = time.monotonic() + 120
    while not next(is_so):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.fault
@pytest.mark.parametrize(
    "kind", ["persistent", pytest.param("temporal", marks=pytest.mark.campaign)]
)
def test_whoever_writes_a_save_ends_with_its_rank(kind: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "slow_save.py").write_text(SLOW)
    files = [tmp_path / "half", tmp_path / "other"]
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "rank.py"), str(tmp_path), kind],
        stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            rank, manager = json.loads(process.stdout.readline())

            def write() -> Iterator[bool]:
                while True:
                    yield all(file.is_file() and file.stat().st_size for file in files)

            wait_until(write(), "nobody writes")
            writers = [int(file.read_text().split()[0]) for file in files]
            assert len({*writers, rank, manager}) == 4 and all(map(is_alive, writers))
            os.kill(rank, signal.SIGKILL)

            def are_gone() -> Iterator[bool]:
                while True:
                    yield not any(map(is_alive, [*writers, manager]))

            wait_until(are_gone(), "what the rank had started lives on without it")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
