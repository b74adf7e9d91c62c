"""Workers that are forked warm use devices, whatever the server asks of devices as it imports."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

AGENT = """
import sys
from multiprocessing import get_context
from pathlib import Path

from scalai.core.messages.worker_messages import Imports
from scalai.launch.agent.torch_elastic import wait_until_warm, warm_up
from scalai.launch.agent.worker_group import write_preload

import as_imported

if __name__ == "__main__":
    folder, modules = Path(sys.argv[1]), sys.argv[2:]
    warm_up(str(write_preload(folder / "preload.json", Imports(tuple(modules), tuple(sys.path)))))
    wait_until_warm()
    process = get_context("forkserver").Process(target=as_imported.use)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
USE = """
def use():
    import torch
    assert torch.ones(3, device="cuda").sum().item() == 3
"""
ASKS = "import torch\nassert torch.cuda.is_available() and torch.cuda.device_count()\n"
BEGINS = "import torch\ntorch.zeros(1, device='cuda')\n"


def run(folder: Path, imported: str, *modules: str) -> "subprocess.CompletedProcess[str]":
    (folder / "as_imported.py").write_text(USE)
    (folder / "at_first.py").write_text(imported)
    (folder / "agent.py").write_text(AGENT)
    command = [sys.executable, str(folder / "agent.py"), str(folder), "at_first", *modules]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("modules", [(), ("megatron.core",), ("deepspeed",)])
def test_forks_of_what_asks_for_devices_use_them(tmp_path: Path, modules: tuple[str, ...]) -> None:
    for module in modules:
        pytest.importorskip(module)
    done = run(tmp_path, ASKS, *modules)
    assert done.returncode == 0, done.stderr


def test_a_server_that_begins_cuda_is_not_taken(tmp_path: Path) -> None:
    done = run(tmp_path, BEGINS)
    assert done.returncode and "uses CUDA as it is imported" in done.stderr, done.stderr
