"""DeepSpeed's checkpoints without ZeRO (stage 0): data-parallel ranks are equal and share one file.

Source: ``_common_checkpoint_state`` of deepspeed/runtime/engine.py, 0.19.8.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import Checkpoint, ReadOptions, Target, WriteOptions
from scalai.converters.deepspeed.files import TagFiles, find_tag, list_files
from scalai.converters.deepspeed.plain import writer
from scalai.converters.deepspeed.plain.reader import PlainReader
from scalai.converters.deepspeed.reading.grid import Grid
from scalai.converters.deepspeed.reading.model import ModelStates
from scalai.core.errors import RefusedError

FILE = "mp_rank_00_model_states.pt"
_NEEDED = ("module", "optimizer", "global_steps", "dp_world_size")


@dataclass(frozen=True, slots=True)
class DeepSpeedPlainLayout:
    """The layout ``deepspeed_zero0``."""

    name: str = "deepspeed_zero0"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with a model file and without ZeRO's optimizer files."""
        directory = find_tag(path, None)
        if directory is None or (directory / "zero").exists():
            return False
        return (directory / FILE).is_file() and not any(directory.glob("*zero_pp_rank_*"))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the tag in ``latest``."""
        directory = find_tag(path, options.iteration)
        if directory is None:
            raise RefusedError(
                f"{path} holds no tag global_step{options.iteration}. Name another --iteration."
            )
        tag = list_files(directory)
        grid = Grid.of(tag, options)

        def read_model(files: TagFiles, layers: Any, shared: Any) -> ModelStates:
            return ModelStates.read(
                directory,
                files.model,
                is_stage_3=False,
                trust=options.trust_pickle,
                needed=_NEEDED,
                layers=layers,
                shared=shared,
                tag=tag,
            )

        states = [
            PlainReader(model, options.trust_pickle, options.order).read()
            for _, model in grid.models(read_model)
        ]
        return grid.unite(self.name, states, is_split=False)

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> Target:
        """Lay out a tag and ``latest``, for ``engine.load_checkpoint``."""
        return writer.lay_out(source, options)
