"""Has all workers of a job on one device talk by NCCL, as hosts with a device each would: put this
folder on ``PYTHONPATH``.

NCCL refuses two ranks on one device of one host. It tells hosts apart by ``NCCL_HOSTID``, and takes
sockets between them.
"""

import os
from collections.abc import Callable
from typing import Any

import wrapt


def of_the_first(of_any: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a device that takes the first one for any number."""

    import torch

    def call(*given: Any) -> Any:
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"  # a fork's is its own
        return of_any(*(0 if isinstance(each, int | torch.device) else each for each in given))

    return call


def patch_torch(cuda: Any) -> None:
    cuda.set_device = of_the_first(cuda.set_device)


def patch_deepspeed(module: Any) -> None:
    accelerator = module.CUDA_Accelerator
    for name in ("device", "device_name"):
        setattr(accelerator, name, of_the_first(getattr(accelerator, name)))


wrapt.register_post_import_hook(patch_torch, "torch.cuda")
wrapt.register_post_import_hook(patch_deepspeed, "deepspeed.accelerator.cuda_accelerator")
