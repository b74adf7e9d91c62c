"""DeepSpeed's checkpoints without ZeRO (stage 0): every rank is equal, and one file holds all.

Source: ``_common_checkpoint_state`` of deepspeed/runtime/engine.py, 0.19.8.
"""

from dataclasses import dataclass
from pathlib import Path

from scalai.converters import deepspeed_plain_writer
from scalai.converters.checkpoint import Checkpoint, ReadOptions, Target, WriteOptions
from scalai.converters.deepspeed_files import find_tag
from scalai.converters.deepspeed_model import ModelStates
from scalai.converters.deepspeed_plain_reader import PlainReader
from scalai.core.errors import RefusedError

FILE = "mp_rank_00_model_states.pt"
_NEEDED = ("module", "optimizer", "global_steps", "dp_world_size")


@dataclass(frozen=True, slots=True)
class DeepSpeedPlainLayout:
    """The layout ``deepspeed_zero0``."""

    name: str = "deepspeed_zero0"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with one file of the model and none of an optimizer."""
        directory = find_tag(path, None)
        if directory is None or (directory / "zero").exists():
            return False
        return (directory / FILE).is_file() and not any(directory.glob("*_optim_states.pt"))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the one that ``latest`` names."""
        directory = find_tag(path, options.iteration)
        if directory is None:
            raise RefusedError(
                f"{path} holds no tag global_step{options.iteration}. Name another --iteration."
            )
        others = sorted(p.name for p in directory.glob("*_states.pt") if p.name != FILE)
        if others:
            raise RefusedError(
                f"{directory} has {others[0]} beside {FILE}: model-parallel ranks and pipelines "
                "are not read yet."
            )
        model = ModelStates.read(
            directory, (FILE,), is_stage_3=False, trust=options.trust_pickle, needed=_NEEDED
        )
        return PlainReader(model).read()

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> Target:
        """Lay out a tag and ``latest``, as ``engine.load_checkpoint`` finds them."""
        return deepspeed_plain_writer.lay_out(source, options)
