"""Kinds of worker failures, from the process's end, the script's exception, and the kernel's
counters."""

import re

OUT_OF_HOST_MEMORY = "out of host memory"
OUT_OF_DEVICE_MEMORY = "out of device memory"
PEER_GONE = "a collective failed: another rank may have gone"

RUN_AGAIN = "Megatron-LM asks to run the step again, to tell a fault of the device from the job's"
"""Exit code 16 of its rerun state machine (megatron-core 0.19, rerun_state_machine.py)."""
WRONG_RESULT = "Megatron-LM computed a step twice on this rank, with two results"
"""Exit code 17 of the same, on the rank that found it; the others end with 17 too."""

_LEFT = r"the script left with (?:(?!; rank \d).)*"
_KINDS = (
    (rf"{OUT_OF_HOST_MEMORY}|\bMemoryError|CPUAllocator: can't allocate", OUT_OF_HOST_MEMORY),
    (r"OutOfMemoryError|CUDA out of memory|exited with 12\b", OUT_OF_DEVICE_MEMORY),
    (r"uncorrectable ECC|ECC error", "CUDA error: uncorrectable ECC error"),
    (r"illegal memory access", "CUDA error: illegal memory access"),
    (
        r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited"
        r"|ncclRemoteError|a collective of NCCL's has failed",
        PEER_GONE,
    ),
    (r"\bnccl\w*Error|NCCL (WARN|error)|NCCL communicator was aborted", "NCCL error"),
    (r"CUDA error|cudaError|CUBLAS_STATUS|CUDNN_STATUS", "CUDA error"),
    (r"killed by SIGSEGV", "segmentation fault"),
    (r"killed by SIGBUS", "bus error (is the shared memory full?)"),
    (r"killed by SIGABRT", "aborted (a check of a library failed; its output says which)"),
    (r"No space left on device", "no space left on device"),
    (re.escape(RUN_AGAIN), "a step to be run again"),
    (re.escape(WRONG_RESULT), "a wrong result"),
)


def kind_of(reason: str) -> str:
    """The kind of a failure.

    Args:
        reason: Failure text, such as ``rank 3 was killed by SIGKILL`` or ``rank 1: RuntimeError:
            CUDA error: ...``.

    Returns:
        One of few texts; an unknown failure is named by its signal, exception or exit code.
    """
    for pattern, kind in _KINDS:
        if re.search(pattern, reason):
            return kind
    if found := re.search(r"was killed by (SIG\w+)", reason):
        return f"killed by {found[1]}"
    if found := re.search(rf"rank \d+: ({_LEFT}|[A-Za-z_][\w.]*)", reason):
        told = found[1]
        return told if told.startswith("the script") else f"the script raised {told}"
    if found := re.search(r"exited with (\d+)", reason):
        return f"exit {found[1]}"
    return "other"


def rank_of(reason: str) -> int | None:
    """The first rank named in ``reason``; None: none."""
    found = re.search(r"\brank (\d+)", reason)
    return None if found is None else int(found[1])
