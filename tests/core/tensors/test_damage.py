"""Damage that was found is left until what is damaged is held whole again."""

import pytest

from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.coverage import DamagedPiece, still_damaged
from scalai.core.tensors.region import Box, whole

WEIGHT, STEP = Tensor("w", (6, 8), "F32"), Tensor("step", (), "F32")
HALF = DamagedPiece("w", Box((0, 4), (6, 4)), "w differs")
SCALAR = DamagedPiece("step", whole(()), "step differs")


@pytest.mark.parametrize(
    ("held", "left"),
    [
        ([], (HALF, SCALAR)),
        ([(WEIGHT, Box((0, 0), (6, 4))), (STEP, whole(()))], (HALF,)),
        ([(WEIGHT, Box((0, 4), (5, 4))), (STEP, whole(()))], (HALF,)),
        ([(WEIGHT, Box((0, 4), (6, 4)))], (SCALAR,)),
        ([(WEIGHT, whole((6, 8))), (STEP, whole(()))], ()),
        ([(WEIGHT, Box((3, 0), (3, 8))), (WEIGHT, Box((0, 2), (3, 6)))], (SCALAR,)),
    ],
)
def test_a_piece_is_damaged_until_all_of_it_is_held_however_it_is_cut(
    held: list[tuple[Tensor, Box]], left: tuple[DamagedPiece, ...]
) -> None:
    assert still_damaged([HALF, SCALAR], Collection.of(held)) == left


def test_of_what_has_no_elements_nothing_is_missing() -> None:
    assert still_damaged([DamagedPiece("e", whole((0,)), "e")], Collection.of([])) == ()
