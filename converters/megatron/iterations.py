"""Where Megatron keeps an iteration: below a save directory, named by a tracker file.

Source: ``read_metadata`` and ``get_checkpoint_name`` of megatron/training/checkpointing.py
(0.16.1).
"""

import re
from pathlib import Path

from scalai.converters.bounded import read_pointer
from scalai.core.errors import RefusedError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def folder_of(iteration: int) -> str:
    """Return the name of an iteration's folder."""
    return f"iter_{iteration:07d}"


def find_below(path: Path, iteration: int | None) -> Path | None:
    """Return the folder of an iteration below a save directory; None: of the one that the tracker
    names."""
    name = _tracked(path) if iteration is None else folder_of(iteration)
    return path / name if name is not None and (path / name).is_dir() else None


def _tracked(path: Path) -> str | None:
    text = read_pointer(path / TRACKER)
    if text is None or text == RELEASE:
        return text
    return folder_of(int(text)) if re.fullmatch(r"[0-9]{1,18}", text) else None


def check_iteration(directory: Path, file: str, iteration: object) -> None:
    """Raise ``RefusedError`` where a file is of another iteration than its folder."""
    named = re.fullmatch(r"iter_(\d{7,18})", directory.name)
    if named and iteration != int(named[1]):
        raise RefusedError(
            f"{directory}: {file} is of iteration {iteration}, not {int(named[1])}. Files of two "
            "checkpoints are mixed: use another one. If the folder was renamed, name it back."
        )
