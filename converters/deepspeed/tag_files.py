"""A DeepSpeed checkpoint's directory: its tag, and the files of each rank.

    <save directory>/latest    the newest tag, as text
    <save directory>/<tag>/
        mp_rank_<m>_model_states.pt                         stages 0 to 2
        zero_pp_rank_<d>_mp_rank_<m>_model_states.pt        stage 3
        [bf16_]zero_pp_rank_<d>_mp_rank_<m>_optim_states.pt stages 1 to 3
        layer_<l>[-model_<t>]-model_states.pt               a pipeline's weights
        layer_<l>_expert_<e>_*, expp_rank_*                 experts, see ``experts``

``d`` is a data-parallel rank, despite the ``pp``; ``m`` a model-parallel one: the pipeline stage
times the number of tensor-parallel ranks, plus ``t``. ``l`` is the place of a layer in the whole
model.

Source: ``_get_ckpt_name`` and ``_get_zero_ckpt_name`` of deepspeed/runtime/engine.py,
``ckpt_layer_path`` of runtime/pipe/module.py, 0.19.8.

Megatron-DeepSpeed saves modules other than pipelines as nested dictionaries: the parameter
``language_model.embedding.word_embeddings.weight`` lies in four of them.

Source: ``save_checkpoint`` of megatron/checkpointing.py and ``state_dict_for_save_checkpoint`` of
megatron/model/language_model.py in Megatron-DeepSpeed.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.bounded import read_pointer
from scalai.converters.deepspeed.experts import (
    NO_EXPERTS,
    ExpertNames,
    check_numbers,
)
from scalai.converters.torch_archive import StoredTensor, read_archive, with_content
from scalai.core.errors import RefusedError
from scalai.store.files import map_file, number_of

LATEST = "latest"

_FILE = re.compile(
    r"(?P<bf16>bf16_)?(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_"
    r"(?P<kind>model|optim)_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<tp>\d+))?-model_states\.pt")


@dataclass(frozen=True, slots=True)
class TagFiles:
    """The files of one model-parallel rank, by data-parallel rank; ``model`` has one if they share
    it."""

    directory: Path
    model: tuple[str, ...]
    optimizer: tuple[str, ...]
    is_stage_3: bool
    is_bf16: bool


def find_tag(path: Path, step: int | None) -> Path | None:
    """Return the directory of a tag: ``path`` itself, the one in ``latest``, or the step's; None:
    there is none."""
    if step is None and _has_states(path):
        return path
    if step is None:
        tag = read_pointer(path / LATEST)
    else:
        tag = f"global_step{step}"
    if not tag or "/" in tag or tag.startswith("."):
        return None
    return path / tag if (path / tag).is_dir() else None


def tag_of(path: Path, step: int | None) -> Path:
    """Return the directory of a tag, as ``find_tag``. ``RefusedError``: there is none."""
    directory = find_tag(path, step)
    if directory is None:
        raise RefusedError(f"{path} holds no tag global_step{step}. Name another --iteration.")
    return directory


def _has_states(path: Path) -> bool:
    return path.is_dir() and any(_FILE.fullmatch(entry.name) for entry in path.iterdir())


@dataclass(frozen=True, slots=True)
class Tag:
    """The files of one tag.

    Attributes:
        ranks: Files by model-parallel rank.
        layers: A pipeline's layer files, by tensor-parallel rank and place.
    """

    directory: Path
    ranks: tuple[TagFiles, ...]
    layers: tuple[Mapping[int, str], ...]
    experts: ExpertNames = NO_EXPERTS


def list_files(directory: Path) -> Tag:
    """Sort a tag's files by rank.

    Raises:
        RefusedError: A rank's file is missing, or ranks are of an unsupported kind.
    """
    names: dict[int, list[tuple[re.Match[str], str]]] = {}
    layers: dict[int, dict[int, str]] = {}
    files = sorted(entry.name for entry in directory.iterdir())
    experts = ExpertNames.of(directory, files)
    for name in files:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match["tp"] or 0), {})[int(match["layer"])] = name
        elif match := _FILE.fullmatch(name):
            names.setdefault(int(match["mp"]), []).append((match, name))
    check_numbers(directory, "model-parallel rank", {mp: of[0][1] for mp, of in names.items()})
    _check_layers(directory, layers)
    ranks = tuple(_rank_files(directory, names[mp]) for mp in sorted(names))
    for rank in ranks:
        first = ranks[0]
        if (rank.is_stage_3, len(rank.optimizer)) != (first.is_stage_3, len(first.optimizer)):
            raise RefusedError(
                f"{directory} has {len(first.optimizer)} optim_states.pt beside {first.model[0]}, "
                f"and {len(rank.optimizer)} beside {rank.model[0]}: a rank's file is missing, or "
                "files of two checkpoints are mixed. Use another checkpoint."
            )
    if experts.model and (layers or len(ranks) > 1):
        raise RefusedError(
            f"{directory} holds experts beside stages or tensor-parallel ranks, which is not read. "
            "Load it in DeepSpeed at the degrees that saved it."
        )
    return Tag(directory, ranks, tuple(layers[tp] for tp in sorted(layers)), experts)


def _rank_files(directory: Path, names: Sequence[tuple[re.Match[str], str]]) -> TagFiles:
    found: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    whole: list[str] = []
    prefixes = set()
    for match, name in names:
        if match["dp"] is None:
            whole.append(name)
            continue
        rank = int(match["dp"])
        if rank in found[match["kind"]]:
            raise RefusedError(
                f"{directory} has {found[match['kind']][rank]} and {name}: files of two "
                "checkpoints are mixed. Remove those of one."
            )
        found[match["kind"]][rank] = name
        if match["kind"] == "optim":
            prefixes.add(match["bf16"] or "")
    for files in found.values():
        check_numbers(directory, "data-parallel rank", files)
    model, optimizer = found["model"], found["optim"]
    if bool(model) == bool(whole) or len(whole) > 1 or (model and len(model) != len(optimizer)):
        raise RefusedError(
            f"{directory} has {len(whole)} mp_rank_*, {len(model)} zero_pp_rank_*_model_states.pt "
            f"and {len(optimizer)} optim_states.pt: a rank's file is missing, or files of two "
            "checkpoints are mixed. Use another checkpoint."
        )
    return TagFiles(
        directory,
        tuple(model[rank] for rank in sorted(model)) or tuple(whole),
        tuple(optimizer[rank] for rank in sorted(optimizer)),
        is_stage_3=bool(model),
        is_bf16=prefixes == {"bf16_"},
    )


def _check_layers(directory: Path, layers: Mapping[int, Mapping[int, str]]) -> None:
    for tp, files in sorted(layers.items()):
        first = layers[min(layers)]
        missing = sorted(first.keys() ^ files.keys())
        if missing or tp >= len(layers):
            raise RefusedError(
                f"{directory} has files of {len(layers)} tensor-parallel ranks of its layers, and "
                f"rank {tp} has not those of rank 0 (layers {missing[:5]}). Copy the missing files "
                "of the same save, or use another checkpoint."
            )


def read_dictionary(path: Path, *, trust: bool) -> dict[str, Any]:
    """Return a file's content, tensors as ``StoredTensor``. Raises as ``read_archive``."""
    value = read_archive(path, trust=trust)
    if not isinstance(value, dict):
        raise RefusedError(f"{path} holds a {type(value).__name__}, not a dictionary.")
    return value


