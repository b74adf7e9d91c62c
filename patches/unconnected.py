"""A script that trains although nothing connects it to the job: its state would be lost at the
first change, so it is told of at its first step."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from scalai.core.errors import ScalaiError
from scalai.core.messages.worker_messages import RankUnhooked
from scalai.runtime import session
from scalai.runtime.agent_folder import tell_agent

_BUILDERS = {"__init__", "initialize", "setup_model_and_optimizer", "load_checkpoint"}
"""Functions of frameworks that make steps of their own, on zeros, to have the optimizer make its
state (DeepSpeed's ZeRO optimizers do, and Megatron-core's distributed optimizer)."""
_FRAMEWORKS = {"deepspeed", "megatron", "accelerate", "transformers"}


def watch_first_step() -> None:
    """Tell the agent once an optimizer steps and ``Session.attach`` was not called. Costs nothing
    after the first step."""

    def stepped(*_: Any) -> None:
        job = session.current()
        is_attached = job is not None and job.is_attached
        if not is_attached and _is_building(sys._getframe(1)):
            return
        handle.remove()
        if not is_attached:
            with suppress(ScalaiError):  # the round is ending
                tell_agent(RankUnhooked)

    handle = register_optimizer_step_post_hook(stepped)


def _is_building(frame: FrameType) -> bool:
    """Whether a framework that builds its state has called from here."""
    return any(
        code.f_code.co_name in _BUILDERS
        and str(code.f_globals.get("__name__")).partition(".")[0] in _FRAMEWORKS
        for code in _stack(frame)
    )


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
