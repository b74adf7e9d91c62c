"""Plans: whom they take from, what they fetch, and what they refuse."""

import numpy as np
import pytest

from scalai.core.errors import LayoutError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.plan import Holder, Planner, plan
from scalai.core.tensors.region import Box, whole

WEIGHT = Tensor("param/weight", (8, 4), "F32")


def holder(host: str, *boxes: Box, tensor: Tensor = WEIGHT, rank: int = 0) -> Holder:
    return Holder(host, Collection.of((tensor, box) for box in boxes), rank)


def rows(low: int, high: int) -> Box:
    return Box((low, 0), (high - low, 4))


def test_what_the_host_has_is_not_fetched() -> None:
    source = [holder("a", rows(0, 8)), holder("b", rows(2, 5))]
    made = plan(source, [holder("b", rows(0, 8))])
    assert made.bytes_local == 3 * 16
    assert made.bytes_remote == 5 * 16
    assert sorted(made.copies.source[made.copies.fetch < 0].tolist()) == [1]


def test_a_byte_crosses_to_a_host_once_for_all_its_ranks() -> None:
    source = [holder("a", rows(0, 8))]
    target = [holder("b", rows(0, 6), rank=0), holder("b", rows(4, 8), rank=1)]
    made = plan(source, [*target, holder("c", rows(0, 8), rank=2)])
    assert made.hosts == ("b", "c")
    assert made.bytes_remote == 2 * 8 * 16
    sizes = made.fetches.shape.prod(axis=1) * 4
    assert [sizes[made.fetches.host == host].sum() for host in (0, 1)] == [128, 128]


def test_replicas_are_asked_for_equal_shares() -> None:
    tensors = [Tensor(f"param/{number}", (16,), "F32") for number in range(12)]
    everything = Collection.of((tensor, whole(tensor.shape)) for tensor in tensors)
    source = [Holder(f"old-{number}", everything) for number in range(4)]
    target = [Holder(f"new-{number}", everything, number) for number in range(4)]
    made = plan(source, target)
    for host in range(4):
        served = np.bincount(made.fetches.source[made.fetches.host == host], minlength=4)
        assert served.tolist() == [3, 3, 3, 3]


def test_hosts_do_not_all_begin_at_the_same_replica() -> None:
    source = [holder(f"old-{number}", rows(0, 8)) for number in range(4)]
    target = [holder(f"new-{number}", rows(0, 8), rank=number) for number in range(8)]
    assert np.bincount(plan(source, target).fetches.source).tolist() == [2, 2, 2, 2]
    # Of hosts in two stages by turns, those of one stage have even positions only.
    even = target[::2]
    hosts = [one.host for one in target]
    assert np.bincount(plan(source, even, hosts).fetches.source).tolist() == [1, 1, 1, 1]


def test_equal_boxes_of_different_parameters_are_not_mixed_up() -> None:
    tensors = [Tensor(f"{kind}/{name}", (4,), "F32") for name in "xy" for kind in ("main", "v")]
    held = Collection.of((tensor, whole(tensor.shape)) for tensor in tensors)
    made = plan([Holder("a", held)], [Holder("a", held)])
    assert made.copies.source_row.tolist() == made.copies.target_row.tolist() == [0, 1, 2, 3]


def test_copies_are_ordered_by_target_and_row() -> None:
    tensors = [Tensor(f"{kind}/x", (4,), "F32") for kind in ("main", "exp_avg", "param")]
    held = Collection.of((tensor, whole(tensor.shape)) for tensor in tensors)
    parts = Collection.of((t, Box((low,), (2,))) for t in tensors for low in (2, 0))
    made = plan([Holder("a", held)], [Holder("b", parts, 0), Holder("a", held, 1)])
    order = list(zip(made.copies.target.tolist(), made.copies.target_row.tolist(), strict=True))
    assert order == sorted(order)


def test_hosts_that_want_the_same_share_the_geometry() -> None:
    planner = Planner([holder("a", rows(0, 4)), holder("b", rows(4, 8))])
    one = planner.plan_host("c", [holder("c", rows(1, 7))])
    two = planner.plan_host("a", [holder("a", rows(1, 7))])
    assert one.copies.offset.tolist() == two.copies.offset.tolist()
    assert (one.bytes_remote, two.bytes_remote) == (96, 48)


def test_nothing_wanted_is_an_empty_plan() -> None:
    for target in ([], [Holder("a", Collection.of([]))], [holder("a", rows(3, 3))]):
        made = plan([holder("a", rows(0, 8))], target)
        assert (len(made.copies), len(made.fetches), made.bytes_remote) == (0, 0, 0)
    assert len(plan([], []).copies) == 0


def test_a_hole_is_named_with_its_box_and_rank() -> None:
    with pytest.raises(LayoutError, match=r"nobody holds \[2:5,0:4\] of 'param/weight'.*rank 7"):
        plan(
            [holder("a", rows(0, 2)), holder("b", rows(5, 8))],
            [holder("a", rows(0, 1), rank=3), holder("b", rows(1, 8), rank=7)],
        )


def test_a_tensor_that_nobody_has_is_named() -> None:
    other = Tensor("param/other", (8, 4), "F32")
    with pytest.raises(LayoutError, match=r"nobody holds any part of 'param/other'.*rank 5"):
        plan([holder("a", rows(0, 8))], [holder("b", rows(0, 8), tensor=other, rank=5)])


@pytest.mark.parametrize(
    "other", [Tensor("param/weight", (8, 5), "F32"), Tensor("param/weight", (8, 4), "BF16")]
)
def test_another_shape_or_dtype_is_refused(other: Tensor) -> None:
    with pytest.raises(LayoutError, match="'param/weight' is held as F32"):
        plan([holder("a", rows(0, 8))], [holder("b", rows(0, 8), tensor=other)])
    with pytest.raises(LayoutError, match="on one holder"):
        plan(
            [holder("a", rows(0, 4)), holder("b", rows(4, 8), tensor=other)],
            [holder("b", rows(0, 8))],
        )


def test_a_box_outside_of_its_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"box \[4:9,0:4\] reaches outside"):
        plan([holder("a", rows(0, 8))], [holder("b", rows(4, 9))])
    with pytest.raises(LayoutError, match=r"box \[4:9,0:4\] reaches outside"):
        plan([holder("a", rows(4, 9))], [holder("b", rows(4, 8))])
