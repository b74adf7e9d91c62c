"""CPU emulation: CUDA's names answered by a CPU, in processes of their own."""

import subprocess
import sys

import pytest
import torch

from support.training.worker_pool import WorkerPool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA: nothing to shim")

SAID = "event=cpu_emulation active=true"
IMPORT = "import sys, torch, types\nfrom scalai.patches.megatron import cpu_emulation\n"


@pytest.mark.parametrize(
    ("program", "times"),
    [
        (
            "assert cpu_emulation.install() and cpu_emulation.install()\n"
            "assert cpu_emulation.install_training()\n"
            "assert not torch.cuda.is_available()\n"
            "x = torch.zeros(2, device='cuda', pin_memory=True).cuda().to('cuda:0')\n"
            "assert x.device.type == 'cpu' and x.type() == 'torch.cuda.FloatTensor'\n"
            "torch.cuda.manual_seed(5); a = torch.rand(1); torch.manual_seed(5)\n"
            "assert torch.equal(a, torch.rand(1))\n"
            "assert not [name for name in sys.modules if name.startswith('megatron.core')]\n",
            1,
        ),
        (
            "torch.cuda.is_available = lambda: True\n"
            "before = torch.zeros, torch.cuda.current_device, torch.Tensor.type\n"
            "assert not cpu_emulation.install() and not cpu_emulation.install_training()\n"
            "assert before == (torch.zeros, torch.cuda.current_device, torch.Tensor.type)\n",
            0,
        ),
        (
            "sys.modules['megatron.core.tensor_parallel.random'] = types.ModuleType('random')\n"
            "try:\n    cpu_emulation.install()\n"
            "except Exception as error:\n"
            "    assert type(error).__name__ == 'RefusedError'\n"
            "    assert 'before megatron is imported' in str(error)\n"
            "else:\n    raise AssertionError('not refused')\n",
            0,
        ),
    ],
    ids=["on once, said, without an import", "with CUDA nothing is touched", "before megatron"],
)
def test_it_is_on_once_before_megatron_and_not_with_cuda(program: str, times: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT + program],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAID) == times


@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 1, 2], [0, 4, 1]])
def test_parts_of_unequal_sizes_are_gathered_and_scattered(
    pool: WorkerPool, sizes: list[int]
) -> None:
    answers = pool.run("megatron_checks:unequal_parts", [(sizes,)] * len(sizes))
    first = 0
    for (gathered, mine), size in zip(answers, sizes, strict=True):
        assert gathered == [rank + 1 for rank, count in enumerate(sizes) for _ in range(count)]
        assert mine == [len(sizes) * value for value in range(2 * first, 2 * (first + size))]
        first += size
