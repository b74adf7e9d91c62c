"""Bad checkpoints as cases: the damage to a whole one by small editors, and the words."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.checkpoint import REPORT
from scalai.converters.layouts import open_checkpoint
from support.damage import Damage

ITEMS = {
    "path": "files outside of the checkpoint: absolute, by .., by a link",
    "dtype": "an unknown dtype",
    "shape": "a negative or overflowing shape",
    "hole": "elements that nobody holds",
    "overlap": "elements that two hold who are no replicas",
    "duplicate": "one key or rank twice",
    "missing file": "a rank's file is missing",
    "extra file": "a file that belongs to no rank",
    "truncated": "a file that ends early",
    "bomb": "more bytes than the file has",
    "count": "more pieces or ranks than there can be",
    "digest": "content that is not what was noted",
    "iterations": "files of several iterations",
    "world": "another number of ranks by names than by metadata",
    "suspect": "tensors of nothing but NaN or denormal numbers: a warning",
    "run": "parts of several jobs",
    "version": "a version from the future",
    "setting": "a setting of the job that is of another kind",
    "code": "a pickle that would run something",
}


@dataclass(frozen=True)
class Case:
    """An item of the list, the damage to a whole checkpoint, the words and the exit code."""

    item: str
    damage: Callable[[Path], object]
    words: str
    code: int = 3


def on(change: Callable[[Path], object], path: str) -> Damage:
    """Return a damage of one file or folder."""

    def damage(directory: Path) -> None:
        change(directory / path)

    return damage


def replaced(path: str, old: bytes, new: bytes) -> Damage:
    return on(lambda file: file.write_bytes(file.read_bytes().replace(old, new, 1)), path)


def written(path: str, data: bytes) -> Damage:
    return on(lambda file: file.write_bytes(data), path)


def lost(path: str) -> Damage:
    return on(lambda at: shutil.rmtree(at) if at.is_dir() else at.unlink(), path)


def cut(path: str, size_bytes: int) -> Damage:
    """Shorten a file; by less than 0: lengthen it."""
    return on(lambda file: os.truncate(file, file.stat().st_size - size_bytes), path)


def copied(path: str, to: str) -> Damage:
    return lambda directory: shutil.copytree(directory / path, directory / to)


def rename(damage: Callable[[Path], None], name: str) -> Callable[[Path], None]:
    """Name a damage that a function has made."""
    damage.__name__ = name.replace("/", "_")
    return damage


def edit_values(directory: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change all fp32 values of a tensor where they lie, in every piece and second copy."""
    checkpoint = open_checkpoint(directory)
    for placed in (checkpoint.placed, checkpoint.duplicates):
        if placed is None:
            continue
        for row in range(len(placed.collection)):
            tensor, box = placed.collection.box(row)
            file = placed.files[placed.file[row]]
            if tensor.name != name or file.content is not None:
                continue
            data = np.memmap(checkpoint.directory / file.path, np.uint8, "r+")
            stride = [4 * int(s) for s in placed.stride[row][6 - len(box.shape) :]]
            view: Any = np.ndarray(
                box.shape, np.float32, data, int(placed.begin[row]), stride or None
            )
            change(view)
            data.flush()


def spoil(name: str) -> Callable[[Path], None]:
    """Return what changes values of a tensor, and not the proof beside it."""

    def change(values: Any) -> None:
        values += 1

    return rename(lambda directory: edit_values(directory, name, change), "spoil")


def with_nan(directory: Path) -> None:
    """Fill a parameter with NaN, as if it had been saved so."""
    (directory / REPORT).unlink()
    name = "param/decoder.final_layernorm.weight"
    edit_values(directory, name, lambda values: values.fill(np.nan))


def report_version(directory: Path) -> None:
    path = directory / REPORT
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
