"""All layouts that are known, and which of them a path holds."""

from collections.abc import Sequence
from pathlib import Path

from scalai.converters.checkpoint import Checkpoint, Layout, ReadOptions
from scalai.converters.deepspeed_plain import DeepSpeedPlainLayout
from scalai.converters.deepspeed_universal import DeepSpeedUniversalLayout
from scalai.converters.deepspeed_zero import DeepSpeedZeroLayout
from scalai.converters.generation import GenerationLayout
from scalai.converters.safetensors_index import SafetensorsLayout
from scalai.converters.torch_dist import TorchDistLayout
from scalai.converters.torch_legacy import TorchLegacyLayout
from scalai.core.errors import RefusedError, UsageError

LAYOUTS: Sequence[Layout] = (
    GenerationLayout(),
    TorchDistLayout(),
    TorchLegacyLayout(),
    *(DeepSpeedZeroLayout(stage) for stage in (1, 2, 3)),
    DeepSpeedPlainLayout(),
    DeepSpeedUniversalLayout(),
    SafetensorsLayout(),
)
"""In the order in which they are asked."""


def layout_named(name: str) -> Layout:
    """Return the layout of this name. Raises ``UsageError`` where there is none."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    names = ", ".join(layout.name for layout in LAYOUTS)
    raise UsageError(f"there is no layout {name!r}. Use one of: {names}.")


def find_layout(path: Path) -> Layout | None:
    """Return the layout of what ``path`` holds; None where it is of none."""
    return next((layout for layout in LAYOUTS if layout.find(path)), None)


def open_checkpoint(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Find out by the files which layout ``path`` holds, and read its metadata.

    Raises:
        UsageError: There is no such path.
        RefusedError: It is of no known layout, or its layout's reader refuses it.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist. Name a checkpoint's directory.")
    layout = find_layout(path)
    if layout is not None:
        return layout.read(path, options or ReadOptions())
    inside = sorted(entry.name for entry in path.iterdir())[:5] if path.is_dir() else []
    names = ", ".join(layout.name for layout in LAYOUTS)
    raise RefusedError(
        f"{path} holds no checkpoint of a known layout ({names}); it has {inside}. Name the "
        "directory that holds the files, or the one above with latest_checkpointed_iteration.txt."
    )
