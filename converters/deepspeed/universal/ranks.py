"""The model_states files of the model-parallel ranks in a universal checkpoint.

Their parameters lie whole beside them, with the cuts of the ranks' weights and of a target's.

Source: as ``layout``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import ReadOptions
from scalai.converters.deepspeed.files import read_dictionary
from scalai.converters.deepspeed.job import enables_bf16
from scalai.converters.deepspeed.reading.model import ModelStates
from scalai.converters.deepspeed.shards.cut_rules import INFO, CutRules, Rule, read_cuts
from scalai.converters.deepspeed.shards.cuts import Cut
from scalai.converters.deepspeed.shards.flat import Shape
from scalai.converters.deepspeed.shards.pipeline import TIED, LayerFile, unit_of
from scalai.converters.deepspeed.stored_config import check_config
from scalai.converters.pickles import Foreign
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError

_FILE = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_DEGREES = "checkpoint_parallel_dimensions"


def read_ranks(directory: Path, trust: bool) -> list[ModelStates]:
    """Read the model_states files of every model-parallel rank, in order.

    Raises:
        RefusedError: Files are missing.
    """
    whole: dict[int, list[str]] = {}
    parts: dict[int, dict[int, str]] = {}
    for path in directory.glob("*mp_rank_*_model_states.pt"):
        if (match := _FILE.fullmatch(path.name)) is None:
            continue
        if match["dp"] is None:
            whole[int(match["mp"])] = [path.name]
        else:
            parts.setdefault(int(match["mp"]), {})[int(match["dp"])] = path.name
    names = whole or {rank: [of[dp] for dp in sorted(of)] for rank, of in parts.items()}
    if sorted(names) != list(range(len(names))) or not names:
        raise RefusedError(
            f"{directory} has model_states.pt of the model-parallel ranks {sorted(names)}: some are"
            " missing. Convert again, or use another checkpoint."
        )
    models = [
        _read(directory, names[rank], is_stage_3=not whole, trust=trust) for rank in sorted(names)
    ]
    for model in models:
        if len(model.files) != (1 if whole else model.dp):
            raise RefusedError(
                f"{directory} was made of {model.dp} data-parallel ranks, and has model_states.pt "
                f"of {len(model.files)}. Convert to universal again, or use another checkpoint."
            )
    return models


def _read(directory: Path, names: Sequence[str], *, is_stage_3: bool, trust: bool) -> ModelStates:
    state = read_dictionary(directory / names[0], trust=trust)
    check_config(state.get("ds_config"), str(directory / names[0]))
    layers: dict[str, StoredTensor] | None = None
    if not is_stage_3 and state.get("module") is None:
        # A pipeline's layer files are missing: its weights are the rounded masters.
        layers = {
            name: StoredTensor(_weight_dtype(state), tuple(shape), (), 0)
            for shapes in state.get("param_shapes") or ()
            for name, shape in shapes.items()
        }
    return ModelStates.read(directory, names, is_stage_3=is_stage_3, trust=trust, layers=layers)


def _weight_dtype(state: Mapping[str, Any]) -> str:
    config = state.get("ds_config") or {}
    if enables_bf16(config):
        return "BF16"
    return "F16" if (config.get("fp16") or {}).get("enabled") else "F32"


def degrees_of(models: Sequence[ModelStates]) -> tuple[int, int]:
    """Return ``tp`` and ``pp``: as the files state, else by the ranks with equal parameters."""
    stated = models[0].first.get(_DEGREES)
    if stated is not None and stated["tp_degree"] * stated["pp_degree"] == len(models):
        return stated["tp_degree"], stated["pp_degree"]
    names = [[list(shapes) for shapes in model.shapes()] for model in models]
    tp = next((rank for rank, of in enumerate(names) if of != names[0]), len(names))
    return tp, len(models) // tp


def layer_files(models: Sequence[ModelStates]) -> tuple[LayerFile, ...]:
    """Return the layers of a pipeline with trained parameters.

    Raises:
        RefusedError: They have buffers; a universal checkpoint keeps none.
    """
    lost = [name for model in models for name in model.first.get("buffer_names") or ()]
    if lost:
        raise RefusedError(
            f"{models[0].directory} is of a pipeline with buffers ({lost[0]}), which universal "
            "checkpoints do not keep. Convert the checkpoint that it was made of instead."
        )
    units: dict[str, list[str]] = {}
    for model in models:
        for shapes in model.shapes():
            for name in shapes:
                found = units.setdefault(unit_of(name), [])
                local = name.removeprefix(f"{unit_of(name)}.")
                found.extend([local] if local not in found else [])
    places = {unit: int(unit) for unit in units if not unit.startswith(TIED)}
    count = len(units) + max(places.values(), default=0)
    free = iter(sorted(set(range(count)) - {*places.values()}))
    places |= {unit: next(free) for unit in units if unit.startswith(TIED)}
    return tuple(
        LayerFile(places[unit], unit, tuple(units[unit]))
        for unit in sorted(units, key=lambda unit: places[unit])
    )


def cuts_of(
    entries: Mapping[str, Mapping[str, Any]],
    models: Sequence[ModelStates],
    tp: int,
    options: ReadOptions,
) -> dict[str, Cut]:
    """Return the cuts of parameters.

    Args:
        entries: By parameter, its file's entries beside the values.
        options: May have a file of cuts.

    Raises:
        RefusedError: A parameter has no rule, or its shapes do not fit.
    """
    shapes: dict[str, list[Shape]] = {}
    for model in models:
        for group in model.shapes():
            for name, shape in group.items():
                shapes.setdefault(name, []).append(shape)
    found = {name: _stated(entries[name]) for name in shapes}
    if tp == 1:
        # At tp=1 all entries are the default and mean nothing.
        if all(rule == Rule(0) for rule in found.values()):
            return {}
        found = {name: rule or Rule() for name, rule in found.items()}
    rules = CutRules(models[0].first.get(INFO) or {}, read_cuts(options.cuts))
    rest = rules.cuts({name: shapes[name][:tp] for name, rule in found.items() if rule is None})
    return rest | {
        name: rule.cut(name, shapes[name][:tp]) for name, rule in found.items() if rule is not None
    }


def _stated(entry: Mapping[str, Any]) -> Rule | None:
    parts = entry.get("sub_param_shape")
    if isinstance(parts, Foreign):
        dim = parts.state["partition_dim"]
        sizes = parts.state["shape"][dim]
        return Rule(dim, tuple(sizes) if isinstance(sizes, list | tuple) else int(sizes))
    if "cat_dim" in entry:
        return Rule(entry["cat_dim"], int(entry.get("param_n_sub_params", 1)))
    return None


def names_of(models: Sequence[ModelStates]) -> Iterator[str]:
    """Yield the trained parameters of all ranks, once each."""
    yield from dict.fromkeys(name for model in models for of in model.shapes() for name in of)