def carried(value: Any, path: Path) -> Any:
    """Return a tree of values with the bytes of its small tensors. Raises as ``with_content``."""
    return with_content(value, map_file(path))


def scalar_of(value: Any, path: Path) -> float | None:
    """Return a stored number, plain or as a tensor; None: it is neither."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, StoredTensor) and value.shape in ((), (1,)):
        if value.dtype != "BOOL":
            return number_of(carried(value, path).content, value.dtype)
    return None


NestedPath = tuple[str, ...]


def flatten(
    module: Mapping[str, Any], trained: Sequence[str]
) -> tuple[Mapping[str, Any], dict[str, NestedPath]]:
    """Return a module by its parameters' names, and the path of each; without paths: it was flat.

    Args:
        trained: Names of parameters that must be in it.
    """
    if all(name in module for name in trained):
        return module, {}
    leaves = list(_leaves(module, ()))
    flat = OrderedDict((".".join(path), value) for path, value in leaves)
    return flat, {".".join(path): path for path, _ in leaves}


def nest(module: Mapping[str, Any], paths: Mapping[str, NestedPath]) -> OrderedDict[str, Any]:
    """Undo ``flatten``."""
    nested: OrderedDict[str, Any] = OrderedDict()
    for name, value in module.items():
        *folders, last = paths[name]
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, OrderedDict())
        inner[last] = value
    return nested


def _leaves(module: Mapping[str, Any], path: NestedPath) -> Iterator[tuple[NestedPath, Any]]:
    for key, value in module.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
