"""What a generation states of whole tensors proves its pieces, however they were fetched."""

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import LIMITS, write

from scalai.converters.checkpoint import REPORT, WriteOptions
from scalai.converters.engine import reshard
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.converters.verify import verify
from scalai.core.committed import Committed
from scalai.core.errors import ProofError
from scalai.launch.generation_report import open_generation
from scalai.launch.generation_report import verify as verify_generation
from scalai.store.manifest import write_manifest

NAME = "exp_avg/decoder.final_layernorm.weight"


def test_a_tensor_that_is_not_what_was_committed_is_found(tmp_path: Path) -> None:
    found = dict(verify(write(tmp_path / "saved", "scalai"), 1))
    (tmp_path / "saved" / REPORT).unlink()
    generation, _ = open_generation(tmp_path / "saved", None)
    (part,), (place,) = generation.hosts, generation.directories
    assert place is not None
    write_manifest(place, replace(part, committed=Committed(("offline",), found)))
    assert verify(open_checkpoint(tmp_path / "saved"), 1) == found
    verify_generation(open_generation(tmp_path / "saved", 1)[0])

    wrong = Committed(("offline",), {**found, NAME: found[NAME] ^ 1})
    write_manifest(place, replace(part, committed=wrong))
    source = open_checkpoint(tmp_path / "saved")
    with pytest.raises(ProofError, match=f"1 tensors are not what .* was written: {NAME}"):
        verify(source, 1)
    with pytest.raises(ProofError, match=f"1 tensors are not what was committed: {NAME}"):
        verify_generation(open_generation(tmp_path / "saved", 1)[0])
    target = layout_named("torch_dist").lay_out(source, WriteOptions({"pp": 2}))
    with pytest.raises(ProofError, match=f"1 tensors are not what .* was written: {NAME}"):
        reshard(source, target, tmp_path / "new", LIMITS)
    assert not (tmp_path / "new").exists()
