"""The values of a framework's checkpoint, in a file beside another layout's: the state can go
back to its framework as it came.

Loaders of the other layout do not look at the file.

Source: own.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import Values
from scalai.converters.deepspeed.cuts import ShardCut
from scalai.converters.deepspeed.experts import Experts, Layer
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.deepspeed.pipeline import LayerFile, Pipeline
from scalai.converters.deepspeed.tag_files import carried
from scalai.converters.generation_layout import PARTS
from scalai.converters.torch_archive import content_of, lay_out_archive, read_archive
from scalai.core.errors import RefusedError

STORED = "scalai_values.pt"
VERSION = 1

_CLASS = "(class)"
_CLASSES = {
    cls.__name__: cls for cls in (DeepSpeedJob, Experts, Layer, LayerFile, Pipeline, ShardCut)
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "step": (int,), "degrees": (dict,), "framework": (str,), "is_split": (bool, type(None)),
    "scheduler": (dict, type(None)), "grad_scaler": (dict, type(None)), "param_groups": (tuple,),
    "arguments": (dict, type(None)), "counters": (dict,), "rank_state": (dict,), "extra": (dict,),
}  # fmt: skip


def keep_values(values: Values) -> bytes:
    """Return the content of the file."""
    content = {name: _encoded(getattr(values, name)) for name in _TYPES}
    content["extra"] = {k: v for k, v in content["extra"].items() if k != PARTS}
    return content_of(lay_out_archive({"version": VERSION, **content}))


def kept_values(directory: Path, *, trust: bool = False) -> Values | None:
    """Return the values kept beside a checkpoint; None: there are none.

    Raises:
        RefusedError: The file is damaged, or of a later release.
    """
    path = directory / STORED
    if not path.exists():
        return None
    content = carried(read_archive(path, trust=trust), path)
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise RefusedError(
            f"{path} is of version {version!r:.20}, and {VERSION} is read. Use a later release of "
            "Scalai; without the file the tensors alone are read."
        )
    try:
        given = {name: _decoded(content[name]) for name in _TYPES}
        wrong = [name for name, types in _TYPES.items() if type(given[name]) not in types]
        wrong += [] if all(type(group) is dict for group in given["param_groups"]) else ["groups"]
        wrong += _odd_job(given["extra"].get(STATE)) if not wrong else []
    except (KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{path} is damaged ({error}). Copy it again.") from error
    if wrong:
        raise RefusedError(f"{path} is damaged: {', '.join(wrong)} is odd. Copy it again.")
    return Values(**given)


def _odd_job(job: Any) -> list[str]:
    if job is None:
        return []
    is_named = isinstance(job, DeepSpeedJob) and all(
        type(names) is tuple and all(type(name) is str for name in names)
        for names in (*job.groups, job.module, job.buffers, job.frozen)
    )
    return [] if is_named and isinstance(job.model, dict) else [STATE]


def _encoded(value: Any) -> Any:
    if is_dataclass(value) and type(value).__name__ in _CLASSES:
        entries = {of.name: _encoded(getattr(value, of.name)) for of in fields(value)}
        return {_CLASS: type(value).__name__, **entries}
    if type(value) is dict:
        return {key: _encoded(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_encoded(entry) for entry in value)
    return value


def _decoded(value: Any) -> Any:
    if type(value) is dict:
        entries = {key: _decoded(entry) for key, entry in value.items()}
        name = entries.pop(_CLASS, None)
        return entries if name is None else _CLASSES[name](**entries)
    if type(value) in (list, tuple):
        return type(value)(_decoded(entry) for entry in value)
    return value
