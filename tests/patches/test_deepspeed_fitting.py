"""Which tensor of a checkpoint fills which one of an engine."""

import pytest

from scalai.converters.checkpoint import CheckpointFile, FilePiece, place
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Box
from scalai.patches.deepspeed.checkpoint.load_plan import TensorOrigin, fitted, origins, used

SHAPE = (4, 3)
FULL, ROUND, MASTER = (
    Tensor(name, SHAPE, dtype)
    for name, dtype in (("param/w", "F32"), ("param/w", "BF16"), ("main/w", "F32"))
)
MOMENT = Tensor("exp_avg/w", SHAPE, "F32")


def by_name(*tensors: Tensor) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in tensors}


@pytest.mark.parametrize(
    ("saved", "wanted", "found"),
    [
        ((FULL, MOMENT), (FULL, MOMENT), (TensorOrigin(FULL), TensorOrigin(MOMENT))),
        ((ROUND, MASTER), (ROUND, MASTER), (TensorOrigin(ROUND), TensorOrigin(MASTER))),
        ((FULL,), (ROUND, MASTER), (TensorOrigin(FULL, is_rounded=True), TensorOrigin(FULL))),
        ((ROUND, MASTER), (FULL,), (TensorOrigin(MASTER),)),
        (
            (ROUND, MASTER),
            (Tensor("param/w", SHAPE, "F16"),),
            (TensorOrigin(MASTER, is_rounded=True),),
        ),
        ((ROUND,), (MASTER, MOMENT), ()),
    ],
)
def test_weights_of_another_precision_come_from_fp32(
    saved: tuple[Tensor, ...], wanted: tuple[Tensor, ...], found: tuple[TensorOrigin, ...]
) -> None:
    assert tuple(origins(by_name(*saved), by_name(*wanted)).values()) == found


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (ROUND, FULL),
        (FULL, Tensor("param/w", (4, 4), "F32")),
        (MOMENT, Tensor("exp_avg/w", SHAPE, "BF16")),
    ],
)
def test_what_does_not_fit_is_refused_by_name(saved: Tensor, wanted: Tensor) -> None:
    with pytest.raises(RefusedError, match=wanted.name):
        origins(by_name(saved), by_name(wanted))


def test_pieces_keep_their_places_under_other_names() -> None:
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    pieces = [
        FilePiece(tensor, box, "file", 100 * number)
        for number, (tensor, box) in enumerate(
            (tensor, box) for box in halves for tensor in (MOMENT, FULL)
        )
    ]
    source = place(pieces, [CheckpointFile("file", 1000)])
    wanted = by_name(ROUND, MASTER)
    found = origins(by_name(FULL, MOMENT), wanted)
    placed = fitted(source, found, wanted)
    rows = [placed.collection.box(row) for row in range(len(placed.collection))]
    assert rows == [(tensor, box) for tensor in (ROUND, MASTER) for box in halves]
    assert placed.begin.tolist() == [100, 300, 100, 300]
    assert placed.rounded().tolist() == [True, True, False, False]
    assert used(source.collection, found).tolist() == [False, True]
