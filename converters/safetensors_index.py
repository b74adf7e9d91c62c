"""safetensors with an index: parameters only, in the file layout of Hugging Face.

    model.safetensors.index.json  model-00001-of-00002.safetensors ...   or   model.safetensors

Names are those of the files; ``scalai.converters.between.translation`` turns them into others.

Source: the safetensors format (https://github.com/huggingface/safetensors) and the index that
``save_pretrained`` of transformers writes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import (
    CONFIG,
    PARAM,
    AuxiliaryFile,
    Checkpoint,
    CheckpointFile,
    CheckpointTarget,
    FilePiece,
    ReadOptions,
    Values,
    WriteOptions,
    parameters_of,
    place,
)
from scalai.converters.opening import file_inside, read_json
from scalai.core.errors import RefusedError, is_memory_short
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import whole
from scalai.store.atomic import replace_file
from scalai.store.files import LENGTH_BYTES, HeaderEntry, entries_of, header_bytes, header_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FILE_BYTES = 5_000_000_000
"""Bytes of tensors in one file, as in transformers."""
HEADER_ALIGNMENT = 8

_NUMBERED = re.compile(r"model-(\d{1,9})-of-(\d{1,9})\.safetensors")


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """The layout ``safetensors``."""

    name: str = "safetensors"
    framework: str = ""

    def find(self, path: Path) -> bool:
        return (path / INDEX).is_file() or (path / SINGLE).is_file()

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        entries, files = _read_entries(path)
        pieces = [
            FilePiece(Tensor(f"{PARAM}/{name}", e.shape, e.dtype), whole(e.shape), file, e.begin)
            for name, (file, e) in entries.items()
        ]
        values = Values(step=_step(path), degrees={}, framework="", extra={CONFIG: _config(path)})
        return Checkpoint(self.name, path, place(pieces, files), values, notes=tuple(_notes(path)))

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out the parameters in files of at most 5 GB and their index."""
        weights = parameters_of(source)
        others = len(source.placed.collection.tensors) - len(weights)
        notes = [*source.notes]
        if others:
            notes.append(f"weights only: {others} tensors of the optimizer are left out")
        files, fixed, pieces, weight_map = _lay_out(weights)
        total = sum(tensor.size_bytes for tensor in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}

        def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
            if len(files) > 1:
                replace_file(directory / INDEX, json.dumps(index, indent=1).encode())

        config = source.values.extra.get(CONFIG)
        auxiliary = []
        if config and source.layout != self.name:
            content = json.dumps(config, indent=2).encode()
            auxiliary.append(AuxiliaryFile("config.json", len(content), content=content))
        return CheckpointTarget(
            self.name, place(pieces, files), fixed, finish, tuple(notes), tuple(auxiliary)
        )


def _notes(path: Path) -> Iterator[str]:
    for file, by in (("optimizer.pt", "a Trainer"), ("optimizer.bin", "Accelerate")):
        if (path / file).is_file():
            yield (
                f"{file} of {by} without DeepSpeed is not read, nor are its scheduler and RNG "
                "states: the weights alone are here"
            )


def _step(path: Path) -> int:
    """Return a Trainer's step; 0: there is none."""
    try:
        state = read_json(path / "trainer_state.json")
    except (OSError, ValueError):
        return 0
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int and 0 <= step < 1 << 40 else 0


