"""Which parameters fill buckets of known sizes: all of them, or those that are trained."""

import numpy as np
import pytest

from scalai.converters.megatron.dp_reshardable import (
    HEAD,
    BucketPlace,
    SeveralFitsError,
    lay,
    lay_trained,
)
from scalai.converters.megatron.rank_parameters import ParameterPart, RankParameter
from scalai.core.tensors.region import Piece, whole


def parameters(*sizes: int) -> list[RankParameter]:
    """Return parameters of these sizes, in the order in which they fill buckets."""
    return [
        RankParameter(
            f"p{at}", (size,), "F32", (ParameterPart(Piece(whole((size,)), 0, (1,)), "file", 0),)
        )
        for at, size in enumerate(sizes)
    ]


class Memory:
    """Buckets and weights in memory: parameters of equal ``values`` have equal content."""

    def __init__(self, sizes: list[int], placed: list[tuple[int, int, int, float]]) -> None:
        """``placed``: (bucket, start, size, value)."""
        self.buckets = [np.zeros(size, np.float32) for size in sizes]
        for bucket, start, size, value in placed:
            self.buckets[bucket][start : start + size] = value
        self.values: dict[str, float] = {}

    def weights(self, parameter: RankParameter) -> bytes:
        count = min(parameter.numel, HEAD)
        return np.full(count, self.values[parameter.name], np.float32).tobytes()

    def masters(self, bucket: int, start: int, count: int) -> bytes | None:
        data = self.buckets[bucket][start : start + count]
        return data.tobytes() if len(data) == count else None

    def is_equal(self, found: BucketPlace) -> bool:
        data = self.buckets[found.bucket][found.start : found.start + found.parameter.numel]
        return bool((data == self.values[found.parameter.name]).all())


def test_all_parameters_fill_the_buckets_from_multiples_of_64() -> None:
    found = lay([164, 70], parameters(100, 36, 70))
    assert found is not None
    assert [(f.bucket, f.start) for f in found] == [(0, 0), (0, 128), (1, 0)]


def test_a_bucket_that_ends_before_a_tied_embedding_is_a_multiple_of_64() -> None:
    found = lay([192, 256], parameters(64, 70, 256))
    assert found is not None
    assert [(f.bucket, f.start) for f in found] == [(0, 0), (0, 64), (1, 0)]


@pytest.mark.parametrize("sizes", [[165, 70], [164], [164, 70, 64], [164, 71], [100, 36]])
def test_other_sizes_do_not_fit(sizes: list[int]) -> None:
    assert lay(sizes, parameters(100, 36, 70)) is None


def test_what_is_not_trained_is_found_by_content() -> None:
    # p1 and p3 are not trained; p4 is as large and as equal in content as p3.
    content = Memory([128], [(0, 0, 50, 1.0), (0, 64, 20, 3.0), (0, 84, 44, 0.0)])
    content.values = {"p0": 1.0, "p1": 2.0, "p2": 3.0, "p3": 5.0}
    found = lay_trained([84], parameters(50, 30, 20, 20), content)
    assert found is not None
    assert [(f.parameter.name, f.bucket, f.start) for f in found] == [("p0", 0, 0), ("p2", 0, 64)]


def test_two_that_could_both_be_trained_are_not_guessed() -> None:
    content = Memory([84], [(0, 0, 50, 1.0), (0, 64, 20, 3.0)])
    content.values = {"p0": 1.0, "p1": 3.0, "p2": 3.0}
    with pytest.raises(SeveralFitsError):
        lay_trained([84], parameters(50, 20, 20), content)


def test_content_that_is_nobodys_fits_nothing() -> None:
    content = Memory([50], [(0, 0, 50, 4.0)])
    content.values = {"p0": 1.0}
    assert lay_trained([50], parameters(50), content) is None


def test_many_parameters_of_which_every_second_is_trained() -> None:
    sizes = [32] * 5000
    content = Memory([64 * 2499 + 32], [(0, 64 * n, 32, 2.0 * n) for n in range(2500)])
    content.values = {f"p{at}": float(at) for at in range(5000)}
    found = lay_trained([64 * 2499 + 32], parameters(*sizes), content)
    assert found is not None
    assert [f.parameter.name for f in found] == [f"p{at}" for at in range(0, 5000, 2)]
