"""Layers of a DeepSpeed pipeline, by stage.

A ``PipelineModule`` is a list of layers. The names of a layer with parameters begin with its place
in it, ``3.fc1.weight``; those of a tied layer, with several places, with its key,
``tied_modules.embed.weight``. Such a prefix is a *unit* here. Names do not depend on the stages.
Each stage with an occurrence of a tied layer has a copy of it.

Files do not record the bounds of another job's stages. They follow from the method that gives the
source's own stages; or a file states them (``--cuts``):

    [pipeline]
    parts = [0, 3, 6]            # each stage's first layer, and their number
    partition_method = "uniform" # or: parameters, type (of the most frequent layers)
    tied = {embed = [0, 5]}      # the places of tied layers
    layers = 6

Source: deepspeed 0.19.8: ``_partition_layers`` and ``_build`` of runtime/pipe/module.py,
``partition_uniform`` and ``partition_balanced`` of runtime/utils.py.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.flat import Shape
from scalai.core.errors import RefusedError, UsageError

TIED = "tied_modules"
METHODS = ("parameters", "uniform", "type")
"""In order of trial; the first is DeepSpeed's default."""

Shapes = Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A layer with a file of weights: its place, its unit, its tensors in order."""

    place: int
    unit: str
    names: tuple[str, ...]
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A job's pipeline: its layers with files, and the trained units of each stage.

    ``names_tp``: whether file names have a tensor-parallel rank even at tp=1.
    """

    files: tuple[LayerFile, ...]
    stages: tuple[frozenset[str], ...]
    names_tp: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """The ``[pipeline]`` section of a file of cuts."""

    parts: tuple[int, ...] = ()
    method: str = ""
    tied: Mapping[str, Sequence[int]] = field(default_factory=dict)
    layers: int = 0


