"""CPU emulation: CUDA's names answered by a CPU, in processes of their own."""

import subprocess
import sys

import pytest
import torch

from support.training.worker_pool import WorkerPool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA: nothing to shim")

SAID = "event=cpu_emulation active=true"


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_is_on_once_and_says_so() -> None:
    done = run(
        "from scalai.patches.megatron import cpu_emulation\n"
        "assert cpu_emulation.install() and cpu_emulation.install()\n"
        "assert cpu_emulation.install_training()\n"
        "import torch\n"
        "assert not torch.cuda.is_available()\n"
        "x = torch.zeros(2, device='cuda', pin_memory=True).cuda().to('cuda:0')\n"
        "assert x.device.type == 'cpu' and x.type() == 'torch.cuda.FloatTensor'\n"
        "torch.cuda.manual_seed(5); a = torch.rand(1); torch.manual_seed(5)\n"
        "assert torch.equal(a, torch.rand(1))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAID) == 1


def test_it_has_to_come_before_megatron() -> None:
    done = run(
        "import sys, types\n"
        "sys.modules['megatron.core.tensor_parallel.random'] = types.ModuleType('random')\n"
        "from scalai.patches.megatron import cpu_emulation\n"
        "cpu_emulation.install()\n"
    )
    assert "RefusedError" in done.stderr and "before megatron is imported" in done.stderr


def test_with_cuda_nothing_is_touched() -> None:
    done = run(
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "before = torch.zeros, torch.cuda.current_device, torch.Tensor.type\n"
        "from scalai.patches.megatron import cpu_emulation\n"
        "assert not cpu_emulation.install() and not cpu_emulation.install_training()\n"
        "assert before == (torch.zeros, torch.cuda.current_device, torch.Tensor.type)\n"
    )
    assert done.returncode == 0, done.stderr
    assert SAID not in done.stderr


def test_importing_the_package_imports_no_megatron() -> None:
    done = run(
        "import sys\n"
        "from scalai.patches.megatron import cpu_emulation\n"
        "cpu_emulation.install()\n"
        "assert not [name for name in sys.modules if name.startswith('megatron.core')]\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 1, 2], [0, 4, 1]])
def test_parts_of_unequal_sizes_are_gathered_and_scattered(
    pool: WorkerPool, sizes: list[int]
) -> None:
    answers = pool.run("gloo_checks:unequal_parts", [(sizes,)] * len(sizes))
    first = 0
    for (gathered, mine), size in zip(answers, sizes, strict=True):
        assert gathered == [rank + 1 for rank, count in enumerate(sizes) for _ in range(count)]
        assert mine == [len(sizes) * value for value in range(2 * first, 2 * (first + size))]
        first += size
