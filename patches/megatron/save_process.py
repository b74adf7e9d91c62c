"""Ties the process of a rank's asynchronous saves to the rank.

It holds copies of tensors, and a killed rank cannot end it. Left alone, it would wait for the next
save for ever, or write on into a checkpoint of the next round.
"""

import multiprocessing
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from multiprocessing.managers import BaseManager
from multiprocessing.process import BaseProcess
from typing import Any

import wrapt

from scalai.runtime.processes import end_with

MCORE = "megatron.core.dist_checkpointing.strategies.async_utils"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
_UNTIED = "_untied_"
"""Prefix of the names of a caller's own loops."""


def install() -> None:
    """Tie the processes of both strategies to their rank, once these are imported."""
    wrapt.register_post_import_hook(_tie_mcore, MCORE)
    wrapt.register_post_import_hook(_tie_nvrx, NVRX)


@cache
def tie_children() -> None:
    """From now on end this process's multiprocessing forks with it (the writers of a save before
    0.17, the server of the queue of results), and spawned servers too."""
    wrapt.wrap_function_wrapper(BaseProcess, "_bootstrap", _begin_tied)
    wrapt.wrap_function_wrapper(BaseManager, "start", _start_tied)


def end_with_the_rank() -> None:
    """End this process, started by multiprocessing, with its parent."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with(parent.pid)


def mcore_loop(*arguments: Any) -> None:
    """Stand in for ``PersistentAsyncCaller.async_loop`` of megatron-core, in its process."""
    _run(MCORE, "async_loop", arguments)


def nvrx_loop(*arguments: Any) -> None:
    """Stand in for the one of nvidia-resiliency-ext."""
    _run(NVRX, "async_loop", arguments)


def nvrx_daemon_loop(*arguments: Any) -> None:
    """Stand in for ``async_loop_for_daemon_worker``."""
    _run(NVRX, "async_loop_for_daemon_worker", arguments)


def _run(module: str, name: str, arguments: tuple[Any, ...]) -> None:
    end_with_the_rank()
    tie_children()
    _emulate_without_cuda()
    caller = import_module(module).PersistentAsyncCaller
    loop: Callable[..., None] = getattr(caller, _UNTIED + name, None) or getattr(caller, name)
    loop(*arguments)


def _emulate_without_cuda() -> None:
    from scalai.patches.megatron import cpu_emulation

    cpu_emulation.install_training()


def _tie_mcore(module: Any) -> None:
    _replace(module.PersistentAsyncCaller, async_loop=mcore_loop)


def _tie_nvrx(module: Any) -> None:
    _replace(
        module.PersistentAsyncCaller,
        async_loop=nvrx_loop,
        async_loop_for_daemon_worker=nvrx_daemon_loop,
    )


def _replace(caller: Any, **loops: Callable[..., None]) -> None:
    for name, loop in loops.items():
        if hasattr(caller, name):
            setattr(caller, _UNTIED + name, staticmethod(getattr(caller, name)))
            setattr(caller, name, staticmethod(loop))


def _begin_tied(
    wrapped: Callable[..., int], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int:
    end_with(instance._parent_pid)
    return wrapped(*args, **kwargs)


def _start_tied(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    if args or kwargs:
        return wrapped(*args, **kwargs)
    return wrapped(initializer=end_with_the_rank)
