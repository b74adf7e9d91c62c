"""Which frameworks are hooked when a job is elastic, before the script imports any of them."""

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType

from scalai.runtime import session


@cache
def install() -> None:
    """Hook what is installed, once a process and its forks. Imports no framework: the hooks act
    when the script imports it."""
    if importlib.util.find_spec("megatron") is not None:
        from scalai.patches.megatron import training as megatron_training

        # Without CUDA megatron needs its stand-ins before it is imported, and nobody else does.
        if "megatron" in sys.modules:
            _emulate_cuda()
        else:
            sys.meta_path.insert(0, _EmulationFirst())
        megatron_training.install(session.elastic)
    if importlib.util.find_spec("deepspeed") is not None:
        from scalai.patches.deepspeed import training as deepspeed_training

        engines = deepspeed_training.install(session.elastic)
        if importlib.util.find_spec("accelerate") is not None:
            from scalai.patches.accelerate import training as loop_training
            from scalai.patches.transformers import training as trainer_training

            trainer = trainer_training.install(session.elastic, engines)
            loops = loop_training.install(session.elastic, engines)
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
