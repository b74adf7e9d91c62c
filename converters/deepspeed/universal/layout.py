"""DeepSpeed's universal checkpoints: a folder per parameter, for a job of any degree.

``ds_to_universal`` writes for the stages of its source: 1 and 2, or 3. Scalai writes for both.

Source: ``load_hp_checkpoint_state`` of deepspeed/checkpoint/universal_checkpoint.py and of
runtime/zero/stage3.py, ``load_hp_checkpoint_state_from_checkpoint_dir`` of
runtime/base_optimizer.py, and checkpoint/ds_to_universal.py, all of 0.19.8. The target's notes name
the values these loaders do not restore, or restore wrongly.
"""

from dataclasses import dataclass
from pathlib import Path

from scalai.converters.checkpoint import Checkpoint, ReadOptions, Target, WriteOptions
from scalai.converters.deepspeed.universal import writer
from scalai.converters.deepspeed.universal.files import find_universal
from scalai.converters.deepspeed.universal.reader import open_universal
from scalai.core.errors import RefusedError


@dataclass(frozen=True, slots=True)
class DeepSpeedUniversalLayout:
    """The layout ``deepspeed_universal``."""

    name: str = "deepspeed_universal"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with folders of parameters."""
        return find_universal(path, None) is not None

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the tag in ``latest_universal``."""
        directory = find_universal(path, options.iteration)
        if directory is None:
            raise RefusedError(
                f"{path} holds no universal checkpoint of step {options.iteration}. Name another "
                "--iteration."
            )
        return open_universal(directory, options).read()

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> Target:
        """Lay out a tag and ``latest_universal``. Degrees do not matter."""
        return writer.lay_out(source, options)
