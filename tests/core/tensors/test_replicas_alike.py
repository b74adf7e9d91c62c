"""What ranks of one host say they hold alike is compared, and named where it is not the same."""

from collections.abc import Sequence

import pytest

from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import NOT_COMPARED, differing_replicas
from scalai.core.tensors.region import Box, whole

pytestmark = pytest.mark.fault

WEIGHT, CUT = Tensor("param/w", (4, 2), "F32"), Tensor("param/b", (4, 2), "F32")


def held(rank: int) -> Collection:
    """Return a whole tensor that both ranks have, and a half of another one."""
    half = Box((2 * rank, 0), (2, 2))
    return Collection.of([(WEIGHT, whole((4, 2))), (CUT, half)])


@pytest.mark.parametrize(
    ("prints", "found"),
    [
        ([(5, 7), (5, 8)], ""),  # halves are no replicas of each other
        ([(5, 7), (6, 8)], "'param/w' on ranks [0, 1]"),
        ([(NOT_COMPARED, 7), (6, 8)], ""),  # one that passes may change
        ([(0, 7), (6, 8)], "'param/w' on ranks [0, 1]"),  # zeros
        ([(5, 7), ()], ""),  # a rank that does not say
    ],
)
def test_replicas_on_one_host_are_compared(prints: Sequence[Sequence[int]], found: str) -> None:
    assert differing_replicas({0: held(0), 1: held(1)}, dict(enumerate(prints))) == found


def test_parameters_are_named_before_what_an_optimizer_keeps_of_them() -> None:
    moment = Tensor("exp_avg/w", (4, 2), "F32")
    same = Collection.of([(moment, whole((4, 2))), (WEIGHT, whole((4, 2)))])
    text = differing_replicas({0: same, 1: same}, {0: (1, 2), 1: (3, 4)})
    assert text == "'param/w' on ranks [0, 1], 'exp_avg/w' on ranks [0, 1]"


def test_ranks_that_differ_are_named_and_no_others() -> None:
    same = {rank: Collection.of([(WEIGHT, whole((4, 2)))]) for rank in range(4)}
    text = differing_replicas(same, {0: (3,), 1: (3,), 2: (9,), 3: (3,)})
    assert text == "'param/w' on ranks [0, 2]"
