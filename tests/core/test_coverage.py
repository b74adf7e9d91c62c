"""What is said about a state that is not whole."""

import pytest

from scalai.core.collection import Collection, Tensor
from scalai.core.coverage import check_coverage, find_gaps
from scalai.core.errors import LayoutError
from scalai.core.region import Box, whole

WEIGHT = Tensor("param/weight", (4, 6), "F32")
STEP = Tensor("step/weight", (), "F32")


def test_a_whole_state_passes_with_replicas_and_0d_tensors() -> None:
    rows = [(WEIGHT, Box((0, 0), (4, 3))), (WEIGHT, Box((0, 3), (4, 3))), (STEP, Box((), ()))]
    check_coverage(Collection.of(rows * 3))
    check_coverage(Collection.of([]))


def test_a_hole_is_named_with_its_box() -> None:
    rows = [(WEIGHT, Box((0, 0), (4, 3))), (WEIGHT, Box((1, 3), (3, 3)))]
    with pytest.raises(LayoutError, match=r"'param/weight' \[4, 6\]: nobody holds \[0:1,3:6\]"):
        check_coverage(Collection.of(rows))


def test_a_tensor_of_the_table_without_rows_is_missing() -> None:
    held = Collection.of([(STEP, Box((), ())), (WEIGHT, Box((0, 0), (0, 6)))])
    assert find_gaps(held) == [(WEIGHT, whole(WEIGHT.shape))]


def test_a_tensor_without_elements_is_whole() -> None:
    empty = Tensor("param/empty", (0, 3), "F32")
    assert not find_gaps(Collection.of([(empty, whole(empty.shape))]))


def test_partial_overlaps_are_refused_unless_asked_for() -> None:
    rows = [(WEIGHT, whole((4, 6))), (WEIGHT, Box((1, 0), (1, 6)))]
    with pytest.raises(LayoutError, match=r"\[0:4,0:6\] overlaps \[1:2,0:6\]"):
        check_coverage(Collection.of(rows))
    check_coverage(Collection.of(rows), exact_partition=False)


def test_overlaps_do_not_hide_holes() -> None:
    rows = [(WEIGHT, Box((0, 0), (3, 6))), (WEIGHT, Box((1, 0), (1, 6)))]
    with pytest.raises(LayoutError, match=r"\[3:4,0:6\]"):
        check_coverage(Collection.of(rows), exact_partition=False)


def test_a_box_outside_of_its_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"box \[3:5,0:6\] reaches outside of 'param/weight'"):
        check_coverage(Collection.of([(WEIGHT, Box((3, 0), (2, 6)))]))


def test_long_lists_are_cut_short() -> None:
    tensors = [Tensor(f"param/{number}", (2,), "F32") for number in range(9)]
    with pytest.raises(LayoutError, match="and 4 more tensors"):
        check_coverage(Collection.of([(tensor, Box((0,), (1,))) for tensor in tensors]))
