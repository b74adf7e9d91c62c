"""What a worker of an elastic job does before its script begins: signals, hooks of frameworks, and
the watch on its first step. It imports torch."""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from scalai.core.errors import ScalaiError
from scalai.core.messages.worker_messages import RankUnhooked
from scalai.patches.signals import keep_ending_children, leave_signals_to_the_agent
from scalai.runtime import session
from scalai.runtime.agent_folder import offer_stacks, tell_agent


@cache
def install() -> None:
    """Hook what is installed, once a process and its forks. Imports no framework: the hooks act
    when the script imports it."""
    if importlib.util.find_spec("megatron") is not None:
        from scalai.patches.megatron import training_hooks

        # Without CUDA megatron needs its stand-ins before it is imported, and nobody else does.
        if "megatron" in sys.modules:
            _emulate_cuda()
        else:
            sys.meta_path.insert(0, _EmulationFirst())
        training_hooks.install(session.elastic)
    if importlib.util.find_spec("deepspeed") is not None:
        from scalai.patches.deepspeed import engine_hooks

        engines = engine_hooks.install(session.elastic)
        if importlib.util.find_spec("accelerate") is not None:
            from scalai.patches.hugging_face import loop_hooks, trainer_hooks

            trainer = trainer_hooks.install(session.elastic, engines)
            loops = loop_hooks.install(session.elastic, engines)
            loops.is_another = lambda: trainer.has_trainer


class _EmulationFirst:
    """Finds nothing: turns CPU emulation on when ``megatron`` is looked for.

    It is a namespace package, which no hook behind an import is called for.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "megatron":
            sys.meta_path.remove(self)
            _emulate_cuda()
        return None


def _emulate_cuda() -> None:
    from scalai.patches.megatron import cpu_emulation

    cpu_emulation.install()
    cpu_emulation.install_training()


def prepare() -> None:
    """Answer the agent's signals, and watch whether the script is one that can be stopped.
    ``install`` then hooks the frameworks, once the path is that of the script."""
    offer_stacks()
    leave_signals_to_the_agent()
    keep_ending_children()
    watch_first_step()


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
