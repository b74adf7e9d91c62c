"""Of a failure it is told what kind it is."""

import pytest

from scalai.core.job.endings import (
    OUT_OF_DEVICE_MEMORY,
    OUT_OF_HOST_MEMORY,
    PEER_GONE,
    kind_of,
    rank_of,
)

pytestmark = pytest.mark.fault

NCCL = "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2074, unhandled cuda error"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("rank 3 was killed by SIGKILL", "killed by SIGKILL"),
        ("rank 3 was killed by SIGKILL (out of host memory: this cgroup's count of oom_kill rose "
         "by 1)", OUT_OF_HOST_MEMORY),
        ("rank 0: MemoryError: Unable to allocate 8 GiB", OUT_OF_HOST_MEMORY),
        ("rank 0: RuntimeError: DefaultCPUAllocator: can't allocate memory", OUT_OF_HOST_MEMORY),
        ("rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate", OUT_OF_DEVICE_MEMORY),
        ("rank 1 exited with 12", OUT_OF_DEVICE_MEMORY),
        ("rank 1 exited with 120", "exit 120"),
        ("rank 2: AcceleratorError: CUDA error: uncorrectable ECC error encountered",
         "CUDA error: uncorrectable ECC error"),
        ("rank 2: RuntimeError: CUDA error: an illegal memory access was encountered",
         "CUDA error: illegal memory access"),
        ("rank 2: RuntimeError: CUDA error: device-side assert triggered", "CUDA error"),
        (f"rank 5: {NCCL}", "NCCL error"),
        (f"rank 5: {NCCL} ncclRemoteError: remote process exited", PEER_GONE),
        ("rank 2: RuntimeError: [pair.cc:537] Read error: Connection reset by peer", PEER_GONE),
        ("rank 1 was killed by SIGSEGV", "segmentation fault"),
        ("rank 1 was killed by SIGBUS", "bus error (is the shared memory full?)"),
        ("rank 4: ValueError: no such file", "the script raised ValueError"),
        ("rank 4 exited with 1: ValueError: no such file", "the script raised ValueError"),
        ("rank 4: the script left with 7", "the script left with 7"),
        ("rank 4 exited with 1; rank 5 was killed by SIGKILL", "killed by SIGKILL"),
        ("its workers cannot be started: no room", "other"),
    ],
)  # fmt: skip
def test_what_is_told_of_a_failure_says_its_kind(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind


def test_the_rank_that_is_named_first_is_its_rank() -> None:
    assert rank_of("workers of host a failed: rank 12 exited with 1; rank 3 exited") == 12
    assert rank_of("no room") is None