def _lay_out(
    weights: Mapping[str, Tensor],
) -> tuple[
    list[CheckpointFile], dict[int, list[tuple[int, bytes]]], list[FilePiece], dict[str, str]
]:
    """Return files, their headers, the rows that fill them and each tensor's file."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in weights.items():
        if groups[-1] and filled + tensor.size_bytes > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensor.size_bytes
    files: list[CheckpointFile] = []
    fixed: dict[int, list[tuple[int, bytes]]] = {}
    pieces: list[FilePiece] = []
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        file = file if len(groups) > 1 else SINGLE
        # Wide elements first, so that each lies at a multiple of its size.
        names.sort(key=lambda name: -ITEM_BYTES[weights[name].dtype])
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            tensor = weights[name]
            end = at + tensor.size_bytes
            entries[name] = {
                "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end],
            }  # fmt: skip
            weight_map[name] = file
            at = end
        header = header_of(entries, HEADER_ALIGNMENT)
        for name in names:
            begin = len(header) + entries[name]["data_offsets"][0]
            pieces.append(FilePiece(weights[name], whole(weights[name].shape), file, begin))
        files.append(CheckpointFile(file, len(header) + at))
        fixed[number] = [(0, header)]
    return files, fixed, pieces, weight_map


def _read_entries(path: Path) -> tuple[dict[str, tuple[str, HeaderEntry]], list[CheckpointFile]]:
    """Return all tensors by name, each with its file's name, and the files.

    Raises:
        RefusedError: A file is missing or damaged, or the index names another tensor.
    """
    names, weight_map = [SINGLE], None
    if (path / INDEX).is_file():
        try:
            weight_map = dict(read_json(path / INDEX)["weight_map"])
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if is_memory_short(error):
                raise
            raise RefusedError(f"{path / INDEX} is damaged ({error}). Copy it again.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise RefusedError(f"{path / INDEX} names {name!r}, which is no file beside it.")
    _check_names(path, names)
    entries: dict[str, tuple[str, HeaderEntry]] = {}
    files = []
    for name in names:
        size = file_inside(path, name, INDEX).stat().st_size
        files.append(CheckpointFile(name, size))
        for entry in read_header(path / name, size):
            if entry.name in entries:
                raise RefusedError(
                    f"{entry.name} is in {path / name} and in {entries[entry.name][0]}. Files of "
                    "two checkpoints are mixed: copy them again."
                )
            entries[entry.name] = name, entry
    if weight_map is not None:
        wrong = [
            key
            for key in sorted(weight_map.keys() | entries.keys())
            if key not in entries or entries[key][0] != weight_map.get(key)
        ]
        if wrong:
            raise RefusedError(
                f"{path / INDEX} and the files disagree about {', '.join(wrong[:5])}. Files of two "
                "checkpoints are mixed, or one is not whole: copy them again."
            )
    return entries, files


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Refuse an index of an incomplete set of files, or files of another set beside it."""
    numbered = {name: match for name in names if (match := _NUMBERED.fullmatch(str(name)))}
    sizes = {int(match[2]) for match in numbered.values()}
    if numbered and sizes != {len(names)}:
        raise RefusedError(
            f"{path / INDEX} names {len(names)} files, and these are of {sorted(sizes)} by their "
            "names. Files of two checkpoints are mixed, or some are missing: copy them again."
        )
    strays = sorted({entry.name for entry in path.glob("model-*-of-*.safetensors")} - {*names})
    if strays:
        raise RefusedError(
            f"{path / strays[0]} is beside {names[0]}, and no index names it. Files of two "
            "checkpoints are mixed, or the index is missing: copy them again."
        )


def read_header(path: Path, size: int) -> Iterator[HeaderEntry]:
    """Yield the tensors of one file, checked; unknown dtypes are refused."""
    try:
        with open(path, "rb") as file:
            text = file.read(header_bytes(file.read(LENGTH_BYTES), size))
        for entry in entries_of(text, size):
            if entry.dtype not in ITEM_BYTES:
                raise RefusedError(
                    f"{entry.name!r} of {path} is of dtype {entry.dtype!r}, which is not "
                    f"converted: it is none of {', '.join(ITEM_BYTES)}. Leave it out, or save it "
                    "as one of these."
                )
            yield entry
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if is_memory_short(error) or isinstance(error, RefusedError):
            raise
        raise RefusedError(
            f"{path} is damaged or truncated ({type(error).__name__}: {error}). Copy it again."
        ) from error


def _config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path / "config.json")
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
