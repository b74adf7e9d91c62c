"""All known layouts, and the detection of a path's layout."""

import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scalai.converters.bounded import read_pointer, short_text
from scalai.converters.checkpoint import PARAM, USER, Checkpoint, CheckpointLayout, ReadOptions
from scalai.converters.dcp_layout import DcpLayout
from scalai.converters.deepspeed.plain_layout import DeepSpeedPlainLayout
from scalai.converters.deepspeed.tag_files import LATEST
from scalai.converters.deepspeed.universal_layout import SUFFIX, DeepSpeedUniversalLayout
from scalai.converters.deepspeed.zero_layout import DeepSpeedZeroLayout
from scalai.converters.foreign import foreign_text, torch_file_text
from scalai.converters.generation_layout import PARTS, GenerationLayout
from scalai.converters.megatron.fsdp_dtensor import FsdpDtensorLayout
from scalai.converters.megatron.local_files import LocalLayout
from scalai.converters.megatron.torch_dist import TorchDistLayout
from scalai.converters.megatron.torch_legacy import LAYER_WISE, TorchLegacyLayout
from scalai.converters.opening import check_opened
from scalai.converters.safetensors_index import INDEX, SINGLE, SafetensorsLayout
from scalai.converters.wrappers import find_wrapped
from scalai.core.errors import RefusedError, ScalaiError, UsageError, is_memory_short
from scalai.core.tensors.collection import split_name

LOCAL = LocalLayout()
LAYOUTS: Sequence[CheckpointLayout] = (
    GenerationLayout(),
    TorchDistLayout(),
    TorchLegacyLayout(),
    FsdpDtensorLayout(),
    LOCAL,
    DcpLayout(),
    *(DeepSpeedZeroLayout(stage) for stage in (1, 2, 3)),
    DeepSpeedPlainLayout(),
    DeepSpeedUniversalLayout(),
    SafetensorsLayout(),
)
"""In the order of detection."""

READ_ALONE = {LOCAL.name: TorchDistLayout().name}
"""Layouts that are not written, and those written by default in their place."""

_UNFIT = (
    ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RecursionError, TypeError,
    ValueError, struct.error,
)  # fmt: skip
"""Errors of readers at whole files with other content than expected."""


def layout_named(name: str) -> CheckpointLayout:
    """Return the layout of this name. Raises ``UsageError`` if there is none."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    names = ", ".join(layout.name for layout in LAYOUTS)
    raise UsageError(f"there is no layout {name!r}. Use one of: {names}.")


def find_layout(path: Path) -> CheckpointLayout | None:
    """Return the layout of ``path``; None: it has none."""
    return next((layout for layout in LAYOUTS if layout.find(path)), None)


def open_checkpoint(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Detect the layout of ``path`` by its files, and read its metadata.

    Raises:
        UsageError: There is no such path.
        RefusedError: It is of no known layout, or is refused by its layout's reader or by the
            checks of all (``opening``).
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist. Name a checkpoint's directory.")
    layout, note = find_layout(path), ""
    if layout is None:
        wrapped = _wrapped(path)
        if wrapped is None:
            raise RefusedError(unknown_text(path))
        inside, layout = wrapped
        note = f"found in {path}: {inside.relative_to(path)}" if inside != path else ""
        path = inside
    checkpoint = _read(layout, path, options or ReadOptions())
    return replace(checkpoint, notes=(note, *checkpoint.notes)) if note else checkpoint


def has_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, or a trainer's directory around one.

    Raises:
        RefusedError: It is around several.
    """
    return find_layout(path) is not None or _wrapped(path) is not None