def unit_of(name: str) -> str:
    """Return a parameter's unit."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == TIED else parts[0]


def order(names: Sequence[str]) -> list[str]:
    """Return names in the order of a ``PipelineModule``: tied ones first, then by place.

    Raises:
        RefusedError: A name is of no layer.
    """
    alien = [name for name in names if not re.match(rf"{TIED}\.|\d+\.", name)]
    if alien:
        raise RefusedError(
            f"{alien[0]} belongs to no layer of the pipeline, and where it is kept is not known. "
            "Make it a part of a layer."
        )
    found = dict.fromkeys(names)
    units = {unit: number for number, unit in enumerate(dict.fromkeys(map(unit_of, found)))}

    def key(name: str) -> tuple[bool, int]:
        unit = unit_of(name)
        is_tied = unit.startswith(TIED)
        return not is_tied, units[unit] if is_tied else int(unit)

    return sorted(found, key=key)


def stages_at(
    pipeline: Pipeline, pp: int, trained: Shapes, given: Given
) -> tuple[tuple[frozenset[str], ...], str]:
    """Return the units of each of ``pp`` stages, and their origin.

    Args:
        pipeline: The source's pipeline.
        pp: Number of stages.
        trained: Shapes of all trained parameters.
        given: The user's statement.

    Raises:
        RefusedError: No method gives the source's stages, and the user states none; or the
            statement does not fit.
    """
    if pp == 1:
        return (frozenset().union(*pipeline.stages),), ""
    if pp == len(pipeline.stages) and not given.parts and not given.method:
        return pipeline.stages, ""
    places = _places(pipeline, given)
    if given.parts:
        if len(given.parts) != pp + 1 or list(given.parts) != sorted(given.parts):
            raise RefusedError(
                f"parts = {list(given.parts)} in [pipeline] of the file of --cuts are not the "
                f"{pp + 1} bounds of {pp} stages. Correct them."
            )
        return _stages(places, given.parts), f"parts {list(given.parts)} of the file of --cuts"
    methods = [given.method] if given.method else list(_fitting(pipeline, places, trained))
    if not methods:
        raise RefusedError(
            f"the {len(pipeline.stages)} stages of the source are cut by none of the methods "
            f"{', '.join(METHODS)}, so where those of pp={pp} begin is not known. Give parts in "
            "[pipeline] of a file for --cuts (DeepSpeed prints them when it starts), or pass "
            f"--args-from with a checkpoint of the job at pp={pp}."
        )
    parts = partition(methods[0], places, trained, pp)
    return _stages(places, parts), f"partition_method {methods[0]}, parts {parts}"


def partition(method: str, places: Sequence[str], trained: Shapes, pp: int) -> list[int]:
    """Return the first place of each stage, and the number of places.

    Args:
        method: One of ``METHODS``.
        places: Unit at each place; empty: no parameters.
        trained: Shapes of all trained parameters.
        pp: Number of stages.
    """
    if method == "uniform":
        return _uniform(len(places), pp)
    layers: dict[str, dict[str, Shape]] = {}
    for name, shape in trained.items():
        layers.setdefault(unit_of(name), {})[name.removeprefix(unit_of(name))] = shape
    if method == "parameters":
        weights = [sum(map(prod, layers.get(unit, {}).values())) for unit in places]
        return _balanced(weights, pp)
    kinds = [tuple(layers.get(unit, {}).items()) for unit in places]
    most = Counter(kind for kind in kinds if kind).most_common(1)[0][0]
    return _balanced([int(kind == most) for kind in kinds], pp)


def read_pipeline(path: Path | None) -> Given:
    """Read the ``[pipeline]`` section of a file of cuts.

    Raises:
        UsageError: It cannot be read, or is not as described above.
    """
    if path is None:
        return Given()
    try:
        section = tomllib.loads(path.read_text(encoding="utf-8")).get("pipeline", {})
        given = Given(
            tuple(map(int, section.pop("parts", ()))),
            section.pop("partition_method", ""),
            {f"{TIED}.{key}": list(map(int, at)) for key, at in section.pop("tied", {}).items()},
            int(section.pop("layers", 0)),
        )
        if section or given.method not in ("", *METHODS):
            raise ValueError(f"unknown {next(iter(section), given.method)!r}")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} has no [pipeline] section as expected ({error}). Give parts, or "
            f"partition_method (one of {', '.join(METHODS)}), and tied and layers where needed."
        ) from error
    return given


def _places(pipeline: Pipeline, given: Given) -> list[str]:
    """Return the unit at each place.

    Later occurrences of a tied layer with a function of their own have no file. One of them is
    assumed after the last file, unless the source contradicts.
    """
    trained = frozenset().union(*pipeline.stages)
    found = {f.place: f.unit if f.unit in trained else "" for f in pipeline.files}
    last = len(pipeline.stages) - 1
    counts = Counter(found.values())
    for unit in sorted(trained):
        if unit in given.tied:
            found.update(dict.fromkeys(given.tied[unit], unit))
        elif unit.startswith(TIED) and counts[unit] == 1 and unit in pipeline.stages[last]:
            found[max(found) + 1] = unit
    count = max(given.layers, max(found, default=-1) + 1)
    return [found.get(place, "") for place in range(count)]


def _fitting(pipeline: Pipeline, places: Sequence[str], trained: Shapes) -> Iterator[str]:
    for method in METHODS:
        parts = partition(method, places, trained, len(pipeline.stages))
        if _stages(places, parts) == pipeline.stages:
            yield method


def _stages(places: Sequence[str], parts: Sequence[int]) -> tuple[frozenset[str], ...]:
    return tuple(
        frozenset(unit for unit in places[low:high] if unit) for low, high in pairwise(parts)
    )


def _uniform(count: int, pp: int) -> list[int]:
    if count <= pp:
        return [min(stage, count) for stage in range(pp + 1)]
    each, rest = divmod(count, pp)
    return [stage * each + min(stage, rest) for stage in range(pp + 1)]


def _balanced(weights: Sequence[int], pp: int) -> list[int]:
    """Return the bounds with the smallest difference of the stages' sums; of equals the later."""
    count = len(weights)
    if count <= pp:
        return _uniform(count, pp)
    before = [sum(weights[:place]) for place in range(count + 1)]
    best: list[dict[int, tuple[int, int, int]]] = [{0: (0, -1, 0)}]  # end: (most, least, begin)
    for stage in range(1, pp + 1):
        row = {}
        for end in range(stage, count + 1):
            choices = []
            for begin, (most, least, _) in best[-1].items():
                if begin < end:
                    size = before[end] - before[begin]
                    low = size if least < 0 else min(least, size)
                    choices.append((max(most, size) - low, -begin, max(most, size), low))
            if choices:
                _, negative, most, least = min(choices)
                row[end] = (most, least, -negative)
        best.append(row)
    bounds = [count]
    for stage in range(pp, 0, -1):
        bounds.append(best[stage][bounds[-1]][2])
    return bounds[::-1]
