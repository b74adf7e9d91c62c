"""Where the stages of a DeepSpeed pipeline begin."""

import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest

from scalai.converters.deepspeed.grid import units_by_stage
from scalai.converters.deepspeed.pipeline import (
    METHODS,
    Given,
    LayerFile,
    Pipeline,
    order,
    partition,
    read_pipeline,
    stages_at,
)
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError, UsageError
from scalai.core.tensors.region import row_major

EMBED = "tied_modules.embed"
TRAINED = {
    f"{EMBED}.weight": (32, 8),
    **{f"{layer}.{name}": (16, 8) for layer in range(1, 7) for name in ("up", "down")},
    "7.weight": (8,),
}
PLACES = [EMBED, *map(str, range(1, 8)), EMBED]
FILES = tuple(LayerFile(place, unit, ()) for place, unit in enumerate(PLACES[:-1]))


def stages(*bounds: int) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(PLACES[low:high]) for low, high in pairwise(bounds))


WEIGHTS = [[1], [3, 1, 1, 1, 3], [0, 5, 0, 0, 7, 7, 7, 1], [1] * 12, [9, 1, 1, 1, 1, 1, 1, 9, 0]]


@pytest.mark.campaign
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7])
def test_partitions_are_those_of_deepspeed(weights: list[int], pp: int) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    places = list(map(str, range(len(weights))))
    trained = {f"{place}.w": (weight,) for place, weight in zip(places, weights, strict=True)}
    found = {method: partition(method, places, trained, pp) for method in METHODS[:2]}
    assert found["uniform"] == partition_uniform(len(weights), pp)
    assert found["parameters"] == [int(bound) for bound in partition_balanced(weights, pp)]


@pytest.mark.parametrize(
    ("before", "pp", "expected"),
    [
        ((0, 9), 2, (0, 4, 9)),  # nothing can be seen: by parameters, as DeepSpeed does
        ((0, 3, 5, 7, 9), 2, (0, 5, 9)),  # uniform; of 9 layers the first stage has one more
        ((0, 3, 5, 9), 4, (0, 3, 5, 6, 9)),  # by type: blocks alone count
        ((0, 2, 9), 2, (0, 2, 9)),  # as they are
        ((0, 2, 9), 1, (0, 9)),
    ],
)
def test_stages_begin_by_the_method_that_fits_the_source(
    before: tuple[int, ...], pp: int, expected: tuple[int, ...]
) -> None:
    found, _ = stages_at(Pipeline(FILES, stages(*before)), pp, TRAINED, Given())
    assert found == stages(*expected)


def test_stages_that_no_method_makes_are_refused_unless_they_are_told() -> None:
    pipeline = Pipeline(FILES, stages(0, 2, 9))
    with pytest.raises(RefusedError, match="none of the methods"):
        stages_at(pipeline, 3, TRAINED, Given())
    found, _ = stages_at(pipeline, 3, TRAINED, Given(parts=(0, 1, 2, 9)))
    assert found == stages(0, 1, 2, 9)
    with pytest.raises(RefusedError, match="not the 4 bounds"):
        stages_at(pipeline, 3, TRAINED, Given(parts=(0, 9)))


def test_tied_layers_are_where_they_are_told_to_be() -> None:
    pipeline = Pipeline(FILES, stages(0, 9))
    reported = Given(method="uniform", tied={EMBED: [0]}, layers=8)
    found, _ = stages_at(pipeline, 2, TRAINED, reported)
    assert [EMBED in stage for stage in found] == [True, False]


def stored(*shape: int) -> StoredTensor:
    return StoredTensor("F32", shape, row_major(shape), 0)


@pytest.mark.parametrize(
    ("sizes", "totals", "tied", "expected"),
    [
        ((8, 4, 4, 2), (12, 6), {}, ["01", "23"]),
        ((8, 4, 4, 2), (12, 14), {0: "0", 4: "0"}, ["01", "230"]),  # the first one comes again
        ((8, 4, 4, 2), (12, 14), {}, "none of the ways"),
        ((4, 4, 4, 4), (8, 4), {}, "none of the ways"),
    ],
)
def test_without_zero_stages_have_what_their_optimizers_have(
    sizes: tuple[int, ...], totals: tuple[int, ...], tied: dict[int, str], expected: list[str] | str
) -> None:
    files = [LayerFile(place, str(place), ("w",)) for place in range(len(sizes))]
    tensors = {f"{place}.w": stored(size) for place, size in enumerate(sizes)}
    states = [
        {"optimizer": {"state": {0: {"step": stored(), "exp_avg": stored(total)}}}}
        for total in totals
    ]

    def found() -> list[frozenset[str]]:
        return list(units_by_stage(Path("tag"), files, tied, tensors, states))

    if isinstance(expected, str):
        with pytest.raises(RefusedError, match=expected):
            found()
    else:
        assert found() == [frozenset(stage) for stage in expected]


def test_names_are_ordered_as_modules_are() -> None:
    names = ["10.b", f"{EMBED}.w", "2.z", "2.a", "10.a", f"{EMBED}.w"]
    assert order(names) == [f"{EMBED}.w", "2.z", "2.a", "10.b", "10.a"]


def test_a_section_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cuts.toml"
    path.write_text("[pipeline]\nparts = [0, 2, 4]\ntied = {embed = [0, 3]}\nlayers = 4\n")
    assert read_pipeline(path) == Given((0, 2, 4), "", {EMBED: [0, 3]}, 4)
    path.write_text('[pipeline]\npartition_method = "profile"\n')
    with pytest.raises(UsageError, match="profile"):
        read_pipeline(path)
