"""Nested dictionaries in a module's ``state_dict``.

Megatron-DeepSpeed saves models other than pipelines so: the parameter
``language_model.embedding.word_embeddings.weight`` lies in four of them.

Source: ``save_checkpoint`` of megatron/checkpointing.py and ``state_dict_for_save_checkpoint`` of
megatron/model/language_model.py in Megatron-DeepSpeed.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]


def flatten(
    module: Mapping[str, Any], trained: Sequence[str]
) -> tuple[Mapping[str, Any], dict[str, Path]]:
    """Return a module by its parameters' names, and the path of each; without paths: it was flat.

    Args:
        trained: Names of parameters that must be in it.
    """
    if all(name in module for name in trained):
        return module, {}
    leaves = list(_leaves(module, ()))
    flat = OrderedDict((".".join(path), value) for path, value in leaves)
    return flat, {".".join(path): path for path, _ in leaves}


def nest(module: Mapping[str, Any], paths: Mapping[str, Path]) -> OrderedDict[str, Any]:
    """Undo ``flatten``."""
    nested: OrderedDict[str, Any] = OrderedDict()
    for name, value in module.items():
        *folders, last = paths[name]
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, OrderedDict())
        inner[last] = value
    return nested


def _leaves(module: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in module.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