def _wrapped(path: Path) -> tuple[Path, CheckpointLayout] | None:
    """Return the one checkpoint below a directory that is none, or the directory itself if it has
    hosts' local files; None: there is none, or the directory is known for something else.

    Raises:
        RefusedError: There are several.
    """
    if not path.is_dir() or foreign_text(path) or _lost_tag(path) or _no_index(path):
        return None
    found = find_wrapped(path, lambda of: getattr(find_layout(of), "name", None))
    if len(found) > 1 and set(found.values()) == {LOCAL.name}:
        return path, LOCAL
    if len(found) > 1:
        named = [f"{of.relative_to(path)} ({name})" for of, name in found.items()]
        more = f" and {len(named) - 8} more" if len(named) > 8 else ""
        raise RefusedError(
            f"{path} holds {len(found)} checkpoints: {', '.join(named[:8])}{more}. Name one of "
            "them."
        )
    return next(((of, layout_named(name)) for of, name in found.items()), None)


def unknown_text(path: Path) -> str:
    """Say that a path holds no checkpoint of a known layout, and its kind if that shows."""
    names = ", ".join(layout.name for layout in LAYOUTS)
    known = foreign_text(path)
    told = None if known is not None else _lost_tag(path) or _no_index(path)
    if told is not None:
        return f"{path} holds no checkpoint that can be read: {told}"
    known = known or torch_file_text(path)
    if known is not None:
        return f"{path} holds no checkpoint of a known layout ({names}). {known}."
    inside = sorted(entry.name for entry in path.iterdir())[:5] if path.is_dir() else []
    return (
        f"{path} holds no checkpoint of a known layout ({names}); it has {inside}. Name the "
        "directory that holds the files, or the one above with latest_checkpointed_iteration.txt."
    )


def _lost_tag(path: Path) -> str | None:
    """Name the missing files of a folder of DeepSpeed's tags; None: it is none."""
    folders = (entry.name for entry in path.glob("global_step[0-9]*") if entry.is_dir())
    tags = sorted(name for name in folders if not name.endswith(SUFFIX))
    named = read_pointer(path / LATEST) if path.is_dir() else None
    if not tags and not (named or re.match(r"global_step\d", path.name)):
        return None
    if named is None and tags:
        return f"there is no {LATEST} beside {', '.join(tags[:5])}. Name one of these folders."
    folder = path / named if named and "/" not in named else path
    if named and not folder.is_dir():
        return f"{LATEST} names {named!r}, which is not there (there are {tags[:5]}). Copy it too."
    return f"{folder} has no *_model_states.pt. Copy the missing files of the same save."


def _no_index(path: Path) -> str | None:
    files = sorted(entry.name for entry in path.glob("*.safetensors"))
    if not files or SINGLE in files:
        return None
    return (
        f"it has {', '.join(files[:3])} and neither {INDEX}, which says what is where, nor one "
        f"{SINGLE}. Copy the index too."
    )


def _read(layout: CheckpointLayout, path: Path, options: ReadOptions) -> Checkpoint:
    try:
        checkpoint = layout.read(path, options)
        if not (options.is_part and PARTS in checkpoint.values.extra):
            check_opened(checkpoint)
    except ScalaiError:
        raise
    except _UNFIT as error:
        if isinstance(error, OSError) and is_memory_short(error):
            raise
        if isinstance(error, MemoryError):  # a size in a damaged file causes it too
            raise RefusedError(short_text(path, error)) from error
        raise RefusedError(
            f"{path} does not hold what a checkpoint of the layout {layout.name} does "
            f"({type(error).__name__}: {error}). Use another checkpoint."
        ) from error
    kinds = {split_name(tensor.name)[0] for tensor in checkpoint.placed.collection.tensors}
    if checkpoint.values.framework == "megatron" and kinds <= {PARAM, USER}:
        note = "there is no optimizer's state in it: weights alone"
        beside = [*checkpoint.directory.glob(LAYER_WISE), *path.glob(LAYER_WISE)]
        if beside:
            note += f"; {beside[0]}, of a layer-wise optimizer, is not read"
        return replace(checkpoint, notes=(*checkpoint.notes, note))
    return checkpoint
