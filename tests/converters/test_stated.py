"""What a generation states of whole tensors proves its pieces, however they were fetched."""

from dataclasses import replace
from pathlib import Path

import pytest

from scalai.converters.checkpoint import REPORT, WriteOptions
from scalai.converters.consistency import verify
from scalai.converters.engine import Conversion
from scalai.converters.generation_layout import PARTS, StoredGeneration
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.core.errors import ProofError
from scalai.core.tensors.fingerprint import Committed
from scalai.launch import cli
from scalai.store.manifest import write_manifest
from support.checkpoints import LIMITS, write

NAME = "exp_avg/decoder.final_layernorm.weight"


def inspected(path: Path) -> int:
    """Return how ``scalai inspect --verify`` ends."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", "--verify", str(path)])
    assert isinstance(ended.value.code, int | None)
    return ended.value.code or 0


def test_a_tensor_that_is_not_what_was_committed_is_found(tmp_path: Path) -> None:
    found = dict(verify(write(tmp_path / "saved", "scalai"), 1))
    (tmp_path / "saved" / REPORT).unlink()
    stored = open_checkpoint(tmp_path / "saved").values.extra[PARTS]
    assert isinstance(stored, StoredGeneration)
    (part,), (place,) = stored.generation.hosts, stored.generation.directories
    assert place is not None
    write_manifest(place, replace(part, committed=Committed(("offline",), found)))
    assert verify(open_checkpoint(tmp_path / "saved"), 1) == found
    assert inspected(tmp_path / "saved") == 0

    wrong = Committed(("offline",), {**found, NAME: found[NAME] ^ 1})
    write_manifest(place, replace(part, committed=wrong))
    source = open_checkpoint(tmp_path / "saved")
    with pytest.raises(ProofError, match=f"1 tensors are not what .* was written: {NAME}"):
        verify(source, 1)
    assert inspected(tmp_path / "saved") == 4
    target = layout_named("torch_dist").lay_out(source, WriteOptions({"pp": 2}))
    with pytest.raises(ProofError, match=f"1 tensors are not what .* was written: {NAME}"):
        Conversion(source, target, tmp_path / "new", LIMITS).run()
    assert not (tmp_path / "new").exists()
