"""What ranks have read into live memory is compared with what a conversion noted beside the
checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from scalai.converters.checkpoint import REPORT, REPORT_VERSION
from scalai.core.errors import ProofError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import VERSION, piece_fingerprint
from scalai.core.tensors.region import Box, Piece, whole
from scalai.patches.deepspeed.checkpoint.filling import Row, check_proofs, proof
from scalai.runtime.fingerprints import live_fingerprints
from scalai.runtime.live import Slot, held_rows, host_bits

WEIGHT = Tensor("param/w", (6, 4), "F32")
VALUES = torch.arange(24, dtype=torch.float32)


def half(rank: int) -> list[Row]:
    box = Box((3 * rank, 0), (3, 4))
    return held_rows([Slot(WEIGHT, VALUES[12 * rank : 12 * rank + 12], (Piece(box, 0, (4, 1)),))])


def report(directory: Path, change: int) -> None:
    bits = host_bits(VALUES.view(torch.int32).reshape(6, 4))
    value = piece_fingerprint(bits, whole(WEIGHT.shape), WEIGHT.shape) + change
    content = {
        "version": REPORT_VERSION,
        "fingerprint_version": VERSION,
        "fingerprints": {WEIGHT.name: f"{value:016x}"},
    }
    (directory / REPORT).write_text(json.dumps(content))


def test_recorded_fingerprints_are_compared(tmp_path: Path) -> None:
    source = Collection.of([(WEIGHT, whole(WEIGHT.shape))])
    for change in (0, 1):
        report(tmp_path, change)
        proofs = [proof(half(n), live_fingerprints(half(n))) for n in (0, 1)]
        if change:
            with pytest.raises(ProofError, match=r"1 tensors are not what .*scalai\.json says"):
                check_proofs(tmp_path, source, proofs)
        else:
            check_proofs(tmp_path, source, proofs)


def test_replicas_that_differ_are_found_where_nothing_is_recorded(tmp_path: Path) -> None:
    source = Collection.of([(WEIGHT, whole(WEIGHT.shape))])
    prints = live_fingerprints(half(0))
    proofs = [
        proof(half(0), prints), proof(half(0), prints + 1),
        proof(half(1), live_fingerprints(half(1))),
    ]  # fmt: skip
    with pytest.raises(ProofError, match=r"replicas of .* differ"):
        check_proofs(tmp_path, source, proofs)
