"""Checkpoints in the directories of trainers around a framework, found by content.

    global_step_10/actor/dist_ckpt/  huggingface/      verl: torch_dist; weights, or a tokenizer
    global_step_10/policy/                             SkyRL: torch_dist, with a tokenizer
    checkpoint-10/iter_0000010/                        ms-swift: with a tracker file
    <experiment>/<trial>/.../                          AReaL: dcp, or torch_dist

Source: verl/utils/megatron_utils.py, skyrl/backends/skyrl_train/distributed/megatron,
swift/megatron/utils/megatron_lm_utils.py, areal/engine/megatron_utils/checkpointer.py (2026-08).
"""

import re
from collections.abc import Callable
from pathlib import Path

from scalai.converters.bounded import read_pointer

DEPTH = 4
"""Levels below the wrapper's directory: step, model, format, iteration."""
MAX_FOLDERS = 2000

_SAVE = re.compile(r"(?:global_?step_?|checkpoint-|step[-_]|iter_)(\d{1,18})")
_TRACKERS = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")
_OF_FRAMEWORK = re.compile(r"(?:global_step|iter_|step-)\d+|generation-\d+")
"""Folders that a framework finds by a pointer beside them: without it, one must be named."""


def find_wrapped(path: Path, is_checkpoint: Callable[[Path], str | None]) -> dict[Path, str]:
    """Return the checkpoints below a directory, with their layouts; weights for Hugging Face only
    where there is nothing else.

    Args:
        is_checkpoint: Name of a directory's layout; None: it has none.
    """
    found: dict[Path, str] = {}
    level, looked = [path], 0
    for _ in range(DEPTH):
        below = [entry for folder in level for entry in _folders(folder)]
        below = below[: MAX_FOLDERS - looked]
        looked += len(below)
        named = {entry: is_checkpoint(entry) for entry in below}
        found |= {entry: name for entry, name in named.items() if name is not None}
        level = [entry for entry, name in named.items() if name is None]
    whole = {entry: name for entry, name in found.items() if name != "safetensors"}
    return whole or found


def _folders(folder: Path) -> list[Path]:
    """Return the folders to look into; of a trainer's saves, only that of its tracker file."""
    inside = sorted(
        entry for entry in folder.iterdir()
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith(".")
    )  # fmt: skip
    inside = [entry for entry in inside if not _OF_FRAMEWORK.fullmatch(entry.name)]
    steps = {read_pointer(folder / name) for name in _TRACKERS} - {None}
    numbers = {int(step) for step in steps if step and re.fullmatch(r"\d{1,18}", step)}
    tracked = [entry for entry in inside if step_of(entry.name) in numbers]
    others = [entry for entry in inside if step_of(entry.name) is None]
    return [*tracked, *others] if tracked else inside


def step_of(name: str) -> int | None:
    """Return the step in the name of a save's folder; None: there is none."""
    match = _SAVE.fullmatch(name)
    return int(match[1]) if match else None


def step_above(directory: Path) -> int | None:
    """Return the step in the name of the nearest folder at or above a checkpoint's."""
    names = (of.name for of in (directory, *directory.parents[:3]))
    return next((step for step in map(step_of, names) if step is not None), None)
