"""Turn CPU emulation on: which shims are applied, and when."""

import logging
import sys
from functools import cache

import torch

from scalai.core.errors import RefusedError
from scalai.patches.megatron.cpu_emulation import cuda, framework, gloo, stubs

log = logging.getLogger(__name__)
_CAPTURES_CUDA = "megatron.core.tensor_parallel.random"
"""This module binds functions of ``torch.cuda`` by name when it is imported."""


@cache
def install() -> bool:
    """Make ``megatron.core`` run on the CPU. Call it before megatron is imported; twice is fine.

    What megatron itself needs is patched when its modules are imported, so this imports no
    megatron, and a checkout that is put on ``sys.path`` later is served too.

    Returns:
        True in CPU emulation; False where CUDA is there and nothing was touched.

    Raises:
        RefusedError: megatron was imported first and holds on to the real ``torch.cuda``.
    """
    if torch.cuda.is_available():
        log.info("event=cpu_emulation active=false reason=cuda-available")
        return False
    if _CAPTURES_CUDA in sys.modules:
        raise RefusedError(
            "CPU emulation has to start before megatron is imported, but megatron.core is "
            "already there. Call scalai.patches.megatron.cpu_emulation.install() at the top of the "
            "script."
        )
    stubs.install()
    cuda.install()
    gloo.install()
    framework.install()
    log.warning(
        "event=cpu_emulation active=true reason=no-cuda detail='CUDA calls run on the CPU, "
        "torch.compile is off, collectives need gloo: for tests and demonstrations'"
    )
    return True


@cache
def install_training() -> bool:
    """Make ``megatron.training`` (Megatron-LM's scripts) run on the CPU too, after ``install``.

    Returns:
        True in CPU emulation; False where CUDA is there and nothing was touched.
    """
    if not install():
        return False
    framework.install_training()
    return True
