"""A rank whose partner dies in a collective of NCCL's lives on, and can write what it has."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scalai.launch.agent.worker_group import NCCL_ERRORS
from support.ports import free_port

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(200),
]

RANK = """
import sys, torch, torch.distributed as dist
from scalai.runtime import emergency_writer

torch.cuda.set_device(0)
dist.init_process_group("nccl")
values = torch.ones(1000, device="cuda")
dist.all_reduce(values)
print(values[0].item(), flush=True)
if dist.get_rank() == 0:
    emergency_writer.watch_collectives(lambda: True, lambda reason: print(reason, flush=True))
    dist.all_reduce(values)
    print(values[0].item(), flush=True)  # hangs: its partner waits for its end
else:
    sys.stdin.readline()
"""
WAITS_S = 20.0


def test_it_says_so_and_outlives_its_partner_by_more_than_a_silent_host_is_given(
    tmp_path: Path,
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    port = str(free_port("127.0.0.1"))
    ranks = list["subprocess.Popen[str]"]()
    for number in range(2):
        environment = {
            **os.environ, NCCL_ERRORS[0]: "0", "RANK": str(number), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"host-{number}",
            "NCCL_SOCKET_IFNAME": "=lo",
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(tmp_path / "rank.py")], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
        )  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "2.0\n"
        time.sleep(2.0)  # until its device waits
        ranks[1].send_signal(signal.SIGKILL)
        ranks[1].wait(20)
        assert ranks[0].stdout is not None
        assert "a collective of NCCL's has failed" in ranks[0].stdout.readline()
        end = time.monotonic() + WAITS_S
        while time.monotonic() < end:
            assert ranks[0].poll() is None, "it was ended by its failed collective"
            time.sleep(0.2)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(20)
