"""Tensors that a script registered are verified and kept in generations, and left out elsewhere."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scalai.converters.checkpoint import Checkpoint, CheckpointFile, FilePiece, place, unite
from scalai.converters.consistency import verify
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import whole
from support.checkpoints import state, write
from support.command import logged, run

AVERAGE = Tensor("user/average", (4,), "F32")


def registered(tensor: Tensor = AVERAGE) -> Checkpoint:
    """Return a state in memory with a tensor that has no parameter."""
    content = np.arange(4, dtype="<f4").tobytes()
    piece = FilePiece(tensor, whole(tensor.shape), "(more)", 0)
    more = place([piece], [CheckpointFile("(more)", len(content), content)])
    source = state()
    return replace(source, placed=unite([source.placed, more]))


def test_a_generation_with_a_registered_tensor_is_verified_and_keeps_it(tmp_path: Path) -> None:
    source = write(tmp_path / "saved", "scalai", registered())
    assert AVERAGE.name in verify(source, 1)
    again = write(tmp_path / "again", "scalai", source)
    assert verify(again, 1) == verify(source, 1)


def test_another_layout_goes_without_it_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "saved", "scalai", registered())
    whole_state = write(tmp_path / "other", "torch_dist")
    code, text = logged(
        capsys, "reshard", tmp_path / "saved", tmp_path / "new", "--to", "torch_dist", "--pp", 2
    )
    assert code == 0 and "left out user/average, which a script registered" in text, text
    assert run("verify", tmp_path / "new", whole_state.directory) == 0


def test_what_has_no_parameter_and_was_not_registered_is_refused(tmp_path: Path) -> None:
    stray = replace(AVERAGE, name="exp_avg/average")
    with pytest.raises(RefusedError, match="has exp_avg of 'average', and no such parameter"):
        write(tmp_path / "saved", "scalai", registered(stray))
